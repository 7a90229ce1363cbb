package memory_test

import (
	"context"
	"errors"
	"sync"
	"testing"

	"github.com/postroom/postroom"
	"github.com/postroom/postroom/broker"
	"github.com/postroom/postroom/broker/brokertest"
	"github.com/postroom/postroom/broker/memory"
)

func TestConformance(t *testing.T) {
	b := memory.New("any")
	var (
		mu      sync.Mutex
		failing = map[string]bool{}
		away    bool
	)
	b.SetFault(func(m postroom.Message) error {
		mu.Lock()
		defer mu.Unlock()
		if away || failing[m.ID] {
			delete(failing, m.ID)
			return errors.New("away")
		}
		return nil
	})
	brokertest.Run(t, brokertest.Harness{
		Publisher: func(context.Context) (broker.Publisher, error) { return b.Connect(), nil },
		Subscriber: func(context.Context) (broker.Subscriber, func(), error) {
			c := b.Connect()
			return c, func() { _ = c.Close() }, nil
		},
		// Not under mu: the fault above takes it while the broker is locked.
		CreateTopic: func(_ context.Context, name string) error { b.Create(name); return nil },
		TopicExists: func(ctx context.Context, name string) (bool, error) {
			r := b.Publish(ctx, []postroom.Message{{Topic: name}})[0]
			return r.Outcome == broker.Stored, nil
		},
		InvalidTopic: "a\x00b",
		HeaderOrder:  true,
		FailOnce: func(_, id string) error {
			mu.Lock()
			defer mu.Unlock()
			failing[id] = true
			return nil
		},
		Outage: func(context.Context) (func() error, error) {
			set := func(v bool) {
				mu.Lock()
				defer mu.Unlock()
				away = v
			}
			set(true)
			return func() error { set(false); return nil }, nil
		},
		Skip: map[string]string{"OversizeIsRefused": "memory takes messages of any size"},
	})
}
