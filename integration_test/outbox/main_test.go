// Package outbox_test runs the outbox and the dispatcher on real servers that
// crash, are restored, promoted and pooled, and on dispatchers that are killed
// and stopped.
//
// POSTROOM_TEST_POSTGRES chooses the versions of PostgreSQL, as in "14,15,18"; the
// default is the newest that is installed. The URL of a running server is
// ignored: these tests crash theirs.
package outbox_test

import (
	"context"
	"flag"
	"fmt"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/postroom/postroom"
	"github.com/postroom/postroom/internal/throwaway"
	"github.com/postroom/postroom/migrations"
	"github.com/postroom/postroom/outbox"
)

var (
	seedFlag   = flag.Uint64("seed", 0, "seed of the stress test; 0 draws one")
	stressFlag = flag.Duration("stress", 7*time.Second, "how long the writers of the stress test write")
)

func TestMain(m *testing.M) {
	if os.Getenv(childVariable) != "" {
		os.Exit(childMain())
	}
	flag.Parse()
	code := m.Run()
	for _, s := range servers.started {
		if err := s.Close(); err != nil {
			fmt.Fprintln(os.Stderr, err)
			code = max(code, 1)
		}
	}
	os.Exit(code)
}

// server is a server of its own for this process. Tests take turns, so that one
// may crash it: after the test it runs again.
type server struct {
	*throwaway.Postgres
}

var servers struct {
	mu      sync.Mutex
	started []*throwaway.Postgres
	shared  map[string]*server
}

// startTime bounds a server's start, with what must be fetched at a first run.
const startTime = 3 * time.Minute

func startServer(t testing.TB, version string) *server {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), startTime)
	defer cancel()
	p, err := throwaway.StartPostgres(ctx, throwaway.PostgresConfig{Version: version})
	if err != nil {
		t.Fatal(err)
	}
	servers.mu.Lock()
	servers.started = append(servers.started, p)
	servers.mu.Unlock()
	t.Log(p.Source)
	return &server{p}
}

func sharedServer(t testing.TB, version string) *server {
	t.Helper()
	if s := servers.shared[version]; s != nil {
		return s
	}
	number, _, _ := strings.Cut(version, " ") // what follows tells servers of a version apart
	s := startServer(t, number)
	if servers.shared == nil {
		servers.shared = make(map[string]*server)
	}
	servers.shared[version] = s
	return s
}

func versions() []string {
	v := strings.TrimSpace(os.Getenv("POSTROOM_TEST_POSTGRES"))
	if strings.Contains(v, "://") {
		v = ""
	}
	all := strings.Split(v, ",")
	for i := range all {
		all[i] = strings.TrimSpace(all[i])
	}
	return all
}

// each runs test on every version that is chosen.
func each(t *testing.T, test func(t *testing.T, s *server)) {
	t.Helper()
	for _, v := range versions() {
		t.Run("postgres"+v, func(t *testing.T) {
			s := sharedServer(t, v)
			t.Cleanup(func() { s.revive(t) })
			test(t, s)
		})
	}
}

// revive starts the server again where a failed test left it stopped.
func (s *server) revive(t testing.TB) {
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	if err := s.Start(ctx); err != nil && !strings.Contains(err.Error(), "running") {
		t.Error(err)
	}
}

var databases int

// database makes a migrated database and returns its URL.
func (s *server) database(t testing.TB) string {
	t.Helper()
	u := s.emptyDatabase(t)
	pool := connect(t, u)
	if _, err := migrations.Up(t.Context(), pool, migrations.Config{}); err != nil {
		t.Fatal(err)
	}
	return u
}

func (s *server) emptyDatabase(t testing.TB) string {
	t.Helper()
	databases++
	name := fmt.Sprintf("test_%d", databases)
	u, err := s.CreateDatabase(t.Context(), name)
	if err != nil {
		t.Fatal(err)
	}
	s.dropLater(t, name)
	return u
}

// dropLater drops a database when the test ends.
func (s *server) dropLater(t testing.TB, name string) {
	t.Cleanup(func() {
		s.revive(t)
		ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
		defer cancel()
		conn, err := pgx.Connect(ctx, s.URL)
		if err != nil {
			t.Error(err)
			return
		}
		defer conn.Close(ctx)
		// A prepared transaction keeps its database from being dropped.
		if _, err := conn.Exec(ctx, "DROP DATABASE IF EXISTS "+name+" WITH (FORCE)"); err != nil {
			t.Log(err)
		}
	})
}

// connect returns a pool that is closed when the test ends.
func connect(t testing.TB, u string, options ...func(*pgxpool.Config)) *pgxpool.Pool {
	t.Helper()
	cfg, err := pgxpool.ParseConfig(u)
	if err != nil {
		t.Fatal(err)
	}
	cfg.MaxConns = 30
	for _, o := range options {
		o(cfg)
	}
	pool, err := pgxpool.NewWithConfig(t.Context(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(pool.Close)
	return pool
}

// execer is a pool, a connection or a transaction.
type execer interface {
	queryer
	Begin(ctx context.Context) (pgx.Tx, error)
}

type queryer interface {
	QueryRow(ctx context.Context, sql string, args ...any) pgx.Row
	Query(ctx context.Context, sql string, args ...any) (pgx.Rows, error)
}

func exec(t testing.TB, db queryer, sql string, args ...any) {
	t.Helper()
	rows, err := db.Query(t.Context(), sql, args...)
	if err == nil {
		rows.Close()
		err = rows.Err()
	}
	if err != nil {
		t.Fatalf("%s: %v", sql, err)
	}
}

func scan[T any](t testing.TB, db queryer, sql string, args ...any) T {
	t.Helper()
	var v T
	if err := db.QueryRow(t.Context(), sql, args...).Scan(&v); err != nil {
		t.Fatalf("%s: %v", sql, err)
	}
	return v
}

// write writes messages in one transaction.
func write(t testing.TB, db execer, msgs ...postroom.Message) {
	t.Helper()
	if err := tryWrite(t.Context(), db, msgs...); err != nil {
		t.Fatal(err)
	}
}

func tryWrite(ctx context.Context, db execer, msgs ...postroom.Message) error {
	var box outbox.Outbox
	return pgx.BeginFunc(ctx, db, func(tx pgx.Tx) error { return box.Write(ctx, tx, msgs...) })
}

// eventually waits until check returns "", and fails with what it returned last.
func eventually(t testing.TB, within time.Duration, check func() string) {
	t.Helper()
	tick := time.NewTicker(5 * time.Millisecond)
	defer tick.Stop()
	for deadline := time.Now().Add(within); ; {
		problem := check()
		if problem == "" {
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("after %v: %s", within, problem)
		}
		select {
		case <-tick.C:
		case <-t.Context().Done():
			t.Fatal(problem)
		}
	}
}
