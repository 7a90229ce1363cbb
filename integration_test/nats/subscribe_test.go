package nats_test

import (
	"context"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	natsgo "github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/postroom/postroom/broker"
	"github.com/postroom/postroom/broker/nats"
)

// B66: what waits in a member's queue is extended like what runs, so that no
// other member is given it.
func TestCase_B66_WaitingDeliveriesAreExtended(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	r.stream("orders")
	r.store(r.open(), messages("orders", "", 1, 12)...)
	var calls atomic.Int64
	done := make(chan struct{}, 100)
	for range 2 {
		m := r.subscribe(r.open(), "orders", "g", 12)
		go func() {
			for { // one at a time: the last waits for several AckWaits
				var d broker.Delivery
				select {
				case d = <-m.arrived:
				case <-t.Context().Done():
					return
				}
				calls.Add(1)
				select {
				case <-time.After(400 * time.Millisecond):
				case <-t.Context().Done():
					return
				}
				_ = d.Ack(context.Background())
				done <- struct{}{}
			}
		}()
	}
	for range 12 {
		select {
		case <-done:
		case <-time.After(time.Minute):
			t.Fatalf("%d handled", calls.Load())
		}
	}
	select {
	case <-done:
		t.Error("a message was handled twice")
	case <-time.After(1500 * time.Millisecond):
	}
	if n := calls.Load(); n != 12 {
		t.Errorf("%d handler calls for 12 messages", n)
	}
}

// B67, the adapter's part: a refusal always carries a delay, and a consumer
// that would drop messages after some deliveries is refused.
func TestCase_B67_NoBareRefusal(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	r.stream("orders")
	b := r.open()
	r.store(b, messages("orders", "", 1, 1)...)
	var bare, delayed atomic.Int64
	r.proxy.filtered(func(f *frame) bool {
		if body := string(f.body); strings.HasPrefix(body, "-NAK") {
			if strings.Contains(body, `"delay":`) {
				delayed.Add(1)
			} else {
				bare.Add(1)
			}
		}
		return true
	})
	m := r.subscribe(b, "orders", "g", 10)
	for i := 1; i <= 20; i++ {
		d := m.next()
		if d.Deliveries() != i {
			t.Fatalf("delivery %d says it is number %d", i, d.Deliveries())
		}
		if err := d.Retry(t.Context(), 0); err != nil {
			t.Fatal(err)
		}
	}
	m.ack(m.next())
	m.stop()
	if bare.Load() > 0 || delayed.Load() != 20 {
		t.Errorf("%d bare refusals, %d with a delay", bare.Load(), delayed.Load())
	}

	s, err := r.js.Stream(t.Context(), "orders")
	if err != nil {
		t.Fatal(err)
	}
	_, err = s.UpdateConsumer(t.Context(), jetstream.ConsumerConfig{
		Durable: "g_orders", FilterSubject: "orders", AckPolicy: jetstream.AckExplicitPolicy, AckWait: time.Second,
		MaxDeliver: 5, MaxAckPending: 10_000, Metadata: consumerMetadata(t, s),
	})
	if err != nil {
		t.Fatal(err)
	}
	err = b.Subscribe(t.Context(), broker.Subscription{Group: "g", Topic: "orders", MaxInFlight: 1}, func(broker.Delivery) {})
	if err == nil || !strings.Contains(err.Error(), "max_deliver is 5") {
		t.Errorf("Subscribe: %v", err)
	}
}

func consumerMetadata(t *testing.T, s jetstream.Stream) map[string]string {
	t.Helper()
	c, err := s.Consumer(t.Context(), "g_orders")
	if err != nil {
		t.Fatal(err)
	}
	return c.CachedInfo().Config.Metadata
}

// B72: whatever ends the flow of messages, it resumes by itself.
func TestCase_B72_ConsumptionResumes(t *testing.T) {
	t.Parallel()
	for name, storage := range map[string]jetstream.StorageType{"file": jetstream.FileStorage, "memory": jetstream.MemoryStorage} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r := newRig(t)
			mk := func() {
				r.stream("orders", func(c *jetstream.StreamConfig) { c.Storage = storage })
			}
			mk()
			b := r.open(func(c *nats.Config) { c.PublishTimeout = time.Second })
			m := r.subscribe(b, "orders", "g", 10)
			next := 0
			flows := func(after string) {
				t.Helper()
				next++
				msg := messages("orders", "", next, next)
				until(t, "publishing after "+after, func() bool {
					return b.Publish(t.Context(), msg)[0].Outcome == broker.Stored
				})
				for {
					d := m.next()
					m.ack(d)
					if d.Message().ID == msg[0].ID {
						return // what was acked before may come again: a new consumer starts at the first
					}
				}
			}
			flows("start")
			if err := r.js.DeleteConsumer(t.Context(), "orders", "g_orders"); err != nil {
				t.Fatal(err)
			}
			flows("its consumer was deleted")
			if err := r.js.DeleteStream(t.Context(), "orders"); err != nil {
				t.Fatal(err)
			}
			mk()
			flows("its stream was deleted and made again")
			r.proxy.cut()
			flows("the connection was cut")
			r.server.Stop()
			if err := r.server.Start(context.Background()); err != nil {
				t.Fatal(err)
			}
			if storage == jetstream.MemoryStorage {
				until(t, "a connection", r.nc.IsConnected)
				mk()
			}
			flows("the server was restarted")
			m.stop()
		})
	}
}

// B75: the id is found in any case; the exact spelling wins.
func TestCase_B75_HeaderCase(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	r.stream("orders")
	raw := func(pairs ...string) {
		t.Helper()
		m := natsgo.NewMsg("orders")
		for i := 0; i < len(pairs); i += 2 {
			m.Header[pairs[i]] = append(m.Header[pairs[i]], pairs[i+1])
		}
		if _, err := r.js.PublishMsg(t.Context(), m); err != nil {
			t.Fatal(err)
		}
	}
	raw("postroom-id", "1")
	raw("Postroom-Id", "2")
	raw("POSTROOM-ID", "3")
	raw("POSTROOM-ID", "x", "postroom-id", "4", "Postroom-Id", "y")
	raw("message-id", "z")
	m := r.subscribe(r.open(), "orders", "g", 10)
	var got []string
	for range 5 {
		d := m.next()
		m.ack(d)
		got = append(got, d.Message().ID)
	}
	if want := []string{"1", "2", "3", "4", ""}; !slices.Equal(got, want) {
		t.Errorf("ids %q, want %q", got, want)
	}
	m.stop()
	swallow, _ := once(func(*frame) bool { return false })
	var wrong atomic.Int64
	r.proxy.filtered(func(f *frame) bool {
		if f.op() == "HPUB" && !strings.Contains(string(f.body), "\r\npostroom-id: ") {
			wrong.Add(1)
		}
		return swallow(f)
	})
	r.store(r.open(), messages("orders", "k", 1, 3)...)
	if wrong.Load() > 0 {
		t.Errorf("%d messages were sent without the exact spelling", wrong.Load())
	}
}
