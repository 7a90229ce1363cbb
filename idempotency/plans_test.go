package idempotency

import (
	"fmt"
	"regexp"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"

	"github.com/postroom/postroom/internal/pgtest"
)

// bounded says that a cleaner's scan of an index ends where nothing is due.
var bounded = regexp.MustCompile(`Index Cond: .*<= now\(\)`)

// No statement reads a table from end to end, with statistics and without, on the
// oldest and the newest server.
func TestPlans(t *testing.T) {
	pgtest.Each(t, func(t *testing.T, s *pgtest.Server) {
		pool := s.New(t)
		conn, err := pool.Acquire(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Release()
		exec := func(sql string) {
			t.Helper()
			if _, err := conn.Exec(t.Context(), sql, pgx.QueryExecModeSimpleProtocol); err != nil {
				t.Fatalf("%s: %v", sql, err)
			}
		}
		for _, sql := range []string{
			`ALTER TABLE postroom.idempotency_keys SET (autovacuum_enabled = false)`,
			`ALTER TABLE postroom.idempotency_answers SET (autovacuum_enabled = false)`,
			`INSERT INTO postroom.idempotency_keys (tenant, operation, key, fingerprint, fingerprint_version, state, fence, locked_until,
				first_seen, completed_at, expires_at, tombstone_until)
				SELECT 't' || n % 10, 'o', 'k' || n, '', 1, 'completed', n, now(), now(), now(), now() + n * interval '1 s', now() + n * interval '1 s'
				  FROM generate_series(1, 30000) n`,
			`INSERT INTO postroom.idempotency_answers SELECT tenant, operation, key, expires_at, 200, '{}', '{}', 'x' FROM postroom.idempotency_keys`,
			`SET plan_cache_mode = force_generic_plan`,
		} {
			exec(sql)
		}
		statements := map[string]string{
			"look": look, "claim": claim, "takeOver": takeOver, "lockOwn": lockOwn, "completeOwn": completeOwn,
			"releaseOwn": releaseOwn, "renewOwn": renewOwn, "lockToSettle": lockToSettle,
			"deleteAnswers": deleteAnswers, "deleteKeys": deleteKeys,
		}
		for name, sql := range statements {
			exec(fmt.Sprintf("PREPARE %s AS %s", name, sql))
		}
		for _, analyzed := range []bool{false, true} {
			if analyzed {
				exec(`ANALYZE postroom.idempotency_keys, postroom.idempotency_answers`)
			}
			for name, sql := range statements {
				n := 1
				for strings.Contains(sql, fmt.Sprintf("$%d::", n+1)) {
					n++
				}
				rows, err := conn.Query(t.Context(), fmt.Sprintf("EXPLAIN EXECUTE %s (%s)", name, strings.TrimSuffix(strings.Repeat("NULL,", n), ",")),
					pgx.QueryExecModeSimpleProtocol)
				if err != nil {
					t.Fatal(err)
				}
				lines, err := pgx.CollectRows(rows, pgx.RowTo[string])
				if err != nil {
					t.Fatalf("%s: %v", name, err)
				}
				plan := strings.Join(lines, "\n")
				endless := strings.HasPrefix(name, "delete") && !bounded.MatchString(plan)
				if endless || strings.Contains(plan, "Seq Scan on idempotency") {
					t.Errorf("%s, analyzed %v:\n%s", name, analyzed, plan)
				}
			}
		}
		exec(`DEALLOCATE ALL`)
		exec(`RESET plan_cache_mode`)
	})
}
