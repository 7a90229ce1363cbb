package idempotency_test

import (
	"context"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/postroom/postroom/idempotency"
)

func clean(t *testing.T, pool *pgxpool.Pool, answers, keys int64) {
	t.Helper()
	gotAnswers, gotKeys, _, err := idempotency.Cleaner{Pool: pool}.Clean(t.Context())
	if err != nil || gotAnswers != answers || gotKeys != keys {
		t.Errorf("Clean = %d, %d, %v, want %d, %d", gotAnswers, gotKeys, err, answers, keys)
	}
}

// Row 29: a key lives, has no answer any more, and is gone.
func TestExpiry(t *testing.T) {
	pool := newPool(t)
	a := serve(t, pool, idempotency.Config{}, pay)
	a.post("k1", "x").want(t, 201, "")
	wantStrings(t, "times", query(t, pool, `SELECT concat_ws(' ', k.expires_at - first_seen, tombstone_until - k.expires_at, a.expires_at = k.expires_at)
		FROM postroom.idempotency_keys k JOIN postroom.idempotency_answers a USING (tenant, operation, key)`), "1 day 30 days t")
	clean(t, pool, 0, 0)

	const expire = `UPDATE postroom.%s SET expires_at = clock_timestamp() - interval '1 second'`
	mustExec(t, pool, strings.Replace(expire, "%s", "idempotency_keys", 1))
	a.post("k1", "x").want(t, 410, "idempotency-key-expired") // not cleaned yet
	mustExec(t, pool, strings.Replace(expire, "%s", "idempotency_answers", 1))
	clean(t, pool, 1, 0)
	a.post("k1", "x").want(t, 410, "idempotency-key-expired")
	a.post("k1", "y").want(t, 422, "idempotency-key-reused")
	a.wantRuns(1)

	mustExec(t, pool, `UPDATE postroom.idempotency_keys SET tombstone_until = clock_timestamp()`)
	clean(t, pool, 0, 1)
	a.post("k1", "y").want(t, 201, "")
	a.wantRuns(2)
}

func TestReuseExpired(t *testing.T) {
	pool := newPool(t)
	a := serve(t, pool, idempotency.Config{ReuseExpired: true}, pay)
	first := a.post("k1", "x")
	mustExec(t, pool, `UPDATE postroom.idempotency_keys SET expires_at = clock_timestamp() - interval '1 second'`)
	second := a.post("k1", "x")
	if second.replayed() || second.body == first.body {
		t.Errorf("first %+v, second %+v", first, second)
	}
	if again := a.post("k1", "x"); !again.replayed() || again.body != second.body {
		t.Errorf("repeat %+v of %+v", again, second)
	}
	mustExec(t, pool, `UPDATE postroom.idempotency_answers SET expires_at = clock_timestamp() - interval '1 second'`)
	clean(t, pool, 1, 0)
}

// Case 48: neither what runs nor what nobody knows the outcome of is deleted.
func TestCleanerKeepsWhatRuns(t *testing.T) {
	pool := newPool(t)
	entered, leave := make(chan int), make(chan int)
	a := serve(t, pool, idempotency.Config{}, func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Query().Has("unknown") {
			idempotency.Unknown(r.Context())
			return
		}
		entered <- 0
		w.WriteHeader(<-leave)
	})
	a.do(ask{key: "k0", path: "/payments?unknown"}).want(t, 409, "")
	done := make(chan reply, 1)
	go func() {
		got, _ := a.try(context.WithoutCancel(t.Context()), ask{key: "k1"})
		done <- got
	}()
	receive(t, "the handler", entered)
	const insert = `INSERT INTO postroom.idempotency_keys (tenant, operation, key, fingerprint, fingerprint_version, state, fence, locked_until,
		first_seen, completed_at, expires_at, tombstone_until)
		SELECT 'other', 'o', 'k' || n, '', 1, s, 1, now() - interval '1 s', now() - interval '40 d',
		       CASE WHEN s = 'completed' THEN now() END, now() - interval '39 d', now() - interval '9 d'
		  FROM generate_series(1, 1500) n, unnest(ARRAY[CASE n % 3 WHEN 0 THEN 'completed' WHEN 1 THEN 'released' ELSE 'in_flight' END]) s`
	mustExec(t, pool, insert)
	// Postponed into the past from outside, since the running request has its row locked.
	clean(t, pool, 0, 1500)
	leave <- 201
	receive(t, "the answer", done).want(t, 201, "")
	mustExec(t, pool, `UPDATE postroom.idempotency_keys SET expires_at = first_seen, tombstone_until = clock_timestamp()`)
	tx, err := pool.Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if _, err := tx.Exec(t.Context(), `SELECT FROM postroom.idempotency_keys WHERE key = 'k1' FOR NO KEY UPDATE`); err != nil {
		t.Fatal(err)
	}
	clean(t, pool, 0, 0)
	_ = tx.Rollback(t.Context())
	clean(t, pool, 0, 1)
	wantStrings(t, "keys", states(t, pool), "k0 unknown")
}

func TestCleanerRun(t *testing.T) {
	pool := newPool(t)
	l := &logs{}
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() {
		ended <- idempotency.Cleaner{Pool: pool, Interval: time.Millisecond, Logger: l.logger()}.Run(ctx)
	}()
	a := serve(t, pool, idempotency.Config{}, pay)
	a.post("k1", "x").want(t, 201, "")
	mustExec(t, pool, `UPDATE postroom.idempotency_keys SET expires_at = first_seen, tombstone_until = clock_timestamp()`)
	eventually(t, "a clean table", func() bool { return len(states(t, pool)) == 0 })
	cancel()
	if err := receive(t, "the end of Run", ended); err != nil {
		t.Errorf("Run = %v", err)
	}
	if err := (idempotency.Cleaner{Schema: strings.Repeat("s", 64), Interval: -1}).Run(t.Context()); err == nil ||
		!strings.Contains(err.Error(), "Pool") || !strings.Contains(err.Error(), "Schema") || !strings.Contains(err.Error(), "Interval") {
		t.Errorf("Run = %v", err)
	}
}
