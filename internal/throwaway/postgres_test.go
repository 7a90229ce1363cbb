package throwaway_test

import (
	"bytes"
	"context"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/postroom/postroom/internal/throwaway"
)

// logBuffer may be read while a server writes to it.
type logBuffer struct {
	mu  sync.Mutex
	buf bytes.Buffer
}

func (l *logBuffer) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.buf.Write(p)
}

func (l *logBuffer) take() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	defer l.buf.Reset()
	return l.buf.String()
}

func startPostgres(t *testing.T, cfg throwaway.PostgresConfig) *throwaway.Postgres {
	t.Helper()
	p, err := throwaway.StartPostgres(t.Context(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := p.Close(); err != nil {
			t.Error(err)
		}
		if _, err := os.Stat(filepath.Dir(p.DataDir)); cfg.URL == "" && !os.IsNotExist(err) {
			t.Errorf("after Close the directory is there: %v", err)
		}
	})
	return p
}

func execSQL(t *testing.T, url, sql string, args ...any) {
	t.Helper()
	conn := connect(t, url)
	defer conn.Close(t.Context())
	if _, err := conn.Exec(t.Context(), sql, args...); err != nil {
		t.Fatalf("%s: %v", sql, err)
	}
}

func query[T any](t *testing.T, url, sql string, args ...any) (v T) {
	t.Helper()
	conn := connect(t, url)
	defer conn.Close(t.Context())
	if err := conn.QueryRow(t.Context(), sql, args...).Scan(&v); err != nil {
		t.Fatalf("%s: %v", sql, err)
	}
	return v
}

func connect(t *testing.T, url string) *pgx.Conn {
	t.Helper()
	conn, err := pgx.Connect(t.Context(), url)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = conn.Close(context.Background()) }) // its server may be gone
	return conn
}

func TestPostgresVersions(t *testing.T) {
	for _, version := range []string{"", "14", "18"} {
		t.Run("version "+version, func(t *testing.T) {
			t.Parallel()
			p := startPostgres(t, throwaway.PostgresConfig{Version: version, Settings: map[string]string{"work_mem": "7MB"}})
			t.Log(p.Source)
			if got := query[string](t, p.URL, `SELECT split_part(current_setting('server_version'), ' ', 1)`); got != p.Version {
				t.Errorf("server says version %s, Version = %s", got, p.Version)
			}
			if version != "" && !strings.HasPrefix(p.Version, version+".") {
				t.Errorf("Version = %s, want %s", p.Version, version)
			}
			for name, want := range map[string]string{
				"work_mem": "7MB", "fsync": "on", "max_prepared_transactions": "10", "max_connections": "200",
				"listen_addresses": "127.0.0.1", "server_encoding": "UTF8",
			} {
				if got := query[string](t, p.URL, `SELECT current_setting($1)`, name); got != want {
					t.Errorf("%s is %s, want %s", name, got, want)
				}
			}
		})
	}
}

func TestPostgresStopCrashStart(t *testing.T) {
	log := &logBuffer{}
	p := startPostgres(t, throwaway.PostgresConfig{Log: log})
	url := p.URL
	db, err := p.CreateDatabase(t.Context(), `of "this" test/50%`)
	if err != nil {
		t.Fatal(err)
	}
	execSQL(t, db, `CREATE TABLE t AS SELECT 1 AS n`)
	tests := []struct {
		name string
		end  func(context.Context) error
		log  string
	}{
		{"Stop", p.Stop, "database system was shut down at"},
		{"Crash", p.Crash, "database system was not properly shut down"},
	}
	for _, tt := range tests {
		open := connect(t, db) // and left open
		log.take()
		if err := tt.end(t.Context()); err != nil {
			t.Fatalf("%s: %v", tt.name, err)
		}
		if err := open.Ping(t.Context()); err == nil {
			t.Errorf("%s left a session open", tt.name)
		}
		if conn, err := pgx.Connect(t.Context(), db); err == nil {
			_ = conn.Close(t.Context())
			t.Errorf("after %s the server takes connections", tt.name)
		}
		if err := tt.end(t.Context()); err != nil {
			t.Errorf("a second %s: %v", tt.name, err)
		}
		if err := p.Start(t.Context()); err != nil {
			t.Fatalf("Start after %s: %v", tt.name, err)
		}
		if text := log.take(); !strings.Contains(text, tt.log) {
			t.Errorf("after %s and Start the log lacks %q:\n%s", tt.name, tt.log, text)
		}
		if n := query[int](t, db, `SELECT n FROM t`); n != 1 || p.URL != url {
			t.Errorf("after %s and Start: %d in the table at %s, want 1 at %s", tt.name, n, p.URL, url)
		}
	}
	if err := p.Start(t.Context()); err == nil {
		t.Error("Start of a running server succeeded")
	}
	if err := p.Restart(t.Context()); err != nil {
		t.Error(err)
	}
	if n := query[int](t, db, `SELECT n FROM t`); n != 1 {
		t.Errorf("after Restart: %d in the table, want 1", n)
	}
}

func TestGivenPostgres(t *testing.T) {
	p := startPostgres(t, throwaway.PostgresConfig{})
	given := startPostgres(t, throwaway.PostgresConfig{URL: p.URL})
	if given.Version != p.Version || given.Major != p.Major {
		t.Errorf("given server is %s (%d), want %s (%d)", given.Version, given.Major, p.Version, p.Major)
	}
	if _, err := given.CreateDatabase(t.Context(), "d"); err != nil {
		t.Error(err)
	}
	for name, call := range map[string]func(context.Context) error{
		"Stop": given.Stop, "Crash": given.Crash, "Start": given.Start, "Restart": given.Restart,
	} {
		if err := call(t.Context()); err == nil || !strings.Contains(err.Error(), "PostgresConfig.URL") {
			t.Errorf("%s of a given server: %v, want an error that names PostgresConfig.URL", name, err)
		}
	}
	if err := given.Close(); err != nil {
		t.Error(err)
	}
	if n := query[int](t, p.URL, `SELECT 1`); n != 1 {
		t.Error("closing a given server ended it")
	}
}

func TestPostgresErrors(t *testing.T) {
	tests := []struct {
		name string
		cfg  throwaway.PostgresConfig
		want []string
	}{
		{"too old", throwaway.PostgresConfig{Version: "13"}, []string{"PostgresConfig.Version", `"13"`, "14"}},
		{"not a major version", throwaway.PostgresConfig{Version: "15.1"}, []string{"PostgresConfig.Version", `"15.1"`}},
		{"not to be had", throwaway.PostgresConfig{Version: "99"}, []string{"99", "14 to 18", "URL"}},
		{"not a setting", throwaway.PostgresConfig{Settings: map[string]string{"no_such_thing": "1"}}, []string{"no_such_thing"}},
		{"nobody there", throwaway.PostgresConfig{URL: "postgres://127.0.0.1:1/x"}, []string{"PostgresConfig.URL"}},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			p, err := throwaway.StartPostgres(t.Context(), tt.cfg)
			if err == nil {
				_ = p.Close()
				t.Fatal("no error")
			}
			for _, want := range tt.want {
				if !strings.Contains(err.Error(), want) {
					t.Errorf("error %q does not say %q", err, want)
				}
			}
		})
	}
}

func TestStartObeysItsContext(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond) // less than initdb takes
	defer cancel()
	p, err := throwaway.StartPostgres(ctx, throwaway.PostgresConfig{})
	if err == nil {
		_ = p.Close()
		t.Fatal("PostgreSQL was made within 100ms")
	}
	if ctx.Err() == nil || !strings.Contains(err.Error(), context.DeadlineExceeded.Error()) {
		t.Errorf("error %v, want the context's", err)
	}
}

// Two programs may want the same release at once, and the directory must hold
// either all of it or nothing.
func TestFetchAtOnce(t *testing.T) {
	cache := t.TempDir()
	var wg sync.WaitGroup
	for range 3 {
		wg.Go(func() {
			dir, err := throwaway.FetchInto(t.Context(), cache, 14)
			if err != nil {
				t.Error(err)
				return
			}
			info, err := os.Stat(filepath.Join(dir, "postgres"))
			if err != nil || info.Mode().Perm()&0o555 != 0o555 {
				t.Errorf("the server program: %v, %v; want that everyone can run it", info, err)
			}
		})
	}
	wg.Wait()
	entries, err := os.ReadDir(cache)
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range entries {
		if name := e.Name(); name != "lock" && !strings.HasPrefix(name, "postgresql-14.") {
			t.Errorf("the cache holds %q besides the release and the lock", name)
		}
	}
}
