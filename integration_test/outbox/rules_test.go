package outbox_test

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/postroom/postroom"
	"github.com/postroom/postroom/dispatcher"
	"github.com/postroom/postroom/outbox"
)

// TestSequenceCache: ids that are drawn ahead put the messages of a key out of
// order, and a dispatcher refuses to work with them.
func TestSequenceCache(t *testing.T) {
	each(t, func(t *testing.T, s *server) {
		u := s.database(t)
		one := connect(t, u, func(c *pgxpool.Config) { c.MaxConns = 1 })
		other := connect(t, u, func(c *pgxpool.Config) { c.MaxConns = 1 })
		inTurn := func(from int) (order []string) {
			t.Helper()
			for i, db := range []*pgxpool.Pool{one, other, one, other} {
				write(t, db, numbered(1, from+i, 1)...)
			}
			rows, err := one.Query(t.Context(), `SELECT message_id FROM "postroom".outbox_messages
				WHERE message_id >= $1 ORDER BY id`, fmt.Sprintf("m%d", from))
			if err == nil {
				order, err = pgx.CollectRows(rows, pgx.RowTo[string])
			}
			if err != nil {
				t.Fatal(err)
			}
			return order
		}
		if got, want := inTurn(1), []string{"m1", "m2", "m3", "m4"}; !slices.Equal(got, want) {
			t.Errorf("with CACHE 1 the order is %v, want %v", got, want)
		}
		exec(t, one, `ALTER SEQUENCE "postroom".outbox_messages_id_seq CACHE 20`)
		if got := inTurn(5); slices.IsSorted(got) {
			t.Errorf("with CACHE 20 the order is %v: the test does not show what it is for", got)
		}
		d, err := dispatcher.New(connect(t, u), &recorder{}, dispatcher.Config{})
		if err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
		defer cancel()
		err = d.Run(ctx)
		if _, ok := errors.AsType[*dispatcher.SetupError](err); !ok || !strings.Contains(err.Error(), "CACHE 20") {
			t.Errorf("Run returned %v, want a SetupError that speaks of CACHE 20", err)
		}
	})
}

// beginArgs are the parameters of the dispatcher's statement that opens a
// difference, for a lane whose newest cursor is the first.
func beginArgs(lane, origin int64) []any {
	return []any{
		lane, origin, int64(7), "test", int64(1), int64(7), "test", "1:1:", "1:1:", int64(1<<63 - 1),
		"1",
		[]string{},
		100, false,
	}
}

// leaveArgs are the parameters by which parked rows are taken out.
func leaveArgs(lane, fence int64, owner string, numbers []int64) []any {
	none, text := []int64{}, []string{}
	return []any{
		lane, fence, owner, numbers, none, text,
		[]time.Duration{},
		none,
		[]time.Duration{},
		text, text, none, text, text, none, text, none, text,
		[]int{},
		[]int{},
	}
}

// ownLane makes "test" the owner of every lane, at the empty snapshot.
func ownLane(t testing.TB, db queryer) (lane, origin int64) {
	t.Helper()
	exec(t, db, `UPDATE "postroom".outbox_lanes SET fence = 7, owner = 'test', lease = now() + interval '1 hour'`)
	exec(t, db, `INSERT INTO "postroom".outbox_cursors (lane, origin, number, fence, owner, prev, until, last_id)
		SELECT lane, "postroom".origin(), 1, 7, 'test', '1:1:', '1:1:', 9223372036854775807 FROM "postroom".outbox_lanes`)
	lane = scan[int64](t, db, `SELECT lane FROM "postroom".outbox_messages LIMIT 1`)
	return lane, scan[int64](t, db, `SELECT "postroom".origin()`)
}

// count returns how many rows a query has.
func count(t testing.TB, db queryer, sql string, args ...any) (n int) {
	t.Helper()
	rows, err := db.Query(t.Context(), sql, args...)
	if err != nil {
		t.Fatal(err)
	}
	for rows.Next() {
		n++
	}
	if err := rows.Err(); err != nil {
		t.Fatal(err)
	}
	return n
}

// TestOwnTransaction: a transaction's own id is missing from its own snapshot,
// as if it had ended. So no difference is opened by a transaction that has one.
func TestOwnTransaction(t *testing.T) {
	each(t, func(t *testing.T, s *server) {
		pool := connect(t, s.database(t))
		write(t, pool, numbered(1, 0, 1)...)
		lane, origin := ownLane(t, pool)
		begin := statement(t, "beginDifference")

		tx, err := pool.Begin(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		defer tx.Rollback(context.Background())
		if err := new(outbox.Outbox).Write(t.Context(), tx, numbered(1, 1, 1)...); err != nil {
			t.Fatal(err)
		}
		if !scan[bool](t, tx, `SELECT pg_visible_in_snapshot(pg_current_xact_id(), pg_current_snapshot())
			AND pg_current_xact_id() < pg_snapshot_xmax(pg_current_snapshot())`) {
			// The id is at or past xmax until a later one ends: make one.
			exec(t, pool, `SELECT pg_current_xact_id()`)
			if !scan[bool](t, tx, `SELECT pg_visible_in_snapshot(pg_current_xact_id(), pg_current_snapshot())`) {
				t.Error("a transaction's own snapshot does not call it ended: the test does not show what it is for")
			}
		}
		if n := count(t, tx, begin, beginArgs(lane, origin)...); n != 0 {
			t.Errorf("in a transaction that has an id, a difference was opened and %d rows read", n)
		}
		if n := scan[int](t, tx, `SELECT count(*) FROM "postroom".outbox_cursors WHERE number > 1`); n != 0 {
			t.Errorf("in a transaction that has an id, %d cursors were appended", n)
		}
		if err := tx.Rollback(t.Context()); err != nil {
			t.Fatal(err)
		}
		if n := count(t, pool, begin, beginArgs(lane, origin)...); n != 1 {
			t.Errorf("by itself, the statement reads %d rows, want the one that was committed", n)
		}
		until := scan[string](t, pool, `SELECT until::text FROM "postroom".outbox_cursors WHERE lane = $1 AND number = 2`, lane)
		own := scan[string](t, pool, `SELECT xmin::text FROM "postroom".outbox_cursors WHERE lane = $1 AND number = 2`, lane)
		if scan[bool](t, pool, `SELECT pg_visible_in_snapshot($1::text::xid8, $2::text::pg_snapshot)`, own, until) {
			t.Errorf("the cursor %s calls the transaction %s ended that appended it", until, own)
		}
	})
}

// TestStaleOwnerChangesNoRow: each statement of an owner whose lane was taken over
// is without effect, although the newest cursor is still its own.
func TestStaleOwnerChangesNoRow(t *testing.T) {
	each(t, func(t *testing.T, s *server) {
		pool := connect(t, s.database(t))
		write(t, pool, numbered(1, 0, 2)...)
		lane, origin := ownLane(t, pool)
		args := beginArgs(lane, origin)
		identity := func(more ...any) []any { return append(slices.Clone(args[:10]), more...) }
		first := scan[int64](t, pool, `SELECT min(id) FROM "postroom".outbox_messages`)
		exec(t, pool, `INSERT INTO "postroom".outbox_parked (lane, origin, id, state, error, created_at, hash, message_id, topic, header_names, header_values)
			VALUES ($1, $2, 1000, 'refused', 'never', now(), 1, 'p', 'orders', '{}', '{}')`, lane, origin)
		exec(t, pool, `INSERT INTO "postroom".outbox_generations (generation, lanes, origin, former) VALUES (2, 4, $1, '1:1:')`, origin)
		statements := map[string][]any{
			"beginDifference": args,
			"advanceCursor":   identity(int64(5), origin),
			"closeOrigin":     identity(origin),
			"parkMessages":    identity(int64(5), origin, []int64{first}, []string{"never"}, []*time.Duration{nil}, []*string{nil}),
			"leaveParked":     leaveArgs(lane, 7, "test", []int64{1, 2}),
			"tryParked":       {lane, int64(7), "test", []int64{1, 2}, []*time.Duration{nil, nil}},
			"drainLane":       identity(),
			"renewLanes":      {"test", time.Minute, []int64{lane}, []int64{7}},
			"releaseLanes":    {"test", []int64{lane}, []int64{7}},
		}
		changes := func(name string, args []any) bool {
			t.Helper()
			tx, err := pool.Begin(t.Context())
			if err != nil {
				t.Fatal(err)
			}
			defer tx.Rollback(context.Background())
			exec(t, tx, statement(t, name), args...)
			return scan[bool](t, tx, `SELECT pg_current_xact_id_if_assigned() IS NOT NULL`)
		}
		for name, args := range statements {
			if !changes(name, args) {
				t.Errorf("%s of the owner changes nothing: the test does not show what it is for", name)
			}
		}
		for _, other := range []string{"fence = 8, owner = 'other'", "fence = 9, owner = 'test'", "fence = 7, owner = 'other'"} {
			exec(t, pool, `UPDATE "postroom".outbox_lanes SET `+other)
			for name, args := range statements {
				if changes(name, args) {
					t.Errorf("%s changes a row although the lane has %s", name, other)
				}
			}
		}
	})
}

// TestParkingWaitsForATakeover: what moves parked messages waits for a takeover that
// is under way, and then changes nothing; so the next owner sees all of it or none.
func TestParkingWaitsForATakeover(t *testing.T) {
	each(t, func(t *testing.T, s *server) {
		pool := connect(t, s.database(t))
		write(t, pool, numbered(1, 0, 2)...)
		lane, origin := ownLane(t, pool)
		first := scan[int64](t, pool, `SELECT min(id) FROM "postroom".outbox_messages`)
		exec(t, pool, `INSERT INTO "postroom".outbox_parked (lane, origin, id, state, error, created_at, hash, message_id, topic, header_names, header_values)
			VALUES ($1, $2, 1000, 'refused', 'never', now(), 1, 'p', 'orders', '{}', '{}')`, lane, origin)
		none := []*time.Duration{nil}
		statements := map[string][]any{
			"parkMessages": append(slices.Clone(beginArgs(lane, origin)[:10]), int64(5), origin, []int64{first}, []string{"never"}, none, []*string{nil}),
			"leaveParked":  leaveArgs(lane, 7, "test", []int64{1}),
			"tryParked":    {lane, int64(7), "test", []int64{1}, none},
		}
		for name, args := range statements {
			tx, err := pool.Begin(t.Context())
			if err != nil {
				t.Fatal(err)
			}
			exec(t, tx, `UPDATE "postroom".outbox_lanes SET fence = 8, owner = 'other' WHERE lane = $1`, lane)
			done := make(chan int, 1)
			go func() { done <- count(t, pool, statement(t, name), args...) }()
			eventually(t, time.Minute, func() string {
				if scan[int](t, pool, `SELECT count(*) FROM pg_locks WHERE NOT granted`) == 0 {
					return name + " does not wait"
				}
				return ""
			})
			commit(t, tx)
			if n := <-done; n != 0 {
				t.Errorf("%s says it did something", name)
			}
			if n := scan[int](t, pool, `SELECT count(*) FROM "postroom".outbox_parked WHERE attempts = 0`); n != 1 {
				t.Errorf("after %s %d parked messages are as they were, want 1", name, n)
			}
			if n := scan[int](t, pool, `SELECT count(*) FROM "postroom".outbox_messages`); n != 2 {
				t.Errorf("after %s %d messages are not parked, want 2", name, n)
			}
			exec(t, pool, `UPDATE "postroom".outbox_lanes SET fence = 7, owner = 'test' WHERE lane = $1`, lane)
		}
	})
}

// TestCase_B01_OpenTransactionIsNotPassed: what commits late is published all
// the same, and what rolls back never.
func TestCase_B01_OpenTransactionIsNotPassed(t *testing.T) {
	each(t, func(t *testing.T, s *server) {
		u := s.database(t)
		pool := connect(t, u, func(c *pgxpool.Config) { c.MaxConns = 60 })
		r := &recorder{}
		start(t, connect(t, u), r, quick())
		a, err := pool.Begin(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		defer a.Rollback(context.Background())
		var box outbox.Outbox
		if err := box.Write(t.Context(), a, numbered(1, 0, 1)...); err != nil {
			t.Fatal(err)
		}
		write(t, pool, numbered(1, 1, 1)...)
		waitNumbers(t, r, 1, 2)
		commit(t, a)
		eventually(t, time.Minute, func() string {
			return missing(map[string]bool{"m0": true, "m1": true}, arrived(r.messages()))
		})

		done := make(chan error)
		for w := range 50 {
			go func() {
				err := pgx.BeginFunc(t.Context(), pool, func(tx pgx.Tx) error {
					m := numbered(50, 100+w, 1)[0]
					if w%7 == 0 {
						m.ID = "rolled back"
					}
					if err := box.Write(t.Context(), tx, m); err != nil {
						return err
					}
					_, err := tx.Exec(t.Context(), `SELECT pg_sleep($1)`, rand.Float64()/2)
					if w%7 == 0 {
						return errors.Join(err, errRollback)
					}
					return err
				})
				if errors.Is(err, errRollback) {
					err = nil
				}
				done <- err
			}()
		}
		want := map[string]bool{"m0": true, "m1": true}
		for w := range 50 {
			if err := <-done; err != nil {
				t.Error(err)
			}
			if w%7 != 0 {
				want[fmt.Sprint("m", 100+w)] = true
			}
		}
		eventually(t, time.Minute, func() string { return missing(want, arrived(r.messages())) })
		if extra := missing(arrived(r.messages()), want); extra != "" {
			t.Errorf("published although rolled back: %s", extra)
		}
		if n := len(r.messages()); n != len(want) {
			t.Errorf("%d publishes of %d messages", n, len(want))
		}
	})
}

// TestCase_B02_OrderIsThatOfTheRowLock: the transaction that began last took the
// row first.
func TestCase_B02_OrderIsThatOfTheRowLock(t *testing.T) {
	each(t, func(t *testing.T, s *server) {
		for _, together := range []bool{true, false} {
			u := s.database(t)
			pool := connect(t, u)
			exec(t, pool, `CREATE TABLE aggregate (n int)`)
			exec(t, pool, `INSERT INTO aggregate VALUES (0)`)
			r := &recorder{}
			if !together {
				start(t, connect(t, u), r, quick())
			}
			a, err := pool.Begin(t.Context())
			if err != nil {
				t.Fatal(err)
			}
			defer a.Rollback(context.Background())
			exec(t, a, `SELECT pg_current_xact_id()`)
			step := func(tx pgx.Tx, id string) error {
				if _, err := tx.Exec(t.Context(), `UPDATE aggregate SET n = n + 1`); err != nil {
					return err
				}
				return new(outbox.Outbox).Write(t.Context(), tx, postroom.Message{ID: id, Topic: "orders", Key: "a"})
			}
			if err := pgx.BeginFunc(t.Context(), pool, func(tx pgx.Tx) error { return step(tx, "B") }); err != nil {
				t.Fatal(err)
			}
			if err := step(a, "A"); err != nil {
				t.Fatal(err)
			}
			commit(t, a)
			if together {
				start(t, connect(t, u), r, quick())
			}
			eventually(t, time.Minute, func() string {
				if len(r.messages()) < 2 {
					return "not both are published"
				}
				return ""
			})
			if got := r.messages(); got[0].ID != "B" || got[1].ID != "A" || len(got) != 2 {
				t.Errorf("read together %v: %d messages were published, first %s, want B, A", together, len(got), got[0].ID)
			}
		}
	})
}

// TestCase_B18_OldWhenItBecomesVisible: a transaction stays open for longer than
// a lease; its message is published once, by one of two dispatchers.
func TestCase_B18_OldWhenItBecomesVisible(t *testing.T) {
	each(t, func(t *testing.T, s *server) {
		u := s.database(t)
		pool := connect(t, u)
		r := &recorder{}
		h := &hook{}
		start(t, connect(t, u, h.watch), r, quick())
		start(t, connect(t, u, h.watch), r, quick())
		err := pgx.BeginFunc(t.Context(), pool, func(tx pgx.Tx) error {
			if err := new(outbox.Outbox).Write(t.Context(), tx, numbered(1, 0, 1)...); err != nil {
				return err
			}
			_, err := tx.Exec(t.Context(), `SELECT pg_sleep(1.5)`)
			return err
		})
		if err != nil {
			t.Fatal(err)
		}
		waitNumbers(t, r, 0, 1)
		waitCursors(t, pool)
		polls := h.ended(pollPart)
		eventually(t, time.Minute, func() string {
			if h.ended(pollPart) < polls+10 {
				return "the dispatchers do not poll"
			}
			return ""
		})
		if n := len(r.messages()); n != 1 {
			t.Errorf("published %d times", n)
		}
	})
}
