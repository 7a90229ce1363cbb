package outbox_test

import (
	"context"
	"fmt"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/postroom/postroom"
	"github.com/postroom/postroom/internal/throwaway"
	"github.com/postroom/postroom/outbox"
)

// A crash loses asynchronous commits, and their transaction ids are given out
// a second time: what a dispatcher remembers from before must not make it skip
// the rows of their new owners.

// crashServer is a server that flushes nothing by itself for ten seconds.
func crashServer(t *testing.T, s *server) {
	t.Helper()
	exec(t, connect(t, s.URL), `ALTER SYSTEM SET wal_writer_delay = '10s'`)
	exec(t, connect(t, s.URL), `SELECT pg_reload_conf()`)
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
		defer cancel()
		s.revive(t)
		conn, err := pgx.Connect(ctx, s.URL)
		if err != nil {
			t.Error(err)
			return
		}
		defer conn.Close(ctx)
		for _, sql := range []string{`ALTER SYSTEM RESET wal_writer_delay`, `SELECT pg_reload_conf()`} {
			if _, err := conn.Exec(ctx, sql); err != nil {
				t.Error(err)
			}
		}
	})
}

// crashes are the ways to lose what was not flushed, and the ways to the server.
func crashes(t *testing.T, test func(t *testing.T, s *server, crash func(), writer, reader *pgxpool.Pool, h *hook)) {
	each(t, func(t *testing.T, s *server) {
		for _, kind := range []string{"kill-9", "immediate-shutdown"} {
			for _, way := range []string{"direct", "pgbouncer"} {
				t.Run(kind+"/"+way, func(t *testing.T) {
					crashServer(t, s)
					u := s.database(t)
					h := &hook{}
					crash := func() { s.crash(t) }
					if kind == "kill-9" {
						crash = func() { s.killBackend(t) }
					}
					options := []func(*pgxpool.Config){h.watch}
					through := u
					if way == "pgbouncer" {
						through = startPgBouncer(t, pgBouncer(u, 0)).URL
						options = append(options, transactional(pgx.QueryExecModeExec))
					}
					writer := connect(t, u, asynchronous)
					exec(t, writer, `CREATE UNLOGGED TABLE junk (n int)`)
					test(t, s, crash, writer, connect(t, through, options...), h)
				})
			}
		}
	})
}

// pgBouncer is one that soon finds a server that is back.
func pgBouncer(u string, size int) throwaway.PgBouncerConfig {
	return throwaway.PgBouncerConfig{URL: u, PoolSize: size, Settings: map[string]string{"server_login_retry": "0.2"}}
}

func startPgBouncer(t testing.TB, cfg throwaway.PgBouncerConfig) *throwaway.PgBouncer {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), startTime)
	defer cancel()
	b, err := throwaway.StartPgBouncer(ctx, cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := b.Close(); err != nil {
			t.Error(err)
		}
	})
	return b
}

// burn uses up n transaction ids with hardly any WAL, of which full pages are
// written before they are flushed. It returns the last.
func burn(t testing.TB, db queryer, n int) (last int64) {
	t.Helper()
	exec(t, db, fmt.Sprintf(`DO $$ BEGIN
		FOR i IN 2..%d LOOP
			BEGIN
				INSERT INTO junk VALUES (i);
			EXCEPTION WHEN division_by_zero THEN
			END;
		END LOOP;
		PERFORM pg_current_xact_id();
	END $$`, n))
	return scan[int64](t, db, `SELECT pg_snapshot_xmax(pg_current_snapshot())::text::int8`) - 1
}

// reconnected waits until a pool has left the connections that a crash cut.
func reconnected(t testing.TB, pool *pgxpool.Pool) {
	t.Helper()
	eventually(t, time.Minute, func() string {
		if err := pool.Ping(t.Context()); err != nil {
			return err.Error()
		}
		return ""
	})
	pool.Reset()
}

// waitRows waits until all that the outbox holds has arrived, and fails where
// what it does not hold has.
func waitRows(t *testing.T, db *pgxpool.Pool, r *recorder) {
	t.Helper()
	want := rows(t, db)
	eventually(t, time.Minute, func() string {
		if ids := missing(want, arrived(r.messages())); ids != "" {
			return "committed and not published: " + ids
		}
		return ""
	})
	if ids := missing(arrived(r.messages()), want); ids != "" {
		t.Errorf("published, and lost by the crash: %s", ids)
	}
	if _, problem := firsts(r.messages()); problem != "" {
		t.Error(problem)
	}
}

// TestCrashAfterEmptyPolls: transactions that write no message pass while the
// dispatcher polls, and are lost. Nothing in its memory may have moved over
// their ids.
func TestCrashAfterEmptyPolls(t *testing.T) {
	crashes(t, func(t *testing.T, s *server, crash func(), writer, reader *pgxpool.Pool, h *hook) {
		r := &recorder{}
		start(t, reader, r, quick())
		write(t, writer, numbered(5, 0, 10)...)
		waitNumbers(t, r, 0, 10)
		waitCursors(t, writer)
		for next, reused := 10, false; !reused; {
			if next > 300 {
				t.Fatal("no transaction id was given out a second time in 5 crashes")
			}
			before := burn(t, writer, 300)
			polls := h.ended(pollPart)
			eventually(t, time.Minute, func() string {
				if h.ended(pollPart) < polls+3 {
					return "the dispatcher does not poll"
				}
				return ""
			})
			crash()
			reconnected(t, writer)
			for range 60 { // a transaction each
				write(t, writer, numbered(5, next, 1)...)
				next++
			}
			first := scan[int64](t, writer, `SELECT xid::text::int8 FROM "postroom".outbox_messages WHERE message_id = $1`, fmt.Sprint("m", next-60))
			reused = first <= before
			waitNumbers(t, r, 0, next)
			waitRows(t, writer, r)
		}
	})
}

// TestCrashDuringSlowPublish: while a difference is being published, further
// messages are committed asynchronously, and lost. The next difference may not
// have been read before its row is appended.
func TestCrashDuringSlowPublish(t *testing.T) {
	crashes(t, func(t *testing.T, s *server, crash func(), writer, reader *pgxpool.Pool, h *hook) {
		var slow atomic.Bool
		var gate atomic.Pointer[chan struct{}]
		r := &recorder{}
		r.before = func(ctx context.Context, _ []postroom.Message) {
			if slow.Load() {
				<-*gate.Load()
			}
		}
		cfg := quick()
		cfg.PublishTimeout, cfg.Lease = 20*time.Second, time.Minute
		start(t, reader, r, cfg)
		next, reused := 0, false
		for round := 0; !reused; round++ {
			if round == 5 {
				t.Fatal("no transaction id was given out a second time in 5 crashes")
			}
			open := make(chan struct{})
			gate.Store(&open)
			calls := func() int { r.mu.Lock(); defer r.mu.Unlock(); return r.calls }
			done := calls()
			begun := h.ended(beginPart)
			slow.Store(true)
			write(t, writer, numbered(20, next, 20)...) // all lanes are busy
			next += 20
			eventually(t, time.Minute, func() string {
				if h.ended(beginPart) < begun+4 {
					return "not all lanes have read their messages"
				}
				return ""
			})
			var before int64
			for range 60 {
				if err := tryWrite(t.Context(), writer, numbered(20, next, 1)...); err != nil {
					t.Fatal(err)
				}
				next++
			}
			before = burn(t, writer, 300)
			pause(t.Context(), 50*time.Millisecond) // a read ahead would happen now
			crash()
			reconnected(t, writer)
			fresh := func() {
				for range 30 { // a transaction each, and one at least for each lane
					write(t, writer, numbered(20, next, 1)...)
					next++
				}
			}
			fresh()
			begun = h.ended(beginPart)
			slow.Store(false)
			close(open)
			eventually(t, time.Minute, func() string {
				if h.ended(beginPart) < begun+4 {
					return "not all lanes have gone on"
				}
				return ""
			})
			fresh()
			reused = burn(t, writer, 1) <= before
			waitRows(t, writer, r)
			if done == calls() {
				t.Fatal("nothing was published")
			}
		}
	})
}

// TestFlushedBeforePublished: what is published has been flushed, although its
// writers did not ask for that.
func TestFlushedBeforePublished(t *testing.T) {
	each(t, func(t *testing.T, s *server) {
		crashServer(t, s)
		u := s.database(t)
		writer := connect(t, u, asynchronous)
		var written atomic.Value // where the WAL stood before the commit
		written.Store("0/0")
		var unflushed atomic.Int64
		r := &recorder{before: func(ctx context.Context, _ []postroom.Message) {
			var ok bool
			err := writer.QueryRow(ctx, `SELECT pg_current_wal_flush_lsn() > $1::pg_lsn`, written.Load()).Scan(&ok)
			if err != nil || !ok {
				unflushed.Add(1)
			}
		}}
		cfg := quick()
		cfg.PageSize, cfg.Lease = 5, time.Minute // renewed leases are flushed too
		start(t, connect(t, u), r, cfg)
		next := 0
		for i := range 30 {
			n := 1 + i%2*10 // pages, every second time
			err := pgx.BeginFunc(t.Context(), writer, func(tx pgx.Tx) error {
				for _, m := range numbered(1, next, n) {
					if err := new(outbox.Outbox).Write(t.Context(), tx, m); err != nil {
						return err
					}
				}
				written.Store(scan[string](t, tx, `SELECT pg_current_wal_insert_lsn()::text`))
				return nil
			})
			if err != nil {
				t.Fatal(err)
			}
			next += n
			waitNumbers(t, r, 0, next)
		}
		if n := unflushed.Load(); n > 0 {
			t.Errorf("%d of %d calls of the publisher came before their messages were flushed", n, r.calls)
		}
	})
}

// TestCrashRightAfterPublishing: what is published is durable, although its
// writers did not ask for that.
func TestCrashRightAfterPublishing(t *testing.T) {
	crashes(t, func(t *testing.T, s *server, crash func(), writer, reader *pgxpool.Pool, h *hook) {
		r := &recorder{}
		cfg := quick()
		cfg.PageSize, cfg.Lease = 7, time.Minute // leases would be renewed durably
		start(t, reader, r, cfg)
		next := 0
		for _, size := range []int{3, 100} { // a small difference, and pages
			for round, reused := 0, false; !reused; round++ {
				if round == 5 {
					t.Fatal("no transaction id was given out a second time in 5 crashes")
				}
				write(t, writer, numbered(5, next, size)...)
				next += size
				waitNumbers(t, r, 0, next)
				before := burn(t, writer, 1)
				crash()
				reconnected(t, writer)
				waitRows(t, writer, r)
				reused = burn(t, writer, 1) <= before
			}
		}
		write(t, writer, numbered(5, next, 1)...)
		waitNumbers(t, r, 0, next+1)
	})
}
