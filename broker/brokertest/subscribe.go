package brokertest

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/postroom/postroom/broker"
)

func newGroup(ctx context.Context, e *env) error {
	topic, p, err := e.topicAndPublisher(ctx)
	if err != nil {
		return err
	}
	msgs := messages(topic, "key", 10)
	if err := store(ctx, p, msgs[:5]...); err != nil {
		return err
	}
	m, err := e.subscribe(ctx, topic, "group", 3)
	if err != nil {
		return err
	}
	if err := store(ctx, p, msgs[5:]...); err != nil {
		return err
	}
	got, err := m.all(ctx, len(msgs))
	if err != nil {
		return err
	}
	return compareOrder(got, msgs)
}

func subscribeUnknown(ctx context.Context, e *env) error {
	unknown := e.unique("unknown")
	m, err := e.subscribe(ctx, unknown, "group", 1)
	if err != nil {
		return err
	}
	select {
	case err := <-m.ended:
		m.ended <- err
		if err == nil {
			return errors.New("Subscribe = nil, want an error: there is no such topic")
		}
	case <-time.After(e.h.Patience):
		return errors.New("Subscribe still runs, want an error: there is no such topic")
	}
	if made, err := e.h.TopicExists(ctx, unknown); err != nil || made {
		return fmt.Errorf("the topic exists: %v (%v)", made, err)
	}
	return nil
}

// delivered publishes n messages of one key and receives them at one member.
func (e *env) delivered(ctx context.Context, n int) (string, *member, []broker.Delivery, error) {
	topic, p, err := e.topicAndPublisher(ctx)
	if err != nil {
		return "", nil, nil, err
	}
	msgs := messages(topic, "key", n)
	if err := store(ctx, p, msgs...); err != nil {
		return "", nil, nil, err
	}
	m, err := e.subscribe(ctx, topic, "group", n)
	if err != nil {
		return "", nil, nil, err
	}
	var ds []broker.Delivery
	for _, msg := range msgs {
		d, err := m.nextID(ctx, msg.ID)
		if err != nil {
			return "", nil, nil, err
		}
		ds = append(ds, d)
	}
	return topic, m, ds, nil
}

func positionAndCount(ctx context.Context, e *env) error {
	topic, m, ds, err := e.delivered(ctx, 3)
	if err != nil {
		return err
	}
	for i, d := range ds {
		if d.Position().Topic != topic {
			return fmt.Errorf("Position().Topic is %q, want %q", d.Position().Topic, topic)
		}
		if n := d.Deliveries(); n != 0 && n != 1 {
			return fmt.Errorf("Deliveries() = %d at the first delivery, want 1, or 0 where it is not counted", n)
		}
		if i > 0 && d.Position().Offset <= ds[i-1].Position().Offset {
			return fmt.Errorf("offset %d comes after %d", d.Position().Offset, ds[i-1].Position().Offset)
		}
	}
	last := ds[2]
	if err := last.Retry(ctx, 0); err != nil {
		return wrap("retry", err)
	}
	again, err := m.nextID(ctx, last.Message().ID)
	if err != nil {
		return err
	}
	if again.Position() != last.Position() {
		return fmt.Errorf("Position() is %v at the second delivery, was %v", again.Position(), last.Position())
	}
	if n := again.Deliveries(); n != 0 && n < 2 {
		return fmt.Errorf("Deliveries() = %d at the second delivery", n)
	}
	return nil
}

func retryRedelivers(ctx context.Context, e *env) error {
	_, m, ds, err := e.delivered(ctx, 1)
	if err != nil {
		return err
	}
	d := ds[0]
	for _, delay := range []time.Duration{0, 400 * time.Millisecond, 0} {
		begun := time.Now()
		if err := d.Retry(ctx, delay); err != nil {
			return wrap("retry", err)
		}
		want := d.Message()
		if d, err = m.nextID(ctx, want.ID); err != nil {
			return err
		}
		took := time.Since(begun)
		if took < delay-delay/8 {
			return fmt.Errorf("it came again after %v, want about %v", took, delay)
		}
		if took > delay+soon {
			return fmt.Errorf("it came again only after %v, want about %v", took, delay)
		}
		if err := e.compare(d.Message(), want); err != nil {
			return fmt.Errorf("the repeat differs: %w", err)
		}
	}
	return wrap("ack", d.Ack(ctx))
}

func ackIsNotRedelivered(ctx context.Context, e *env) error {
	topic, m, ds, err := e.delivered(ctx, 10)
	if err != nil {
		return err
	}
	left := ds[7] // not settled in order, and one given back
	for _, i := range []int{9, 0, 3, 1, 2, 8, 4, 5, 6} {
		if err := ds[i].Ack(ctx); err != nil {
			return wrap("ack", err)
		}
	}
	if err := left.Retry(ctx, 0); err != nil {
		return wrap("retry", err)
	}
	if d, err := m.nextID(ctx, left.Message().ID); err != nil {
		return err
	} else if err := d.Ack(ctx); err != nil {
		return wrap("ack", err)
	}
	if err := m.quiet(ctx); err != nil {
		return err
	}
	if err := m.stop(); err != nil {
		return err
	}
	later, err := e.subscribe(ctx, topic, "group", 10)
	if err != nil {
		return err
	}
	return wrap("at a later member", later.quiet(ctx))
}

func killedSubscriber(ctx context.Context, e *env) error {
	topic, m, ds, err := e.delivered(ctx, 5)
	if err != nil {
		return err
	}
	// Those that are acked are the oldest: a broker with one position for each
	// partition repeats what is behind the oldest unsettled one.
	for _, d := range ds[:2] {
		if err := d.Ack(ctx); err != nil {
			return wrap("ack", err)
		}
	}
	if err := e.settledAtBroker(ctx, m); err != nil {
		return err
	}
	m.kill()
	for _, d := range ds[2:] {
		select {
		case <-d.Lost():
		case <-time.After(e.h.Patience):
			return errors.New("Lost() is not closed although the connection is gone")
		}
		if err := d.Ack(ctx); !errors.Is(err, broker.ErrLost) {
			return fmt.Errorf("ack of a lost delivery = %v, want ErrLost", err)
		}
	}
	other, err := e.subscribe(ctx, topic, "group", 5)
	if err != nil {
		return err
	}
	got, err := other.all(ctx, 3)
	if err != nil {
		return err
	}
	var want []string
	for _, d := range ds[2:] {
		want = append(want, d.Message().ID)
	}
	if err := sameSet(ids(got), want); err != nil {
		return err
	}
	return other.quiet(ctx)
}

// settledAtBroker waits until acks given so far have reached the broker: an ack
// that a crash overtakes is lost, which no contract forbids.
func (e *env) settledAtBroker(ctx context.Context, m *member) error {
	timer := time.NewTimer(e.h.Quiet)
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

func groupsAreIndependent(ctx context.Context, e *env) error {
	topic, p, err := e.topicAndPublisher(ctx)
	if err != nil {
		return err
	}
	msgs := messages(topic, "key", 20)
	if err := store(ctx, p, msgs...); err != nil {
		return err
	}
	for _, group := range []string{"one", "two", "group with spaces, dots.and ünicode/slashes"} {
		m, err := e.subscribe(ctx, topic, group, 20)
		if err != nil {
			return err
		}
		got, err := m.all(ctx, len(msgs))
		if err != nil {
			return fmt.Errorf("group %q: %w", group, err)
		}
		if err := sameSet(ids(got), ids(msgs)); err != nil {
			return fmt.Errorf("group %q: %w", group, err)
		}
	}
	return nil
}

func membersShare(ctx context.Context, e *env) error {
	topic, p, err := e.topicAndPublisher(ctx)
	if err != nil {
		return err
	}
	one, err := e.subscribe(ctx, topic, "group", 5)
	if err != nil {
		return err
	}
	two, err := e.subscribe(ctx, topic, "group", 5)
	if err != nil {
		return err
	}
	msgs := interleaved(topic, 20, 20)
	if err := store(ctx, p, msgs...); err != nil {
		return err
	}
	count := map[string]int{}
	for range msgs {
		var d broker.Delivery
		select {
		case d = <-one.arrived:
		case d = <-two.arrived:
		case <-time.After(e.h.Patience):
			return fmt.Errorf("%d of %d messages came", len(count), len(msgs))
		}
		if err := d.Ack(ctx); err != nil {
			return wrap("ack", err)
		}
		count[d.Message().ID]++
	}
	for _, m := range msgs {
		if count[m.ID] != 1 {
			return fmt.Errorf("message %q came %d times to the group, want once", m.ID, count[m.ID])
		}
	}
	// Neither is given what the other has settled.
	return errors.Join(one.quiet(ctx), two.quiet(ctx))
}

func slowHandler(ctx context.Context, e *env) error {
	topic, m, ds, err := e.delivered(ctx, 3)
	if err != nil {
		return err
	}
	other, err := e.subscribe(ctx, topic, "group", 3)
	if err != nil {
		return err
	}
	if err := errors.Join(other.quiet(ctx), m.quiet(ctx)); err != nil {
		return err
	}
	for _, d := range ds {
		select {
		case <-d.Lost():
			return errors.New("a delivery was lost while nothing was wrong")
		default:
		}
		if err := d.Ack(ctx); err != nil {
			return wrap("ack", err)
		}
	}
	return errors.Join(other.quiet(ctx), m.quiet(ctx))
}

func drain(ctx context.Context, e *env) error {
	topic, m, ds, err := e.delivered(ctx, 4)
	if err != nil {
		return err
	}
	m.cancel()
	if err := m.quiet(ctx); err != nil {
		return err
	}
	for i, d := range ds[:3] {
		select {
		case err := <-m.ended:
			m.ended <- err
			return fmt.Errorf("Subscribe returned (%v) with %d deliveries unsettled", err, len(ds)-i)
		case <-d.Lost():
			return errors.New("a delivery was lost because the subscription's context ended")
		default:
		}
		if err := d.Ack(ctx); err != nil {
			return wrap("ack after the context has ended", err)
		}
	}
	if err := ds[3].Retry(ctx, 0); err != nil {
		return wrap("retry after the context has ended", err)
	}
	if err := m.wait(); err != nil {
		return err
	}
	later, err := e.subscribe(ctx, topic, "group", 4)
	if err != nil {
		return err
	}
	d, err := later.nextID(ctx, ds[3].Message().ID)
	if err != nil {
		return err
	}
	return errors.Join(d.Ack(ctx), later.quiet(ctx))
}

func maxInFlight(ctx context.Context, e *env) error {
	topic, p, err := e.topicAndPublisher(ctx)
	if err != nil {
		return err
	}
	const limit = 3
	m, err := e.subscribe(ctx, topic, "group", limit)
	if err != nil {
		return err
	}
	msgs := slices.Concat(messages(topic, "a", 10), messages(topic, "", 10), messages(topic, "b", 10))
	if err := store(ctx, p, msgs...); err != nil {
		return err
	}
	var out []broker.Delivery
	for range msgs {
		for len(out) < limit && len(out) < len(msgs) {
			d, err := m.next(ctx)
			if err != nil {
				return fmt.Errorf("with %d unsettled: %w", len(out), err)
			}
			out = append(out, d)
		}
		if len(msgs) == 30 { // once is enough
			if err := m.quiet(ctx); err != nil {
				return fmt.Errorf("with %d of %d unsettled: %w", len(out), limit, err)
			}
		}
		if err := out[0].Ack(ctx); err != nil {
			return wrap("ack", err)
		}
		out, msgs = out[1:], msgs[1:]
		if len(msgs) <= len(out) {
			break
		}
	}
	for _, d := range out {
		if err := d.Ack(ctx); err != nil {
			return wrap("ack", err)
		}
	}
	return m.quiet(ctx)
}
