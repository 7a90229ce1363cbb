// Package memory is a message broker inside the program, for tests and for
// services that live in one process. It keeps every promise of package broker,
// and loses everything when the program ends.
//
//	bus := memory.New()
//	d, err := dispatcher.New(pool, bus, dispatcher.Config{})
//	c, err := inbox.New(pool, bus, "billing", "orders", handle, inbox.Config{})
//
// Order: of one topic and key, a group is given the messages in the order in
// which they were published, also when it has several members: while a message
// of a key is out at one member, what follows it goes to that member, and what
// follows a message that was given back waits behind it. Only what was already
// out when its predecessor was given back overtakes it.
//
// Memory: a topic holds every message that was ever published to it, so that a
// new group can start at the first one; see [Broker.SetLimit] for a bound. A
// group holds a few words for each unsettled message.
package memory

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/postroom/postroom"
	"github.com/postroom/postroom/broker"
)

// A Broker is a connection to a broker in memory. It is safe for concurrent
// use.
type Broker struct {
	s      *store
	closed chan struct{}
	once   sync.Once
}

var (
	_ broker.Publisher  = (*Broker)(nil)
	_ broker.Subscriber = (*Broker)(nil)
)

// New returns a connection to a new broker that knows the given topics. With
// none it knows every topic, until [Broker.Create] names the first.
func New(topics ...string) *Broker {
	b := &Broker{s: &store{topics: make(map[string]*topic)}, closed: make(chan struct{})}
	b.Create(topics...)
	return b
}

// Connect returns another connection to the same broker, as another process
// would have. Closing it while it subscribes does what a crash of that process
// would do: its unsettled deliveries are lost and go to other members.
func (b *Broker) Connect() *Broker {
	return &Broker{s: b.s, closed: make(chan struct{})}
}

// Create makes topics; those that exist stay as they are. From the first call
// that names one, topics that were not created are unknown, and publishing to
// them is Unreachable.
func (b *Broker) Create(topics ...string) {
	b.s.mu.Lock()
	defer b.s.mu.Unlock()
	for _, name := range topics {
		b.s.strict = true
		b.s.make(name)
	}
}

// SetLimit bounds every topic to n messages; 0, the default, means no bound. A
// full topic drops its oldest messages that every group has acknowledged. Where
// there are none, or no group, publishing to it is Unreachable until there are.
func (b *Broker) SetLimit(n int) {
	b.s.mu.Lock()
	defer b.s.mu.Unlock()
	b.s.limit = n
}

// SetFault makes publishing fail, on every connection, for each message for
// which f returns an error: with outcome Refused where [postroom.IsPermanent]
// says so, else Unreachable. nil ends it. f is called for one message at a time
// and must not use the broker.
func (b *Broker) SetFault(f func(postroom.Message) error) {
	b.s.mu.Lock()
	defer b.s.mu.Unlock()
	b.s.fault = f
}

// Close ends the connection: Subscribe calls on it return [broker.ErrClosed],
// and what they have not settled goes to other members of their groups. The
// broker and its other connections stay.
func (b *Broker) Close() error {
	b.once.Do(func() { close(b.closed) })
	return nil
}

func (b *Broker) isClosed() bool {
	select {
	case <-b.closed:
		return true
	default:
		return false
	}
}

// Publish implements [broker.Publisher].
func (b *Broker) Publish(ctx context.Context, msgs []postroom.Message) []broker.Result {
	results := make([]broker.Result, len(msgs))
	failed := make(map[[2]string]bool) // topic and key of messages that failed
	changed := make(map[*topic]bool)

	b.s.mu.Lock()
	defer b.s.mu.Unlock()
	for i := range msgs {
		m := &msgs[i]
		order := [2]string{m.Topic, m.Key}
		if m.HasKey() && failed[order] {
			continue // NotTried
		}
		var t *topic
		t, results[i] = b.store(ctx, m)
		if results[i].Outcome == broker.Stored {
			changed[t] = true
		} else if m.HasKey() {
			failed[order] = true
		}
	}
	for t := range changed {
		for _, g := range t.groups {
			g.wake()
		}
	}
	return results
}

// store appends one message to its topic. b.s.mu is held.
func (b *Broker) store(ctx context.Context, m *postroom.Message) (*topic, broker.Result) {
	away := func(scope string, err error) (*topic, broker.Result) {
		return nil, broker.Result{Outcome: broker.Unreachable, Err: fmt.Errorf("memory: %w", err), Scope: scope}
	}
	switch {
	case b.isClosed():
		return away("", broker.ErrClosed)
	case ctx.Err() != nil:
		return away("", context.Cause(ctx))
	}
	if err := checkTopic(m.Topic); err != nil {
		return nil, broker.Result{Outcome: broker.Refused, Err: fmt.Errorf("memory: %w", err)}
	}
	t := b.s.topic(m.Topic)
	if t == nil {
		return away(m.Topic, errUnknownTopic)
	}
	if b.s.fault != nil {
		switch err := b.s.fault(clone(m)); {
		case err == nil:
		case postroom.IsPermanent(err):
			return nil, broker.Result{Outcome: broker.Refused, Err: fmt.Errorf("memory: %w", err)}
		default:
			return away("", err)
		}
	}
	if b.s.limit > 0 && len(t.log) >= b.s.limit && !t.drop(len(t.log)-b.s.limit+1) {
		return away(m.Topic, errFull)
	}
	t.log = append(t.log, clone(m))
	return t, broker.Result{Outcome: broker.Stored}
}

var (
	errUnknownTopic = errors.New("no such topic")
	errFull         = errors.New("topic is full")
)

// checkTopic applies the rules of [postroom.Message.Validate] to a topic alone.
func checkTopic(name string) error {
	return (&postroom.Message{Topic: name}).Validate(0)
}

// clone returns a copy of what travels of m.
func clone(m *postroom.Message) postroom.Message {
	c := *m
	c.Step, c.DeliverAt = "", time.Time{}
	if !c.Time.IsZero() {
		c.Time = c.Time.Round(0).Truncate(time.Microsecond).UTC()
	}
	c.EmptyKey = c.EmptyKey && c.Key == ""
	c.Payload = slices.Clone(m.Payload)
	c.Headers = slices.Clone(m.Headers)
	for i := range c.Headers {
		c.Headers[i].Value = slices.Clone(c.Headers[i].Value)
	}
	return c
}

// store is the broker itself, which all connections share.
type store struct {
	mu     sync.Mutex
	topics map[string]*topic
	strict bool // topics must be created
	limit  int
	fault  func(postroom.Message) error
}

func (s *store) make(name string) *topic {
	t := s.topics[name]
	if t == nil {
		t = &topic{name: name, groups: make(map[string]*group)}
		s.topics[name] = t
	}
	return t
}

// topic returns the topic of that name, or nil where it is unknown.
func (s *store) topic(name string) *topic {
	if s.strict {
		return s.topics[name]
	}
	return s.make(name)
}

// A topic is a log of messages. Position p is log[p-first].
type topic struct {
	name   string
	first  int
	log    []postroom.Message
	groups map[string]*group
}

// drop removes the n oldest messages, if every group has settled them.
func (t *topic) drop(n int) bool {
	if len(t.groups) == 0 {
		return false
	}
	for _, g := range t.groups {
		if g.floor < t.first+n {
			return false
		}
	}
	clear(t.log[:n])
	t.log = t.log[n:]
	t.first += n
	return true
}
