package outbox_test

import (
	"fmt"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"github.com/postroom/postroom"
)

// TestCrashPoison: one message ends whatever process publishes it. After a few
// starts it is set aside with the reason, what follows it in its key waits behind
// it, and everything else is published in order. The lanes beside it, busy at
// every death, lose nothing.
func TestCrashPoison(t *testing.T) {
	each(t, func(t *testing.T, s *server) {
		for _, processes := range []int{1, 2} {
			t.Run(fmt.Sprint(processes, " processes"), func(t *testing.T) { crashPoison(t, s, processes) })
		}
	})
}

func crashPoison(t *testing.T, s *server, processes int) {
	u := s.database(t)
	pool := connect(t, u)
	j := &journalReader{path: filepath.Join(t.TempDir(), "journal")}
	const keys, total, poison = 20, 2000, 907
	write(t, pool, numbered(keys, 0, total)...)
	cfg := childConfig{
		URL: u, Journal: j.path, PageSize: 25, PublishTimeout: 250 * time.Millisecond, Lease: 800 * time.Millisecond,
		Exit: "m" + itoa(poison), Delay: 2 * time.Millisecond,
	}
	starts := 0
	run := func() *child {
		starts++
		cfg.Name = "d" + itoa(starts)
		return startChild(t, cfg)
	}
	children := make([]*child, processes)
	for i := range children {
		children[i] = run()
	}
	var behind int
	for n := poison; n < total; n += keys {
		behind++
	}
	eventually(t, time.Minute, func() string {
		for i, c := range children { // as a supervisor does
			if c.ended() {
				children[i] = run()
			}
		}
		if n := scan[int](t, pool, `SELECT count(*) FROM "postroom".outbox_parked`); n != behind {
			return fmt.Sprintf("%d messages are set aside after %d starts, want %d", n, starts, behind)
		}
		return ""
	})
	if deaths := starts - processes; deaths > 6 {
		t.Errorf("%d processes died", deaths)
	}
	refused := scan[string](t, pool, `SELECT string_agg(message_id || ': ' || error, ', ') FROM "postroom".outbox_parked WHERE state = 'refused'`)
	if want := "m907: 4 processes in a row have died while this message was being published"; refused != want {
		t.Errorf("refused: %s\nwant: %s", refused, want)
	}
	// All others are published, and the process lives.
	eventually(t, waitTime, func() string {
		msgs := slices.DeleteFunc(j.messages(t), func(m postroom.Message) bool { return m.Key == "k"+itoa(poison%keys) })
		first, problem := firsts(msgs)
		if problem != "" || len(first) != total-total/keys {
			return fmt.Sprint(len(first), " of the other keys' messages are published ", problem)
		}
		return ""
	})
	checkKeyOrder(t, j.messages(t))
	if n := scan[int](t, pool, `SELECT count(*) FROM "postroom".outbox_messages WHERE key = $1`, "k"+itoa(poison%keys)); n != poison/keys {
		t.Errorf("%d messages of the key are published, want %d", n, poison/keys)
	}
	write(t, pool, numbered(keys, total, keys)...)
	eventually(t, waitTime, func() string {
		if n := scan[int](t, pool, `SELECT count(*) FROM "postroom".outbox_parked WHERE state = 'waiting'`); n != behind {
			return fmt.Sprintf("%d messages wait, want %d", n, behind)
		}
		return ""
	})
	for _, c := range children {
		if c.ended() {
			t.Error("a process has died after the message was set aside")
		}
		c.stop(t)
	}
	if scan[bool](t, pool, `SELECT bool_or(starts > 0) FROM "postroom".outbox_lanes`) {
		t.Error("deaths are still counted")
	}
}

// TestDeathsAreCounted: a claim counts the former owner where it did not release
// the lane, and from the second on only where it published a suspect.
func TestDeathsAreCounted(t *testing.T) {
	each(t, func(t *testing.T, s *server) {
		pool := connect(t, s.database(t))
		const dead = `owner = 'other', lease = clock_timestamp() - interval '1 hour'`
		for _, c := range []struct {
			former string
			want   int
		}{
			{dead + `, starts = 0`, 1},
			{dead + `, starts = 1`, 2},
			{dead + `, starts = 2`, 2},
			{dead + `, starts = 2, suspect = true`, 3},
			{dead + `, starts = 3`, 3},
			{dead + `, starts = 3, suspect = true`, 4},
			{dead + `, starts = 100, suspect = true`, 100},
			{`owner = NULL, lease = NULL, starts = 1`, 1},
			{`owner = 'test', lease = clock_timestamp() + interval '1 hour', starts = 0, suspect = true`, 0},
		} {
			exec(t, pool, `UPDATE "postroom".outbox_lanes SET starts = 0, suspect = false, owner = NULL, lease = NULL`)
			exec(t, pool, `UPDATE "postroom".outbox_lanes SET `+c.former+` WHERE lane = 1000`)
			var lane, starts int
			var fence int64
			err := pool.QueryRow(t.Context(), statement(t, "claimLanes"), "test", time.Minute, []int32{1001, 1002, 1003}, 10).Scan(&lane, &fence, &starts)
			if err != nil {
				t.Fatal(err)
			}
			if starts != c.want {
				t.Errorf("after %s: %d deaths, want %d", c.former, starts, c.want)
			}
			if scan[bool](t, pool, `SELECT suspect FROM "postroom".outbox_lanes WHERE lane = 1000`) {
				t.Errorf("after %s: the lane is still under suspicion", c.former)
			}
		}
	})
}

// checkKeyOrder reports a key whose numbers did not arrive in order at first.
func checkKeyOrder(t *testing.T, msgs []postroom.Message) {
	t.Helper()
	first, _ := firsts(msgs)
	last := map[string]int{}
	for _, m := range first {
		var n int
		if _, err := fmt.Sscan(string(m.Payload), &n); err != nil {
			t.Fatal(err)
		}
		if prev, ok := last[m.Key]; ok && n < prev {
			t.Errorf("key %s: %d came after %d", m.Key, n, prev)
		}
		last[m.Key] = n
	}
}

// TestKilledInAnOutage: while the broker is away, dispatchers are killed again and
// again. No message is blamed for it.
func TestKilledInAnOutage(t *testing.T) {
	each(t, func(t *testing.T, s *server) {
		u := s.database(t)
		pool := connect(t, u)
		j := &journalReader{path: filepath.Join(t.TempDir(), "journal")}
		write(t, pool, numbered(20, 0, 200)...)
		cfg := childConfig{
			URL: u, Journal: j.path, PageSize: 25, PublishTimeout: 250 * time.Millisecond, Lease: 800 * time.Millisecond,
			Away: true,
		}
		for i := range 7 {
			cfg.Name = "d" + itoa(i)
			c := startChild(t, cfg)
			waitShares(t, pool, map[*child]int{c: 4})
			// The first calls have returned; those that follow are killed.
			eventually(t, waitTime, func() string {
				if n := c.count("away"); n < 20 {
					return fmt.Sprint(n, " calls have returned")
				}
				return ""
			})
			c.kill()
		}
		cfg.Away, cfg.Name = false, "last"
		last := startChild(t, cfg)
		eventually(t, waitTime, func() string { return wantNumbers(j.messages(t), 0, 200) })
		if n := scan[int](t, pool, `SELECT count(*) FROM "postroom".outbox_parked`); n > 0 {
			t.Errorf("%d messages are set aside", n)
		}
		last.stop(t)
	})
}
