package dispatcher_test

import (
	"bytes"
	"context"
	"fmt"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/postroom/postroom"
	"github.com/postroom/postroom/broker"
	"github.com/postroom/postroom/dispatcher"
	"github.com/postroom/postroom/internal/pgtest"
)

// counter is a publisher that only counts.
type counter struct{ n atomic.Int64 }

func (c *counter) Publish(_ context.Context, msgs []postroom.Message) []broker.Result {
	c.n.Add(int64(len(msgs)))
	results := make([]broker.Result, len(msgs))
	for i := range results {
		results[i].Outcome = broker.Stored
	}
	return results
}

func (c *counter) Close() error { return nil }

// fill writes n messages of 500 bytes with three headers on 10,000 keys.
func fill(b *testing.B, pool *pgxpool.Pool, n int) {
	payload := bytes.Repeat([]byte(`{"a":"0123456789"},`), 27)[:500]
	headers := []postroom.Header{
		{Name: "content-type", Value: []byte("application/json")},
		{Name: "tenant", Value: []byte("4711")},
		{Name: "schema", Value: []byte("order.v1")},
	}
	const batch = 2000
	for i := 0; i < n; i += batch {
		msgs := make([]postroom.Message, batch)
		for j := range msgs {
			msgs[j] = postroom.Message{
				Topic: "orders", Key: fmt.Sprint("k", (i+j)*7919%10_000), Payload: payload, Headers: headers,
			}
		}
		write(b, pool, msgs...)
	}
	if _, err := pool.Exec(b.Context(), `VACUUM ANALYZE postroom.outbox_messages`); err != nil {
		b.Fatal(err)
	}
	if _, err := pool.Exec(b.Context(), `CHECKPOINT`); err != nil {
		b.Fatal(err)
	}
}

// BenchmarkDrain publishes a backlog to a publisher that only counts: ours, and
// beside it a minimal hand-written loop that reads the same columns a
// page at a time and deletes each page. One op is one message; a run is one
// backlog, so use -benchtime=200000x.
func BenchmarkDrain(b *testing.B) {
	const backlog = 200_000
	for round := range 3 { // interleaved: compare within a round
		b.Run(fmt.Sprintf("postroom/%d", round), func(b *testing.B) {
			pool := pgtest.New(b)
			fill(b, pool, backlog)
			c := &counter{}
			b.ResetTimer()
			began := time.Now()
			stop := start(b, pool, c, dispatcher.Config{})
			eventually(b, time.Minute, func() string {
				if n := c.n.Load(); n < backlog {
					return fmt.Sprint(n)
				}
				return ""
			})
			b.ReportMetric(backlog/time.Since(began).Seconds(), "msg/s")
			b.StopTimer()
			stop()
		})
		b.Run(fmt.Sprintf("hand-written/%d", round), func(b *testing.B) {
			pool := pgtest.New(b)
			fill(b, pool, backlog)
			if _, err := pool.Exec(b.Context(), handTable); err != nil {
				b.Fatal(err)
			}
			if _, err := pool.Exec(b.Context(), `VACUUM ANALYZE hand`); err != nil {
				b.Fatal(err)
			}
			c := &counter{}
			b.ResetTimer()
			began := time.Now()
			if err := handWritten(b.Context(), pool, c); err != nil {
				b.Fatal(err)
			}
			if n := c.n.Load(); n != backlog {
				b.Fatalf("%d published", n)
			}
			b.ReportMetric(backlog/time.Since(began).Seconds(), "msg/s")
		})
	}
}

// handTable is the outbox that a service might have of its own.
const handTable = `
CREATE TABLE hand AS
SELECT id, message_id, topic, key, payload, header_names, header_values, operation, created_at
  FROM postroom.outbox_messages;
ALTER TABLE hand ADD PRIMARY KEY (id)`

// handWritten is the loop that a service might have of its own.
func handWritten(ctx context.Context, pool *pgxpool.Pool, pub broker.Publisher) error {
	for {
		rows, err := pool.Query(ctx, `
			SELECT id, message_id, topic, key, payload, header_names, header_values, operation, created_at
			  FROM hand ORDER BY id LIMIT 1000`)
		if err != nil {
			return err
		}
		var ids []int64
		var msgs []postroom.Message
		for rows.Next() {
			var id int64
			var key, operation *string
			var names []string
			var values [][]byte
			var m postroom.Message
			if err := rows.Scan(&id, &m.ID, &m.Topic, &key, &m.Payload, &names, &values, &operation, &m.Time); err != nil {
				return err
			}
			if key != nil {
				m.Key = *key
			}
			for i := range names {
				m.Headers = append(m.Headers, postroom.Header{Name: names[i], Value: values[i]})
			}
			ids, msgs = append(ids, id), append(msgs, m)
		}
		if rows.Err() != nil || len(msgs) == 0 {
			return rows.Err()
		}
		pub.Publish(ctx, msgs)
		if _, err := pool.Exec(ctx, `DELETE FROM hand WHERE id = ANY($1)`, ids); err != nil {
			return err
		}
	}
}
