package brokertest

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"
	"time"

	"github.com/postroom/postroom"
	"github.com/postroom/postroom/broker"
)

// A member is one running subscription on a connection of its own.
type member struct {
	e       *env
	kill    func()
	cancel  context.CancelFunc
	ended   chan error
	arrived chan broker.Delivery
	trouble atomic.Pointer[error] // the last word of Trouble
	inside  atomic.Int32          // calls of deliver that run
	overlap atomic.Bool
}

// subscribe joins a group of a topic, which has the group for itself: some brokers
// share out all topics of a group at a time, and the cases would wait for each other.
func (e *env) subscribe(ctx context.Context, topic, group string, maxInFlight int) (*member, error) {
	s, kill, err := e.h.Subscriber(ctx)
	if err != nil {
		return nil, wrap("open a subscriber", err)
	}
	m := &member{e: e, kill: kill, ended: make(chan error, 1), arrived: make(chan broker.Delivery, maxInFlight)}
	ctx, m.cancel = context.WithCancel(ctx)
	sub := broker.Subscription{
		Group: group + " of " + topic, Topic: topic, MaxInFlight: maxInFlight,
		Trouble: func(err error) { m.trouble.Store(&err) },
	}
	go func() {
		m.ended <- s.Subscribe(ctx, sub, func(d broker.Delivery) {
			if m.inside.Add(1) > 1 {
				m.overlap.Store(true)
			}
			m.arrived <- d
			m.inside.Add(-1)
		})
	}()
	e.undo = append(e.undo, func() error {
		m.cancel()
		m.kill()
		select {
		case <-m.ended:
			if m.overlap.Load() {
				return errors.New("deliver was called from two goroutines at a time")
			}
			return nil
		case <-time.After(e.h.Patience):
			return errors.New("Subscribe did not return although its context had ended and its connection was gone")
		}
	})
	return m, nil
}

// next returns the next delivery.
func (m *member) next(ctx context.Context) (broker.Delivery, error) {
	timer := time.NewTimer(m.e.h.Patience)
	defer timer.Stop()
	select {
	case d := <-m.arrived:
		return d, nil
	case err := <-m.ended:
		m.ended <- err
		return nil, fmt.Errorf("Subscribe returned (%v) while a message was expected", err)
	case <-timer.C:
		return nil, fmt.Errorf("no message came within %v%s", m.e.h.Patience, m.lastTrouble())
	case <-ctx.Done():
		return nil, context.Cause(ctx)
	}
}

func (m *member) lastTrouble() string {
	if err := m.trouble.Load(); err != nil && *err != nil {
		return fmt.Sprintf(" (trouble: %v)", *err)
	}
	return ""
}

// nextID returns the next delivery, which must be of the message with that id.
func (m *member) nextID(ctx context.Context, id string) (broker.Delivery, error) {
	d, err := m.next(ctx)
	if err != nil {
		return nil, fmt.Errorf("waiting for %q: %w", id, err)
	}
	if got := d.Message().ID; got != id {
		return nil, fmt.Errorf("delivered message %q, want %q", got, id)
	}
	return d, nil
}

// all receives and acks n messages.
func (m *member) all(ctx context.Context, n int) ([]postroom.Message, error) {
	var got []postroom.Message
	for len(got) < n {
		d, err := m.next(ctx)
		if err != nil {
			return got, fmt.Errorf("after %d of %d messages: %w", len(got), n, err)
		}
		got = append(got, d.Message())
		if err := d.Ack(ctx); err != nil {
			return got, fmt.Errorf("ack of message %d: %w", len(got), err)
		}
	}
	return got, nil
}

// quiet checks that nothing comes.
func (m *member) quiet(ctx context.Context) error {
	timer := time.NewTimer(m.e.h.Quiet)
	defer timer.Stop()
	select {
	case d := <-m.arrived:
		return fmt.Errorf("message %q was delivered, and nothing should have been", d.Message().ID)
	case <-timer.C:
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// stop ends the subscription and waits until it has left.
func (m *member) stop() error {
	m.cancel()
	return m.wait()
}

// wait waits for Subscribe to return nil.
func (m *member) wait() error {
	select {
	case err := <-m.ended:
		m.ended <- err
		if err != nil {
			return fmt.Errorf("Subscribe = %w, want nil after its context has ended", err)
		}
		return nil
	case <-time.After(m.e.h.Patience):
		return errors.New("Subscribe did not return although its context has ended and nothing is unsettled")
	}
}

// until polls a condition.
func (e *env) until(ctx context.Context, what string, ok func() bool) error {
	ctx, cancel := context.WithTimeout(ctx, e.h.Patience)
	defer cancel()
	tick := time.NewTicker(5 * time.Millisecond)
	defer tick.Stop()
	for !ok() {
		select {
		case <-tick.C:
		case <-ctx.Done():
			return fmt.Errorf("not within %v: %s", e.h.Patience, what)
		}
	}
	return nil
}
