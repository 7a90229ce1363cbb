package kafka_test

import (
	"fmt"
	"testing"
	"time"

	kafkago "github.com/segmentio/kafka-go"

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
