package kafka_test

import (
	"context"
	"fmt"
	"testing"
	"time"

	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/twmb/franz-go/pkg/kmsg"
	"github.com/twmb/franz-go/pkg/kversion"

	"github.com/postroom/postroom/broker/kafka"
)

// transaction is a producer that writes in transactions.
func (r *rig) transaction(name string) *kgo.Client {
	r.t.Helper()
	return newClient(r.t, r.brokers, kgo.TransactionalID(name), kgo.RecordPartitioner(kgo.ManualPartitioner()),
		kgo.TransactionTimeout(time.Minute), kgo.ProducerLinger(0))
}

// write stores one record and waits until it is.
func write(t testing.TB, cl *kgo.Client, topic, id string) int64 {
	t.Helper()
	rec := &kgo.Record{Topic: topic, Value: make([]byte, 100), Headers: header(id)}
	if err := cl.ProduceSync(t.Context(), rec).FirstErr(); err != nil {
		t.Fatal(err)
	}
	return rec.Offset
}

func end(t testing.TB, cl *kgo.Client, commit kgo.TransactionEndTry) {
	t.Helper()
	if err := cl.EndTransaction(t.Context(), commit); err != nil {
		t.Fatal(err)
	}
}

func begin(t testing.TB, cl *kgo.Client) {
	t.Helper()
	if err := cl.BeginTransaction(); err != nil {
		t.Fatal(err)
	}
}

// B95: what is read is exactly what was committed and what no transaction holds,
// wherever reading begins and however much is fetched at a time.
func TestB95OnlyCommittedIsRead(t *testing.T) {
	t.Parallel()
	r := sharedRig(t)
	const topic = "b95"
	r.topic(topic, 1)
	plain := newClient(t, r.brokers, kgo.RecordPartitioner(kgo.ManualPartitioner()))
	one, two := r.transaction("one"), r.transaction("two")
	type visible struct {
		offset int64
		id     string
	}
	var want []visible
	see := func(offset int64, id string) { want = append(want, visible{offset, id}) }
	for round := range 3 {
		// Two transactions interleave, and a producer without one writes in between.
		for _, outcome := range []struct{ one, two kgo.TransactionEndTry }{
			{kgo.TryCommit, kgo.TryAbort}, {kgo.TryAbort, kgo.TryCommit}, {kgo.TryAbort, kgo.TryAbort},
		} {
			begin(t, one)
			begin(t, two)
			for i := range 3 {
				id := fmt.Sprintf("%d-%v-%v-%d", round, outcome.one, outcome.two, i)
				if o := write(t, one, topic, "one "+id); outcome.one == kgo.TryCommit {
					see(o, "one "+id)
				}
				if o := write(t, two, topic, "two "+id); outcome.two == kgo.TryCommit {
					see(o, "two "+id)
				}
				see(write(t, plain, topic, "plain "+id), "plain "+id)
			}
			end(t, two, outcome.two)
			end(t, one, outcome.one)
		}
	}
	last := write(t, plain, topic, "last")
	see(last, "last")
	after := func(offset int64) (ids []string) {
		for _, v := range want {
			if v.offset >= offset {
				ids = append(ids, v.id)
			}
		}
		return ids
	}
	for _, size := range []int{1 << 10, 1500, 3 << 10, 10 << 10, 1 << 20} {
		bus := r.open(func(c *kafka.Config) { c.PrefetchBytes = size })
		c := consumeAs(t, bus, fmt.Sprint("size ", size), topic, 10)
		wantIDs(t, c.take(len(want)), after(0)...)
		c.stop()
	}
	bus := r.open(func(c *kafka.Config) { c.PrefetchBytes = 2 << 10 })
	for offset := int64(0); offset <= last; offset += 3 {
		group := fmt.Sprint("from ", offset)
		r.commit(group, topic, offset)
		c := consumeAs(t, bus, group, topic, 10)
		ids := after(offset)
		wantIDs(t, c.take(len(ids)), ids...)
		c.stop()
	}

	// An open transaction holds up what lies behind it, also over a restart; and
	// a log that ends in hidden records is settled to its end.
	begin(t, one)
	write(t, one, topic, "open")
	see(write(t, plain, topic, "behind"), "behind")
	c := consume(t, bus, topic, 10)
	c.take(len(want) - 1)
	c.stop()
	c = consume(t, bus, topic, 10)
	select {
	case d := <-c.arrived:
		t.Fatalf("%q is read from behind an open transaction", d.Message().ID)
	case <-time.After(time.Second):
	}
	end(t, one, kgo.TryAbort)
	wantIDs(t, c.take(1), "behind")
	until(t, "the group's offset is behind the marker", func() bool { return r.committed(topic, 0) > want[len(want)-1].offset+1 })
	c.stop()

	// Whoever asks for it reads all, but never a marker.
	all := r.open(func(c *kafka.Config) { c.ReadUncommitted = true })
	c = consumeAs(t, all, "uncommitted", topic, 10)
	for {
		m := c.take(1)[0]
		if m.ID == "" {
			t.Fatal("a marker is read")
		}
		if m.ID == "behind" {
			break
		}
	}
	c.stop()
}

// commit sets a group's offset.
func (r *rig) commit(group, topic string, offset int64) {
	r.t.Helper()
	req := kmsg.NewPtrOffsetCommitRequest()
	req.Group, req.Generation = group, -1
	rt := kmsg.NewOffsetCommitRequestTopic()
	rt.Topic = topic
	p := kmsg.NewOffsetCommitRequestTopicPartition()
	p.Offset = offset
	rt.Partitions = append(rt.Partitions, p)
	req.Topics = append(req.Topics, rt)
	ctx, cancel := context.WithTimeout(r.t.Context(), patience)
	defer cancel()
	older := newClient(r.t, r.brokers, kgo.MaxVersions(kversion.V3_0_0())) // newer ones ask for the topic's id
	res, err := req.RequestWith(ctx, older)
	if err != nil || res.Topics[0].Partitions[0].ErrorCode != 0 {
		r.t.Fatalf("commit an offset: %+v, %v", res, err)
	}
}
