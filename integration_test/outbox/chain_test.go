package outbox_test

import (
	"context"
	"encoding/json"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"
)

// plan is a node of an executed plan, with all below it.
type plan struct {
	Type     string  `json:"Node Type"`
	Relation string  `json:"Relation Name"`
	Index    string  `json:"Index Name"`
	Rows     float64 `json:"Actual Rows"`
	Loops    float64 `json:"Actual Loops"`
	Removed  float64 `json:"Rows Removed by Filter"`
	Hit      int     `json:"Shared Hit Blocks"`
	Read     int     `json:"Shared Read Blocks"`
	Plans    []plan
}

func (p *plan) buffers() int { return p.Hit + p.Read }

// each calls f with the node and all below it.
func (p *plan) each(f func(*plan)) {
	f(p)
	for i := range p.Plans {
		p.Plans[i].each(f)
	}
}

// rowsBuffers adds up the buffers that were touched to read a table.
func (p *plan) rowsBuffers(table string) (n int) {
	p.each(func(p *plan) {
		if p.Relation == table && p.Type != "ModifyTable" {
			n += p.buffers()
		}
	})
	return n
}

// scans lists the scans of a table whose type contains kind.
func (p *plan) scans(table, kind string) (types []string) {
	p.each(func(p *plan) {
		if p.Relation == table && strings.Contains(p.Type, kind) {
			types = append(types, p.Type)
		}
	})
	return types
}

// explain runs a statement as the extended protocol runs it, with a plan that
// is made for any parameters (generic) or for these, and rolls it back.
func explain(t testing.TB, conn *pgx.Conn, generic bool, sql string, args ...any) *plan {
	t.Helper()
	tx, err := conn.Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer tx.Rollback(context.Background())
	mode := "force_custom_plan"
	if generic {
		mode = "force_generic_plan"
	}
	exec(t, tx, `SET LOCAL plan_cache_mode = `+mode)
	// EXPLAIN with parameters plans for these; EXPLAIN EXECUTE obeys the mode.
	_, err = tx.Exec(t.Context(), `PREPARE explained AS `+sql, pgx.QueryExecModeSimpleProtocol)
	if err != nil {
		t.Fatalf("%v: %s", err, sql)
	}
	defer exec(t, conn, `DEALLOCATE explained`)
	marks := make([]string, len(args))
	for i := range args {
		marks[i] = "$" + itoa(i+1)
	}
	text := `EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) EXECUTE explained (` + strings.Join(marks, ", ") + `)`
	var out string
	err = tx.QueryRow(t.Context(), text, append([]any{pgx.QueryExecModeSimpleProtocol}, args...)...).Scan(&out)
	if err != nil {
		t.Fatalf("%v: %s", err, sql)
	}
	var plans []struct{ Plan plan }
	if err := json.Unmarshal([]byte(out), &plans); err != nil {
		t.Fatal(err)
	}
	return &plans[0].Plan
}

// TestVersionChains: half a million advances under one open snapshot, which
// keeps every version of every row, do not make the newest row dearer to read.
func TestVersionChains(t *testing.T) {
	each(t, func(t *testing.T, s *server) {
		u := s.database(t)
		pool := connect(t, u)
		conn, err := pgx.Connect(t.Context(), u)
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close(context.Background())
		write(t, pool, numbered(1, 0, 1)...)
		lane, origin := ownLane(t, pool)
		exec(t, pool, `UPDATE "postroom".outbox_lanes SET lease = now()`)

		old, err := pool.BeginTx(t.Context(), pgx.TxOptions{IsoLevel: pgx.RepeatableRead})
		if err != nil {
			t.Fatal(err)
		}
		defer old.Rollback(context.Background())
		exec(t, old, `SELECT count(*) FROM "postroom".outbox_cursors`)

		load, begin := statement(t, "loadCursor"), statement(t, "beginDifference")
		newest := func() int {
			return explain(t, conn, false, load, lane, origin).buffers() +
				explain(t, conn, false, begin, beginArgs(lane, origin)...).rowsBuffers("outbox_cursors")
		}
		newest() // the first fills the session's caches
		before := newest()
		const advances = 500_000
		exec(t, pool, `INSERT INTO "postroom".outbox_cursors (lane, origin, number, fence, owner, prev, until, last_id)
			SELECT $1, $2, n, 7, 'test', '1:1:', '1:1:', 9223372036854775807 FROM generate_series(2, $3::int) n`, lane, origin, advances)
		appended := newest()
		thin := statement(t, "thinCursors")
		exec(t, pool, thin, lane, origin, int64(0), int64(advances), "8 days")
		if n := scan[int](t, pool, `SELECT count(*) FROM "postroom".outbox_cursors WHERE lane = $1`, lane); n > 20 {
			t.Errorf("%d cursors of about a minute are left", n)
		}
		exec(t, pool, `VACUUM "postroom".outbox_cursors`)
		thinned := newest()
		t.Logf("buffers of the newest row: %d at first, %d after %d advances, %d after thinning", before, appended, advances, thinned)
		if max(appended, thinned) > before+10 {
			t.Errorf("the newest row costs %d and %d buffers, want about %d", appended, thinned, before)
		}

		// A dispatcher goes on from there, and updates no cursor.
		r := &recorder{}
		start(t, pool, r, quick())
		for n := 1; n < 200; n += 20 {
			write(t, pool, numbered(9, n, 20)...)
			eventually(t, waitTime, func() string { return missing(rows(t, pool), arrived(r.messages())) })
		}
		waitCursors(t, pool)
		eventually(t, waitTime, func() string {
			if scan[int](t, pool, `SELECT n_tup_ins FROM pg_stat_user_tables WHERE relname = 'outbox_cursors'`) < advances+10 {
				return "the statistics have not come in"
			}
			return ""
		})
		if n := scan[int](t, pool, `SELECT n_tup_upd FROM pg_stat_user_tables WHERE relname = 'outbox_cursors'`); n != 0 {
			t.Errorf("cursors were updated %d times, want appended rows alone", n)
		}
	})
}
