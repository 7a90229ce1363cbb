package outbox_test

import (
	"bytes"
	"fmt"
	"testing"

	"github.com/jackc/pgx/v5"

	"github.com/postroom/postroom"
	"github.com/postroom/postroom/internal/pgtest"
	"github.com/postroom/postroom/outbox"
)

func sample(n int) []postroom.Message {
	payload := bytes.Repeat([]byte(`{"a":"0123456789"},`), 27)[:500]
	msgs := make([]postroom.Message, n)
	for i := range msgs {
		msgs[i] = postroom.Message{
			Topic: "orders", Key: fmt.Sprint("customer-", i), Payload: payload,
			Headers: []postroom.Header{
				{Name: "content-type", Value: []byte("application/json")},
				{Name: "tenant", Value: []byte("4711")},
				{Name: "schema", Value: []byte("order.v1")},
			},
		}
	}
	return msgs
}

// BenchmarkWrite measures a Write of n messages in one transaction that is
// kept open, without its commit; msg/s counts messages. The threshold copyFrom
// follows from it: run it with the constant changed.
func BenchmarkWrite(b *testing.B) {
	pool := pgtest.New(b)
	var box outbox.Outbox
	for _, n := range []int{1, 10, 100, 200, 299, 300, 1000, 5000} {
		b.Run(fmt.Sprint(n), func(b *testing.B) {
			msgs := sample(n)
			tx, err := pool.Begin(b.Context())
			if err != nil {
				b.Fatal(err)
			}
			defer func() { _ = tx.Rollback(b.Context()) }()
			for b.Loop() {
				if err := box.Write(b.Context(), tx, msgs...); err != nil {
					b.Fatal(err)
				}
			}
			b.ReportMetric(float64(n*b.N)/b.Elapsed().Seconds(), "msg/s")
		})
	}
}

// BenchmarkTransaction compares, at 8 clients, a business transaction of one
// insert with the same and a Write, and the same and a second plain insert.
func BenchmarkTransaction(b *testing.B) {
	pool := pgtest.New(b)
	_, err := pool.Exec(b.Context(), `
		CREATE TABLE orders (id text PRIMARY KEY, body bytea);
		CREATE TABLE plain (id bigserial PRIMARY KEY, message_id text, topic text, key text, payload bytea,
		                    header_names text[], header_values bytea[])`)
	if err != nil {
		b.Fatal(err)
	}
	var box outbox.Outbox
	msg := sample(1)[0]
	for round := range 3 { // interleaved: compare within a round
		for _, way := range []string{"alone", "write", "plain"} {
			b.Run(fmt.Sprintf("%s/%d", way, round), func(b *testing.B) {
				b.SetParallelism(4) // 8 clients on 2 cores
				b.RunParallel(func(pb *testing.PB) {
					for pb.Next() {
						err := pgx.BeginFunc(b.Context(), pool, func(tx pgx.Tx) error {
							_, err := tx.Exec(b.Context(), `INSERT INTO orders VALUES ($1, $2)`, postroom.NewID(), msg.Payload)
							if err != nil {
								return err
							}
							switch way {
							case "write":
								return box.Write(b.Context(), tx, msg)
							case "plain":
								_, err = tx.Exec(b.Context(), `
									INSERT INTO plain (message_id, topic, key, payload, header_names, header_values)
									VALUES ($1, $2, $3, $4, $5, $6)`,
									postroom.NewID(), msg.Topic, msg.Key, msg.Payload,
									[]string{"content-type", "tenant", "schema"},
									[][]byte{[]byte("application/json"), []byte("4711"), []byte("order.v1")})
							}
							return err
						})
						if err != nil {
							b.Fatal(err)
						}
					}
				})
			})
		}
	}
}
