package dispatcher_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/postroom/postroom"
	"github.com/postroom/postroom/broker"
	"github.com/postroom/postroom/dispatcher"
	"github.com/postroom/postroom/internal/pgtest"
	"github.com/postroom/postroom/outbox"
)

func TestNewReportsEveryProblem(t *testing.T) {
	_, err := dispatcher.New(nil, nil, dispatcher.Config{
		Schema: strings.Repeat("x", 64), PageSize: -1, PageBytes: -1,
		PublishTimeout: time.Minute, Lease: 2 * time.Minute, MaxPollInterval: time.Millisecond,
	})
	if err == nil {
		t.Fatal("no error")
	}
	for _, want := range []string{
		"pool is nil", "publisher is nil", "Config.Schema", "Config.PageSize is -1", "Config.PageBytes is -1",
		"Config.Lease is 2m0s", "Config.MaxPollInterval is 1ms",
	} {
		if !strings.Contains(err.Error(), want) {
			t.Errorf("%q is missing in:\n%v", want, err)
		}
	}
}

func TestRunRefusesAnUnfitServer(t *testing.T) {
	s := pgtest.First(t)
	r := &recorder{}
	run := func(t *testing.T, prepare string) error {
		pool := s.New(t)
		if _, err := pool.Exec(t.Context(), prepare); err != nil {
			t.Fatal(err)
		}
		d, err := dispatcher.New(pool, r, dispatcher.Config{})
		if err != nil {
			t.Fatal(err)
		}
		return d.Run(t.Context())
	}
	for name, prepare := range map[string]string{
		"CACHE 20":       `ALTER SEQUENCE postroom.outbox_messages_id_seq CACHE 20`,
		"SET DEFAULT 1,": `ALTER TABLE postroom.outbox_messages ALTER COLUMN generation SET DEFAULT 2`,
		"SET DEFAULT 4":  `ALTER TABLE postroom.outbox_messages ALTER COLUMN lanes DROP DEFAULT`,
		"migrations.Up":  `DROP SCHEMA postroom CASCADE`,
		"migrations.Up ": `DROP TABLE postroom.outbox_messages CASCADE`,
	} {
		t.Run(name, func(t *testing.T) {
			err := run(t, prepare)
			setup, ok := errors.AsType[*dispatcher.SetupError](err)
			if !ok || !strings.Contains(setup.Problem, strings.TrimSpace(name)) {
				t.Errorf("Run returned %v", err)
			}
		})
	}
}

// What a page in flight has settled is recorded before Run returns.
func TestStopDrains(t *testing.T) {
	pool := pgtest.New(t)
	ctx, cancel := context.WithCancel(t.Context())
	r := &recorder{}
	r.before = func(work context.Context, _ []postroom.Message) {
		cancel()
		if work.Err() != nil {
			t.Error("the publisher's context ended with Run's")
		}
	}
	write(t, pool, numbered("orders", 1, 0, 100)...)
	d, err := dispatcher.New(pool, r, dispatcher.Config{PageSize: 10})
	if err != nil {
		t.Fatal(err)
	}
	if err := d.Run(ctx); err != nil {
		t.Fatal(err)
	}
	first := len(r.messages())
	if first == 0 || first == 100 {
		t.Fatalf("%d messages were published before the stop", first)
	}
	var owned int
	if err := pool.QueryRow(t.Context(), `SELECT count(owner) FROM postroom.outbox_lanes`).Scan(&owned); err != nil || owned > 0 {
		t.Errorf("%d lanes are still owned, %v", owned, err)
	}
	r.before = nil
	start(t, pool, r, dispatcher.Config{PageSize: 10})
	waitStored(t, r, 100)
	if n := len(r.messages()); n != 100 {
		t.Errorf("%d publishes of 100 messages: the stop lost track of some", n)
	}
}

// A stop in the middle of a page keeps track of what the page has settled.
func TestStopInsideAPage(t *testing.T) {
	pool := pgtest.New(t)
	r := &recorder{answer: func(m postroom.Message) broker.Result {
		if m.ID == "m50" {
			return broker.Result{Outcome: broker.Unreachable, Err: errors.New("no leader")}
		}
		return broker.Result{Outcome: broker.Stored}
	}}
	write(t, pool, numbered("orders", 1, 0, 100)...)
	stop := start(t, pool, r, dispatcher.Config{})
	waitStored(t, r, 50)
	eventually(t, time.Minute, func() string {
		r.mu.Lock()
		defer r.mu.Unlock()
		if r.calls < 3 {
			return "it has not tried again"
		}
		return ""
	})
	stop()
	again := &recorder{}
	start(t, pool, again, dispatcher.Config{})
	waitStored(t, again, 50)
	if got := again.messages(); got[0].ID != "m50" || len(got) != 50 {
		t.Errorf("after the stop %d messages were published, from %s on; want 50 from m50 on", len(got), got[0].ID)
	}
}

// Pages are bounded in bytes as in messages.
func TestPageBytes(t *testing.T) {
	pool := pgtest.New(t)
	most := 0
	r := &recorder{before: func(_ context.Context, msgs []postroom.Message) {
		bytes := 0
		for _, m := range msgs {
			bytes += len(m.Payload)
		}
		most = max(most, bytes)
	}}
	var msgs []postroom.Message
	for i := range 60 {
		size := 100_000
		if i == 30 {
			size = 1_000_000 // larger than a page
		}
		msgs = append(msgs, postroom.Message{ID: fmt.Sprint("m", i), Topic: "orders", Key: "k", Payload: make([]byte, size)})
	}
	write(t, pool, msgs...)
	start(t, pool, r, dispatcher.Config{PageBytes: 250_000})
	waitStored(t, r, 60)
	for i, id := range r.firsts() {
		if id != fmt.Sprint("m", i) {
			t.Fatalf("%s came in place %d", id, i)
		}
	}
	if most != 1_000_000 {
		t.Errorf("the largest page had %d bytes, want that of the largest message", most)
	}
}

func TestDrainTimeout(t *testing.T) {
	pool := pgtest.New(t)
	ctx, cancel := context.WithCancel(t.Context())
	release := make(chan struct{})
	defer close(release)
	r := &recorder{before: func(context.Context, []postroom.Message) { cancel(); <-release }}
	write(t, pool, numbered("orders", 1, 0, 1)...)
	d, err := dispatcher.New(pool, r, dispatcher.Config{DrainTimeout: 50 * time.Millisecond})
	if err != nil {
		t.Fatal(err)
	}
	if err := d.Run(ctx); !errors.Is(err, dispatcher.ErrDrainTimeout) {
		t.Errorf("Run returned %v", err)
	}
}

// B04: two dispatchers never share a key, and one that hangs stops only itself.
func TestCase_B04_TwoDispatchersKeepOrder(t *testing.T) {
	pool := pgtest.New(t)
	both := &recorder{} // one broker
	slow := sync.OnceFunc(func() {
		select {
		case <-time.After(2 * time.Second):
		case <-t.Context().Done():
		}
	})
	both.before = func(context.Context, []postroom.Message) { slow() }
	cfg := dispatcher.Config{PageSize: 5, PublishTimeout: 200 * time.Millisecond, Lease: 600 * time.Millisecond}
	start(t, pool, both, cfg)
	start(t, pool, both, cfg)
	write(t, pool, numbered("orders", 3, 0, 100)...)
	waitStored(t, both, 100)
	if p := keyOrder(both); p != "" {
		t.Error(p)
	}
}

// B17: a slow publish within its deadline keeps the lease, however many times
// it takes longer than a lease.
func TestCase_B17_LeaseIsRenewedWhilePublishing(t *testing.T) {
	pool := pgtest.New(t)
	r := &recorder{before: func(ctx context.Context, _ []postroom.Message) {
		select { // nearly the timeout, page after page
		case <-time.After(150 * time.Millisecond):
		case <-ctx.Done():
		}
	}}
	cfg := dispatcher.Config{PageSize: 10, PublishTimeout: 250 * time.Millisecond, Lease: 600 * time.Millisecond}
	start(t, pool, r, cfg)
	waitStored(t, r, 0)
	write(t, pool, numbered("orders", 1, 0, 100)...)
	start(t, pool, r, cfg)
	waitStored(t, r, 100)
	if n := len(r.messages()); n != 100 {
		t.Errorf("%d publishes of 100 messages by one owner", n)
	}
}

// B18: a message that becomes visible long after it was written is published
// once, and its time is that of the writing.
func TestCase_B18_AgeCountsFromCommit(t *testing.T) {
	pool := pgtest.New(t)
	r := &recorder{}
	cfg := dispatcher.Config{PublishTimeout: 100 * time.Millisecond, Lease: 300 * time.Millisecond}
	start(t, pool, r, cfg)
	start(t, pool, r, cfg)
	var box outbox.Outbox
	err := pgx.BeginFunc(t.Context(), pool, func(tx pgx.Tx) error {
		if err := box.Write(t.Context(), tx, postroom.Message{ID: "late", Topic: "orders", Key: "k"}); err != nil {
			return err
		}
		_, err := tx.Exec(t.Context(), `SELECT pg_sleep(1)`) // three leases
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	waitStored(t, r, 1)
	write(t, pool, postroom.Message{ID: "next", Topic: "orders", Key: "k"})
	waitStored(t, r, 2)
	got := r.messages()
	if len(got) != 2 {
		t.Fatalf("%d publishes of 2 messages", len(got))
	}
	if age := time.Since(got[0].Time); age < time.Second || age > 20*time.Second {
		t.Errorf("the message says it was written %v ago", age)
	}
}

func TestScheduledMessages(t *testing.T) {
	pgtest.Each(t, func(t *testing.T, s *pgtest.Server) {
		pool := s.New(t)
		r := &recorder{}
		start(t, pool, r, dispatcher.Config{})
		var now time.Time
		if err := pool.QueryRow(t.Context(), `SELECT clock_timestamp()`).Scan(&now); err != nil {
			t.Fatal(err)
		}
		write(t, pool,
			postroom.Message{ID: "later", Topic: "orders", Key: "k", DeliverAt: now.Add(700 * time.Millisecond)},
			postroom.Message{ID: "never", Topic: "orders", Key: "k", DeliverAt: now.Add(time.Hour)},
			postroom.Message{ID: "past", Topic: "orders", Key: "k", DeliverAt: now.Add(-time.Hour)},
			postroom.Message{ID: "now", Topic: "orders", Key: "k", Payload: []byte{}})
		waitStored(t, r, 3)
		if got := strings.Join(r.firsts(), ","); got != "now,past,later" {
			t.Errorf("published %s", got)
		}
		var published time.Time
		err := pool.QueryRow(t.Context(), `SELECT clock_timestamp()`).Scan(&published)
		if err != nil || published.Before(now.Add(700*time.Millisecond)) {
			t.Errorf("published before it was due, %v", err)
		}
	})
}

// Bytes in are bytes out.
func TestFieldsSurvive(t *testing.T) {
	pgtest.Each(t, func(t *testing.T, s *pgtest.Server) {
		pool := s.New(t)
		r := &recorder{}
		start(t, pool, r, dispatcher.Config{})
		odd := postroom.Message{
			ID: "ä b", Topic: "orders", Key: "key\n\"{},\\", Payload: []byte("\x00\xff\n"),
			Headers: []postroom.Header{
				{Name: "a", Value: []byte("1")},
				{Name: "b\"\\,{} NULL", Value: nil},
				{Name: "a", Value: []byte{}},
				{Name: "A", Value: []byte("\x00\xff")},
				{Name: "NULL", Value: []byte("NULL")},
			},
		}
		tombstone := postroom.Message{ID: "nil", Topic: "orders", EmptyKey: true}
		empty := postroom.Message{ID: "empty", Topic: "orders", Payload: []byte{}}
		for _, way := range []struct {
			name  string
			count int
		}{{"one", 1}, {"insert", 3}, {"copy", 400}} {
			t.Run(way.name, func(t *testing.T) {
				msgs := []postroom.Message{odd, tombstone, empty}[:min(way.count, 3)]
				for i := range msgs {
					msgs[i].Topic = way.name
				}
				if way.count == 400 {
					msgs = append(msgs, numbered("fill", 1, 0, 400)...)
				}
				before := len(r.messages())
				write(t, pool, msgs...)
				eventually(t, time.Minute, func() string {
					if n := len(r.messages()) - before; n != len(msgs) {
						return fmt.Sprintf("%d published", n)
					}
					return ""
				})
				for _, want := range msgs {
					if want.Topic != way.name {
						continue
					}
					found := false
					for _, got := range r.messages() {
						if got.ID != want.ID || got.Topic != way.name {
							continue
						}
						found = true
						if got.Time.IsZero() {
							t.Error("no time")
						}
						got.Time = time.Time{}
						if fmt.Sprintf("%#v", got) != fmt.Sprintf("%#v", want) {
							t.Errorf("got  %#v\nwant %#v", got, want)
						}
					}
					if !found {
						t.Errorf("%s is missing", want.ID)
					}
				}
			})
		}
	})
}
