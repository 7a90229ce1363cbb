package outbox_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	osexec "os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"

	"github.com/postroom/postroom"
	"github.com/postroom/postroom/broker"
	"github.com/postroom/postroom/dispatcher"
	"github.com/postroom/postroom/migrations"
	"github.com/postroom/postroom/outbox"
)

// restorer copies a database, as a dump and its restore do.
type restorer func(t *testing.T, from, to string)

// TestCase_B03_Restore: a database is dumped in the middle of a difference, with
// published messages retained, and restored where transaction ids are lower or
// the database has another name. Exactly what was not published is, in order,
// and then what is new.
func TestCase_B03_Restore(t *testing.T) {
	each(t, func(t *testing.T, s *server) {
		other := sharedServer(t, fmt.Sprint(s.Major, " other"))
		for _, c := range []struct {
			name    string
			target  *server
			restore restorer
		}{
			{"other-cluster/without-sequences", other, copyTables},
			{"other-name/without-sequences", s, copyTables},
			{"other-cluster/dump", other, dumpTool(t, s, true)},
			{"other-name/dump", s, dumpTool(t, s, false)},
		} {
			t.Run(c.name, func(t *testing.T) {
				if c.restore == nil {
					t.Skipf("no pg_dump is installed that reads PostgreSQL %d; the tables are copied in the other tests", s.Major)
				}
				testRestore(t, s, c.target, c.restore)
			})
		}
	})
}

func testRestore(t *testing.T, s, to *server, restore restorer) {
	u := s.database(t)
	source := connect(t, u)
	exec(t, source, `CREATE UNLOGGED TABLE junk (n int)`)
	for range 4 {
		burn(t, source, 1500) // ids that the other cluster has not reached
	}
	history := runSource(t, u)
	name := source.Config().ConnConfig.Database
	if to == s {
		name += "_restored"
	}
	target := to.create(t, name)
	restore(t, u, target)
	pool := connect(t, target)
	if a, b := scan[int64](t, source, `SELECT "postroom".origin()`), scan[int64](t, pool, `SELECT "postroom".origin()`); a == b {
		t.Fatal("the restored database has the origin of the former")
	}

	published := arrived(history)
	write(t, pool, numbered(7, 220, 20)...)
	r := &recorder{}
	cfg := quick()
	cfg.PageSize = 10
	stop := start(t, pool, r, cfg)
	eventually(t, waitTime, func() string { return wantNumbers(append(history, r.messages()...), 0, 240) })
	write(t, pool, numbered(7, 240, 10)...)
	eventually(t, waitTime, func() string { return wantNumbers(append(history, r.messages()...), 0, 250) })
	stop()
	for _, m := range r.messages() {
		if published[m.ID] {
			t.Errorf("%s was published before the dump, and again after", m.ID)
		}
		published[m.ID] = true
	}
	if t.Failed() || to == s {
		return
	}

	// The dump of the restored database returns home: the same rows, whose
	// origin a cursor calls closed, and new ones beside them.
	history = append(history, r.messages()...)
	write(t, pool, numbered(7, 250, 5)...)
	copyTables(t, target, u)
	write(t, source, numbered(7, 255, 5)...)
	again := &recorder{}
	stop = start(t, source, again, cfg)
	eventually(t, waitTime, func() string { return wantNumbers(append(history, again.messages()...), 0, 260) })
	write(t, source, numbered(7, 260, 5)...)
	eventually(t, waitTime, func() string { return wantNumbers(append(history, again.messages()...), 0, 265) })
	stop()
}

// TestRestoreWithinALaneChange: the rows of an outbox whose lanes were being changed
// are copied into a fresh schema elsewhere. The dispatcher says what the copy has
// left behind, then publishes both generations in order, and what is new.
func TestRestoreWithinALaneChange(t *testing.T) {
	each(t, func(t *testing.T, s *server) {
		to := sharedServer(t, fmt.Sprint(s.Major, " other"))
		u := s.database(t)
		source := connect(t, u)
		exec(t, source, `CREATE UNLOGGED TABLE junk (n int)`)
		for range 4 {
			burn(t, source, 1500) // ids that the other cluster has not reached
		}
		history := runSource(t, u)
		if err := migrations.SetLanes(t.Context(), source, 7, migrations.Config{}); err != nil {
			t.Fatal(err)
		}
		write(t, source, numbered(7, 220, 20)...)
		target := to.create(t, source.Config().ConnConfig.Database)
		copyTables(t, u, target)
		pool := connect(t, target)
		d, err := dispatcher.New(pool, &recorder{}, quick())
		if err != nil {
			t.Fatal(err)
		}
		short, cancel := context.WithTimeout(t.Context(), waitTime)
		defer cancel()
		setup, ok := errors.AsType[*dispatcher.SetupError](d.Run(short))
		if !ok {
			t.Fatal("Run does not see that messages are written to the lanes of the fresh schema")
		}
		_, mend, _ := strings.Cut(setup.Problem, ": ")
		exec(t, pool, mend)
		write(t, pool, numbered(7, 240, 20)...)
		r := &recorder{}
		start(t, pool, r, quick())
		eventually(t, waitTime, func() string { return wantNumbers(append(history, r.messages()...), 0, 260) })
		if n := len(history) + len(r.messages()); n != 260 {
			t.Errorf("260 messages were published %d times", n)
		}
	})
}

// runSource publishes 0 to 99 and a part of 100 to 199, a difference that is
// left open. The rest up to 219 is committed; some of it by a transaction that
// ran when the difference was opened.
func runSource(t *testing.T, u string) []postroom.Message {
	t.Helper()
	pool := connect(t, u)
	cfg := quick()
	cfg.PageSize = 10
	r := &recorder{}
	stop := start(t, pool, r, cfg)
	for n := 0; n < 100; n += 10 {
		write(t, pool, numbered(7, n, 10)...)
	}
	waitNumbers(t, r, 0, 100)
	stop()

	tx, err := pool.Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer tx.Rollback(context.Background())
	late := numbered(1, 215, 5)
	for i := range late {
		late[i].Key = "late"
	}
	if err := new(outbox.Outbox).Write(t.Context(), tx, late...); err != nil {
		t.Fatal(err)
	}
	write(t, pool, numbered(7, 100, 100)...)
	part := &limited{limit: 45}
	stop = start(t, pool, part, cfg)
	eventually(t, waitTime, func() string {
		if n := len(part.messages()); n < 45 {
			return fmt.Sprint(n, " messages are published")
		}
		return ""
	})
	stop()
	open := scan[int](t, pool, `SELECT count(*) FROM (SELECT DISTINCT ON (lane) last_id FROM "postroom".outbox_cursors
		ORDER BY lane, number DESC) c WHERE last_id < 9223372036854775807 AND last_id > 0`)
	if open == 0 {
		t.Error("no lane is in the middle of a difference")
	}
	commit(t, tx)
	write(t, pool, numbered(7, 200, 15)...)
	return append(r.messages(), part.messages()...)
}

// limited stores the first messages and is then away.
type limited struct {
	recorder
	limit int
}

func (l *limited) Publish(ctx context.Context, msgs []postroom.Message) []broker.Result {
	l.mu.Lock()
	defer l.mu.Unlock()
	results := make([]broker.Result, len(msgs))
	for i, m := range msgs {
		if len(l.stored) == l.limit {
			results[i] = broker.Result{Outcome: broker.Unreachable, Err: errAway}
			break // the others were not tried
		}
		l.stored = append(l.stored, m)
		results[i].Outcome = broker.Stored
	}
	return results
}

// create makes an empty database of that name.
func (s *server) create(t *testing.T, name string) string {
	t.Helper()
	u, err := s.CreateDatabase(t.Context(), name)
	if err != nil {
		t.Fatal(err)
	}
	s.dropLater(t, name)
	return u
}

// copyTables copies the rows of Postroom's tables, and nothing else, into a
// database where its tables exist or are made.
func copyTables(t *testing.T, from, to string) {
	t.Helper()
	target := connect(t, to)
	if _, err := migrations.Up(t.Context(), target, migrations.Config{}); err != nil {
		t.Fatal(err)
	}
	source := connect(t, from)
	snapshot, err := source.BeginTx(t.Context(), pgx.TxOptions{IsoLevel: pgx.RepeatableRead})
	if err != nil {
		t.Fatal(err)
	}
	defer snapshot.Rollback(context.Background())
	list, err := snapshot.Query(t.Context(), `SELECT format('%I.%I', table_schema, table_name),
		string_agg(quote_ident(column_name), ', ' ORDER BY ordinal_position) FROM information_schema.columns
		WHERE table_schema = 'postroom' AND table_name LIKE 'outbox%' AND is_generated = 'NEVER' GROUP BY 1`)
	if err != nil {
		t.Fatal(err)
	}
	tables := map[string]string{}
	var name, columns string
	if _, err := pgx.ForEachRow(list, []any{&name, &columns}, func() error { tables[name] = columns; return nil }); err != nil {
		t.Fatal(err)
	}
	for name, columns := range tables {
		var rows bytes.Buffer
		if _, err := snapshot.Conn().PgConn().CopyTo(t.Context(), &rows, "COPY "+name+" ("+columns+") TO STDOUT"); err != nil {
			t.Fatal(err)
		}
		exec(t, target, "TRUNCATE "+name)
		conn, err := target.Acquire(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		_, err = conn.Conn().PgConn().CopyFrom(t.Context(), &rows, "COPY "+name+" ("+columns+") FROM STDIN")
		conn.Release()
		if err != nil {
			t.Fatal(err)
		}
	}
}

// dumpTool returns pg_dump and pg_restore, or nil where none is installed that
// reads the server. The sequences are set back where reset is true.
func dumpTool(t *testing.T, s *server, reset bool) restorer {
	t.Helper()
	var bin string
	dirs, err := filepath.Glob("/usr/lib/postgresql/*/bin")
	if err != nil {
		t.Fatal(err)
	}
	if path, err := osexec.LookPath("pg_dump"); err == nil {
		dirs = append(dirs, filepath.Dir(path))
	}
	for _, dir := range append(dirs, s.BinDir) {
		out, err := osexec.Command(filepath.Join(dir, "pg_dump"), "--version").Output()
		var major int
		if err == nil {
			fields := strings.Fields(string(out))
			for _, f := range fields {
				if n, _ := fmt.Sscanf(f, "%d.", &major); n == 1 {
					break
				}
			}
		}
		if major >= s.Major {
			bin = dir
		}
	}
	if bin == "" {
		return nil
	}
	return func(t *testing.T, from, to string) {
		t.Helper()
		file := filepath.Join(t.TempDir(), "dump")
		run(t, filepath.Join(bin, "pg_dump"), "--format=custom", "--file="+file, "--dbname="+from)
		run(t, filepath.Join(bin, "pg_restore"), "--exit-on-error", "--no-owner", "--dbname="+to, file)
		if reset {
			exec(t, connect(t, to), `ALTER SEQUENCE "postroom".outbox_messages_id_seq RESTART`)
		}
	}
}

func run(t *testing.T, program string, args ...string) {
	t.Helper()
	if out, err := osexec.CommandContext(t.Context(), program, args...).CombinedOutput(); err != nil {
		t.Fatalf("%s: %v: %s", filepath.Base(program), err, out)
	}
}
