package franz_test

import (
	"fmt"
	"testing"
	"time"

	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/postroom/postroom/broker/franz"
	"github.com/postroom/postroom/broker/kafka"
	"github.com/postroom/postroom/internal/throwaway"
)

// realRig is Apache Kafka, of the newest line.
func realRig(t testing.TB) *rig {
	t.Helper()
	return realRigOf(t, "")
}

func realRigOf(t testing.TB, version string) *rig {
	t.Helper()
	k, err := throwaway.StartKafka(t.Context(), throwaway.KafkaConfig{
		RequireReal: true, Version: version,
		Settings: map[string]string{"message.max.bytes": "100000", "group.min.session.timeout.ms": "1000"},
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := k.Close(); err != nil {
			t.Error(err)
		}
	})
	t.Log(k.Source)
	return &rig{t: t, brokers: k.Brokers, admin: newClient(t, k.Brokers), real: k}
}

func TestConformanceApacheKafka(t *testing.T) {
	conformance(t, realRig(t))
}

func TestConformanceOlderKafka(t *testing.T) {
	conformance(t, realRigOf(t, "3.9"))
}

// BenchmarkPublish compares with package kafka and with franz-go's ProduceSync on
// one client, on the same Apache Kafka.
func BenchmarkPublish(b *testing.B) {
	r := realRig(b)
	r.topic("t", 4)
	bus := r.open()
	other, err := kafka.Open(b.Context(), r.brokers, kafka.Config{BatchBytes: 90_000})
	if err != nil {
		b.Fatal(err)
	}
	defer func() { _ = other.Close() }()
	plain := newClient(b, r.brokers, kgo.ProducerBatchMaxBytes(90_000), kgo.ProducerBatchCompression(kgo.NoCompression()))
	for _, n := range []int{1, 100, 1000} {
		msgs := messages("t", "", 1, n)
		for i := range msgs {
			msgs[i].Key, msgs[i].Payload = fmt.Sprint("key", i%50), make([]byte, 100)
		}
		perSecond := func(b *testing.B) {
			b.ReportMetric(float64(b.N*n)/b.Elapsed().Seconds(), "messages/s")
		}
		b.Run(fmt.Sprintf("franz/%d", n), func(b *testing.B) {
			for b.Loop() {
				store(b, bus, msgs...)
			}
			perSecond(b)
		})
		b.Run(fmt.Sprintf("kafka/%d", n), func(b *testing.B) {
			for b.Loop() {
				store(b, other, msgs...)
			}
			perSecond(b)
		})
		b.Run(fmt.Sprintf("kgo/%d", n), func(b *testing.B) {
			for b.Loop() {
				records := make([]*kgo.Record, n)
				for i := range records {
					records[i] = &kgo.Record{Topic: "t", Key: []byte(msgs[i].Key), Value: msgs[i].Payload, Headers: []kgo.RecordHeader{{Key: "postroom-id", Value: []byte(msgs[i].ID)}}}
				}
				if err := plain.ProduceSync(b.Context(), records...).FirstErr(); err != nil {
					b.Fatal(err)
				}
			}
			perSecond(b)
		})
	}
}

// BenchmarkSubscribe compares with a bare franz-go client in a group, which
// commits nothing, on the same Apache Kafka.
func BenchmarkSubscribe(b *testing.B) {
	r := realRig(b)
	r.topic("t", 4)
	const n = 200_000
	msgs := messages("t", "", 1, 1000)
	for i := range msgs {
		msgs[i].Payload = make([]byte, 100)
	}
	bus := r.open()
	for range n / len(msgs) {
		store(b, bus, msgs...)
	}
	group := 0
	b.Run("franz", func(b *testing.B) {
		for b.Loop() {
			group++
			c := r.consumeAs(fmt.Sprint("ours ", group), "t", 1000, func(c *franz.Config) { c.SessionTimeout = 10 * time.Second })
			c.t = b
			c.take(n)
			c.stopped()
		}
		b.ReportMetric(float64(b.N*n)/b.Elapsed().Seconds(), "messages/s")
	})
	b.Run("kgo", func(b *testing.B) {
		for b.Loop() {
			group++
			cl := newClient(b, r.brokers, kgo.ConsumerGroup(fmt.Sprint("bare ", group)), kgo.ConsumeTopics("t"), kgo.FetchIsolationLevel(kgo.ReadCommitted()), kgo.DisableAutoCommit())
			for got := 0; got < n; {
				got += cl.PollFetches(b.Context()).NumRecords()
			}
			cl.Close()
		}
		b.ReportMetric(float64(b.N*n)/b.Elapsed().Seconds(), "messages/s")
	})
}
