package outbox_test

import (
	"context"
	"errors"
	"math/rand/v2"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/postroom/postroom/migrations"
)

// TestDrainedUpToTheSnapshot: a lane of a former generation is drained when its
// cursor is settled and has seen all that the new generation's snapshot has.
func TestDrainedUpToTheSnapshot(t *testing.T) {
	each(t, func(t *testing.T, s *server) {
		pool := connect(t, s.database(t))
		write(t, pool, numbered(1, 0, 1)...)
		lane, origin := ownLane(t, pool)
		const settled = int64(1<<63 - 1)
		for _, c := range []struct {
			name, until, former string
			lastID, origin      int64
			want                bool
		}{
			{"the same", "10:20:12", "10:20:12", settled, origin, true},
			{"one had ended for the new generation and was running for the cursor", "10:20:12", "10:20:", settled, origin, false},
			{"one began later than the cursor", "10:20:12", "10:21:12", settled, origin, false},
			{"one runs for both", "12:30:12", "12:20:12", settled, origin, true},
			{"one began later than the new generation", "25:30:25", "20:20:", settled, origin, true},
			{"not settled", "25:30:25", "20:20:", 17, origin, false},
			{"a snapshot of another database", "1:2:", "1000:1000:", settled, origin + 1, true},
		} {
			tx, err := pool.Begin(t.Context())
			if err != nil {
				t.Fatal(err)
			}
			exec(t, tx, `INSERT INTO "postroom".outbox_generations (generation, lanes, origin, former)
				VALUES (2, 4, $1, '1:1:'), (3, 4, $1, '1000:1000:')`, origin)
			exec(t, tx, `UPDATE "postroom".outbox_generations SET origin = $1, former = $2::text::pg_snapshot WHERE generation = 2`, c.origin, c.former)
			exec(t, tx, `UPDATE "postroom".outbox_cursors SET until = $1::text::pg_snapshot, last_id = $2`, c.until, c.lastID)
			args := beginArgs(lane, origin)[:10]
			args[8], args[9] = c.until, c.lastID
			if got := scan[int](t, tx, statement(t, "drainLane"), args...) == 1; got != c.want {
				t.Errorf("%s: drained %v, want %v", c.name, got, c.want)
			}
			if err := tx.Rollback(t.Context()); err != nil {
				t.Fatal(err)
			}
		}
	})
}

// TestGenerationsInTurn: as long as a lane of a generation is not drained, owned
// or not, none of the next is claimed.
func TestGenerationsInTurn(t *testing.T) {
	each(t, func(t *testing.T, s *server) {
		pool := connect(t, s.database(t))
		if err := migrations.SetLanes(t.Context(), pool, 2, migrations.Config{}); err != nil {
			t.Fatal(err)
		}
		claim := func() int {
			return count(t, pool, statement(t, "claimLanes"), "test", time.Minute, []int32{1000, 1001, 1002, 1003}, 10)
		}
		exec(t, pool, `UPDATE "postroom".outbox_lanes SET drained_at = now() WHERE lane < 1003`)
		if n := claim(); n != 0 {
			t.Errorf("%d lanes are claimed before lane 1003 is drained", n)
		}
		exec(t, pool, `UPDATE "postroom".outbox_lanes SET drained_at = now() WHERE lane = 1003`)
		if n := claim(); n != 2 {
			t.Errorf("%d lanes are claimed when the former ones are drained, want 2", n)
		}
	})
}

// TestStressWithLaneChanges: the number of lanes changes again and again while
// writers of several isolation levels and shapes write, two transactions stay
// open that began before, and dispatchers join, leave, are killed and paused.
func TestStressWithLaneChanges(t *testing.T) {
	each(t, func(t *testing.T, s *server) {
		st := newStress(t, s)
		u := s.database(t)
		st.pool = connect(t, u)
		st.counters(t)
		st.hash(t)
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
		exec(t, old, `SELECT count(*), pg_current_xact_id() FROM counters`)

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
		changes := 0
		wg.Go(func() { changes = st.changeLanes(t, writing) })
		chaos.run(t, writing)
		wg.Wait()
		eventually(t, 60*time.Second, func() string { return st.missing(t, journal, []string{"old"}) })
		if err := migrations.SetLanes(t.Context(), st.pool, 9, migrations.Config{}); err != nil {
			t.Fatal(err)
		}
		if err := st.write(t.Context(), old, "old", 2, false); err != nil {
			t.Fatal(err)
		}
		commit(t, old)
		commit(t, idle)
		eventually(t, 40*time.Second, func() string { return st.missing(t, journal, nil) })
		chaos.stop(t)
		st.check(t, journal)
		t.Log("the number of lanes was changed", changes, "times")
		if changes < 2 {
			t.Errorf("the number of lanes was changed %d times", changes)
		}
	})
}

func (st *stress) changeLanes(t *testing.T, ctx context.Context) (changes int) {
	rng := rand.New(rand.NewPCG(st.seed, 4000))
	for n := 4; ctx.Err() == nil; {
		pause(ctx, time.Duration(200+rng.IntN(800))*time.Millisecond)
		n = 1 + (n+rng.IntN(8))%9 // another number
		err := migrations.SetLanes(ctx, st.pool, n, migrations.Config{})
		switch {
		case err == nil:
			changes++
		case ctx.Err() == nil:
			t.Errorf("SetLanes: %v", err)
			return changes
		}
	}
	return changes
}

// hash learns the hashes of the keys, by writing to each what is rolled back.
func (st *stress) hash(t *testing.T) {
	t.Helper()
	st.hashes = map[string]int32{}
	tx, err := st.pool.Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer tx.Rollback(context.Background())
	for key := range st.last(t) {
		if err := st.box.Write(t.Context(), tx, stressMessage(key, 0, true)); err != nil {
			t.Fatal(err)
		}
		st.hashes[key] = scan[int32](t, tx, `SELECT hash FROM "postroom".outbox_messages WHERE key = $1`, key)
	}
}

// writeAtOnce writes a key's next message in the statement that takes its lock.
func (st *stress) writeAtOnce(ctx context.Context, tx pgx.Tx, key string) error {
	_, err := tx.Exec(ctx, `
		WITH c AS (UPDATE counters SET n = n + 1 WHERE key = $1 RETURNING n)
		INSERT INTO "postroom".outbox_messages (hash, message_id, topic, key, payload, header_names, header_values)
		SELECT $2, gen_random_uuid()::text, $3, $1, convert_to(n::text, 'UTF8'), '{Tag,tag,Tag,binary}',
		       ARRAY[convert_to('a' || $1, 'UTF8'), NULL, '', '\x00ff'::bytea || set_byte('\x00', 0, n % 256) || '\x225c7b'::bytea]
		  FROM c`, key, st.hashes[key], stressMessage(key, 0, false).Topic)
	return err
}

func isCode(err error, code string) bool {
	pgErr, ok := errors.AsType[*pgconn.PgError](err)
	return ok && pgErr.Code == code
}
