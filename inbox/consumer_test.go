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
