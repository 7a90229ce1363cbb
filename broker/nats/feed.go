package nats

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"time"

	natsgo "github.com/nats-io/nats.go"

	"github.com/postroom/postroom/broker"
)

// Subscribe implements [broker.Subscriber]. It ends with [broker.ErrClosed]
// when the bus is closed.
func (b *Bus) Subscribe(ctx context.Context, s broker.Subscription, deliver func(broker.Delivery)) error {
	if err := b.checkSubscription(&s); err != nil {
		return err
	}
	if b.isClosed.Load() {
		return fmt.Errorf("nats: %w", broker.ErrClosed)
	}
	f := newFeed(b, s)
	err := f.run(ctx, deliver)
	if err != nil {
		return fmt.Errorf("nats: subscribe to topic %q for group %q: %w", s.Topic, s.Group, err)
	}
	return nil
}

func (b *Bus) checkSubscription(s *broker.Subscription) error {
	var errs []error
	bad := func(format string, args ...any) {
		errs = append(errs, fmt.Errorf("nats: Subscription."+format, args...))
	}
	if s.Group == "" {
		bad("Group is empty")
	}
	if err := checkSubject(s.Topic, 0); err != nil {
		bad("Topic: %w", err)
	}
	if s.MaxInFlight < 1 {
		bad("MaxInFlight is %d, want at least 1", s.MaxInFlight)
	} else if s.MaxInFlight > b.cfg.MaxAckPending {
		bad("MaxInFlight is %d, more than Config.MaxAckPending, %d", s.MaxInFlight, b.cfg.MaxAckPending)
	}
	return errors.Join(errs...)
}

// A feed is one running Subscribe call. Subscribe's own goroutine hands
// deliveries over; control asks for messages and repairs; watch extends and
// finds what is lost; writer sends, since a send may hang.
type feed struct {
	b     *Bus
	s     broker.Subscription
	inbox string
	sub   *natsgo.Subscription

	hand chan struct{} // something may be handed over, or was settled
	room chan struct{} // control should look again

	mu       sync.Mutex
	held     []*delivery
	out      map[*delivery]struct{}
	draining bool
	c        *consumer
	pulls    pulls
	fresh    freshness
	orders   orders
}

func newFeed(b *Bus, s broker.Subscription) *feed {
	return &feed{
		b: b, s: s, inbox: b.nc.NewInbox(), out: make(map[*delivery]struct{}),
		hand: make(chan struct{}, 1), room: make(chan struct{}, 1),
		orders: orders{notify: make(chan struct{}, 1)},
	}
}

// kick wakes whoever waits for room or something to hand over.
func (f *feed) kick() {
	for _, c := range []chan struct{}{f.hand, f.room} {
		select {
		case c <- struct{}{}:
		default:
		}
	}
}

// leaveTime bounds what Subscribe does after the last delivery is settled.
const leaveTime = 2 * time.Second

func (f *feed) run(ctx context.Context, deliver func(broker.Delivery)) error {
	var wg sync.WaitGroup
	work, stop := context.WithCancel(context.WithoutCancel(ctx))
	defer func() {
		stop()
		wait, cancel := context.WithTimeout(context.WithoutCancel(ctx), leaveTime)
		defer cancel()
		_, _ = await(wait, func() (any, error) { wg.Wait(); return nil, nil })
	}()
	defer context.AfterFunc(f.b.link.ctx, stop)()
	sub, err := await(ctx, func() (*natsgo.Subscription, error) {
		sub, err := f.b.nc.Subscribe(f.inbox+".*", f.onMessage)
		if err != nil {
			return nil, err
		}
		return sub, sub.SetPendingLimits(-1, -1) // at most what was asked for
	})
	if err != nil {
		if ctx.Err() != nil {
			return nil
		}
		return err
	}
	f.sub = sub

	control, stopControl := context.WithCancel(ctx)
	defer stopControl()
	controlled := make(chan error, 1)
	wg.Go(func() { controlled <- f.control(control) })
	wg.Go(func() { f.watch(work) })
	wg.Go(func() { f.writer(work) })

	err = f.handOver(ctx, deliver, controlled)
	stopControl()
	f.drain(work)
	if f.b.isClosed.Load() && (ctx.Err() == nil || f.loseAll(false) > 0) {
		return broker.ErrClosed
	}
	return err
}

// handOver calls deliver until ctx ends or control does.
func (f *feed) handOver(ctx context.Context, deliver func(broker.Delivery), controlled <-chan error) error {
	for {
		if ctx.Err() != nil {
			return nil
		}
		if d := f.nextHeld(); d != nil {
			deliver(d)
			continue
		}
		select {
		case <-f.hand:
		case <-ctx.Done():
		case err := <-controlled:
			return err
		case <-f.b.closed:
			return broker.ErrClosed
		}
	}
}

func (f *feed) nextHeld() *delivery {
	f.mu.Lock()
	defer f.mu.Unlock()
	for len(f.held) > 0 && len(f.out) < f.s.MaxInFlight {
		d := f.held[0]
		f.held = f.held[1:]
		if d.state == stateHeld && time.Now().Before(d.deadline) {
			d.state = stateOut
			f.out[d] = struct{}{}
			return d
		}
		d.lose()
	}
	return nil
}

// drain gives back what was not handed over, and waits for what was.
func (f *feed) drain(work context.Context) {
	f.mu.Lock()
	f.draining = true
	held := f.held
	f.held = nil
	for _, d := range held {
		if d.state == stateHeld {
			d.state = stateSettled
			f.giveBack(d, 0)
		}
	}
	f.mu.Unlock()

	// The server keeps what we asked for until nobody listens. What it has sent
	// meanwhile comes to onMessage, which gives it back.
	ctx, cancel := context.WithTimeout(work, leaveTime)
	defer cancel()
	_, err := await(ctx, func() (any, error) {
		gone := f.sub.StatusChanged(natsgo.SubscriptionClosed)
		if err := f.sub.Drain(); err != nil {
			return nil, f.sub.Unsubscribe()
		}
		select {
		case <-gone:
		case <-ctx.Done():
		}
		return nil, nil
	})
	if err != nil && work.Err() == nil && f.b.link.up.Load() {
		f.b.cfg.Logger.LogAttrs(work, slog.LevelDebug, "nats subscription was not drained", slog.Any("error", err))
	}
	for {
		f.mu.Lock()
		left := len(f.out)
		f.mu.Unlock()
		if left == 0 {
			break
		}
		select {
		case <-f.hand:
		case <-f.b.closed:
			return
		}
	}
	flush, cancel := context.WithTimeout(work, leaveTime)
	defer cancel()
	if f.written(flush) == nil {
		_, _ = await(flush, func() (any, error) { return nil, f.b.nc.FlushWithContext(flush) })
	}
}

// loseAll marks every delivery lost and returns how many were handed over. void
// says that their stream is gone.
func (f *feed) loseAll(void bool) int {
	f.mu.Lock()
	defer f.mu.Unlock()
	n := len(f.out)
	for d := range f.out {
		d.void = d.void || void
		d.lose()
	}
	for _, d := range f.held {
		d.lose()
	}
	f.held = nil
	return n
}

// giveBack asks the server to deliver a message again. f.mu is held.
func (f *feed) giveBack(d *delivery, delay time.Duration) {
	if !d.void {
		f.write(order{kind: orderNak, subject: d.reply, data: nakBody(delay), until: d.deadline})
	}
}

func (f *feed) malformed(d *delivery, err error) {
	f.b.cfg.Logger.LogAttrs(f.b.link.ctx, slog.LevelWarn, "message is not encoded as it says",
		slog.String("topic", f.s.Topic), slog.Uint64("offset", d.pos.Offset), slog.Any("error", err))
}
