package kafka_test

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kfake"
	"github.com/twmb/franz-go/pkg/kmsg"

	"github.com/postroom/postroom"
	"github.com/postroom/postroom/broker"
	"github.com/postroom/postroom/broker/kafka"
)

var soakFlag = flag.Duration("soak", 20*time.Second, "how long members come and go in the test of a group")

// sessionTimeout is that of these tests.
const sessionTimeout = 2 * time.Second

// A ledger is where a group's effects come out, and what they must be.
type ledger struct {
	mu       sync.Mutex
	next     map[string]int // by key: the number of the next effect
	effects  int
	repeats  int
	settled  []map[int64]bool // by partition: offsets handled and not in prefix
	prefix   []int64          // by partition: all before it are handled
	last     []time.Time      // by partition: the last effect
	longest  time.Duration    // between two effects of a partition
	problems []string
}

func newLedger(partitions int) *ledger {
	l := &ledger{next: make(map[string]int), prefix: make([]int64, partitions), last: make([]time.Time, partitions)}
	for range partitions {
		l.settled = append(l.settled, make(map[int64]bool))
	}
	return l
}

// handle has the effect of a message, once. Those of a key must come in order.
func (l *ledger) handle(d broker.Delivery) {
	m, at := d.Message(), d.Position()
	l.mu.Lock()
	defer l.mu.Unlock()
	var n int
	if _, err := fmt.Sscanf(string(m.Payload), "%d", &n); err != nil {
		l.problems = append(l.problems, err.Error())
	}
	switch want := l.next[m.Key]; {
	case n == want:
		l.next[m.Key]++
		l.effects++
	case n > want:
		l.problems = append(l.problems, fmt.Sprintf("effect %d of key %q comes before %d", n, m.Key, want))
	default:
		l.repeats++
	}
	p, o := at.Partition, int64(at.Offset)
	l.settled[p][o] = true
	for l.settled[p][l.prefix[p]] {
		delete(l.settled[p], l.prefix[p])
		l.prefix[p]++
	}
	now := time.Now()
	if was := l.last[p]; !was.IsZero() {
		l.longest = max(l.longest, now.Sub(was))
	}
	l.last[p] = now
}

// watch checks that no offset is committed that is not settled, and none less than
// before, until ctx ends.
func (l *ledger) watch(ctx context.Context, r *rig, topic string) {
	highest := slices.Repeat([]int64{-1}, len(l.prefix))
	tick := time.NewTicker(50 * time.Millisecond)
	defer tick.Stop()
	for {
		select {
		case <-tick.C:
		case <-ctx.Done():
			return
		}
		for p := range highest {
			o := r.committed(topic, int32(p))
			l.mu.Lock()
			if o > l.prefix[p] {
				l.problems = append(l.problems, fmt.Sprintf("partition %d: offset %d is committed, and %d is unsettled", p, o, l.prefix[p]))
			}
			if o < highest[p] {
				l.problems = append(l.problems, fmt.Sprintf("partition %d: offset %d is committed after %d", p, o, highest[p]))
			}
			l.mu.Unlock()
			highest[p] = o
		}
	}
}

// work runs a member until it ends. Work that has not begun does not begin when it
// is lost; the errors of settling it are expected.
func (l *ledger) work(t *testing.T, ctx context.Context, bus *kafka.Bus, topic string) error {
	const most = 50
	queue := make(chan broker.Delivery, most)
	var wg sync.WaitGroup
	wg.Go(func() {
		for d := range queue {
			select {
			case <-d.Lost():
			default:
				l.handle(d)
			}
			if err := d.Ack(context.WithoutCancel(ctx)); err != nil && !errors.Is(err, broker.ErrLost) {
				t.Errorf("ack: %v", err)
			}
		}
	})
	err := bus.Subscribe(ctx, broker.Subscription{Group: "group-" + topic, Topic: topic, MaxInFlight: most},
		func(d broker.Delivery) { queue <- d })
	close(queue)
	wg.Wait()
	return err
}

// Three members of a group come, go and are killed while messages for 16
// partitions are published: each effect happens once, those of a key in order, no
// offset is committed too far or goes back, and no partition stands still for
// longer than two session timeouts.
func TestGroupUnderLoad(t *testing.T) {
	t.Parallel()
	const (
		topic      = "soak"
		partitions = 16
		keys       = 200
	)
	r := sharedRig(t)
	r.topic(topic, partitions)
	l := newLedger(partitions)
	seed := rand.Uint64()
	t.Logf("seed %d", seed)

	ctx, stop := context.WithCancel(t.Context())
	defer stop()
	var members, others sync.WaitGroup
	others.Go(func() { l.watch(ctx, r, topic) })
	load, done := context.WithTimeout(ctx, *soakFlag)
	defer done()
	published := make(chan int, 1)
	others.Go(func() { published <- publishUntil(t, load, r.open(), topic, keys) })

	var killed, left int
	var lastKill time.Time // kills that overlap add up
	for slot := range 3 {
		life := rand.New(rand.NewPCG(seed, uint64(slot)+1))
		members.Go(func() {
			for ctx.Err() == nil {
				mctx, leave := context.WithCancel(ctx)
				bus := r.open(func(c *kafka.Config) { c.SessionTimeout = sessionTimeout })
				ended := make(chan error, 1)
				go func() { ended <- l.work(t, mctx, bus, topic) }()
				kill := life.IntN(2) == 0
				select {
				case <-time.After(time.Second + time.Duration(life.IntN(5000))*time.Millisecond):
				case <-ctx.Done():
					kill = false
				}
				if load.Err() != nil { // the last ones stay until all is handled
					<-ctx.Done()
					kill = false
				}
				l.mu.Lock()
				if kill = kill && time.Since(lastKill) > 2*sessionTimeout; kill {
					killed, lastKill = killed+1, time.Now()
				} else {
					left++
				}
				l.mu.Unlock()
				var want error
				if kill {
					want = broker.ErrClosed
					_ = bus.Close()
				} else {
					leave()
				}
				if err := <-ended; !errors.Is(err, want) {
					t.Errorf("Subscribe = %v, want %v", err, want)
				}
				leave()
				_ = bus.Close()
			}
		})
	}
	<-load.Done()
	total := <-published
	until(t, "every message is handled", func() bool {
		l.mu.Lock()
		defer l.mu.Unlock()
		return l.effects == total || len(l.problems) > 0
	})
	stop()
	members.Wait()
	others.Wait()
	t.Logf("%d effects, %d repeats; %d members were killed and %d left; no partition stood still for more than %v",
		l.effects, l.repeats, killed, left, l.longest.Round(time.Millisecond))
	if len(l.problems) > 0 {
		t.Errorf("%d problems, the first: %v", len(l.problems), l.problems[:min(5, len(l.problems))])
	}
	if l.longest > 2*sessionTimeout {
		t.Errorf("a partition stood still for %v, want at most two session timeouts, %v", l.longest, 2*sessionTimeout)
	}
}

// publishUntil publishes messages of all keys until ctx ends, and returns how many.
func publishUntil(t *testing.T, ctx context.Context, bus *kafka.Bus, topic string, keys int) int {
	tick := time.NewTicker(100 * time.Millisecond)
	defer tick.Stop()
	rounds := 0
	for ; ctx.Err() == nil; rounds++ {
		msgs := make([]postroom.Message, keys)
		for i := range msgs {
			msgs[i] = postroom.Message{
				ID: fmt.Sprintf("%d-%d", i, rounds), Topic: topic, Key: fmt.Sprint("key", i), Payload: fmt.Append(nil, rounds),
			}
		}
		for i, res := range bus.Publish(context.WithoutCancel(ctx), msgs) {
			if res.Outcome != broker.Stored {
				t.Errorf("message %d: %v", i, res.Err)
			}
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
		}
	}
	return rounds * keys
}

// What a coordinator may answer, and what may become of it: messages flow again
// within two session timeouts, none is passed over, and trouble that was told is
// told to be over.
func TestMembershipFaults(t *testing.T) {
	t.Parallel()
	newPair := func(t *testing.T) (*rig, *kafka.Bus, *gate) {
		t.Helper()
		r := newRig(t, kfake.GroupMinSessionTimeout(sessionTimeout))
		r.topic("t", 3)
		g := newGate(t)
		return r, r.open(func(c *kafka.Config) { c.SessionTimeout, c.Dial = sessionTimeout, g.dial }), g
	}
	// flows publishes and waits until all that is unsettled has come.
	flows := func(t *testing.T, r *rig, c *consumer, from, to int) {
		t.Helper()
		begun := time.Now()
		store(t, r.open(), messages("t", "", from, to)...)
		missing := ids(messages("t", "", from, to))
		for len(missing) > 0 {
			d := c.next()
			if i := slices.Index(missing, d.Message().ID); i >= 0 {
				missing = slices.Delete(missing, i, i+1)
			}
			if err := d.Ack(t.Context()); err != nil && !errors.Is(err, broker.ErrLost) {
				t.Fatal(err)
			}
		}
		if took := time.Since(begun); took > 2*sessionTimeout {
			t.Errorf("messages came again after %v, want at most %v", took, 2*sessionTimeout)
		}
	}
	allCommitted := func(t *testing.T, r *rig, n int) {
		t.Helper()
		until(t, "all is committed", func() bool {
			sum := int64(0)
			for p := range int32(3) {
				sum += max(r.committed("t", p), 0)
			}
			return sum == int64(n)
		})
	}
	whole := func(t *testing.T, r *rig, c *consumer, n int) {
		t.Helper()
		allCommitted(t, r, n)
		until(t, "no trouble is left", func() bool {
			all := c.troubles()
			return len(all) == 0 || all[len(all)-1] == nil
		})
		c.stop()
	}

	for _, key := range []kmsg.Key{kmsg.Heartbeat, kmsg.OffsetCommit, kmsg.JoinGroup, kmsg.SyncGroup} {
		for _, code := range []*kerr.Error{
			kerr.NotCoordinator, kerr.CoordinatorLoadInProgress, kerr.CoordinatorNotAvailable, kerr.UnknownMemberID,
			kerr.IllegalGeneration, kerr.RebalanceInProgress,
		} {
			if key == kmsg.JoinGroup && (code == kerr.IllegalGeneration || code == kerr.RebalanceInProgress) {
				continue // no answer to that
			}
			t.Run(fmt.Sprint(key.Name(), " ", code.Message), func(t *testing.T) {
				t.Parallel()
				r, bus, _ := newPair(t)
				joins := key == kmsg.JoinGroup || key == kmsg.SyncGroup
				var told <-chan struct{}
				if joins {
					told = r.answer(key, 2, code)
				}
				c := consume(t, bus, "t", 10)
				if !joins {
					flows(t, r, c, 1, 10)
					told = r.answer(key, 2, code)
				}
				flows(t, r, c, 11, 20)
				select {
				case <-told:
				case <-time.After(patience):
					t.Fatalf("no %s came", key.Name())
				}
				flows(t, r, c, 21, 30)
				n := 30
				if joins {
					n = 20
				}
				whole(t, r, c, n)
			})
		}
	}
	t.Run("the coordinator moves", func(t *testing.T) {
		t.Parallel()
		r, bus, _ := newPair(t)
		c := consume(t, bus, "t", 10)
		for i := range 3 {
			flows(t, r, c, 10*i+1, 10*i+10)
			r.cluster.RehashCoordinators()
		}
		flows(t, r, c, 31, 40)
		whole(t, r, c, 40)
	})
	t.Run("the coordinator is killed", func(t *testing.T) {
		t.Parallel()
		r, bus, _ := newPair(t)
		c := consume(t, bus, "t", 10)
		flows(t, r, c, 1, 10)
		if err := r.cluster.RemoveNode(r.cluster.CoordinatorFor("group-t")); err != nil {
			t.Fatal(err)
		}
		flows(t, r, c, 11, 20)
		whole(t, r, c, 20)
	})
	t.Run("all are silent for longer than the session", func(t *testing.T) {
		t.Parallel()
		r, bus, g := newPair(t)
		c := consume(t, bus, "t", 10)
		flows(t, r, c, 1, 10)
		allCommitted(t, r, 10)
		store(t, r.open(), messages("t", "", 11, 11)...)
		held := c.next()
		g.shut(true)
		select {
		case <-held.Lost():
		case <-time.After(patience):
			t.Fatal("a delivery is not lost although the group may have given it to others")
		}
		if err := held.Ack(t.Context()); !errors.Is(err, broker.ErrLost) {
			t.Errorf("ack of a lost delivery = %v", err)
		}
		g.shut(false)
		if id := c.take(1)[0].ID; id != "11" {
			t.Errorf("message %s comes, want the one that was lost", id)
		}
		flows(t, r, c, 12, 20)
		whole(t, r, c, 20)
	})
}

// answer has the next n requests of a kind answered with an error, and returns a
// channel that is closed when they were.
func (r *rig) answer(key kmsg.Key, n int, code *kerr.Error) <-chan struct{} {
	told := make(chan struct{})
	r.cluster.ControlKey(int16(key), func(req kmsg.Request) (kmsg.Response, error, bool) {
		r.cluster.KeepControl()
		if n--; n < 0 {
			return nil, nil, false
		} else if n == 0 {
			close(told)
		}
		res := req.ResponseKind()
		switch res := res.(type) {
		case *kmsg.HeartbeatResponse:
			res.ErrorCode = code.Code
		case *kmsg.JoinGroupResponse:
			res.ErrorCode = code.Code
		case *kmsg.SyncGroupResponse:
			res.ErrorCode = code.Code
		case *kmsg.OffsetCommitResponse:
			for _, t := range req.(*kmsg.OffsetCommitRequest).Topics {
				rt := kmsg.NewOffsetCommitResponseTopic()
				rt.Topic = t.Topic
				for _, p := range t.Partitions {
					rp := kmsg.NewOffsetCommitResponseTopicPartition()
					rp.Partition, rp.ErrorCode = p.Partition, code.Code
					rt.Partitions = append(rt.Partitions, rp)
				}
				res.Topics = append(res.Topics, rt)
			}
		}
		return res, nil, true
	})
	return told
}
