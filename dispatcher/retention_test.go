package dispatcher_test

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/postroom/postroom"
	"github.com/postroom/postroom/broker"
	"github.com/postroom/postroom/dispatcher"
	"github.com/postroom/postroom/internal/pgtest"
)

func count(t testing.TB, pool *pgxpool.Pool, sql string, args ...any) (n int) {
	t.Helper()
	if err := pool.QueryRow(t.Context(), sql, args...).Scan(&n); err != nil {
		t.Fatalf("%s: %v", sql, err)
	}
	return n
}

func retained(t testing.TB, pool *pgxpool.Pool) int {
	t.Helper()
	return count(t, pool, `SELECT count(*) FROM postroom.outbox_messages`)
}

func exec(t testing.TB, pool *pgxpool.Pool, sql string, args ...any) {
	t.Helper()
	if _, err := pool.Exec(t.Context(), sql, args...); err != nil {
		t.Fatalf("%s: %v", sql, err)
	}
}

// age makes all that has been published look published so long ago.
func age(t testing.TB, pool *pgxpool.Pool, by time.Duration) {
	t.Helper()
	exec(t, pool, `UPDATE postroom.outbox_cursors SET created_at = created_at - $1::interval`, by)
}

func waitRetained(t testing.TB, pool *pgxpool.Pool, want int) {
	t.Helper()
	eventually(t, time.Minute, func() string {
		if n := retained(t, pool); n != want {
			return fmt.Sprintf("%d messages are retained, want %d", n, want)
		}
		return ""
	})
}

// waitSettled waits until the newest cursors say that all is published.
func waitSettled(t testing.TB, pool *pgxpool.Pool) {
	t.Helper()
	eventually(t, time.Minute, func() string {
		if n := count(t, pool, `
			SELECT count(*) FROM (SELECT DISTINCT ON (lane, origin) last_id FROM postroom.outbox_cursors
			                       ORDER BY lane, origin, number DESC) c
			 WHERE last_id < 9223372036854775807`); n > 0 {
			return fmt.Sprintf("%d lanes have not recorded that they are settled", n)
		}
		return ""
	})
}

// B18: retention counts from publishing. What was written long before it was
// published stays; what was published long ago goes; a transaction that ended
// late is cleaned although its ids are lower than those already gone.
func TestCase_B18_RetentionCountsFromPublishing(t *testing.T) {
	pgtest.Each(t, func(t *testing.T, s *pgtest.Server) {
		pool := s.New(t)
		late, err := pool.Begin(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		defer late.Rollback(context.Background())
		if _, err := late.Exec(t.Context(), `INSERT INTO postroom.outbox_messages (hash, message_id, topic) VALUES (0, 'late', 'orders')`); err != nil {
			t.Fatal(err)
		}
		write(t, pool, numbered("orders", 9, 0, 100)...)
		exec(t, pool, `UPDATE postroom.outbox_messages SET created_at = created_at - interval '3 days'`)
		r := &recorder{}
		start(t, pool, r, dispatcher.Config{Retention: time.Hour})
		waitStored(t, r, 100)
		waitSettled(t, pool)
		if n := retained(t, pool); n != 100 {
			t.Errorf("%d messages are left right after they were published", n)
		}
		age(t, pool, 2*time.Hour)
		waitRetained(t, pool, 0)
		if err := late.Commit(t.Context()); err != nil {
			t.Fatal(err)
		}
		waitStored(t, r, 101)
		waitSettled(t, pool)
		if n := retained(t, pool); n != 1 {
			t.Errorf("%d messages are left, want the one that came late", n)
		}
		age(t, pool, 2*time.Hour)
		waitRetained(t, pool, 0)
	})
}

// published lets n messages of w transactions look published long ago.
func published(t testing.TB, pool *pgxpool.Pool, w, n int) {
	t.Helper()
	for i := range w {
		exec(t, pool, `INSERT INTO postroom.outbox_messages (hash, message_id, topic, key, payload)
			SELECT g, 'old' || $1::int4 || '-' || g, 'orders', 'k' || g % 100, '\x00' FROM generate_series(1, $2::int4) g`, i, n/w)
	}
	exec(t, pool, `INSERT INTO postroom.outbox_cursors (lane, origin, number, fence, owner, prev, until, last_id, created_at)
		SELECT lane, postroom.origin(), 1, 0, 'test', '1:1:', pg_current_snapshot(), 9223372036854775807, now() - interval '2 days'
		  FROM postroom.outbox_lanes`)
}

// B11: a cleaner that is stopped in the middle of a backlog keeps what it has
// done, two do not disturb one another, and messages go out meanwhile.
func TestCase_B11_CleanerFinishesABacklog(t *testing.T) {
	pgtest.Each(t, func(t *testing.T, s *pgtest.Server) {
		pool := s.New(t)
		const n = 200_000
		published(t, pool, 20, n)
		r := &recorder{}
		stop := start(t, pool, r, dispatcher.Config{})
		eventually(t, time.Minute, func() string {
			if retained(t, pool) > n*9/10 {
				return "the cleaner has not come far"
			}
			return ""
		})
		stop()
		left := retained(t, pool)
		if left == 0 || left > n*9/10 {
			t.Fatalf("%d messages are left when the cleaner is stopped", left)
		}
		began := time.Now()
		start(t, pool, r, dispatcher.Config{})
		start(t, pool, r, dispatcher.Config{})
		write(t, pool, numbered("orders", 3, 0, 30)...)
		waitStored(t, r, 30)
		if left := retained(t, pool); left < 31 {
			t.Logf("the backlog was gone before the messages were published")
		}
		waitRetained(t, pool, 30)
		t.Logf("%d messages deleted in %v", left, time.Since(began).Round(time.Millisecond))
	})
}

// B12: however short the retention, nothing goes that is not published: not
// what is set aside, and not what the broker cannot be reached for.
func TestCase_B12_OnlyPublishedIsDeleted(t *testing.T) {
	pool := pgtest.New(t)
	refused := refuse("m3")
	r := &recorder{answer: func(m postroom.Message) broker.Result {
		if m.ID == "m20" {
			return broker.Result{Outcome: broker.Unreachable, Err: errors.New("no leader")}
		}
		return refused(m)
	}}
	start(t, pool, r, dispatcher.Config{Retention: time.Nanosecond, PageSize: 5})
	write(t, pool, numbered("orders", 1, 0, 1)...) // gone at once
	waitStored(t, r, 1)
	waitRetained(t, pool, 0)
	var one []postroom.Message // in one lane: refused, waiting behind it, published, unreachable, behind that
	for i, m := range numbered("orders", 1, 1, 29) {
		if i%2 == 1 {
			m.Key = ""
		}
		one = append(one, m)
	}
	write(t, pool, one...)
	eventually(t, time.Minute, func() string {
		if parked(t, pool) == nil {
			return "nothing is parked"
		}
		if n := len(r.firsts()); n < 10 {
			return fmt.Sprintf("%d messages are published", n)
		}
		return ""
	})
	for round := range 3 { // of the cleaner, seen by what it deletes in other lanes
		write(t, pool, numbered("others", 20, 100*(round+1), 20)...)
		eventually(t, time.Minute, func() string {
			if n := count(t, pool, `SELECT count(*) FROM postroom.outbox_messages
				WHERE lane <> (SELECT lane FROM postroom.outbox_messages WHERE message_id = 'm20')`); n > 0 {
				return fmt.Sprintf("%d messages are left in lanes where all are published", n)
			}
			if count(t, pool, `SELECT count(*) FROM postroom.outbox_messages WHERE message_id = 'm20'`) == 0 {
				return "m20 was deleted and is not published"
			}
			return ""
		})
	}
	seen := map[string]bool{}
	for _, id := range r.firsts() {
		seen[id] = true
	}
	for i := 1; i < 30; i++ {
		id := fmt.Sprint("m", i)
		if seen[id] {
			continue
		}
		if n := count(t, pool, `SELECT (SELECT count(*) FROM postroom.outbox_messages WHERE message_id = $1)
			+ (SELECT count(*) FROM postroom.outbox_parked WHERE message_id = $1)`, id); n != 1 {
			t.Errorf("%s is not published, and %d rows hold it", id, n)
		}
	}
}

// Negative keeps for ever.
func TestRetentionForEver(t *testing.T) {
	pool := pgtest.New(t)
	published(t, pool, 1, 100)
	r := &recorder{}
	start(t, pool, r, dispatcher.Config{Retention: -1})
	write(t, pool, numbered("orders", 3, 0, 3)...)
	waitStored(t, r, 3)
	waitSettled(t, pool)
	if n := retained(t, pool); n != 103 {
		t.Errorf("%d messages are left of 103", n)
	}
}

// What another database published before its dump goes when its time has come;
// what it had not published is published here first, and stays its time.
func TestRetentionAfterARestore(t *testing.T) {
	pool := pgtest.New(t)
	exec(t, pool, `INSERT INTO postroom.outbox_messages (origin, hash, xid, message_id, topic)
		SELECT 42, 4 * g, (100 + g)::text::xid8, 'm' || g, 'orders' FROM generate_series(1, 10) g`)
	exec(t, pool, `INSERT INTO postroom.outbox_cursors (lane, origin, number, fence, owner, prev, until, last_id, created_at)
		VALUES (1000, 42, 1, 0, 'there', '1:1:', '106:106:', 9223372036854775807, now() - interval '2 days')`)
	r := &recorder{}
	start(t, pool, r, dispatcher.Config{})
	waitStored(t, r, 5) // 106 to 110
	waitSettled(t, pool)
	waitRetained(t, pool, 5)
	age(t, pool, 48*time.Hour)
	waitRetained(t, pool, 0)
}

// A dump that returns to its database is published again, and its history of
// before does not shorten the time that it stays.
func TestRetentionAfterAReturn(t *testing.T) {
	pool := pgtest.New(t)
	published(t, pool, 1, 100)
	exec(t, pool, `UPDATE postroom.outbox_cursors SET until = '9223372036854775807:9223372036854775807:'`)
	r := &recorder{}
	start(t, pool, r, dispatcher.Config{Retention: 2 * time.Hour})
	waitStored(t, r, 100)
	waitSettled(t, pool)
	if n := count(t, pool, `SELECT count(*) FROM postroom.outbox_cursors WHERE until::text LIKE '9223372036854775807:%'`); n > 0 {
		t.Errorf("%d cursors of before the return are left", n)
	}
	if n := retained(t, pool); n != 100 {
		t.Errorf("%d messages are left of 100", n)
	}
}
