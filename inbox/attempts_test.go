package inbox_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/postroom/postroom"
	"github.com/postroom/postroom/broker"
	"github.com/postroom/postroom/inbox"
	"github.com/postroom/postroom/internal/pgtest"
	"github.com/postroom/postroom/migrations"
)

// 40001 and its like are retried for as long as it takes, and are no attempts.
func TestCase_B36_DatabaseTroubleIsNoAttempt(t *testing.T) {
	pgtest.Each(t, func(t *testing.T, s *pgtest.Server) {
		pool := newPool(t, s)
		exec(t, pool, `CREATE FUNCTION trouble(code text) RETURNS void LANGUAGE plpgsql AS
			$$ BEGIN RAISE EXCEPTION 'Unglück' USING ERRCODE = code; END $$`)
		exec(t, pool, `CREATE TABLE at_commit (code text)`)
		exec(t, pool, `CREATE FUNCTION trouble_at_commit() RETURNS trigger LANGUAGE plpgsql AS
			$$ BEGIN PERFORM trouble(NEW.code); RETURN NULL; END $$`)
		exec(t, pool, `CREATE CONSTRAINT TRIGGER at_commit AFTER INSERT ON at_commit DEFERRABLE INITIALLY DEFERRED
			FOR EACH ROW EXECUTE FUNCTION trouble_at_commit()`)
		raise := func(ctx context.Context, tx pgx.Tx, code string) error {
			_, err := tx.Exec(ctx, `SELECT trouble($1)`, code)
			return err
		}
		kinds := map[string]inbox.Handler{
			"40001": func(ctx context.Context, tx pgx.Tx, m postroom.Message) error { return raise(ctx, tx, "40001") },
			"40P01 in a wrapper": func(ctx context.Context, tx pgx.Tx, m postroom.Message) error {
				return fmt.Errorf("insert: %w", raise(ctx, tx, "40P01"))
			},
			"55P03 in a type": func(ctx context.Context, tx pgx.Tx, m postroom.Message) error {
				return &customError{raise(ctx, tx, "55P03")}
			},
			"57P01 hidden": func(ctx context.Context, tx pgx.Tx, m postroom.Message) error {
				return fmt.Errorf("insert: %v", raise(ctx, tx, "57P01")) // without %w
			},
			"53300 ignored": func(ctx context.Context, tx pgx.Tx, m postroom.Message) error {
				_ = raise(ctx, tx, "53300")
				return nil
			},
			"40001 at commit": func(ctx context.Context, tx pgx.Tx, m postroom.Message) error {
				_, err := tx.Exec(ctx, `INSERT INTO at_commit VALUES ('40001')`)
				return err
			},
			"killed": func(ctx context.Context, tx pgx.Tx, m postroom.Message) error {
				_, err := tx.Exec(ctx, `SELECT pg_terminate_backend(pg_backend_pid())`)
				return err
			},
			"killed and ignored": func(ctx context.Context, tx pgx.Tx, m postroom.Message) error {
				_, _ = tx.Exec(ctx, `SELECT pg_terminate_backend(pg_backend_pid())`)
				return nil
			},
			"another database away": func(ctx context.Context, tx pgx.Tx, m postroom.Message) error {
				_, err := pgx.Connect(ctx, "postgres://nobody@127.0.0.1:1/nothing")
				return err
			},
			"permanent but not": func(ctx context.Context, tx pgx.Tx, m postroom.Message) error {
				return postroom.Permanent(raise(ctx, tx, "40001"))
			},
		}
		bus, rec := newBus()
		for name := range kinds {
			publish(t, bus, message(name))
		}
		var mu sync.Mutex
		tries := make(map[string]int)
		start(t, pool, rec, func(ctx context.Context, tx pgx.Tx, m postroom.Message) error {
			mu.Lock()
			tries[m.ID]++
			n := tries[m.ID]
			mu.Unlock()
			if err := effect(ctx, tx, m); err != nil {
				return err
			}
			if n <= 5 {
				return kinds[m.ID](ctx, tx, m)
			}
			return nil
		}, inbox.Config{MaxAttempts: 2})
		eventually(t, "all acks", func() bool { return rec.count("ack") == len(kinds) })
		wantStrings(t, "dead letters", query(t, pool, `SELECT message_id || ' ' || reason FROM postroom.inbox_dead_letters`))
		if n := len(effects(t, pool)); n != len(kinds) {
			t.Errorf("%d effects, want %d", n, len(kinds))
		}
		for name, n := range tries {
			if n < 6 {
				t.Errorf("%s: handled %d times, want 6", name, n)
			}
		}
	})
}

type customError struct{ cause error }

func (e *customError) Error() string { return "Speichern nicht möglich" }
func (e *customError) Unwrap() error { return e.cause }

// What the handler brings about itself does count, or it would be tried for ever.
func TestWhatCountsAsAnAttempt(t *testing.T) {
	pool := newPool(t, pgtest.First(t))
	exec(t, pool, `CREATE TABLE later (n int PRIMARY KEY DEFERRABLE INITIALLY DEFERRED)`)
	exec(t, pool, `INSERT INTO later VALUES (1)`)
	kinds := map[string]inbox.Handler{
		"own timeout": func(ctx context.Context, tx pgx.Tx, m postroom.Message) error {
			ctx, cancel := context.WithTimeout(ctx, time.Millisecond)
			defer cancel()
			_, err := tx.Exec(ctx, `SELECT pg_sleep(10)`)
			return err
		},
		"own timeout ignored": func(ctx context.Context, tx pgx.Tx, m postroom.Message) error {
			ctx, cancel := context.WithTimeout(ctx, time.Millisecond)
			defer cancel()
			_, _ = tx.Exec(ctx, `SELECT pg_sleep(10)`)
			return nil
		},
		"statement timeout": func(ctx context.Context, tx pgx.Tx, m postroom.Message) error {
			_, err := tx.Exec(ctx, `SET LOCAL statement_timeout = 5; SELECT pg_sleep(10)`)
			return err
		},
		"idle too long": func(ctx context.Context, tx pgx.Tx, m postroom.Message) error {
			if _, err := tx.Exec(ctx, `SET LOCAL idle_in_transaction_session_timeout = 5`); err != nil {
				return err
			}
			pid := tx.Conn().PgConn().PID()
			eventually(t, "the server ends the session", func() bool {
				return len(query(t, pool, `SELECT pid::text FROM pg_stat_activity WHERE pid = $1`, pid)) == 0
			})
			return nil
		},
		"at commit": func(ctx context.Context, tx pgx.Tx, m postroom.Message) error {
			_, err := tx.Exec(ctx, `INSERT INTO later VALUES (1)`)
			return err
		},
		"a remote service": func(ctx context.Context, tx pgx.Tx, m postroom.Message) error {
			return fmt.Errorf("call: %w", context.DeadlineExceeded)
		},
	}
	bus, rec := newBus()
	for name := range kinds {
		publish(t, bus, message(name))
	}
	start(t, pool, rec, func(ctx context.Context, tx pgx.Tx, m postroom.Message) error {
		return kinds[m.ID](ctx, tx, m)
	}, inbox.Config{MaxAttempts: 2})
	eventually(t, "all acks", func() bool { return rec.count("ack") == len(kinds) })
	if n := len(query(t, pool, `SELECT message_id FROM postroom.inbox_dead_letters WHERE attempts = 2`)); n != len(kinds) {
		t.Errorf("%d dead letters, want %d", n, len(kinds))
	}
}

func TestCase_B84_ChangedSchema(t *testing.T) {
	pool := newPool(t, pgtest.First(t))
	bus, rec := newBus()
	exec(t, pool, `CREATE TABLE wide (a varchar(10))`)
	exec(t, pool, `INSERT INTO wide VALUES ('x')`)
	reading := func(ctx context.Context, tx pgx.Tx, m postroom.Message) error {
		rows, err := tx.Query(ctx, `SELECT * FROM wide`)
		if err != nil {
			return err
		}
		if _, err := pgx.CollectRows(rows, pgx.RowToMap); err != nil {
			return err
		}
		return effect(ctx, tx, m)
	}
	start(t, pool, rec, reading, inbox.Config{MaxAttempts: 1})
	load := func(prefix string) {
		for _, id := range ids(prefix, 50) {
			publish(t, bus, message(id))
		}
	}
	load("a")
	eventually(t, "50 acks", func() bool { return rec.count("ack") == 50 })
	exec(t, pool, `ALTER TABLE postroom.processed_messages ADD COLUMN extra text`)
	exec(t, pool, `ALTER TABLE postroom.processed_messages ALTER COLUMN subscriber_id TYPE varchar(300)`)
	exec(t, pool, `ALTER TABLE wide ADD COLUMN b int, ALTER COLUMN a TYPE varchar(20)`)
	load("b")
	eventually(t, "100 acks", func() bool { return rec.count("ack") == 100 })
	if n := len(effects(t, pool)); n != 100 {
		t.Errorf("%d effects, want 100", n)
	}
	wantStrings(t, "dead letters", query(t, pool, `SELECT reason FROM postroom.inbox_dead_letters`))
}

// A schema that is not there yet is no fault of the messages.
func TestConsumerWaitsForTheMigrations(t *testing.T) {
	pool := pgtest.First(t).Empty(t)
	exec(t, pool, `CREATE TABLE effects (n serial, message_id text)`)
	bus, rec := newBus()
	publish(t, bus, message("m1"), message("m2"))
	c := start(t, pool, rec, effect, inbox.Config{MaxAttempts: 1})
	eventually(t, "bad health", func() bool { return c.Health() != nil })
	if err := c.Health(); !strings.Contains(err.Error(), "42P01") {
		t.Errorf("Health = %v, want that there is no such table", err)
	}
	if _, err := migrations.Up(t.Context(), pool, migrations.Config{}); err != nil {
		t.Fatal(err)
	}
	eventually(t, "two acks", func() bool { return rec.count("ack") == 2 })
	wantStrings(t, "processed", outcomes(t, pool), "billing m1 handled", "billing m2 handled")
}

// Attempts count on when a message is lost and delivered again; a message that
// waits for its retry does not hold up its own redelivery.
func TestAttemptsOutliveALostDelivery(t *testing.T) {
	pool := newPool(t, pgtest.First(t))
	sub := newHandSubscriber()
	var attempts atomic.Int32
	start(t, pool, sub, func(context.Context, pgx.Tx, postroom.Message) error {
		if attempts.Add(1) == 1 {
			return postroom.RetryAfter(errors.New("first"), time.Hour)
		}
		return errors.New("second")
	}, inbox.Config{MaxAttempts: 2})
	first := sub.deliver(keyed("m1", "k"))
	eventually(t, "an attempt", func() bool { return attempts.Load() == 1 })
	close(first.lost)
	second := sub.deliver(keyed("m1", "k"))
	if got := receive(t, "the second is settled", second.settled); got != "ack" {
		t.Errorf("the second delivery: %s, want ack", got)
	}
	wantStrings(t, "dead letters", query(t, pool, `SELECT attempts || ' ' || reason FROM postroom.inbox_dead_letters`), "2 second")
	select {
	case how := <-first.settled:
		t.Errorf("the lost delivery was settled: %s", how)
	default:
	}
}

// A message that is lost and delivered again while its handler runs does not hold
// up its own redelivery when the handler fails after all.
func TestRedeliveredWhileItRuns(t *testing.T) {
	pool := newPool(t, pgtest.First(t))
	sub := newHandSubscriber()
	begun, fail := make(chan struct{}), make(chan struct{})
	var attempts atomic.Int32
	start(t, pool, sub, func(context.Context, pgx.Tx, postroom.Message) error {
		if attempts.Add(1) > 1 {
			return nil
		}
		close(begun)
		<-fail
		return postroom.RetryAfter(errors.New("first"), time.Hour)
	}, inbox.Config{})
	first := sub.deliver(keyed("m1", "k"))
	receive(t, "the handler begins", begun)
	close(first.lost)
	second := sub.deliver(keyed("m1", "k"))
	third := sub.deliver(keyed("m2", "k")) // when this is taken, the second is
	close(fail)
	for what, d := range map[string]*handDelivery{"the second is settled": second, "the third is settled": third} {
		if got := receive(t, what, d.settled); got != "ack" {
			t.Errorf("%s: %s, want ack", what, got)
		}
	}
}

// handSubscriber delivers what the test gives it.
type handSubscriber struct{ in chan *handDelivery }

func newHandSubscriber() *handSubscriber { return &handSubscriber{make(chan *handDelivery)} }

func (s *handSubscriber) Subscribe(ctx context.Context, _ broker.Subscription, deliver func(broker.Delivery)) error {
	for {
		select {
		case d := <-s.in:
			deliver(d)
		case <-ctx.Done():
			return nil
		}
	}
}

func (s *handSubscriber) deliver(m postroom.Message) *handDelivery {
	d := &handDelivery{m: m, lost: make(chan struct{}), settled: make(chan string, 2)}
	s.in <- d
	return d
}

type handDelivery struct {
	m       postroom.Message
	lost    chan struct{}
	settled chan string
}

func (d *handDelivery) Message() postroom.Message { return d.m }
func (d *handDelivery) Position() broker.Position {
	return broker.Position{Topic: "orders", Partition: 3, Offset: 7}
}
func (d *handDelivery) Deliveries() int           { return 0 }
func (d *handDelivery) Lost() <-chan struct{}     { return d.lost }
func (d *handDelivery) Ack(context.Context) error { d.settled <- "ack"; return nil }
func (d *handDelivery) Retry(context.Context, time.Duration) error {
	d.settled <- "retry"
	return nil
}
