package kafka_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	kafkago "github.com/segmentio/kafka-go"
	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kfake"
	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/twmb/franz-go/pkg/kmsg"

	"github.com/postroom/postroom"
	"github.com/postroom/postroom/broker"
	"github.com/postroom/postroom/broker/kafka"
)

// B45: a single message waits for no batch to fill.
func TestB45SingleMessagesDoNotWait(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	r.topic("t", 1)
	b := r.open()
	store(t, b, messages("t", "k", 0, 0)...)
	begun := time.Now()
	for i := range 50 {
		store(t, b, messages("t", "k", i+1, i+1)...)
	}
	if took := time.Since(begun); took > 50*100*time.Millisecond {
		t.Errorf("50 messages in sequence took %v", took)
	}
}

// B46: a call whose deadline passes at a silent broker returns, leaves nothing
// behind that is sent later, and what is stored late is a repeat.
func TestB46SilentBroker(t *testing.T) {
	t.Parallel()
	r := newRig(t, kfake.NumBrokers(1))
	r.topic("t", 1)
	gate := newGate(t)
	b := r.open(func(c *kafka.Config) { c.Dial = gate.dial; c.PublishTimeout = 200 * time.Millisecond })
	store(t, b, messages("t", "k", 0, 0)...)
	gate.shut(true)
	for range 3 {
		begun := time.Now()
		wantOutcomes(t, b.Publish(t.Context(), messages("t", "k", 1, 2)), broker.Unreachable, broker.NotTried)
		if took := time.Since(begun); took > 3*time.Second {
			t.Fatalf("Publish took %v with a timeout of 200ms", took)
		}
	}
	gate.shut(false)
	until(t, "the publisher works again", func() bool {
		return b.Publish(t.Context(), messages("t", "k", 1, 2))[1].Outcome == broker.Stored
	})
	store(t, b, messages("t", "k", 3, 3)...)
	if got := firstArrivals(recordIDs(r.read("t", 4))); !slices.Equal(got, []string{"k-0", "k-1", "k-2", "k-3"}) {
		t.Errorf("first arrivals are %q", got)
	}
}

// B48: one message above the limit is refused alone; so is one that its headers
// push over it; a total above the limit is no matter.
func TestB48OversizedAlone(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	r.topic("t", 1, "max.message.bytes", "10000")
	b := r.open()
	msgs := messages("t", "", 0, 9)
	for i := range msgs {
		msgs[i].Payload = make([]byte, 3000)
	}
	msgs[2].Payload = make([]byte, 10_000)
	msgs[5].Headers = []postroom.Header{{Name: "h", Value: make([]byte, 7000)}}
	results := b.Publish(t.Context(), msgs)
	want := slices.Repeat([]broker.Outcome{broker.Stored}, 10)
	want[2], want[5] = broker.Refused, broker.Refused
	wantOutcomes(t, results, want...)
	if err := results[2].Err; !errors.Is(err, kafkago.MessageSizeTooLarge) || !strings.Contains(err.Error(), "[10]") {
		t.Errorf("the error is %v, want the broker's code 10", err)
	}
	if got := len(r.read("t", 8)); got != 8 {
		t.Errorf("%d records, want 8", got)
	}
}

// B48: where compression is on, the broker decides about a record that only
// compression makes small enough.
func TestB48CompressibleIsStored(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	r.topic("t", 1, "max.message.bytes", "10000")
	for _, k := range []kafkago.Compression{kafkago.Gzip, kafkago.Snappy, kafkago.Lz4, kafkago.Zstd} {
		b := r.open(func(c *kafka.Config) { c.Compression = k })
		msgs := messages("t", "k", 0, 1)
		msgs[0].Payload = make([]byte, 50_000)
		store(t, b, msgs...)
	}
	if recs := r.read("t", 8); len(recs[0].Value) != 50_000 {
		t.Errorf("%d bytes came, want 50000", len(recs[0].Value))
	}
}

// A limit that was lowered meanwhile is found by dividing the batch.
func TestLimitLowered(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	r.topic("t", 1)
	b := r.open()
	r.onProduce(func(req *kmsg.ProduceRequest, res *kmsg.ProduceResponse) (bool, bool) {
		big := len(req.Topics[0].Partitions[0].Records) > 5000
		if big {
			res.Topics[0].Partitions[0].ErrorCode = kerr.MessageTooLarge.Code
		}
		return big, false
	})
	msgs := slices.Concat(messages("t", "a", 0, 9), messages("t", "b", 0, 9))
	for i := range msgs {
		msgs[i].Payload = make([]byte, 1000)
	}
	msgs[4].Payload = make([]byte, 6000)
	want := slices.Repeat([]broker.Outcome{broker.Stored}, 20)
	want[4] = broker.Refused
	for i := 5; i < 10; i++ {
		want[i] = broker.NotTried
	}
	wantOutcomes(t, b.Publish(t.Context(), msgs), want...)
	if got := recordIDs(r.read("t", 14)); len(got) != 14 {
		t.Errorf("%d records, want 14", len(got))
	}
}

// Records that the broker names as invalid are refused, and the others stored.
func TestInvalidRecordsAreRefused(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	r.topic("t", 1)
	b := r.open()
	r.onProduce(func(_ *kmsg.ProduceRequest, res *kmsg.ProduceResponse) (bool, bool) {
		p := &res.Topics[0].Partitions[0]
		p.ErrorCode = kerr.InvalidRecord.Code
		e := kmsg.NewProduceResponseTopicPartitionErrorRecord()
		e.RelativeOffset = 1
		p.ErrorRecords = append(p.ErrorRecords, e)
		return true, true
	})
	msgs := slices.Concat(messages("t", "a", 0, 2), messages("t", "b", 0, 0))
	wantOutcomes(t, b.Publish(t.Context(), msgs), broker.Stored, broker.Refused, broker.NotTried, broker.Stored)
}

// B49: what fails on one topic leaves the others' results alone.
func TestB49PartialFailure(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	r.topic("good", 2)
	r.topic("denied", 1)
	b := r.open()
	r.onProduce(func(req *kmsg.ProduceRequest, res *kmsg.ProduceResponse) (bool, bool) {
		// kfake answers a request as a whole; each topic here has a leader or a call of its own.
		denied := slices.ContainsFunc(req.Topics, func(t kmsg.ProduceRequestTopic) bool { return t.Topic == "denied" })
		if !denied {
			return false, false
		}
		res.Topics[0].Partitions[0].ErrorCode = kerr.TopicAuthorizationFailed.Code
		return true, true
	})
	results := b.Publish(t.Context(), messages("denied", "k", 0, 0))
	wantOutcomes(t, results, broker.Unreachable)
	if s := results[0].Scope; s != "denied/0" {
		t.Errorf("scope is %q", s)
	}
	results = b.Publish(t.Context(), slices.Concat(messages("good", "a", 0, 1), messages("missing", "k", 0, 1), messages("good", "b", 0, 1)))
	wantOutcomes(t, results, broker.Stored, broker.Stored, broker.Unreachable, broker.NotTried, broker.Stored, broker.Stored)
	if err := results[2].Err; results[2].Scope != "missing" || !strings.Contains(err.Error(), "[3]") {
		t.Errorf("scope %q, error %v, want the topic and code 3", results[2].Scope, err)
	}
	if got := len(r.read("good", 4)); got != 4 {
		t.Errorf("%d records, want 4", got)
	}
}

// B50: every request asks for the acknowledgement of all in-sync replicas.
func TestB50AcksAll(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	r.topic("t", 1)
	b := r.open()
	var acks atomic.Int32
	r.onProduce(func(req *kmsg.ProduceRequest, _ *kmsg.ProduceResponse) (bool, bool) {
		acks.Store(int32(req.Acks))
		return false, false
	})
	store(t, b, messages("t", "k", 0, 0)...)
	if acks.Load() != -1 {
		t.Errorf("acks is %d, want -1", acks.Load())
	}
	r.failNext(2, kerr.NotEnoughReplicasAfterAppend)
	wantOutcomes(t, b.Publish(t.Context(), messages("t", "k", 1, 1)), broker.Unreachable)
}

// B96: nil and empty stay apart in the log.
func TestB96NilAndEmpty(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	r.topic("t", 1)
	b := r.open()
	var msgs []postroom.Message
	for _, emptyKey := range []bool{false, true} {
		for _, payload := range [][]byte{nil, {}} {
			for _, value := range [][]byte{nil, {}} {
				msgs = append(msgs, postroom.Message{
					ID: fmt.Sprint(len(msgs)), Topic: "t", EmptyKey: emptyKey, Payload: payload,
					Headers: []postroom.Header{{Name: "h", Value: value}},
				})
			}
		}
	}
	store(t, b, msgs...)
	for _, rec := range r.read("t", 8) {
		var n int
		if _, err := fmt.Sscan(id(rec), &n); err != nil {
			t.Fatal(err)
		}
		want, h := msgs[n], rec.Headers[len(rec.Headers)-1].Value
		if (rec.Key != nil) != want.EmptyKey || (rec.Value == nil) != (want.Payload == nil) || (h == nil) != (want.Headers[0].Value == nil) {
			t.Errorf("message %d came as key %v, value %v, header %v", n, rec.Key, rec.Value, h)
		}
	}
}

// B97: no later message of a key is stored after an earlier one failed, across
// the batches of a call; other partitions are not delayed; nothing is refused.
func TestB97FailedBatchStopsItsPartition(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	r.topic("t", 4)
	b := r.open(func(c *kafka.Config) { c.BatchBytes = 2000 })
	var msgs []postroom.Message
	for i := range 100 {
		for k := range 10 {
			msgs = append(msgs, messages("t", fmt.Sprint("k", k), i, i)...)
		}
	}
	fails := 0
	r.onProduce(func(req *kmsg.ProduceRequest, res *kmsg.ProduceResponse) (bool, bool) {
		if fails++; fails != 5 {
			return false, fails > 5
		}
		for i := range res.Topics[0].Partitions {
			res.Topics[0].Partitions[i].ErrorCode = kerr.NotEnoughReplicas.Code
		}
		return true, true
	})
	results := b.Publish(t.Context(), msgs)
	failed, unreachable, stored := map[string]bool{}, 0, 0
	var left []postroom.Message
	for i, res := range results {
		switch key := msgs[i].Key; res.Outcome {
		case broker.Stored:
			if stored++; failed[key] {
				t.Fatalf("message %d of key %s is stored after an earlier one failed", i, key)
			}
			continue
		case broker.Unreachable:
			unreachable++
			failed[key] = true
		case broker.NotTried:
			if !failed[key] && len(failed) == 0 {
				t.Errorf("message %d of key %s is not tried, and nothing failed before it", i, key)
			}
		default:
			t.Fatalf("message %d is %v (%v)", i, res.Outcome, res.Err)
		}
		left = append(left, msgs[i])
	}
	if unreachable == 0 || stored < 100 {
		t.Errorf("%d unreachable, %d stored of 1000", unreachable, stored)
	}
	store(t, b, left...)
	seen := map[string][]string{}
	for _, rec := range r.read("t", 1000) {
		seen[string(rec.Key)] = append(seen[string(rec.Key)], id(rec))
	}
	for k := range 10 {
		key := fmt.Sprint("k", k)
		for i, got := range seen[key] {
			if want := fmt.Sprintf("%s-%d", key, i); got != want {
				t.Fatalf("record %d of key %s is %s", i, key, got)
			}
		}
	}
}

// Keys land where Kafka's Java client would put them, by default and by choice.
func TestPartitionsOfJava(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	r.topic("t", 7)
	for _, balancer := range []kafkago.Balancer{nil, kafkago.Murmur2Balancer{}} {
		b := r.open(func(c *kafka.Config) { c.Balancer = balancer })
		var msgs []postroom.Message
		for i := range 50 {
			msgs = append(msgs, messages("t", fmt.Sprint("key", i), 0, 0)...)
		}
		store(t, b, append(msgs, messages("t", "", 1, 70)...)...)
	}
	java := kgo.StickyKeyPartitioner(nil).ForTopic("t")
	none := map[int32]int{}
	for _, rec := range r.read("t", 240) {
		if rec.Key == nil {
			none[rec.Partition]++
		} else if want := java.Partition(rec, 7); want != int(rec.Partition) {
			t.Errorf("key %s is on partition %d, want %d", rec.Key, rec.Partition, want)
		}
	}
	if len(none) != 7 {
		t.Errorf("messages without a key are on %d of 7 partitions", len(none))
	}
}

// A call whose context ends no longer looks at the messages once it has returned.
func TestBuffersAreTheCallersAgain(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	r.topic("t", 3)
	b := r.open()
	for i := range 50 {
		ctx, cancel := context.WithTimeout(t.Context(), time.Duration(i)*100*time.Microsecond)
		msgs := messages("t", "", 1, 200)
		b.Publish(ctx, msgs)
		for j := range msgs {
			copy(msgs[j].Payload, "X") // the race detector watches
			msgs[j].ID = "changed"
		}
		cancel()
	}
	if slices.Contains(recordIDs(r.read("t", 1)), "changed") {
		t.Error("a record was formed after the call")
	}
}

func TestConfigListsEveryProblem(t *testing.T) {
	t.Parallel()
	_, err := kafka.Open(t.Context(), nil, kafka.Config{DialTimeout: -1, PublishTimeout: 1, BatchBytes: 1, RequestBytes: -1, Compression: 9})
	for _, want := range []string{"broker", "DialTimeout", "PublishTimeout", "BatchBytes", "RequestBytes", "Compression"} {
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%v, want it to mention %s", err, want)
		}
	}
}

// No payload, key or header value stands in an error.
func TestErrorsHoldNoContent(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	r.topic("t", 1, "max.message.bytes", "1000")
	b := r.open()
	secret := "s3cr3t"
	m := postroom.Message{
		ID: "1", Topic: "t", Key: secret, Payload: bytes.Repeat([]byte(secret), 1000),
		Headers: []postroom.Header{{Name: "h", Value: []byte(secret)}},
	}
	if res := b.Publish(t.Context(), []postroom.Message{m}); res[0].Outcome != broker.Refused || strings.Contains(res[0].Err.Error(), secret) {
		t.Errorf("%v: %v", res[0].Outcome, res[0].Err)
	}
	m.Payload = nil
	r.failNext(1, kerr.NotEnoughReplicas)
	if res := b.Publish(t.Context(), []postroom.Message{m}); strings.Contains(res[0].Err.Error(), secret) {
		t.Errorf("%v", res[0].Err)
	}
}

func TestOpenFailsWhereNobodyAnswers(t *testing.T) {
	t.Parallel()
	var lc net.ListenConfig
	l, err := lc.Listen(t.Context(), "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	addr := l.Addr().String()
	_ = l.Close()
	if _, err := kafka.Open(t.Context(), []string{addr}, config()); err == nil {
		t.Error("Open = nil, want an error")
	}
}

// Brokers that are away or silent do not keep Open from one that answers.
func TestOpenFindsTheOneThatAnswers(t *testing.T) {
	t.Parallel()
	r := newRig(t, kfake.NumBrokers(1))
	r.topic("t", 1)
	var lc net.ListenConfig
	silent, err := lc.Listen(t.Context(), "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = silent.Close() }()
	const away = "127.0.0.1:1"
	c := config()
	c.DialTimeout = 200 * time.Millisecond
	c.Dial = func(ctx context.Context, network, address string) (net.Conn, error) {
		if address == away {
			<-ctx.Done()
			return nil, ctx.Err()
		}
		return new(net.Dialer).DialContext(ctx, network, address)
	}
	for range 8 { // they are tried in any order
		b, err := kafka.Open(t.Context(), []string{away, silent.Addr().String(), r.brokers[0]}, c)
		if err != nil {
			t.Fatal(err)
		}
		store(t, b, messages("t", "", 1, 1)...)
		if err := b.Close(); err != nil {
			t.Error(err)
		}
	}
}
