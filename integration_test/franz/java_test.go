package franz_test

import (
	"bytes"
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/postroom/postroom"
	"github.com/postroom/postroom/internal/throwaway"
)

// java checks that Kafka's own client reads what we write, the reverse, and that
// both put keys on the same partitions.
func java(t *testing.T, r *rig) {
	r.t = t
	j, err := throwaway.JavaClient(t.Context(), r.brokers, nil)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := j.Close(); err != nil {
			t.Error(err)
		}
	})
	r.topic("ours", 7)
	r.topic("theirs", 7)
	at := time.Date(2026, 1, 2, 3, 4, 5, 6000, time.UTC)
	msgs := []postroom.Message{
		{ID: "null", Topic: "ours", Key: "k"},
		{ID: "empty", Topic: "ours", EmptyKey: true, Payload: []byte{}},
		{ID: "keyless", Topic: "ours", Payload: []byte{0, 0xff}, Time: at, Operation: "op"},
		{ID: "headers", Topic: "ours", Key: "ü", Headers: []postroom.Header{
			{Name: "a", Value: []byte{0}}, {Name: "B"}, {Name: "a", Value: []byte{}},
		}},
	}
	for i := range 40 {
		msgs = append(msgs, postroom.Message{ID: fmt.Sprint(i), Topic: "ours", Key: fmt.Sprint("key ", i), Payload: []byte("p")})
	}
	begun := time.Now().Truncate(time.Millisecond)
	store(t, r.open(), msgs...)
	read, err := j.Consume(t.Context(), "ours")
	if err != nil {
		t.Fatal(err)
	}
	ours := map[string]throwaway.JavaRecord{}
	for _, rec := range read {
		ours[string(rec.Headers[0].Value)] = rec
	}
	for _, m := range msgs {
		wantJava(t, ours[m.ID], m, begun)
	}

	var sent []throwaway.JavaRecord
	for _, m := range msgs {
		rec := ours[m.ID]
		rec.Topic, rec.Timestamp = "theirs", 1_000_000_000_123
		sent = append(sent, rec)
	}
	if _, err := j.Abort(t.Context(), throwaway.JavaRecord{Topic: "theirs", Key: []byte("k"), Value: []byte("no")}); err != nil {
		t.Fatal(err)
	}
	placed, err := j.Produce(t.Context(), sent...)
	if err != nil {
		t.Fatal(err)
	}
	for i, rec := range placed {
		if was := ours[msgs[i].ID]; was.Key != nil && rec.Partition != was.Partition {
			t.Errorf("message %s: Java puts its key on partition %d, we on %d", msgs[i].ID, rec.Partition, was.Partition)
		}
	}
	c := r.consumeAs("g", "theirs", 10)
	came := map[string]postroom.Message{}
	for range msgs {
		d := c.next()
		came[d.Message().ID] = d.Message()
		c.ack(d)
	}
	c.stopped()
	for _, m := range msgs {
		m.Topic = "theirs"
		if got, want := fmt.Sprintf("%#v", came[m.ID]), fmt.Sprintf("%#v", m); got != want {
			t.Errorf("came %s, want %s", got, want)
		}
	}
}

// wantJava compares a record as Java has it with the message it is of.
func wantJava(t *testing.T, rec throwaway.JavaRecord, m postroom.Message, begun time.Time) {
	t.Helper()
	same := func(a, b []byte) bool { return (a == nil) == (b == nil) && bytes.Equal(a, b) }
	want := []throwaway.JavaHeader{{Name: "postroom-id", Value: []byte(m.ID)}}
	if !m.Time.IsZero() {
		want = append(want, throwaway.JavaHeader{Name: "postroom-time", Value: []byte(m.Time.Format("2006-01-02T15:04:05.000000Z"))})
	}
	if m.Operation != "" {
		want = append(want, throwaway.JavaHeader{Name: "postroom-operation", Value: []byte(m.Operation)})
	}
	for _, h := range m.Headers {
		want = append(want, throwaway.JavaHeader{Name: h.Name, Value: h.Value})
	}
	if !slices.EqualFunc(rec.Headers, want, func(a, b throwaway.JavaHeader) bool { return a.Name == b.Name && same(a.Value, b.Value) }) {
		t.Errorf("message %s has the headers %v, want %v", m.ID, rec.Headers, want)
	}
	var key []byte
	if m.HasKey() {
		key = []byte(m.Key)
	}
	if !same(rec.Key, key) || !same(rec.Value, m.Payload) {
		t.Errorf("message %s has the key %q and the value %q", m.ID, rec.Key, rec.Value)
	}
	if at := time.UnixMilli(rec.Timestamp); at.Before(begun) || at.After(time.Now()) {
		t.Errorf("message %s has the timestamp %v, want the time of publishing", m.ID, at)
	}
}
