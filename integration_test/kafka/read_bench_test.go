package kafka_test

import (
	"context"
	"fmt"
	"runtime"
	"slices"
	"testing"
	"time"

	kafkago "github.com/segmentio/kafka-go"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/postroom/postroom"
	"github.com/postroom/postroom/broker"
	"github.com/postroom/postroom/internal/throwaway"
)

const toRead = 200_000

// BenchmarkSubscribe compares reading a topic of 200,000 messages (four partitions,
// 500 bytes, three headers, no compression) from one Apache Kafka with kafka-go's
// Reader and franz-go, each as a new group that commits offsets. The time runs from
// the first message, so that joining does not count. The contenders take turns;
// reported are medians over the turns, and of the ratio its quartiles.
func BenchmarkSubscribe(b *testing.B) {
	k := startReal(b, throwaway.KafkaConfig{})
	r := &rig{t: b, brokers: k.Brokers, admin: newClient(b, k.Brokers)}
	r.topic("read", 4)
	bus := r.open()
	msgs := make([]postroom.Message, 1000)
	for i := range msgs {
		msgs[i] = postroom.Message{
			ID: postroom.NewID(), Topic: "read", Key: fmt.Sprint("key", i), Payload: make([]byte, 500),
			Headers: []postroom.Header{{Name: "a", Value: []byte("one")}, {Name: "b", Value: []byte("two")}},
		}
	}
	for range toRead / len(msgs) {
		store(b, bus, msgs...)
	}
	readers := []struct {
		name string
		read func(b *testing.B, r *rig, group string) time.Duration
	}{{"postroom", readByBus}, {"reader", readByReader}, {"franz", readByFranz}}
	spent := make([][]time.Duration, len(readers))
	for turn := 0; b.Loop(); turn++ {
		for i := range readers {
			i := (turn + i) % len(readers)
			runtime.GC()
			spent[i] = append(spent[i], readers[i].read(b, r, fmt.Sprint(readers[i].name, turn)))
		}
	}
	b.ReportMetric(0, "ns/op")
	for i, c := range readers {
		sorted := slices.Sorted(slices.Values(spent[i]))
		b.ReportMetric(toRead/sorted[len(sorted)/2].Seconds(), c.name+"-msg/s")
		if i == 0 {
			continue
		}
		ratios := make([]float64, len(spent[i]))
		for turn := range ratios {
			ratios[turn] = float64(spent[i][turn]) / float64(spent[0][turn])
		}
		slices.Sort(ratios)
		for _, q := range []int{25, 50, 75} {
			b.ReportMetric(ratios[len(ratios)*q/100], fmt.Sprintf("x-%s-p%d", c.name, q))
		}
	}
}

// A stopwatch measures from the first to the last message.
type stopwatch struct {
	n     int
	begun time.Time
	took  time.Duration
}

// saw reports whether it was the last one.
func (s *stopwatch) saw(n int) bool {
	if s.n == 0 {
		s.begun = time.Now()
	}
	if s.n += n; s.n < toRead {
		return false
	}
	s.took = time.Since(s.begun)
	return true
}

func readByBus(b *testing.B, r *rig, group string) time.Duration {
	b.Helper()
	ctx, cancel := context.WithCancel(b.Context())
	defer cancel()
	bus := r.open()
	var w stopwatch
	err := bus.Subscribe(ctx, broker.Subscription{Group: group, Topic: "read", MaxInFlight: 128}, func(d broker.Delivery) {
		if err := d.Ack(b.Context()); err != nil {
			b.Error(err)
		}
		if w.saw(1) {
			cancel()
		}
	})
	if err != nil {
		b.Fatal(err)
	}
	if err := bus.Close(); err != nil {
		b.Fatal(err)
	}
	return w.took
}

func readByReader(b *testing.B, r *rig, group string) time.Duration {
	b.Helper()
	rd := kafkago.NewReader(kafkago.ReaderConfig{
		Brokers: r.brokers, GroupID: group, Topic: "read", StartOffset: kafkago.FirstOffset,
		MinBytes: 1, MaxBytes: 1 << 20, CommitInterval: 100 * time.Millisecond,
	})
	var w stopwatch
	for {
		m, err := rd.FetchMessage(b.Context())
		if err != nil {
			b.Fatal(err)
		}
		if err := rd.CommitMessages(b.Context(), m); err != nil {
			b.Fatal(err)
		}
		if w.saw(1) {
			break
		}
	}
	if err := rd.Close(); err != nil {
		b.Fatal(err)
	}
	return w.took
}

func readByFranz(b *testing.B, r *rig, group string) time.Duration {
	b.Helper()
	cl, err := kgo.NewClient(kgo.SeedBrokers(r.brokers...), kgo.ConsumerGroup(group), kgo.ConsumeTopics("read"),
		kgo.ConsumeResetOffset(kgo.NewOffset().AtStart()), kgo.AutoCommitInterval(100*time.Millisecond))
	if err != nil {
		b.Fatal(err)
	}
	defer cl.Close()
	var w stopwatch
	for {
		f := cl.PollFetches(b.Context())
		if err := f.Err0(); err != nil {
			b.Fatal(err)
		}
		if n := f.NumRecords(); n > 0 && w.saw(n) {
			return w.took
		}
	}
}
