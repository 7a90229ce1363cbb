package brokertest

import (
	"context"
	"errors"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/postroom/postroom"
	"github.com/postroom/postroom/broker"
	"github.com/postroom/postroom/broker/memory"
)

// A flaw breaks one promise of a broker that keeps all of them. The functions
// that are set take the place of what they are named after.
type flaw struct {
	publish func(ctx context.Context, b *memory.Broker, msgs []postroom.Message) []broker.Result
	message func(m *postroom.Message)                 // on delivery
	deliver func(d broker.Delivery) []broker.Delivery // nil: lost on the way
	join    func(s *broker.Subscription)
	ack     func(ctx context.Context, d broker.Delivery) error
	retry   func(ctx context.Context, d broker.Delivery, delay time.Duration) error
	close   func(b *memory.Broker) error
	leave   bool // Subscribe returns as soon as its context ends
	leak    bool // a goroutine stays
}

// flawed is a memory broker with a flaw.
type flawed struct {
	*memory.Broker
	flaw flaw
}

func (f flawed) Publish(ctx context.Context, msgs []postroom.Message) []broker.Result {
	if f.flaw.publish != nil {
		return f.flaw.publish(ctx, f.Broker, msgs)
	}
	return f.Broker.Publish(ctx, msgs)
}

func (f flawed) Close() error {
	if f.flaw.close != nil {
		return f.flaw.close(f.Broker)
	}
	return f.Broker.Close()
}

func (f flawed) Subscribe(ctx context.Context, s broker.Subscription, deliver func(broker.Delivery)) error {
	if f.flaw.join != nil {
		f.flaw.join(&s)
	}
	if f.flaw.leak {
		go func() { <-make(chan int) }()
	}
	handOver := func(d broker.Delivery) {
		d = flawedDelivery{d, f.flaw}
		if f.flaw.deliver == nil {
			deliver(d)
			return
		}
		for _, d := range f.flaw.deliver(d) {
			deliver(d)
		}
	}
	if !f.flaw.leave {
		return f.Broker.Subscribe(ctx, s, handOver)
	}
	ended := make(chan error, 1)
	go func() { ended <- f.Broker.Subscribe(ctx, s, handOver) }()
	select {
	case err := <-ended:
		return err
	case <-ctx.Done():
		return nil
	}
}

type flawedDelivery struct {
	broker.Delivery
	flaw flaw
}

func (d flawedDelivery) Message() postroom.Message {
	m := d.Delivery.Message()
	if d.flaw.message != nil {
		d.flaw.message(&m)
	}
	return m
}

func (d flawedDelivery) Ack(ctx context.Context) error {
	if d.flaw.ack != nil {
		return d.flaw.ack(ctx, d.Delivery)
	}
	return d.Delivery.Ack(ctx)
}

func (d flawedDelivery) Retry(ctx context.Context, delay time.Duration) error {
	if d.flaw.retry != nil {
		return d.flaw.retry(ctx, d.Delivery, delay)
	}
	return d.Delivery.Retry(ctx, delay)
}

// harness connects the suite to a fresh memory broker with a flaw.
func harness(f flaw) Harness {
	b := memory.New("any") // one that knows its topics
	var (
		mu      sync.Mutex
		failing = map[string]bool{}
		away    bool
	)
	b.SetFault(func(m postroom.Message) error {
		mu.Lock()
		defer mu.Unlock()
		if away || failing[m.ID] {
			delete(failing, m.ID)
			return errors.New("away")
		}
		return nil
	})
	set := func(v bool) {
		mu.Lock()
		defer mu.Unlock()
		away = v
	}
	return Harness{
		Publisher: func(context.Context) (broker.Publisher, error) { return flawed{b.Connect(), f}, nil },
		Subscriber: func(context.Context) (broker.Subscriber, func(), error) {
			c := b.Connect()
			return flawed{c, f}, func() { _ = c.Close() }, nil
		},
		CreateTopic: func(_ context.Context, name string) error { b.Create(name); return nil },
		TopicExists: func(ctx context.Context, name string) (bool, error) {
			return b.Publish(ctx, []postroom.Message{{Topic: name}})[0].Outcome == broker.Stored, nil
		},
		InvalidTopic: "a\x00b",
		HeaderOrder:  true,
		FailOnce: func(_, id string) error {
			mu.Lock()
			defer mu.Unlock()
			failing[id] = true
			return nil
		},
		Outage: func(context.Context) (func() error, error) {
			set(true)
			return func() error { set(false); return nil }, nil
		},
		Patience: time.Second,
		Quiet:    100 * time.Millisecond,
	}
}

// oneByOne publishes each message in a call of its own, and so forgets that a
// key stops at its failure.
func oneByOne(ctx context.Context, b *memory.Broker, msgs []postroom.Message) []broker.Result {
	var results []broker.Result
	for _, m := range msgs {
		results = append(results, b.Publish(ctx, []postroom.Message{m})...)
	}
	return results
}

func changed(change func(m *postroom.Message)) func(context.Context, *memory.Broker, []postroom.Message) []broker.Result {
	return func(ctx context.Context, b *memory.Broker, msgs []postroom.Message) []broker.Result {
		msgs = clones(msgs)
		for i := range msgs {
			change(&msgs[i])
		}
		return b.Publish(ctx, msgs)
	}
}

// outcome turns results into others.
func outcome(change func(m postroom.Message, r *broker.Result)) func(context.Context, *memory.Broker, []postroom.Message) []broker.Result {
	return func(ctx context.Context, b *memory.Broker, msgs []postroom.Message) []broker.Result {
		results := b.Publish(ctx, msgs)
		for i := range results {
			change(msgs[i], &results[i])
		}
		return results
	}
}

// The suite is worth what it catches: each of these breaks a promise in a way
// in which real adapters have broken it.
func TestSuiteCatchesBrokenBrokers(t *testing.T) {
	var once sync.Map
	tests := []struct {
		name  string
		fails string // the case that must notice
		flaw  flaw
	}{
		{"drops the key", "FieldsSurvive", flaw{message: func(m *postroom.Message) { m.Key = "" }}},
		{"makes nil payloads empty", "FieldsSurvive", flaw{message: func(m *postroom.Message) { m.Payload = append([]byte{}, m.Payload...) }}},
		{"makes empty payloads nil", "FieldsSurvive", flaw{message: func(m *postroom.Message) {
			if len(m.Payload) == 0 {
				m.Payload = nil
			}
		}}},
		{"replaces bytes that are not UTF-8", "FieldsSurvive", flaw{message: func(m *postroom.Message) {
			if m.Payload != nil {
				m.Payload = []byte(strings.ToValidUTF8(string(m.Payload), "?"))
			}
		}}},
		{"cuts the time to seconds", "FieldsSurvive", flaw{message: func(m *postroom.Message) { m.Time = m.Time.Truncate(time.Second) }}},
		{"drops the operation", "FieldsSurvive", flaw{message: func(m *postroom.Message) { m.Operation = "" }}},
		{"drops headers", "HeadersSurvive", flaw{publish: changed(func(m *postroom.Message) { m.Headers = nil })}},
		{"keeps one header of a name", "HeadersSurvive", flaw{message: func(m *postroom.Message) {
			m.Headers = slices.CompactFunc(m.Headers, func(a, b postroom.Header) bool { return a.Name == b.Name })
			seen := map[string]bool{}
			m.Headers = slices.DeleteFunc(m.Headers, func(h postroom.Header) bool {
				was := seen[h.Name]
				seen[h.Name] = true
				return was
			})
		}}},
		{"reverses headers", "HeadersSurvive", flaw{message: func(m *postroom.Message) { slices.Reverse(m.Headers) }}},
		{"trims header values", "OddHeadersSurvive", flaw{message: func(m *postroom.Message) {
			for i := range m.Headers {
				if m.Headers[i].Value != nil {
					m.Headers[i].Value = []byte(strings.TrimSpace(string(m.Headers[i].Value)))
				}
			}
		}}},
		{"canonicalises header names", "HeaderLookupIgnoresCase", flaw{message: func(m *postroom.Message) {
			for i := range m.Headers {
				m.Headers[i].Name = strings.ToUpper(m.Headers[i].Name)
			}
		}}},
		{"changes the caller's payload", "ArgumentsUntouched", flaw{publish: func(ctx context.Context, b *memory.Broker, msgs []postroom.Message) []broker.Result {
			results := b.Publish(ctx, msgs)
			for i := range msgs {
				if len(msgs[i].Payload) > 0 {
					msgs[i].Payload[0]++
				}
			}
			return results
		}}},
		{"returns one result for the call", "OneResultPerMessage", flaw{publish: func(ctx context.Context, b *memory.Broker, msgs []postroom.Message) []broker.Result {
			return b.Publish(ctx, msgs)[:min(1, len(msgs))]
		}}},
		{"calls an invalid topic unreachable", "InvalidTopicIsRefused", flaw{publish: outcome(func(_ postroom.Message, r *broker.Result) {
			if r.Outcome == broker.Refused {
				r.Outcome = broker.Unreachable
			}
		})}},
		{"makes unknown topics", "UnknownTopicIsUnreachable", flaw{publish: func(ctx context.Context, b *memory.Broker, msgs []postroom.Message) []broker.Result {
			for _, m := range msgs {
				if !strings.Contains(m.Topic, "\x00") {
					b.Create(m.Topic)
				}
			}
			return b.Publish(ctx, msgs)
		}}},
		{"calls an unknown topic refused", "UnknownTopicIsUnreachable", flaw{publish: outcome(func(_ postroom.Message, r *broker.Result) {
			if r.Outcome == broker.Unreachable {
				r.Outcome = broker.Refused
			}
		})}},
		{"names no scope", "UnknownTopicIsUnreachable", flaw{publish: outcome(func(_ postroom.Message, r *broker.Result) { r.Scope = "" })}},
		{"removes an id that another topic had", "SameIDOnTwoTopics", flaw{publish: func(ctx context.Context, b *memory.Broker, msgs []postroom.Message) []broker.Result {
			results := make([]broker.Result, len(msgs))
			for i, m := range msgs {
				if topic, seen := once.LoadOrStore(m.ID, m.Topic); seen && topic != m.Topic {
					results[i].Outcome = broker.Stored // it says
					continue
				}
				results[i] = b.Publish(ctx, msgs[i:i+1])[0]
			}
			return results
		}}},
		{"publishes in another order", "KeyOrder", flaw{publish: func(ctx context.Context, b *memory.Broker, msgs []postroom.Message) []broker.Result {
			msgs = slices.Clone(msgs)
			slices.Reverse(msgs)
			results := b.Publish(ctx, msgs)
			slices.Reverse(results)
			return results
		}}},
		{"goes on with a key after its failure", "FailureStopsItsKey", flaw{publish: oneByOne}},
		{"says stored of what failed", "FailureStopsItsKey", flaw{publish: outcome(func(_ postroom.Message, r *broker.Result) {
			*r = broker.Result{Outcome: broker.Stored}
		})}},
		{"stops other keys too", "FailureStopsItsKey", flaw{publish: func(ctx context.Context, b *memory.Broker, msgs []postroom.Message) []broker.Result {
			results := make([]broker.Result, len(msgs))
			for i := range msgs {
				if results[i] = b.Publish(ctx, msgs[i:i+1])[0]; results[i].Outcome != broker.Stored {
					break
				}
			}
			return results
		}}},
		{"ignores the end of the context", "CancelledPublish", flaw{publish: func(ctx context.Context, b *memory.Broker, msgs []postroom.Message) []broker.Result {
			return outcome(func(_ postroom.Message, r *broker.Result) { *r = broker.Result{Outcome: broker.Stored} })(ctx, b, msgs)
		}}},
		{"publishes after Close", "PublishAfterClose", flaw{close: func(*memory.Broker) error { return nil }}},
		{"fails at the second Close", "PublishAfterClose", flaw{close: func() func(b *memory.Broker) error {
			var mu sync.Mutex
			closed := map[*memory.Broker]bool{}
			return func(b *memory.Broker) error {
				mu.Lock()
				defer mu.Unlock()
				if closed[b] {
					return broker.ErrClosed
				}
				closed[b] = true
				return b.Close()
			}
		}()}},
		{"gives a new group only what is new", "NewGroupStartsAtTheFirst", flaw{deliver: func() func(broker.Delivery) []broker.Delivery {
			var first atomic.Bool
			return func(d broker.Delivery) []broker.Delivery {
				if first.CompareAndSwap(false, true) {
					_ = d.Ack(context.Background())
					return nil
				}
				return []broker.Delivery{d}
			}
		}()}},
		{"forgets what is given back", "RetryRedelivers", flaw{retry: func(ctx context.Context, d broker.Delivery, _ time.Duration) error { return d.Ack(ctx) }}},
		{"redelivers at once", "RetryRedelivers", flaw{retry: func(ctx context.Context, d broker.Delivery, _ time.Duration) error { return d.Retry(ctx, 0) }}},
		{"loses acknowledgements", "AckIsNotRedelivered", flaw{ack: func(ctx context.Context, d broker.Delivery) error { return d.Retry(ctx, 0) }}},
		{"acknowledges on delivery", "KilledSubscriber", flaw{deliver: func(d broker.Delivery) []broker.Delivery {
			_ = d.(flawedDelivery).Delivery.Ack(context.Background())
			return []broker.Delivery{d}
		}}},
		{"has one group", "GroupsAreIndependent", flaw{join: func(s *broker.Subscription) { s.Group = "all" }}},
		{"has a group for each member", "MembersShare", flaw{join: func(s *broker.Subscription) { s.Group = postroom.NewID() }}},
		{"does not wait for its deliveries", "Drain", flaw{leave: true}},
		{"ignores MaxInFlight", "MaxInFlight", flaw{join: func(s *broker.Subscription) { s.MaxInFlight = 1000 }}},
		{"leaves a goroutine", "NoGoroutineLeft", flaw{leak: true}},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			if tt.fails != "NoGoroutineLeft" {
				t.Parallel()
			}
			i := slices.IndexFunc(cases, func(c testCase) bool { return c.name == tt.fails })
			if i < 0 {
				t.Fatalf("there is no case %s", tt.fails)
			}
			if err := check(t.Context(), harness(tt.flaw).withDefaults(), cases[i]); err == nil {
				t.Errorf("%s did not notice", tt.fails)
			}
		})
	}
	t.Run("none", func(t *testing.T) { // the harness itself breaks nothing
		for _, c := range cases {
			if c.name == "OversizeIsRefused" {
				continue
			}
			if err := check(t.Context(), harness(flaw{}).withDefaults(), c); err != nil {
				t.Errorf("%s: %v", c.name, err)
			}
		}
	})
}
