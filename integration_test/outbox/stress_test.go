package outbox_test

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"path/filepath"
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
	"github.com/postroom/postroom/outbox"
)

const (
	stressWriters = 16
	stressKeys    = 50
	stressPage    = 25
	stressLease   = 900 * time.Millisecond
)

// stress writes what it counts: a key's row holds the number of its last
// message, and a transaction that rolls back takes its numbers with it. So each
// key must arrive as 1, 2, 3 and so on to the number in its row.
type stress struct {
	pool *pgxpool.Pool
	seed uint64
	box  outbox.Outbox

	crashes bool             // errors are expected
	hashes  map[string]int32 // of the keys; where set, writers differ in isolation and statements

	transactions, rollbacks, savepoints, prepared atomic.Int64
}

// TestStress: 16 writers on 50 contended keys with early transaction ids, savepoints,
// rollbacks, prepared transactions and transactions that stay open, against
// dispatchers that are stopped, killed, paused beyond their lease and started.
func TestStress(t *testing.T) {
	each(t, func(t *testing.T, s *server) {
		st := newStress(t, s)
		u := s.database(t)
		st.pool = connect(t, u)
		st.counters(t)

		// These stay open throughout: one that writes at once, one that has an
		// id, one that holds a snapshot and writes at its end.
		late := st.begin(t, "late", 3)
		idle, err := st.pool.Begin(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		defer idle.Rollback(context.Background())
		exec(t, idle, `SELECT pg_current_xact_id()`)
		old, err := st.pool.BeginTx(t.Context(), pgx.TxOptions{IsoLevel: pgx.RepeatableRead})
		if err != nil {
			t.Fatal(err)
		}
		defer old.Rollback(context.Background())
		exec(t, old, `SELECT count(*) FROM "postroom".outbox_messages`)

		journal := &journalReader{path: filepath.Join(t.TempDir(), "journal")}
		chaos := newChaos(t, st.seed, childConfig{
			URL: u, Journal: journal.path, PageSize: stressPage,
			PublishTimeout: stressLease / 3, Lease: stressLease, Fail: 101,
		})
		writing, cancel := context.WithTimeout(t.Context(), *stressFlag)
		defer cancel()
		var wg sync.WaitGroup
		for w := range stressWriters {
			wg.Go(func() { st.writer(t, writing, w) })
		}
		wg.Go(func() { st.preparer(t, writing) })
		chaos.run(t, writing)
		wg.Wait()

		wait := func(except ...string) {
			eventually(t, 40*time.Second, func() string { return st.missing(t, journal, except) })
		}
		wait("late", "old") // transactions that stay open delay nobody
		chaos.kill(t)
		if err := st.write(t.Context(), old, "old", 2, false); err != nil {
			t.Fatal(err)
		}
		commit(t, old)
		commit(t, late)
		commit(t, idle)
		wait()
		chaos.stop(t)
		st.check(t, journal)
	})
}

func newStress(t *testing.T, s *server) *stress {
	st := &stress{seed: *seedFlag}
	if st.seed == 0 {
		st.seed = rand.Uint64()
	}
	t.Logf("run again with: POSTROOM_TEST_POSTGRES=%d, -run %s -seed=%d -stress=%v", s.Major, t.Name(), st.seed, *stressFlag)
	return st
}

func (st *stress) counters(t *testing.T) {
	t.Helper()
	exec(t, st.pool, `CREATE TABLE counters (key text PRIMARY KEY, n int NOT NULL DEFAULT 0)`)
	exec(t, st.pool, `INSERT INTO counters SELECT 'k' || g FROM generate_series(0, $1::int - 1) g`, stressKeys)
	exec(t, st.pool, `INSERT INTO counters VALUES ('prepared'), ('late'), ('old')`)
}

func commit(t testing.TB, tx pgx.Tx) {
	t.Helper()
	if err := tx.Commit(t.Context()); err != nil {
		t.Fatal(err)
	}
}

func (st *stress) begin(t *testing.T, key string, n int) pgx.Tx {
	t.Helper()
	tx, err := st.pool.Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if err := st.write(t.Context(), tx, key, n, false); err != nil {
		t.Fatal(err)
	}
	return tx
}

// write takes the key's row lock and writes its next n messages.
func (st *stress) write(ctx context.Context, tx pgx.Tx, key string, n int, doomed bool) error {
	var last int
	err := tx.QueryRow(ctx, `UPDATE counters SET n = n + $2 WHERE key = $1 RETURNING n`, key, n).Scan(&last)
	if err != nil {
		return err
	}
	var msgs []postroom.Message
	for i := last - n + 1; i <= last; i++ {
		msgs = append(msgs, stressMessage(key, i, doomed))
	}
	return st.box.Write(ctx, tx, msgs...)
}

// stressMessage differs in every respect from message to message.
func stressMessage(key string, n int, doomed bool) postroom.Message {
	m := postroom.Message{Topic: "topic" + strconv.Itoa(len(key)), Key: key, Payload: fmt.Appendf(nil, "%d", n)}
	if doomed {
		m.Payload = []byte("doomed")
	}
	m.Headers = []postroom.Header{
		{Name: "Tag", Value: []byte("a" + key)},
		{Name: "tag", Value: nil},
		{Name: "Tag", Value: []byte{}},
		{Name: "binary", Value: []byte{0, 255, byte(n), '"', '\\', '{'}},
	}
	return m
}

// writer runs random transactions until ctx ends.
func (st *stress) writer(t *testing.T, ctx context.Context, number int) {
	rng := rand.New(rand.NewPCG(st.seed, uint64(number)))
	var options pgx.TxOptions
	if st.hashes != nil && number%3 == 0 {
		options.IsoLevel = pgx.RepeatableRead
	}
	for ctx.Err() == nil {
		err := pgx.BeginTxFunc(ctx, st.pool, options, func(tx pgx.Tx) error { return st.transaction(ctx, tx, rng) })
		st.transactions.Add(1)
		switch {
		case errors.Is(err, errRollback), options.IsoLevel != "" && isCode(err, "40001"):
			st.rollbacks.Add(1)
		case err != nil && st.crashes:
			pause(ctx, 20*time.Millisecond)
		case err != nil && ctx.Err() == nil:
			t.Errorf("writer %d: %v", number, err)
			return
		}
	}
}

var errRollback = errors.New("roll back")

func (st *stress) transaction(ctx context.Context, tx pgx.Tx, rng *rand.Rand) error {
	pause := func(most float64) error {
		_, err := tx.Exec(ctx, `SELECT pg_sleep($1)`, rng.Float64()*most)
		return err
	}
	if rng.IntN(3) == 0 { // an id long before the row's lock
		if _, err := tx.Exec(ctx, `SELECT pg_current_xact_id()`); err != nil {
			return err
		}
		if err := pause(0.02); err != nil {
			return err
		}
	}
	doomed := rng.IntN(8) == 0
	keys := rng.Perm(stressKeys)[:1+rng.IntN(3)]
	slices.Sort(keys) // no deadlocks
	for _, k := range keys {
		key := "k" + strconv.Itoa(k)
		n := 1 + rng.IntN(3)
		switch rng.IntN(200) {
		case 0:
			n = 310 // COPY
		case 1, 2, 3:
			n = 40
		}
		var err error
		switch form := rng.IntN(4); {
		case form == 1 && st.hashes != nil && !doomed:
			err = st.writeAtOnce(ctx, tx, key)
		case form == 0: // a savepoint that is rolled back, then one that is not
			st.savepoints.Add(1)
			err = pgx.BeginFunc(ctx, tx, func(tx pgx.Tx) error {
				return errors.Join(st.write(ctx, tx, key, n, true), errRollback)
			})
			if !errors.Is(err, errRollback) || ctx.Err() != nil {
				return err
			}
			err = pgx.BeginFunc(ctx, tx, func(tx pgx.Tx) error { return st.write(ctx, tx, key, n, doomed) })
		default:
			err = st.write(ctx, tx, key, n, doomed)
		}
		if err != nil {
			return err
		}
	}
	if rng.IntN(4) == 0 {
		if err := pause(0.01); err != nil {
			return err
		}
	}
	if doomed {
		return errRollback
	}
	return nil
}

// preparer keeps a prepared transaction waiting, and ends it in either way.
func (st *stress) preparer(t *testing.T, ctx context.Context) {
	rng := rand.New(rand.NewPCG(st.seed, 1000))
	for i := 0; ctx.Err() == nil; i++ {
		name := fmt.Sprintf("'stress_%d_%d'", st.seed, i)
		doomed := rng.IntN(3) == 0
		// Not cancelled, lest the transaction stay prepared.
		err := st.prepare(context.WithoutCancel(ctx), name, 1+rng.IntN(5), doomed)
		if err != nil {
			t.Errorf("prepared transaction: %v", err)
			return
		}
		pause(ctx, time.Duration(rng.IntN(400))*time.Millisecond)
		end := "COMMIT PREPARED "
		if doomed {
			end = "ROLLBACK PREPARED "
		}
		if _, err := st.pool.Exec(context.WithoutCancel(ctx), end+name); err != nil {
			t.Errorf("%s: %v", end, err)
			return
		}
		st.prepared.Add(1)
	}
}

func (st *stress) prepare(ctx context.Context, name string, n int, doomed bool) error {
	conn, err := st.pool.Acquire(ctx)
	if err != nil {
		return err
	}
	defer conn.Release()
	tx, err := conn.Begin(ctx)
	if err != nil {
		return err
	}
	defer tx.Rollback(ctx) // a warning where it is prepared
	if err := st.write(ctx, tx, "prepared", n, doomed); err != nil {
		return err
	}
	_, err = tx.Exec(ctx, `PREPARE TRANSACTION `+name)
	return err
}

// pause returns after d, or when ctx ends.
func pause(ctx context.Context, d time.Duration) {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
	case <-ctx.Done():
	}
}

// last returns the number of each key's last committed message.
func (st *stress) last(t *testing.T) map[string]int {
	t.Helper()
	rows, err := st.pool.Query(t.Context(), `SELECT key, n FROM counters`)
	if err != nil {
		t.Fatal(err)
	}
	all := map[string]int{}
	var key string
	var n int
	if _, err := pgx.ForEachRow(rows, []any{&key, &n}, func() error { all[key] = n; return nil }); err != nil {
		t.Fatal(err)
	}
	return all
}

// missing says which committed messages have not arrived.
func (st *stress) missing(t *testing.T, journal *journalReader, except []string) string {
	t.Helper()
	got := map[string]map[string]bool{}
	for _, l := range journal.read(t) {
		if got[l.Message.Key] == nil {
			got[l.Message.Key] = map[string]bool{}
		}
		got[l.Message.Key][string(l.Message.Payload)] = true
	}
	var problems []string
	for key, n := range st.last(t) {
		for i := 1; i <= n && !slices.Contains(except, key); i++ {
			if !got[key][strconv.Itoa(i)] {
				problems = append(problems, fmt.Sprintf("key %s: %d of %d has not arrived", key, i, n))
				break
			}
		}
	}
	slices.Sort(problems)
	return strings.Join(problems[:min(5, len(problems))], "\n")
}

// check compares all that arrived with all that was committed.
func (st *stress) check(t *testing.T, journal *journalReader) {
	t.Helper()
	lines := journal.read(t)
	msgs := make([]postroom.Message, len(lines))
	calls, full := map[string]int{}, 0
	for i, l := range lines {
		msgs[i] = l.Message
		call := l.By + strconv.Itoa(l.Call)
		if calls[call]++; calls[call] == stressPage {
			full++
		}
	}
	first, problem := firsts(msgs)
	if problem != "" {
		t.Error(problem)
	}
	next := map[string]int{}
	for _, m := range first {
		next[m.Key]++
		want := stressMessage(m.Key, next[m.Key], false)
		want.ID, want.Time = m.ID, m.Time
		if a, b := fmt.Sprintf("%#v", m), fmt.Sprintf("%#v", want); a != b {
			t.Errorf("key %s: arrival %d is\n%s, want\n%s", m.Key, next[m.Key], a, b)
			if t.Failed() && next[m.Key] > 3 {
				break
			}
		}
	}
	for key, n := range st.last(t) {
		if next[key] != n {
			t.Errorf("key %s: %d messages arrived, %d were committed", key, next[key], n)
		}
	}
	t.Logf("%d transactions, %d rolled back, %d savepoints rolled back, %d prepared; %d messages, %d repeats, %d calls, %d of a full page",
		st.transactions.Load(), st.rollbacks.Load(), st.savepoints.Load(), st.prepared.Load(),
		len(first), len(msgs)-len(first), len(calls), full)
	if full < 5 || len(calls)-full < 20 {
		t.Errorf("%d calls, %d of a full page: want both small and paged differences", len(calls), full)
	}
}
