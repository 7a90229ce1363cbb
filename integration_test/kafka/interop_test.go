package kafka_test

import (
	"bytes"
	"fmt"
	"math/rand/v2"
	"strings"
	"testing"
	"time"

	kafkago "github.com/segmentio/kafka-go"

	"github.com/postroom/postroom"
	"github.com/postroom/postroom/broker/kafka"
	"github.com/postroom/postroom/internal/throwaway"
)

func startJava(t testing.TB, brokers []string) *throwaway.Java {
	t.Helper()
	// An idempotent producer of 4.4.0 that has written to one topic may never send
	// what is for another that was just made (seen here, with 12 partitions).
	j, err := throwaway.JavaClient(t.Context(), brokers, map[string]string{"enable.idempotence": "false"})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := j.Close(); err != nil {
			t.Error(err)
		}
	})
	return j
}

// What we publish, Kafka's own Java client and franz-go read as it was written,
// with any compression; and keys stand where the Java client puts them.
func TestInteroperability(t *testing.T) {
	t.Parallel()
	r := realRig(t)
	java := startJava(t, r.brokers)
	t.Run("contents", func(t *testing.T) { contentsReadByOthers(t, r, java) })
	t.Run("contents of others", func(t *testing.T) { othersContentsAreRead(t, r, java) })
	for _, partitions := range []int32{7, 64} {
		t.Run(fmt.Sprintf("keys on %d partitions", partitions), func(t *testing.T) { keysLieAsByJava(t, r, java, partitions) })
	}
}

func contentsReadByOthers(t *testing.T, r *rig, java *throwaway.Java) {
	written := time.Date(2026, 2, 3, 4, 5, 6, 789_012_000, time.FixedZone("", 7200))
	bare := []postroom.Message{
		{Key: "k", Payload: []byte("v")},
		{Key: "k"},
		{Payload: []byte{}},
		{EmptyKey: true, Payload: []byte{0, 0xff, 0xfe}},
		{Key: "\x00\x80\xff", Payload: bytes.Repeat([]byte{0xab}, 70_000)},
		{Key: "timed", Time: written, Operation: "an operation"},
		{Key: "headers", Headers: []postroom.Header{
			{Name: "b", Value: []byte("1")},
			{Name: "a", Value: []byte("2")},
			{Name: "b", Value: []byte("3")},
			{Name: "B", Value: []byte("4")},
			{Name: "null"},
			{Name: "empty", Value: []byte{}},
			{Name: "binary", Value: []byte{0, 0xff, '\n'}},
			{Name: "größe", Value: []byte("ü")},
			{Name: "", Value: []byte("no name")},
			{Name: "long", Value: make([]byte, 10_000)},
		}},
	}
	for _, k := range []kafkago.Compression{0, kafkago.Gzip, kafkago.Snappy, kafkago.Lz4, kafkago.Zstd} {
		topic := fmt.Sprint("contents-", int(k))
		r.topic(topic, 1)
		var msgs []postroom.Message
		var want []throwaway.JavaRecord
		for i, m := range bare {
			m.ID, m.Topic = fmt.Sprint("id-", i), topic
			msgs = append(msgs, m)
			want = append(want, javaRecord(m, i))
		}
		begun := time.Now().UnixMilli()
		store(t, r.open(func(c *kafka.Config) { c.Compression = k }), msgs...)
		ended := time.Now().UnixMilli()
		byJava, err := java.Consume(t.Context(), topic)
		if err != nil {
			t.Fatal(err)
		}
		var byFranz []throwaway.JavaRecord
		for _, rec := range r.read(topic, len(msgs)) {
			got := throwaway.JavaRecord{
				Topic: rec.Topic, Partition: rec.Partition, Offset: rec.Offset, Key: rec.Key, Value: rec.Value, Timestamp: rec.Timestamp.UnixMilli(),
			}
			for _, h := range rec.Headers {
				got.Headers = append(got.Headers, throwaway.JavaHeader{Name: h.Key, Value: h.Value})
			}
			byFranz = append(byFranz, got)
		}
		for reader, got := range map[string][]throwaway.JavaRecord{"Java": byJava, "franz-go": byFranz} {
			if len(got) != len(want) {
				t.Fatalf("%s reads %d records of %v, want %d", reader, len(got), k, len(want))
			}
			for i, g := range got {
				if g.Timestamp < begun || g.Timestamp > ended {
					t.Errorf("%s reads the time %d, which is not between %d and %d", reader, g.Timestamp, begun, ended)
				}
				g.Timestamp = 0
				if g, w := text(g), text(want[i]); g != w {
					t.Errorf("%s reads with %v:\n%.300s\nwant\n%.300s", reader, k, g, w)
				}
			}
		}
	}
}

// What Kafka's Java client wrote, our subscriber delivers. TestB62B96ReadsWhatIsThere
// does the same for franz-go.
func othersContentsAreRead(t *testing.T, r *rig, java *throwaway.Java) {
	const topic = "by-java"
	r.topic(topic, 1)
	var records []throwaway.JavaRecord
	for _, key := range [][]byte{nil, {}, []byte("k\xff")} {
		for _, value := range [][]byte{nil, {}, []byte("v\x00")} {
			records = append(records, throwaway.JavaRecord{Topic: topic, Key: key, Value: value, Headers: []throwaway.JavaHeader{
				{Name: "b", Value: []byte("1")},
				{Name: "a", Value: nil},
				{Name: "b", Value: []byte{}},
				{Name: "B", Value: []byte{0, 0xff}},
				{Name: "postroom-id", Value: fmt.Append(nil, "id ", len(records))},
				{Name: "postroom-time", Value: []byte("2026-02-03T02:05:06.789012Z")},
			}})
		}
	}
	if _, err := java.Produce(t.Context(), records...); err != nil {
		t.Fatal(err)
	}
	c := consume(t, r.open(), topic, 20)
	msgs := c.take(len(records))
	c.stop()
	for i, m := range msgs {
		rec := records[i]
		want := postroom.Message{
			ID: fmt.Sprint("id ", i), Topic: topic, Key: string(rec.Key), EmptyKey: rec.Key != nil && len(rec.Key) == 0, Payload: rec.Value,
			Time: time.Date(2026, 2, 3, 2, 5, 6, 789_012_000, time.UTC),
		}
		for _, h := range rec.Headers[:4] {
			want.Headers = append(want.Headers, postroom.Header{Name: h.Name, Value: h.Value})
		}
		if got, want := fmt.Sprintf("%#v", m), fmt.Sprintf("%#v", want); got != want {
			t.Errorf("record %d:\n%s\nwant\n%s", i, got, want)
		}
	}
}

// javaRecord is what a message should come as.
func javaRecord(m postroom.Message, offset int) throwaway.JavaRecord {
	r := throwaway.JavaRecord{Topic: m.Topic, Offset: int64(offset), Value: m.Payload}
	if m.HasKey() {
		r.Key = []byte(m.Key)
	}
	r.Headers = append(r.Headers, throwaway.JavaHeader{Name: "postroom-id", Value: []byte(m.ID)})
	if !m.Time.IsZero() {
		r.Headers = append(r.Headers, throwaway.JavaHeader{Name: "postroom-time", Value: []byte("2026-02-03T02:05:06.789012Z")})
	}
	if m.Operation != "" {
		r.Headers = append(r.Headers, throwaway.JavaHeader{Name: "postroom-operation", Value: []byte(m.Operation)})
	}
	for _, h := range m.Headers {
		r.Headers = append(r.Headers, throwaway.JavaHeader{Name: h.Name, Value: h.Value})
	}
	return r
}

// text tells null from empty.
func text(r throwaway.JavaRecord) string { return fmt.Sprintf("%#v", r) }

func keysLieAsByJava(t *testing.T, r *rig, java *throwaway.Java, partitions int32) {
	ours, theirs := fmt.Sprint("ours-", partitions), fmt.Sprint("theirs-", partitions)
	r.topic(ours, partitions)
	r.topic(theirs, partitions)
	keys := []string{
		"", "a", "ab", "abc", "abcd", "abcde", "0", "-1", "21", "foobar", "größe", "日本語", "\x00", "\x7f", "\x80", "\xff", "\xff\xff\xff\xff",
		strings.Repeat("\x80", 3), strings.Repeat("\xff", 7), strings.Repeat("long", 5000),
	}
	random := rand.New(rand.NewPCG(1, 2))
	for range 500 {
		key := make([]byte, 1+random.IntN(20))
		for i := range key {
			key[i] = byte(random.Uint32())
		}
		keys = append(keys, string(key))
	}
	var msgs []postroom.Message
	var records []throwaway.JavaRecord
	for i, key := range keys {
		msgs = append(msgs, postroom.Message{ID: fmt.Sprint(i), Topic: ours, Key: key, EmptyKey: key == ""})
		records = append(records, throwaway.JavaRecord{Topic: theirs, Key: []byte(key)})
	}
	store(t, r.open(), msgs...)
	places, err := java.Produce(t.Context(), records...)
	if err != nil {
		t.Fatal(err)
	}
	on := make(map[string]int32)
	for _, rec := range r.read(ours, len(keys)) {
		on[string(rec.Key)] = rec.Partition
	}
	for i, key := range keys {
		if on[key] != places[i].Partition {
			t.Errorf("key %.20q is on partition %d, and on %d by Java", key, on[key], places[i].Partition)
		}
	}
}
