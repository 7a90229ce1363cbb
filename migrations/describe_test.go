package migrations_test

import (
	"slices"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
)

// describe lists a schema's columns, constraints, indexes and functions, one a
// line and in order, without the schema's name.
func describe(t *testing.T, pool *pgxpool.Pool, schema string) []string {
	t.Helper()
	const sql = `
WITH s AS (SELECT oid FROM pg_namespace WHERE nspname = $1), c AS (SELECT * FROM pg_class WHERE relnamespace = (SELECT oid FROM s))
SELECT format('column %s.%s %s', c.relname, a.attname, format_type(a.atttypid, a.atttypmod)) || CASE WHEN a.attnotnull THEN ' not null' ELSE '' END
  FROM c JOIN pg_attribute a ON a.attrelid = c.oid WHERE a.attnum > 0 AND c.relkind = 'r'
UNION ALL
SELECT format('%s %s %s', c.relkind, c.relname, c.reloptions) FROM c
UNION ALL
SELECT format('constraint %s %s', c.relname, pg_get_constraintdef(k.oid)) FROM c JOIN pg_constraint k ON k.conrelid = c.oid
UNION ALL
SELECT format('function %s %s', proname, pg_get_function_result(oid)) FROM pg_proc WHERE pronamespace = (SELECT oid FROM s)
ORDER BY 1`
	rows, err := pool.Query(t.Context(), sql, schema)
	if err != nil {
		t.Fatal(err)
	}
	lines, err := pgx.CollectRows(rows, pgx.RowTo[string])
	if err != nil {
		t.Fatal(err)
	}
	if len(lines) == 0 {
		t.Fatalf("schema %q is empty", schema)
	}
	return lines
}

// withoutMigrations leaves out the table that only Up makes.
func withoutMigrations(lines []string) []string {
	return slices.DeleteFunc(slices.Clone(lines), func(l string) bool {
		return strings.Contains(l, " migrations") // table, index, columns, constraints
	})
}
