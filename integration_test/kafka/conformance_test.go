package kafka_test

import (
	"context"
	"testing"
	"time"

	"github.com/twmb/franz-go/pkg/kfake"

	"github.com/postroom/postroom/broker"
	"github.com/postroom/postroom/broker/brokertest"
	"github.com/postroom/postroom/broker/kafka"
)

// All promises, with three partitions for each topic. No other test may run beside
// the case that counts goroutines, so these tests are not parallel.
func TestConformance(t *testing.T) {
	r := newRig(t, kfake.NumBrokers(1), kfake.BrokerConfigs(map[string]string{"message.max.bytes": "100000"}))
	conformance(t, r)
}

func conformance(t *testing.T, r *rig) {
	t.Helper()
	all := newGate(t) // everybody's connections
	open := func(ctx context.Context) (*kafka.Bus, error) {
		c := config()
		c.Dial = all.dial
		return kafka.Open(ctx, r.brokers, c)
	}
	brokertest.Run(t, brokertest.Harness{
		Publisher: func(ctx context.Context) (broker.Publisher, error) { return open(ctx) },
		Subscriber: func(ctx context.Context) (broker.Subscriber, func(), error) {
			b, err := open(ctx)
			if err != nil {
				return nil, nil, err
			}
			return b, func() { _ = b.Close() }, nil
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
		Patience:       time.Minute,
		Quiet:          600 * time.Millisecond,
		ServerPackages: []string{"github.com/twmb/franz-go/pkg/kfake", "github.com/twmb/franz-go/pkg/kgo"},
		Skip: map[string]string{
			"FailureStopsItsKey": "a batch of a partition fails as a whole; B97 tests it",
		},
	})
}
