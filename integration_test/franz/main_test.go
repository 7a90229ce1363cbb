// Package franz_test runs the franz-go adapter against Apache Kafka, and for faults
// against a cluster in this process that answers single requests with chosen errors.
//
// Of the cases these are the conformance suite's alone: B60b, a subscription before
// there is the topic (SubscribeUnknownTopic), and B46's cancelled call
// (CancelledPublish). Others that it has too are tested here with more faults.
package franz_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/twmb/franz-go/pkg/kadm"
	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kfake"
	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/twmb/franz-go/pkg/kmsg"
	"go.uber.org/goleak"

	"github.com/postroom/postroom"
	"github.com/postroom/postroom/broker"
	"github.com/postroom/postroom/broker/franz"
	"github.com/postroom/postroom/internal/throwaway"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// A rig is a cluster and a client of it that is not ours.
type rig struct {
	t       testing.TB
	brokers []string
	cluster *kfake.Cluster   // nil where the brokers are real
	real    *throwaway.Kafka // nil where they are not
	admin   *kgo.Client
}

func newRig(t testing.TB, opts ...kfake.Opt) *rig {
	t.Helper()
	c, err := kfake.NewCluster(append([]kfake.Opt{kfake.NumBrokers(3), kfake.GroupMinSessionTimeout(time.Second)}, opts...)...)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(c.Close)
	return &rig{t: t, brokers: c.ListenAddrs(), cluster: c, admin: newClient(t, c.ListenAddrs())}
}

func newClient(t testing.TB, brokers []string, opts ...kgo.Opt) *kgo.Client {
	t.Helper()
	cl, err := kgo.NewClient(append([]kgo.Opt{kgo.SeedBrokers(brokers...)}, opts...)...)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(cl.Close)
	return cl
}

// createTopic makes a topic; settings are pairs.
func (r *rig) createTopic(ctx context.Context, name string, partitions int32, settings ...string) error {
	req := kmsg.NewPtrCreateTopicsRequest()
	topic := kmsg.NewCreateTopicsRequestTopic()
	topic.Topic, topic.NumPartitions, topic.ReplicationFactor = name, partitions, 1
	for i := 0; i < len(settings); i += 2 {
		c := kmsg.NewCreateTopicsRequestTopicConfig()
		c.Name, c.Value = settings[i], &settings[i+1]
		topic.Configs = append(topic.Configs, c)
	}
	req.Topics = append(req.Topics, topic)
	res, err := req.RequestWith(ctx, r.admin)
	if err != nil {
		return err
	}
	if err := kerr.ErrorForCode(res.Topics[0].ErrorCode); err != nil {
		return err
	}
	// A broker answers before it knows of the topic itself.
	tick := time.NewTicker(5 * time.Millisecond)
	defer tick.Stop()
	for {
		if known, err := r.topicExists(ctx, name); known || err != nil {
			return err
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
}

func (r *rig) topic(name string, partitions int32, settings ...string) {
	r.t.Helper()
	if err := r.createTopic(r.t.Context(), name, partitions, settings...); err != nil {
		r.t.Fatal(err)
	}
}

func (r *rig) topicExists(ctx context.Context, name string) (bool, error) {
	req := kmsg.NewPtrMetadataRequest()
	req.Topics = nil // all, and none is made
	res, err := req.RequestWith(ctx, r.admin)
	if err != nil {
		return false, err
	}
	return slices.ContainsFunc(res.Topics, func(t kmsg.MetadataResponseTopic) bool {
		return *t.Topic == name && !slices.ContainsFunc(t.Partitions, func(p kmsg.MetadataResponseTopicPartition) bool { return p.Leader < 0 })
	}), nil
}

// topicID returns what newer requests have in the place of a topic's name.
func (r *rig) topicID(name string) [16]byte {
	r.t.Helper()
	req := kmsg.NewPtrMetadataRequest()
	topic := kmsg.NewMetadataRequestTopic()
	topic.Topic = &name
	req.Topics = append(req.Topics, topic)
	res, err := req.RequestWith(r.t.Context(), r.admin)
	if err != nil {
		r.t.Fatal(err)
	}
	return res.Topics[0].TopicID
}

func (r *rig) open(change ...func(*franz.Config)) *franz.Bus {
	r.t.Helper()
	c := config()
	for _, f := range change {
		f(&c)
	}
	b, err := franz.Open(r.t.Context(), r.brokers, c)
	if err != nil {
		r.t.Fatal(err)
	}
	r.t.Cleanup(func() { _ = b.Close() })
	return b
}

func config() franz.Config {
	return franz.Config{PublishTimeout: 5 * time.Second, DialTimeout: 2 * time.Second, SessionTimeout: time.Second, Logger: slog.New(slog.DiscardHandler)}
}

// onProduce answers produce requests by f until it says that it is done. f gets
// the request and a response that stores nothing and says nothing is wrong.
func (r *rig) onProduce(f func(*kmsg.ProduceRequest, *kmsg.ProduceResponse) (handled, done bool)) {
	r.cluster.ControlKey(int16(kmsg.Produce), func(kreq kmsg.Request) (kmsg.Response, error, bool) {
		req := kreq.(*kmsg.ProduceRequest)
		res := req.ResponseKind().(*kmsg.ProduceResponse)
		for _, t := range req.Topics {
			rt := kmsg.NewProduceResponseTopic()
			rt.Topic, rt.TopicID = t.Topic, t.TopicID
			for _, p := range t.Partitions {
				rp := kmsg.NewProduceResponseTopicPartition()
				rp.Partition = p.Partition
				rt.Partitions = append(rt.Partitions, rp)
			}
			res.Topics = append(res.Topics, rt)
		}
		handled, done := f(req, res)
		if !done {
			r.cluster.KeepControl()
		}
		if !handled {
			return nil, nil, false
		}
		return res, nil, true
	})
}

// failNext answers the next n produce requests with an error for every partition.
func (r *rig) failNext(n int, code *kerr.Error) {
	r.onProduce(func(_ *kmsg.ProduceRequest, res *kmsg.ProduceResponse) (bool, bool) {
		for i := range res.Topics {
			for j := range res.Topics[i].Partitions {
				res.Topics[i].Partitions[j].ErrorCode = code.Code
			}
		}
		n--
		return true, n <= 0
	})
}

// read returns the first n records of a topic by a client that is not ours.
func (r *rig) read(topic string, n int) []*kgo.Record {
	r.t.Helper()
	cl := newClient(r.t, r.brokers, kgo.ConsumeTopics(topic), kgo.ConsumeResetOffset(kgo.NewOffset().AtStart()))
	ctx, cancel := context.WithTimeout(r.t.Context(), time.Minute)
	defer cancel()
	var all []*kgo.Record
	for len(all) < n {
		f := cl.PollFetches(ctx)
		if err := f.Err0(); err != nil {
			r.t.Fatalf("after %d of %d records: %v", len(all), n, err)
		}
		all = append(all, f.Records()...)
	}
	return all
}

// end returns the offset behind the last of a topic's first partition.
func (r *rig) end(topic string) int64 {
	r.t.Helper()
	offsets, err := kadm.NewClient(r.admin).ListEndOffsets(r.t.Context(), topic)
	if err != nil {
		r.t.Fatal(err)
	}
	o, _ := offsets.Lookup(topic, 0)
	return o.Offset
}

func id(rec *kgo.Record) string {
	for _, h := range rec.Headers {
		if h.Key == "postroom-id" {
			return string(h.Value)
		}
	}
	return ""
}

func recordIDs(recs []*kgo.Record) (ids []string) {
	for _, rec := range recs {
		ids = append(ids, id(rec))
	}
	return ids
}

func messages(topic, key string, from, to int) []postroom.Message {
	var msgs []postroom.Message
	for i := from; i <= to; i++ {
		msgs = append(msgs, postroom.Message{
			ID: strings.TrimPrefix(fmt.Sprintf("%s-%d", key, i), "-"), Topic: topic, Key: key, Payload: fmt.Append(nil, i),
		})
	}
	return msgs
}

func store(t testing.TB, p broker.Publisher, msgs ...postroom.Message) {
	t.Helper()
	for i, res := range p.Publish(t.Context(), msgs) {
		if res.Outcome != broker.Stored || res.Err != nil {
			t.Fatalf("message %d is %v: %v", i, res.Outcome, res.Err)
		}
	}
}

func outcomes(results []broker.Result) (os []broker.Outcome) {
	for _, r := range results {
		os = append(os, r.Outcome)
	}
	return os
}

func wantOutcomes(t testing.TB, results []broker.Result, want ...broker.Outcome) {
	t.Helper()
	if got := outcomes(results); !slices.Equal(got, want) {
		var errs []error
		for _, r := range results {
			errs = append(errs, r.Err)
		}
		t.Fatalf("outcomes %v, want %v: %v", got, want, errors.Join(errs...))
	}
}
