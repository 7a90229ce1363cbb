package inbox_test

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/postroom/postroom"
	"github.com/postroom/postroom/broker/memory"
	"github.com/postroom/postroom/inbox"
	"github.com/postroom/postroom/internal/pgtest"
)

func TestConsumerHandlesAndAcks(t *testing.T) {
	pgtest.Each(t, func(t *testing.T, s *pgtest.Server) {
		pool := newPool(t, s)
		bus, rec := newBus()
		publish(t, bus, message("m1"), message("m2"), message("m1"))
		c := start(t, pool, rec, effect, inbox.Config{})
		eventually(t, "three acks", func() bool { return rec.count("ack") == 3 })
		got := effects(t, pool)
		slices.Sort(got)
		wantStrings(t, "effects", got, "m1", "m2")
		if err := c.Health(); err != nil {
			t.Errorf("Health = %v", err)
		}
		if err := c.Run(t.Context()); err == nil {
			t.Error("a second Run beside the first succeeded")
		}
		if err := c.stop(); err != nil {
			t.Errorf("Run = %v", err)
		}
	})
}

// Every message fails a few times at random; effects of a key are in order all the same.
func TestOrderOfAKeyUnderRetries(t *testing.T) {
	pool := newPool(t, pgtest.First(t))
	bus, rec := newBus()
	const keys, each = 10, 20
	for i := range each {
		for k := range keys {
			publish(t, bus, keyed(fmt.Sprintf("k%d-%03d", k, i), fmt.Sprint("k", k)))
		}
		publish(t, bus, message(fmt.Sprintf("none-%03d", i)))
	}
	var running [keys]atomic.Int32
	start(t, pool, rec, func(ctx context.Context, tx pgx.Tx, m postroom.Message) error {
		if m.HasKey() {
			n := &running[m.Key[1]-'0']
			if n.Add(1) != 1 {
				t.Errorf("two messages of key %s at a time", m.Key)
			}
			defer n.Add(-1)
		}
		if err := effect(ctx, tx, m); err != nil {
			return err
		}
		switch rand.IntN(4) {
		case 0:
			return errors.New("at random")
		case 1:
			return &pgconn.PgError{Code: "40001"}
		}
		return nil
	}, inbox.Config{MaxAttempts: 50, MaxRetryDelay: 5 * time.Millisecond, MaxInFlight: 64})
	eventually(t, "all acks", func() bool { return rec.count("ack") == (keys+1)*each })
	for k := range keys {
		got := query(t, pool, `SELECT message_id FROM effects WHERE message_id LIKE $1 ORDER BY n`, fmt.Sprintf("k%d-%%", k))
		if len(got) != each || !slices.IsSorted(got) {
			t.Errorf("key %d: %q", k, got)
		}
	}
	if n := len(effects(t, pool)); n != (keys+1)*each {
		t.Errorf("%d effects, want %d", n, (keys+1)*each)
	}
}

// The head of a key waits for its retry; its successor does too, others do not.
func TestSuccessorsWaitForTheHeadsRetry(t *testing.T) {
	pool := newPool(t, pgtest.First(t))
	bus, rec := newBus()
	publish(t, bus, keyed("a1", "a"), keyed("a2", "a"), keyed("b1", "b"), message("none"))
	release := make(chan struct{})
	start(t, pool, rec, func(ctx context.Context, tx pgx.Tx, m postroom.Message) error {
		if m.ID == "a1" {
			select {
			case <-release:
			default:
				return postroom.RetryAfter(errors.New("later"), 3*time.Millisecond)
			}
		}
		return effect(ctx, tx, m)
	}, inbox.Config{MaxAttempts: -1, Concurrency: 4})
	eventually(t, "the others are handled", func() bool { return rec.count("ack") == 2 })
	got := effects(t, pool)
	slices.Sort(got)
	wantStrings(t, "effects", got, "b1", "none")
	close(release)
	eventually(t, "all are handled", func() bool { return rec.count("ack") == 4 })
	wantStrings(t, "effects of a", query(t, pool, `SELECT message_id FROM effects WHERE message_id LIKE 'a%' ORDER BY n`), "a1", "a2")
}

func TestRetryAfterIsHonoured(t *testing.T) {
	pool := newPool(t, pgtest.First(t))
	bus, rec := newBus()
	publish(t, bus, message("m1"))
	var times []time.Time
	start(t, pool, rec, func(ctx context.Context, tx pgx.Tx, m postroom.Message) error {
		times = append(times, time.Now())
		if len(times) == 1 {
			return fmt.Errorf("wrapped: %w", postroom.RetryAfter(errors.New("busy"), 300*time.Millisecond))
		}
		return effect(ctx, tx, m)
	}, inbox.Config{MaxRetryDelay: 5 * time.Millisecond})
	eventually(t, "an ack", func() bool { return rec.count("ack") == 1 })
	if d := times[1].Sub(times[0]); d < 300*time.Millisecond {
		t.Errorf("tried again after %v, want 300ms", d)
	}
}

func TestDeadLetters(t *testing.T) {
	pgtest.Each(t, func(t *testing.T, s *pgtest.Server) {
		pool := newPool(t, s)
		bus, rec := newBus()
		m := keyed("m1", "k1")
		m.Payload = []byte{0, 1, 0xff}
		m.Headers = []postroom.Header{{Name: "a", Value: []byte{0xfe}}, {Name: "a", Value: nil}, {Name: "B", Value: []byte{}}}
		m.Operation, m.Time = "op", time.Date(2024, 5, 6, 7, 8, 9, 123000, time.UTC)
		publish(t, bus, m)
		odd := "odd \x00 \xff text\n" + strings.Repeat("é", 2000)
		start(t, pool, rec, failing(errors.New(odd)), inbox.Config{MaxAttempts: 3, DeadLetterTopic: "dead.orders"})
		eventually(t, "an ack", func() bool { return rec.count("ack") == 1 })
		wantStrings(t, "effects", effects(t, pool))
		wantStrings(t, "processed", outcomes(t, pool), "billing m1 dead")
		wantStrings(t, "dead letters", query(t, pool, `SELECT concat_ws('|', subscriber_id, message_id, attempts, source, topic,
			convert_from(key, 'UTF8'), encode(payload, 'hex'), header_names::text, header_values::text, operation, written_at AT TIME ZONE 'UTC')
			FROM postroom.inbox_dead_letters`),
			`billing|m1|3|orders/0|orders|k1|0001ff|{"\\x61","\\x61","\\x42"}|{"\\xfe",NULL,"\\x"}|op|2024-05-06 07:08:09.000123`)
		reason := query(t, pool, `SELECT reason FROM postroom.inbox_dead_letters`)[0]
		if !strings.HasPrefix(reason, "odd   \uFFFD text ééé") || len([]rune(reason)) != 1000 {
			t.Errorf("reason = %.60q of %d characters", reason, len([]rune(reason)))
		}
		wantStrings(t, "outbox", query(t, pool, `SELECT concat_ws('|', topic, key, encode(payload, 'hex'), header_names::text)
			FROM postroom.outbox_messages`),
			"dead.orders|k1|0001ff|{a,a,B,postroom-dead-id,postroom-dead-subscriber,postroom-dead-reason,postroom-dead-attempts,postroom-dead-source}")
		wantStrings(t, "outbox headers", query(t, pool, `SELECT concat_ws('|', convert_from(header_values[4], 'UTF8'),
			convert_from(header_values[5], 'UTF8'), convert_from(header_values[7], 'UTF8'), convert_from(header_values[8], 'UTF8'))
			FROM postroom.outbox_messages`), "m1|billing|3|orders/0")

		// A plain repeat is a duplicate, for the consumer and for Handle.
		publish(t, bus, m)
		eventually(t, "a second ack", func() bool { return rec.count("ack") == 2 })
		mustHandle(t, pool, "m1", effect, inbox.Duplicate)
		wantStrings(t, "dead letters", query(t, pool, `SELECT attempts::text FROM postroom.inbox_dead_letters`), "3")
	})
}

func TestPermanentIsDeadAtOnce(t *testing.T) {
	pool := newPool(t, pgtest.First(t))
	bus, rec := newBus()
	publish(t, bus, message("m1"))
	var n int
	start(t, pool, rec, func(ctx context.Context, tx pgx.Tx, m postroom.Message) error {
		n++
		return fmt.Errorf("decode: %w", postroom.Permanent(errors.New("not JSON")))
	}, inbox.Config{})
	eventually(t, "an ack", func() bool { return rec.count("ack") == 1 })
	if n != 1 {
		t.Errorf("handled %d times, want once", n)
	}
	wantStrings(t, "reason", query(t, pool, `SELECT reason FROM postroom.inbox_dead_letters`), "decode: not JSON")
}

// The dead letter and the record commit together: where one cannot be written,
// neither is, and nothing is acknowledged.
func TestDeadLetterIsAtomic(t *testing.T) {
	pool := newPool(t, pgtest.First(t))
	exec(t, pool, `ALTER TABLE postroom.outbox_messages RENAME TO outbox_away`)
	bus, rec := newBus()
	publish(t, bus, message("m1"))
	l := &logs{}
	var handled atomic.Int32
	start(t, pool, rec, func(context.Context, pgx.Tx, postroom.Message) error {
		handled.Add(1)
		return errors.New("no")
	}, inbox.Config{MaxAttempts: 1, DeadLetterTopic: "dead", Logger: l.logger()})
	eventually(t, "some tries", func() bool { return strings.Count(l.String(), "transaction failed") >= 5 })
	wantStrings(t, "dead letters", query(t, pool, `SELECT message_id FROM postroom.inbox_dead_letters`))
	wantStrings(t, "processed", outcomes(t, pool))
	if n := rec.count("ack"); n != 0 {
		t.Errorf("%d acks", n)
	}
	exec(t, pool, `ALTER TABLE postroom.outbox_away RENAME TO outbox_messages`)
	eventually(t, "an ack", func() bool { return rec.count("ack") == 1 })
	wantStrings(t, "dead letters", query(t, pool, `SELECT message_id FROM postroom.inbox_dead_letters`), "m1")
	wantStrings(t, "processed", outcomes(t, pool), "billing m1 dead")
	if n := handled.Load(); n != 1 {
		t.Errorf("handled %d times, want once", n)
	}
}

// A dead letter whose topic the outbox refuses stands in the table.
func TestDeadLetterThatCannotBePublished(t *testing.T) {
	pool := newPool(t, pgtest.First(t))
	bus, rec := newBus()
	m := keyed("m1", strings.Repeat("k", 3000)) // longer than the outbox takes
	publish(t, bus, m)
	l := &logs{}
	start(t, pool, rec, failing(postroom.Permanent(errors.New("no"))), inbox.Config{DeadLetterTopic: "dead", Logger: l.logger()})
	eventually(t, "an ack", func() bool { return rec.count("ack") == 1 })
	wantStrings(t, "dead letters", query(t, pool, `SELECT length(key)::text FROM postroom.inbox_dead_letters`), "3000")
	if !strings.Contains(l.String(), "dead letter not published") {
		t.Errorf("log = %s", l.String())
	}
}

// A handler that commits by SQL and fails is set aside, although the record is
// there: the rest of its effect would be lost as a duplicate.
func TestHandlerThatEndsItsTransactionIsSetAside(t *testing.T) {
	pool := newPool(t, pgtest.First(t))
	bus, rec := newBus()
	publish(t, bus, message("m1"))
	start(t, pool, rec, func(ctx context.Context, tx pgx.Tx, m postroom.Message) error {
		_, err := tx.Exec(ctx, `COMMIT`)
		return err
	}, inbox.Config{})
	eventually(t, "an ack", func() bool { return rec.count("ack") == 1 })
	wantStrings(t, "processed", outcomes(t, pool), "billing m1 dead")
	wantStrings(t, "dead letters", query(t, pool, `SELECT message_id FROM postroom.inbox_dead_letters`), "m1")
}

// A dead letter outlives its record; a later one under the same id replaces it.
func TestDeadLetterIsReplaced(t *testing.T) {
	pool := newPool(t, pgtest.First(t))
	bus, rec := newBus()
	publish(t, bus, message("m1"))
	var n atomic.Int32
	start(t, pool, rec, func(context.Context, pgx.Tx, postroom.Message) error {
		return postroom.Permanent(fmt.Errorf("time %d", n.Add(1)))
	}, inbox.Config{})
	eventually(t, "an ack", func() bool { return rec.count("ack") == 1 })
	exec(t, pool, `DELETE FROM postroom.processed_messages`)
	publish(t, bus, message("m1"))
	eventually(t, "a second ack", func() bool { return rec.count("ack") == 2 })
	wantStrings(t, "reasons", query(t, pool, `SELECT reason FROM postroom.inbox_dead_letters`), "time 2")
}

func TestMessagesWithoutID(t *testing.T) {
	foreign := []postroom.Message{
		{Topic: "orders", Payload: []byte("1")},
		{Topic: "orders", ID: " ", Payload: []byte("2")},
		{Topic: "orders", ID: strings.Repeat("x", 300), Payload: []byte("3")},
		{Topic: "orders", ID: "a\x00b", Key: "k", Payload: []byte("4")},
		{Topic: "orders", ID: "\xff", Payload: []byte("5")},
	}
	t.Run("from position", func(t *testing.T) {
		pool := newPool(t, pgtest.First(t))
		bus, rec := newBus()
		publish(t, bus, foreign...)
		c := start(t, pool, rec, effect, inbox.Config{})
		eventually(t, "five acks", func() bool { return rec.count("ack") == 5 })
		got := effects(t, pool)
		slices.Sort(got)
		wantStrings(t, "effects", got, "position:orders/0", "position:orders/1", "position:orders/2", "position:orders/3", "position:orders/4")
		if err := c.stop(); err != nil {
			t.Error(err)
		}
		// Another group of the same subscriber's name gets the same positions: redelivery.
		again := memory.New()
		publish(t, again, foreign...)
		rec = record(again)
		start(t, pool, rec, effect, inbox.Config{})
		eventually(t, "five acks", func() bool { return rec.count("ack") == 5 })
		if n := len(effects(t, pool)); n != 5 {
			t.Errorf("%d effects, want 5", n)
		}
	})
	t.Run("dead letters", func(t *testing.T) {
		pool := newPool(t, pgtest.First(t))
		bus, rec := newBus()
		publish(t, bus, foreign...)
		publish(t, bus, message("good"))
		start(t, pool, rec, effect, inbox.Config{MissingID: inbox.DeadLetterWithoutID})
		eventually(t, "six acks", func() bool { return rec.count("ack") == 6 })
		wantStrings(t, "effects", effects(t, pool), "good")
		wantStrings(t, "dead letters", query(t, pool, `SELECT concat_ws('|', message_id, reason, convert_from(payload, 'UTF8'))
			FROM postroom.inbox_dead_letters ORDER BY message_id`),
			"position:orders/0|the message's id is empty|1",
			"position:orders/1|the message's id begins or ends with white space|2",
			"position:orders/2|the message's id has 300 bytes, want at most 255|3",
			"position:orders/3|the message's id contains a character that is not printable|4",
			"position:orders/4|the message's id is not valid UTF-8|5")
	})
}

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

func TestCase_B80_SmallPools(t *testing.T) {
	base := newPool(t, pgtest.First(t))
	for _, size := range []int32{1, 2, 5} {
		t.Run(fmt.Sprint(size), func(t *testing.T) {
			exec(t, base, `TRUNCATE effects, postroom.processed_messages, postroom.inbox_dead_letters`)
			pool := withPool(t, base, func(c *pgxpool.Config) { c.MaxConns = size })
			bus, rec := newBus()
			for i, id := range ids("m", 60) {
				publish(t, bus, keyed(id, fmt.Sprint(i%7)))
			}
			start(t, pool, rec, func(ctx context.Context, tx pgx.Tx, m postroom.Message) error {
				if m.ID[3] == '5' {
					return errors.New("no")
				}
				return effect(ctx, tx, m)
			}, inbox.Config{MaxAttempts: 2, DeadLetterTopic: "dead"})
			var all sync.WaitGroup
			for _, id := range ids("h", 20) { // beside it, more callers than connections
				all.Go(func() {
					if _, err := handleOne(t, pool, id, effect, inbox.Config{}); err != nil {
						t.Errorf("Handle(%s): %v", id, err)
					}
				})
			}
			all.Wait()
			eventually(t, "60 acks", func() bool { return rec.count("ack") == 60 })
			if n := len(effects(t, base)); n != 54+20 {
				t.Errorf("%d effects, want 74", n)
			}
			if _, err := inbox.New(pool, bus, "billing", "orders", effect, inbox.Config{Concurrency: int(size) + 1}); err == nil {
				t.Errorf("Concurrency above the pool's %d connections is not refused", size)
			}
		})
	}
}

func TestNewReportsEveryProblem(t *testing.T) {
	pool := pgtest.New(t)
	_, err := inbox.New(pool, nil, "", "", nil, inbox.Config{
		Schema: strings.Repeat("s", 64), IsoLevel: "x", LockTimeout: -1, Concurrency: 1000, MaxInFlight: 1,
		RetryDelay: -1, MaxRetryDelay: -1, DeadLetterTopic: "a b", MissingID: "skip",
	})
	if err == nil {
		t.Fatal("no error")
	}
	for _, part := range []string{
		"subscriber", "topic \"\"", "Subscriber is nil", "Handler is nil", "Config.Schema", "Config.IsoLevel", "Config.LockTimeout",
		"Config.Concurrency is 1000", "Config.MaxInFlight", "Config.RetryDelay", "Config.MaxRetryDelay", "Config.DeadLetterTopic",
		"Config.MissingID",
	} {
		if !strings.Contains(err.Error(), part) {
			t.Errorf("the error does not name %s:\n%v", part, err)
		}
	}
	if _, err := inbox.New(nil, memory.New(), "a", "b", effect, inbox.Config{}); err == nil {
		t.Error("a nil pool is not refused")
	}
	if _, err := inbox.New(pool, memory.New(), strings.Repeat("s", 256), "b", effect, inbox.Config{}); err == nil {
		t.Error("a subscriber of 256 bytes is not refused")
	}
}
