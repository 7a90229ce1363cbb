package franz_test

import (
	"context"
	"testing"
	"time"

	"github.com/twmb/franz-go/pkg/kfake"

	"github.com/postroom/postroom/broker"
	"github.com/postroom/postroom/broker/brokertest"
	"github.com/postroom/postroom/broker/franz"
)

func TestConformance(t *testing.T) {
	r := newRig(t, kfake.NumBrokers(1), kfake.BrokerConfigs(map[string]string{"message.max.bytes": "100000"}))
	conformance(t, r)
}

func conformance(t *testing.T, r *rig) {
	t.Helper()
	all := newGate(t) // everybody's connections
	brokertest.Run(t, brokertest.Harness{
		Publisher: func(ctx context.Context) (broker.Publisher, error) {
			c := config()
			c.Dial = all.dial
			return franz.Open(ctx, r.brokers, c)
		},
		Subscriber: func(ctx context.Context) (broker.Subscriber, func(), error) {
			own := newGate(t)
			own.next = all.dial
			c := config()
			c.Dial = own.dial
			b, err := franz.Open(ctx, r.brokers, c)
			if err != nil {
				return nil, nil, err
			}
			return b, func() {
				own.refuse.Store(true) // so that it cannot say goodbye
				own.cut()
				_ = b.Close()
			}, nil
		},
		CreateTopic:  func(ctx context.Context, name string) error { return r.createTopic(ctx, name, 3) },
		TopicExists:  r.topicExists,
		InvalidTopic: "orders/new",
		TooLarge:     100_000,
		HeaderOrder:  true,
		Outage: func(context.Context) (func() error, error) {
			all.refuse.Store(true)
			all.cut()
			return func() error { all.refuse.Store(false); return nil }, nil
		},
		ServerPackages: []string{"franz-go/pkg/kfake", "franz_test.(*rig)"},
		Patience:       time.Minute,
		Quiet:          700 * time.Millisecond,
		Skip: map[string]string{
			"FailureStopsItsKey": "a batch of a partition fails as a whole; B97 tests it",
		},
	})
}
