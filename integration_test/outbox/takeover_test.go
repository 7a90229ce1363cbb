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
const waitTime = time.Minute

func itoa(n int) string { return strconv.Itoa(n) }

// twoChildren starts two dispatchers and waits until each has half of the lanes.
func twoChildren(t *testing.T, db queryer, c childConfig) (first, second *child) {
	t.Helper()
	c.Name = "first"
	first = startChild(t, c)
	waitOwned(t, db)
	c.Name = "second"
	second = startChild(t, c)
	waitShares(t, db, map[*child]int{first: 2, second: 2})
	return first, second
}

// waitShares waits until each child owns as many lanes.
func waitShares(t *testing.T, db queryer, want map[*child]int) {
	t.Helper()
	eventually(t, waitTime, func() string {
		for c, n := range want {
			if got := c.owns(t, db); got != n {
				return fmt.Sprintf("%s owns %d lanes, want %d", c.name, got, n)
			}
		}
		return ""
	})
}

// owns returns the number of lanes whose leases the child holds.
func (p *child) owns(t *testing.T, db queryer) int {
	t.Helper()
	return scan[int](t, db, `SELECT count(*) FROM "postroom".outbox_lanes
		WHERE split_part(owner, '/', 2) = $1 AND lease > clock_timestamp()`, itoa(p.cmd.Process.Pid))
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

// TestTakeoverFromKilled: two dispatchers publish; when one is killed the other
// goes on with its lanes.
func TestTakeoverFromKilled(t *testing.T) {
	each(t, func(t *testing.T, s *server) {
		u := s.database(t)
		pool := connect(t, u)
		j := &journalReader{path: filepath.Join(t.TempDir(), "journal")}
		first, second := twoChildren(t, pool, childConfig{
			URL: u, Journal: j.path, PageSize: 10, PublishTimeout: 400 * time.Millisecond, Lease: time.Second,
			Delay: 20 * time.Millisecond,
		})
		write(t, pool, numbered(20, 0, 500)...)
		eventually(t, waitTime, func() string {
			if n := by(j.read(t)); n["first"] < 50 || n["second"] < 50 {
				return fmt.Sprint("published: ", n)
			}
			return ""
		})
		first.kill()
		write(t, pool, numbered(20, 500, 100)...)
		eventually(t, waitTime, func() string { return wantNumbers(j.messages(t), 0, 600) })
		waitShares(t, pool, map[*child]int{second: 4})
	})
}

// TestTakeoverFromPaused: a dispatcher stands still for longer than its lease and
// then goes on. It changes no row any more, repeats at most what it had in
// flight, and says so.
func TestTakeoverFromPaused(t *testing.T) {
	each(t, func(t *testing.T, s *server) {
		u := s.database(t)
		pool := connect(t, u)
		j := &journalReader{path: filepath.Join(t.TempDir(), "journal")}
		const page = 5
		first, second := twoChildren(t, pool, childConfig{
			URL: u, Journal: j.path, PageSize: page, PublishTimeout: 400 * time.Millisecond, Lease: time.Second,
			Delay: 20 * time.Millisecond,
		})
		write(t, pool, numbered(20, 0, 300)...)
		eventually(t, waitTime, func() string {
			if n := by(j.read(t)); n["first"] < 20 || n["second"] < 20 {
				return fmt.Sprint("published: ", n)
			}
			return ""
		})
		first.signal(syscall.SIGSTOP)
		waitShares(t, pool, map[*child]int{first: 0, second: 4})
		before := len(j.read(t))
		watchOwner(t, pool, first.cmd.Process.Pid)
		first.signal(syscall.SIGCONT)
		write(t, pool, numbered(20, 300, 300)...)
		eventually(t, waitTime, func() string { return wantNumbers(j.messages(t), 0, 600) })
		waitCursors(t, pool)
		// It has tried, found out, and joined again.
		waitShares(t, pool, map[*child]int{first: 2, second: 2})
		if n := scan[int](t, pool, `SELECT count(*) FROM stale`); n != 0 {
			t.Errorf("the stale owner wrote %d rows", n)
		}
		if n := repeatedBy("first", j.read(t), before); n > 2*page {
			t.Errorf("the stale owner repeated %d messages, it had 2 pages of %d in flight", n, page)
		}
		first.stop(t)
		if !first.said("lost=2") {
			t.Error("the stale owner has not counted the two lanes that it lost")
		}
		second.stop(t)
	})
}

// repeatedBy counts what a publisher stored from a line on and another stored too.
func repeatedBy(name string, lines []line, from int) (n int) {
	others := map[string]bool{}
	for _, l := range lines {
		if l.By != name {
			others[l.Message.ID] = true
		}
	}
	for _, l := range lines[from:] {
		if l.By == name && others[l.Message.ID] {
			n++
		}
	}
	return n
}

// watchOwner has table stale name every row that the dispatcher of a process
// writes from now on under a fence that has passed.
func watchOwner(t *testing.T, db queryer, pid int) {
	t.Helper()
	exec(t, db, `CREATE TABLE stale (what text)`)
	exec(t, db, `CREATE TABLE fences AS SELECT lane, fence FROM "postroom".outbox_lanes`)
	exec(t, db, `CREATE FUNCTION stale() RETURNS trigger LANGUAGE plpgsql AS $$
		BEGIN
			IF split_part(NEW.owner, '/', 2) = '`+itoa(pid)+`'
			   AND NEW.fence <= (SELECT f.fence FROM fences f WHERE f.lane = NEW.lane) THEN
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
		// It keeps away, lest lanes be left to it.
		eventually(t, waitTime, func() string {
			if n := scan[int](t, pool, `SELECT count(*) FROM "postroom".outbox_dispatchers`); n != 1 {
				return fmt.Sprintf("%d dispatchers are there, want one", n)
			}
			return ""
		})
		if n := len(hung.messages()); n != 0 {
			t.Errorf("the hung publisher stored %d messages", n)
		}
		if n := calls.Load(); n > 4 {
			t.Errorf("the hung publisher was called %d times for at most 4 lanes", n)
		}
	})
}

// TestCase_B17_SlowPublisherKeepsItsLanes: publishing takes several leases, each
// call less than one. Another dispatcher takes its share, and nothing is repeated.
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
		both := func() []postroom.Message { return append(slow.messages(), other.messages()...) }
		eventually(t, waitTime, func() string { return wantNumbers(both(), 0, 100) })
		if n := len(both()); n != 100 {
			t.Errorf("100 messages were published %d times", n)
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
