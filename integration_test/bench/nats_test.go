// Package bench measures the whole path beside hand-written loops in one run.
package bench

import (
	"bytes"
	"context"
	"fmt"
	"log/slog"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	natsgo "github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/postroom/postroom"
	"github.com/postroom/postroom/broker"
	"github.com/postroom/postroom/broker/nats"
	"github.com/postroom/postroom/dispatcher"
	"github.com/postroom/postroom/internal/pgtest"
	"github.com/postroom/postroom/internal/throwaway"
	"github.com/postroom/postroom/outbox"
)

const backlog = 100_000

// BenchmarkOutboxToJetStream publishes a backlog of 500-byte messages with
// three headers on 10,000 keys to an embedded JetStream with a file store. The
// hand-written loop reads with an unsafe cursor, keeps 4096 publishes in flight
// in no order, and deletes each page when it is acknowledged.
func BenchmarkOutboxToJetStream(b *testing.B) {
	server, err := throwaway.StartNATS(b.Context(), throwaway.NATSConfig{})
	if err != nil {
		b.Fatal(err)
	}
	defer server.Close()
	nc, err := natsgo.Connect(server.URL)
	if err != nil {
		b.Fatal(err)
	}
	defer nc.Close()
	js, err := jetstream.New(nc, jetstream.WithPublishAsyncMaxPending(4096))
	if err != nil {
		b.Fatal(err)
	}
	rounds(b,
		contender{"postroom", func(b *testing.B) time.Duration {
			pool := filled(b)
			stream := newStream(b, js)
			bus, err := nats.Open(b.Context(), server.URL, nats.Config{Logger: slog.New(slog.DiscardHandler)})
			if err != nil {
				b.Fatal(err)
			}
			defer bus.Close()
			return drain(b, pool, bus, func() { waitFor(b, stream) })
		}},
		contender{"hand-written", func(b *testing.B) time.Duration {
			pool := filled(b)
			newStream(b, js)
			handTable(b, pool)
			began := time.Now()
			if err := handWritten(b.Context(), pool, js); err != nil {
				b.Fatal(err)
			}
			return time.Since(began)
		}},
	)
}

// drain runs a dispatcher until arrived returns, and returns how long that took.
func drain(b *testing.B, pool *pgxpool.Pool, bus broker.Publisher, arrived func()) time.Duration {
	b.Helper()
	d, err := dispatcher.New(pool, bus, dispatcher.Config{Logger: slog.New(slog.DiscardHandler)})
	if err != nil {
		b.Fatal(err)
	}
	ctx, cancel := context.WithCancel(b.Context())
	defer cancel()
	done := make(chan error, 1)
	began := time.Now()
	go func() { done <- d.Run(ctx) }()
	arrived()
	took := time.Since(began)
	cancel()
	if err := <-done; err != nil {
		b.Fatal(err)
	}
	return took
}

// handTable copies the backlog into the table of a hand-written loop.
func handTable(b *testing.B, pool *pgxpool.Pool) {
	b.Helper()
	for _, sql := range []string{
		`CREATE TABLE hand AS
		 SELECT id, message_id, topic, key, payload, header_names, header_values FROM postroom.outbox_messages`,
		`ALTER TABLE hand ADD PRIMARY KEY (id)`, `VACUUM ANALYZE hand`, `CHECKPOINT`,
	} {
		if _, err := pool.Exec(b.Context(), sql); err != nil {
			b.Fatal(err)
		}
	}
}

func filled(b *testing.B) *pgxpool.Pool {
	b.Helper()
	pool := pgtest.New(b)
	payload := bytes.Repeat([]byte(`{"a":"0123456789"},`), 27)[:500]
	headers := []postroom.Header{
		{Name: "content-type", Value: []byte("application/json")},
		{Name: "tenant", Value: []byte("4711")},
		{Name: "schema", Value: []byte("order.v1")},
	}
	var box outbox.Outbox
	for i := 0; i < backlog; i += 2000 {
		msgs := make([]postroom.Message, 2000)
		for j := range msgs {
			msgs[j] = postroom.Message{
				Topic: "orders", Key: fmt.Sprint("k", (i+j)*7919%10_000), Payload: payload, Headers: headers,
			}
		}
		err := pgx.BeginFunc(b.Context(), pool, func(tx pgx.Tx) error { return box.Write(b.Context(), tx, msgs...) })
		if err != nil {
			b.Fatal(err)
		}
	}
	for _, sql := range []string{`VACUUM ANALYZE postroom.outbox_messages`, `CHECKPOINT`} {
		if _, err := pool.Exec(b.Context(), sql); err != nil {
			b.Fatal(err)
		}
	}
	return pool
}

func newStream(b *testing.B, js jetstream.JetStream) jetstream.Stream {
	b.Helper()
	_ = js.DeleteStream(b.Context(), "orders") // there may be none
	s, err := js.CreateStream(b.Context(), jetstream.StreamConfig{Name: "orders", Subjects: []string{"orders"}})
	if err != nil {
		b.Fatal(err)
	}
	return s
}

// waitFor returns when the stream holds the backlog.
func waitFor(b *testing.B, s jetstream.Stream) {
	b.Helper()
	tick := time.NewTicker(5 * time.Millisecond)
	defer tick.Stop()
	for {
		info, err := s.Info(b.Context())
		if err != nil {
			b.Fatal(err)
		}
		if info.State.Msgs >= backlog {
			return
		}
		<-tick.C
	}
}

type page struct {
	ids  []int64
	acks []jetstream.PubAckFuture
}

// handWritten reads and publishes in one goroutine, and waits and deletes, up
// to four pages behind, in another.
func handWritten(ctx context.Context, pool *pgxpool.Pool, js jetstream.JetStream) error {
	pages := make(chan page, 4)
	deleted := make(chan error, 1)
	go func() {
		for p := range pages {
			for _, a := range p.acks {
				select {
				case <-a.Ok():
				case err := <-a.Err():
					deleted <- err
					return
				}
			}
			if _, err := pool.Exec(ctx, `DELETE FROM hand WHERE id = ANY($1)`, p.ids); err != nil {
				deleted <- err
				return
			}
		}
		deleted <- nil
	}()
	var last int64
	for {
		rows, err := pool.Query(ctx, `
			SELECT id, message_id, topic, key, payload, header_names, header_values
			  FROM hand WHERE id > $1 ORDER BY id LIMIT 1000`, last)
		if err != nil {
			return err
		}
		var p page
		for rows.Next() {
			var id, topic, key string
			var payload []byte
			var names []string
			var values [][]byte
			if err := rows.Scan(&last, &id, &topic, &key, &payload, &names, &values); err != nil {
				return err
			}
			m := natsgo.NewMsg(topic)
			m.Data = payload
			m.Header.Set("Nats-Msg-Id", id)
			m.Header.Set("key", key)
			for i := range names {
				m.Header.Add(names[i], string(values[i]))
			}
			a, err := js.PublishMsgAsync(m)
			if err != nil {
				return err
			}
			p.ids, p.acks = append(p.ids, last), append(p.acks, a)
		}
		if err := rows.Err(); err != nil {
			return err
		}
		if len(p.ids) == 0 {
			close(pages)
			return <-deleted
		}
		pages <- p
	}
}
