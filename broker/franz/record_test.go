package franz

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/postroom/postroom"
)

// B96: what a record is formed of is what is read from it, nil and empty apart.
func TestRecordKeepsTheMessage(t *testing.T) {
	t.Parallel()
	at := time.Date(2026, 1, 2, 3, 4, 5, 6000, time.UTC)
	for _, m := range []postroom.Message{
		{ID: "1", Topic: "t"},
		{ID: "1", Topic: "t", EmptyKey: true, Payload: []byte{}},
		{ID: "1", Topic: "t", Key: "k", Payload: []byte("p"), Time: at, Operation: "op"},
		{ID: "1", Topic: "t", Key: "\xff\x00", Headers: []postroom.Header{{Name: "a"}, {Name: "A", Value: []byte{}}, {Name: "a", Value: []byte("x")}}},
	} {
		var r kgo.Record
		fill(&r, &m)
		if got, want := fmt.Sprintf("%#v", message(&r)), fmt.Sprintf("%#v", m); got != want {
			t.Errorf("message(fill(m)) = %s, want %s", got, want)
		}
	}
}

// The receiver owns what it gets: the record is delivered again as it was.
func TestMessageSharesNothing(t *testing.T) {
	t.Parallel()
	r := kgo.Record{Value: []byte("payload"), Headers: []kgo.RecordHeader{{Key: "h", Value: []byte("value")}}}
	m := message(&r)
	clear(m.Payload)
	clear(m.Headers[0].Value)
	m.Headers[0].Name = "other"
	if m = message(&r); string(m.Payload) != "payload" || m.Headers[0].Name != "h" || string(m.Headers[0].Value) != "value" {
		t.Errorf("the second message is %v", m)
	}
}

func TestValidTopic(t *testing.T) {
	t.Parallel()
	for name, want := range map[string]bool{
		"orders": true, "a.b_c-D9": true, strings.Repeat("x", 249): true,
		"": false, ".": false, "..": false, "a b": false, "ü": false, "a/b": false, strings.Repeat("x", 250): false,
	} {
		if got := validTopic(name); got != want {
			t.Errorf("validTopic(%q) = %v", name, got)
		}
	}
}

// Keys have Java's partitions, an empty one too, and no key means in turns.
func TestPartitioner(t *testing.T) {
	t.Parallel()
	p := partitioner{}.ForTopic("t")
	if !p.RequiresConsistency(&kgo.Record{Key: []byte{}}) || p.RequiresConsistency(&kgo.Record{}) {
		t.Error("a key needs consistency, and only a key")
	}
	// As Java's Utils.toPositive(Utils.murmur2(key)) % 1000.
	java := map[string]int{"": 681, "21": 340, "foobar": 166, "abc": 107}
	for key, want := range java {
		if got := p.Partition(&kgo.Record{Key: []byte(key)}, 1000); got != want {
			t.Errorf("key %q has the partition %d, want %d", key, got, want)
		}
	}
	var got []int
	for range 5 {
		got = append(got, p.Partition(&kgo.Record{}, 5))
	}
	slices.Sort(got)
	if !slices.Equal(got, []int{0, 1, 2, 3, 4}) {
		t.Errorf("without a key: partitions %v", got)
	}
}
