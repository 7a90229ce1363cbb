package inbox_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/postroom/postroom"
	"github.com/postroom/postroom/broker"
	"github.com/postroom/postroom/broker/memory"
	"github.com/postroom/postroom/inbox"
	"github.com/postroom/postroom/internal/pgtest"
)

// gated is a handler whose messages wait until they are let go.
type gated struct {
	entered chan string
	leave   chan struct{}
}

func newGated() *gated { return &gated{make(chan string, 100), make(chan struct{})} }

func (g *gated) handle(ctx context.Context, tx pgx.Tx, m postroom.Message) error {
	if err := effect(ctx, tx, m); err != nil {
		return err
	}
	g.entered <- m.ID
	select {
	case <-g.leave:
		return ctx.Err()
	case <-ctx.Done():
		return ctx.Err()
	}
}

func TestStopFinishesWhatRunsAndGivesBackTheRest(t *testing.T) {
	pool := newPool(t, pgtest.First(t))
	bus, rec := newBus()
	publish(t, bus, keyed("a1", "a"), keyed("a2", "a"), keyed("b1", "b"), message("c"), message("d"))
	g := newGated()
	c := start(t, pool, rec, g.handle, inbox.Config{Concurrency: 2})
	running := []string{receive(t, "a handler", g.entered), receive(t, "another", g.entered)}
	slices.Sort(running)
	wantStrings(t, "running", running, "a1", "b1")
	c.cancel()
	eventually(t, "the idle ones are given back", func() bool { return rec.count("retry") == 2 })
	select {
	case err := <-c.ended:
		t.Fatalf("Run ended while handlers were running: %v", err)
	default:
	}
	close(g.leave)
	if err := c.wait(); err != nil {
		t.Errorf("Run = %v", err)
	}
	got := rec.all()
	slices.Sort(got)
	wantStrings(t, "settled", got, "ack a1", "ack b1", "retry a2", "retry c", "retry d")
	got = effects(t, pool)
	slices.Sort(got)
	wantStrings(t, "effects", got, "a1", "b1")

	// The same consumer may run again.
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- c.Run(ctx) }()
	eventually(t, "the rest", func() bool { return rec.count("ack") == 5 })
	cancel()
	if err := receive(t, "Run ends", ended); err != nil {
		t.Error(err)
	}
}

// The stop comes with the third acknowledgement.
func TestNothingStartsAfterTheStop(t *testing.T) {
	pool := newPool(t, pgtest.First(t))
	for range 20 {
		bus, rec := newBus()
		for range 10 {
			publish(t, bus, message(postroom.NewID()))
		}
		ready := make(chan struct{})
		var c *running
		sub := &countdown{Subscriber: rec, left: 3, end: func() { <-ready; c.cancel() }}
		var runs atomic.Int32
		c = start(t, pool, sub, func(ctx context.Context, tx pgx.Tx, m postroom.Message) error {
			runs.Add(1)
			return effect(ctx, tx, m)
		}, inbox.Config{Concurrency: 1})
		close(ready)
		if err := c.wait(); err != nil {
			t.Errorf("Run = %v", err)
		}
		if n, acks := runs.Load(), rec.count("ack"); n != 3 || acks != 3 {
			t.Errorf("%d handlers were started and %d messages acknowledged, want 3", n, acks)
		}
	}
}

func TestDrainTimeout(t *testing.T) {
	pool := newPool(t, pgtest.First(t))
	bus, rec := newBus()
	publish(t, bus, message("m1"), message("m2"))
	g := newGated()
	c := start(t, pool, rec, g.handle, inbox.Config{DrainTimeout: 10 * time.Millisecond})
	receive(t, "a handler", g.entered)
	receive(t, "another", g.entered)
	err := c.stop()
	if !errors.Is(err, inbox.ErrDrainTimeout) || !strings.Contains(err.Error(), "2 handlers") {
		t.Errorf("Run = %v, want ErrDrainTimeout with 2 handlers", err)
	}
	c.wipe()
	if n := rec.count("retry"); n != 2 {
		t.Errorf("%d messages were given back, want 2", n)
	}
	wantStrings(t, "effects", effects(t, pool))
}

// A handler that obeys nothing is left behind, and cannot commit any more.
func TestDrainTimeoutWithADeafHandler(t *testing.T) {
	pool := newPool(t, pgtest.First(t))
	bus, rec := newBus()
	publish(t, bus, message("m1"))
	entered, leave, left := make(chan struct{}), make(chan struct{}), make(chan struct{})
	c := start(t, pool, rec, func(ctx context.Context, tx pgx.Tx, m postroom.Message) error {
		defer close(left)
		close(entered)
		<-leave
		return effect(context.WithoutCancel(ctx), tx, m)
	}, inbox.Config{DrainTimeout: 10 * time.Millisecond})
	receive(t, "the handler", entered)
	if err := c.stop(); !errors.Is(err, inbox.ErrDrainTimeout) {
		t.Errorf("Run = %v, want ErrDrainTimeout", err)
	}
	c.wipe()
	wantStrings(t, "settled", rec.all(), "retry m1")
	close(leave)
	receive(t, "the handler ends", left)
	eventually(t, "its connection is free", func() bool { return pool.Stat().AcquiredConns() == 0 })
	wantStrings(t, "effects", effects(t, pool))
	mustHandle(t, pool, "m1", effect, inbox.Handled)
}

func TestSubscriptionThatFails(t *testing.T) {
	pool := newPool(t, pgtest.First(t))
	t.Run("at once", func(t *testing.T) {
		c, err := inbox.New(pool, memory.New("another"), "billing", "orders", effect, inbox.Config{})
		if err != nil {
			t.Fatal(err)
		}
		if err := c.Run(t.Context()); err == nil || !strings.Contains(err.Error(), "no such topic") {
			t.Errorf("Run = %v, want no such topic", err)
		}
	})
	t.Run("later", func(t *testing.T) {
		bus, rec := newBus()
		publish(t, bus, keyed("a1", "a"), keyed("a2", "a"))
		g := newGated()
		c := start(t, pool, rec, g.handle, inbox.Config{})
		receive(t, "a handler", g.entered)
		_ = bus.Close()
		close(g.leave)
		if err := c.wait(); !errors.Is(err, broker.ErrClosed) {
			t.Errorf("Run = %v, want ErrClosed", err)
		}
		c.wipe()
		wantStrings(t, "effects", effects(t, pool), "a1") // its ack came too late
	})
	t.Run("without an error", func(t *testing.T) {
		c, err := inbox.New(pool, ending{}, "billing", "orders", effect, inbox.Config{})
		if err != nil {
			t.Fatal(err)
		}
		if err := c.Run(t.Context()); err == nil {
			t.Error("Run = nil although the subscription ended by itself")
		}
	})
}

type ending struct{}

func (ending) Subscribe(context.Context, broker.Subscription, func(broker.Delivery)) error {
	return nil
}

// Trouble of the broker shows in Health.
func TestHealthTellsOfTheBroker(t *testing.T) {
	pool := newPool(t, pgtest.First(t))
	away := errors.New("broker away")
	sub := &troubled{told: make(chan error)}
	c := start(t, pool, sub, effect, inbox.Config{})
	sub.told <- away
	eventually(t, "bad health", func() bool { return errors.Is(c.Health(), away) })
	sub.told <- nil
	eventually(t, "good health", func() bool { return c.Health() == nil })
}

type troubled struct{ told chan error }

func (s *troubled) Subscribe(ctx context.Context, sub broker.Subscription, _ func(broker.Delivery)) error {
	for {
		select {
		case err := <-s.told:
			sub.Trouble(err)
		case <-ctx.Done():
			return nil
		}
	}
}

// What is lost is not begun: here all but the running one, when the connection
// to the broker breaks.
func TestLostDeliveriesAreNotBegun(t *testing.T) {
	pool := newPool(t, pgtest.First(t))
	bus := memory.New()
	own := bus.Connect()
	for _, id := range ids("m", 20) {
		publish(t, bus, keyed(id, "k"))
	}
	g := newGated()
	var runs atomic.Int32
	c := start(t, pool, own, func(ctx context.Context, tx pgx.Tx, m postroom.Message) error {
		runs.Add(1)
		return g.handle(ctx, tx, m)
	}, inbox.Config{})
	receive(t, "a handler", g.entered)
	_ = own.Close()
	rec := record(bus)
	start(t, pool, rec, effect, inbox.Config{LockTimeout: 10 * time.Millisecond})
	close(g.leave)
	if err := c.wait(); !errors.Is(err, broker.ErrClosed) {
		t.Errorf("Run = %v, want ErrClosed", err)
	}
	c.wipe()
	eventually(t, "all acks", func() bool { return rec.count("ack") == 20 })
	if n := runs.Load(); n != 1 {
		t.Errorf("%d messages were begun, want one", n)
	}
	wantStrings(t, "effects", effects(t, pool), ids("m", 20)...)
}

// Members come and go; every message has its effect once, and a key's in order.
func TestTakeovers(t *testing.T) {
	pool := newPool(t, pgtest.First(t))
	bus := memory.New()
	const messages, keys = 200, 5
	for i, id := range ids("m", messages) {
		publish(t, bus, keyed(id, fmt.Sprint(i%keys)))
	}
	var n atomic.Int32
	handler := func(ctx context.Context, tx pgx.Tx, m postroom.Message) error {
		if n.Add(1)%7 == 0 {
			return errors.New("every seventh")
		}
		return effect(ctx, tx, m)
	}
	rec := record(bus)
	start(t, pool, rec, handler, inbox.Config{Concurrency: 2, MaxAttempts: -1})
	for i := range 6 {
		conn := bus.Connect()
		c := start(t, pool, conn, handler, inbox.Config{Concurrency: 2, MaxAttempts: -1})
		want := 10 * (i + 1)
		eventually(t, "some progress", func() bool { return len(effects(t, pool)) >= want })
		if i%2 == 0 {
			_ = conn.Close() // a crash, for the broker
			_ = c.wait()
			c.wipe()
		} else if err := c.stop(); err != nil {
			t.Error(err)
		}
	}
	eventually(t, "all effects", func() bool { return len(effects(t, pool)) >= messages })
	if got := query(t, pool, `SELECT DISTINCT message_id FROM effects`); len(got) != messages {
		t.Errorf("%d messages have an effect, want %d", len(got), messages)
	}
	for k := range keys {
		got := query(t, pool, `SELECT message_id FROM effects WHERE right(message_id, 3)::int % $2 = $1 ORDER BY n`, k, keys)
		if len(got) != messages/keys || !slices.IsSorted(got) {
			t.Errorf("key %d: %q", k, got)
		}
	}
}
