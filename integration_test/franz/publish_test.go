package franz_test

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

	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kfake"
	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/twmb/franz-go/pkg/kmsg"

	"github.com/postroom/postroom"
	"github.com/postroom/postroom/broker"
	"github.com/postroom/postroom/broker/franz"
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
	b := r.open(func(c *franz.Config) { c.Dial = gate.dial; c.PublishTimeout = 200 * time.Millisecond })
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
	if err := results[2].Err; !errors.Is(err, kerr.MessageTooLarge) || !strings.Contains(err.Error(), "MESSAGE_TOO_LARGE") {
		t.Errorf("the error is %v, want the broker's MESSAGE_TOO_LARGE", err)
	}
	if got := len(r.read("t", 8)); got != 8 {
		t.Errorf("%d records, want 8", got)
	}
}

// B48: a record's size before compression counts, with every codec; what is
// below the limit comes out as it went in.
func TestB48Compression(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	r.topic("t", 1, "max.message.bytes", "10000")
	for _, k := range []kgo.CompressionCodec{kgo.GzipCompression(), kgo.SnappyCompression(), kgo.Lz4Compression(), kgo.ZstdCompression()} {
		b := r.open(func(c *franz.Config) { c.Compression = k })
		msgs := messages("t", "", 0, 9)
		for i := range msgs {
			msgs[i].Payload = make([]byte, 9000)
		}
		msgs[1].Payload = make([]byte, 50_000)
		want := slices.Repeat([]broker.Outcome{broker.Stored}, 10)
		want[1] = broker.Refused
		wantOutcomes(t, b.Publish(t.Context(), msgs), want...)
	}
	if recs := r.read("t", 36); len(recs[0].Value) != 9000 {
		t.Errorf("%d bytes came, want 9000", len(recs[0].Value))
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

// Records that the broker calls invalid are found by dividing and refused, and
// the others stored.
func TestInvalidRecordsAreRefused(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	r.topic("t", 1)
	b := r.open()
	r.onProduce(func(req *kmsg.ProduceRequest, res *kmsg.ProduceResponse) (bool, bool) {
		p := &res.Topics[0].Partitions[0]
		bad := bytes.Contains(req.Topics[0].Partitions[0].Records, []byte("invalid"))
		if bad {
			p.ErrorCode = kerr.InvalidRecord.Code
		}
		return bad, false
	})
	msgs := slices.Concat(messages("t", "a", 0, 5), messages("t", "b", 0, 5))
	msgs[3].Payload = []byte("invalid")
	want := slices.Repeat([]broker.Outcome{broker.Stored}, 12)
	want[3], want[4], want[5] = broker.Refused, broker.NotTried, broker.NotTried
	wantOutcomes(t, b.Publish(t.Context(), msgs), want...)
	if got := recordIDs(r.read("t", 9)); len(got) != 9 {
		t.Errorf("%d records, want 9", len(got))
	}
}

// B49: what fails on one topic leaves the others' results alone.
func TestB49PartialFailure(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	r.topic("good", 2)
	r.topic("denied", 1)
	b := r.open()
	id := r.topicID("denied")
	r.onProduce(func(req *kmsg.ProduceRequest, res *kmsg.ProduceResponse) (bool, bool) {
		// kfake answers a request as a whole; each topic here has a leader or a call of its own.
		denied := slices.ContainsFunc(req.Topics, func(t kmsg.ProduceRequestTopic) bool { return t.TopicID == id })
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
	if err := results[2].Err; results[2].Scope != "missing" || !strings.Contains(err.Error(), "UNKNOWN_TOPIC_OR_PARTITION") {
		t.Errorf("scope %q, error %v, want the topic and the broker's error", results[2].Scope, err)
	}
	if got := len(r.read("good", 4)); got != 4 {
		t.Errorf("%d records, want 4", got)
	}
}

// B49: a topic whose leader does not come keeps the call that holds it, and delays
// no other call.
func TestB49TroubleOfOneTopicDelaysNoOther(t *testing.T) {
	t.Parallel()
	r := newRig(t, kfake.NumBrokers(1))
	r.topic("good", 2)
	r.topic("away", 1)
	b := r.open()
	id := r.topicID("away")
	asked := make(chan struct{}, 1000)
	r.onProduce(func(req *kmsg.ProduceRequest, res *kmsg.ProduceResponse) (bool, bool) {
		away := len(req.Topics) == 1 && req.Topics[0].TopicID == id
		if away {
			asked <- struct{}{}
			res.Topics[0].Partitions[0].ErrorCode = kerr.NotLeaderForPartition.Code
		}
		return away, false
	})
	results := make(chan []broker.Result, 1)
	go func() { results <- b.Publish(t.Context(), messages("away", "k", 0, 1)) }()
	<-asked
	begun := time.Now()
	for i := range 20 {
		store(t, b, messages("good", "k", i, i)...)
	}
	select {
	case res := <-results:
		t.Fatalf("the call ended before the others began: %v", outcomes(res))
	default:
	}
	if took := time.Since(begun); took > 2*time.Second {
		t.Errorf("20 messages of another topic took %v", took)
	}
	res := <-results
	wantOutcomes(t, res, broker.Unreachable, broker.NotTried)
	if s := res[0].Scope; s != "away/0" {
		t.Errorf("scope is %q", s)
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
	r.failNext(100, kerr.NotEnoughReplicasAfterAppend)
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

// B97: a batch that fails for a moment is sent again before anything behind it.
func TestB97FailureForAMoment(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	r.topic("t", 4, "max.message.bytes", "2000")
	b := r.open()
	msgs := interleaved()
	r.failAt(5, kerr.NotEnoughReplicas)
	store(t, b, msgs...)
	r.wantInOrder(len(msgs))
}

// B97: no later message of a key is stored after an earlier one failed for good,
// across the batches of a call, which are in flight several at a time; other
// partitions are not delayed; nothing is refused.
func TestB97FailedBatchStopsItsPartition(t *testing.T) {
	t.Parallel()
	for at := 1; at < 12; at += 2 {
		r := newRig(t, kfake.NumBrokers(1+at%3))
		r.topic("t", 4, "max.message.bytes", "700")
		b := r.open()
		msgs := interleaved()
		disarm := r.failAt(at, kerr.TopicAuthorizationFailed)
		var left []postroom.Message
		failed, unreachable := map[string]bool{}, 0
		for i, res := range b.Publish(t.Context(), msgs) {
			switch key := msgs[i].Key; res.Outcome {
			case broker.Stored:
				if failed[key] {
					t.Fatalf("message %d of key %s is stored after an earlier one failed", i, key)
				}
				continue
			case broker.Unreachable:
				unreachable++
				failed[key] = true
			case broker.NotTried:
				if !failed[key] {
					t.Errorf("message %d of key %s is not tried, and nothing failed before it", i, key)
				}
			default:
				t.Fatalf("message %d is %v (%v)", i, res.Outcome, res.Err)
			}
			left = append(left, msgs[i])
		}
		if fired := disarm(); fired != (unreachable > 0) || unreachable > 10 || at < 5 && !fired {
			t.Errorf("%d unreachable, want one of each key of a failed batch's partition", unreachable)
		}
		store(t, b, left...)
		r.wantInOrder(len(msgs))
	}
}

// interleaved returns a hundred messages of each of ten keys, in turns.
func interleaved() (msgs []postroom.Message) {
	for i := range 100 {
		for k := range 10 {
			msgs = append(msgs, messages("t", fmt.Sprint("k", k), i, i)...)
		}
	}
	return msgs
}

// failAt answers the nth produce request with an error for every partition.
// disarm reports whether it has.
func (r *rig) failAt(n int, code *kerr.Error) (disarm func() bool) {
	var left atomic.Int32
	left.Store(int32(n))
	r.onProduce(func(_ *kmsg.ProduceRequest, res *kmsg.ProduceResponse) (bool, bool) {
		if left.Add(-1) != 0 {
			return false, false
		}
		for i := range res.Topics {
			for j := range res.Topics[i].Partitions {
				res.Topics[i].Partitions[j].ErrorCode = code.Code
			}
		}
		return true, true
	})
	return func() bool { return left.Swap(0) <= 0 }
}

// wantInOrder reads n records, and wants first arrivals of each key in order.
func (r *rig) wantInOrder(n int) {
	r.t.Helper()
	seen := map[string][]string{}
	all := 0
	for _, rec := range r.read("t", n) {
		if k := string(rec.Key); !slices.Contains(seen[k], id(rec)) {
			seen[k] = append(seen[k], id(rec))
			all++
		}
	}
	if all != n {
		r.t.Errorf("%d of %d messages are stored, the others are repeats", all, n)
	}
	for key, ids := range seen {
		for i, got := range ids {
			if want := fmt.Sprintf("%s-%d", key, i); got != want {
				r.t.Fatalf("record %d of key %s is %s", i, key, got)
			}
		}
	}
}

// Keys land where Kafka's Java client would put them, by default and by choice.
func TestPartitionsOfJava(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	r.topic("t", 7)
	for _, options := range [][]kgo.Opt{nil, {kgo.RecordPartitioner(kgo.StickyKeyPartitioner(nil))}} {
		b := r.open(func(c *franz.Config) { c.Options = options })
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
	store(t, b, messages("t", "", 1, 1)...) // on a slow machine none was in time
	if slices.Contains(recordIDs(r.read("t", 1)), "changed") {
		t.Error("a record was formed after the call")
	}
}

func TestConfigListsEveryProblem(t *testing.T) {
	t.Parallel()
	_, err := franz.Open(t.Context(), nil, franz.Config{DialTimeout: -1, PublishTimeout: 1, SessionTimeout: 1, FetchBytes: -1})
	for _, want := range []string{"broker", "DialTimeout", "PublishTimeout", "SessionTimeout", "FetchBytes"} {
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%v, want it to mention %s", err, want)
		}
	}
}

// B50: options that would weaken a promise are refused by name.
func TestB50UnsafeOptions(t *testing.T) {
	t.Parallel()
	for _, test := range []struct {
		want    string
		options []kgo.Opt
	}{
		{"RequiredAcks", []kgo.Opt{kgo.RequiredAcks(kgo.NoAck()), kgo.DisableIdempotentWrite()}},
		{"DisableIdempotentWrite", []kgo.Opt{kgo.RequiredAcks(kgo.LeaderAck()), kgo.DisableIdempotentWrite()}},
		{"fit together", []kgo.Opt{kgo.RequiredAcks(kgo.LeaderAck())}},
		{"AllowAutoTopicCreation", []kgo.Opt{kgo.AllowAutoTopicCreation()}},
		{"TransactionalID", []kgo.Opt{kgo.TransactionalID("tx")}},
		{"ConsumeTopics", []kgo.Opt{kgo.ConsumeTopics("other")}},
		{"ConsumerGroup", []kgo.Opt{kgo.ConsumerGroup("other"), kgo.ConsumeTopics("other")}},
		{"ConsumePartitions", []kgo.Opt{kgo.ConsumePartitions(map[string]map[int32]kgo.Offset{"other": {0: kgo.NewOffset()}})}},
	} {
		_, err := franz.Open(t.Context(), []string{"127.0.0.1:9"}, franz.Config{Options: test.options})
		if err == nil || !strings.Contains(err.Error(), test.want) {
			t.Errorf("%v, want it to mention %s", err, test.want)
		}
	}
	r := newRig(t)
	r.open(func(c *franz.Config) { c.Options = []kgo.Opt{kgo.Rack("a"), kgo.ConnIdleTimeout(time.Minute)} })
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
	r.failNext(100, kerr.NotEnoughReplicas)
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
	if _, err := franz.Open(t.Context(), []string{addr}, config()); err == nil {
		t.Error("Open = nil, want an error")
	}
}
