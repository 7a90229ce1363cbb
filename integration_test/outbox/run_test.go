package outbox_test

import (
	"context"
	"log/slog"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/postroom/postroom"
	"github.com/postroom/postroom/broker"
	"github.com/postroom/postroom/dispatcher"
)

// quick is a configuration whose leases end soon.
func quick() dispatcher.Config {
	return dispatcher.Config{
		PublishTimeout: 400 * time.Millisecond, Lease: time.Second,
		Logger: slog.New(slog.DiscardHandler),
	}
}

// start runs a dispatcher and returns the call that stops it.
func start(t testing.TB, pool *pgxpool.Pool, pub broker.Publisher, cfg dispatcher.Config) (stop func()) {
	t.Helper()
	if cfg.Logger == nil {
		cfg.Logger = slog.New(slog.DiscardHandler)
	}
	d, err := dispatcher.New(pool, pub, cfg)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- d.Run(ctx) }()
	stop = sync.OnceFunc(func() {
		cancel()
		select {
		case err := <-done:
			if err != nil {
				t.Errorf("Run: %v", err)
			}
		case <-time.After(45 * time.Second):
			t.Error("Run has not returned 45s after its context ended")
		}
	})
	t.Cleanup(stop)
	return stop
}

// waitNumbers waits until exactly the messages from to to-1 have arrived, in
// order per key.
func waitNumbers(t testing.TB, r *recorder, from, to int) {
	t.Helper()
	eventually(t, time.Minute, func() string { return wantNumbers(r.messages(), from, to) })
}

// waitCursors waits until every lane's newest cursor says settled.
func waitCursors(t testing.TB, db queryer) {
	t.Helper()
	eventually(t, time.Minute, func() string {
		n := scan[int](t, db, `SELECT count(*) FROM (SELECT DISTINCT ON (lane, origin) last_id
			FROM "postroom".outbox_cursors ORDER BY lane, origin, number DESC) c WHERE last_id <> 9223372036854775807`)
		if n > 0 {
			return "a cursor is not settled"
		}
		return ""
	})
}

// rows returns the ids of the messages that the outbox holds.
func rows(t testing.TB, db queryer) map[string]bool {
	t.Helper()
	r, err := db.Query(t.Context(), `SELECT message_id FROM "postroom".outbox_messages`)
	if err != nil {
		t.Fatal(err)
	}
	ids, err := pgx.CollectRows(r, pgx.RowTo[string])
	if err != nil {
		t.Fatal(err)
	}
	all := map[string]bool{}
	for _, id := range ids {
		all[id] = true
	}
	return all
}

// arrived returns the ids of messages.
func arrived(msgs []postroom.Message) map[string]bool {
	all := map[string]bool{}
	for _, m := range msgs {
		all[m.ID] = true
	}
	return all
}

// killBackend ends one of the server's processes as a fault would. The server
// then ends all others and recovers, which this waits for.
func (s *server) killBackend(t testing.TB) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	conn, err := pgx.Connect(ctx, s.URL)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close(ctx)
	since := scan[time.Time](t, conn, `SELECT min(backend_start) FROM pg_stat_activity`)
	if err := syscall.Kill(int(conn.PgConn().PID()), syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	s.wait(t, `SELECT min(backend_start) > $1 FROM pg_stat_activity`, since)
}

// wait returns when the server takes connections and answers true.
func (s *server) wait(t testing.TB, sql string, args ...any) {
	t.Helper()
	eventually(t, time.Minute, func() string {
		ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
		defer cancel()
		conn, err := pgx.Connect(ctx, s.URL)
		if err != nil {
			return err.Error()
		}
		defer conn.Close(ctx)
		var ok bool
		if err := conn.QueryRow(ctx, sql, args...).Scan(&ok); err != nil {
			return err.Error()
		}
		if !ok {
			return "the server does not say true to " + sql
		}
		return ""
	})
}

// crash ends the server without a checkpoint and starts it again.
func (s *server) crash(t testing.TB) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	if err := s.Crash(ctx); err != nil {
		t.Fatal(err)
	}
	if err := s.Start(ctx); err != nil {
		t.Fatal(err)
	}
}

// asynchronous makes a pool's commits return before they are durable.
func asynchronous(cfg *pgxpool.Config) {
	cfg.ConnConfig.RuntimeParams["synchronous_commit"] = "off"
}

// transactional makes a pool fit for PgBouncer in transaction mode.
func transactional(mode pgx.QueryExecMode) func(*pgxpool.Config) {
	return func(cfg *pgxpool.Config) { cfg.ConnConfig.DefaultQueryExecMode = mode }
}

func missing(want, got map[string]bool) string {
	var ids []string
	for id := range want {
		if !got[id] {
			ids = append(ids, id)
		}
	}
	return strings.Join(ids, " ")
}
