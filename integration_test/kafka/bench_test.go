package kafka_test

import (
	"context"
	"fmt"
	"runtime"
	"slices"
	"testing"
	"time"

	kafkago "github.com/segmentio/kafka-go"
	"github.com/segmentio/kafka-go/protocol"
	"github.com/segmentio/kafka-go/protocol/metadata"
	"github.com/segmentio/kafka-go/protocol/produce"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/postroom/postroom"
	"github.com/postroom/postroom/internal/throwaway"
)

// BenchmarkPublish compares calls of one size with kafka-go's Writer, with
// franz-go, and with the bare request that the calls cannot beat, on one Apache
// Kafka: one caller, 500 bytes a message, no compression, acknowledged by all. The
// contenders take turns within one run, so that other work on the machine strikes
// all of them; reported are medians over the turns, and of the ratio its quartiles.
func BenchmarkPublish(b *testing.B) {
	k := startReal(b, throwaway.KafkaConfig{})
	r := &rig{t: b, brokers: k.Brokers, admin: newClient(b, k.Brokers)}
	for _, partitions := range []int32{1, 4} {
		topic := fmt.Sprint("t", partitions)
		r.topic(topic, partitions)
		for _, n := range []int{1, 100, 1000} {
			b.Run(fmt.Sprintf("partitions=%d/messages=%d", partitions, n), func(b *testing.B) {
				race(b, r, topic, partitions, n)
			})
		}
	}
}

// A contender publishes what every contender publishes.
type contender struct {
	name    string
	publish func()
	spent   []time.Duration // of each turn
}

func race(b *testing.B, r *rig, topic string, partitions int32, n int) {
	msgs := messages(topic, "", 1, n)
	for i := range msgs {
		msgs[i].Key, msgs[i].Payload = fmt.Sprint("key", i%50), make([]byte, 500)
	}
	contenders := []*contender{
		{name: "postroom", publish: byBus(b, r, msgs)},
		{name: "writer", publish: byWriter(b, r, msgs)},
		{name: "franz", publish: byFranz(b, r, msgs)},
		{name: "bare", publish: byRequest(b, r, msgs, partitions)},
	}
	for _, c := range contenders {
		c.publish()
	}
	const calls = 20 // of one turn
	for turn := 0; b.Loop(); turn++ {
		for i := range contenders {
			c := contenders[(turn+i)%len(contenders)] // nobody always follows the same one
			runtime.GC()                              // nor pays for another's garbage
			begun := time.Now()
			for range calls {
				c.publish()
			}
			c.spent = append(c.spent, time.Since(begun))
		}
	}
	b.ReportMetric(0, "ns/op")
	for _, c := range contenders {
		spent := slices.Sorted(slices.Values(c.spent))
		b.ReportMetric(float64(calls*n)/spent[len(spent)/2].Seconds(), c.name+"-msg/s")
		if c == contenders[0] {
			continue
		}
		ratios := make([]float64, len(c.spent))
		for i := range ratios {
			ratios[i] = float64(c.spent[i]) / float64(contenders[0].spent[i])
		}
		slices.Sort(ratios)
		for _, q := range []int{25, 50, 75} {
			b.ReportMetric(ratios[len(ratios)*q/100], fmt.Sprintf("x-%s-p%d", c.name, q))
		}
	}
}

func byBus(b *testing.B, r *rig, msgs []postroom.Message) func() {
	bus := r.open()
	return func() { store(b, bus, msgs...) }
}

func byWriter(b *testing.B, r *rig, msgs []postroom.Message) func() {
	transport := &kafkago.Transport{}
	w := &kafkago.Writer{
		Addr: kafkago.TCP(r.brokers...), Topic: msgs[0].Topic, Transport: transport, Balancer: kafkago.Murmur2Balancer{},
		BatchTimeout: time.Millisecond, BatchSize: 1000, RequiredAcks: kafkago.RequireAll,
	}
	b.Cleanup(func() {
		if err := w.Close(); err != nil {
			b.Error(err)
		}
		transport.CloseIdleConnections()
	})
	records := make([]kafkago.Message, len(msgs))
	for i, m := range msgs {
		records[i] = kafkago.Message{
			Key: []byte(m.Key), Value: m.Payload, Headers: []kafkago.Header{{Key: "postroom-id", Value: []byte(m.ID)}},
		}
	}
	return func() {
		if err := w.WriteMessages(b.Context(), records...); err != nil {
			b.Fatal(err)
		}
	}
}

func byFranz(b *testing.B, r *rig, msgs []postroom.Message) func() {
	cl := newClient(b, r.brokers, kgo.ProducerBatchCompression(kgo.NoCompression()), kgo.RequiredAcks(kgo.AllISRAcks()))
	return func() {
		records := make([]*kgo.Record, len(msgs)) // the client writes into them
		for i := range msgs {
			m := &msgs[i]
			records[i] = &kgo.Record{
				Topic: m.Topic, Key: []byte(m.Key), Value: m.Payload,
				Headers: []kgo.RecordHeader{{Key: "postroom-id", Value: []byte(m.ID)}},
			}
		}
		if err := cl.ProduceSync(b.Context(), records...).FirstErr(); err != nil {
			b.Fatal(err)
		}
	}
}

// byRequest sends one request with one batch for each partition, which is chosen
// beforehand.
func byRequest(b *testing.B, r *rig, msgs []postroom.Message, partitions int32) func() {
	transport := &kafkago.Transport{}
	b.Cleanup(transport.CloseIdleConnections)
	addr := kafkago.TCP(r.brokers...)
	send := func(req protocol.Message) protocol.Message {
		ctx, cancel := context.WithTimeout(b.Context(), 10*time.Second)
		defer cancel()
		m, err := transport.RoundTrip(ctx, addr, req)
		if err != nil {
			b.Fatal(err)
		}
		return m
	}
	send(&metadata.Request{})
	java := kgo.StickyKeyPartitioner(nil).ForTopic("")
	sets := make([][]*postroom.Message, partitions)
	for i := range msgs {
		p := java.Partition(&kgo.Record{Key: []byte(msgs[i].Key)}, int(partitions))
		sets[p] = append(sets[p], &msgs[i])
	}
	return func() {
		t := produce.RequestTopic{Topic: msgs[0].Topic}
		for p, set := range sets {
			if len(set) == 0 {
				continue
			}
			records := make([]protocol.Record, len(set))
			for i, m := range set {
				records[i] = protocol.Record{
					Key: protocol.NewBytes([]byte(m.Key)), Value: protocol.NewBytes(m.Payload),
					Headers: []protocol.Header{{Key: "postroom-id", Value: []byte(m.ID)}},
				}
			}
			t.Partitions = append(t.Partitions, produce.RequestPartition{
				Partition: int32(p), RecordSet: protocol.RecordSet{Records: protocol.NewRecordReader(records...)},
			})
		}
		res := send(&produce.Request{Acks: -1, Timeout: 9000, Topics: []produce.RequestTopic{t}}).(*produce.Response)
		for _, p := range res.Topics[0].Partitions {
			if p.ErrorCode != 0 {
				b.Fatal(kafkago.Error(p.ErrorCode))
			}
		}
	}
}
