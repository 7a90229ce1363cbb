package pgtest_test

import (
	"context"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/postroom/postroom/internal/pgtest"
)

func TestEachServerIsTheOneNamed(t *testing.T) {
	pgtest.Each(t, func(t *testing.T, db *pgtest.Server) {
		var major int
		err := db.Empty(t).QueryRow(t.Context(), `SELECT current_setting('server_version_num')::int / 10000`).Scan(&major)
		if err != nil {
			t.Fatal(err)
		}
		if major != db.Version {
			t.Errorf("server is version %d, Server.Version = %d", major, db.Version)
		}
		t.Log(db.Source)
	})
}

func TestDatabasesAreFreshAndDropped(t *testing.T) {
	pgtest.Each(t, func(t *testing.T, db *pgtest.Server) {
		var names []string
		t.Run("use", func(t *testing.T) {
			for range 2 {
				pool := db.New(t)
				names = append(names, databaseOf(t, pool))
				for _, table := range []string{"outbox_messages", "processed_messages"} {
					if n := count(t, pool, `SELECT count(*) FROM "postroom".`+table); n != 0 {
						t.Errorf("%s of a fresh database has %d rows", table, n)
					}
				}
				_, err := pool.Exec(t.Context(), `INSERT INTO "postroom".processed_messages VALUES ('s', 'm')`)
				if err != nil {
					t.Fatal(err)
				}
			}
			empty := db.Empty(t)
			names = append(names, databaseOf(t, empty))
			if n := count(t, empty, `SELECT count(*) FROM pg_namespace WHERE nspname = 'postroom'`); n != 0 {
				t.Errorf("an empty database has %d schemas called postroom", n)
			}
		})
		n := count(t, db.Empty(t), `SELECT count(*) FROM pg_database WHERE datname = ANY ($1)`, names)
		if n != 0 {
			t.Errorf("%d of the databases %q are still there after their test", n, names)
		}
	})
}

func TestURLLeadsToThePoolsDatabase(t *testing.T) {
	db := pgtest.First(t)
	pool := db.New(t)
	conn, err := pgx.Connect(t.Context(), db.URL(pool))
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close(context.Background())
	var got string
	if err := conn.QueryRow(t.Context(), `SELECT current_database()`).Scan(&got); err != nil {
		t.Fatal(err)
	}
	if want := databaseOf(t, pool); got != want {
		t.Errorf("Server.URL leads to %q, want %q", got, want)
	}
}

func databaseOf(t *testing.T, pool *pgxpool.Pool) string {
	t.Helper()
	var name string
	if err := pool.QueryRow(t.Context(), `SELECT current_database()`).Scan(&name); err != nil {
		t.Fatal(err)
	}
	return name
}

func count(t *testing.T, pool *pgxpool.Pool, sql string, args ...any) (n int) {
	t.Helper()
	if err := pool.QueryRow(t.Context(), sql, args...).Scan(&n); err != nil {
		t.Fatal(err)
	}
	return n
}
