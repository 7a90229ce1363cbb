package nats

import (
	"cmp"
	"context"
	"time"
)

// freshness knows a time after which the messages that come now were sent. The
// server counts AckWait from when it sends, and a message may lie on the way: in
// a stalled network, or here while the program was stopped.
type freshness struct {
	at    time.Time // what comes now was sent after it
	count uint64    // messages received
	next  time.Time // what comes after message number `after` was sent after it
	after uint64
	waits bool
}

// received counts a message in. f.mu is held.
func (fr *freshness) received() {
	if fr.count++; fr.waits && fr.count > fr.after {
		fr.at, fr.waits = fr.next, false
	}
}

// confirm says that messages after the given number were sent after t.
func (fr *freshness) confirm(t time.Time, count uint64) {
	switch {
	case fr.waits:
	case fr.count >= count:
		fr.at = t
	default:
		fr.next, fr.after, fr.waits = t, count, true
	}
}

// watch extends what is unsettled and finds what is lost, until ctx ends; then
// everything is lost.
func (f *feed) watch(ctx context.Context) {
	beating := make(chan struct{}, 1) // holds an element while a round trip runs
	timer := time.NewTimer(0)
	defer timer.Stop()
	for {
		select {
		case <-ctx.Done():
			f.loseAll(false)
			return
		case <-timer.C:
		}
		wait := f.look()
		timer.Reset(cmp.Or(wait, 10*time.Millisecond))
		if wait == 0 {
			continue
		}
		select {
		case beating <- struct{}{}:
			go func() {
				defer func() { <-beating }()
				f.beat(ctx, wait*4)
			}()
		default:
		}
	}
}

// look loses what may have passed its deadline before the next look and extends
// what has not much time left. It returns the time until the next look, or 0
// while there is no consumer.
func (f *feed) look() time.Duration {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.c == nil {
		return 0
	}
	now, tick := time.Now(), f.c.ackWait/6
	each := func(d *delivery) {
		switch left := d.deadline.Sub(now); {
		case left <= tick:
			d.lose()
		case left < tick*4 && !d.void && f.b.link.up.Load():
			d.extended = now
			f.write(order{kind: orderExtend, subject: d.reply, data: extendBody})
		}
	}
	for d := range f.out {
		each(d)
	}
	for _, d := range f.held {
		each(d)
	}
	return tick
}

// beat makes a round trip, after which the extensions sent before it count.
func (f *feed) beat(ctx context.Context, limit time.Duration) {
	if !f.b.link.up.Load() {
		return
	}
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	at := time.Now()
	if f.written(ctx) != nil {
		return
	}
	if _, err := await(ctx, func() (any, error) { return nil, f.b.nc.FlushWithContext(ctx) }); err != nil {
		return
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	f.confirm(at)
	extend := func(d *delivery) {
		if !d.extended.IsZero() && !d.extended.After(at) {
			d.deadline = later(d.deadline, d.extended.Add(f.c.ackWait))
		}
	}
	for d := range f.out {
		extend(d)
	}
	for _, d := range f.held {
		extend(d)
	}
}

// confirm says that a round trip begun at t has ended, or that nothing is on its
// way at t: what is received after what came so far was sent after t. f.mu is
// held.
func (f *feed) confirm(t time.Time) {
	// Pending first: a message that moves on meanwhile is counted twice, which
	// errs on the safe side.
	pending, _, err := f.sub.Pending()
	delivered, err2 := f.sub.Delivered()
	if err == nil && err2 == nil {
		f.fresh.confirm(t, uint64(delivered)+uint64(pending))
	}
}

func later(a, b time.Time) time.Time {
	if a.After(b) {
		return a
	}
	return b
}
