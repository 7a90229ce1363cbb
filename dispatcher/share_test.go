package dispatcher_test

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/postroom/postroom"
	"github.com/postroom/postroom/broker"
	"github.com/postroom/postroom/dispatcher"
	"github.com/postroom/postroom/internal/pgtest"
	"github.com/postroom/postroom/migrations"
)

// member is a dispatcher among others.
type member struct {
	*dispatcher.Dispatcher
	stop func()
}

func join(t testing.TB, pool *pgxpool.Pool, r broker.Publisher, cfg dispatcher.Config) member {
	t.Helper()
	d, err := dispatcher.New(pool, r, cfg)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- d.Run(ctx) }()
	stop := sync.OnceFunc(func() {
		cancel()
		if err := <-done; err != nil {
			t.Errorf("Run: %v", err)
		}
	})
	t.Cleanup(stop)
	return member{d, stop}
}

// waitShares waits until the members hold as many lanes, the larger shares
// first, and every lane has one owner.
func waitShares(t testing.TB, members []member, want ...int) {
	t.Helper()
	eventually(t, time.Minute, func() string {
		var got, lanes []int
		for _, m := range members {
			held := m.Lanes().Held
			got, lanes = append(got, len(held)), append(lanes, held...)
		}
		slices.Sort(got)
		slices.Reverse(got)
		slices.Sort(lanes)
		if !slices.Equal(got, want) || len(slices.Compact(lanes)) != len(lanes) {
			return fmt.Sprintf("the dispatchers hold %v lanes, want %v", got, want)
		}
		return ""
	})
}

// Dispatchers that join take an even share, those that leave give theirs up,
// and while they do nothing is repeated, lost or put out of order.
func TestLanesAreSharedEvenly(t *testing.T) {
	pgtest.Each(t, func(t *testing.T, s *pgtest.Server) {
		pool := s.New(t)
		r := &recorder{before: func(ctx context.Context, _ []postroom.Message) {
			select { // something is in flight most of the time
			case <-time.After(5 * time.Millisecond):
			case <-ctx.Done():
			}
		}}
		cfg := dispatcher.Config{PageSize: 20, PublishTimeout: 2 * time.Second, Lease: 6 * time.Second}
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
		var members []member
		for _, want := range [][]int{{4}, {2, 2}, {2, 1, 1}, {1, 1, 1, 1}, {1, 1, 1, 1, 0}} {
			members = append(members, join(t, pool, r, cfg))
			waitShares(t, members, want...)
		}
		for _, want := range [][]int{{1, 1, 1, 1}, {2, 1, 1}, {2, 2}, {4}} {
			members[0].stop() // the eldest, whose share is the largest
			members = members[1:]
			waitShares(t, members, want...)
		}
		cancel()
		wg.Wait()
		waitStored(t, r, written)
		if p := keyOrder(r); p != "" {
			t.Error(p)
		}
		if n := len(r.messages()); n != written {
			t.Errorf("%d publishes of %d messages: giving lanes over repeats nothing", n, written)
		}
		if n := members[0].Lanes().Lost; n != 0 {
			t.Errorf("%d lanes were lost", n)
		}
	})
}

// A dispatcher that joins has its share within a lease's heartbeat, a third of
// it, though the leases of the others would last for long.
func TestJoiningIsQuick(t *testing.T) {
	pool := pgtest.New(t)
	first := join(t, pool, &recorder{}, dispatcher.Config{})
	waitShares(t, []member{first}, 4)
	began := time.Now()
	second := join(t, pool, &recorder{}, dispatcher.Config{})
	waitShares(t, []member{first, second}, 2, 2)
	if d := time.Since(began); d > 10*time.Second {
		t.Errorf("joining took %v, the heartbeat is 10s", d)
	}
	began = time.Now()
	first.stop()
	waitShares(t, []member{second}, 4)
	if d := time.Since(began); d > 5*time.Second {
		t.Errorf("taking over from one that was stopped took %v", d)
	}
}

// Dispatchers that died young count until their leases end, but no lane is
// left to them: neither one that is held nor one that is free.
func TestLanesAreNotLeftToTheDead(t *testing.T) {
	pool := pgtest.New(t)
	first := join(t, pool, &recorder{}, dispatcher.Config{})
	waitShares(t, []member{first}, 4)
	_, err := pool.Exec(t.Context(), `
		INSERT INTO postroom.outbox_dispatchers (owner, lease, joined_at, wants, wants_until)
		SELECT 'dead' || g, clock_timestamp() + '1 hour', clock_timestamp() - '1 hour'::interval, 4, clock_timestamp()
		  FROM generate_series(1, 3) g`)
	if err != nil {
		t.Fatal(err)
	}
	cfg := pool.Config()
	looks := &tracer{part: "wants_until > clock_timestamp()"}
	cfg.ConnConfig.Tracer = looks
	traced, err := pgxpool.NewWithConfig(t.Context(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(traced.Close)
	second := join(t, traced, &recorder{}, dispatcher.Config{}) // the fifth: it has no share
	eventually(t, time.Minute, func() string {
		if n := looks.n.Load(); n < 4 { // by then the first has looked too
			return fmt.Sprint("it has looked around ", n, " times")
		}
		return ""
	})
	waitShares(t, []member{first, second}, 4, 0)
	var fence int
	if err := pool.QueryRow(t.Context(), `SELECT max(fence) FROM postroom.outbox_lanes`).Scan(&fence); err != nil || fence != 1 {
		t.Errorf("fence %d, %v: the first gave lanes to the dead", fence, err)
	}
	first.stop()
	waitShares(t, []member{second}, 4)
}

// A claim that a stop cuts off leaves no lane owned, whenever the stop comes.
func TestStopWhileClaiming(t *testing.T) {
	direct := pgtest.New(t)
	for _, when := range []string{"before", "after"} {
		for _, part := range []string{"fence = fence + 1", "SELECT \"postroom\".origin()", "INSERT INTO \"postroom\".outbox_dispatchers"} {
			t.Run(when+"/"+part, func(t *testing.T) {
				ctx, cancel := context.WithCancel(t.Context())
				defer cancel()
				cfg := direct.Config()
				cfg.ConnConfig.Tracer = &stopper{part, when, cancel}
				pool, err := pgxpool.NewWithConfig(t.Context(), cfg)
				if err != nil {
					t.Fatal(err)
				}
				defer pool.Close()
				d, err := dispatcher.New(pool, &recorder{}, dispatcher.Config{})
				if err != nil {
					t.Fatal(err)
				}
				if err := d.Run(ctx); err != nil {
					t.Fatal(err)
				}
				var owned, present int
				err = direct.QueryRow(t.Context(), `SELECT (SELECT count(owner) FROM postroom.outbox_lanes),
					(SELECT count(*) FROM postroom.outbox_dispatchers)`).Scan(&owned, &present)
				if err != nil || owned > 0 || present > 0 {
					t.Errorf("%d lanes are owned, %d dispatchers present, %v", owned, present, err)
				}
			})
		}
	}
}

// stopper calls stop when a statement that contains part begins or has ended.
type stopper struct {
	part, when string
	stop       func()
}

type stopperKey struct{}

func (s *stopper) TraceQueryStart(ctx context.Context, _ *pgx.Conn, data pgx.TraceQueryStartData) context.Context {
	if !strings.Contains(data.SQL, s.part) {
		return ctx
	}
	if s.when == "before" {
		s.stop()
	}
	return context.WithValue(ctx, stopperKey{}, true)
}

func (s *stopper) TraceQueryEnd(ctx context.Context, _ *pgx.Conn, _ pgx.TraceQueryEndData) {
	if ctx.Value(stopperKey{}) != nil {
		s.stop()
	}
}

// A claim whose answer is lost is made good by the next.
func TestClaimWithoutAnswer(t *testing.T) {
	direct := pgtest.New(t)
	cfg := direct.Config()
	cut := &cutter{part: "fence = fence + 1"}
	cfg.ConnConfig.Tracer = cut
	pool, err := pgxpool.NewWithConfig(t.Context(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(pool.Close)
	d := join(t, pool, &recorder{}, dispatcher.Config{})
	began := time.Now()
	waitShares(t, []member{d}, 4)
	if d := time.Since(began); d > 10*time.Second {
		t.Errorf("the lanes were claimed after %v, the lease lasts 30s", d)
	}
	var fence int
	if err := direct.QueryRow(t.Context(), `SELECT min(fence) FROM postroom.outbox_lanes`).Scan(&fence); err != nil || fence != 2 {
		t.Errorf("fence %d, want 2: the first claim was to be executed and its answer lost; %v", fence, err)
	}
}

// cutter cuts the connection on which the first statement that contains part
// was executed, before its answer is read.
type cutter struct {
	part string
	once sync.Once
}

func (c *cutter) TraceQueryStart(ctx context.Context, conn *pgx.Conn, data pgx.TraceQueryStartData) context.Context {
	if strings.Contains(data.SQL, c.part) {
		c.once.Do(func() {
			// The statement is executed here, with the same owner, and the one that
			// the caller sends finds a closed connection.
			args := slices.Clone(data.Args)
			other, err := pgx.ConnectConfig(context.WithoutCancel(ctx), untraced(conn.Config()))
			if err == nil {
				_, err = other.Exec(context.WithoutCancel(ctx), data.SQL, args...)
				_ = other.Close(context.WithoutCancel(ctx))
			}
			if err != nil {
				panic(err)
			}
			_ = conn.PgConn().Conn().Close()
		})
	}
	return ctx
}

func untraced(cfg *pgx.ConnConfig) *pgx.ConnConfig {
	cfg.Tracer = nil
	return cfg
}

func (*cutter) TraceQueryEnd(context.Context, *pgx.Conn, pgx.TraceQueryEndData) {}

// withLanes makes a database with a number of lanes.
func withLanes(t testing.TB, lanes int) *pgxpool.Pool {
	t.Helper()
	pool := pgtest.First(t).Empty(t)
	if _, err := migrations.Up(t.Context(), pool, migrations.Config{Lanes: lanes}); err != nil {
		t.Fatal(err)
	}
	return pool
}

// B32: idle dispatchers ask little, however many lanes each has.
func TestCase_B32_IdleCostOfManyLanes(t *testing.T) {
	direct := withLanes(t, 64)
	const instances = 2
	var count tracer
	cfg := direct.Config()
	cfg.ConnConfig.Tracer = &count
	pool, err := pgxpool.NewWithConfig(t.Context(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(pool.Close)
	r := &recorder{}
	var members []member
	for range instances {
		members = append(members, join(t, pool, r, dispatcher.Config{}))
	}
	waitShares(t, members, 32, 32)
	write(t, direct, numbered("orders", 1000, 0, 1000)...)
	waitStored(t, r, 1000)
	eventually(t, time.Minute, func() string {
		before, began := count.n.Load(), time.Now()
		for time.Since(began) < time.Second {
			select {
			case <-time.After(50 * time.Millisecond):
			case <-t.Context().Done():
			}
		}
		if rate := float64(count.n.Load()-before) / time.Since(began).Seconds(); rate > 20*instances {
			return fmt.Sprintf("%.0f statements per second", rate)
		}
		return ""
	})
	began := time.Now()
	write(t, direct, postroom.Message{ID: "late", Topic: "orders"})
	waitStored(t, r, 1001)
	if d := time.Since(began); d > time.Second {
		t.Errorf("a message after idling took %v", d)
	}
}
