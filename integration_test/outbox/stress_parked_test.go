package outbox_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"hash/crc32"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/postroom/postroom"
	"github.com/postroom/postroom/broker"
	"github.com/postroom/postroom/dispatcher"
)

// faults is what a journal refuses and what is away, for publishers in other
// processes: the contents of a file.
type faults struct {
	Refuse int    // one in so many messages; 0: none
	Away   string // a scope: a topic, or "topic/0" for every second key of one
	Broker bool   // all is away
}

func (f faults) write(t testing.TB, name string) {
	t.Helper()
	text, err := json.Marshal(f)
	if err == nil {
		err = os.WriteFile(name+".new", text, 0o600)
	}
	if err == nil {
		err = os.Rename(name+".new", name)
	}
	if err != nil {
		t.Fatal(err)
	}
}

func readFaults(name string) (f faults) {
	text, err := os.ReadFile(name)
	if err != nil {
		return f
	}
	if err := json.Unmarshal(text, &f); err != nil {
		panic(err)
	}
	return f
}

const refusedText = "refused on purpose"

// result is the outcome of a message that fails.
func (f faults) result(m postroom.Message) (r broker.Result, ok bool) {
	topic, part, parted := strings.Cut(f.Away, "/")
	switch {
	case f.Broker:
		return broker.Result{Outcome: broker.Unreachable, Err: errAway}, true
	case m.Topic == topic && (!parted || part == itoa(int(crc32.ChecksumIEEE([]byte(m.Key))%2))):
		return broker.Result{Outcome: broker.Unreachable, Scope: f.Away, Err: errAway}, true
	case f.Refuse > 0 && crc32.ChecksumIEEE([]byte(m.ID))%uint32(f.Refuse) == 0:
		return broker.Result{Outcome: broker.Refused, Err: errors.New(refusedText)}, true
	}
	return r, false
}

// TestStressParked: writers as in TestStress, while messages are refused, topics,
// parts of topics and the broker come and go, an operator requeues and discards,
// and dispatchers are killed, paused and stopped.
func TestStressParked(t *testing.T) {
	each(t, func(t *testing.T, s *server) {
		st := newStress(t, s)
		u := s.database(t)
		st.pool = connect(t, u)
		st.counters(t)
		dir := t.TempDir()
		journal := &journalReader{path: filepath.Join(dir, "journal")}
		name := filepath.Join(dir, "faults")
		faults{}.write(t, name)
		chaos := newChaos(t, st.seed, childConfig{
			URL: u, Journal: journal.path, PageSize: stressPage,
			PublishTimeout: stressLease / 3, Lease: stressLease, Fail: 101, Faults: name, MaxAttempts: 2,
		})
		writing, cancel := context.WithTimeout(t.Context(), 2**stressFlag)
		defer cancel()
		var wg sync.WaitGroup
		for w := range stressWriters / 2 {
			wg.Go(func() { st.writer(t, writing, w) })
		}
		o := &operator{st: st, name: name, rng: rand.New(rand.NewPCG(st.seed, 4000)), done: map[string]int64{}}
		wg.Go(func() { o.faults(t, writing) })
		wg.Go(func() { o.act(t, writing) })
		chaos.run(t, writing)
		wg.Wait()
		faults{}.write(t, name)
		eventually(t, 40*time.Second, func() string {
			o.do(t, "requeue", dispatcher.Filter{All: true})
			return scan[string](t, st.pool, `SELECT coalesce(string_agg(line, E'\n'), '') FROM (
				SELECT format('%s parked in lane %s: %s %s due %s', count(*), lane, state, away, min(due_at)) AS line
				  FROM "postroom".outbox_parked GROUP BY lane, state, away) p`)
		})
		discarded := o.discarded(t)
		eventually(t, 40*time.Second, func() string { return o.missing(t, journal, discarded) })
		chaos.stop(t)
		o.check(t, journal, discarded)
	})
}

// operator breaks and mends the broker, and acts on what is parked.
type operator struct {
	st   *stress
	name string // of the file of faults

	mu   sync.Mutex // of rng and done
	rng  *rand.Rand
	done map[string]int64
}

func (o *operator) draw(n int) int {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.rng.IntN(n)
}

// faults changes what is wrong every second or two.
func (o *operator) faults(t *testing.T, ctx context.Context) {
	for n := 0; ctx.Err() == nil; n++ {
		f := faults{Refuse: 150}
		switch (n + o.draw(2)) % 6 {
		case 0:
			f.Away = "topic2"
		case 1:
			f.Away = "topic3"
		case 2:
			f.Away = "topic3/" + itoa(o.draw(2))
		case 3:
			f.Broker = true
		case 4:
			f.Refuse = 20
		}
		f.write(t, o.name)
		pause(ctx, time.Duration(500+o.draw(2000))*time.Millisecond)
	}
}

func (o *operator) act(t *testing.T, ctx context.Context) {
	for ctx.Err() == nil {
		pause(ctx, time.Duration(50+o.draw(300))*time.Millisecond)
		key := "k" + itoa(o.draw(stressKeys))
		switch o.draw(6) {
		case 0:
			o.do(t, "requeue", dispatcher.Filter{All: true})
		case 1:
			o.do(t, "requeue", dispatcher.Filter{Key: key})
		case 2:
			o.do(t, "requeue", dispatcher.Filter{Topic: "topic2", Error: "purpose"})
		case 3:
			o.do(t, "discard", dispatcher.Filter{Key: key})
		case 4:
			o.do(t, "discard", dispatcher.Filter{Error: refusedText, Age: 2 * time.Second})
		case 5: // retries come sooner
			exec(t, o.st.pool, `UPDATE "postroom".outbox_parked SET due_at = now() WHERE due_at > now()`)
		}
		if n := scan[int](t, o.st.pool, `SELECT count(*) FROM "postroom".outbox_parked WHERE state = 'refused' AND error <> $1`, refusedText); n > 0 {
			t.Errorf("%d messages are parked as refused by an outage", n)
		}
	}
}

func (o *operator) do(t *testing.T, action string, f dispatcher.Filter) {
	p := dispatcher.Parked{Pool: o.st.pool, By: "operator"}
	call := p.Requeue
	if action == "discard" {
		call = p.Discard
	}
	n, err := call(t.Context(), f, "stress")
	if err != nil {
		t.Errorf("%s %+v: %v", action, f, err)
	}
	o.mu.Lock()
	defer o.mu.Unlock()
	o.done[action] += n
}

// discarded returns the numbers of the messages that were discarded, by key.
func (o *operator) discarded(t *testing.T) map[string]map[int]bool {
	t.Helper()
	rows, err := o.st.pool.Query(t.Context(), `SELECT key, convert_from(payload, 'UTF8')::int
		FROM "postroom".outbox_parked_history WHERE action = 'discard'`)
	if err != nil {
		t.Fatal(err)
	}
	all := map[string]map[int]bool{}
	var key string
	var n int
	_, err = pgx.ForEachRow(rows, []any{&key, &n}, func() error {
		if all[key] == nil {
			all[key] = map[int]bool{}
		}
		all[key][n] = true
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return all
}

// missing says which messages have neither arrived nor been discarded.
func (o *operator) missing(t *testing.T, journal *journalReader, discarded map[string]map[int]bool) string {
	t.Helper()
	got := map[string]map[int]bool{}
	for _, m := range journal.messages(t) {
		n, err := strconv.Atoi(string(m.Payload))
		if err != nil {
			t.Fatalf("published although rolled back: %q", m.Payload)
		}
		if got[m.Key] == nil {
			got[m.Key] = map[int]bool{}
		}
		got[m.Key][n] = true
	}
	var problems []string
	for key, n := range o.st.last(t) {
		for i := 1; i <= n; i++ {
			if !got[key][i] && !discarded[key][i] {
				problems = append(problems, fmt.Sprintf("key %s: %d of %d has not arrived", key, i, n))
				break
			}
		}
	}
	slices.Sort(problems)
	return strings.Join(problems[:min(5, len(problems))], "\n")
}

// check looks at the order and the contents of all that arrived.
func (o *operator) check(t *testing.T, journal *journalReader, discarded map[string]map[int]bool) {
	t.Helper()
	msgs := journal.messages(t)
	first, problem := firsts(msgs)
	if problem != "" {
		t.Error(problem)
	}
	last := map[string]int{}
	swapped := 0
	for _, m := range first {
		n, _ := strconv.Atoi(string(m.Payload))
		if n <= last[m.Key] {
			if swapped++; swapped < 5 {
				t.Errorf("key %s: %d arrived after %d", m.Key, n, last[m.Key])
			}
		}
		last[m.Key] = n
		want := stressMessage(m.Key, n, false)
		want.ID, want.Time = m.ID, m.Time
		if !same(m, want) {
			t.Errorf("key %s: %#v, want %#v", m.Key, m, want)
		}
	}
	gone := 0
	for _, numbers := range discarded {
		gone += len(numbers)
	}
	set := scan[int](t, o.st.pool, `SELECT coalesce(pg_sequence_last_value(pg_get_serial_sequence('"postroom".outbox_parked', 'number')), 0)`)
	t.Logf("%d messages, %d repeats, %d were set aside; the operator: %v", len(first), len(msgs)-len(first), set, o.done)
	if set < 100 || o.done["requeue"] == 0 || gone == 0 {
		t.Errorf("%d messages were set aside and %d discarded: want both, and some requeued", set, gone)
	}
}
