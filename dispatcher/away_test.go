package dispatcher_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/postroom/postroom"
	"github.com/postroom/postroom/broker"
	"github.com/postroom/postroom/dispatcher"
	"github.com/postroom/postroom/internal/pgtest"
)

// startWatched is start for a test that asks for the dispatcher's health.
func startWatched(t testing.TB, pool *pgxpool.Pool, pub broker.Publisher, cfg dispatcher.Config) *dispatcher.Dispatcher {
	t.Helper()
	d, err := dispatcher.New(pool, pub, cfg)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- d.Run(ctx) }()
	t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			t.Errorf("Run: %v", err)
		}
	})
	return d
}

func waitHealthy(t testing.TB, d *dispatcher.Dispatcher) {
	t.Helper()
	eventually(t, time.Minute, func() string {
		if err := d.Health(); err != nil {
			return err.Error()
		}
		return ""
	})
}

// both returns n messages of each of two topics in turns, their ids apart.
func both(from, n int) (msgs []postroom.Message) {
	for i := from; i < from+n; i++ {
		for _, topic := range []string{"orders", "lost"} {
			m := numbered(topic, 5, i, 1)[0]
			m.ID = topic + m.ID
			msgs = append(msgs, m)
		}
	}
	return msgs
}

// A topic that stays away is set aside; the others go on; when it is back its
// messages leave in order, before newer ones, without a restart.
func TestTopicAway(t *testing.T) {
	pgtest.Each(t, func(t *testing.T, s *pgtest.Server) {
		pool := s.New(t)
		f := newFaults()
		f.setAway("lost", true)
		r := &recorder{answer: f.answer}
		d := startWatched(t, pool, r, dispatcher.Config{PageSize: 50})
		write(t, pool, both(0, 300)...)
		write(t, pool, postroom.Message{ID: "alone", Topic: "lost"})
		waitStored(t, r, 300)
		waitParked(t, pool, 301)
		if n := scanSQL[int](t, pool, `SELECT count(*) FROM postroom.outbox_parked
			WHERE state <> 'waiting' OR away <> 'lost' OR attempts > 0 OR due_at IS NOT NULL`); n > 0 {
			t.Errorf("%d messages are not waiting for their topic", n)
		}
		began := time.Now()
		write(t, pool, both(300, 100)...)
		waitStored(t, r, 400)
		if d := time.Since(began); d > time.Second {
			t.Errorf("the other topic took %v although the first is known to be away", d)
		}
		if err := d.Health(); err == nil || !strings.Contains(err.Error(), "no such topic") {
			t.Errorf("Health() = %v, want the reason", err)
		}
		f.setAway("lost", false)
		write(t, pool, both(400, 100)...)
		waitStored(t, r, 1001)
		waitParked(t, pool, 0)
		waitHealthy(t, d)
		write(t, pool, both(500, 10)...)
		waitStored(t, r, 1021)
		if p := keyOrder(r); p != "" {
			t.Error(p)
		}
		if n := len(r.messages()); n != 1021 {
			t.Errorf("%d publishes of 1021 messages", n)
		}
	})
}

// A dispatcher that starts while a topic is away knows it from the rows: it tries
// no message of the topic together with others.
func TestTopicAwayAfterRestart(t *testing.T) {
	pool := pgtest.New(t)
	f := newFaults()
	f.setAway("lost", true)
	r := &recorder{answer: f.answer}
	stop := start(t, pool, r, dispatcher.Config{})
	lost := func(name string) (msgs []postroom.Message) { // in all lanes
		for _, m := range numbered("lost", 50, 0, 50) {
			m.ID, m.Key = name+m.ID, name+m.Key
			msgs = append(msgs, m)
		}
		return msgs
	}
	write(t, pool, append(both(0, 20), lost("old")...)...)
	waitStored(t, r, 20)
	waitParked(t, pool, 70)
	stop()
	write(t, pool, append(both(20, 20), lost("new")...)...)
	var mixed atomic.Bool
	again := &recorder{answer: f.answer, before: func(_ context.Context, msgs []postroom.Message) {
		for _, m := range msgs {
			if m.Topic != msgs[0].Topic {
				mixed.Store(true)
			}
		}
	}}
	stop = start(t, pool, again, dispatcher.Config{})
	waitStored(t, again, 20)
	waitParked(t, pool, 140)
	if mixed.Load() {
		t.Error("messages of a topic that is away were tried together with others")
	}
	stop()
	// Nor does it take a new message to find what waits.
	f.setAway("lost", false)
	start(t, pool, again, dispatcher.Config{})
	waitStored(t, again, 160)
	waitParked(t, pool, 0)
	if p := keyOrder(again); p != "" {
		t.Error(p)
	}
}

// A short outage of a topic sets nothing aside.
func TestBlipSetsNothingAside(t *testing.T) {
	pool := pgtest.New(t)
	f := newFaults()
	f.setAway("lost", true)
	r := &recorder{answer: f.answer}
	start(t, pool, r, dispatcher.Config{})
	write(t, pool, both(0, 20)...)
	eventually(t, time.Minute, func() string {
		if f.tries("lostm0") < 2 {
			return "not tried again"
		}
		return ""
	})
	f.setAway("lost", false)
	waitStored(t, r, 40)
	if n := scanSQL[int](t, pool, `SELECT coalesce(pg_sequence_last_value(pg_get_serial_sequence('postroom.outbox_parked', 'number')), 0)`); n > 0 {
		t.Errorf("%d messages were set aside", n)
	}
}

// A part of a topic is away: the topic's other parts and the other topics flow.
func TestPartOfATopicAway(t *testing.T) {
	pool := pgtest.New(t)
	var away atomic.Bool
	away.Store(true)
	r := &recorder{answer: func(m postroom.Message) broker.Result {
		if m.Topic == "lost" && away.Load() && slices.Contains([]string{"k1", "k3", "k10", "k12", "k14", "k16", "k18", "k20"}, m.Key) {
			return broker.Result{Outcome: broker.Unreachable, Scope: "lost/1", Err: errors.New("no leader")}
		}
		return broker.Result{Outcome: broker.Stored}
	}}
	d := startWatched(t, pool, r, dispatcher.Config{PageSize: 50})
	write(t, pool, both(0, 300)...)
	waitStored(t, r, 300+180)
	waitParked(t, pool, 120)
	write(t, pool, both(300, 300)...)
	waitStored(t, r, 600+360)
	waitParked(t, pool, 240)
	for i := range 24 { // of twelve new keys, half of them of the part, in all lanes
		write(t, pool, postroom.Message{ID: fmt.Sprint("new", i), Topic: "lost", Key: fmt.Sprint("k", 10+i%12), Payload: fmt.Append(nil, i)})
	}
	waitStored(t, r, 960+12)
	waitParked(t, pool, 252)
	if n := scanSQL[int](t, pool, `SELECT count(*) FROM postroom.outbox_parked WHERE away <> 'lost/1' OR state <> 'waiting'`); n > 0 {
		t.Errorf("%d messages do not wait for the part", n)
	}
	away.Store(false)
	waitStored(t, r, 1224)
	waitParked(t, pool, 0)
	waitHealthy(t, d)
	if p := keyOrder(r); p != "" {
		t.Error(p)
	}
}

// Every part of every topic is away, as when the broker is: nothing is set aside.
func TestCase_B08_AllPartsAwayParksNothing(t *testing.T) {
	pool := pgtest.New(t)
	var away atomic.Bool
	away.Store(true)
	r := &recorder{}
	r.answer = func(m postroom.Message) broker.Result {
		if away.Load() {
			return broker.Result{Outcome: broker.Unreachable, Scope: m.Topic + "/" + m.Key, Err: errors.New("connection refused")}
		}
		return broker.Result{Outcome: broker.Stored}
	}
	start(t, pool, r, dispatcher.Config{})
	write(t, pool, both(0, 100)...)
	began := time.Now()
	eventually(t, time.Minute, func() string {
		if time.Since(began) < 2500*time.Millisecond {
			return "the outage is short"
		}
		return ""
	})
	if n := scanSQL[int](t, pool, `SELECT count(*) FROM postroom.outbox_parked`); n > 0 {
		t.Errorf("%d messages were set aside", n)
	}
	away.Store(false)
	waitStored(t, r, 200)
	if p := keyOrder(r); p != "" {
		t.Error(p)
	}
}

// Calls that hold a message of one topic do not end before their deadline: the
// other topic is held up by the first of them and by no other.
func TestHungTopic(t *testing.T) {
	pool := pgtest.New(t)
	var away atomic.Bool
	away.Store(true)
	r := &recorder{answer: func(m postroom.Message) broker.Result {
		if m.Topic == "lost" && away.Load() {
			return broker.Result{Outcome: broker.Unreachable, Scope: "lost", Err: errors.New("no answer")}
		}
		return broker.Result{Outcome: broker.Stored}
	}}
	r.before = func(ctx context.Context, msgs []postroom.Message) {
		for _, m := range msgs {
			if m.Topic == "lost" && away.Load() {
				<-ctx.Done()
				return
			}
		}
	}
	start(t, pool, r, dispatcher.Config{PublishTimeout: 1500 * time.Millisecond})
	write(t, pool, both(0, 20)...)
	waitStored(t, r, 20)
	waitParked(t, pool, 20)
	for i := range 10 {
		began := time.Now()
		write(t, pool, both(20+i, 1)...)
		waitStored(t, r, 21+i)
		if d := time.Since(began); d > 500*time.Millisecond {
			t.Errorf("a message of the other topic took %v", d)
		}
	}
	away.Store(false)
	waitStored(t, r, 60)
	if p := keyOrder(r); p != "" {
		t.Error(p)
	}
}

// What is refused among a topic's waiting messages holds back its key and no other,
// and so does what is refused again after the topic is back.
func TestRefusedAmongWaiting(t *testing.T) {
	pool := pgtest.New(t)
	f := newFaults("lostm4", "lostm10")
	f.setAway("lost", true)
	r := &recorder{answer: f.answer}
	start(t, pool, r, once)
	write(t, pool, both(0, 50)...)
	waitStored(t, r, 50)
	waitParked(t, pool, 50)
	f.setAway("lost", false)
	waitStored(t, r, 50+30+2) // k4 stops at its first, k0 behind m0 and m5
	waitParked(t, pool, 18)
	write(t, pool, both(50, 10)...)
	waitStored(t, r, 82+10+6)
	waitParked(t, pool, 22)
	eventually(t, time.Minute, func() string {
		if n := scanSQL[int](t, pool, `SELECT count(*) FROM postroom.outbox_parked WHERE state = 'refused'`); n != 2 {
			return fmt.Sprintf("%d messages are refused, want 2", n)
		}
		return ""
	})
	f.take("lostm4", "lostm10")
	if n, err := (dispatcher.Parked{Pool: pool}).Requeue(t.Context(), dispatcher.Filter{Topic: "lost"}, ""); n != 2 || err != nil {
		t.Error(n, err)
	}
	waitStored(t, r, 120)
	waitParked(t, pool, 0)
	if p := keyOrder(r); p != "" {
		t.Error(p)
	}
}

// The pile of a topic that does not exist can be sent to the right one, or given up.
func TestPileOfAMisspeltTopic(t *testing.T) {
	for _, what := range []string{"redirect", "discard"} {
		t.Run(what, func(t *testing.T) {
			pool := pgtest.New(t)
			f := newFaults()
			f.setAway("lost", true)
			r := &recorder{answer: f.answer}
			d := startWatched(t, pool, r, dispatcher.Config{})
			write(t, pool, both(0, 1500)...)
			waitStored(t, r, 1500)
			waitParked(t, pool, 1500)
			op := dispatcher.Parked{Pool: pool}
			var n int64
			var err error
			want := 3000
			if what == "discard" {
				want = 1500
				n, err = op.Discard(t.Context(), dispatcher.Filter{Topic: "lost"}, "misspelt")
			} else {
				n, err = op.Redirect(t.Context(), dispatcher.Filter{Topic: "lost"}, "found", "misspelt")
			}
			if n != 1500 || err != nil {
				t.Errorf("%s: %d, %v", what, n, err)
			}
			waitStored(t, r, want)
			waitParked(t, pool, 0)
			waitHealthy(t, d)
			if p := keyOrder(r); p != "" {
				t.Error(p)
			}
			if n := scanSQL[int](t, pool, `SELECT count(*) FROM postroom.outbox_parked_history WHERE action = $1`, what); n != 1500 {
				t.Errorf("the history holds %d", n)
			}
		})
	}
}

// A topic that comes and goes under traffic loses, doubles and swaps nothing.
func TestTopicComesAndGoes(t *testing.T) {
	pool := pgtest.New(t)
	f := newFaults()
	r := &recorder{answer: f.answer}
	start(t, pool, r, dispatcher.Config{PageSize: 20})
	next := 0
	for i := range 6 {
		f.setAway("lost", i%2 == 0)
		began := time.Now()
		for time.Since(began) < 1300*time.Millisecond {
			write(t, pool, both(next, 10)...)
			next += 10
		}
	}
	waitStored(t, r, 2*next)
	waitParked(t, pool, 0)
	if p := keyOrder(r); p != "" {
		t.Error(p)
	}
	if n := len(r.messages()); n != 2*next {
		t.Errorf("%d publishes of %d messages", n, 2*next)
	}
	if fmt.Sprint(scanSQL[int](t, pool, `SELECT count(*) FROM postroom.outbox_parked_history`)) != "0" {
		t.Error("history without an operator")
	}
}
