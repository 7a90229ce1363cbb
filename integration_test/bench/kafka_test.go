package bench

import (
	"context"
	"fmt"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	kafkago "github.com/segmentio/kafka-go"

	"github.com/postroom/postroom/broker/kafka"
	"github.com/postroom/postroom/internal/throwaway"
)

// BenchmarkOutboxToKafka publishes the same backlog as BenchmarkOutboxToJetStream
// to Apache Kafka. The hand-written loop reads with an unsafe cursor, gives a page
// of 1,000 to kafka-go's Writer (1 ms batch timeout), and deletes it when it is
// acknowledged.
func BenchmarkOutboxToKafka(b *testing.B) {
	k, err := throwaway.StartKafka(b.Context(), throwaway.KafkaConfig{RequireReal: true})
	if err != nil {
		b.Fatal(err)
	}
	defer k.Close()
	// It must see topics that are made anew; by default it looks every six seconds.
	watching := &kafkago.Transport{MetadataTTL: 100 * time.Millisecond}
	defer watching.CloseIdleConnections()
	client := &kafkago.Client{Addr: kafkago.TCP(k.Brokers...), Transport: watching}
	for _, partitions := range []int{4, 16} {
		b.Run(fmt.Sprintf("partitions=%d", partitions), func(b *testing.B) {
			rounds(b,
				contender{"postroom", func(b *testing.B) time.Duration { return byBus(b, k, client, partitions) }},
				contender{"hand-written", func(b *testing.B) time.Duration { return byWriter(b, k, partitions) }},
			)
		})
	}
}

func byBus(b *testing.B, k *throwaway.Kafka, client *kafkago.Client, partitions int) time.Duration {
	b.Helper()
	pool := filled(b)
	newTopic(b, k, partitions)
	bus, err := kafka.Open(b.Context(), k.Brokers, kafka.Config{})
	if err != nil {
		b.Fatal(err)
	}
	defer bus.Close()
	return drain(b, pool, bus, func() { waitForRecords(b, client, partitions) })
}

func byWriter(b *testing.B, k *throwaway.Kafka, partitions int) time.Duration {
	b.Helper()
	pool := filled(b)
	newTopic(b, k, partitions)
	handTable(b, pool)
	transport := &kafkago.Transport{}
	defer transport.CloseIdleConnections()
	w := &kafkago.Writer{
		Addr: kafkago.TCP(k.Brokers...), Topic: "orders", Transport: transport, Balancer: kafkago.Murmur2Balancer{},
		BatchTimeout: time.Millisecond, BatchSize: 1000, RequiredAcks: kafkago.RequireAll,
	}
	began := time.Now()
	if err := loopOverWriter(b.Context(), pool, w); err != nil {
		b.Fatal(err)
	}
	took := time.Since(began)
	if err := w.Close(); err != nil {
		b.Fatal(err)
	}
	return took
}

func newTopic(b *testing.B, k *throwaway.Kafka, partitions int) {
	b.Helper()
	_ = k.DeleteTopic(b.Context(), "orders") // there may be none
	if err := k.CreateTopic(b.Context(), "orders", partitions, nil); err != nil {
		b.Fatal(err)
	}
}

// waitForRecords returns when the topic holds the backlog.
func waitForRecords(b *testing.B, client *kafkago.Client, partitions int) {
	b.Helper()
	var ask []kafkago.OffsetRequest
	for p := range partitions {
		ask = append(ask, kafkago.LastOffsetOf(p))
	}
	tick := time.NewTicker(5 * time.Millisecond)
	defer tick.Stop()
	for {
		res, err := client.ListOffsets(b.Context(), &kafkago.ListOffsetsRequest{Topics: map[string][]kafkago.OffsetRequest{"orders": ask}})
		if err != nil {
			b.Fatal(err)
		}
		sum := int64(0)
		for _, p := range res.Topics["orders"] {
			sum += max(p.LastOffset, 0)
		}
		if sum >= backlog {
			return
		}
		<-tick.C
	}
}

func loopOverWriter(ctx context.Context, pool *pgxpool.Pool, w *kafkago.Writer) error {
	var last int64
	for {
		rows, err := pool.Query(ctx, `
			SELECT id, message_id, key, payload, header_names, header_values FROM hand WHERE id > $1 ORDER BY id LIMIT 1000`, last)
		if err != nil {
			return err
		}
		var ids []int64
		var msgs []kafkago.Message
		for rows.Next() {
			var id, key string
			var payload []byte
			var names []string
			var values [][]byte
			if err := rows.Scan(&last, &id, &key, &payload, &names, &values); err != nil {
				return err
			}
			m := kafkago.Message{Key: []byte(key), Value: payload, Headers: []kafkago.Header{{Key: "id", Value: []byte(id)}}}
			for i := range names {
				m.Headers = append(m.Headers, kafkago.Header{Key: names[i], Value: values[i]})
			}
			ids, msgs = append(ids, last), append(msgs, m)
		}
		if err := rows.Err(); err != nil || len(ids) == 0 {
			return err
		}
		if err := w.WriteMessages(ctx, msgs...); err != nil {
			return err
		}
		if _, err := pool.Exec(ctx, `DELETE FROM hand WHERE id = ANY($1)`, ids); err != nil {
			return err
		}
	}
}
