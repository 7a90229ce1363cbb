package throwaway_test

import (
	"errors"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/postroom/postroom/internal/throwaway"
)

func TestPgBouncerSharesOneServerConnection(t *testing.T) {
	p := startPostgres(t, throwaway.PostgresConfig{})
	db, err := p.CreateDatabase(t.Context(), "d")
	must(t, err)
	b, err := throwaway.StartPgBouncer(t.Context(), throwaway.PgBouncerConfig{
		URL: db, PoolSize: 1, Settings: map[string]string{"query_wait_timeout": "1"},
	})
	must(t, err)
	t.Cleanup(func() { must(t, b.Close()) })
	t.Log(b.Source)

	one, two := throughBouncer(t, b.URL), throughBouncer(t, b.URL)
	pid := func(q interface {
		QueryRow(sql string) pgx.Row
	},
	) (n int, db string) {
		must(t, q.QueryRow(`SELECT pg_backend_pid(), current_database()`).Scan(&n, &db))
		return n, db
	}
	a, name := pid(one)
	if b, _ := pid(two); a != b || name != "d" {
		t.Errorf("two clients use server processes %d and %d in %q, want the same in d", a, b, name)
	}

	// Within a transaction the connection is its client's alone.
	if _, err := one.Exec(t.Context(), `BEGIN`); err != nil {
		t.Fatal(err)
	}
	_, err = two.Exec(t.Context(), `SELECT 1`)
	if _, ok := errors.AsType[*pgconn.PgError](err); !ok {
		t.Errorf("a second transaction on a pool of one: %v, want a timeout from PgBouncer", err)
	}

	must(t, b.Stop(t.Context()))
	if err := one.Ping(t.Context()); err == nil {
		t.Error("Stop left a client connected")
	}
	must(t, b.Start(t.Context()))
	if n := throughBouncer(t, b.URL); n.Ping(t.Context()) != nil {
		t.Error("a pooler that was started again does not answer")
	}
}

type bouncerConn struct {
	*pgx.Conn
	t *testing.T
}

func (c bouncerConn) QueryRow(sql string) pgx.Row {
	return c.Conn.QueryRow(c.t.Context(), sql)
}

func throughBouncer(t *testing.T, url string) bouncerConn {
	t.Helper()
	return bouncerConn{connect(t, url+"&default_query_exec_mode=exec"), t}
}

func TestPgBouncerErrors(t *testing.T) {
	for _, cfg := range []throwaway.PgBouncerConfig{{}, {URL: "postgres://127.0.0.1:1/x", PoolSize: -1}} {
		if b, err := throwaway.StartPgBouncer(t.Context(), cfg); err == nil {
			_ = b.Close()
			t.Errorf("%+v was accepted", cfg)
		}
	}
}
