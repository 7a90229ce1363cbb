package franz_test

import (
	"context"
	"fmt"
	"maps"
	"testing"
	"time"

	"github.com/twmb/franz-go/pkg/kgo"

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
	for _, topic := range []string{"ours", "theirs"} {
		byUs, byThem := receive(t, r.open(), "us", topic, len(msgs)), receive(t, other, "them", topic, len(msgs))
		for _, m := range msgs {
			m.Topic = topic
			if !m.Time.IsZero() {
				m.Time = m.Time.UTC()
			}
			want := fmt.Sprintf("%#v", m)
			if byUs[m.ID] != want || byThem[m.ID] != want {
				t.Errorf("came\n%s, by package kafka\n%s, want\n%s", byUs[m.ID], byThem[m.ID], want)
			}
		}
	}
}

// receive delivers n messages to a group and stops. It returns them by their id.
func receive(t *testing.T, s broker.Subscriber, group, topic string, n int) map[string]string {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	came := map[string]string{}
	err := s.Subscribe(ctx, broker.Subscription{Group: group, Topic: topic, MaxInFlight: 1}, func(d broker.Delivery) {
		if len(came) == n {
			_ = d.Retry(context.Background(), 0) // beyond what was asked for
			return
		}
		m := d.Message()
		came[m.ID] = fmt.Sprintf("%#v", m)
		if err := d.Ack(context.Background()); err != nil {
			t.Error(err)
		}
		if len(came) == n {
			cancel()
		}
	})
	if err != nil || len(came) != n {
		t.Fatalf("%d of %d messages came: %v", len(came), n, err)
	}
	return came
}

// Records that others wrote are read alike, and a group goes on where the other
// package has left it.
func TestGroupOfPackageKafkaGoesOn(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	r.topic("t", 1)
	other, err := kafka.Open(t.Context(), r.brokers, kafka.Config{SessionTimeout: time.Second})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = other.Close() })
	records := foreign("t")
	for i := range records { // a new id for each, so that none takes another's place
		records[i].Headers = append(records[i].Headers, kgo.RecordHeader{Key: "postroom-id", Value: fmt.Append(nil, "foreign ", i)})
	}
	if err := r.admin.ProduceSync(t.Context(), records...).FirstErr(); err != nil {
		t.Fatal(err)
	}
	bus := r.open()
	store(t, bus, messages("t", "k", 0, 9)...)
	all := receive(t, bus, "us", "t", len(records)+10)
	if them := receive(t, other, "them", "t", len(records)+10); !maps.Equal(all, them) {
		t.Errorf("came %q, by package kafka %q", all, them)
	}
	parts := map[string]string{}
	for i, s := range []broker.Subscriber{bus, other, bus, other} {
		part := receive(t, s, "both", "t", []int{4, 3, 3, 3}[i])
		for id, m := range part {
			if parts[id] != "" {
				t.Errorf("message %s came to both", id)
			}
			parts[id] = m
		}
	}
	if !maps.Equal(all, parts) {
		t.Errorf("came %q, want %q", parts, all)
	}
}
