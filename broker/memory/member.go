package memory

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/postroom/postroom"
	"github.com/postroom/postroom/broker"
)

var errSettled = errors.New("memory: delivery was settled before")

// A member is one running Subscribe call.
type member struct {
	b    *Broker
	g    *group
	out  map[*delivery]struct{}
	idle chan struct{} // receives when out became smaller
}

// Subscribe implements [broker.Subscriber]. It ends with [broker.ErrClosed]
// when the connection is closed.
func (b *Broker) Subscribe(ctx context.Context, s broker.Subscription, deliver func(broker.Delivery)) error {
	m, err := b.join(s)
	if err != nil {
		return err
	}
	defer m.leave()
	for ctx.Err() == nil && !b.isClosed() {
		d, wait, changed := m.next(s.MaxInFlight)
		if d != nil {
			deliver(d)
			continue
		}
		var due <-chan time.Time
		if wait >= 0 {
			due = time.After(wait)
		}
		select {
		case <-changed:
		case <-due:
		case <-ctx.Done():
		case <-b.closed:
		}
	}
	return m.drain(ctx)
}

func (b *Broker) join(s broker.Subscription) (*member, error) {
	var errs []error
	if s.Group == "" {
		errs = append(errs, errors.New("memory: Subscription.Group is empty"))
	}
	if s.MaxInFlight < 1 {
		errs = append(errs, fmt.Errorf("memory: Subscription.MaxInFlight is %d, want at least 1", s.MaxInFlight))
	}
	if err := checkTopic(s.Topic); err != nil {
		errs = append(errs, fmt.Errorf("memory: Subscription.Topic: %w", err))
	}
	if err := errors.Join(errs...); err != nil {
		return nil, err
	}
	if b.isClosed() {
		return nil, fmt.Errorf("memory: %w", broker.ErrClosed)
	}
	b.s.mu.Lock()
	defer b.s.mu.Unlock()
	t := b.s.topic(s.Topic)
	if t == nil {
		return nil, fmt.Errorf("memory: subscribe to %q: %w", s.Topic, errUnknownTopic)
	}
	g := t.groups[s.Group]
	if g == nil {
		g = newGroup(t)
		t.groups[s.Group] = g
	}
	return &member{b: b, g: g, out: make(map[*delivery]struct{}), idle: make(chan struct{}, 1)}, nil
}

// next takes a delivery for m, or says what to wait for: a change of the group,
// and a time, unless it is negative.
func (m *member) next(limit int) (*delivery, time.Duration, <-chan struct{}) {
	m.b.s.mu.Lock()
	defer m.b.s.mu.Unlock()
	if len(m.out) >= limit {
		return nil, -1, m.g.changed
	}
	pos, c, wait := m.g.take(m, time.Now())
	if c == nil {
		return nil, wait, m.g.changed
	}
	d := &delivery{
		m: m, pos: pos, chain: c, count: m.g.count[pos],
		message: clone(m.g.message(pos)), lost: make(chan struct{}),
	}
	m.out[d] = struct{}{}
	return d, 0, nil
}

// drain waits until nothing is out, or the connection is closed. It returns
// nil where it was ctx that ended the subscription and everything is settled.
func (m *member) drain(ctx context.Context) error {
	for {
		m.b.s.mu.Lock()
		left := len(m.out)
		m.b.s.mu.Unlock()
		if left == 0 {
			break
		}
		select {
		case <-m.idle:
		case <-m.b.closed:
			return fmt.Errorf("memory: %w", broker.ErrClosed)
		}
	}
	if ctx.Err() == nil {
		return fmt.Errorf("memory: %w", broker.ErrClosed)
	}
	return nil
}

// leave gives what is still out to the others.
func (m *member) leave() {
	m.b.s.mu.Lock()
	defer m.b.s.mu.Unlock()
	for d := range m.out {
		delete(m.out, d)
		close(d.lost)
		m.g.giveBack(d.pos, d.chain, time.Time{})
	}
}

// A delivery is one message at one member.
type delivery struct {
	m       *member
	pos     int
	chain   *chain
	count   int
	message postroom.Message
	lost    chan struct{}
	settled bool
}

func (d *delivery) Message() postroom.Message { return d.message }
func (d *delivery) Deliveries() int           { return d.count }
func (d *delivery) Lost() <-chan struct{}     { return d.lost }

func (d *delivery) Position() broker.Position {
	return broker.Position{Topic: d.m.g.topic.name, Partition: -1, Offset: uint64(d.pos)}
}

func (d *delivery) Ack(ctx context.Context) error {
	return d.settle(ctx, func(g *group) { g.ack(d.pos, d.chain) })
}

func (d *delivery) Retry(ctx context.Context, delay time.Duration) error {
	return d.settle(ctx, func(g *group) {
		var due time.Time
		if delay > 0 {
			due = time.Now().Add(delay)
		}
		g.giveBack(d.pos, d.chain, due)
	})
}

func (d *delivery) settle(ctx context.Context, how func(*group)) error {
	if err := ctx.Err(); err != nil {
		return fmt.Errorf("memory: %w", context.Cause(ctx))
	}
	d.m.b.s.mu.Lock()
	defer d.m.b.s.mu.Unlock()
	if d.settled {
		return errSettled
	}
	if _, ok := d.m.out[d]; !ok {
		return fmt.Errorf("memory: %w", broker.ErrLost)
	}
	d.settled = true
	delete(d.m.out, d)
	how(d.m.g)
	select {
	case d.m.idle <- struct{}{}:
	default:
	}
	return nil
}
