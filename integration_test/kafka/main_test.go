// Package kafka_test runs the Kafka adapter against Apache Kafka, and for faults
// against a cluster in this process that answers single requests with chosen errors.
//
// Which tests need Apache Kafka stands in needReal. They fail where it cannot be
// had, which takes a JDK and, at the first run, Maven. All others need nothing.
//
// -fault says how long stalls, outages and idle times last: a second as a rule,
// "-fault 5m" for what only time brings about.
package kafka_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kfake"
	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/twmb/franz-go/pkg/kmsg"
	"go.uber.org/goleak"

	"github.com/postroom/postroom"
	"github.com/postroom/postroom/broker"
	"github.com/postroom/postroom/broker/kafka"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(tests{m}) }

// atEnd is called after the last test, to close what tests share.
var atEnd []func() error

type tests struct{ *testing.M }

func (t tests) Run() int {
	code := t.M.Run()
	for _, f := range atEnd {
		if err := f(); err != nil {
			fmt.Fprintln(os.Stderr, err)
			code = max(code, 1)
		}
	}
	return code
}

// A rig is a cluster and a client of it that is not ours.
type rig struct {
	t       testing.TB
	brokers []string
	cluster *kfake.Cluster // nil where the brokers are real
	admin   *kgo.Client
}

func newRig(t testing.TB, opts ...kfake.Opt) *rig {
	t.Helper()
	c, err := kfake.NewCluster(append([]kfake.Opt{kfake.NumBrokers(3)}, opts...)...)
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
	// The answer comes before the brokers know of the topic themselves.
	tick := time.NewTicker(5 * time.Millisecond)
	defer tick.Stop()
	for !r.ready(ctx, name, partitions) {
		select {
		case <-tick.C:
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
	return nil
}

// ready reports whether the leader of each partition answers for it.
func (r *rig) ready(ctx context.Context, topic string, partitions int32) bool {
	req := kmsg.NewPtrListOffsetsRequest()
	rt := kmsg.NewListOffsetsRequestTopic()
	rt.Topic = topic
	for p := range partitions {
		rp := kmsg.NewListOffsetsRequestTopicPartition()
		rp.Partition, rp.Timestamp = p, -1
		rt.Partitions = append(rt.Partitions, rp)
	}
	req.Topics = append(req.Topics, rt)
	answered := int32(0)
	for _, shard := range r.admin.RequestSharded(ctx, req) {
		res, ok := shard.Resp.(*kmsg.ListOffsetsResponse)
		if shard.Err != nil || !ok {
			return false
		}
		for _, t := range res.Topics {
			for _, p := range t.Partitions {
				if p.ErrorCode == 0 {
					answered++
				}
			}
		}
	}
	return answered == partitions
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

func (r *rig) open(change ...func(*kafka.Config)) *kafka.Bus {
	r.t.Helper()
	c := config()
	for _, f := range change {
		f(&c)
	}
	b, err := kafka.Open(r.t.Context(), r.brokers, c)
	if err != nil {
		r.t.Fatal(err)
	}
	r.t.Cleanup(func() { _ = b.Close() })
	return b
}

func config() kafka.Config {
	return kafka.Config{
		PublishTimeout: 3 * time.Second, DialTimeout: 2 * time.Second, SessionTimeout: 6 * time.Second,
		Logger: slog.New(slog.DiscardHandler),
	}
}

// onProduce answers produce requests by f until it says that it is done. f gets
// the request and a response that stores nothing and says nothing is wrong.
func (r *rig) onProduce(f func(*kmsg.ProduceRequest, *kmsg.ProduceResponse) (handled, done bool)) {
	r.cluster.ControlKey(int16(kmsg.Produce), func(kreq kmsg.Request) (kmsg.Response, error, bool) {
		req := kreq.(*kmsg.ProduceRequest)
		res := req.ResponseKind().(*kmsg.ProduceResponse)
		for _, t := range req.Topics {
			rt := kmsg.NewProduceResponseTopic()
			rt.Topic = t.Topic
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

// read returns the first n records of a topic by a client that is not ours, or some
// more.
func (r *rig) read(topic string, n int) []*kgo.Record {
	r.t.Helper()
	return r.readUntil(topic, func(all []*kgo.Record) bool { return len(all) >= n })
}

// readFirst returns the ids in a topic, repeats left out, when there are n.
func (r *rig) readFirst(topic string, n int) []string {
	r.t.Helper()
	return firstArrivals(recordIDs(r.readUntil(topic, func(all []*kgo.Record) bool {
		return len(firstArrivals(recordIDs(all))) >= n
	})))
}

func (r *rig) readUntil(topic string, done func([]*kgo.Record) bool) []*kgo.Record {
	r.t.Helper()
	cl := newClient(r.t, r.brokers, kgo.ConsumeTopics(topic), kgo.ConsumeResetOffset(kgo.NewOffset().AtStart()))
	ctx, cancel := context.WithTimeout(r.t.Context(), patience)
	defer cancel()
	var all []*kgo.Record
	for !done(all) {
		f := cl.PollFetches(ctx)
		if err := f.Err0(); err != nil {
			r.t.Fatalf("after %d records: %v", len(all), err)
		}
		all = append(all, f.Records()...)
	}
	return all
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
