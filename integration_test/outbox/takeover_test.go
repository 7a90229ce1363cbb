package outbox_test

import (
	"context"
	"fmt"
	"path/filepath"
	"strconv"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/postroom/postroom"
)

// waitTime bounds what must happen within seconds.
const waitTime = 20 * time.Second

func itoa(n int) string { return strconv.Itoa(n) }

// twoChildren starts a dispatcher, waits until it owns every lane, and starts
// another.
func twoChildren(t *testing.T, db queryer, c childConfig) (first, second *child) {
	t.Helper()
	c.Name = "first"
	first = startChild(t, c)
	waitOwned(t, db)
	c.Name = "second"
	return first, startChild(t, c)
}

func waitOwned(t *testing.T, db queryer) {
	t.Helper()
	eventually(t, waitTime, func() string {
		if scan[int](t, db, `SELECT count(*) FROM "postroom".outbox_lanes WHERE lease < clock_timestamp() OR owner IS NULL`) > 0 {
			return "not every lane has an owner"
		}
		return ""
	})
}

// by returns who stored the lines.
func by(lines []line) map[string]int {
	n := map[string]int{}
	for _, l := range lines {
		n[l.By]++
	}
	return n
}

// TestTakeoverFromKilled: of two dispatchers one publishes; when it is killed the
// other goes on.
func TestTakeoverFromKilled(t *testing.T) {
	each(t, func(t *testing.T, s *server) {
		u := s.database(t)
		pool := connect(t, u)
		j := &journalReader{path: filepath.Join(t.TempDir(), "journal")}
		first, _ := twoChildren(t, pool, childConfig{
			URL: u, Journal: j.path, PageSize: 10, PublishTimeout: 400 * time.Millisecond, Lease: time.Second,
			Delay: 20 * time.Millisecond,
		})
		write(t, pool, numbered(7, 0, 500)...)
		eventually(t, waitTime, func() string {
			if n := len(j.read(t)); n < 50 {
				return itoa(n) + " messages are published"
			}
			return ""
		})
		if n := by(j.read(t)); n["second"] != 0 {
			t.Errorf("both dispatchers publish: %v", n)
		}
		first.kill()
		write(t, pool, numbered(7, 500, 100)...)
		eventually(t, waitTime, func() string { return wantNumbers(j.messages(t), 0, 600) })
		if n := by(j.read(t)); n["second"] == 0 {
			t.Errorf("the second dispatcher published nothing: %v", n)
		}
	})
}

// TestTakeoverFromPaused: a dispatcher stands still for longer than its lease and
// then goes on. It changes no row any more.
func TestTakeoverFromPaused(t *testing.T) {
	each(t, func(t *testing.T, s *server) {
		u := s.database(t)
		pool := connect(t, u)
		j := &journalReader{path: filepath.Join(t.TempDir(), "journal")}
		first, second := twoChildren(t, pool, childConfig{
			URL: u, Journal: j.path, PageSize: 5, PublishTimeout: 400 * time.Millisecond, Lease: time.Second,
			Delay: 20 * time.Millisecond,
		})
		write(t, pool, numbered(7, 0, 300)...)
		eventually(t, waitTime, func() string {
			if n := len(j.read(t)); n < 20 {
				return itoa(n) + " messages are published"
			}
			return ""
		})
		first.signal(syscall.SIGSTOP)
		eventually(t, waitTime, func() string {
			if by(j.read(t))["second"] == 0 {
				return "the second dispatcher has not taken over"
			}
			return ""
		})
		waitOwned(t, pool)
		watchOwner(t, pool, first.cmd.Process.Pid)
		first.signal(syscall.SIGCONT)
		write(t, pool, numbered(7, 300, 300)...)
		eventually(t, waitTime, func() string { return wantNumbers(j.messages(t), 0, 600) })
		waitCursors(t, pool)
		first.stop(t) // it has tried, and found out
		if n := scan[int](t, pool, `SELECT count(*) FROM stale`); n != 0 {
			t.Errorf("the stale owner wrote %d rows", n)
		}
		second.stop(t)
	})
}

// watchOwner has table stale name every row that the dispatcher of a process
// writes from now on.
func watchOwner(t *testing.T, db queryer, pid int) {
	t.Helper()
	exec(t, db, `CREATE TABLE stale (what text)`)
	exec(t, db, `CREATE FUNCTION stale() RETURNS trigger LANGUAGE plpgsql AS $$
		BEGIN
			IF split_part(NEW.owner, '/', 2) = '`+itoa(pid)+`' THEN
				INSERT INTO stale VALUES (TG_TABLE_NAME);
			END IF;
			RETURN NEW;
		END $$`)
	exec(t, db, `CREATE TRIGGER stale BEFORE INSERT ON "postroom".outbox_cursors FOR EACH ROW EXECUTE FUNCTION stale()`)
	exec(t, db, `CREATE TRIGGER stale BEFORE UPDATE ON "postroom".outbox_lanes FOR EACH ROW EXECUTE FUNCTION stale()`)
}

// TestCase_B04_HungPublisherGivesUpTheLane: the first dispatcher's publisher never
// returns. The second goes on, in order, and nobody publishes beside it.
func TestCase_B04_HungPublisherGivesUpTheLane(t *testing.T) {
	each(t, func(t *testing.T, s *server) {
		u := s.database(t)
		pool := connect(t, u)
		release := make(chan struct{})
		var calls atomic.Int64
		hung := &recorder{before: func(context.Context, []postroom.Message) {
			calls.Add(1)
			<-release
		}}
		cfg := quick()
		cfg.PageSize = 5
		start(t, connect(t, u), hung, cfg)
		waitOwned(t, pool)
		r := &recorder{}
		start(t, connect(t, u), r, cfg)
		defer close(release)
		write(t, pool, numbered(3, 0, 100)...)
		waitNumbers(t, r, 0, 100)
		if n := len(hung.messages()); n != 0 {
			t.Errorf("the hung publisher stored %d messages", n)
		}
		if n := calls.Load(); n > 4 {
			t.Errorf("the hung publisher was called %d times for at most 4 lanes", n)
		}
	})
}

// TestCase_B17_SlowPublisherKeepsItsLanes: publishing takes several leases, each
// call less than one. The other dispatcher stays out and nothing is repeated.
func TestCase_B17_SlowPublisherKeepsItsLanes(t *testing.T) {
	each(t, func(t *testing.T, s *server) {
		u := s.database(t)
		pool := connect(t, u)
		slow := &recorder{before: func(ctx context.Context, _ []postroom.Message) { pause(ctx, 150*time.Millisecond) }}
		cfg := quick()
		cfg.PageSize = 5
		start(t, connect(t, u), slow, cfg)
		waitOwned(t, pool)
		other := &recorder{}
		start(t, connect(t, u), other, cfg)
		write(t, pool, numbered(1, 0, 100)...) // 20 calls in turn: 3 s
		waitNumbers(t, slow, 0, 100)
		if n, m := len(slow.messages()), len(other.messages()); n != 100 || m != 0 {
			t.Errorf("the owner published %d times 100 messages, the other dispatcher %d", n, m)
		}
	})
}

// TestCase_B83_ThroughPgBouncer: the whole path through PgBouncer in transaction
// mode with two server connections, in pgx's modes that know no prepared
// statements. Nobody listens, so messages flow by polling (B23).
func TestCase_B83_ThroughPgBouncer(t *testing.T) {
	each(t, func(t *testing.T, s *server) {
		modes := []pgx.QueryExecMode{pgx.QueryExecModeExec, pgx.QueryExecModeSimpleProtocol, pgx.QueryExecModeCacheDescribe}
		for _, mode := range modes {
			t.Run(mode.String(), func(t *testing.T) { throughPgBouncer(t, s, mode) })
		}
	})
}

func throughPgBouncer(t *testing.T, s *server, mode pgx.QueryExecMode) {
	u := s.database(t)
	direct := connect(t, u)
	through := startPgBouncer(t, pgBouncer(u, 2)).URL
	pool := func() *pgxpool.Pool { return connect(t, through, transactional(mode)) }
	r := &recorder{refuse: func(m postroom.Message) bool { return m.Key == "refused" }}
	cfg := quick()
	cfg.PageSize = 20
	stop := start(t, pool(), r, cfg)
	start(t, pool(), r, cfg)
	writer := pool()
	next := 0
	for _, size := range []int{1, 2, 350, 1} { // one INSERT, arrays, COPY
		write(t, writer, numbered(5, next, size)...)
		next += size
		waitNumbers(t, r, 0, next)
	}
	stop()
	want := stressMessage("k", 1, false)
	want.ID, want.DeliverAt = "full", time.Now().Add(time.Second)
	bad := postroom.Message{ID: "bad", Topic: "orders", Key: "refused"}
	behind := postroom.Message{ID: "behind", Topic: "orders", Key: "refused"}
	null := postroom.Message{ID: "null", Topic: "orders"}
	write(t, writer, want, bad, behind, null)
	eventually(t, waitTime, func() string {
		return missing(map[string]bool{"full": true, "null": true}, arrived(r.messages()))
	})
	eventually(t, waitTime, func() string {
		if scan[int](t, direct, `SELECT count(*) FROM "postroom".outbox_parked`) != 2 {
			return "the refused message and its successor are not set aside"
		}
		return ""
	})
	for _, m := range r.messages() {
		if m.ID != "full" {
			continue
		}
		want.DeliverAt, want.Time = time.Time{}, m.Time
		if !same(m, want) {
			t.Errorf("published %#v, want %#v", m, want)
		}
	}
}

func same(a, b postroom.Message) bool { return fmt.Sprintf("%#v", a) == fmt.Sprintf("%#v", b) }
