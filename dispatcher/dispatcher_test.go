package dispatcher_test

import (
	"context"
	"fmt"
	"strconv"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/postroom/postroom"
	"github.com/postroom/postroom/broker"
	"github.com/postroom/postroom/dispatcher"
	"github.com/postroom/postroom/internal/pgtest"
	"github.com/postroom/postroom/outbox"
)

// recorder is a publisher that remembers what it stored, in order. answer, where
// set, decides a message's outcome; before, where set, runs before each call.
type recorder struct {
	mu     sync.Mutex
	stored []postroom.Message
	calls  int
	answer func(m postroom.Message) broker.Result
	before func(ctx context.Context, msgs []postroom.Message)
}

func (r *recorder) Publish(ctx context.Context, msgs []postroom.Message) []broker.Result {
	if r.before != nil {
		r.before(ctx, msgs)
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.calls++
	results := make([]broker.Result, len(msgs))
	failed := map[[2]string]bool{}
	for i, m := range msgs {
		if m.HasKey() && failed[[2]string{m.Topic, m.Key}] {
			continue
		}
		results[i].Outcome = broker.Stored
		if r.answer != nil {
			results[i] = r.answer(m)
		}
		if results[i].Outcome == broker.Stored {
			r.stored = append(r.stored, m)
		} else {
			failed[[2]string{m.Topic, m.Key}] = true
		}
	}
	return results
}

func (r *recorder) Close() error { return nil }

func (r *recorder) messages() []postroom.Message {
	r.mu.Lock()
	defer r.mu.Unlock()
	return append([]postroom.Message(nil), r.stored...)
}

// firsts returns the ids in the order of their first arrival.
func (r *recorder) firsts() []string {
	seen := map[string]bool{}
	var ids []string
	for _, m := range r.messages() {
		if !seen[m.ID] {
			seen[m.ID] = true
			ids = append(ids, m.ID)
		}
	}
	return ids
}

// start runs a dispatcher and returns the call that stops it.
func start(t testing.TB, pool *pgxpool.Pool, pub broker.Publisher, cfg dispatcher.Config) (stop func()) {
	t.Helper()
	d, err := dispatcher.New(pool, pub, cfg)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- d.Run(ctx) }()
	var once sync.Once
	stop = func() {
		once.Do(func() {
			cancel()
			if err := <-done; err != nil {
				t.Errorf("Run: %v", err)
			}
		})
	}
	t.Cleanup(stop)
	return stop
}

func write(t testing.TB, pool *pgxpool.Pool, msgs ...postroom.Message) {
	t.Helper()
	var box outbox.Outbox
	err := pgx.BeginFunc(t.Context(), pool, func(tx pgx.Tx) error {
		return box.Write(t.Context(), tx, msgs...)
	})
	if err != nil {
		t.Fatal(err)
	}
}

// eventually waits until check returns "".
func eventually(t testing.TB, within time.Duration, check func() string) {
	t.Helper()
	deadline := time.Now().Add(within)
	for {
		problem := check()
		if problem == "" {
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("after %v: %s", within, problem)
		}
		select {
		case <-time.After(2 * time.Millisecond):
		case <-t.Context().Done():
		}
	}
}

func waitStored(t testing.TB, r *recorder, n int) {
	t.Helper()
	eventually(t, time.Minute, func() string {
		if got := len(r.firsts()); got != n {
			return fmt.Sprintf("%d messages are published, want %d", got, n)
		}
		return ""
	})
}

func numbered(topic string, keys, from, n int) []postroom.Message {
	var msgs []postroom.Message
	for i := from; i < from+n; i++ {
		msgs = append(msgs, postroom.Message{
			ID: "m" + strconv.Itoa(i), Topic: topic, Key: "k" + strconv.Itoa(i%keys), Payload: []byte(strconv.Itoa(i)),
		})
	}
	return msgs
}

// keyOrder reports the first message of a key that was published after a later
// one; the payloads are ascending numbers per key.
func keyOrder(r *recorder) string {
	last := map[string]int{}
	seen := map[string]bool{}
	for _, m := range r.messages() {
		if seen[m.ID] {
			continue
		}
		seen[m.ID] = true
		n, _ := strconv.Atoi(string(m.Payload))
		if prev, ok := last[m.Topic+"/"+m.Key]; ok && n < prev {
			return fmt.Sprintf("key %s: %d came after %d", m.Key, n, prev)
		}
		last[m.Topic+"/"+m.Key] = n
	}
	return ""
}

func TestPublishesInOrder(t *testing.T) {
	pgtest.Each(t, func(t *testing.T, s *pgtest.Server) {
		pool := s.New(t)
		r := &recorder{}
		stop := start(t, pool, r, dispatcher.Config{PageSize: 50})
		write(t, pool, numbered("orders", 7, 0, 1)...)
		waitStored(t, r, 1)
		write(t, pool, numbered("orders", 7, 1, 999)...)
		waitStored(t, r, 1000)
		for i := range 20 {
			write(t, pool, numbered("orders", 7, 1000+i*10, 10)...)
		}
		waitStored(t, r, 1200)
		stop()
		if p := keyOrder(r); p != "" {
			t.Error(p)
		}
		if got := len(r.messages()); got != 1200 {
			t.Errorf("%d publishes of 1200 messages", got)
		}

		// A new dispatcher goes on where the former stopped.
		again := &recorder{}
		stop = start(t, pool, again, dispatcher.Config{})
		write(t, pool, numbered("orders", 7, 1200, 1)...)
		waitStored(t, again, 1)
		stop()
		if got := again.messages(); len(got) != 1 || got[0].ID != "m1200" {
			t.Errorf("after a restart %d messages were published again", len(got)-1)
		}
	})
}
