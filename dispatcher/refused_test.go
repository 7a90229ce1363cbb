package dispatcher_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/postroom/postroom"
	"github.com/postroom/postroom/broker"
	"github.com/postroom/postroom/dispatcher"
	"github.com/postroom/postroom/internal/pgtest"
)

type parkedRow struct {
	ID, State string
	Attempts  int
	Error     *string
}

func parked(t testing.TB, pool *pgxpool.Pool) []parkedRow {
	t.Helper()
	rows, err := pool.Query(t.Context(), `
		SELECT message_id, state, attempts, error FROM postroom.outbox_parked ORDER BY number`)
	if err != nil {
		t.Fatal(err)
	}
	all, err := pgx.CollectRows(rows, pgx.RowToStructByPos[parkedRow])
	if err != nil {
		t.Fatal(err)
	}
	return all
}

func refuse(ids ...string) func(postroom.Message) broker.Result {
	return func(m postroom.Message) broker.Result {
		for _, id := range ids {
			if m.ID == id {
				return broker.Result{Outcome: broker.Refused, Err: errors.New("too large:\n\x00 10 > 5")}
			}
		}
		return broker.Result{Outcome: broker.Stored}
	}
}

func TestRefusedIsParkedAndItsKeyWaits(t *testing.T) {
	pgtest.Each(t, func(t *testing.T, s *pgtest.Server) {
		pool := s.New(t)
		r := &recorder{answer: refuse("m3")}
		stop := start(t, pool, r, dispatcher.Config{PageSize: 4, MaxAttempts: 1})
		write(t, pool, numbered("orders", 3, 0, 30)...) // m3, m6, m9, … are of key k0
		waitStored(t, r, 20+1)                          // k1, k2, and m0
		write(t, pool, numbered("orders", 3, 30, 3)...) // m30 waits too
		waitStored(t, r, 22+1)
		stop()
		rows := parked(t, pool)
		var got []string
		for _, p := range rows {
			got = append(got, p.ID+" "+p.State)
		}
		want := "m3 refused,m6 waiting,m9 waiting,m12 waiting,m15 waiting,m18 waiting,m21 waiting,m24 waiting,m27 waiting,m30 waiting"
		if strings.Join(got, ",") != want {
			t.Errorf("parked: %s\nwant: %s", strings.Join(got, ","), want)
		}
		if e := rows[0].Error; e == nil || *e != "too large:   10 > 5" || rows[0].Attempts != 1 {
			t.Errorf("error %v, attempts %d", e, rows[0].Attempts)
		}
		if p := keyOrder(r); p != "" {
			t.Error(p)
		}
		// A dispatcher that starts anew keeps to it.
		again := &recorder{}
		stop = start(t, pool, again, dispatcher.Config{})
		write(t, pool, numbered("orders", 3, 33, 3)...)
		waitStored(t, again, 2)
		stop()
		if n := len(parked(t, pool)); n != 11 {
			t.Errorf("%d parked, want 11: m33 must wait behind m3", n)
		}
	})
}

func TestRefusedWithoutKeyDelaysNothing(t *testing.T) {
	pool := pgtest.New(t)
	r := &recorder{answer: refuse("m1")}
	start(t, pool, r, dispatcher.Config{})
	for i := range 5 {
		write(t, pool, postroom.Message{ID: fmt.Sprint("m", i), Topic: "orders"})
	}
	waitStored(t, r, 4)
	eventually(t, time.Minute, func() string {
		if n := len(parked(t, pool)); n != 1 {
			return fmt.Sprintf("%d parked", n)
		}
		return ""
	})
}

// B05: a later message of the key must not overtake one that failed.
func TestCase_B05_RetryIsNotOvertaken(t *testing.T) {
	pool := pgtest.New(t)
	failures := 0
	r := &recorder{answer: func(m postroom.Message) broker.Result {
		if m.ID == "m0" && failures < 3 {
			failures++
			return broker.Result{Outcome: broker.Unreachable, Err: errors.New("no leader")}
		}
		return broker.Result{Outcome: broker.Stored}
	}}
	start(t, pool, r, dispatcher.Config{})
	write(t, pool, numbered("orders", 2, 0, 6)...) // k0: m0, m2, m4
	waitStored(t, r, 6)
	if p := keyOrder(r); p != "" {
		t.Error(p)
	}
	first := r.firsts()[:3]
	if strings.Join(first, ",") != "m1,m3,m5" {
		t.Errorf("while m0 failed, %v went out first; want the other key's m1, m3, m5", first)
	}
	if n := len(parked(t, pool)); n != 0 {
		t.Errorf("%d parked", n)
	}
}

// B06: refused messages at the head do not fill every page.
func TestCase_B06_RefusedHeadsLetTheRestPass(t *testing.T) {
	pool := pgtest.New(t)
	r := &recorder{answer: func(m postroom.Message) broker.Result {
		if m.Topic == "bad" {
			return broker.Result{Outcome: broker.Refused, Err: errors.New("invalid topic")}
		}
		return broker.Result{Outcome: broker.Stored}
	}}
	write(t, pool, numbered("bad", 10, 0, 10)...)
	write(t, pool, numbered("good", 10, 10, 1000)...)
	start(t, pool, r, dispatcher.Config{PageSize: 10, MaxAttempts: 1})
	waitStored(t, r, 1000)
	eventually(t, time.Minute, func() string {
		if n := len(parked(t, pool)); n != 10 {
			return fmt.Sprintf("%d parked, want 10", n)
		}
		return ""
	})
	for _, p := range parked(t, pool) {
		if p.State != "refused" || p.Attempts != 1 || *p.Error != "invalid topic" {
			t.Errorf("parked as %+v", p)
		}
	}
}

// B08: an outage is nobody's fault, however long.
func TestCase_B08_OutageParksNothing(t *testing.T) {
	pool := pgtest.New(t)
	down, calls := true, 0
	r := &recorder{}
	r.answer = func(m postroom.Message) broker.Result {
		if down {
			calls++
			return broker.Result{Outcome: broker.Unreachable, Err: errors.New("connection refused")}
		}
		return broker.Result{Outcome: broker.Stored}
	}
	d, err := dispatcher.New(pool, r, dispatcher.Config{})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- d.Run(ctx) }()
	write(t, pool, numbered("orders", 500, 0, 500)...)
	eventually(t, time.Minute, func() string {
		r.mu.Lock()
		defer r.mu.Unlock()
		if r.calls < 12 {
			return fmt.Sprintf("%d calls", r.calls)
		}
		return ""
	})
	if h := d.Health(); h == nil || !strings.Contains(h.Error(), "connection refused") {
		t.Errorf("Health() = %v, want the reason", h)
	}
	r.mu.Lock()
	down = false
	r.mu.Unlock()
	waitStored(t, r, 500)
	eventually(t, time.Minute, func() string {
		if h := d.Health(); h != nil {
			return h.Error()
		}
		return ""
	})
	cancel()
	if err := <-done; err != nil {
		t.Error(err)
	}
	if n := len(parked(t, pool)); n != 0 {
		t.Errorf("%d parked by an outage", n)
	}
	if p := keyOrder(r); p != "" {
		t.Error(p)
	}
}

// B09: a publisher that never returns holds no transaction, no connection, no
// writer, and at most its own lanes.
func TestCase_B09_HungPublisher(t *testing.T) {
	pool := pgtest.New(t)
	release := make(chan struct{})
	hung := &recorder{before: func(context.Context, []postroom.Message) { <-release }}
	cfg := dispatcher.Config{PublishTimeout: 300 * time.Millisecond, Lease: 900 * time.Millisecond, DrainTimeout: time.Second}
	stop := start(t, pool, hung, cfg)
	write(t, pool, numbered("orders", 8, 0, 100)...)
	eventually(t, time.Minute, func() string {
		var idle int
		err := pool.QueryRow(t.Context(), `
			SELECT count(*) FROM pg_stat_activity
			 WHERE datname = current_database() AND state LIKE 'idle in transaction%'`).Scan(&idle)
		if err != nil || idle > 0 {
			t.Fatalf("%d sessions idle in transaction, %v", idle, err)
		}
		var lapsed int
		err = pool.QueryRow(t.Context(), `
			SELECT count(*) FROM postroom.outbox_lanes WHERE lease < clock_timestamp()`).Scan(&lapsed)
		if err != nil || lapsed < 4 {
			return fmt.Sprintf("%d lanes given up, %v", lapsed, err)
		}
		return ""
	})
	write(t, pool, numbered("orders", 8, 100, 100)...) // writers are not held up
	other := &recorder{}
	start(t, pool, other, cfg)
	waitStored(t, other, 200)
	close(release)
	stop()
	if p := keyOrder(other); p != "" {
		t.Error(p)
	}
}

// B12 and B15: a row is in exactly one place, and parked rows are not polled.
func TestCase_B15_EveryRowIsSomewhere(t *testing.T) {
	pool := pgtest.New(t)
	for _, impossible := range []string{
		`INSERT INTO postroom.outbox_messages (hash, message_id, topic, xid) VALUES (1, 'a', 't', NULL)`,
		`INSERT INTO postroom.outbox_messages (hash, message_id, topic) VALUES (-1, 'a', 't')`,
		`INSERT INTO postroom.outbox_messages (hash, message_id, topic) VALUES (1, '', 't')`,
		`INSERT INTO postroom.outbox_messages (hash, message_id, topic, header_names) VALUES (1, 'a', 't', '{x}')`,
		`INSERT INTO postroom.outbox_messages (hash, message_id, topic, origin) VALUES (1, 'a', 't', NULL)`,
		`INSERT INTO postroom.outbox_scheduled (hash, message_id, topic, deliver_at) VALUES (1, 'a', 't', NULL)`,
		`UPDATE postroom.outbox_lanes SET owner = 'x', lease = NULL`,
		`UPDATE postroom.outbox_lanes SET owner = NULL, lease = now()`,
		`INSERT INTO postroom.outbox_parked (lane, origin, id, state, attempts, created_at, hash, message_id, topic, header_names, header_values)
		 VALUES (1000, 1, 1, 'refused', 1, now(), 1, 'a', 't', '{}', '{}')`,
		`INSERT INTO postroom.outbox_parked (lane, origin, id, state, attempts, created_at, hash, message_id, topic, header_names, header_values)
		 VALUES (1000, 1, 1, 'waiting', 0, now(), 1, 'a', 't', '{}', '{}')`,
		`INSERT INTO postroom.outbox_parked (lane, origin, id, state, attempts, created_at, hash, message_id, topic, header_names, header_values)
		 VALUES (1000, 1, 1, 'lost', 0, now(), 1, 'a', 't', '{}', '{}')`,
	} {
		if _, err := pool.Exec(t.Context(), impossible); err == nil {
			t.Errorf("accepted: %s", impossible)
		}
	}
}
