package inbox_test

import (
	"context"
	"errors"
	"fmt"
	"reflect"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/postroom/postroom"
	"github.com/postroom/postroom/broker/memory"
	"github.com/postroom/postroom/inbox"
	"github.com/postroom/postroom/internal/pgtest"
)

// sick is a handler that refuses the messages it is told to, and has an effect of
// all others.
type sick struct {
	mu   sync.Mutex
	bad  map[string]bool
	seen map[string]postroom.Message // message id → what came last
}

func refusing(ids ...string) *sick {
	s := &sick{bad: make(map[string]bool), seen: make(map[string]postroom.Message)}
	for _, id := range ids {
		s.bad[id] = true
	}
	return s
}

func (s *sick) heal(ids ...string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, id := range ids {
		delete(s.bad, id)
	}
}

// forget returns what has been seen, and begins anew.
func (s *sick) forget() map[string]postroom.Message {
	s.mu.Lock()
	defer s.mu.Unlock()
	seen := s.seen
	s.seen = make(map[string]postroom.Message)
	return seen
}

func (s *sick) handle(ctx context.Context, tx pgx.Tx, m postroom.Message) error {
	if err := effect(ctx, tx, m); err != nil {
		return err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.seen[m.ID] = m
	if s.bad[m.ID] {
		return postroom.Permanent(errors.New("sick"))
	}
	return nil
}

// quick looks for requeued letters often.
var quick = inbox.Config{RequeueInterval: 10 * time.Millisecond}

func states(t testing.TB, pool *pgxpool.Pool) []string {
	t.Helper()
	return query(t, pool, `SELECT message_id || ' ' || state FROM postroom.inbox_dead_letters ORDER BY number`)
}

func eventuallyStates(t testing.TB, pool *pgxpool.Pool, want ...string) {
	t.Helper()
	eventually(t, fmt.Sprintf("the letters %q", want), func() bool { return slices.Equal(states(t, pool), want) })
}

func eventuallyEffects(t testing.TB, pool *pgxpool.Pool, want ...string) {
	t.Helper()
	eventually(t, fmt.Sprintf("the effects %q", want), func() bool { return slices.Equal(effects(t, pool), want) })
}

func requeue(t testing.TB, pool *pgxpool.Pool, want int64, ids ...string) {
	t.Helper()
	if n, err := (inbox.DeadLetters{Pool: pool}).Requeue(t.Context(), "billing", ids...); err != nil || n != want {
		t.Errorf("Requeue(%q) = %d, %v, want %d", ids, n, err, want)
	}
}

func list(t testing.TB, pool *pgxpool.Pool) []inbox.DeadLetter {
	t.Helper()
	letters, err := inbox.DeadLetters{Pool: pool}.List(t.Context(), "billing", 0, 1000)
	if err != nil {
		t.Fatal(err)
	}
	return letters
}

// A requeued message is handled under its old identity, byte for byte, once.
func TestRequeue(t *testing.T) {
	pgtest.Each(t, func(t *testing.T, s *pgtest.Server) {
		pool := newPool(t, s)
		bus, rec := newBus()
		h := refusing("m1", "m2", "m3")
		m1 := message("m1")
		m1.EmptyKey, m1.Payload = true, []byte{0, 0xff}
		m1.Headers = []postroom.Header{{Name: "b", Value: []byte{0xfe}}, {Name: "a", Value: []byte{}}, {Name: "b", Value: nil}}
		m1.Operation, m1.Time = "op", time.Date(2024, 5, 6, 7, 8, 9, 123000, time.UTC)
		m2 := keyed("m2", "k")
		m2.Payload = nil
		publish(t, bus, m1, m2, message("m3"))
		start(t, pool, rec, h.handle, quick)
		eventually(t, "three acks", func() bool { return rec.count("ack") == 3 })
		h.heal("m1", "m2", "m3")
		before := h.forget()
		requeue(t, pool, 0)
		requeue(t, pool, 0, "m9")
		requeue(t, pool, 2, "m1", "m2", "m1", "m9")
		eventuallyStates(t, pool, "m3 dead")
		wantStrings(t, "processed", outcomes(t, pool), "billing m1 handled", "billing m2 handled", "billing m3 dead")
		after := h.forget()
		for _, id := range []string{"m1", "m2"} {
			want, got := before[id], after[id]
			if !got.Time.Equal(want.Time) {
				t.Errorf("time of %s = %v, want %v", id, got.Time, want.Time)
			}
			if got.Time = want.Time; !reflect.DeepEqual(got, want) {
				t.Errorf("handled again: %+v, want %+v", got, want)
			}
		}
		requeue(t, pool, 0, "m1") // it is dead no more
		mustHandle(t, pool, "m1", effect, inbox.Duplicate)
		if n := query(t, pool, `SELECT postroom.requeue_dead_letters('billing')::text`)[0]; n != "1" {
			t.Errorf("requeue_dead_letters = %s, want 1", n)
		}
		eventuallyStates(t, pool)
		got := effects(t, pool)
		slices.Sort(got)
		wantStrings(t, "effects", got, "m1", "m2", "m3")
	})
}

// Effect, outcome and the end of the letter are one.
func TestRequeueIsAtomic(t *testing.T) {
	pool := newPool(t, pgtest.First(t))
	bus, rec := newBus()
	entered, leave := make(chan struct{}), make(chan error)
	var runs atomic.Int32
	publish(t, bus, message("m1"))
	start(t, pool, rec, func(ctx context.Context, tx pgx.Tx, m postroom.Message) error {
		if runs.Add(1) == 1 {
			return postroom.Permanent(errors.New("no"))
		}
		if err := effect(ctx, tx, m); err != nil {
			return err
		}
		entered <- struct{}{}
		return <-leave
	}, quick)
	eventuallyStates(t, pool, "m1 dead")
	requeue(t, pool, 1, "m1")
	for _, end := range []error{errors.New("again"), nil} {
		receive(t, "it is handled again", entered)
		wantStrings(t, "letters", states(t, pool), "m1 requeued")
		wantStrings(t, "processed", outcomes(t, pool), "billing m1 dead")
		wantStrings(t, "effects", effects(t, pool))
		leave <- end
	}
	eventuallyStates(t, pool)
	wantStrings(t, "processed", outcomes(t, pool), "billing m1 handled")
	wantStrings(t, "effects", effects(t, pool), "m1")
}

// What fails again keeps its place, and is published again under another id.
func TestRequeueThatFails(t *testing.T) {
	pool := newPool(t, pgtest.First(t))
	bus, rec := newBus()
	publish(t, bus, message("m1"))
	cfg := quick
	cfg.DeadLetterTopic = "dead.orders"
	start(t, pool, rec, refusing("m1").handle, cfg)
	for n := range 3 {
		eventuallyStates(t, pool, "m1 dead")
		letters := list(t, pool)
		if l := letters[0]; len(letters) != 1 || l.Requeues != n || l.Attempts != 1 || l.Reason != "sick" || l.Source != "orders/0" {
			t.Errorf("letters after %d requeues = %+v", n, letters)
		}
		wantStrings(t, "dead letters in the outbox", query(t, pool, `SELECT count(DISTINCT message_id)::text FROM postroom.outbox_messages`), fmt.Sprint(n+1))
		requeue(t, pool, 1, "m1")
		eventually(t, "another attempt", func() bool {
			l := list(t, pool)
			return len(l) == 1 && l[0].Requeues == n+1 && l[0].State == inbox.LetterDead
		})
	}
	wantStrings(t, "processed", outcomes(t, pool), "billing m1 dead")
	wantStrings(t, "effects", effects(t, pool))
}

// Two consumers share a bulk requeue, also while the letters come back as plain
// repeats from the broker.
func TestRequeueByTwoConsumers(t *testing.T) {
	pool := newPool(t, pgtest.First(t))
	bus, rec := newBus()
	all := ids("m", 100)
	for i, id := range all {
		publish(t, bus, keyed(id, fmt.Sprint(i%7)))
	}
	h := refusing(all...)
	start(t, pool, rec, h.handle, quick)
	start(t, pool, memory.New(), h.handle, quick)
	eventually(t, "all are dead", func() bool { return rec.count("ack") == 100 })
	h.heal(all...)
	if n, err := (inbox.DeadLetters{Pool: pool}).RequeueAll(t.Context(), "billing"); n != 100 || err != nil {
		t.Fatalf("RequeueAll = %d, %v", n, err)
	}
	for i, id := range all {
		publish(t, bus, keyed(id, fmt.Sprint(i%7)))
	}
	eventuallyStates(t, pool)
	eventually(t, "the repeats are acknowledged", func() bool { return rec.count("ack") == 200 })
	got := effects(t, pool)
	slices.Sort(got)
	wantStrings(t, "effects", got, all...)
}

func TestRepeatsOfDeadLettersAreCounted(t *testing.T) {
	pgtest.Each(t, func(t *testing.T, s *pgtest.Server) {
		base := newPool(t, s)
		errs := &errorTracer{}
		pool := withPool(t, base, func(c *pgxpool.Config) { c.ConnConfig.Tracer = errs })
		bus, rec := newBus()
		publish(t, bus, message("m1"), message("m2"))
		start(t, pool, rec, refusing("m1").handle, inbox.Config{})
		eventually(t, "two acks", func() bool { return rec.count("ack") == 2 })
		publish(t, bus, message("m1"), message("m2"))
		eventually(t, "four acks", func() bool { return rec.count("ack") == 4 })
		mustHandle(t, pool, "m1", effect, inbox.Duplicate)
		if l := list(t, base); len(l) != 1 || l[0].Repeats != 2 || l[0].State != inbox.LetterDead {
			t.Errorf("letters = %+v, want one with 2 repeats", l)
		}
		wantStrings(t, "effects", effects(t, pool), "m2")
		if n := errs.n.Load(); n != 0 {
			t.Errorf("%d statements failed, last: %v", n, errs.last.Load())
		}
	})
}

// A tool that copies a dead letter back from its topic requeues it.
func TestForeignRedrive(t *testing.T) {
	pool := newPool(t, pgtest.First(t))
	bus, rec := newBus()
	m := keyed("m1", "k")
	m.Headers = []postroom.Header{{Name: "a", Value: []byte("1")}}
	publish(t, bus, m)
	h := refusing("m1")
	start(t, pool, rec, h.handle, inbox.Config{DeadLetterTopic: "dead.orders"})
	eventually(t, "an ack", func() bool { return rec.count("ack") == 1 })

	redrive := func(subscriber, id string) postroom.Message {
		copied := keyed(id, "k")
		copied.Headers = []postroom.Header{
			{Name: "a", Value: []byte("1")},
			{Name: "Postroom-Dead-Id", Value: []byte("m1")},
			{Name: "postroom-dead-subscriber", Value: []byte(subscriber)},
			{Name: "postroom-dead-reason", Value: []byte("sick")},
		}
		return copied
	}
	publish(t, bus, redrive("billing", "d1")) // and it is as bad as before
	eventually(t, "two acks", func() bool { return rec.count("ack") == 2 })
	wantStrings(t, "letters", states(t, pool), "m1 dead")
	h.heal("m1")
	publish(t, bus, redrive("billing", "d1"), redrive("billing", "d1"), redrive("billing", "d2"))
	eventually(t, "five acks", func() bool { return rec.count("ack") == 5 })
	wantStrings(t, "letters", states(t, pool))
	wantStrings(t, "processed", outcomes(t, pool), "billing m1 handled")
	wantStrings(t, "effects", effects(t, pool), "m1")
	if got := h.forget()["m1"]; !reflect.DeepEqual(got.Headers, m.Headers) {
		t.Errorf("headers = %+v, want %+v", got.Headers, m.Headers)
	}
	publish(t, bus, redrive("shipping", "d3")) // another subscriber's: a message of its own
	eventually(t, "six acks", func() bool { return rec.count("ack") == 6 })
	wantStrings(t, "effects", effects(t, pool), "m1", "d3")
}

func waiting() inbox.Config {
	cfg := quick
	cfg.OnDeadLetter = inbox.DeadLetterWait
	return cfg
}

// The successors of a dead letter wait, and come in their order behind it.
func TestDeadLetterWait(t *testing.T) {
	pgtest.Each(t, func(t *testing.T, s *pgtest.Server) {
		pool := newPool(t, s)
		bus, rec := newBus()
		h := refusing("a1", "a3")
		publish(t, bus, keyed("a1", "a"), keyed("a2", "a"), keyed("a3", "a"))
		c := start(t, pool, rec, h.handle, waiting())
		eventually(t, "three acks", func() bool { return rec.count("ack") == 3 })
		publish(t, bus, keyed("b1", "b"), message("m1"))
		eventually(t, "five acks", func() bool { return rec.count("ack") == 5 })
		got := effects(t, pool)
		slices.Sort(got)
		wantStrings(t, "effects of others", got, "b1", "m1")
		wantStrings(t, "letters", states(t, pool), "a1 dead", "a2 waiting", "a3 waiting")

		// Repeats and later messages, after a restart.
		if err := c.stop(); err != nil {
			t.Fatal(err)
		}
		start(t, pool, rec, h.handle, waiting())
		publish(t, bus, keyed("a2", "a"), keyed("a4", "a"), keyed("a1", "a"), keyed("b1", "b"))
		eventually(t, "nine acks", func() bool { return rec.count("ack") == 9 })
		wantStrings(t, "letters", states(t, pool), "a1 dead", "a2 waiting", "a3 waiting", "a4 waiting")
		wantStrings(t, "processed", outcomes(t, pool), "billing a1 dead", "billing a2 waiting", "billing a3 waiting",
			"billing a4 waiting", "billing b1 handled", "billing m1 handled")
		exec(t, pool, `DELETE FROM effects`)

		// The head fails again, and nothing passes it.
		requeue(t, pool, 1, "a1")
		eventually(t, "another attempt", func() bool { return list(t, pool)[0].Requeues == 1 && list(t, pool)[0].State == inbox.LetterDead })
		wantStrings(t, "effects", effects(t, pool))

		// It succeeds, and one behind it becomes a dead letter on its turn.
		h.heal("a1")
		requeue(t, pool, 1, "a1")
		eventuallyStates(t, pool, "a3 dead", "a4 waiting")
		publish(t, bus, keyed("a5", "a"))
		eventuallyStates(t, pool, "a3 dead", "a4 waiting", "a5 waiting")
		wantStrings(t, "effects", effects(t, pool), "a1", "a2")

		// A person gives it up.
		exec(t, pool, `DELETE FROM postroom.inbox_dead_letters WHERE message_id = 'a3'`)
		eventuallyEffects(t, pool, "a1", "a2", "a4", "a5")
		eventuallyStates(t, pool)
		publish(t, bus, keyed("a6", "a"), keyed("a5", "a"))
		eventuallyEffects(t, pool, "a1", "a2", "a4", "a5", "a6")
	})
}

// Messages that arrive while those before them leave keep the order, by one
// consumer and by a second one that has none of the messages.
func TestDeadLetterWaitKeepsOrder(t *testing.T) {
	pool := newPool(t, pgtest.First(t))
	bus, rec := newBus()
	all := ids("m", 150)
	h := refusing(all[0])
	start(t, pool, rec, h.handle, waiting())
	start(t, pool, memory.New(), h.handle, waiting())
	for _, id := range all[:100] {
		publish(t, bus, keyed(id, "k"))
	}
	eventually(t, "they wait", func() bool { return rec.count("ack") == 100 })
	h.heal(all[0])
	requeue(t, pool, 1, all[0])
	for _, id := range all[100:] {
		publish(t, bus, keyed(id, "k"))
	}
	eventually(t, "all are handled", func() bool { return len(effects(t, pool)) == len(all) })
	wantStrings(t, "effects", query(t, pool, `SELECT message_id FROM effects ORDER BY n`), all...)
	wantStrings(t, "letters", states(t, pool))
}

func TestDeadLetterStop(t *testing.T) {
	pool := newPool(t, pgtest.First(t))
	bus, rec := newBus()
	publish(t, bus, keyed("m1", "k"), keyed("m2", "k"))
	h := refusing("m1")
	cfg := quick
	cfg.OnDeadLetter = inbox.DeadLetterStop
	c := start(t, pool, rec, h.handle, cfg)
	if err := c.wait(); !errors.Is(err, inbox.ErrStopped) || !strings.Contains(err.Error(), `"m1": sick`) {
		t.Errorf("Run = %v, want ErrStopped and the message", err)
	}
	c.wipe()
	wantStrings(t, "letters", states(t, pool))
	wantStrings(t, "processed", outcomes(t, pool))
	if n := rec.count("ack"); n != 0 {
		t.Errorf("%d acks", n)
	}
	h.heal("m1")
	start(t, pool, rec, h.handle, cfg)
	eventuallyEffects(t, pool, "m1", "m2")
}

// Listing pages by number.
func TestListDeadLetters(t *testing.T) {
	pool := newPool(t, pgtest.First(t))
	bus, rec := newBus()
	all := ids("m", 7)
	for _, id := range all {
		publish(t, bus, keyed(id, "k"))
	}
	start(t, pool, rec, refusing(all...).handle, inbox.Config{})
	eventually(t, "all are dead", func() bool { return rec.count("ack") == 7 })
	var got []string
	var after int64
	for {
		page, err := inbox.DeadLetters{Pool: pool}.List(t.Context(), "billing", after, 3)
		if err != nil {
			t.Fatal(err)
		}
		if len(page) == 0 {
			break
		}
		for _, l := range page {
			got = append(got, l.Message.ID)
			after = l.Number
			if l.Message.Key != "k" || string(l.Message.Payload) != "{}" || l.Message.Topic != "orders" || l.Time.IsZero() {
				t.Errorf("letter = %+v", l)
			}
		}
	}
	wantStrings(t, "ids", got, all...)
	if l, err := (inbox.DeadLetters{Pool: pool}).List(t.Context(), "shipping", 0, 3); len(l) != 0 || err != nil {
		t.Errorf("another subscriber's letters = %v, %v", l, err)
	}
}

// The COMMIT of a redriven message whose answer is lost is settled by the outcome,
// not by the record, which was there before: it would be acknowledged without
// effect. A requeued one is found again in any case.
func TestRequeueAmbiguousCommit(t *testing.T) {
	redriven := message("d1")
	redriven.Headers = headers("postroom-dead-id", "m1", "postroom-dead-subscriber", "billing")
	again := map[string]func(*testing.T, *pgxpool.Pool, *memory.Broker){
		"requeued": func(t *testing.T, pool *pgxpool.Pool, _ *memory.Broker) { requeue(t, pool, 1, "m1") },
		"redriven": func(t *testing.T, _ *pgxpool.Pool, bus *memory.Broker) { publish(t, bus, redriven) },
	}
	for name, how := range map[string]cut{"before": before, "after": after} {
		for kind, handleAgain := range again {
			t.Run(kind+"/"+name, func(t *testing.T) {
				base := newPool(t, pgtest.First(t))
				p, pool := newProxy(t, base, 4)
				bus, rec := newBus()
				h := refusing("m1")
				publish(t, bus, message("m1"))
				start(t, pool, rec, h.handle, quick)
				eventually(t, "an ack", func() bool { return rec.count("ack") == 1 })
				wantStrings(t, "letters", states(t, base), "m1 dead")
				h.heal("m1")
				var cuts atomic.Int32
				p.mu.Lock()
				p.onCommit = func() cut {
					if cuts.Add(1) == 1 {
						return how
					}
					return never
				}
				p.mu.Unlock()
				handleAgain(t, base, bus)
				eventuallyStates(t, base)
				wantStrings(t, "effects", effects(t, base), "m1")
				wantStrings(t, "processed", outcomes(t, base), "billing m1 handled")
				if cuts.Load() == 0 {
					t.Error("no COMMIT was cut")
				}
			})
		}
	}
}
