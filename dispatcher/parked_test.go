package dispatcher_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"sync"
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

// faults decides outcomes by the topic and id of a message.
type faults struct {
	mu      sync.Mutex
	refused map[string]bool // ids
	away    map[string]bool // topics
	tried   map[string]int  // ids → how often
}

func newFaults(refused ...string) *faults {
	f := &faults{refused: map[string]bool{}, away: map[string]bool{}, tried: map[string]int{}}
	for _, id := range refused {
		f.refused[id] = true
	}
	return f
}

func (f *faults) answer(m postroom.Message) broker.Result {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.tried[m.ID]++
	switch {
	case f.away[m.Topic]:
		return broker.Result{Outcome: broker.Unreachable, Scope: m.Topic, Err: errors.New("no such topic")}
	case f.refused[m.ID]:
		return broker.Result{Outcome: broker.Refused, Err: errors.New("too large")}
	}
	return broker.Result{Outcome: broker.Stored}
}

func (f *faults) take(ids ...string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, id := range ids {
		delete(f.refused, id)
	}
}

func (f *faults) setAway(topic string, away bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.away[topic] = away
}

func (f *faults) tries(id string) int {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.tried[id]
}

func execSQL(t testing.TB, pool *pgxpool.Pool, sql string, args ...any) {
	t.Helper()
	if _, err := pool.Exec(t.Context(), sql, args...); err != nil {
		t.Fatalf("%s: %v", sql, err)
	}
}

func scanSQL[T any](t testing.TB, pool *pgxpool.Pool, sql string, args ...any) (v T) {
	t.Helper()
	if err := pool.QueryRow(t.Context(), sql, args...).Scan(&v); err != nil {
		t.Fatalf("%s: %v", sql, err)
	}
	return v
}

func waitParked(t testing.TB, pool *pgxpool.Pool, n int) {
	t.Helper()
	eventually(t, time.Minute, func() string {
		if got := scanSQL[int](t, pool, `SELECT count(*) FROM postroom.outbox_parked`); got != n {
			return fmt.Sprintf("%d messages are parked, want %d", got, n)
		}
		return ""
	})
}

// history returns what operators did, one line each.
func history(t testing.TB, pool *pgxpool.Pool) string {
	t.Helper()
	rows, err := pool.Query(t.Context(), `
		SELECT concat_ws(' ', who, action, target, message_id, state, attempts, error, reason)
		  FROM postroom.outbox_parked_history ORDER BY number`)
	if err != nil {
		t.Fatal(err)
	}
	lines, err := pgx.CollectRows(rows, pgx.RowTo[string])
	if err != nil {
		t.Fatal(err)
	}
	return strings.Join(lines, "; ")
}

// once has a refused message wait for an operator at once.
var once = dispatcher.Config{MaxAttempts: 1}

// A refused message is tried again by itself, after a pause, and what waits
// behind it leaves in order with it, before newer messages of the key.
func TestRefusedIsTriedAgain(t *testing.T) {
	pgtest.Each(t, func(t *testing.T, s *pgtest.Server) {
		pool := s.New(t)
		f := newFaults("m0")
		r := &recorder{answer: f.answer}
		start(t, pool, r, dispatcher.Config{PageSize: 10})
		write(t, pool, numbered("orders", 2, 0, 60)...)
		waitParked(t, pool, 30)
		soon := func() {
			execSQL(t, pool, `UPDATE postroom.outbox_parked SET due_at = now() WHERE state = 'refused'`)
		}
		eventually(t, time.Minute, func() string {
			soon()
			if n := f.tries("m0"); n < 4 {
				return fmt.Sprintf("%d attempts", n)
			}
			return ""
		})
		if n := scanSQL[int](t, pool, `SELECT attempts FROM postroom.outbox_parked WHERE state = 'refused'`); n < 3 {
			t.Errorf("%d attempts are counted", n)
		}
		f.take("m0")
		write(t, pool, numbered("orders", 2, 60, 40)...)
		eventually(t, time.Minute, func() string {
			soon()
			if n := len(r.firsts()); n != 100 {
				return fmt.Sprintf("%d messages are published, want 100", n)
			}
			return ""
		})
		waitParked(t, pool, 0)
		write(t, pool, numbered("orders", 2, 100, 2)...)
		waitStored(t, r, 102)
		if p := keyOrder(r); p != "" {
			t.Error(p)
		}
		if n := len(r.messages()); n != 102 {
			t.Errorf("%d publishes of 102 messages", n)
		}
	})
}

// After the last attempt a refused message waits for an operator.
func TestLastAttempt(t *testing.T) {
	pool := pgtest.New(t)
	f := newFaults("m0")
	r := &recorder{answer: f.answer}
	start(t, pool, r, dispatcher.Config{MaxAttempts: 3})
	write(t, pool, numbered("orders", 1, 0, 2)...)
	eventually(t, time.Minute, func() string {
		execSQL(t, pool, `UPDATE postroom.outbox_parked SET due_at = now() WHERE due_at > now()`)
		if n := f.tries("m0"); n < 3 {
			return fmt.Sprintf("%d attempts", n)
		}
		if scanSQL[bool](t, pool, `SELECT bool_or(due_at IS NOT NULL) FROM postroom.outbox_parked`) {
			return "still due"
		}
		return ""
	})
	rows := parked(t, pool)
	if len(rows) != 2 || rows[0].Attempts != 3 || rows[0].State != "refused" || rows[1].State != "waiting" {
		t.Errorf("parked: %+v", rows)
	}
}

// After a requeue head and successors leave in order, before newer ones, and
// what is refused then holds back what is behind it, and only that.
func TestRequeue(t *testing.T) {
	pgtest.Each(t, func(t *testing.T, s *pgtest.Server) {
		pool := s.New(t)
		f := newFaults("m0", "m21", "m30")
		r := &recorder{answer: f.answer}
		start(t, pool, r, dispatcher.Config{PageSize: 7, MaxAttempts: 1})
		write(t, pool, numbered("orders", 3, 0, 60)...) // k0: m0, m21 and m30 refused
		write(t, pool, postroom.Message{ID: "alone", Topic: "orders"})
		waitStored(t, r, 41)
		waitParked(t, pool, 20)
		op := dispatcher.Parked{Pool: pool, By: "ann"}
		requeue := func(f dispatcher.Filter, want int64) {
			t.Helper()
			if n, err := op.Requeue(t.Context(), f, "limit raised"); n != want || err != nil {
				t.Errorf("Requeue(%+v) = %d, %v, want %d", f, n, err, want)
			}
		}
		requeue(dispatcher.Filter{Topic: "other"}, 0)
		requeue(dispatcher.Filter{ID: "m3"}, 0) // it only waits
		f.take("m0")
		requeue(dispatcher.Filter{ID: "m0", Topic: "orders", Key: "k0", Error: "large"}, 1)
		waitStored(t, r, 41+7)
		waitParked(t, pool, 13)
		eventually(t, time.Minute, func() string {
			if scanSQL[int](t, pool, `SELECT count(*) FROM postroom.outbox_parked WHERE message_id = 'm21' AND state = 'refused'`) == 0 {
				return "m21 is not refused"
			}
			return ""
		})
		f.take("m21", "m30")
		write(t, pool, numbered("orders", 3, 60, 3)...)
		requeue(dispatcher.Filter{All: true}, 1)
		waitStored(t, r, 64)
		waitParked(t, pool, 0)
		if p := keyOrder(r); p != "" {
			t.Error(p)
		}
		want := "ann requeue m0 refused 1 too large limit raised; ann requeue m21 refused 1 too large limit raised"
		if got := history(t, pool); got != want {
			t.Errorf("history: %s\nwant: %s", got, want)
		}
	})
}

// A key under steady traffic comes out of the parked table all the same.
func TestRequeueUnderTraffic(t *testing.T) {
	pool := pgtest.New(t)
	f := newFaults("m0")
	r := &recorder{answer: f.answer}
	start(t, pool, r, once)
	write(t, pool, numbered("orders", 1, 0, 500)...)
	waitParked(t, pool, 500)
	next := atomic.Int64{}
	next.Store(500)
	ctx, cancel := context.WithCancel(t.Context())
	var writing sync.WaitGroup
	writing.Go(func() {
		for ctx.Err() == nil && next.Load() < 20_000 {
			write(t, pool, numbered("orders", 1, int(next.Load()), 20)...)
			next.Add(20)
		}
	})
	defer writing.Wait()
	defer cancel()
	f.take("m0")
	if n, err := (dispatcher.Parked{Pool: pool}).Requeue(t.Context(), dispatcher.Filter{Key: "k0"}, ""); n != 1 || err != nil {
		t.Fatal(n, err)
	}
	waitParked(t, pool, 0)
	if next.Load() == 20_000 {
		t.Error("the parked messages have only gone since the writing ended")
	}
	cancel()
	writing.Wait()
	waitStored(t, r, int(next.Load()))
	if p := keyOrder(r); p != "" {
		t.Error(p)
	}
}

// Discarding a refused message lets go what waits behind it; the message is kept
// in the history.
func TestDiscard(t *testing.T) {
	pgtest.Each(t, func(t *testing.T, s *pgtest.Server) {
		pool := s.New(t)
		r := &recorder{answer: newFaults("m0", "m4", "alone").answer}
		start(t, pool, r, once)
		write(t, pool, numbered("orders", 1, 0, 10)...)
		write(t, pool, postroom.Message{ID: "alone", Topic: "orders", Payload: []byte("x"), Headers: []postroom.Header{{Name: "h", Value: []byte{0, 255}}}})
		waitParked(t, pool, 11)
		op := dispatcher.Parked{Pool: pool}
		for _, id := range []string{"m2", "m0", "alone"} { // one that waits, a head, one without a key
			if n, err := op.Discard(t.Context(), dispatcher.Filter{ID: id}, "a test"); n != 1 || err != nil {
				t.Errorf("Discard %s: %d, %v", id, n, err)
			}
		}
		waitStored(t, r, 2) // m1 and m3: m4 is refused
		waitParked(t, pool, 6)
		if got := strings.Join(r.firsts(), ","); got != "m1,m3" {
			t.Errorf("published %s", got)
		}
		who := scanSQL[string](t, pool, `SELECT session_user`)
		want := strings.NewReplacer("WHO", who).Replace(
			"WHO discard m2 waiting 0 a test; WHO discard m0 refused 1 too large a test; WHO discard alone refused 1 too large a test")
		if got := history(t, pool); got != want {
			t.Errorf("history: %s\nwant: %s", got, want)
		}
		kept := scanSQL[bool](t, pool, `SELECT payload = 'x' AND header_names = '{h}' AND header_values = ARRAY['\x00ff'::bytea]
			FROM postroom.outbox_parked_history WHERE message_id = 'alone'`)
		if !kept {
			t.Error("the history does not hold the message as it was")
		}
	})
}

// A misspelt topic's messages can be sent to the right one.
func TestRedirect(t *testing.T) {
	pool := pgtest.New(t)
	r := &recorder{answer: func(m postroom.Message) broker.Result {
		if m.Topic == "ordrs" {
			return broker.Result{Outcome: broker.Refused, Err: errors.New("invalid topic")}
		}
		return broker.Result{Outcome: broker.Stored}
	}}
	start(t, pool, r, once)
	sent := numbered("ordrs", 3, 0, 2500)
	sent = append(sent, postroom.Message{ID: "alone", Topic: "ordrs"})
	write(t, pool, sent...)
	waitParked(t, pool, 2501)
	op := dispatcher.Parked{Pool: pool, By: "ann"}
	if _, err := op.Redirect(t.Context(), dispatcher.Filter{Topic: "ordrs"}, "bad\ttopic", ""); err == nil {
		t.Error("redirected to an invalid topic")
	}
	if n, err := op.Redirect(t.Context(), dispatcher.Filter{Topic: "ordrs"}, "orders", "misspelt"); n != 2501 || err != nil {
		t.Errorf("Redirect: %d, %v", n, err)
	}
	waitStored(t, r, 2501)
	waitParked(t, pool, 0)
	if p := keyOrder(r); p != "" {
		t.Error(p)
	}
	for _, m := range r.messages() {
		if m.Topic != "orders" {
			t.Fatalf("%s went to %s", m.ID, m.Topic)
		}
	}
	if !strings.Contains(history(t, pool), "ann redirect orders m0 refused 1 invalid topic misspelt; ") {
		t.Errorf("history: %.100s…", history(t, pool))
	}
}

// lane_hash is the number that package outbox writes.
func TestLaneHashInSQL(t *testing.T) {
	pool := pgtest.New(t)
	for i, key := range []string{"k", "", "schlüssel\n", strings.Repeat("long", 200), "\U0001F4EE"} {
		write(t, pool, postroom.Message{Topic: "orders" + strconv.Itoa(i), Key: key, EmptyKey: key == ""})
	}
	if n := scanSQL[int](t, pool, `SELECT count(*) FROM postroom.outbox_messages WHERE hash = postroom.lane_hash(topic, key)`); n != 5 {
		t.Errorf("lane_hash agrees on %d of 5 keys", n)
	}
}

// The functions work from any session, whatever its search path holds.
func TestParkedFunctionsInSQL(t *testing.T) {
	pgtest.Each(t, func(t *testing.T, s *pgtest.Server) {
		pool := s.New(t)
		f := newFaults("m0", "m1", "m2")
		r := &recorder{answer: f.answer}
		start(t, pool, r, once)
		write(t, pool, numbered("orders", 3, 0, 9)...)
		waitParked(t, pool, 9)
		conn, err := pool.Acquire(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Release()
		_, err = conn.Exec(t.Context(), `
			CREATE SCHEMA evil;
			CREATE FUNCTION evil.count(anyelement) RETURNS bigint LANGUAGE sql AS 'SELECT 0::bigint';
			CREATE FUNCTION evil.strpos(text, text) RETURNS int LANGUAGE sql AS 'SELECT 1';
			SET search_path = evil, pg_catalog`)
		if err != nil {
			t.Fatal(err)
		}
		call := func(sql string, want int64) {
			t.Helper()
			var n, last int64
			if err := conn.QueryRow(t.Context(), sql).Scan(&n, &last); err != nil || n != want {
				t.Errorf("%s: %d, %v, want %d", sql, n, err, want)
			}
		}
		if _, err := conn.Exec(t.Context(), `SELECT postroom.discard_parked()`); err == nil {
			t.Error("discard_parked() chose everything")
		}
		call(`SELECT * FROM postroom.requeue_parked(error => 'tiny')`, 0)
		call(`SELECT * FROM postroom.requeue_parked(everything => true, older_than => '1 hour')`, 0)
		f.take("m0", "m1", "m2")
		call(`SELECT * FROM postroom.requeue_parked(topic => 'orders', key => 'k0', who => 'ann', reason => 'try')`, 1)
		waitStored(t, r, 3)
		call(`SELECT * FROM postroom.discard_parked(message_id => 'm1')`, 1)
		waitStored(t, r, 5)
		call(`SELECT * FROM postroom.redirect_parked('invoices', everything => true, most => 2)`, 2)
		waitStored(t, r, 8)
		waitParked(t, pool, 0)
	})
}

// An operator's open transaction holds up the rows it has changed, and no other.
func TestOpenRequeueDelaysNobody(t *testing.T) {
	pool := pgtest.New(t)
	f := newFaults("m0", "m2") // of one lane
	r := &recorder{answer: f.answer}
	start(t, pool, r, dispatcher.Config{})
	write(t, pool, numbered("orders", 3, 0, 9)...)
	waitParked(t, pool, 6)
	// Both fall due when the transaction holds the one.
	execSQL(t, pool, `UPDATE postroom.outbox_parked SET due_at = now() + interval '1 s' WHERE state = 'refused'`)
	tx, err := pool.Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = tx.Rollback(context.Background()) }()
	if _, err := tx.Exec(t.Context(), `SELECT postroom.requeue_parked(key => 'k0')`); err != nil {
		t.Fatal(err)
	}
	f.take("m0", "m2")
	write(t, pool, numbered("orders", 3, 9, 90)...)
	waitStored(t, r, 3+33+30)
	if err := tx.Commit(t.Context()); err != nil {
		t.Fatal(err)
	}
	waitStored(t, r, 99)
	if p := keyOrder(r); p != "" {
		t.Error(p)
	}
}

func TestListParked(t *testing.T) {
	pool := pgtest.New(t)
	r := &recorder{answer: newFaults("m0", "m1").answer}
	start(t, pool, r, dispatcher.Config{MaxAttempts: 2})
	write(t, pool, numbered("orders", 2, 0, 6)...)
	waitParked(t, pool, 6)
	op := dispatcher.Parked{Pool: pool}
	list := func(f dispatcher.Filter, after int64, n int) (ids []string, last dispatcher.ParkedMessage) {
		t.Helper()
		all, err := op.List(t.Context(), f, after, n)
		if err != nil {
			t.Fatal(err)
		}
		for _, m := range all {
			ids, last = append(ids, m.ID), m
		}
		slices.Sort(ids) // lanes have no order among them
		return ids, last
	}
	for want, f := range map[string]dispatcher.Filter{
		"m0 m1 m2 m3 m4 m5": {All: true},
		"m0 m2 m4":          {Key: "k0"},
		"m0 m1":             {Error: "too large"},
		"m3":                {ID: "m3", Topic: "orders"},
		"":                  {Age: time.Hour, All: true},
	} {
		if got, _ := list(f, 0, 100); strings.Join(got, " ") != want {
			t.Errorf("%+v: %v, want %s", f, got, want)
		}
	}
	first, m := list(dispatcher.Filter{All: true}, 0, 1)
	if !m.Refused || m.Attempts < 1 || m.Error != "too large" || m.Tried.IsZero() || m.Parked.IsZero() || "m"+string(m.Payload) != m.ID {
		t.Errorf("%+v", m)
	}
	rest, _ := list(dispatcher.Filter{All: true}, m.Number, 100)
	if len(first) != 1 || len(rest) != 5 {
		t.Errorf("pages of %d and %d messages", len(first), len(rest))
	}
	for _, bad := range []func() error{
		func() error { _, err := op.List(t.Context(), dispatcher.Filter{}, 0, 1); return err },
		func() error { _, err := op.Discard(t.Context(), dispatcher.Filter{}, ""); return err },
		func() error { _, err := op.Requeue(t.Context(), dispatcher.Filter{Age: -1}, ""); return err },
		func() error {
			_, err := dispatcher.Parked{}.Requeue(t.Context(), dispatcher.Filter{All: true}, "")
			return err
		},
	} {
		if err := bad(); err == nil || !strings.HasPrefix(err.Error(), "dispatcher: ") {
			t.Errorf("error %v", err)
		}
	}
}

// An attempt is counted before it is made: a message that ends the process is
// not tried without end. One that finds the broker away counts for nothing.
func TestAttemptIsCountedBeforeItIsMade(t *testing.T) {
	pool := pgtest.New(t)
	outcome := broker.Result{Outcome: broker.Refused, Err: errors.New("too large")}
	r := &recorder{answer: func(postroom.Message) broker.Result { return outcome }}
	var during atomic.Pointer[string]
	r.before = func(ctx context.Context, _ []postroom.Message) {
		var row string
		err := pool.QueryRow(ctx, `SELECT format('%s attempts, due %s', attempts, due_at > now()) FROM postroom.outbox_parked`).Scan(&row)
		if err == nil {
			during.Store(&row)
		}
	}
	start(t, pool, r, dispatcher.Config{MaxAttempts: 3})
	write(t, pool, numbered("orders", 1, 0, 1)...)
	waitParked(t, pool, 1)
	r.mu.Lock()
	outcome = broker.Result{Outcome: broker.Unreachable, Err: errors.New("away")}
	r.mu.Unlock()
	execSQL(t, pool, `UPDATE postroom.outbox_parked SET due_at = now(), attempts = 1`)
	eventually(t, time.Minute, func() string {
		if d := during.Load(); d == nil || *d != "2 attempts, due t" {
			return "not tried as the second attempt"
		}
		return scanSQL[string](t, pool, `SELECT CASE WHEN attempts = 1 AND due_at > now() THEN '' ELSE format('%s attempts', attempts) END FROM postroom.outbox_parked`)
	})
}

// A message is discarded while it is tried: what waits behind it leaves, whatever
// the broker says.
func TestDiscardWhileTried(t *testing.T) {
	for _, outcome := range []broker.Outcome{broker.Refused, broker.Unreachable, broker.NotTried, broker.Stored} {
		t.Run(outcome.String(), func(t *testing.T) {
			pool := pgtest.New(t)
			op := dispatcher.Parked{Pool: pool}
			var tried atomic.Bool
			r := &recorder{}
			r.answer = func(m postroom.Message) broker.Result {
				switch {
				case m.ID != "m0":
					return broker.Result{Outcome: broker.Stored}
				case !tried.Swap(true):
					return broker.Result{Outcome: broker.Refused, Err: errors.New("too large")}
				}
				if n, err := op.Discard(context.Background(), dispatcher.Filter{ID: "m0"}, ""); n != 1 || err != nil {
					t.Errorf("Discard: %d, %v", n, err)
				}
				return broker.Result{Outcome: outcome, Err: errors.New("too large")}
			}
			start(t, pool, r, once)
			write(t, pool, numbered("orders", 1, 0, 5)...)
			waitParked(t, pool, 5)
			if n, err := op.Requeue(t.Context(), dispatcher.Filter{ID: "m0"}, ""); n != 1 || err != nil {
				t.Fatal(n, err)
			}
			waitParked(t, pool, 0)
			eventually(t, time.Minute, func() string {
				if got := strings.Join(r.firsts(), ","); !strings.HasSuffix(got, "m1,m2,m3,m4") {
					return "published " + got
				}
				return ""
			})
		})
	}
}
