package throwaway_test

import (
	"bytes"
	"context"
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/postroom/postroom/internal/throwaway"
)

func javaClient(t *testing.T, k *throwaway.Kafka) *throwaway.Java {
	t.Helper()
	j, err := throwaway.JavaClient(t.Context(), k.Brokers, nil)
	must(t, err)
	t.Cleanup(func() {
		if err := j.Close(); err != nil {
			t.Error(err)
		}
	})
	return j
}

func TestJavaClient(t *testing.T) {
	k := startKafka(t, throwaway.KafkaConfig{RequireReal: true})
	for _, topic := range []string{"java", "go", "tx"} {
		must(t, k.CreateTopic(t.Context(), topic, 3, nil))
	}
	j := javaClient(t, k)
	sent := []throwaway.JavaRecord{
		{Topic: "java", Key: []byte("k\x00\xff"), Value: []byte("v\xfe"), Timestamp: 1_000_000_000_123, Headers: []throwaway.JavaHeader{
			{Name: "h", Value: []byte{0, 1}}, {Name: "h", Value: []byte("again")}, {Name: "null"}, {Name: "empty", Value: []byte{}},
		}},
		{Topic: "java", Key: []byte("k\x00\xff")},
		{Topic: "java", Key: []byte{}, Value: []byte{}},
		{Topic: "java", Value: []byte("no key")},
	}

	t.Run("Java to Go and Java", func(t *testing.T) {
		places, err := j.Produce(t.Context(), sent...)
		must(t, err)
		if places[0].Timestamp != sent[0].Timestamp || places[1].Timestamp == 0 {
			t.Errorf("timestamps %d and %d", places[0].Timestamp, places[1].Timestamp)
		}
		if places[0].Partition != places[1].Partition || places[1].Offset != places[0].Offset+1 {
			t.Errorf("of one key stand %+v and %+v", places[0], places[1])
		}
		var read []throwaway.JavaRecord
		for _, r := range consume(t, k.Brokers, "java", len(sent)) {
			read = append(read, fromGo(r))
		}
		wantRecords(t, read, places)
		read, err = j.Consume(t.Context(), "java")
		must(t, err)
		wantRecords(t, read, places)
	})
	t.Run("Go to Java", func(t *testing.T) {
		client := kafkaClient(t, k.Brokers)
		var want []throwaway.JavaRecord
		for _, r := range sent {
			record := &kgo.Record{Topic: "go", Key: r.Key, Value: r.Value}
			for _, h := range r.Headers {
				record.Headers = append(record.Headers, kgo.RecordHeader{Key: h.Name, Value: h.Value})
			}
			must(t, client.ProduceSync(t.Context(), record).FirstErr())
			want = append(want, fromGo(record))
		}
		read, err := j.Consume(t.Context(), "go")
		must(t, err)
		wantRecords(t, read, want)
	})
	t.Run("transactions", func(t *testing.T) {
		committed, err := j.Commit(t.Context(), throwaway.JavaRecord{Topic: "tx", Key: []byte("c"), Value: []byte("yes")})
		must(t, err)
		aborted, err := j.Abort(t.Context(), throwaway.JavaRecord{Topic: "tx", Key: []byte("a"), Value: []byte("no")})
		must(t, err)
		read, err := j.Consume(t.Context(), "tx")
		must(t, err)
		wantRecords(t, read, committed)
		read, err = j.ConsumeUncommitted(t.Context(), "tx")
		must(t, err)
		wantRecords(t, read, append(committed, aborted...))
	})
	t.Run("errors", func(t *testing.T) {
		if _, err := j.Produce(t.Context(), throwaway.JavaRecord{Topic: "not a name"}); err == nil || !strings.Contains(err.Error(), "InvalidTopic") {
			t.Errorf("a topic that cannot be: %v", err)
		}
		_, err := j.Produce(t.Context(), throwaway.JavaRecord{Topic: "java"}) // it lives on
		must(t, err)
		must(t, k.Pause())
		ctx, cancel := context.WithTimeout(t.Context(), 200*time.Millisecond)
		defer cancel()
		if _, err := j.Consume(ctx, "java"); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("a server that does not answer: %v", err)
		}
		must(t, k.Resume())
		if _, err := j.Consume(t.Context(), "java"); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("after the end by a context: %v", err)
		}
		must(t, j.Close())
	})
}

func fromGo(r *kgo.Record) throwaway.JavaRecord {
	to := throwaway.JavaRecord{
		Topic: r.Topic, Partition: r.Partition, Offset: r.Offset,
		Key: r.Key, Value: r.Value, Timestamp: r.Timestamp.UnixMilli(),
	}
	for _, h := range r.Headers {
		to.Headers = append(to.Headers, throwaway.JavaHeader{Name: h.Key, Value: h.Value})
	}
	return to
}

// wantRecords compares without regard to the order of partitions.
func wantRecords(t *testing.T, got, want []throwaway.JavaRecord) {
	t.Helper()
	same := func(a, b []byte) bool { return (a == nil) == (b == nil) && bytes.Equal(a, b) }
	if len(got) != len(want) {
		t.Errorf("%d records, want %d: %+v", len(got), len(want), got)
	}
next:
	for _, w := range want {
		for _, g := range got {
			if g.Partition != w.Partition || g.Offset != w.Offset {
				continue
			}
			ok := g.Topic == w.Topic && same(g.Key, w.Key) && same(g.Value, w.Value) &&
				g.Timestamp == w.Timestamp && len(g.Headers) == len(w.Headers)
			for i := 0; ok && i < len(w.Headers); i++ {
				ok = g.Headers[i].Name == w.Headers[i].Name && same(g.Headers[i].Value, w.Headers[i].Value)
			}
			if !ok {
				t.Errorf("got %+v, want %+v", g, w)
			}
			continue next
		}
		t.Errorf("missing: %+v", w)
	}
}
