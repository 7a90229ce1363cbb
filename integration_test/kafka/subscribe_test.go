package kafka_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/twmb/franz-go/pkg/kmsg"

	"github.com/postroom/postroom"
	"github.com/postroom/postroom/broker"
	"github.com/postroom/postroom/broker/kafka"
)

// both runs a test on kfake and on Apache Kafka.
func both(t *testing.T, f func(t *testing.T, r *rig)) {
	t.Helper()
	t.Parallel()
	t.Run("kfake", func(t *testing.T) {
		t.Parallel()
		f(t, newRig(t))
	})
	t.Run("Apache Kafka", func(t *testing.T) {
		t.Parallel()
		f(t, sharedRig(t))
	})
}

// B55: the offset is per partition, so it stops before the first message that is
// unsettled, whatever was settled behind it.
func TestB55NoCommitBeyondTheSettledPrefix(t *testing.T) {
	both(t, func(t *testing.T, r *rig) {
		r.topic("b55", 1)
		bus := r.open()
		store(t, bus, messages("b55", "", 1, 5)...)
		c := consume(t, bus, "b55", 5)
		var ds []broker.Delivery
		for range 5 {
			ds = append(ds, c.next())
		}
		for _, i := range []int{4, 0, 3, 1} {
			ack(t, ds[i])
		}
		r.untilCommitted("b55", 0, 2)
		for range 2 { // the third fails twice
			if err := ds[2].Retry(t.Context(), 0); err != nil {
				t.Fatal(err)
			}
			ds[2] = c.next()
			if id := ds[2].Message().ID; id != "3" {
				t.Fatalf("message %s came again, want 3", id)
			}
			r.untilCommitted("b55", 0, 2)
		}
		// A restart in the middle repeats from the third on.
		c.cancel()
		if err := ds[2].Retry(t.Context(), 0); err != nil {
			t.Fatal(err)
		}
		c.wait(nil)
		r.untilCommitted("b55", 0, 2)
		c = consume(t, bus, "b55", 5)
		wantIDs(t, c.take(3), "3", "4", "5")
		c.stop()
		r.untilCommitted("b55", 0, 5)
	})
}

// B56: nothing is committed because it was read.
func TestB56ReadingCommitsNothing(t *testing.T) {
	both(t, func(t *testing.T, r *rig) {
		r.topic("b56", 1)
		bus := r.open()
		store(t, bus, messages("b56", "", 1, 100)...)
		for range 3 {
			killed := r.open()
			c := consume(t, killed, "b56", 100)
			for range 100 {
				c.next()
			}
			if err := killed.Close(); err != nil {
				t.Fatal(err)
			}
			if err := <-c.ended; !errors.Is(err, broker.ErrClosed) {
				t.Fatalf("Subscribe = %v, want ErrClosed", err)
			}
			if o := r.committed("b56", 0); o > 0 {
				t.Fatalf("offset %d is committed, and nothing was settled", o)
			}
		}
		c := consume(t, bus, "b56", 100)
		c.take(100)
		c.stop()
		r.untilCommitted("b56", 0, 100)
	})
}

// B58: the end of its context ends Subscribe, in every state.
func TestB58SubscribeEnds(t *testing.T) {
	soon := func(t *testing.T, c *consumer) {
		t.Helper()
		begun := time.Now()
		c.cancel()
		c.wait(nil)
		if took := time.Since(begun); took > 4*time.Second {
			t.Errorf("Subscribe returned after %v", took)
		}
	}
	t.Run("idle", func(t *testing.T) {
		both(t, func(t *testing.T, r *rig) {
			r.topic("idle", 2)
			bus := r.open()
			store(t, bus, messages("idle", "", 1, 1)...)
			c := consume(t, bus, "idle", 5)
			c.take(1)
			soon(t, c)
		})
	})
	t.Run("the brokers are away", func(t *testing.T) {
		both(t, func(t *testing.T, r *rig) {
			r.topic("away", 1)
			g := newGate(t)
			bus := r.open(func(c *kafka.Config) { c.Dial = g.dial })
			store(t, bus, messages("away", "", 1, 2)...)
			c := consume(t, bus, "away", 5)
			c.take(2)
			g.refuse.Store(true)
			g.cut()
			until(t, "trouble is told", func() bool { return len(c.troubles()) > 0 })
			soon(t, c)
		})
	})
	t.Run("the brokers are silent", func(t *testing.T) {
		both(t, func(t *testing.T, r *rig) {
			r.topic("silent", 1)
			g := newGate(t)
			bus := r.open(func(c *kafka.Config) { c.Dial = g.dial })
			store(t, bus, messages("silent", "", 1, 2)...)
			c := consume(t, bus, "silent", 5)
			c.take(2)
			g.shut(true)
			defer g.shut(false)
			until(t, "trouble is told", func() bool { return len(c.troubles()) > 0 })
			soon(t, c)
		})
	})
	t.Run("the brokers are away from the start", func(t *testing.T) {
		t.Parallel()
		r := newRig(t)
		g := newGate(t)
		bus := r.open(func(c *kafka.Config) { c.Dial = g.dial })
		g.refuse.Store(true)
		g.cut()
		c := consume(t, bus, "never", 5)
		until(t, "trouble is told", func() bool { return len(c.troubles()) > 0 })
		soon(t, c)
	})
	t.Run("dividing the partitions", func(t *testing.T) {
		both(t, func(t *testing.T, r *rig) {
			r.topic("dividing", 1)
			// A member that does not come again holds the others up.
			mute := r.join("group-dividing", "dividing")
			c := consume(t, r.open(), "dividing", 5)
			until(t, "the group divides its partitions", func() bool { return r.rebalancing("group-dividing", mute) })
			soon(t, c)
		})
	})
	t.Run("a handler is blocked", func(t *testing.T) {
		both(t, func(t *testing.T, r *rig) {
			r.topic("blocked", 1)
			bus := r.open()
			store(t, bus, messages("blocked", "", 1, 3)...)
			c := consume(t, bus, "blocked", 3)
			var ds []broker.Delivery
			for range 3 {
				ds = append(ds, c.next())
			}
			c.cancel()
			ack(t, ds[0])
			select {
			case err := <-c.ended:
				t.Fatalf("Subscribe = %v with deliveries unsettled", err)
			case <-time.After(time.Second):
			}
			ack(t, ds[1])
			ack(t, ds[2])
			c.wait(nil)
			r.untilCommitted("blocked", 0, 3)
		})
	})
}

// join enters a group as a client that then is silent, and returns its member id.
func (r *rig) join(group, topic string) string {
	r.t.Helper()
	meta := kmsg.NewConsumerMemberMetadata()
	meta.Version, meta.Topics = 1, []string{topic}
	req := kmsg.NewPtrJoinGroupRequest()
	req.Group, req.ProtocolType, req.SessionTimeoutMillis, req.RebalanceTimeoutMillis = group, "consumer", 30_000, 30_000
	p := kmsg.NewJoinGroupRequestProtocol()
	p.Name, p.Metadata = "postroom-sticky", meta.AppendTo(nil)
	req.Protocols = append(req.Protocols, p)
	for {
		res, err := req.RequestWith(r.t.Context(), r.admin)
		if err != nil {
			r.t.Fatal(err)
		}
		if req.MemberID = res.MemberID; res.ErrorCode == 0 {
			sync := kmsg.NewPtrSyncGroupRequest()
			sync.Group, sync.MemberID, sync.Generation = group, res.MemberID, res.Generation
			protocol, kind := p.Name, "consumer"
			sync.Protocol, sync.ProtocolType = &protocol, &kind
			if _, err := sync.RequestWith(r.t.Context(), r.admin); err != nil {
				r.t.Fatal(err)
			}
			return res.MemberID
		}
	}
}

// rebalancing reports whether the coordinator wants a member to join anew.
func (r *rig) rebalancing(group, member string) bool {
	r.t.Helper()
	req := kmsg.NewPtrHeartbeatRequest()
	req.Group, req.MemberID, req.Generation = group, member, 1
	res, err := req.RequestWith(r.t.Context(), r.admin)
	return err == nil && res.ErrorCode == 27
}

// B60: added partitions are read from their first message on, as is each partition
// without an offset.
func TestB60NoMessageIsPassedOver(t *testing.T) {
	t.Run("partitions are added", func(t *testing.T) {
		both(t, func(t *testing.T, r *rig) {
			r.topic("grows", 1)
			bus := r.open()
			store(t, bus, messages("grows", "", 1, 3)...)
			one, two := consume(t, bus, "grows", 10), consume(t, r.open(), "grows", 10)
			took(t, one, two, 3)
			r.addPartitions("grows", 3)
			for p := range int32(3) {
				r.produce(&kgo.Record{Topic: "grows", Partition: p, Value: []byte("new"), Headers: header(fmt.Sprint("new", p))})
			}
			took(t, one, two, 3)
			one.stop()
			two.stop()
		})
	})
	t.Run("the topic is made after the consumer", func(t *testing.T) {
		both(t, func(t *testing.T, r *rig) {
			// Subscribe says so; whoever waits for a topic calls it again.
			bus := r.open()
			c := consume(t, bus, "late", 1)
			if err := <-c.ended; err == nil || !strings.Contains(err.Error(), "no such topic") {
				t.Fatalf("Subscribe = %v, want an error: no such topic", err)
			}
			r.topic("late", 1)
			store(t, bus, messages("late", "", 1, 1)...)
			c = consume(t, bus, "late", 1)
			c.take(1)
			c.stop()
		})
	})
	t.Run("a partition without an offset", func(t *testing.T) {
		both(t, func(t *testing.T, r *rig) {
			r.topic("untouched", 2)
			bus := r.open()
			r.produce(&kgo.Record{Topic: "untouched", Partition: 0, Headers: header("a")})
			c := consume(t, bus, "untouched", 2)
			wantIDs(t, c.take(1), "a")
			c.stop()
			r.produce(&kgo.Record{Topic: "untouched", Partition: 1, Headers: header("b")})
			c = consume(t, bus, "untouched", 2)
			wantIDs(t, c.take(1), "b")
			c.stop()
		})
	})
	t.Run("the offset is older than the log", func(t *testing.T) {
		both(t, func(t *testing.T, r *rig) {
			r.topic("short", 1)
			bus := r.open()
			store(t, bus, messages("short", "", 1, 2)...)
			c := consume(t, bus, "short", 2)
			c.take(2)
			c.stop()
			store(t, bus, messages("short", "", 3, 6)...)
			r.deleteRecords("short", 4)
			c = consume(t, bus, "short", 2)
			wantIDs(t, c.take(2), "5", "6")
			c.stop()
			r.untilCommitted("short", 0, 6)
		})
	})
}

// took receives n messages at either of two consumers.
func took(t testing.TB, one, two *consumer, n int) {
	t.Helper()
	for i := range n {
		select {
		case d := <-one.arrived:
			ack(t, d)
		case d := <-two.arrived:
			ack(t, d)
		case <-time.After(patience):
			t.Fatalf("%d of %d messages came; trouble: %v, %v", i, n, one.troubles(), two.troubles())
		}
	}
}

func header(id string) []kgo.RecordHeader {
	return []kgo.RecordHeader{{Key: "postroom-id", Value: []byte(id)}}
}

// produce stores records by a client that is not ours.
func (r *rig) produce(recs ...*kgo.Record) {
	r.t.Helper()
	cl := newClient(r.t, r.brokers, kgo.RecordPartitioner(kgo.ManualPartitioner()), kgo.MetadataMinAge(50*time.Millisecond),
		kgo.UnknownTopicRetries(-1))
	if err := cl.ProduceSync(r.t.Context(), recs...).FirstErr(); err != nil {
		r.t.Fatal(err)
	}
}

func (r *rig) addPartitions(topic string, n int32) {
	r.t.Helper()
	req := kmsg.NewPtrCreatePartitionsRequest()
	t := kmsg.NewCreatePartitionsRequestTopic()
	t.Topic, t.Count = topic, n
	req.Topics = append(req.Topics, t)
	res, err := req.RequestWith(r.t.Context(), r.admin)
	if err != nil || res.Topics[0].ErrorCode != 0 {
		r.t.Fatalf("add partitions: %+v, %v", res, err)
	}
}

func (r *rig) deleteRecords(topic string, before int64) {
	r.t.Helper()
	req := kmsg.NewPtrDeleteRecordsRequest()
	t := kmsg.NewDeleteRecordsRequestTopic()
	t.Topic = topic
	p := kmsg.NewDeleteRecordsRequestTopicPartition()
	p.Offset = before
	t.Partitions = append(t.Partitions, p)
	req.Topics = append(req.Topics, t)
	res, err := req.RequestWith(r.t.Context(), r.admin)
	if err != nil || res.Topics[0].Partitions[0].ErrorCode != 0 {
		r.t.Fatalf("delete records: %+v, %v", res, err)
	}
}

// B62, B96: headers and what is empty or absent arrive as another client stored
// them.
func TestB62B96ReadsWhatIsThere(t *testing.T) {
	both(t, func(t *testing.T, r *rig) {
		r.topic("content", 1)
		var recs []*kgo.Record
		for _, key := range [][]byte{nil, {}, []byte("k\xff")} {
			for _, value := range [][]byte{nil, {}, []byte("v\x00")} {
				recs = append(recs, &kgo.Record{Topic: "content", Key: key, Value: value, Headers: []kgo.RecordHeader{
					{Key: "a", Value: []byte("1")},
					{Key: "Postroom-ID", Value: []byte("id")},
					{Key: "b", Value: nil},
					{Key: "a", Value: []byte{}},
					{Key: "A", Value: []byte{0, 0xff}},
					{Key: "", Value: []byte("no name")},
				}})
			}
		}
		recs = append(recs, &kgo.Record{Topic: "content"})
		r.produce(recs...)
		c := consume(t, r.open(), "content", 20)
		msgs := c.take(len(recs))
		c.stop()
		want := []postroom.Header{
			{Name: "a", Value: []byte("1")},
			{Name: "b"},
			{Name: "a", Value: []byte{}},
			{Name: "A", Value: []byte{0, 0xff}},
			{Name: "", Value: []byte("no name")},
		}
		for i, m := range msgs {
			rec := recs[i]
			if m.HasKey() != (rec.Key != nil) || m.Key != string(rec.Key) || !sameBytes(m.Payload, rec.Value) {
				t.Errorf("record %d: key %q, present %v, payload %#v; want %#v, %#v", i, m.Key, m.HasKey(), m.Payload, rec.Key, rec.Value)
			}
			if len(rec.Headers) == 0 {
				if m.ID != "" || m.Headers != nil {
					t.Errorf("record %d: id %q and headers %v, want none", i, m.ID, m.Headers)
				}
				continue
			}
			if m.ID != "id" || !slices.EqualFunc(m.Headers, want, func(a, b postroom.Header) bool {
				return a.Name == b.Name && sameBytes(a.Value, b.Value)
			}) {
				t.Errorf("record %d: id %q, headers %#v, want %#v", i, m.ID, m.Headers, want)
			}
		}
	})
}

func sameBytes(a, b []byte) bool { return (a == nil) == (b == nil) && string(a) == string(b) }

// TestSubscribeProblems reports what is wrong with a subscription at once.
func TestSubscribeProblems(t *testing.T) {
	t.Parallel()
	bus := newRig(t).open()
	err := bus.Subscribe(t.Context(), broker.Subscription{Topic: "a/b"}, nil)
	for _, want := range []string{"Group is empty", `Topic is "a/b"`, "MaxInFlight is 0"} {
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%q is not in %v", want, err)
		}
	}
	if err := bus.Close(); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	err = bus.Subscribe(ctx, broker.Subscription{Topic: "t", Group: "g", MaxInFlight: 1}, nil)
	if !errors.Is(err, broker.ErrClosed) {
		t.Errorf("Subscribe of a closed bus = %v", err)
	}
}

// A partition whose messages are not settled does not stop the others.
func TestSlowPartition(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	r.topic("slow", 2)
	for p := range int32(2) {
		var recs []*kgo.Record
		for i := range 100 {
			recs = append(recs, &kgo.Record{Topic: "slow", Partition: p, Headers: header(fmt.Sprint(p, "-", i))})
		}
		r.produce(recs...)
	}
	c := consume(t, r.open(), "slow", 8)
	var held []broker.Delivery
	for handled := 0; handled < 100; {
		d := c.next()
		if d.Position().Partition == 0 {
			held = append(held, d)
			continue
		}
		ack(t, d)
		handled++
	}
	if len(held) != 7 {
		t.Errorf("%d messages of the slow partition are handed over, want 7", len(held))
	}
	for _, d := range held {
		ack(t, d)
	}
	for range 93 {
		ack(t, c.next())
	}
	c.stop()
}
