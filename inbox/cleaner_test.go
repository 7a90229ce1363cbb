package inbox_test

import (
	"context"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/postroom/postroom/inbox"
	"github.com/postroom/postroom/internal/pgtest"
)

const age = `UPDATE postroom.processed_messages SET processed_at = processed_at - $1::interval WHERE message_id = ANY ($2::text[])`

func clean(t testing.TB, c inbox.Cleaner, want int64) {
	t.Helper()
	if n, err := c.Clean(t.Context()); err != nil || n != want {
		t.Errorf("Clean = %d, %v, want %d", n, err, want)
	}
}

func TestCleaner(t *testing.T) {
	pgtest.Each(t, func(t *testing.T, s *pgtest.Server) {
		pool := newPool(t, s)
		bus, rec := newBus()
		publish(t, bus, message("old"), message("new"), message("dead"), message("given up"))
		start(t, pool, rec, refusing("dead", "given up").handle, inbox.Config{})
		eventually(t, "four acks", func() bool { return rec.count("ack") == 4 })
		exec(t, pool, `INSERT INTO postroom.processed_messages (subscriber_id, message_id) VALUES
			('audit', 'old'), ('shipping', 'old'), ('shipping', 'new')`)
		tx := beginTx(t, pool, "")
		wantOnce(t, tx, "invoice", "old", true)
		wantOnce(t, tx, "invoice", "new", true)
		commit(t, tx)
		exec(t, pool, `DELETE FROM postroom.inbox_dead_letters WHERE message_id = 'given up'`)

		exec(t, pool, age, "6 days 23 hours", []string{"old", "dead", "given up"})
		clean(t, inbox.Cleaner{Pool: pool}, 0)
		exec(t, pool, age, "2 hours", []string{"old", "dead", "given up"})
		exec(t, pool, age, "2 hours", []string{"new"})
		// billing, shipping and the action lose what is old, shipping what is two hours old.
		clean(t, inbox.Cleaner{Pool: pool, Subscribers: map[string]time.Duration{"audit": -1, "shipping": time.Hour}}, 5)
		wantStrings(t, "processed", outcomes(t, pool), " invoice new once", "audit old handled", "billing dead dead", "billing new handled")
	})
}

// Many chunks, two cleaners at a time, and messages that are being handled.
func TestCleanersAtOnce(t *testing.T) {
	pool := newPool(t, pgtest.First(t))
	exec(t, pool, `INSERT INTO postroom.processed_messages (subscriber_id, message_id, processed_at)
		SELECT 'billing', 'm' || n, now() - interval '8 days' + n * interval '1 ms' FROM generate_series(1, 12500) n`)
	var all sync.WaitGroup
	var deleted atomic.Int64
	for range 2 {
		all.Go(func() {
			n, err := inbox.Cleaner{Pool: pool}.Clean(t.Context())
			if err != nil {
				t.Error(err)
			}
			deleted.Add(n)
		})
	}
	for _, id := range ids("fresh", 20) {
		mustHandle(t, pool, id, effect, inbox.Handled)
	}
	all.Wait()
	clean(t, inbox.Cleaner{Pool: pool}, 12500-deleted.Load()) // what one passed over while the other failed: nothing
	if n := deleted.Load(); n != 12500 {
		t.Errorf("two cleaners deleted %d, want 12500", n)
	}
	if n := len(outcomes(t, pool)); n != 20 {
		t.Errorf("%d records are left, want 20", n)
	}
}

// Equal times at the border of a chunk lose nothing.
func TestCleanerEqualTimes(t *testing.T) {
	pool := newPool(t, pgtest.First(t))
	exec(t, pool, `INSERT INTO postroom.processed_messages (subscriber_id, message_id, processed_at)
		SELECT 'billing', 'm' || n, now() - interval '8 days' FROM generate_series(1, 2500) n`)
	clean(t, inbox.Cleaner{Pool: pool}, 2500)
}

// After a long time without consumers, what the broker repeats at the start finds
// its records: the cleaner waits.
func TestCase_B43_CleanerWaitsForRedelivery(t *testing.T) {
	pool := newPool(t, pgtest.First(t))
	bus, rec := newBus()
	mustHandle(t, pool, "m1", effect, inbox.Handled)
	exec(t, pool, age, "30 days", []string{"m1"})

	run := func(delay time.Duration) (stop func()) {
		ctx, cancel := context.WithCancel(t.Context())
		ended := make(chan error, 1)
		go func() {
			ended <- inbox.Cleaner{Pool: pool, Delay: delay, Interval: time.Millisecond, Logger: testLogger(t)}.Run(ctx)
		}()
		return func() {
			cancel()
			if err := receive(t, "Run ends", ended); err != nil {
				t.Error(err)
			}
		}
	}
	stop := run(0) // the default
	publish(t, bus, message("m1"))
	start(t, pool, rec, effect, inbox.Config{})
	eventually(t, "an ack", func() bool { return rec.count("ack") == 1 })
	wantStrings(t, "effects", effects(t, pool), "m1")
	wantStrings(t, "processed", outcomes(t, pool), "billing m1 handled")
	stop()

	stop = run(-1)
	eventually(t, "the record is gone", func() bool { return len(outcomes(t, pool)) == 0 })
	stop()
}

func TestCleanerConfig(t *testing.T) {
	var pool *pgxpool.Pool
	_, err := inbox.Cleaner{
		Pool: pool, Schema: strings.Repeat("x", 64), Retention: time.Minute, Interval: -1,
		Subscribers: map[string]time.Duration{"billing": time.Second},
	}.Clean(t.Context())
	for _, want := range []string{
		"Cleaner.Pool is nil", "has 64 bytes", "Cleaner.Retention is 1m0s, want at least 1h0m0s",
		`Cleaner.Subscribers["billing"] is 1s`, "Cleaner.Interval is -1ns",
	} {
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("Clean = %v, want %q", err, want)
		}
	}
}
