package kafka_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kfake"
	"github.com/twmb/franz-go/pkg/kmsg"

	"github.com/postroom/postroom/broker"
	"github.com/postroom/postroom/broker/kafka"
)

// wantLost waits until a delivery is lost.
func wantLost(t testing.TB, d broker.Delivery) {
	t.Helper()
	select {
	case <-d.Lost():
	case <-time.After(patience):
		t.Fatal("a delivery is not lost although the group may have given it to others")
	}
	if err := d.Ack(t.Context()); !errors.Is(err, broker.ErrLost) {
		t.Errorf("ack of a lost delivery = %v", err)
	}
}

// A member that the coordinator does not count, or that has missed what a generation
// gave to whom, gives up what it holds, and gets it again.
func TestDisownedMemberLosesItsPartitions(t *testing.T) {
	t.Parallel()
	rejoin := kerr.RebalanceInProgress
	for _, c := range []struct {
		name string
		key  kmsg.Key
		code *kerr.Error
	}{
		{"unknown", kmsg.Heartbeat, kerr.UnknownMemberID},
		{"of another generation", kmsg.Heartbeat, kerr.IllegalGeneration},
		{"without an answer what it is given", kmsg.SyncGroup, kerr.NotCoordinator},
		{"late to be given something", kmsg.SyncGroup, kerr.RebalanceInProgress},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			r := newRig(t)
			r.topic("t", 1)
			bus := r.open()
			store(t, bus, messages("t", "", 1, 1)...)
			s := consume(t, bus, "t", 1)
			held := s.next()
			r.answer(c.key, 1, c.code)
			if c.key == kmsg.SyncGroup {
				r.answer(kmsg.Heartbeat, 1, rejoin)
			}
			wantLost(t, held)
			wantIDs(t, s.take(1), "1")
			s.stop()
			r.untilCommitted("t", 0, 1)
		})
	}
}

// A member that only has to join again keeps what it holds.
func TestDividedAnewHandlersGoOn(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	r.topic("t", 1)
	bus := r.open()
	store(t, bus, messages("t", "", 1, 2)...)
	c := consume(t, bus, "t", 2)
	held := []broker.Delivery{c.next(), c.next()}
	divided, beats := r.count(kmsg.SyncGroup), r.count(kmsg.Heartbeat)
	<-r.answer(kmsg.Heartbeat, 1, kerr.RebalanceInProgress)
	until(t, "the group is divided anew", func() bool { return divided.Load() == 1 })
	after := beats.Load()
	until(t, "the member has what it was given", func() bool { return beats.Load() > after })
	ended, cancel := context.WithCancel(t.Context())
	cancel()
	for _, d := range held {
		if err := d.Ack(ended); err != nil { // it waits for nothing
			t.Error(err)
		}
	}
	c.stop()
	r.untilCommitted("t", 0, 2)
}

// count counts the requests of a kind from here on.
func (r *rig) count(key kmsg.Key) *atomic.Int32 {
	n := new(atomic.Int32)
	r.cluster.ControlKey(int16(key), func(kmsg.Request) (kmsg.Response, error, bool) {
		r.cluster.KeepControl()
		n.Add(1)
		return nil, nil, false
	})
	return n
}

// Lost is closed one session after the coordinator's last answer, whatever the
// member waits for: here, to join again.
func TestLostInTime(t *testing.T) {
	t.Parallel()
	const session = 6 * time.Second
	r := newRig(t)
	r.topic("t", 1)
	g := newGate(t)
	bus := r.open(func(c *kafka.Config) { c.SessionTimeout, c.Dial = session, g.dial })
	store(t, bus, messages("t", "", 1, 1)...)
	c := consume(t, bus, "t", 1)
	held := c.next()
	silent := make(chan time.Time, 1)
	r.cluster.ControlKey(int16(kmsg.Heartbeat), func(req kmsg.Request) (kmsg.Response, error, bool) {
		g.shut(true) // the answer arrives, and what is sent then does not
		silent <- time.Now()
		res := req.ResponseKind().(*kmsg.HeartbeatResponse)
		res.ErrorCode = kerr.RebalanceInProgress.Code
		return res, nil, true
	})
	begun := <-silent
	wantLost(t, held)
	if took := time.Since(begun); took > session*5/4 {
		t.Errorf("the delivery is lost after %v, want %v", took, session)
	}
	g.shut(false)
	wantIDs(t, c.take(1), "1")
	c.stop()
}

// A topic that is deleted and made anew is read from its start, by each member of
// the group, and what was held of the old one is lost.
func TestTopicMadeAnew(t *testing.T) {
	both(t, func(t *testing.T, r *rig) {
		r.topic("anew", 2)
		bus, other := r.open(), r.open()
		one := consume(t, bus, "anew", 10)
		two := consume(t, other, "anew", 10)
		took := flow(r.open(), "anew", one, two)
		committed := func() int64 { return r.committed("anew", 0) + r.committed("anew", 1) }
		took(t, "old")
		for i := range 2 {
			until(t, "all is committed", func() bool { return committed() == 20 })
			r.deleteTopic("anew")
			until(t, "both members notice", func() bool {
				return told(one, "was deleted") > i && told(two, "was deleted") > i
			})
			r.topic("anew", 2)
			took(t, fmt.Sprint("new", i))
			until(t, "no trouble is left", func() bool { return untroubled(one) && untroubled(two) })
		}
		one.stop()
		two.stop()
		if n := committed(); n != 20 {
			t.Errorf("offsets up to %d are committed, want 20", n)
		}
	})
}

func (r *rig) deleteTopic(name string) {
	r.t.Helper()
	req := kmsg.NewPtrDeleteTopicsRequest()
	topic := kmsg.NewDeleteTopicsRequestTopic()
	topic.Topic = &name
	req.Topics, req.TopicNames = append(req.Topics, topic), []string{name}
	res, err := req.RequestWith(r.t.Context(), r.admin)
	if err != nil || res.Topics[0].ErrorCode != 0 {
		r.t.Fatalf("delete topic: %+v, %v", res, err)
	}
}

// told returns how often a consumer began to be told of a trouble.
func told(c *consumer, what string) (n int) {
	was := false
	for _, err := range c.troubles() {
		is := err != nil && strings.Contains(err.Error(), what)
		if is && !was {
			n++
		}
		was = is
	}
	return n
}

func untroubled(c *consumer) bool {
	all := c.troubles()
	return len(all) == 0 || all[len(all)-1] == nil
}

// flow has consumers ack all that comes to them, and returns a function that
// publishes twenty messages and waits until all have come to one or the other.
func flow(p broker.Publisher, topic string, consumers ...*consumer) func(t *testing.T, run string) {
	var mu sync.Mutex
	came := make(map[string]bool)
	for _, c := range consumers {
		go func() {
			for {
				select {
				case d := <-c.arrived:
					if err := d.Ack(c.t.Context()); err == nil {
						mu.Lock()
						came[d.Message().ID] = true
						mu.Unlock()
					}
				case <-c.t.Context().Done():
					return
				}
			}
		}()
	}
	return func(t *testing.T, run string) {
		t.Helper()
		msgs := messages(topic, run, 1, 20)
		for i := range msgs {
			msgs[i].Key = fmt.Sprint(i) // both partitions get some
		}
		store(t, p, msgs...)
		until(t, "all messages of run "+run, func() bool {
			mu.Lock()
			defer mu.Unlock()
			return !slices.ContainsFunc(ids(msgs), func(id string) bool { return !came[id] })
		})
	}
}

// One member of two is killed, or leaves: the other one has all partitions within
// two session timeouts, and within one.
func TestTakeover(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		name, topic string
		most        time.Duration
		end         func(t *testing.T, bus *kafka.Bus, c *consumer)
	}{
		{"after a kill", "killed", 2 * sessionTimeout, func(t *testing.T, bus *kafka.Bus, c *consumer) {
			if err := bus.Close(); err != nil {
				t.Error(err)
			}
			if err := <-c.ended; !errors.Is(err, broker.ErrClosed) {
				t.Errorf("Subscribe = %v, want ErrClosed", err)
			}
		}},
		{"after leaving", "left", sessionTimeout, func(_ *testing.T, _ *kafka.Bus, c *consumer) { c.stop() }},
	} {
		takeover := func(t *testing.T, r *rig) {
			r.topic(c.topic, 4)
			short := func(c *kafka.Config) { c.SessionTimeout = sessionTimeout }
			stays, goes := r.open(short), r.open(short)
			one, two := consume(t, stays, c.topic, 20), consume(t, goes, c.topic, 20)
			took := flow(r.open(), c.topic, one)
			// The other one has partitions when something comes to it.
			for i := 0; len(two.arrived) == 0; i++ {
				store(t, stays, messages(c.topic, fmt.Sprint("first", i), 1, 4)...)
				runOrWait(two)
			}
			flow(r.open(), c.topic, two)
			begun := time.Now()
			c.end(t, goes, two)
			took(t, "rest")
			if d := time.Since(begun); d > c.most {
				t.Errorf("messages flow again after %v, want at most %v", d, c.most)
			} else {
				t.Logf("messages flow again after %v, with a session timeout of %v", d.Round(time.Millisecond), sessionTimeout)
			}
			one.stop()
		}
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			t.Run("kfake", func(t *testing.T) {
				t.Parallel()
				takeover(t, newRig(t, kfake.GroupMinSessionTimeout(sessionTimeout)))
			})
			t.Run("Apache Kafka", func(t *testing.T) {
				t.Parallel()
				takeover(t, sharedRig(t))
			})
		})
	}
}

// runOrWait waits until something has come to a consumer, or a moment.
func runOrWait(c *consumer) {
	tick := time.NewTicker(10 * time.Millisecond)
	defer tick.Stop()
	for range 10 {
		if len(c.arrived) > 0 {
			return
		}
		<-tick.C
	}
}

// Trouble is told once while it lasts, and is over when the reason is.
func TestTroubleIsOver(t *testing.T) {
	t.Parallel()
	t.Run("heartbeats fail", func(t *testing.T) {
		t.Parallel()
		r := newRig(t)
		r.topic("t", 1)
		bus := r.open()
		store(t, bus, messages("t", "", 1, 1)...)
		c := consume(t, bus, "t", 2)
		c.take(1)
		r.untilCommitted("t", 0, 1)
		<-r.answer(kmsg.Heartbeat, 4, kerr.CoordinatorLoadInProgress)
		until(t, "trouble is told", func() bool { return len(c.troubles()) > 0 })
		until(t, "no trouble is left", func() bool { return untroubled(c) })
		if all := c.troubles(); len(all) != 2 {
			t.Errorf("Trouble was told %v, want one error and its end", all)
		}
		c.stop()
	})
	t.Run("a leader is away and another one takes over", func(t *testing.T) {
		t.Parallel()
		r := newRig(t)
		r.topic("t", 1)
		if err := r.cluster.MoveTopicPartition("t", 0, 0); err != nil {
			t.Fatal(err)
		}
		bus := r.open()
		c := consume(t, bus, "t", 2)
		store(t, bus, messages("t", "", 1, 1)...)
		c.take(1)
		lost := make(chan struct{})
		var once sync.Once
		r.cluster.ControlKey(int16(kmsg.Fetch), func(kmsg.Request) (kmsg.Response, error, bool) {
			r.cluster.KeepControl()
			if r.cluster.CurrentNode() != 0 {
				return nil, nil, false
			}
			once.Do(func() { close(lost) })
			return nil, errors.New("away"), true // which closes the connection
		})
		<-lost
		until(t, "trouble is told", func() bool { return !untroubled(c) })
		if err := r.cluster.MoveTopicPartition("t", 0, 1); err != nil {
			t.Fatal(err)
		}
		store(t, r.open(), messages("t", "", 2, 2)...)
		c.take(1)
		until(t, "no trouble is left", func() bool { return untroubled(c) })
		c.stop()
	})
}
