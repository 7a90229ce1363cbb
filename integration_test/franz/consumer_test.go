package franz_test

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/twmb/franz-go/pkg/kadm"
	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kmsg"

	"github.com/postroom/postroom/broker"
	"github.com/postroom/postroom/broker/franz"
)

// A consumer is one running subscription of a bus of its own.
type consumer struct {
	t       testing.TB
	bus     *franz.Bus
	gate    *gate
	stop    context.CancelFunc
	ended   chan error
	arrived chan broker.Delivery
	trouble chan error
}

// consume subscribes to topic t as group g.
func (r *rig) consume(maxInFlight int, change ...func(*franz.Config)) *consumer {
	r.t.Helper()
	return r.consumeAs("g", "t", maxInFlight, change...)
}

func (r *rig) consumeAs(group, topic string, maxInFlight int, change ...func(*franz.Config)) *consumer {
	r.t.Helper()
	gate := newGate(r.t)
	bus := r.open(append([]func(*franz.Config){func(c *franz.Config) { c.Dial = gate.dial }}, change...)...)
	ctx, stop := context.WithCancel(r.t.Context())
	c := &consumer{
		t: r.t, bus: bus, gate: gate, stop: stop, ended: make(chan error, 1),
		arrived: make(chan broker.Delivery, maxInFlight), trouble: make(chan error, 1000),
	}
	go func() {
		c.ended <- bus.Subscribe(ctx, broker.Subscription{
			Group: group, Topic: topic, MaxInFlight: maxInFlight, Trouble: func(err error) { c.trouble <- err },
		}, func(d broker.Delivery) { c.arrived <- d })
	}()
	return c
}

func (c *consumer) next() broker.Delivery {
	c.t.Helper()
	select {
	case d := <-c.arrived:
		return d
	case err := <-c.ended:
		c.t.Fatalf("Subscribe = %v, want a delivery", err)
	case <-time.After(time.Minute):
		c.t.Fatal("nothing is delivered")
	}
	return nil
}

// take receives and acks n deliveries, and returns their ids.
func (c *consumer) take(n int) (ids []string) {
	c.t.Helper()
	for range n {
		d := c.next()
		ids = append(ids, d.Message().ID)
		c.ack(d)
	}
	return ids
}

func (c *consumer) ack(ds ...broker.Delivery) {
	c.t.Helper()
	for _, d := range ds {
		if err := d.Ack(c.t.Context()); err != nil {
			c.t.Fatal(err)
		}
	}
}

// end waits for Subscribe, which must return within the time.
func (c *consumer) end(within time.Duration) error {
	c.t.Helper()
	select {
	case err := <-c.ended:
		return err
	case <-time.After(within):
		c.t.Fatalf("Subscribe still runs after %v", within)
		return nil
	}
}

func (c *consumer) stopped() {
	c.t.Helper()
	c.stop()
	if err := c.end(5 * time.Second); err != nil {
		c.t.Fatal(err)
	}
}

// ackAll stops, and acks what has arrived and still does.
func (c *consumer) ackAll() {
	c.t.Helper()
	c.stop()
	for {
		select {
		case d := <-c.arrived:
			c.ack(d)
		case err := <-c.ended:
			if err != nil {
				c.t.Fatal(err)
			}
			return
		}
	}
}

// crash drops the connections without a goodbye.
func (c *consumer) crash() {
	c.gate.refuse.Store(true)
	c.gate.cut()
	_ = c.bus.Close()
	<-c.ended
}

// committed returns the offset that group g has committed of topic t, or -1.
func (r *rig) committed(partition int32) int64 {
	r.t.Helper()
	return r.committedAs("g", "t", partition)
}

func (r *rig) committedAs(group, topic string, partition int32) int64 {
	r.t.Helper()
	offsets, err := kadm.NewClient(r.admin).FetchOffsets(r.t.Context(), group)
	if err != nil && !errors.Is(err, kerr.GroupIDNotFound) {
		r.t.Fatal(err)
	}
	if o, ok := offsets.Lookup(topic, partition); ok {
		return o.At
	}
	return -1
}

func (r *rig) wantCommitted(partition int32, want int64) {
	r.t.Helper()
	until(r.t, "the offset is committed", func() bool { return r.committed(partition) >= want })
	if got := r.committed(partition); got != want {
		r.t.Fatalf("offset %d of partition %d is committed, want %d", got, partition, want)
	}
}

func (r *rig) deleteTopic(name string) {
	r.t.Helper()
	req := kmsg.NewPtrDeleteTopicsRequest()
	topic := kmsg.NewDeleteTopicsRequestTopic()
	topic.Topic = &name
	req.Topics, req.TopicNames = append(req.Topics, topic), []string{name}
	if _, err := req.RequestWith(r.t.Context(), r.admin); err != nil {
		r.t.Fatal(err)
	}
}

// deleteRecords moves the start of a partition's log.
func (r *rig) deleteRecords(partition int32, before int64) {
	r.t.Helper()
	req := kmsg.NewPtrDeleteRecordsRequest()
	topic, p := kmsg.NewDeleteRecordsRequestTopic(), kmsg.NewDeleteRecordsRequestTopicPartition()
	p.Partition, p.Offset = partition, before
	topic.Topic, topic.Partitions = "t", append(topic.Partitions, p)
	req.Topics = append(req.Topics, topic)
	res, err := req.RequestWith(r.t.Context(), r.admin)
	if err == nil {
		err = kerr.ErrorForCode(res.Topics[0].Partitions[0].ErrorCode)
	}
	if err != nil {
		r.t.Fatal(err)
	}
}

func (r *rig) addPartitions(to int32) {
	r.t.Helper()
	req := kmsg.NewPtrCreatePartitionsRequest()
	topic := kmsg.NewCreatePartitionsRequestTopic()
	topic.Topic, topic.Count = "t", to
	req.Topics = append(req.Topics, topic)
	res, err := req.RequestWith(r.t.Context(), r.admin)
	if err == nil {
		err = kerr.ErrorForCode(res.Topics[0].ErrorCode)
	}
	if err != nil {
		r.t.Fatal(err)
	}
}
