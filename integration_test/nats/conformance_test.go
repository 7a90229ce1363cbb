package nats_test

import (
	"context"
	"errors"
	"sync"
	"testing"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/postroom/postroom/broker"
	"github.com/postroom/postroom/broker/brokertest"
	"github.com/postroom/postroom/broker/nats"
)

func TestConformance(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	conformance(t, r, config(), func(topic string) []string { return []string{topic} })
}

func conformance(t *testing.T, r *rig, c nats.Config, subjects func(string) []string) {
	var (
		mu      sync.Mutex
		failing = map[string]bool{}
	)
	// A message that is to fail goes to a subject that no stream has.
	r.proxy.filtered(func(f *frame) bool {
		mu.Lock()
		defer mu.Unlock()
		if id := f.id(); id != "" && f.op() == "HPUB" && failing[id] {
			delete(failing, id)
			f.fields[1] = "nowhere"
		}
		return true
	})
	exists := func(ctx context.Context, name string) (bool, error) {
		_, err := r.js.StreamNameBySubject(ctx, name)
		if errors.Is(err, jetstream.ErrStreamNotFound) {
			return false, nil
		}
		return err == nil, err
	}
	brokertest.Run(t, brokertest.Harness{
		Publisher: func(ctx context.Context) (broker.Publisher, error) {
			return nats.Open(ctx, r.proxy.url(), c)
		},
		Subscriber: func(ctx context.Context) (broker.Subscriber, func(), error) {
			b, err := nats.Open(ctx, r.proxy.url(), c)
			if err != nil {
				return nil, nil, err
			}
			return b, func() { _ = b.Close() }, nil
		},
		CreateTopic: func(ctx context.Context, name string) error {
			_, err := r.js.CreateStream(ctx, jetstream.StreamConfig{
				Name: streamName(name), Subjects: subjects(name), MaxMsgSize: 100_000,
			})
			return err
		},
		TopicExists: func(ctx context.Context, name string) (bool, error) {
			one, err := exists(ctx, name)
			two, err2 := exists(ctx, name+".0")
			return one || two, errors.Join(err, err2)
		},
		InvalidTopic: "orders.*",
		TooLarge:     100_000, // with headers it is more
		FailOnce: func(_, id string) error {
			mu.Lock()
			defer mu.Unlock()
			failing[id] = true
			return nil
		},
		Outage: func(context.Context) (func() error, error) {
			r.server.Stop()
			return func() error { return r.server.Start(context.Background()) }, nil
		},
		ServerPackages: []string{"github.com/nats-io/nats-server", "nats_test.(*proxy)"},

		Quiet: 1300 * time.Millisecond, // more than AckWait
	})
}
