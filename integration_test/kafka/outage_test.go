package kafka_test

import (
	"errors"
	"flag"
	"fmt"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	kafkago "github.com/segmentio/kafka-go"
	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/twmb/franz-go/pkg/kmsg"

	"github.com/postroom/postroom"
	"github.com/postroom/postroom/broker"
	"github.com/postroom/postroom/broker/kafka"
	"github.com/postroom/postroom/internal/throwaway"
)

var faultFlag = flag.Duration("fault", time.Second, "how long stalls, outages and idle times last")

// B46: a broker that is silent for long costs no memory, goroutines or connections,
// and nothing of what was cut off is sent once it answers again.
func TestB46LongStall(t *testing.T) {
	r := newRig(t)
	r.topic("t", 3)
	gate := newGate(t)
	b := r.open(func(c *kafka.Config) {
		c.Dial, c.PublishTimeout, c.DialTimeout = gate.dial, 50*time.Millisecond, 50*time.Millisecond
	})
	store(t, b, messages("t", "k", 0, 0)...)
	heap, goroutines := heapBytes(), runtime.NumGoroutine()
	msgs := messages("t", "k", 1, 100)
	for i := range msgs {
		msgs[i].Payload = make([]byte, 10_000)
	}
	gate.shut(true)
	for begun := time.Now(); time.Since(begun) < *faultFlag; {
		results := b.Publish(t.Context(), msgs)
		if results[0].Outcome != broker.Unreachable || results[1].Outcome != broker.NotTried {
			t.Fatalf("%v, %v (%v)", results[0].Outcome, results[1].Outcome, results[0].Err)
		}
	}
	if n := gate.open(); n > 30 {
		t.Errorf("%d connections are open", n)
	}
	if n := runtime.NumGoroutine() - goroutines; n > 150 {
		t.Errorf("%d goroutines more than before", n)
	}
	if grown := heapBytes() - heap; grown > 50<<20 {
		t.Errorf("the heap grew by %d bytes", grown)
	}
	gate.shut(false)
	// The timeout was chosen for the stall.
	until(t, "all are stored", func() bool { return b.Publish(t.Context(), msgs)[99].Outcome == broker.Stored })
	first := firstArrivals(recordIDs(r.read("t", 101)))
	for i, id := range first {
		if id != fmt.Sprint("k-", i) {
			t.Fatalf("first arrival %d is %s", i, id)
		}
	}
}

func heapBytes() int64 {
	var m runtime.MemStats
	runtime.GC()
	runtime.ReadMemStats(&m)
	return int64(m.HeapAlloc)
}

// B53: connections that died unnoticed while they were idle, as behind a firewall
// that forgets them, cost one timeout and no message.
func TestB53IdleConnectionsDie(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	r.topic("t", 3)
	gate := newGate(t)
	b := r.open(func(c *kafka.Config) { c.Dial, c.PublishTimeout = gate.dial, 300*time.Millisecond })
	for i := range 3 {
		store(t, b, messages("t", "k", i, i)...)
		gate.deaden()
		<-time.After(*faultFlag / 3)
		begun := time.Now()
		results := b.Publish(t.Context(), messages("t", "k", i+1, i+1))
		if took := time.Since(begun); took > 5*time.Second {
			t.Errorf("Publish took %v with a timeout of 300ms", took)
		}
		// Idle for longer than the transport keeps connections, there are none to die.
		if o := results[0].Outcome; o != broker.Unreachable && o != broker.Stored {
			t.Fatalf("%v (%v)", o, results[0].Err)
		}
		store(t, b, messages("t", "k", i+1, i+1)...)
	}
}

// B52: a topic whose brokers do not know it yet, or that has no leader, for a
// while after it was created is away, and no message's fault.
func TestB52UnknownForAWhile(t *testing.T) {
	t.Parallel()
	for _, code := range []*kerr.Error{kerr.UnknownTopicOrPartition, kerr.LeaderNotAvailable} {
		t.Run(code.Message, func(t *testing.T) {
			t.Parallel()
			r := newRig(t)
			r.topic("t", 3)
			r.topic("other", 3)
			b := r.open()
			layout := r.without("t", code)
			known := time.Now().Add(*faultFlag)
			r.cluster.ControlKey(int16(kmsg.Metadata), func(kreq kmsg.Request) (kmsg.Response, error, bool) {
				if time.Now().After(known) {
					return nil, nil, false
				}
				r.cluster.KeepControl()
				res := layout
				res.Version = kreq.GetVersion()
				return &res, nil, true
			})
			r.onProduce(func(req *kmsg.ProduceRequest, res *kmsg.ProduceResponse) (bool, bool) {
				if !slices.ContainsFunc(req.Topics, func(t kmsg.ProduceRequestTopic) bool { return t.Topic == "t" }) {
					return false, false
				}
				for i := range res.Topics {
					for j := range res.Topics[i].Partitions {
						res.Topics[i].Partitions[j].ErrorCode = code.Code
					}
				}
				over := time.Now().After(known)
				return !over, over
			})
			awayFor := 0
			until(t, "the topic is known", func() bool {
				results := b.Publish(t.Context(), append(messages("t", "k", 0, 1), messages("other", "k", awayFor, awayFor)...))
				if results[2].Outcome != broker.Stored {
					t.Fatalf("the other topic's message is %v (%v)", results[2].Outcome, results[2].Err)
				}
				if results[0].Outcome == broker.Stored {
					return true
				}
				awayFor++
				wantOutcomes(t, results[:2], broker.Unreachable, broker.NotTried)
				return false
			})
			if awayFor == 0 {
				t.Error("the topic was never away")
			}
		})
	}
}

// without returns the cluster's present layout, with one topic that is away.
func (r *rig) without(topic string, code *kerr.Error) kmsg.MetadataResponse {
	r.t.Helper()
	req := kmsg.NewPtrMetadataRequest()
	req.Topics = nil
	res, err := req.RequestWith(r.t.Context(), r.admin)
	if err != nil {
		r.t.Fatal(err)
	}
	for i := range res.Topics {
		if t := &res.Topics[i]; *t.Topic == topic {
			t.ErrorCode, t.Partitions = code.Code, nil
		}
	}
	return *res
}

// B97: a partition whose replicas are too few fails alone, together with those of
// its messages that stand behind, and later takes them in order.
func TestB97NotEnoughReplicasOfOnePartition(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	r.topic("t", 3)
	for p := range int32(3) {
		if err := r.cluster.MoveTopicPartition("t", p, p); err != nil {
			t.Fatal(err)
		}
	}
	b := r.open(func(c *kafka.Config) { c.BatchBytes = 2000 })
	batches := 0
	r.onProduce(func(req *kmsg.ProduceRequest, res *kmsg.ProduceResponse) (handled, done bool) {
		if req.Topics[0].Partitions[0].Partition != 1 {
			return false, false
		}
		batches++
		if batches != 3 {
			return false, batches > 3
		}
		res.Topics[0].Partitions[0].ErrorCode = kerr.NotEnoughReplicas.Code
		return true, true
	})
	var msgs []postroom.Message
	for i := range 50 {
		for k := range 20 {
			msgs = append(msgs, messages("t", fmt.Sprint("k", k), i, i)...)
		}
	}
	var left []postroom.Message
	failed := make(map[string]bool)
	for i, res := range b.Publish(t.Context(), msgs) {
		if res.Outcome == broker.Stored {
			continue
		}
		left = append(left, msgs[i])
		if !failed[msgs[i].Key] && res.Outcome == broker.Unreachable {
			failed[msgs[i].Key] = true
			if res.Scope != "t/1" || !errors.Is(res.Err, kafkago.NotEnoughReplicas) {
				t.Errorf("scope %q, error %v", res.Scope, res.Err)
			}
		}
	}
	if len(left) == 0 || len(left) == len(msgs) {
		t.Fatalf("%d of %d messages are not stored", len(left), len(msgs))
	}
	store(t, b, left...)
	next, on := make(map[string]int), make(map[string]int32)
	for _, rec := range r.read("t", len(msgs)) {
		key := string(rec.Key)
		if want := fmt.Sprintf("%s-%d", key, next[key]); id(rec) != want {
			t.Fatalf("of key %s came %s, want %s", key, id(rec), want)
		}
		next[key]++
		on[key] = rec.Partition
	}
	for _, m := range left {
		if on[m.Key] != 1 {
			t.Fatalf("a message of partition %d failed", on[m.Key])
		}
	}
}

// B53: Apache Kafka that is killed, stopped and paused while messages are
// published loses none, and keeps every key in order.
func TestB53ApacheKafkaGoesAway(t *testing.T) {
	t.Parallel()
	k := startReal(t, throwaway.KafkaConfig{})
	r := &rig{t: t, brokers: k.Brokers, admin: newClient(t, k.Brokers)}
	r.topic("t", 4)
	b := r.open(func(c *kafka.Config) { c.PublishTimeout = time.Second })
	var published atomic.Int64
	var stop atomic.Bool
	var wg sync.WaitGroup
	const keys = 4
	last := make([]int, keys)
	for k := range keys {
		wg.Go(func() {
			for next := 0; !stop.Load(); next = last[k] {
				for _, res := range b.Publish(t.Context(), messages("t", fmt.Sprint("k", k), next, next+9)) {
					switch res.Outcome {
					case broker.Stored:
						last[k]++
						published.Add(1)
					case broker.Refused:
						t.Errorf("refused: %v", res.Err)
					}
				}
			}
		})
	}
	goesOn := func(what string) {
		t.Helper()
		before := published.Load()
		until(t, "publishing goes on after "+what, func() bool { return published.Load() > before+1000 })
	}
	must := func(err error) {
		t.Helper()
		if err != nil {
			stop.Store(true)
			t.Fatal(err)
		}
	}
	goesOn("the start")
	must(k.Kill(t.Context()))
	must(k.Start(t.Context()))
	goesOn("a kill")
	must(k.Restart(t.Context()))
	goesOn("a restart")
	must(k.Pause())
	<-time.After(*faultFlag + 500*time.Millisecond)
	must(k.Resume())
	goesOn("a pause")
	stop.Store(true)
	wg.Wait()
	next := make(map[string]int)
	cl := newClient(t, r.brokers, kgo.ConsumeTopics("t"), kgo.ConsumeResetOffset(kgo.NewOffset().AtStart()))
	until(t, "everything that was stored is read", func() bool {
		for _, rec := range cl.PollFetches(t.Context()).Records() {
			key := string(rec.Key)
			var n int
			if _, err := fmt.Sscanf(id(rec), key+"-%d", &n); err != nil {
				t.Fatal(err)
			}
			if n > next[key] {
				t.Fatalf("of key %s came %d before %d", key, n, next[key])
			}
			next[key] = max(next[key], n+1)
		}
		for k, n := range last {
			if next[fmt.Sprint("k", k)] < n {
				return false
			}
		}
		return true
	})
}
