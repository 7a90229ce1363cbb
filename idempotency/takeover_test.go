package idempotency

import (
	"context"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/postroom/postroom/internal/pgtest"
)

func testStore(t *testing.T, cfg Config) *store {
	t.Helper()
	cfg, err := cfg.withDefaults()
	if err != nil {
		t.Fatal(err)
	}
	s := &store{pool: pgtest.New(t), cfg: cfg}
	if _, err := s.pool.Exec(t.Context(), `CREATE TABLE notes (note text)`); err != nil {
		t.Fatal(err)
	}
	return s
}

func testCall(t *testing.T) call {
	t.Helper()
	c, err := Call{Tenant: "acme", Operation: "pay", Key: "k1"}.check()
	if err != nil {
		t.Fatal(err)
	}
	return c
}

// mustEnter claims the key, as soon as it can be.
func mustEnter(t *testing.T, s *store, c call) *attempt {
	t.Helper()
	for deadline := time.Now().Add(time.Minute); ; {
		a, v, _, err := s.enter(t.Context(), c)
		if err != nil {
			t.Fatal(err)
		}
		if v == verdictMine {
			return a
		}
		if v != verdictInFlight || time.Now().After(deadline) {
			t.Fatalf("verdict %d", v)
		}
		<-time.After(time.Millisecond)
	}
}

func noting(note string) func(context.Context, pgx.Tx) decision {
	return func(ctx context.Context, tx pgx.Tx) decision {
		if _, err := tx.Exec(ctx, `INSERT INTO notes VALUES ($1)`, note); err != nil {
			return decision{act: actRelease}
		}
		return decision{act: actCommit, answer: answer{status: 200, body: []byte(note)}}
	}
}

func notes(t *testing.T, pool *pgxpool.Pool) string {
	t.Helper()
	var s string
	if err := pool.QueryRow(t.Context(), `SELECT coalesce(string_agg(note, ' '), '') FROM notes`).Scan(&s); err != nil {
		t.Fatal(err)
	}
	return s
}

// P8: a claimant that pauses beyond its lease finds the key taken before it does
// anything, also where the row was deleted and made again.
func TestPausedClaimant(t *testing.T) {
	for _, deleted := range []bool{false, true} {
		s := testStore(t, Config{Lease: 10 * time.Millisecond})
		c := testCall(t)
		paused := mustEnter(t, s, c)
		if deleted {
			if _, err := s.pool.Exec(t.Context(), `DELETE FROM postroom.idempotency_keys`); err != nil {
				t.Fatal(err)
			}
		}
		second := mustEnter(t, s, c)
		ran := false
		e, _ := paused.run(t.Context(), func(context.Context, pgx.Tx) decision {
			ran = true
			return decision{act: actCommit}
		})
		if e != endLost || ran {
			t.Errorf("deleted %v: the paused one ended with %d, ran is %v", deleted, e, ran)
		}
		if e, err := second.run(t.Context(), noting("second")); e != endDone {
			t.Errorf("deleted %v: the second one ended with %d, %v", deleted, e, err)
		}
		if got := notes(t, s.pool); got != "second" {
			t.Errorf("deleted %v: notes %q", deleted, got)
		}
	}
}

// P9, P10: takeovers and slow completers meet at every moment. One effect commits
// for the key, and the stored answer is that of the attempt which had it.
func TestTakeoverAgainstSlowCompleter(t *testing.T) {
	s := testStore(t, Config{Lease: 10 * time.Millisecond})
	c := testCall(t)
	for round := range 15 {
		if _, err := s.pool.Exec(t.Context(), `TRUNCATE notes, postroom.idempotency_keys, postroom.idempotency_answers`); err != nil {
			t.Fatal(err)
		}
		var all sync.WaitGroup
		var mu sync.Mutex
		var done, lost int
		for range 4 {
			all.Go(func() {
				for {
					a, v, _, err := s.enter(t.Context(), c)
					if err != nil {
						t.Error(err)
						return
					}
					if v == verdictReplay {
						return
					}
					if v != verdictMine {
						<-time.After(time.Millisecond)
						continue
					}
					<-time.After(time.Duration(round) * time.Millisecond) // the gap, around the lease
					e, err := a.run(t.Context(), noting("x"))
					mu.Lock()
					switch e {
					case endDone:
						done++
					case endLost:
						lost++
					default:
						t.Errorf("end %d: %v", e, err)
					}
					mu.Unlock()
					if e == endDone {
						return
					}
				}
			})
		}
		all.Wait()
		if got := notes(t, s.pool); done != 1 || got != "x" {
			t.Errorf("round %d: %d attempts done, %d lost, notes %q", round, done, lost, got)
		}
	}
}

// A takeover that comes late changes nothing: the row is another attempt's, or
// completed, or its lease was begun anew.
func TestTakeoverIsGuarded(t *testing.T) {
	s := testStore(t, Config{})
	c := testCall(t)
	a := mustEnter(t, s, c)
	a.disconnect()
	for _, test := range []struct {
		state  string
		lease  string
		old    int64
		taken  int
		locked bool
	}{
		{"in_flight", "1 minute", a.fence, 0, false},
		{"in_flight", "-1 minute", a.fence + 1, 0, false},
		{"released", "-1 minute", a.fence + 1, 0, false},
		{"completed", "-1 minute", a.fence, 0, false},
		{"unknown", "-1 minute", a.fence, 0, false},
		{"in_flight", "-1 minute", a.fence, 0, true},
		{"in_flight", "-1 minute", a.fence, 1, false},
	} {
		_, err := s.pool.Exec(t.Context(), `UPDATE postroom.idempotency_keys SET state = $1, fence = $3,
			completed_at = CASE WHEN $1 = 'completed' THEN now() END, locked_until = clock_timestamp() + $2::interval`,
			test.state, test.lease, a.fence)
		if err != nil {
			t.Fatal(err)
		}
		lock, err := s.pool.Begin(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		if test.locked {
			if _, err := lock.Exec(t.Context(), `SELECT FROM postroom.idempotency_keys FOR NO KEY UPDATE`); err != nil {
				t.Fatal(err)
			}
		}
		conn, err := s.pool.Acquire(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		var locked, taken int
		err = own(t.Context(), conn, quickly, s.cfg.Schema, takeOver, func(r pgx.Row) error { return r.Scan(&locked, &taken) },
			s.takingOver(c, newFence(), test.old)...)
		if err != nil || taken != test.taken || (locked == 0) != test.locked {
			t.Errorf("%+v: locked %d, taken %d, %v", test, locked, taken, err)
		}
		conn.Release()
		_ = lock.Rollback(t.Context())
	}
	a.leave()
}

// Row 25: a holder that works beyond its lease is not overtaken.
func TestLivingHolderIsNotOvertaken(t *testing.T) {
	s := testStore(t, Config{Lease: 10 * time.Millisecond})
	c := testCall(t)
	e, err := mustEnter(t, s, c).run(t.Context(), func(ctx context.Context, tx pgx.Tx) decision {
		for {
			r, err := s.look(ctx, c.id)
			if err != nil {
				t.Error(err)
			}
			if r.rest < 0 {
				break
			}
		}
		if _, v, _, err := s.enter(ctx, c); v != verdictInFlight || err != nil {
			t.Errorf("verdict %d, %v", v, err)
		}
		return noting("slow")(ctx, tx)
	})
	if e != endDone {
		t.Errorf("end %d, %v", e, err)
	}
}

// Row 26: an attempt that has lost its key during its transaction, as only a
// tampered row can make it, commits nothing.
func TestCompletionIsFenced(t *testing.T) {
	s := testStore(t, Config{})
	c := testCall(t)
	a := mustEnter(t, s, c)
	e, _ := a.run(t.Context(), func(ctx context.Context, tx pgx.Tx) decision {
		d := noting("lost")(ctx, tx)
		a.fence++
		return d
	})
	if got := notes(t, s.pool); e != endLost || got != "" {
		t.Errorf("end %d, notes %q", e, got)
	}
}

// While a purge or a completion has the row, a claim does not wait for it.
func TestClaimsDoNotWait(t *testing.T) {
	s := testStore(t, Config{})
	c := testCall(t)
	if e, err := mustEnter(t, s, c).run(t.Context(), noting("x")); e != endDone {
		t.Fatal(err)
	}
	for _, sql := range []string{
		`DELETE FROM postroom.idempotency_keys`, `UPDATE postroom.idempotency_keys SET state = state`,
		`SELECT FROM postroom.idempotency_keys FOR UPDATE`,
	} {
		tx, err := s.pool.Begin(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		if _, err := tx.Exec(t.Context(), sql); err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		if _, v, r, err := s.enter(ctx, c); v != verdictReplay || string(r.answer.body) != "x" {
			t.Errorf("%s: verdict %d, %v", sql, v, err)
		}
		cancel()
		_ = tx.Rollback(t.Context())
	}
}

// A repeat writes nothing, and so draws no transaction id.
func TestRepeatsDrawNoTransactionID(t *testing.T) {
	s := testStore(t, Config{})
	c := testCall(t)
	if e, err := mustEnter(t, s, c).run(t.Context(), noting("x")); e != endDone {
		t.Fatal(err)
	}
	next := func() (xid string) {
		err := s.pool.QueryRow(t.Context(), `SELECT pg_snapshot_xmax(pg_current_snapshot())::text`).Scan(&xid)
		if err != nil {
			t.Fatal(err)
		}
		return xid
	}
	// Other databases of the server draw ids too.
	for range 100 {
		before := next()
		if _, v, _, err := s.enter(t.Context(), c); v != verdictReplay {
			t.Fatalf("verdict %d, %v", v, err)
		}
		if next() == before {
			return
		}
	}
	t.Error("each of 100 repeats drew a transaction id")
}

// What a newer release has stored is neither run nor refused for ever.
func TestNewerFingerprint(t *testing.T) {
	s := testStore(t, Config{})
	c := testCall(t)
	if e, err := mustEnter(t, s, c).run(t.Context(), noting("x")); e != endDone {
		t.Fatal(err)
	}
	if _, err := s.pool.Exec(t.Context(), `UPDATE postroom.idempotency_keys SET fingerprint_version = 99`); err != nil {
		t.Fatal(err)
	}
	if _, v, _, err := s.enter(t.Context(), c); v != verdictForeign {
		t.Errorf("verdict %d, %v", v, err)
	}
}

// A key is compared in the way in which it was stored, also when the way has
// changed since.
func TestChangeOfFingerprints(t *testing.T) {
	pool := pgtest.New(t)
	send := func(cfg Config, body string) int {
		once, err := Middleware(pool, func(*http.Request) string { return "acme" }, cfg)
		if err != nil {
			t.Fatal(err)
		}
		w := httptest.NewRecorder()
		r := httptest.NewRequestWithContext(t.Context(), "POST", "/", strings.NewReader(body))
		r.Pattern = "POST /"
		r.Header.Set("Content-Type", "application/json")
		r.Header.Set("Idempotency-Key", "k1")
		once(http.HandlerFunc(func(http.ResponseWriter, *http.Request) {})).ServeHTTP(w, r)
		return w.Code
	}
	for _, test := range []struct {
		json bool
		body string
		want int
	}{
		{false, `{"a":1}`, 200},
		{true, `{"a":1}`, 200},
		{true, `{"a": 1}`, 422}, // its bytes were stored
	} {
		if got := send(Config{CanonicalJSON: test.json}, test.body); got != test.want {
			t.Errorf("%+v: %d", test, got)
		}
	}
}
