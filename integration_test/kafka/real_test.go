package kafka_test

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	kafkago "github.com/segmentio/kafka-go"

	"github.com/postroom/postroom/broker"
	"github.com/postroom/postroom/broker/kafka"
	"github.com/postroom/postroom/internal/throwaway"
)

// startReal starts Apache Kafka, or fails.
func startReal(t testing.TB, cfg throwaway.KafkaConfig) *throwaway.Kafka {
	t.Helper()
	cfg.RequireReal = true
	k, err := throwaway.StartKafka(t.Context(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := k.Close(); err != nil {
			t.Error(err)
		}
	})
	t.Log(k.Source)
	return k
}

// realRig is Apache Kafka whose messages are small.
func realRig(t testing.TB) *rig {
	t.Helper()
	k := startReal(t, throwaway.KafkaConfig{Settings: map[string]string{"message.max.bytes": "100000"}})
	return &rig{t: t, brokers: k.Brokers, admin: newClient(t, k.Brokers)}
}

func TestConformanceApacheKafka(t *testing.T) {
	t.Parallel()
	conformance(t, realRig(t))
}

// A compacted topic takes no message without a key. Apache Kafka names those of a
// batch; they are refused, and the others and another topic's are stored.
func TestInvalidRecordsApacheKafka(t *testing.T) {
	t.Parallel()
	r := realRig(t)
	r.topic("compacted", 1, "cleanup.policy", "compact")
	r.topic("plain", 1)
	b := r.open()
	msgs := slices.Concat(messages("compacted", "a", 0, 0), messages("compacted", "", 1, 2), messages("compacted", "b", 0, 0),
		messages("plain", "", 1, 1))
	results := b.Publish(t.Context(), msgs)
	wantOutcomes(t, results, broker.Stored, broker.Refused, broker.Refused, broker.Stored, broker.Stored)
	if err := results[1].Err; !errors.Is(err, kafkago.InvalidRecord) || !strings.Contains(err.Error(), "[87]") {
		t.Errorf("the error is %v, want the broker's code 87", err)
	}
	if got := recordIDs(r.read("compacted", 2)); !slices.Equal(got, []string{"a-0", "b-0"}) {
		t.Errorf("the compacted topic holds %q", got)
	}
}

// BenchmarkPublish compares with kafka-go's Writer on the same Apache Kafka.
func BenchmarkPublish(b *testing.B) {
	r := realRig(b)
	r.topic("t", 4)
	bus := r.open(func(c *kafka.Config) { c.BatchBytes = 90_000 })
	transport := &kafkago.Transport{}
	defer transport.CloseIdleConnections()
	for _, n := range []int{100, 1000} {
		msgs := messages("t", "", 1, n)
		records := make([]kafkago.Message, n)
		for i := range msgs {
			msgs[i].Key, msgs[i].Payload = fmt.Sprint("key", i%50), make([]byte, 100)
			records[i] = kafkago.Message{
				Key: []byte(msgs[i].Key), Value: msgs[i].Payload,
				Headers: []kafkago.Header{{Key: "postroom-id", Value: []byte(msgs[i].ID)}},
			}
		}
		b.Run(fmt.Sprintf("postroom/%d", n), func(b *testing.B) {
			for b.Loop() {
				store(b, bus, msgs...)
			}
			b.ReportMetric(float64(b.N*n)/b.Elapsed().Seconds(), "messages/s")
		})
		w := &kafkago.Writer{
			Addr: kafkago.TCP(r.brokers...), Topic: "t", Transport: transport, Balancer: kafkago.Murmur2Balancer{},
			BatchTimeout: time.Millisecond, BatchBytes: 90_000, BatchSize: 1000, RequiredAcks: kafkago.RequireAll,
		}
		b.Run(fmt.Sprintf("writer/%d", n), func(b *testing.B) {
			for b.Loop() {
				if err := w.WriteMessages(b.Context(), records...); err != nil {
					b.Fatal(err)
				}
			}
			b.ReportMetric(float64(b.N*n)/b.Elapsed().Seconds(), "messages/s")
		})
		if err := w.Close(); err != nil {
			b.Fatal(err)
		}
	}
}
