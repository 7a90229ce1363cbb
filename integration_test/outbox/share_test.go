package outbox_test

import (
	"fmt"
	"net/url"
	"path/filepath"
	"syscall"
	"testing"
	"time"
)

// TestSharedThroughPgBouncer: dispatchers in processes of their own share the
// lanes through PgBouncer in transaction mode. They join, are stopped, killed
// and paused beyond their lease, and the shares follow.
func TestSharedThroughPgBouncer(t *testing.T) {
	each(t, func(t *testing.T, s *server) {
		u := s.database(t)
		through, err := url.Parse(startPgBouncer(t, pgBouncer(u, 3)).URL)
		if err != nil {
			t.Fatal(err)
		}
		q := through.Query()
		q.Set("default_query_exec_mode", "exec")
		through.RawQuery = q.Encode()
		comeAndGo(t, u, through.String())
	})
}

// TestClocksDiffer: the database's clock is an hour ahead of the dispatchers' or
// behind it. Leases rest on one clock each, so nothing changes.
func TestClocksDiffer(t *testing.T) {
	each(t, func(t *testing.T, s *server) {
		for _, by := range []string{"1 hour", "-1 hour"} {
			t.Run(by, func(t *testing.T) {
				u := s.database(t)
				db := connect(t, u)
				exec(t, db, `CREATE SCHEMA shifted`)
				for _, clock := range []string{"clock_timestamp", "now"} {
					exec(t, db, fmt.Sprintf(`CREATE FUNCTION shifted.%s() RETURNS timestamptz LANGUAGE sql VOLATILE
						AS $$ SELECT pg_catalog.%[1]s() + interval '%s' $$`, clock, by))
				}
				name := scan[string](t, db, `SELECT current_database()`)
				exec(t, db, `ALTER DATABASE `+name+` SET search_path = shifted, pg_catalog, public`)
				d := time.Until(scan[time.Time](t, connect(t, u), `SELECT clock_timestamp()`)).Abs()
				if d < 50*time.Minute {
					t.Fatalf("the clocks differ by %v", d)
				}
				comeAndGo(t, u, u)
			})
		}
	})
}

// comeAndGo has dispatchers on the URL through share the database at u.
func comeAndGo(t *testing.T, u, through string) {
	t.Helper()
	pool := connect(t, u)
	j := &journalReader{path: filepath.Join(t.TempDir(), "journal")}
	cfg := childConfig{
		URL: through, Journal: j.path, PageSize: 10, PublishTimeout: 500 * time.Millisecond, Lease: 1500 * time.Millisecond,
	}
	children := map[*child]int{}
	run := func(name string) *child {
		cfg.Name = name
		return startChild(t, cfg)
	}
	next := 0
	publish := func() {
		t.Helper()
		waitShares(t, pool, children)
		write(t, pool, numbered(20, next, 100)...)
		next += 100
		eventually(t, waitTime, func() string { return wantNumbers(j.messages(t), 0, next) })
	}
	a := run("a")
	children[a] = 4
	publish()
	b := run("b")
	children[a], children[b] = 2, 2
	publish()
	c := run("c") // the eldest keeps the larger share
	children[b], children[c] = 1, 1
	publish()
	if n := len(j.read(t)); n != next {
		t.Errorf("%d publishes of %d messages, though nobody has died yet", n, next)
	}
	a.kill()
	delete(children, a)
	children[b], children[c] = 2, 2
	publish()
	b.signal(syscall.SIGSTOP)
	children[b], children[c] = 0, 4
	publish()
	b.signal(syscall.SIGCONT)
	children[b], children[c] = 2, 2
	publish()
	c.stop(t)
	delete(children, c)
	children[b] = 4
	publish()
	b.stop(t)
	if !b.said("lost=2") {
		t.Error("the paused dispatcher has not counted the two lanes that it lost")
	}
	if n := scan[int](t, pool, `SELECT count(*) FROM "postroom".outbox_lanes WHERE owner IS NOT NULL`); n != 0 {
		t.Errorf("%d lanes are still owned", n)
	}
}
