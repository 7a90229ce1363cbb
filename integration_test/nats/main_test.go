// Package nats_test runs the NATS adapter against a real server.
package nats_test

import (
	"context"
	"fmt"
	"log/slog"
	"strings"
	"testing"
	"time"

	natsgo "github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
	"go.uber.org/goleak"

	"github.com/postroom/postroom"
	"github.com/postroom/postroom/broker"
	"github.com/postroom/postroom/broker/nats"
	"github.com/postroom/postroom/internal/throwaway"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// A rig is a server, a proxy before it, and a way to see what is stored.
type rig struct {
	t      testing.TB
	server *throwaway.NATS
	proxy  *proxy
	nc     *natsgo.Conn // past the proxy, not ours
	js     jetstream.JetStream
}

func newRig(t testing.TB) *rig {
	t.Helper()
	s, err := throwaway.StartNATS(t.Context(), throwaway.NATSConfig{})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := s.Close(); err != nil {
			t.Error(err)
		}
	})
	r := &rig{t: t, server: s, proxy: newProxy(t, strings.TrimPrefix(s.URL, "nats://"))}
	r.nc, err = natsgo.Connect(s.URL, natsgo.MaxReconnects(-1), natsgo.ReconnectWait(20*time.Millisecond))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(r.nc.Close)
	if r.js, err = jetstream.New(r.nc); err != nil {
		t.Fatal(err)
	}
	return r
}

// stream makes a stream named like its one subject.
func (r *rig) stream(topic string, change ...func(*jetstream.StreamConfig)) {
	r.t.Helper()
	c := jetstream.StreamConfig{Name: streamName(topic), Subjects: []string{topic}, Storage: jetstream.FileStorage}
	for _, f := range change {
		f(&c)
	}
	if _, err := r.js.CreateStream(r.t.Context(), c); err != nil {
		r.t.Fatal(err)
	}
}

func streamName(topic string) string { return strings.NewReplacer(".", "_", "*", "all").Replace(topic) }

// open opens a bus through the proxy.
func (r *rig) open(change ...func(*nats.Config)) *nats.Bus {
	r.t.Helper()
	c := config()
	for _, f := range change {
		f(&c)
	}
	b, err := nats.Open(r.t.Context(), r.proxy.url(), c)
	if err != nil {
		r.t.Fatal(err)
	}
	r.t.Cleanup(func() { _ = b.Close() })
	return b
}

func config() nats.Config {
	return nats.Config{
		PublishTimeout: 2 * time.Second,
		AckWait:        time.Second,
		Logger:         slog.New(slog.DiscardHandler),
		Options:        []natsgo.Option{natsgo.ReconnectWait(20 * time.Millisecond), natsgo.ReconnectJitter(0, 0)},
	}
}

func messages(topic, key string, from, to int) []postroom.Message {
	var msgs []postroom.Message
	for i := from; i <= to; i++ {
		id := fmt.Sprintf("%s-%d", topic, i)
		if key != "" {
			id = fmt.Sprintf("%s-%s-%d", topic, key, i)
		}
		msgs = append(msgs, postroom.Message{ID: id, Topic: topic, Key: key, Payload: fmt.Append(nil, i)})
	}
	return msgs
}

func (r *rig) store(p broker.Publisher, msgs ...postroom.Message) {
	r.t.Helper()
	for i, res := range p.Publish(r.t.Context(), msgs) {
		if res.Outcome != broker.Stored {
			r.t.Fatalf("message %d is %v: %v", i, res.Outcome, res.Err)
		}
	}
}

// stored returns the ids in a stream, in its order.
func (r *rig) stored(topic string) (ids []string) {
	r.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	s, err := r.js.Stream(ctx, streamName(topic))
	if err != nil {
		r.t.Fatal(err)
	}
	state := s.CachedInfo().State
	for seq := state.FirstSeq; seq <= state.LastSeq && state.Msgs > 0; seq++ {
		if m, err := s.GetMsg(ctx, seq); err == nil {
			ids = append(ids, m.Header.Get("postroom-id"))
		}
	}
	return ids
}

// until polls a condition.
func until(t testing.TB, what string, ok func() bool) {
	t.Helper()
	deadline := time.NewTimer(time.Minute)
	defer deadline.Stop()
	tick := time.NewTicker(5 * time.Millisecond)
	defer tick.Stop()
	for !ok() {
		select {
		case <-tick.C:
		case <-deadline.C:
			t.Fatalf("did not come about: %s", what)
		}
	}
}

// A member is a running subscription.
type member struct {
	t       testing.TB
	arrived chan broker.Delivery
	trouble chan error
	ended   chan error
	cancel  context.CancelFunc
}

func (r *rig) subscribe(b *nats.Bus, topic, group string, maxInFlight int) *member {
	r.t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	m := &member{
		t: r.t, cancel: cancel, ended: make(chan error, 1),
		arrived: make(chan broker.Delivery, maxInFlight), trouble: make(chan error, 1000),
	}
	s := broker.Subscription{Group: group, Topic: topic, MaxInFlight: maxInFlight, Trouble: func(err error) {
		select {
		case m.trouble <- err:
		default:
		}
	}}
	done := make(chan struct{})
	go func() {
		defer close(done)
		m.ended <- b.Subscribe(ctx, s, func(d broker.Delivery) { m.arrived <- d })
	}()
	r.t.Cleanup(func() {
		cancel()
		_ = b.Close()
		<-done
	})
	return m
}

func (m *member) next() broker.Delivery {
	m.t.Helper()
	select {
	case d := <-m.arrived:
		return d
	case err := <-m.ended:
		m.ended <- err
		m.t.Fatalf("Subscribe returned: %v", err)
	case <-time.After(time.Minute):
		m.t.Fatal("no message came")
	}
	return nil
}

func (m *member) ack(d broker.Delivery) {
	m.t.Helper()
	if err := d.Ack(context.Background()); err != nil {
		m.t.Fatal(err)
	}
}

// stop ends the subscription, which must return nil.
func (m *member) stop() {
	m.t.Helper()
	m.cancel()
	select {
	case err := <-m.ended:
		m.ended <- err
		if err != nil {
			m.t.Fatalf("Subscribe = %v", err)
		}
	case <-time.After(time.Minute):
		m.t.Fatal("Subscribe does not return")
	}
}
