package outbox_test

import (
	"context"
	"fmt"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"

	"github.com/postroom/postroom/outbox"
)

const (
	planRetained = 500_000 // rows in four lanes, published for the most part
	planXids     = 20_000  // transactions that wrote them, in the order of their ids
	planParked   = 100_000
	planPage     = 1000
)

// TestPlans: with half a million messages retained and a hundred thousand set
// aside, with and without statistics, by generic and by custom plans, no hot
// statement reads more than it returns.
func TestPlans(t *testing.T) {
	each(t, func(t *testing.T, s *server) {
		p := newPlanned(t, s)
		empty := p.poll(t, false, p.now(t))
		p.fill(t)
		for _, statistics := range []bool{false, true} {
			if statistics {
				exec(t, p.conn, `ANALYZE`)
			}
			for _, generic := range []bool{false, true} {
				t.Run(fmt.Sprintf("statistics=%v/generic=%v", statistics, generic), func(t *testing.T) {
					p.check(t, generic)
					p.clean(t, generic)
					if n := p.poll(t, generic, p.now(t)); n > empty+24 { // a level more in each index
						t.Errorf("a poll costs %d buffers, and %d where nothing is retained", n, empty)
					}
				})
			}
		}
		p.openTransaction(t, empty)
		p.stale(t)
		p.status(t)
	})
}

// planned is a database to look at plans in.
type planned struct {
	conn         *pgx.Conn
	lane, origin int64
	first        int64 // the lowest transaction id of the retained rows
}

func newPlanned(t *testing.T, s *server) *planned {
	u := s.database(t)
	pool := connect(t, u)
	exec(t, pool, `CREATE UNLOGGED TABLE junk (n int)`)
	exec(t, pool, `ALTER TABLE "postroom".outbox_messages SET (autovacuum_enabled = false)`)
	exec(t, pool, `ALTER TABLE "postroom".outbox_parked SET (autovacuum_enabled = false)`)
	write(t, pool, numbered(1, 0, 1)...)
	p := &planned{}
	p.lane, p.origin = ownLane(t, pool)
	p.first = burn(t, pool, planXids) - planXids + 1
	var err error
	if p.conn, err = pgx.Connect(t.Context(), u); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = p.conn.Close(context.Background()) })
	return p
}

func (p *planned) fill(t *testing.T) {
	t.Helper()
	exec(t, p.conn, `INSERT INTO "postroom".outbox_messages (hash, xid, message_id, topic, key, payload)
		SELECT g % 4, ($2::int8 + g * $3::int8 / $1::int8)::text::xid8, 'm' || g, 'orders', 'k' || g % 1000, '\x00112233445566778899'
		  FROM generate_series(1, $1::int8 - 1) g`, planRetained, p.first, planXids)
	exec(t, p.conn, `INSERT INTO "postroom".outbox_parked (lane, origin, id, state, attempts, error, created_at, hash, message_id, topic, key, header_names, header_values)
		SELECT 1000 + g % 4, $2, g, 'refused', 1, 'never', now(), g % 4, 'p' || g, 'orders', 'parked' || g % 500, '{}', '{}'
		  FROM generate_series(1, $1::int8) g`, planParked, p.origin)
}

// now is a snapshot that has seen everything.
func (p *planned) now(t *testing.T) string {
	t.Helper()
	return scan[string](t, p.conn, `SELECT pg_current_snapshot()::text`)
}

// poll returns the buffers of a poll of four idle lanes.
func (p *planned) poll(t *testing.T, generic bool, until string) int {
	t.Helper()
	lanes := []int64{1000, 1001, 1002, 1003}
	sql := statement(t, "pollLanes")
	args := []any{lanes, []string{until, until, until, until}, p.origin, true}
	explain(t, p.conn, generic, sql, args...) // fills caches and sets hint bits
	return explain(t, p.conn, generic, sql, args...).buffers()
}

// check looks at the statements that read differences: one that is small, and
// one of half the retained messages, where two transactions ended late.
func (p *planned) check(t *testing.T, generic bool) {
	t.Helper()
	half := p.first + planXids/2
	early := []string{fmt.Sprint(p.first + 100), fmt.Sprint(p.first + 200)}
	prev := fmt.Sprintf("%s:%d:%s", early[0], half, strings.Join(early, ","))
	until := p.now(t)
	var low, middle, high int64
	err := p.conn.QueryRow(t.Context(), `SELECT min(id), (min(id) + max(id)) / 2, max(id) FROM "postroom".outbox_messages
		WHERE lane = $1 AND xid >= $2::text::xid8`, p.lane, fmt.Sprint(half)).Scan(&low, &middle, &high)
	if err != nil {
		t.Fatal(err)
	}
	number := int64(1)
	begin := func(prev string, xmax int64, xip []string) []any {
		return []any{
			p.lane, p.origin, int64(7), "test", number, int64(7), "test", "1:1:", prev, int64(1<<63 - 1),
			fmt.Sprint(xmax), xip, planPage, false,
		}
	}
	guard := []any{p.lane, p.origin, p.origin, number, prev, until}
	with := func(args ...any) []any { return append(append([]any{}, guard...), args...) }
	last := p.first + planXids - 20
	inRange := planRetained / 4 / 2
	for _, c := range []struct {
		name, sql  string
		prev, till string // of the newest cursor
		args       []any
		most       int // messages that it may read
		rows       int // messages that it reads at least
	}{
		{"begin/small", "beginDifference", "1:1:", fmt.Sprintf("%d:%d:", last, last), begin(fmt.Sprintf("%d:%d:", last, last), last, nil), 3 * planPage, 50},
		{"begin/ended", "beginDifference", "1:1:", prev, begin(prev, half, early), 3 * planPage, planPage + 1},
		{"bounds", "differenceBounds", prev, until, with(fmt.Sprint(half), until), inRange + 10, inRange - 10},
		{"page A", "differencePageA", prev, until, with(early, int64(0), low, planPage), 100, 5},
		{"page B/first", "differencePageB", prev, until, with(low-1, prev, until, planPage), planPage + 10, planPage},
		{"page B/middle", "differencePageB", prev, until, with(middle, prev, until, planPage), planPage + 10, planPage},
		{"page B/last", "differencePageB", prev, until, with(high-40, prev, until, planPage), 100, 5},
	} {
		exec(t, p.conn, `UPDATE "postroom".outbox_cursors SET prev = $2::text::pg_snapshot, until = $3::text::pg_snapshot WHERE lane = $1`, p.lane, c.prev, c.till)
		plan := explain(t, p.conn, generic, statement(t, c.sql), c.args...)
		read := plan.read("outbox_messages")
		if bad := plan.scans("outbox_messages", "Seq"); len(bad) > 0 {
			t.Errorf("%s: scans of the messages: %v", c.name, bad)
		}
		if read > c.most || read < c.rows {
			t.Errorf("%s reads %d messages, want %d to %d", c.name, read, c.rows, c.most)
		}
		if n := plan.sorted(); n > c.most { // the bounds may sort what they read
			t.Errorf("%s sorts %d rows", c.name, n)
		}
		if n := plan.buffers(); n > 2*c.most+200 {
			t.Errorf("%s touches %d buffers", c.name, n)
		}
		t.Logf("%-14s reads %6d messages, %6d buffers", c.name, read, plan.buffers())
	}
}

// TestSchedulePlans: two hundred thousand messages that wait for their time cost
// the look for due ones nothing, with and without statistics, nor does a
// cancellation look through them.
func TestSchedulePlans(t *testing.T) {
	each(t, func(t *testing.T, s *server) {
		u := s.database(t)
		conn, err := pgx.Connect(t.Context(), u)
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close(context.Background())
		exec(t, conn, `ALTER TABLE "postroom".outbox_scheduled SET (autovacuum_enabled = false)`)
		add := func(from, n int, when string) {
			exec(t, conn, `INSERT INTO "postroom".outbox_scheduled (deliver_at, hash, message_id, topic, key)
				SELECT now() + $3::interval + g * interval '1 ms', g % 7, 'm' || g, 'orders', 'k' || g % 1000
				  FROM generate_series($1::int4, $1::int4 + $2::int4 - 1) g`, from, n, when)
		}
		add(0, 200_000, "1 hour")
		cancel := constants(t, "outbox")["deleteScheduled"]
		for _, statistics := range []bool{false, true} {
			if statistics {
				exec(t, conn, `ANALYZE`)
			}
			for _, generic := range []bool{false, true} {
				plan := explain(t, conn, generic, statement(t, "moveDue"), int64(7))
				if n := plan.buffers(); n > 20 {
					t.Errorf("statistics=%v generic=%v: a look that finds nothing touches %d buffers", statistics, generic, n)
				}
				if n := explain(t, conn, generic, cancel, "m1000").buffers(); n > 20 {
					t.Errorf("statistics=%v generic=%v: Cancel touches %d buffers", statistics, generic, n)
				}
			}
		}
		add(200_000, 3000, "-1 hour")
		for _, generic := range []bool{false, true} {
			plan := explain(t, conn, generic, statement(t, "moveDue"), int64(7))
			if n := plan.read("outbox_scheduled"); n != 3000 { // by the index, by their places, and as deleted
				t.Errorf("generic=%v: reads %d messages to move 1000", generic, n)
			}
		}
	})
}

// status looks at what ReadStatus reads where all is published: retained
// messages cost it nothing, and of refused ones it reads those that it lists.
func (p *planned) status(t *testing.T) {
	t.Helper()
	exec(t, p.conn, `DELETE FROM "postroom".outbox_cursors`)
	exec(t, p.conn, `INSERT INTO "postroom".outbox_cursors (lane, origin, number, fence, owner, prev, until, last_id)
		SELECT lane, $1, 1, 7, 'test', '1:1:', pg_current_snapshot(), 9223372036854775807 FROM "postroom".outbox_lanes`, p.origin)
	for _, generic := range []bool{false, true} {
		plan := explain(t, p.conn, generic, statement(t, "statusLanes"), 100_000)
		if n := plan.read("outbox_messages"); n > 20 {
			t.Errorf("generic=%v: the status of four lanes reads %d messages", generic, n)
		}
		if n := plan.buffers(); n > 200 {
			t.Errorf("generic=%v: the status of four lanes touches %d buffers", generic, n)
		}
		plan = explain(t, p.conn, generic, statement(t, "statusHeads"), 100_000)
		if n := plan.read("outbox_parked"); n > 50_000 { // 100 heads, each with 200 of its key behind it at most
			t.Errorf("generic=%v: the list of heads reads %d parked messages", generic, n)
		}
	}
}

// clean looks at the cleaner's statements, with half of the messages old enough.
func (p *planned) clean(t *testing.T, generic bool) {
	t.Helper()
	half := p.first + planXids/2
	seen := fmt.Sprintf("%d:%d:%d", half-500, half, half-500)
	exec(t, p.conn, `UPDATE "postroom".outbox_cursors SET prev = '1:1:', until = $2::text::pg_snapshot, last_id = 9223372036854775807,
		created_at = now() - interval '1 day' WHERE lane = $1`, p.lane, seen)
	common := []any{p.lane, p.origin, int64(1), "1:1:", seen, int64(1<<63 - 1), "1 hour", int64(7)}
	with := func(args ...any) []any { return append(append([]any{}, common...), args...) }
	for _, c := range []struct {
		name, sql string
		args      []any
		deleted   int
	}{
		{"clean/list", "cleanable", []any{"test", "1 hour"}, 0},
		{"clean/first", "cleanRange", with("1", int64(0), planPage), planPage},
		{"clean/middle", "cleanRange", with(fmt.Sprint(half-5000), int64(0), planPage), planPage},
		{"clean/ended", "cleanEnded", with([]string{fmt.Sprint(half - 400), fmt.Sprint(half - 300)}, planPage), 10},
		{"clean/nothing", "cleanRange", with(fmt.Sprint(half), int64(0), planPage), 0},
	} {
		plan := explain(t, p.conn, generic, statement(t, c.sql), c.args...)
		read := plan.read("outbox_messages") // each once in the index, once by its place
		if bad := plan.scans("outbox_messages", "Seq"); len(bad) > 0 {
			t.Errorf("%s: scans of the messages: %v", c.name, bad)
		}
		if read < 2*c.deleted || read > 2*c.deleted+40 {
			t.Errorf("%s reads %d messages to delete %d", c.name, read, c.deleted)
		}
		if n := plan.buffers(); n > 6*c.deleted+150 {
			t.Errorf("%s touches %d buffers", c.name, n)
		}
		t.Logf("%-14s reads %6d messages, %6d buffers", c.name, read, plan.buffers())
	}
	exec(t, p.conn, `UPDATE "postroom".outbox_cursors SET last_id = 9223372036854775807 WHERE lane = $1`, p.lane)
}

// openTransaction has a transaction write a hundred thousand messages and stay
// open: polls from a cursor that has passed it do not walk them.
func (p *planned) openTransaction(t *testing.T, empty int) {
	t.Helper()
	pool := connect(t, p.conn.Config().ConnString())
	tx, err := pool.Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer tx.Rollback(context.Background())
	exec(t, tx, `INSERT INTO "postroom".outbox_messages (hash, message_id, topic, key)
		SELECT g % 4, 'o' || g, 'orders', 'k' || g % 1000 FROM generate_series(1, 100000) g`)
	exec(t, pool, `SELECT pg_current_xact_id()`)
	until := p.now(t)
	if !strings.HasSuffix(until, fmt.Sprint(":", scan[string](t, tx, `SELECT pg_current_xact_id()::text`))) {
		t.Fatalf("snapshot %s does not name the open transaction", until)
	}
	if n := p.poll(t, false, until); n > empty+24 {
		t.Errorf("a poll costs %d buffers while a transaction is open, and %d where nothing is retained", n, empty)
	}
	if err := new(outbox.Outbox).Write(t.Context(), tx, numbered(1, 1, 1)...); err != nil {
		t.Fatal(err)
	}
	commit(t, tx)
	if n := p.poll(t, false, until); n > empty+48 {
		t.Errorf("a poll costs %d buffers when a big transaction has ended, and %d where nothing is retained", n, empty)
	}
}

// stale has a backlog come of which the statistics know nothing: the start of a
// difference reads a page of it and no more.
func (p *planned) stale(t *testing.T) {
	t.Helper()
	exec(t, p.conn, `ANALYZE`)
	prev := p.now(t)
	xmax := scan[int64](t, p.conn, `SELECT pg_snapshot_xmax($1::text::pg_snapshot)::text::int8`, prev)
	burn(t, p.conn, 1000)
	exec(t, p.conn, `INSERT INTO "postroom".outbox_messages (hash, xid, message_id, topic, key)
		SELECT g % 4, ($1::int8 + g / 100)::text::xid8, 's' || g, 'orders', 'k' || g % 1000 FROM generate_series(1, 99999) g`, xmax)
	exec(t, p.conn, `UPDATE "postroom".outbox_cursors SET prev = '1:1:', until = $2::text::pg_snapshot WHERE lane = $1`, p.lane, prev)
	for _, generic := range []bool{false, true} {
		plan := explain(t, p.conn, generic, statement(t, "beginDifference"),
			p.lane, p.origin, int64(7), "test", int64(1), int64(7), "test", "1:1:", prev, int64(1<<63-1),
			fmt.Sprint(xmax), []string{}, planPage, false)
		n, sorted := plan.read("outbox_messages"), plan.sorted()
		t.Logf("begin before a backlog that the statistics do not know, generic=%v: reads %d messages, sorts %d", generic, n, sorted)
		if n > 3*planPage || sorted > 3*planPage {
			t.Errorf("begin reads %d and sorts %d messages, want about %d", n, sorted, planPage)
		}
	}
}

// read adds up the rows that were read from a table, those that a filter then
// removed included.
func (p *plan) read(table string) (n int) {
	p.each(func(p *plan) {
		if p.Relation == table {
			n += int((p.Rows + p.Removed) * p.Loops)
		}
	})
	return n
}

// sorted returns the most rows that a node sorts.
func (p *plan) sorted() (most int) {
	p.each(func(p *plan) {
		if strings.Contains(p.Type, "Sort") && len(p.Plans) > 0 {
			most = max(most, int(p.Plans[0].Rows*p.Plans[0].Loops))
		}
	})
	return most
}
