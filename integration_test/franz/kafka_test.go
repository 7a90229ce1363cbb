package franz_test

import (
	"fmt"
	"testing"
	"time"

	"github.com/postroom/postroom"
	"github.com/postroom/postroom/broker"
	"github.com/postroom/postroom/broker/kafka"
)

// What package kafka publishes stands in the log as what we publish does, keys
// on the same partitions, and is delivered by us as it was given.
func TestWireOfPackageKafka(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	r.topic("theirs", 5)
	r.topic("ours", 5)
	other, err := kafka.Open(t.Context(), r.brokers, kafka.Config{})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = other.Close() })
	var msgs []postroom.Message
	for _, key := range []string{"k", "ü", "another key", "\xff"} {
		for _, payload := range [][]byte{nil, {}, []byte("p"), {0, 0xff}} {
			msgs = append(msgs, postroom.Message{ID: fmt.Sprint(len(msgs)), Key: key, Payload: payload})
		}
	}
	msgs = append(
		msgs,
		postroom.Message{ID: "empty key", EmptyKey: true},
		postroom.Message{ID: "no key", Payload: []byte("p")},
		postroom.Message{
			ID: "all", Key: "k", Time: time.Date(2026, 1, 2, 3, 4, 5, 6000, time.UTC), Operation: "op",
			Headers: []postroom.Header{{Name: "a", Value: []byte("1")}, {Name: "B"}, {Name: "a", Value: []byte{}}},
		},
		postroom.Message{ID: "elsewhere", Key: "k", Time: time.Date(2026, 1, 2, 3, 4, 5, 123456000, time.FixedZone("", 3600))},
	)
	published := func(topic string, p broker.Publisher) map[string]string {
		for i := range msgs {
			msgs[i].Topic = topic
		}
		store(t, p, msgs...)
		records := map[string]string{}
		for _, rec := range r.read(topic, len(msgs)) {
			partition := rec.Partition
			if rec.Key == nil {
				partition = -1 // in turns
			}
			records[id(rec)] = fmt.Sprintf("%d %#v %#v %#v", partition, rec.Key, rec.Value, rec.Headers)
		}
		return records
	}
	ours, theirs := published("ours", r.open()), published("theirs", other)
	for _, m := range msgs {
		if ours[m.ID] != theirs[m.ID] {
			t.Errorf("message %s is %s, by package kafka %s", m.ID, ours[m.ID], theirs[m.ID])
		}
	}
	c := r.consumeAs("g", "theirs", 5)
	came := map[string]postroom.Message{}
	for range msgs {
		d := c.next()
		came[d.Message().ID] = d.Message()
		c.ack(d)
	}
	c.stopped()
	for _, m := range msgs {
		if !m.Time.IsZero() {
			m.Time = m.Time.UTC()
		}
		if got, want := fmt.Sprintf("%#v", came[m.ID]), fmt.Sprintf("%#v", m); got != want {
			t.Errorf("came %s, want %s", got, want)
		}
	}
}
