package kafka_test

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kmsg"

	"github.com/postroom/postroom"
	"github.com/postroom/postroom/broker"
)

// patience is how long tests wait for what must come.
const patience = 60 * time.Second

// A consumer is a running Subscribe call.
type consumer struct {
	t       testing.TB
	cancel  context.CancelFunc
	arrived chan broker.Delivery
	ended   chan error

	mu      sync.Mutex
	trouble []error
}

func consume(t testing.TB, s broker.Subscriber, topic string, maxInFlight int) *consumer {
	t.Helper()
	return consumeAs(t, s, "group-"+topic, topic, maxInFlight)
}

func consumeAs(t testing.TB, s broker.Subscriber, group, topic string, maxInFlight int) *consumer {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	c := &consumer{t: t, cancel: cancel, arrived: make(chan broker.Delivery, maxInFlight), ended: make(chan error, 1)}
	sub := broker.Subscription{Group: group, Topic: topic, MaxInFlight: maxInFlight, Trouble: c.noteTrouble}
	go func() { c.ended <- s.Subscribe(ctx, sub, func(d broker.Delivery) { c.arrived <- d }) }()
	t.Cleanup(cancel)
	return c
}

func (c *consumer) noteTrouble(err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.trouble = append(c.trouble, err)
}

// troubles returns what Trouble was told.
func (c *consumer) troubles() []error {
	c.mu.Lock()
	defer c.mu.Unlock()
	return slices.Clone(c.trouble)
}

func (c *consumer) next() broker.Delivery {
	c.t.Helper()
	select {
	case d := <-c.arrived:
		return d
	case err := <-c.ended:
		c.t.Fatalf("Subscribe returned %v", err)
	case <-time.After(patience):
		c.t.Fatalf("nothing came within %v; trouble: %v", patience, c.troubles())
	}
	return nil
}

// take receives n messages, and acks them.
func (c *consumer) take(n int) []postroom.Message {
	c.t.Helper()
	msgs := make([]postroom.Message, n)
	for i := range msgs {
		d := c.next()
		msgs[i] = d.Message()
		ack(c.t, d)
	}
	return msgs
}

// stop ends Subscribe, which must return nil.
func (c *consumer) stop() {
	c.t.Helper()
	c.cancel()
	c.wait(nil)
}

func (c *consumer) wait(want error) {
	c.t.Helper()
	select {
	case err := <-c.ended:
		if err != want { //nolint:errorlint // nil
			c.t.Fatalf("Subscribe = %v, want %v", err, want)
		}
	case <-time.After(patience):
		c.t.Fatalf("Subscribe did not return within %v", patience)
	}
}

func ack(t testing.TB, d broker.Delivery) {
	t.Helper()
	if err := d.Ack(t.Context()); err != nil {
		t.Fatal(err)
	}
}

func ids(msgs []postroom.Message) (ids []string) {
	for _, m := range msgs {
		ids = append(ids, m.ID)
	}
	return ids
}

func wantIDs(t testing.TB, msgs []postroom.Message, want ...string) {
	t.Helper()
	if got := ids(msgs); !slices.Equal(got, want) {
		t.Fatalf("messages %v, want %v", got, want)
	}
}

// committed returns the group's offset of a partition, -1 for none.
func (r *rig) committed(topic string, partition int32) int64 {
	r.t.Helper()
	req := kmsg.NewPtrOffsetFetchRequest()
	req.Group = "group-" + topic
	rt := kmsg.NewOffsetFetchRequestTopic()
	rt.Topic, rt.Partitions = topic, []int32{partition}
	req.Topics = append(req.Topics, rt)
	rg := kmsg.NewOffsetFetchRequestGroup()
	rg.Group = req.Group
	rgt := kmsg.NewOffsetFetchRequestGroupTopic()
	rgt.Topic, rgt.Partitions = topic, []int32{partition}
	rg.Topics = append(rg.Topics, rgt)
	req.Groups = append(req.Groups, rg)
	res, err := req.RequestWith(r.t.Context(), r.admin)
	if kerr.IsRetriable(err) {
		return -1 // the group has no coordinator yet
	}
	if err != nil {
		r.t.Error(err)
		return -1
	}
	for _, g := range res.Groups {
		for _, t := range g.Topics {
			for _, p := range t.Partitions {
				return p.Offset
			}
		}
	}
	for _, t := range res.Topics {
		for _, p := range t.Partitions {
			return p.Offset
		}
	}
	return -1
}

func (r *rig) untilCommitted(topic string, partition int32, offset int64) {
	r.t.Helper()
	last := int64(-2)
	until(r.t, fmt.Sprintf("offset %d is committed", offset), func() bool {
		last = r.committed(topic, partition)
		if last > offset {
			r.t.Fatalf("offset %d is committed, want %d", last, offset)
		}
		return last == offset
	})
}
