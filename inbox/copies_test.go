package inbox_test

import (
	"context"
	"errors"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/postroom/postroom"
	"github.com/postroom/postroom/inbox"
	"github.com/postroom/postroom/internal/pgtest"
)

var levels = []pgx.TxIsoLevel{pgx.ReadCommitted, pgx.RepeatableRead, pgx.Serializable}

func TestCase_B33_TwoCopiesAtOnce(t *testing.T) {
	type answer struct {
		result inbox.Result
		err    error
	}
	no := errors.New("no")
	variants := []struct {
		name          string
		end           func(t *testing.T, pool *pgxpool.Pool, pid string) error // of the first copy
		first, second inbox.Result
	}{
		{"first commits", func(*testing.T, *pgxpool.Pool, string) error { return nil }, inbox.Handled, inbox.Duplicate},
		{"first rolls back", func(*testing.T, *pgxpool.Pool, string) error { return no }, inbox.Failed, inbox.Handled},
		{"first dies", func(t *testing.T, pool *pgxpool.Pool, pid string) error {
			exec(t, pool, `SELECT pg_terminate_backend($1::int)`, pid)
			return no
		}, inbox.Failed, inbox.Handled},
	}
	pgtest.Each(t, func(t *testing.T, s *pgtest.Server) {
		for _, level := range levels {
			for _, v := range variants {
				t.Run(string(level)+"/"+v.name, func(t *testing.T) {
					pool := newPool(t, s)
					instance := withPool(t, pool, func(c *pgxpool.Config) { c.MaxConns = 2 })
					cfg := inbox.Config{IsoLevel: level, LockTimeout: patience, Logger: testLogger(t)}
					var runs atomic.Int32
					entered, leave := make(chan string, 1), make(chan struct{})
					handler := func(ctx context.Context, tx pgx.Tx, m postroom.Message) error {
						if err := effect(ctx, tx, m); err != nil {
							return err
						}
						if runs.Add(1) > 1 {
							return nil
						}
						var pid string
						if err := tx.QueryRow(ctx, `SELECT pg_backend_pid()::text`).Scan(&pid); err != nil {
							return err
						}
						entered <- pid
						<-leave
						return v.end(t, pool, pid)
					}
					handle := func(p *pgxpool.Pool) chan answer {
						c := make(chan answer, 1)
						go func() {
							r, err := inbox.Handle(t.Context(), p, "billing", message("m1"), handler, cfg)
							c <- answer{r, err}
						}()
						return c
					}
					first := handle(pool)
					receive(t, "the first copy is handled", entered)
					second := handle(instance)
					eventually(t, "the second copy waits", func() bool {
						return len(query(t, pool, `SELECT pid::text FROM pg_stat_activity
							WHERE datname = current_database() AND wait_event_type = 'Lock'`)) == 1
					})
					close(leave)
					if a := receive(t, "the first copy ends", first); a.result != v.first {
						// A lost connection is repeated, and may be quicker than the second.
						if v.name != "first dies" || a.err != nil {
							t.Errorf("first copy: %v, %v, want %v", a.result, a.err, v.first)
						}
					}
					if a := receive(t, "the second copy ends", second); a.err != nil || a.result != v.second && v.name != "first dies" {
						t.Errorf("second copy: %v, %v, want %v", a.result, a.err, v.second)
					}
					wantStrings(t, "effects", effects(t, pool), "m1")
				})
			}
		}
	})
}

// A copy waits for a bounded time and is tried again, without an error storm.
func TestCase_B33_BoundedWaitInAConsumer(t *testing.T) {
	pool := newPool(t, pgtest.First(t))
	entered, leave := make(chan struct{}), make(chan struct{})
	first := make(chan error, 1)
	go func() {
		_, err := handleOne(t, pool, "m1", func(ctx context.Context, tx pgx.Tx, m postroom.Message) error {
			close(entered)
			<-leave
			return effect(ctx, tx, m)
		}, inbox.Config{})
		first <- err
	}()
	receive(t, "the first copy is handled", entered)
	bus, rec := newBus()
	publish(t, bus, message("m1"), message("m2"))
	l := &logs{}
	instance := withPool(t, pool, func(*pgxpool.Config) {})
	start(t, instance, rec, effect, inbox.Config{LockTimeout: 5 * time.Millisecond, Logger: l.logger(), MaxAttempts: 1})
	eventually(t, "several waits", func() bool { return strings.Count(l.String(), "55P03") >= 8 })
	wantStrings(t, "settled", rec.all(), "ack m2")
	close(leave)
	if err := receive(t, "the first copy ends", first); err != nil {
		t.Error(err)
	}
	eventually(t, "the copy is acknowledged", func() bool { return rec.count("ack") == 2 })
	if n := strings.Count(l.String(), "level=WARN"); n > 5 {
		t.Errorf("%d warnings", n)
	}
	wantStrings(t, "processed", outcomes(t, pool), "billing m1 handled", "billing m2 handled")
}

// Fifty copies, a pool of ten, and a handler that needs a connection more.
func TestCase_B33_NoStarvation(t *testing.T) {
	for _, level := range levels {
		t.Run(string(level), func(t *testing.T) {
			pool := newPool(t, pgtest.First(t))
			small := withPool(t, pool, func(c *pgxpool.Config) { c.MaxConns = 10 })
			var all sync.WaitGroup
			var handled, duplicate, transient atomic.Int32
			begin := time.Now()
			for range 50 {
				all.Go(func() {
					r, err := handleOne(t, small, "m1", func(ctx context.Context, tx pgx.Tx, m postroom.Message) error {
						var n int
						if err := small.QueryRow(ctx, `SELECT 1`).Scan(&n); err != nil {
							return err
						}
						return effect(ctx, tx, m)
					}, inbox.Config{IsoLevel: level})
					switch {
					case r == inbox.Handled:
						handled.Add(1)
					case r == inbox.Duplicate:
						duplicate.Add(1)
					case errors.Is(err, inbox.ErrTransient):
						transient.Add(1)
					default:
						t.Errorf("Handle = %v, %v", r, err)
					}
				})
			}
			all.Wait()
			if handled.Load() != 1 || duplicate.Load() != 49 || transient.Load() != 0 {
				t.Errorf("%d handled, %d duplicates, %d to be tried again, want 1, 49 and none",
					handled.Load(), duplicate.Load(), transient.Load())
			}
			if d := time.Since(begin); d > 10*time.Second {
				t.Errorf("took %v", d)
			}
			wantStrings(t, "effects", effects(t, pool), "m1")
		})
	}
}

// Fifty copies at one consumer take turns before they take a connection.
func TestCopiesAtOneConsumer(t *testing.T) {
	pool := newPool(t, pgtest.First(t))
	bus, rec := newBus()
	for range 50 {
		publish(t, bus, message("m1"))
	}
	l := &logs{}
	start(t, pool, rec, effect, inbox.Config{Logger: l.logger()})
	eventually(t, "50 acks", func() bool { return rec.count("ack") == 50 })
	wantStrings(t, "effects", effects(t, pool), "m1")
	if strings.Contains(l.String(), "failed") {
		t.Errorf("log = %s", l.String())
	}
}

func TestCase_B34_DuplicateIsQuiet(t *testing.T) {
	pgtest.Each(t, func(t *testing.T, s *pgtest.Server) {
		base := newPool(t, s)
		errs := &errorTracer{}
		pool := withPool(t, base, func(c *pgxpool.Config) { c.ConnConfig.Tracer = errs; c.MaxConns = 1 })
		mustHandle(t, pool, "m1", effect, inbox.Handled)
		for range 3 {
			mustHandle(t, pool, "m1", func(context.Context, pgx.Tx, postroom.Message) error {
				t.Error("the handler ran for a duplicate")
				return nil
			}, inbox.Duplicate)
		}
		// The connection, the only one, is as good as new.
		exec(t, pool, insertEffect, "metrics")
		mustHandle(t, pool, "m2", effect, inbox.Handled)
		if n := errs.n.Load(); n != 0 {
			t.Errorf("%d statements failed, last: %v", n, errs.last.Load())
		}
		if errs.ok.Load() == 0 {
			t.Error("the tracer has seen nothing")
		}
	})
}

// errorTracer counts the statements that fail, which is what the server logs.
type errorTracer struct {
	ok, n atomic.Int32
	last  atomic.Value
}

func (e *errorTracer) see(err error) {
	if err == nil {
		e.ok.Add(1)
		return
	}
	e.n.Add(1)
	e.last.Store(err)
}

func (e *errorTracer) TraceQueryStart(ctx context.Context, _ *pgx.Conn, _ pgx.TraceQueryStartData) context.Context {
	return ctx
}

func (e *errorTracer) TraceQueryEnd(_ context.Context, _ *pgx.Conn, d pgx.TraceQueryEndData) {
	e.see(d.Err)
}

func (e *errorTracer) TraceBatchStart(ctx context.Context, _ *pgx.Conn, _ pgx.TraceBatchStartData) context.Context {
	return ctx
}

func (e *errorTracer) TraceBatchQuery(_ context.Context, _ *pgx.Conn, d pgx.TraceBatchQueryData) {
	e.see(d.Err)
}

func (e *errorTracer) TraceBatchEnd(_ context.Context, _ *pgx.Conn, d pgx.TraceBatchEndData) {
	e.see(d.Err)
}

func TestCase_B39_SameIDTwoSubscribers(t *testing.T) {
	pool := newPool(t, pgtest.First(t))
	handle := func(subscriber, topic string, want inbox.Result) {
		t.Helper()
		m := message("m1")
		m.Topic = topic
		got, err := inbox.Handle(t.Context(), pool, subscriber, m, effect, inbox.Config{})
		if err != nil || got != want {
			t.Errorf("%s on %s: %v, %v, want %v", subscriber, topic, got, err, want)
		}
	}
	handle("billing", "orders", inbox.Handled)
	handle("shipping", "orders", inbox.Handled)
	handle("billing", "refunds", inbox.Duplicate)       // the topic is no part of it, as documented
	handle("billing tenant-2", "orders", inbox.Handled) // tenants that reuse ids: a subscriber each
	handle("invoicing", "orders", inbox.Handled)        // billing under a new name starts anew
	handle("shipping", "orders", inbox.Duplicate)

	bus, rec := newBus()
	publish(t, bus, message("m9"))
	for _, subscriber := range []string{"one", "two"} {
		c, err := inbox.New(pool, rec, subscriber, "orders", effect, inbox.Config{Logger: testLogger(t)})
		if err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithCancel(t.Context())
		ended := make(chan error, 1)
		go func() { ended <- c.Run(ctx) }()
		eventually(t, "its effect", func() bool {
			return len(query(t, pool, `SELECT outcome FROM postroom.processed_messages
				WHERE subscriber_id = $1 AND message_id = 'm9'`, subscriber)) == 1
		})
		cancel()
		if err := receive(t, "Run ends", ended); err != nil {
			t.Error(err)
		}
	}
}

func TestCase_B44_SameIDOtherContent(t *testing.T) {
	pool := newPool(t, pgtest.First(t))
	store := func(ctx context.Context, tx pgx.Tx, m postroom.Message) error {
		_, err := tx.Exec(ctx, `INSERT INTO effects (message_id, note) VALUES ($1, $2)`, m.ID, string(m.Payload))
		return err
	}
	bus, rec := newBus()
	for _, payload := range []string{"first", "second"} {
		m := message("m1")
		m.Payload = []byte(payload)
		publish(t, bus, m)
	}
	start(t, pool, rec, store, inbox.Config{})
	eventually(t, "two acks", func() bool { return rec.count("ack") == 2 })
	// The first wins, whatever the other contains, as documented.
	wantStrings(t, "effects", query(t, pool, `SELECT note FROM effects`), "first")
}
