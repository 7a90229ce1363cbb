package kafka_test

import (
	"context"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/twmb/franz-go/pkg/kfake"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/postroom/postroom"
	"github.com/postroom/postroom/broker"
	"github.com/postroom/postroom/broker/brokertest"
	"github.com/postroom/postroom/broker/kafka"
)

// The publisher's promises, with a reader of another library in the place of a
// subscriber of ours.
func TestConformance(t *testing.T) {
	t.Parallel()
	r := newRig(t, kfake.NumBrokers(1), kfake.BrokerConfigs(map[string]string{"message.max.bytes": "100000"}))
	conformance(t, r)
}

func conformance(t *testing.T, r *rig) {
	t.Helper()
	const subscribes = "the adapter does not subscribe"
	skip := map[string]string{
		"FailureStopsItsKey": "a batch of a partition fails as a whole; B97 tests it",
		"Outage":             "needs a subscriber; TestOutage tests the publisher",
		"NoGoroutineLeft":    "needs a subscriber; B59 tests the publisher",
	}
	for _, name := range strings.Fields(`NewGroupStartsAtTheFirst SubscribeUnknownTopic PositionAndCount RetryRedelivers
		AckIsNotRedelivered KilledSubscriber GroupsAreIndependent MembersShare SlowHandlerKeepsItsMessage Drain MaxInFlight`) {
		skip[name] = subscribes
	}
	brokertest.Run(t, brokertest.Harness{
		Publisher: func(ctx context.Context) (broker.Publisher, error) {
			return kafka.Open(ctx, r.brokers, config())
		},
		Subscriber: func(context.Context) (broker.Subscriber, func(), error) {
			return reader{r}, func() {}, nil
		},
		CreateTopic:  func(ctx context.Context, name string) error { return r.createTopic(ctx, name, 3) },
		TopicExists:  r.topicExists,
		InvalidTopic: "orders/new",
		TooLarge:     100_000,
		HeaderOrder:  true,
		Skip:         skip,
	})
}

// A reader delivers a topic's records from the first on, by franz-go.
type reader struct{ r *rig }

func (rd reader) Subscribe(ctx context.Context, s broker.Subscription, deliver func(broker.Delivery)) error {
	cl, err := kgo.NewClient(kgo.SeedBrokers(rd.r.brokers...), kgo.ConsumeTopics(s.Topic),
		kgo.ConsumeResetOffset(kgo.NewOffset().AtStart()))
	if err != nil {
		return err
	}
	defer cl.Close()
	room := make(chan struct{}, s.MaxInFlight)
	for {
		for _, rec := range cl.PollFetches(ctx).Records() {
			select {
			case room <- struct{}{}:
				deliver(&arrival{rec: rec, room: room})
			case <-ctx.Done():
			}
		}
		if ctx.Err() != nil {
			return nil
		}
	}
}

// An arrival is one record of a reader.
type arrival struct {
	rec  *kgo.Record
	room chan struct{}
	once sync.Once
}

func (a *arrival) Message() postroom.Message {
	m := postroom.Message{Topic: a.rec.Topic, Key: string(a.rec.Key), Payload: slices.Clone(a.rec.Value)}
	m.EmptyKey = a.rec.Key != nil && m.Key == ""
	for _, h := range a.rec.Headers {
		switch h.Key {
		case "postroom-id":
			m.ID = string(h.Value)
		case "postroom-operation":
			m.Operation = string(h.Value)
		case "postroom-time":
			m.Time, _ = time.Parse(time.RFC3339Nano, string(h.Value))
		default:
			m.Headers = append(m.Headers, postroom.Header{Name: h.Key, Value: slices.Clone(h.Value)})
		}
	}
	return m
}

func (a *arrival) Position() broker.Position {
	return broker.Position{Topic: a.rec.Topic, Partition: a.rec.Partition, Offset: uint64(a.rec.Offset)}
}

func (*arrival) Deliveries() int       { return 0 }
func (*arrival) Lost() <-chan struct{} { return nil }
func (a *arrival) Ack(context.Context) error {
	a.once.Do(func() { <-a.room })
	return nil
}
func (a *arrival) Retry(ctx context.Context, _ time.Duration) error { return a.Ack(ctx) }
