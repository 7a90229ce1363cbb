package migrations_test

import (
	"context"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/postroom/postroom/internal/pgtest"
	"github.com/postroom/postroom/migrations"
)

func TestSetLanes(t *testing.T) {
	pgtest.Each(t, func(t *testing.T, db *pgtest.Server) {
		pool := db.Empty(t)
		cfg := migrations.Config{Schema: `o'dd "schema`, Lanes: 3}
		up(t, pool, cfg)
		const q = `"o'dd ""schema"`
		newest := func() string {
			var s string
			err := pool.QueryRow(t.Context(), `SELECT max(generation) || ' ' || count(*) FILTER (WHERE generation = (
				SELECT max(generation) FROM `+q+`.outbox_generations)) FROM `+q+`.outbox_lanes`).Scan(&s)
			if err != nil {
				t.Fatal(err)
			}
			return s
		}
		for _, c := range []struct {
			lanes int
			want  string
		}{{3, "1 3"}, {8, "2 8"}, {8, "2 8"}, {1, "3 1"}, {256, "4 256"}} {
			if err := migrations.SetLanes(t.Context(), pool, c.lanes, cfg); err != nil {
				t.Fatal(err)
			}
			if got := newest(); got != c.want {
				t.Errorf("SetLanes to %d: generation and lanes %s, want %s", c.lanes, got, c.want)
			}
		}
		for _, lanes := range []int{0, -1, 257} {
			if err := migrations.SetLanes(t.Context(), pool, lanes, cfg); err == nil || !strings.Contains(err.Error(), "want 1 to 256") {
				t.Errorf("SetLanes to %d: %v", lanes, err)
			}
		}
		// Whoever comes at the same time takes turns.
		var wg sync.WaitGroup
		for n := range 6 {
			wg.Go(func() {
				if err := migrations.SetLanes(t.Context(), pool, 10+n, cfg); err != nil {
					t.Error(err)
				}
			})
		}
		wg.Wait()
		exec(t, pool, `INSERT INTO `+q+`.outbox_messages (hash, message_id, topic) SELECT h, 'm' || h, 't' FROM generate_series(0, 999) h`)
		if n := count(t, pool, `SELECT count(DISTINCT generation) FROM `+q+`.outbox_messages`); n != 1 {
			t.Errorf("messages are in %d generations", n)
		}
		if n := count(t, pool, `SELECT count(*) FROM `+q+`.outbox_messages m LEFT JOIN `+q+`.outbox_lanes l USING (lane)
			WHERE l.generation IS DISTINCT FROM 10`); n != 0 {
			t.Errorf("%d messages are not in the newest lanes", n)
		}
	})
}

// The new generation's snapshot has seen the writer that kept the change
// waiting, whatever the default isolation level.
func TestSetLanesSeesWhatItWaitedFor(t *testing.T) {
	pgtest.Each(t, func(t *testing.T, db *pgtest.Server) {
		pool := db.New(t)
		exec(t, pool, `ALTER DATABASE `+pool.Config().ConnConfig.Database+` SET default_transaction_isolation = 'repeatable read'`)
		pool.Reset()
		for lanes := 5; lanes < 10; lanes++ {
			tx, err := pool.Begin(t.Context())
			if err != nil {
				t.Fatal(err)
			}
			_, err = tx.Exec(t.Context(), `INSERT INTO "postroom".outbox_messages (hash, message_id, topic) VALUES (1, 'm', 't')`)
			if err != nil {
				t.Fatal(err)
			}
			done := make(chan error, 1)
			go func() { done <- migrations.SetLanes(t.Context(), pool, lanes, migrations.Config{}) }()
			for count(t, pool, `SELECT count(*) FROM pg_locks WHERE NOT granted AND relation = '"postroom".outbox_messages'::regclass`) == 0 {
			}
			if err := tx.Commit(t.Context()); err != nil {
				t.Fatal(err)
			}
			if err := <-done; err != nil {
				t.Fatal(err)
			}
			if n := count(t, pool, `SELECT count(*) FROM "postroom".outbox_messages m, "postroom".outbox_generations g
				WHERE m.generation < g.generation AND NOT pg_visible_in_snapshot(m.xid, g.former)`); n > 0 {
				t.Fatalf("the snapshot of a new generation has not seen %d messages of the former", n)
			}
		}
	})
}

// A change that is given up leaves no trace.
func TestSetLanesGivesUp(t *testing.T) {
	pool := pgtest.New(t)
	tx, err := pool.Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = tx.Rollback(context.Background()) }()
	if _, err := tx.Exec(t.Context(), `SELECT count(*) FROM "postroom".outbox_messages`); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 700*time.Millisecond)
	defer cancel()
	err = migrations.SetLanes(ctx, pool, 8, migrations.Config{})
	if err == nil || ctx.Err() == nil {
		t.Fatalf("SetLanes beside an open reader: %v", err)
	}
	if n := count(t, pool, `SELECT count(*) FROM "postroom".outbox_lanes`); n != 4 {
		t.Errorf("%d lanes after SetLanes gave up, want 4", n)
	}
	if err := tx.Rollback(t.Context()); err != nil {
		t.Fatal(err)
	}
	if err := migrations.SetLanes(t.Context(), pool, 8, migrations.Config{}); err != nil {
		t.Fatal(err)
	}
}
