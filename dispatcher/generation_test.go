package dispatcher_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/postroom/postroom"
	"github.com/postroom/postroom/dispatcher"
	"github.com/postroom/postroom/internal/pgtest"
	"github.com/postroom/postroom/migrations"
	"github.com/postroom/postroom/outbox"
)

func setLanes(t testing.TB, pool *pgxpool.Pool, n int) {
	t.Helper()
	if err := migrations.SetLanes(t.Context(), pool, n, migrations.Config{}); err != nil {
		t.Fatal(err)
	}
}

func one[T any](t testing.TB, pool *pgxpool.Pool, sql string, args ...any) (v T) {
	t.Helper()
	if err := pool.QueryRow(t.Context(), sql, args...).Scan(&v); err != nil {
		t.Fatalf("%s: %v", sql, err)
	}
	return v
}

// The number of lanes goes up and down while writers write and two dispatchers
// publish: nothing is lost, repeated or put out of order, and no dispatcher holds
// lanes of two generations.
func TestSetLanesWhileRunning(t *testing.T) {
	pgtest.Each(t, func(t *testing.T, s *pgtest.Server) {
		pool := s.New(t)
		r := &recorder{}
		cfg := dispatcher.Config{PageSize: 20, PublishTimeout: 2 * time.Second, Lease: 6 * time.Second}
		members := []member{join(t, pool, r, cfg), join(t, pool, r, cfg)}
		waitShares(t, members, 2, 2)
		writing, cancel := context.WithCancel(t.Context())
		var wg sync.WaitGroup
		written := 0
		wg.Go(func() {
			for writing.Err() == nil {
				write(t, pool, numbered("orders", 30, written, 30)...)
				written += 30
				for writing.Err() == nil && len(r.messages()) < written-600 {
					select {
					case <-time.After(time.Millisecond):
					case <-writing.Done():
					}
				}
			}
		})
		for _, c := range []struct {
			lanes int
			want  []int
		}{{7, []int{4, 3}}, {7, []int{4, 3}}, {1, []int{1, 0}}, {5, []int{3, 2}}} {
			setLanes(t, pool, c.lanes)
			waitShares(t, members, c.want...)
		}
		for _, n := range []int{2, 6, 3} { // the next before the former has begun
			setLanes(t, pool, n)
		}
		eventually(t, time.Minute, func() string {
			if n := one[int](t, pool, `SELECT count(*) FROM postroom.outbox_lanes WHERE drained_at IS NULL`); n != 3 {
				return fmt.Sprint(n, " lanes are not drained, want those of the newest generation")
			}
			return ""
		})
		waitShares(t, members, 2, 1)
		cancel()
		wg.Wait()
		waitStored(t, r, written)
		if p := keyOrder(r); p != "" {
			t.Error(p)
		}
		if n := len(r.messages()); n != written {
			t.Errorf("%d publishes of %d messages", n, written)
		}
	})
}

// The new generation does not start before all of the former is settled, those
// messages included whose transactions ended shortly before the change.
func TestNewGenerationWaitsForTheFormer(t *testing.T) {
	pool := pgtest.New(t)
	gate := make(chan struct{})
	r := &recorder{before: func(context.Context, []postroom.Message) { <-gate }}
	start(t, pool, r, dispatcher.Config{PageSize: 5})
	write(t, pool, numbered("orders", 20, 0, 100)...)
	setLanes(t, pool, 9)
	write(t, pool, numbered("orders", 20, 100, 100)...)
	again := &recorder{}
	second := join(t, pool, again, dispatcher.Config{}) // it has nothing to drain
	eventually(t, time.Minute, func() string {
		if n := one[int](t, pool, `SELECT count(*) FROM postroom.outbox_dispatchers`); n != 2 {
			return "the second has not joined"
		}
		return ""
	})
	for range 200 {
		if n := one[int](t, pool, `SELECT count(*) FROM postroom.outbox_lanes WHERE generation = 2 AND owner IS NOT NULL`); n > 0 {
			t.Fatal("a lane of the new generation has an owner before the former is settled")
		}
	}
	close(gate)
	all := func() *recorder {
		return &recorder{stored: append(r.messages(), again.messages()...)}
	}
	eventually(t, time.Minute, func() string {
		if n := len(all().firsts()); n != 200 {
			return fmt.Sprint(n, " are published")
		}
		return ""
	})
	second.stop()
	if n := one[int](t, pool, `SELECT count(*) FROM postroom.outbox_lanes WHERE generation = 1 AND drained_at IS NULL`); n > 0 {
		t.Errorf("%d lanes of the former generation are not drained", n)
	}
}

// A transaction that has written to the outbox keeps the change waiting, and the
// change does not keep others waiting for longer than it says.
func TestSetLanesWaitsForWriters(t *testing.T) {
	pool := pgtest.New(t)
	r := &recorder{}
	start(t, pool, r, dispatcher.Config{})
	var box outbox.Outbox
	tx, err := pool.Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = tx.Rollback(context.Background()) }()
	if err := box.Write(t.Context(), tx, numbered("orders", 1, 0, 1)...); err != nil {
		t.Fatal(err)
	}
	short, cancel := context.WithTimeout(t.Context(), time.Second)
	defer cancel()
	err = migrations.SetLanes(short, pool, 8, migrations.Config{})
	if err == nil || short.Err() == nil {
		t.Fatalf("SetLanes beside an open writer: %v", err)
	}
	done := make(chan error, 1)
	go func() { done <- migrations.SetLanes(t.Context(), pool, 8, migrations.Config{}) }()
	for i := range 40 {
		began := time.Now()
		write(t, pool, postroom.Message{ID: fmt.Sprint("other", i), Topic: "orders", Key: "other"})
		if d := time.Since(began); d > 4*time.Second {
			t.Errorf("a writer waited for %v", d)
		}
	}
	waitStored(t, r, 40)
	select {
	case err := <-done:
		t.Fatalf("SetLanes returned %v beside an open writer", err)
	default:
	}
	if err := tx.Commit(t.Context()); err != nil {
		t.Fatal(err)
	}
	if err := <-done; err != nil {
		t.Fatal(err)
	}
	write(t, pool, numbered("orders", 1, 1, 1)...)
	waitStored(t, r, 42)
	if p := keyOrder(&recorder{stored: onlyTopicKey(r.messages(), "k0")}); p != "" {
		t.Error(p)
	}
}

func onlyTopicKey(msgs []postroom.Message, key string) (of []postroom.Message) {
	for _, m := range msgs {
		if m.Key == key {
			of = append(of, m)
		}
	}
	return of
}

// Whatever the isolation level and the shape of its statements, a transaction
// that began before the change and writes after it writes to the new lanes.
func TestWritersTakeTheNewLanes(t *testing.T) {
	pgtest.Each(t, func(t *testing.T, s *pgtest.Server) {
		pool := s.New(t)
		const insert = `INSERT INTO postroom.outbox_messages (hash, message_id, topic, key) VALUES (5, $1, 'orders', 'k')`
		writers := map[string]string{
			"plain": insert,
			"cte": `WITH made AS (INSERT INTO postroom.outbox_messages (hash, message_id, topic, key)
				VALUES (5, $1, 'orders', 'k') RETURNING id) SELECT id FROM made`,
			"select": `INSERT INTO postroom.outbox_messages (hash, message_id, topic, key)
				SELECT 5, $1, 'orders', 'k' FROM (SELECT count(*) FROM pg_class) c`,
		}
		type open struct {
			tx  pgx.Tx
			sql string
			id  string
		}
		var all []open
		for _, level := range []pgx.TxIsoLevel{pgx.ReadCommitted, pgx.RepeatableRead, pgx.Serializable} {
			for name, sql := range writers {
				tx, err := pool.BeginTx(t.Context(), pgx.TxOptions{IsoLevel: level})
				if err != nil {
					t.Fatal(err)
				}
				defer func() { _ = tx.Rollback(context.Background()) }()
				// A snapshot, an id, a plan from before, and a lock given back.
				if _, err := tx.Exec(t.Context(), `SELECT count(*), pg_current_xact_id() FROM pg_class`); err != nil {
					t.Fatal(err)
				}
				err = pgx.BeginFunc(t.Context(), tx, func(tx pgx.Tx) error {
					if _, err := tx.Exec(t.Context(), sql, "undone"); err != nil {
						return err
					}
					return context.Canceled
				})
				if !errors.Is(err, context.Canceled) {
					t.Fatal(err)
				}
				all = append(all, open{tx, sql, string(level) + " " + name})
			}
		}
		setLanes(t, pool, 3)
		for _, o := range all {
			if _, err := o.tx.Exec(t.Context(), o.sql, o.id); err != nil {
				t.Fatal(err)
			}
			if err := o.tx.Commit(t.Context()); err != nil {
				t.Fatal(err)
			}
			if lane := one[int](t, pool, `SELECT lane FROM postroom.outbox_messages WHERE message_id = $1`, o.id); lane != 2002 {
				t.Errorf("%s: lane %d, want 2002", o.id, lane)
			}
		}
		r := &recorder{}
		start(t, pool, r, dispatcher.Config{})
		waitStored(t, r, len(all))
	})
}

// What is set aside when the number of lanes changes goes with its key, whose
// later messages wait behind it.
func TestParkedMessagesChangeLanes(t *testing.T) {
	pool := pgtest.New(t)
	r := &recorder{answer: refuse("m3", "m4")}
	d := join(t, pool, r, dispatcher.Config{})
	write(t, pool, numbered("orders", 6, 0, 12)...)
	waitStored(t, r, 8)
	setLanes(t, pool, 64)
	write(t, pool, numbered("orders", 6, 12, 12)...)
	waitStored(t, r, 8+8)
	eventually(t, time.Minute, func() string {
		if n := len(parked(t, pool)); n != 8 {
			return fmt.Sprint(n, " messages are parked, want m3, m4 and those behind them")
		}
		return ""
	})
	d.stop()
	if n := one[int](t, pool, `SELECT count(*) FROM postroom.outbox_parked WHERE lane <> 2000 + hash % 64`); n > 0 {
		t.Errorf("%d parked messages are not in the lanes of their keys", n)
	}
}

// Lanes that are drained are kept as long as their messages, then forgotten with
// their cursors.
func TestDrainedLanesAreForgotten(t *testing.T) {
	pool := pgtest.New(t)
	r := &recorder{}
	d := join(t, pool, r, dispatcher.Config{})
	write(t, pool, numbered("orders", 20, 0, 100)...)
	waitStored(t, r, 100)
	setLanes(t, pool, 2)
	waitShares(t, []member{d}, 2)
	d.stop()
	if n := one[int](t, pool, `SELECT count(*) FROM postroom.outbox_lanes WHERE generation = 1`); n != 4 {
		t.Errorf("%d lanes are kept beside their messages, want 4", n)
	}
	if _, err := pool.Exec(t.Context(), `DELETE FROM postroom.outbox_messages WHERE lane <> 1003`); err != nil {
		t.Fatal(err)
	}
	join(t, pool, r, dispatcher.Config{})
	eventually(t, time.Minute, func() string {
		lanes := one[string](t, pool, `SELECT string_agg(lane::text, ' ' ORDER BY lane) FROM postroom.outbox_lanes`)
		cursors := one[string](t, pool, `SELECT string_agg(DISTINCT lane::text, ' ') FROM postroom.outbox_cursors`)
		if lanes != "1003 2000 2001" || !strings.HasPrefix(cursors, "1003") {
			return fmt.Sprintf("lanes %s, cursors of %s", lanes, cursors)
		}
		return ""
	})
}
