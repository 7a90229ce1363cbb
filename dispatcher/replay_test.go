package dispatcher_test

import (
	"context"
	"errors"
	"fmt"
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

func replay(t testing.TB, pool *pgxpool.Pool, pub broker.Publisher, cfg dispatcher.Config, r dispatcher.Replay) dispatcher.Replayed {
	t.Helper()
	d, err := dispatcher.New(pool, pub, cfg)
	if err != nil {
		t.Fatal(err)
	}
	done, err := d.Replay(t.Context(), r)
	if err != nil {
		t.Fatal(err)
	}
	if n := done.Messages; n != len(pub.(*recorder).messages()) {
		t.Errorf("Replay says %d messages, and published %d", n, len(pub.(*recorder).messages()))
	}
	return done
}

// All that was published comes again with its id, bytes and time, in order,
// beside new messages; what was never published does not.
func TestReplay(t *testing.T) {
	pgtest.Each(t, func(t *testing.T, s *pgtest.Server) {
		pool := s.New(t)
		first := &recorder{answer: refuse("m30")}
		stop := start(t, pool, first, dispatcher.Config{})
		write(t, pool, numbered("orders", 7, 0, 500)...)
		write(t, pool, postroom.Message{
			ID: "odd", Topic: "odd", EmptyKey: true, Payload: []byte{0, 255},
			Headers: []postroom.Header{{Name: "a", Value: []byte{1}}, {Name: "a", Value: nil}},
		})
		eventually(t, time.Minute, func() string { // m30's key waits
			if n := len(first.messages()) + len(parked(t, pool)); n != 501 {
				return fmt.Sprintf("%d of 501 settled", n)
			}
			return ""
		})
		stop()
		write(t, pool, numbered("orders", 7, 500, 100)...) // nobody publishes these

		again := &recorder{}
		pages := 0
		replay(t, pool, again, dispatcher.Config{PageSize: 20, PageBytes: 100}, dispatcher.Replay{
			Progress: func(dispatcher.Replayed) { pages++ },
		})
		if pages < 10 {
			t.Errorf("%d pages", pages)
		}
		if p := keyOrder(again); p != "" {
			t.Error(p)
		}
		want := map[string]string{}
		for _, m := range first.messages() {
			want[m.ID] = fmt.Sprintf("%#v", m)
		}
		for _, m := range again.messages() {
			if want[m.ID] != fmt.Sprintf("%#v", m) {
				t.Errorf("replayed %#v\nfirst    %s", m, want[m.ID])
			}
			delete(want, m.ID)
		}
		if len(want) > 0 {
			t.Errorf("%d messages were not replayed", len(want))
		}
	})
}

func TestReplayChoice(t *testing.T) {
	pool := pgtest.New(t)
	first := &recorder{}
	start(t, pool, first, dispatcher.Config{})
	write(t, pool, numbered("old", 5, 0, 50)...)
	waitStored(t, first, 50)
	waitSettled(t, pool)
	age(t, pool, time.Hour)
	var now time.Time
	if err := pool.QueryRow(t.Context(), `SELECT clock_timestamp() - interval '30 minutes'`).Scan(&now); err != nil {
		t.Fatal(err)
	}
	write(t, pool, numbered("new", 5, 50, 50)...)
	waitStored(t, first, 100)
	waitSettled(t, pool)
	for _, c := range []struct {
		name   string
		choice dispatcher.Replay
		want   int
	}{
		{"since", dispatcher.Replay{Since: now}, 50},
		{"until", dispatcher.Replay{Until: now.Add(-20 * time.Minute), Topic: "old"}, 50},
		{"between", dispatcher.Replay{Since: now.Add(-2 * time.Hour), Until: now.Add(2 * time.Hour)}, 100},
		{"topic", dispatcher.Replay{Topic: "new"}, 50},
		{"key", dispatcher.Replay{Topic: "new", Key: "k1"}, 10},
		{"ids", dispatcher.Replay{IDs: []string{"m3", "m77", "none"}}, 2},
		{"since and ids", dispatcher.Replay{Since: now, IDs: []string{"m3", "m77"}}, 1},
	} {
		t.Run(c.name, func(t *testing.T) {
			r := &recorder{}
			replay(t, pool, r, dispatcher.Config{}, c.choice)
			if n := len(r.messages()); n != c.want {
				t.Errorf("%d messages, want %d", n, c.want)
			}
		})
	}
}

// A replay that is stopped goes on from its position; an outage ends it only
// when its context does.
func TestReplayGoesOn(t *testing.T) {
	pool := pgtest.New(t)
	first := &recorder{}
	start(t, pool, first, dispatcher.Config{})
	write(t, pool, numbered("orders", 7, 0, 200)...)
	waitStored(t, first, 200)
	waitSettled(t, pool)
	ctx, cancel := context.WithCancel(t.Context())
	var calls atomic.Int32
	r := &recorder{answer: func(postroom.Message) broker.Result {
		if calls.Add(1) > 90 {
			cancel()
			return broker.Result{Outcome: broker.Unreachable, Err: errors.New("no leader")}
		}
		return broker.Result{Outcome: broker.Stored}
	}}
	cfg := dispatcher.Config{PageSize: 10}
	d, err := dispatcher.New(pool, r, cfg)
	if err != nil {
		t.Fatal(err)
	}
	done, err := d.Replay(ctx, dispatcher.Replay{})
	if !errors.Is(err, context.Canceled) || !strings.Contains(err.Error(), "no leader") {
		t.Errorf("Replay returned %v", err)
	}
	if done.Messages == 0 || done.Messages == 200 {
		t.Fatalf("%d messages replayed before the stop", done.Messages)
	}
	r.answer = nil
	more, err := d.Replay(t.Context(), dispatcher.Replay{After: done.Position})
	if err != nil {
		t.Fatal(err)
	}
	if len(r.firsts()) != 200 || done.Messages+more.Messages > 210 {
		t.Errorf("%d and %d messages replayed, %d of 200", done.Messages, more.Messages, len(r.firsts()))
	}
	if p := keyOrder(r); p != "" {
		t.Error(p)
	}
}
