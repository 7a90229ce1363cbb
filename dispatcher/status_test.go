package dispatcher_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/postroom/postroom"
	"github.com/postroom/postroom/broker"
	"github.com/postroom/postroom/dispatcher"
	"github.com/postroom/postroom/internal/pgtest"
)

func status(t testing.TB, pool *pgxpool.Pool) *dispatcher.Status {
	t.Helper()
	s, err := dispatcher.ReadStatus(t.Context(), pool, "")
	if err != nil {
		t.Fatal(err)
	}
	return s
}

func unpublished(s *dispatcher.Status) (n int64, oldest time.Duration) {
	for _, l := range s.Lanes {
		n += l.Unpublished.Rows
		oldest = max(oldest, l.Oldest)
	}
	return n, oldest
}

// The status names what stalls an outbox, with and without a dispatcher.
func TestReadStatus(t *testing.T) {
	pgtest.Each(t, func(t *testing.T, s *pgtest.Server) {
		pool := s.New(t)
		if n, oldest := unpublished(status(t, pool)); n != 0 || oldest != 0 {
			t.Errorf("an empty outbox has %d unpublished messages, the oldest %v old", n, oldest)
		}
		r := &recorder{answer: refuse("m3")}
		stop := start(t, pool, r, dispatcher.Config{})
		write(t, pool, numbered("orders", 3, 0, 30)...) // m3 is refused, and 8 wait
		waitStored(t, r, 21)
		waitSettled(t, pool)
		eventually(t, time.Minute, func() string {
			if n, _ := unpublished(status(t, pool)); n != 0 {
				return fmt.Sprintf("%d messages are unpublished", n)
			}
			return ""
		})
		now := status(t, pool)
		for _, l := range now.Lanes {
			if l.Owner == "" || l.Lease.Before(now.Time) || l.Fence == 0 {
				t.Errorf("lane %d: owner %q, lease %v, fence %d", l.Lane, l.Owner, l.Lease, l.Fence)
			}
		}
		if len(now.Heads) != 1 || now.Heads[0].ID != "m3" || now.Heads[0].Waiting.Rows != 8 || now.Heads[0].Error == "" {
			t.Errorf("heads %+v", now.Heads)
		}
		if now.Refused.Rows != 1 || now.Waiting.Rows != 8 || now.Scheduled.Rows != 0 {
			t.Errorf("refused %v, waiting %v, scheduled %v", now.Refused, now.Waiting, now.Scheduled)
		}
		stop()

		open, err := pool.Begin(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		defer open.Rollback(context.Background())
		var pid int32
		if err := open.QueryRow(t.Context(), `SELECT pg_backend_pid() FROM pg_current_xact_id()`).Scan(&pid); err != nil {
			t.Fatal(err)
		}
		write(t, pool, numbered("orders", 3, 100, 7)...)
		write(t, pool, postroom.Message{ID: "later", Topic: "orders", DeliverAt: time.Now().Add(time.Hour)})
		exec(t, pool, `UPDATE postroom.outbox_messages SET created_at = created_at - interval '1 hour' WHERE message_id = 'm104'`)
		now = status(t, pool)
		if n, oldest := unpublished(now); n != 7 || oldest < time.Hour || oldest > 2*time.Hour {
			t.Errorf("%d messages are unpublished, want 7, the oldest %v old", n, oldest)
		}
		if now.Lanes[0].Owner != "" || !now.Lanes[0].Lease.IsZero() {
			t.Errorf("nobody runs, and the first lane's owner is %q until %v", now.Lanes[0].Owner, now.Lanes[0].Lease)
		}
		if now.Scheduled.Rows != 1 {
			t.Errorf("%d scheduled", now.Scheduled.Rows)
		}
		if o := now.OldestTransaction; o == nil || o.PID != pid || o.State != "idle in transaction" || o.Age <= 0 {
			t.Errorf("oldest transaction %+v, want pid %d", o, pid)
		}
	})
}

// What a page in flight has not settled counts, and what it has does not.
func TestReadStatusInsideADifference(t *testing.T) {
	pool := pgtest.New(t)
	r := &recorder{answer: func(m postroom.Message) broker.Result {
		if m.ID == "m150" {
			return broker.Result{Outcome: broker.Unreachable, Err: errors.New("no leader")}
		}
		return broker.Result{Outcome: broker.Stored}
	}}
	stop := start(t, pool, r, dispatcher.Config{PageSize: 10})
	write(t, pool, numbered("orders", 1, 0, 200)...)
	waitStored(t, r, 150)
	stop() // records how far it came
	if n, _ := unpublished(status(t, pool)); n != 50 {
		t.Errorf("%d messages are unpublished, want 50", n)
	}
}

// Above a hundred thousand rows a count is marked as an estimate.
func TestReadStatusBoundsCounts(t *testing.T) {
	pool := pgtest.New(t)
	exec(t, pool, `INSERT INTO postroom.outbox_messages (hash, message_id, topic)
		SELECT 0, 'm' || g, 'orders' FROM generate_series(1, 150000) g`)
	err := pgx.BeginFunc(t.Context(), pool, func(tx pgx.Tx) error {
		s, err := dispatcher.ReadStatus(t.Context(), tx, "")
		if err != nil {
			return err
		}
		if c := s.Lanes[0].Unpublished; c.Rows != 100_000 || !c.Estimated {
			t.Errorf("unpublished %+v", c)
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
}

// Another process sees what is wrong with a dispatcher, by topic, for as long as it is.
func TestStatusShowsTroubles(t *testing.T) {
	t.Parallel()
	pool := pgtest.New(t)
	var away atomic.Bool
	away.Store(true)
	r := &recorder{answer: func(m postroom.Message) broker.Result {
		if m.Topic == "away" && away.Load() {
			return broker.Result{Outcome: broker.Unreachable, Scope: "away", Err: errors.New("no leader\x00\n[5]")}
		}
		return broker.Result{Outcome: broker.Stored}
	}}
	stop := start(t, pool, r, dispatcher.Config{})
	defer stop()
	write(t, pool, postroom.Message{ID: "1", Topic: "away", Key: "k"}, postroom.Message{ID: "2", Topic: "orders", Key: "k"})
	var told string
	eventually(t, time.Minute, func() string {
		s := status(t, pool)
		if len(s.Dispatchers) != 1 || s.Dispatchers[0].Owner == "" || !s.Dispatchers[0].Lease.After(s.Time) {
			return fmt.Sprintf("dispatchers %+v", s.Dispatchers)
		}
		told = strings.Join(s.Dispatchers[0].Troubles, "; ")
		if !strings.Contains(told, "away") || !strings.Contains(told, "no leader  [5]") {
			return "the status tells of " + told
		}
		return ""
	})
	if strings.Contains(told, "orders") {
		t.Errorf("troubles %q", told)
	}
	away.Store(false)
	waitStored(t, r, 2)
	eventually(t, time.Minute, func() string {
		if s := status(t, pool); len(s.Dispatchers[0].Troubles) > 0 {
			return fmt.Sprintf("troubles %q", s.Dispatchers[0].Troubles)
		}
		return ""
	})
}
