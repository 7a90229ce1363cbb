package franz_test

import (
	"fmt"
	"runtime"
	"slices"
	"testing"

	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kfake"
	"github.com/twmb/franz-go/pkg/kmsg"

	"github.com/postroom/postroom/broker"
	"github.com/postroom/postroom/broker/franz"
)

// B52: (a) a misspelt topic is not made though the cluster makes topics, (b) one
// that was created a moment ago and (c) one that was created anew are found.
func TestB52Topics(t *testing.T) {
	t.Parallel()
	r := newRig(t, kfake.AllowAutoTopicCreation())
	b := r.open()
	wantOutcomes(t, b.Publish(t.Context(), messages("late", "k", 0, 0)), broker.Unreachable)
	if made, err := r.topicExists(t.Context(), "late"); made || err != nil {
		t.Fatalf("the topic exists: %v (%v)", made, err)
	}
	r.topic("late", 1)
	store(t, b, messages("late", "k", 0, 0)...)
	req := kmsg.NewPtrDeleteTopicsRequest()
	topic, name := kmsg.NewDeleteTopicsRequestTopic(), "late"
	topic.Topic = &name
	req.Topics, req.TopicNames = append(req.Topics, topic), []string{name}
	if _, err := req.RequestWith(t.Context(), r.admin); err != nil {
		t.Fatal(err)
	}
	wantOutcomes(t, b.Publish(t.Context(), messages("late", "k", 1, 1)), broker.Unreachable)
	r.topic("late", 3)
	store(t, b, messages("late", "k", 1, 1)...)
}

// B53: a leader that has moved is found within the call.
func TestB53LeaderMoves(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	r.topic("t", 1)
	b := r.open()
	store(t, b, messages("t", "k", 0, 0)...)
	for i := range 6 {
		if err := r.cluster.MoveTopicPartition("t", 0, int32(i%3)); err != nil {
			t.Fatal(err)
		}
		store(t, b, messages("t", "k", i+1, i+1)...)
	}
	r.failNext(1, kerr.NotLeaderForPartition)
	store(t, b, messages("t", "k", 7, 7)...)
	r.failNext(1, kerr.UnknownTopicOrPartition)
	store(t, b, messages("t", "k", 8, 8)...)
	r.failNext(100, kerr.NotLeaderForPartition)
	wantOutcomes(t, b.Publish(t.Context(), messages("t", "k", 9, 9)), broker.Unreachable)
}

// B53: idle connections that were cut cost no message.
func TestB53IdleConnectionsCut(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	r.topic("t", 3)
	gate := newGate(t)
	b := r.open(func(c *franz.Config) { c.Dial = gate.dial })
	for i := range 5 {
		store(t, b, slices.Concat(messages("t", "a", i, i), messages("t", "b", i, i), messages("t", "c", i, i))...)
		gate.cut()
	}
}

// B54: a batch whose answer got lost is sent again, and stored once.
func TestB54LostAnswer(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	r.topic("t", 1)
	gate := newGate(t)
	b := r.open(func(c *franz.Config) { c.Dial = gate.dial })
	store(t, b, messages("t", "k", 0, 0)...)
	gate.dropAnswer.Store(true)
	store(t, b, messages("t", "k", 1, 1)...)
	store(t, b, messages("t", "k", 2, 2)...)
	got := recordIDs(r.read("t", 3))
	if !slices.Equal(got, []string{"k-0", "k-1", "k-2"}) {
		t.Errorf("the log holds %q", got)
	}
}

// B59: two hundred publishers leave neither goroutines nor connections.
func TestB59NothingLeft(t *testing.T) {
	r := newRig(t)
	r.topic("t", 3)
	gate := newGate(t)
	before := runtime.NumGoroutine()
	for i := range 200 {
		c := config()
		c.Dial = gate.dial
		b, err := franz.Open(t.Context(), r.brokers, c)
		if err != nil {
			t.Fatal(err)
		}
		store(t, b, messages("t", fmt.Sprint(i), 0, 0)...)
		if err := b.Close(); err != nil {
			t.Fatal(err)
		}
	}
	until(t, "connections closed", func() bool { return gate.open() == 0 })
	until(t, "goroutines ended", func() bool { return runtime.NumGoroutine() <= before })
}

// During an outage calls return soon, hold no memory, and the first after it works.
func TestOutage(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	r.topic("t", 3)
	gate := newGate(t)
	b := r.open(func(c *franz.Config) { c.Dial = gate.dial })
	store(t, b, messages("t", "k", 0, 0)...)
	gate.refuse.Store(true)
	gate.cut()
	msgs := messages("t", "k", 1, 100)
	for i := range msgs {
		msgs[i].Payload = make([]byte, 10_000)
	}
	var before, after runtime.MemStats
	runtime.GC()
	runtime.ReadMemStats(&before)
	for range 10 {
		results := b.Publish(t.Context(), msgs)
		if results[0].Outcome != broker.Unreachable || results[1].Outcome != broker.NotTried || results[0].Err == nil {
			t.Fatalf("%v, %v (%v)", results[0].Outcome, results[1].Outcome, results[0].Err)
		}
	}
	runtime.GC()
	runtime.ReadMemStats(&after)
	if grown := int64(after.HeapAlloc) - int64(before.HeapAlloc); grown > 50<<20 {
		t.Errorf("the heap grew by %d bytes", grown)
	}
	gate.refuse.Store(false)
	store(t, b, msgs...)
}
