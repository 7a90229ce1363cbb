package dispatcher_test

import (
	"context"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/postroom/postroom"
	"github.com/postroom/postroom/dispatcher"
	"github.com/postroom/postroom/internal/pgtest"
)

// Owners that died while nothing was being published, or of whom calls have
// returned, are forgotten: nothing is set aside.
func TestDeathsAreForgotten(t *testing.T) {
	pgtest.Each(t, func(t *testing.T, s *pgtest.Server) {
		pool := s.New(t)
		r := &recorder{}
		for round := range 3 {
			_, err := pool.Exec(t.Context(), `UPDATE postroom.outbox_lanes
				SET starts = 50, owner = 'dead', lease = clock_timestamp() - '1 hour'::interval`)
			if err != nil {
				t.Fatal(err)
			}
			if round < 2 { // the lanes are settled, or new
				d := join(t, pool, r, dispatcher.Config{})
				waitShares(t, []member{d}, 4)
				eventuallyNoStarts(t, pool)
				write(t, pool, numbered("orders", 20, round*100, 100)...)
				waitStored(t, r, (round+1)*100)
				d.stop()
				continue
			}
			// Differences are open: a message that returns is innocent, and so are
			// those behind it.
			_, err = pool.Exec(t.Context(), `UPDATE postroom.outbox_lanes SET starts = 3`)
			if err != nil {
				t.Fatal(err)
			}
			write(t, pool, numbered("orders", 20, 200, 100)...)
			_, err = pool.Exec(t.Context(), `
				INSERT INTO postroom.outbox_cursors (lane, origin, number, fence, owner, prev, until, last_id)
				SELECT DISTINCT ON (lane) lane, origin, number + 1, fence, owner, until, pg_current_snapshot(), 0
				  FROM postroom.outbox_cursors ORDER BY lane, number DESC`)
			if err != nil {
				t.Fatal(err)
			}
			// All lanes are under suspicion, so that their calls take turns.
			var active, most atomic.Int64
			slow := &recorder{before: func(ctx context.Context, msgs []postroom.Message) {
				most.Store(max(most.Load(), active.Add(1), int64(len(msgs))))
				select {
				case <-time.After(2 * time.Millisecond):
				case <-ctx.Done():
				}
				active.Add(-1)
			}}
			d := join(t, pool, slow, dispatcher.Config{})
			waitStored(t, slow, 100)
			eventuallyNoStarts(t, pool)
			d.stop()
			if n := most.Load(); n != 1 {
				t.Errorf("%d messages were being published at a time, want one", n)
			}
			r.stored = append(r.stored, slow.messages()...)
		}
		if n := len(parked(t, pool)); n > 0 {
			t.Errorf("%d messages were set aside", n)
		}
		if p := keyOrder(r); p != "" {
			t.Error(p)
		}
	})
}

func eventuallyNoStarts(t *testing.T, pool *pgxpool.Pool) {
	t.Helper()
	eventually(t, time.Minute, func() string {
		if one[bool](t, pool, `SELECT bool_or(starts > 0 OR suspect) FROM postroom.outbox_lanes`) {
			return "deaths are still counted"
		}
		return ""
	})
}

// An owner that died when all of a difference was published, though its end was
// not recorded, is forgotten too.
func TestDeathAtTheEndIsForgotten(t *testing.T) {
	pool := pgtest.New(t)
	r := &recorder{}
	d := join(t, pool, r, dispatcher.Config{})
	write(t, pool, numbered("orders", 20, 0, 100)...)
	waitStored(t, r, 100)
	d.stop()
	_, err := pool.Exec(t.Context(), `
		WITH newest AS (
			SELECT DISTINCT ON (lane) lane, origin, number, fence, owner, prev, until FROM postroom.outbox_cursors ORDER BY lane, number DESC
		), unsettled AS (
			INSERT INTO postroom.outbox_cursors (lane, origin, number, fence, owner, prev, until, last_id)
			SELECT lane, origin, number + 1, fence, owner, prev, until, 1000000 FROM newest
		)
		UPDATE postroom.outbox_lanes SET owner = 'dead', lease = clock_timestamp() - '1 hour'::interval`)
	if err != nil {
		t.Fatal(err)
	}
	d = join(t, pool, r, dispatcher.Config{})
	waitShares(t, []member{d}, 4)
	eventuallyNoStarts(t, pool)
	if n := len(r.messages()); n != 100 {
		t.Errorf("100 messages were published %d times", n)
	}
}

// While nobody dies, the search for messages that kill costs no statement.
func TestNoDeathsNoStatements(t *testing.T) {
	direct := pgtest.New(t)
	searches := &tracer{part: "suspect = $5"}
	cfg := direct.Config()
	cfg.ConnConfig.Tracer = searches
	pool, err := pgxpool.NewWithConfig(t.Context(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(pool.Close)
	r := &recorder{}
	for i := range 3 {
		d := join(t, pool, r, dispatcher.Config{PageSize: 10})
		write(t, direct, numbered("orders", 20, i*300, 300)...)
		waitStored(t, r, (i+1)*300)
		d.stop() // a stop is no death
	}
	if n := searches.n.Load(); n > 0 {
		t.Errorf("%d statements", n)
	}
}
