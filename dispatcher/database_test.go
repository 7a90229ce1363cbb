package dispatcher_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/postroom/postroom"
	"github.com/postroom/postroom/dispatcher"
	"github.com/postroom/postroom/internal/pgtest"
)

// syncBuffer collects log lines.
type syncBuffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (s *syncBuffer) Write(p []byte) (int, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.b.Write(p)
}

func (s *syncBuffer) lines() []string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return strings.Split(strings.TrimSpace(s.b.String()), "\n")
}

// B29: with the database away there are few attempts to reach it and few log
// lines, and everything goes on when it is back.
func TestCase_B29_DatabaseAway(t *testing.T) {
	direct := pgtest.New(t)
	var away atomic.Bool
	var dials atomic.Int64
	cfg := direct.Config()
	dialer := cfg.ConnConfig.DialFunc
	cfg.ConnConfig.DialFunc = func(ctx context.Context, network, addr string) (net.Conn, error) {
		dials.Add(1)
		if away.Load() {
			return nil, errors.New("connection refused")
		}
		return dialer(ctx, network, addr)
	}
	cfg.ConnConfig.RuntimeParams["application_name"] = "b29"
	pool, err := pgxpool.NewWithConfig(t.Context(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	defer pool.Close()
	var log syncBuffer
	r := &recorder{}
	d, err := dispatcher.New(pool, r, dispatcher.Config{Logger: slog.New(slog.NewTextHandler(&log, nil))})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- d.Run(ctx) }()
	write(t, direct, numbered("orders", 3, 0, 10)...)
	waitStored(t, r, 10)

	away.Store(true)
	dials.Store(0)
	if _, err := direct.Exec(t.Context(), `SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = 'b29'`); err != nil {
		t.Fatal(err)
	}
	write(t, direct, numbered("orders", 3, 10, 10)...)
	began := time.Now()
	eventually(t, time.Minute, func() string {
		if time.Since(began) < 3*time.Second {
			return "three seconds are not over"
		}
		return ""
	})
	if n := dials.Load(); n == 0 || n > 100 { // one that does not wait tries thousands
		t.Errorf("%d attempts to connect in 3s", n)
	}
	if d.Health() == nil {
		t.Error("Health reports nothing")
	}
	if lines := log.lines(); len(lines) > 20 {
		t.Errorf("%d log lines:\n%s", len(lines), strings.Join(lines, "\n"))
	}
	away.Store(false)
	waitStored(t, r, 20)
	eventually(t, time.Minute, func() string {
		if err := d.Health(); err != nil {
			return err.Error()
		}
		return ""
	})
	cancel()
	if err := <-done; err != nil {
		t.Error(err)
	}
	if p := keyOrder(r); p != "" {
		t.Error(p)
	}
}

// tracer counts statements that contain part.
type tracer struct {
	part string
	n    atomic.Int64
}

func (c *tracer) TraceQueryStart(ctx context.Context, _ *pgx.Conn, data pgx.TraceQueryStartData) context.Context {
	if strings.Contains(data.SQL, c.part) {
		c.n.Add(1)
	}
	return ctx
}

func (*tracer) TraceQueryEnd(context.Context, *pgx.Conn, pgx.TraceQueryEndData) {}

// B32: an idle dispatcher asks little, however many lanes there are.
func TestCase_B32_IdleCost(t *testing.T) {
	direct := pgtest.New(t)
	cfg := direct.Config()
	var count tracer
	cfg.ConnConfig.Tracer = &count
	pool, err := pgxpool.NewWithConfig(t.Context(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(pool.Close)
	r := &recorder{}
	start(t, pool, r, dispatcher.Config{})
	write(t, direct, numbered("orders", 100, 0, 100)...)
	waitStored(t, r, 100)
	rate := func() float64 {
		before, began := count.n.Load(), time.Now()
		eventually(t, time.Minute, func() string {
			if time.Since(began) < time.Second {
				return "one second is not over"
			}
			return ""
		})
		return float64(count.n.Load()-before) / time.Since(began).Seconds()
	}
	eventually(t, time.Minute, func() string {
		if n := rate(); n > 20 {
			return fmt.Sprintf("%.0f statements per second", n)
		}
		return ""
	})
	// One message after that does not wait long.
	began := time.Now()
	write(t, direct, postroom.Message{ID: "late", Topic: "orders"})
	waitStored(t, r, 101)
	if d := time.Since(began); d > time.Second {
		t.Errorf("a message after idling took %v", d)
	}
}

// What an open transaction has written in bulk is walked by a few polls, not
// by every one, although no other transaction moves the snapshot.
func TestOpenBulkInsertIsNotWalkedByEveryPoll(t *testing.T) {
	pool := pgtest.New(t)
	r := &recorder{}
	start(t, pool, r, dispatcher.Config{MaxPollInterval: 20 * time.Millisecond})
	tx, err := pool.Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = tx.Rollback(context.Background()) }()
	_, err = tx.Exec(t.Context(), `
		INSERT INTO postroom.outbox_messages (hash, message_id, topic)
		SELECT n, 'bulk' || n, 'orders' FROM generate_series(1, 400000) n`)
	if err != nil {
		t.Fatal(err)
	}
	// Then no more index entries of the bulk are read than one poll would.
	read := func() (n int64) {
		if err := pool.QueryRow(t.Context(), `SELECT pg_stat_clear_snapshot()`).Scan(nil); err != nil {
			t.Fatal(err)
		}
		err := pool.QueryRow(t.Context(), `
			SELECT idx_tup_read FROM pg_stat_user_indexes WHERE indexrelname = 'outbox_messages_xid'`).Scan(&n)
		if err != nil {
			t.Fatal(err)
		}
		return n
	}
	eventually(t, time.Minute, func() string {
		before, began := read(), time.Now()
		for time.Since(began) < 1500*time.Millisecond {
			select {
			case <-time.After(10 * time.Millisecond):
			case <-t.Context().Done():
			}
		}
		if n := read() - before; n > 50_000 {
			return fmt.Sprintf("%d index entries read in 1.5 s", n)
		}
		return ""
	})
	write(t, pool, numbered("orders", 3, 0, 10)...)
	waitStored(t, r, 10)
	if err := tx.Commit(t.Context()); err != nil {
		t.Fatal(err)
	}
	waitStored(t, r, 400_010)
}

// stallable is a connection that can fall silent without being closed.
type stallable struct {
	net.Conn
	silent atomic.Bool
}

func (c *stallable) Read(b []byte) (int, error) {
	for {
		n, err := c.Conn.Read(b)
		if err != nil || !c.silent.Load() {
			return n, err
		}
	}
}

// Connections that have died without a word are given up at the deadline of the
// statement; others are made, and everything goes on.
func TestSilentConnections(t *testing.T) {
	direct := pgtest.New(t)
	var mu sync.Mutex
	var conns []*stallable
	cfg := direct.Config()
	dialer := cfg.ConnConfig.DialFunc
	cfg.ConnConfig.DialFunc = func(ctx context.Context, network, addr string) (net.Conn, error) {
		c, err := dialer(ctx, network, addr)
		if err != nil {
			return nil, err
		}
		s := &stallable{Conn: c}
		mu.Lock()
		defer mu.Unlock()
		conns = append(conns, s)
		return s, nil
	}
	pool, err := pgxpool.NewWithConfig(t.Context(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(pool.Close)
	r := &recorder{}
	start(t, pool, r, dispatcher.Config{StatementTimeout: 500 * time.Millisecond})
	write(t, direct, numbered("orders", 5, 0, 50)...)
	waitStored(t, r, 50)
	mu.Lock()
	for _, c := range conns {
		c.silent.Store(true)
	}
	mu.Unlock()
	began := time.Now()
	write(t, direct, numbered("orders", 5, 50, 50)...)
	waitStored(t, r, 100)
	if d := time.Since(began); d > 8*time.Second {
		t.Errorf("it took %v", d)
	}
	if p := keyOrder(r); p != "" {
		t.Error(p)
	}
}
