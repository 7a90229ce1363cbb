package kafka

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/postroom/postroom"
	"github.com/postroom/postroom/broker"
)

var errSettled = errors.New("kafka: delivery was settled before")

// A delivery is one message that is handed over.
type delivery struct {
	f       *feed
	p       *partition
	r       *entry
	message postroom.Message
	settled bool // guarded by f.mu
}

func (d *delivery) Message() postroom.Message { return d.message }
func (d *delivery) Lost() <-chan struct{}     { return d.p.lost }

// Deliveries returns 0: Kafka does not count.
func (d *delivery) Deliveries() int { return 0 }

func (d *delivery) Position() broker.Position {
	return broker.Position{Topic: d.f.s.Topic, Partition: d.p.index, Offset: uint64(d.r.offset)}
}

// Ack implements [broker.Delivery]. The partition's offset is committed soon
// after, if nothing before the message is unsettled. It waits for nothing, so that
// the end of its context does not matter.
func (d *delivery) Ack(context.Context) error {
	return d.settle(func() {
		d.p.settle(d.r)
		if d.p.position() > d.p.committed {
			kick(d.f.dirty)
		}
	})
}

// Retry implements [broker.Delivery]. The message is fetched again, and what lies
// behind it in its partition and has not been handed over waits for it. After the
// subscription's context has ended, it is left to the partition's next owner.
func (d *delivery) Retry(_ context.Context, delay time.Duration) error {
	due := time.Now().Add(delay)
	return d.settle(func() {
		d.p.giveBack(d.r, due)
		kick(d.f.room)
	})
}

func (d *delivery) settle(settle func()) error {
	f := d.f
	f.mu.Lock()
	defer f.mu.Unlock()
	if d.settled {
		return errSettled
	}
	d.settled = true
	if d.p.gone {
		return fmt.Errorf("kafka: %w", broker.ErrLost)
	}
	full := f.scarce() || len(d.p.window) >= f.b.cfg.MaxAhead
	settle()
	f.out--
	f.check()
	if full {
		kick(f.hand)
	}
	return nil
}

// handOver calls deliver until ctx ends.
func (f *feed) handOver(ctx context.Context, deliver func(broker.Delivery)) {
	timer := time.NewTimer(0)
	defer timer.Stop()
	for {
		d, due := f.next()
		if d != nil {
			deliver(d)
			continue
		}
		var alarm <-chan time.Time
		if !due.IsZero() {
			timer.Reset(time.Until(due))
			alarm = timer.C
		}
		select {
		case <-f.hand:
		case <-alarm:
		case <-ctx.Done():
			return
		}
	}
}

// next takes what is to be handed over, from the partitions in turns. Where there
// is nothing it returns nil, and when there may be something, or the zero time.
func (f *feed) next() (*delivery, time.Time) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.draining || f.out >= f.s.MaxInFlight {
		return nil, time.Time{}
	}
	var soonest time.Time
	now := time.Now()
	kept := f.kept()
	for range f.parts {
		f.turn = (f.turn + 1) % len(f.parts)
		p := f.parts[f.turn]
		if p.out > 0 && f.out+kept >= f.s.MaxInFlight {
			continue
		}
		r, due := p.next(now, f.b.cfg.MaxAhead)
		if r != nil {
			f.out++
			d := &delivery{f: f, p: p, r: r, message: r.message}
			r.message = postroom.Message{} // it belongs to the receiver
			if f.hungry(p) {
				kick(f.room)
			}
			return d, time.Time{}
		}
		if !due.IsZero() && (soonest.IsZero() || due.Before(soonest)) {
			soonest = due
		}
	}
	return nil, soonest
}

// scarce reports whether places are kept for some partitions. f.mu is held.
func (f *feed) scarce() bool { return f.out+len(f.parts) >= f.s.MaxInFlight }

// kept is how many of the MaxInFlight places are kept for the partitions of which
// nothing is handed over, so that a slow one does not stop the others. f.mu is held.
func (f *feed) kept() (n int) {
	if !f.scarce() || f.s.MaxInFlight < leastPlaces*len(f.parts) {
		return 0
	}
	for _, p := range f.parts {
		if p.out == 0 {
			n++
		}
	}
	return n
}

// leastPlaces is from how many places for each partition on some are kept.
const leastPlaces = 4

// renew takes note that the coordinator answered a request that was sent at a
// time: partitions are this member's for one session from then on. It returns
// false where they were given up before that, or should have been.
func (f *feed) renew(sent time.Time) bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	held := time.Now().Before(f.until)
	if !held {
		f.have(nil)
	}
	f.until = sent.Add(f.b.cfg.SessionTimeout)
	f.lapse.Reset(time.Until(f.until))
	return held
}

// lapsed gives the partitions up when the coordinator may have given them to others,
// whatever the member is waiting for meanwhile.
func (f *feed) lapsed() {
	f.mu.Lock()
	defer f.mu.Unlock()
	if !time.Now().Before(f.until) {
		f.have(nil)
	}
}

// holds reports whether the coordinator counts this member, for all that is known.
func (f *feed) holds() bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	return time.Now().Before(f.until)
}

// assign gives the partitions with the indexes to this member, keeps what it has
// of them, and takes all others away.
func (f *feed) assign(indexes []int32) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.have(indexes)
}

// have is assign with f.mu held.
func (f *feed) have(indexes []int32) {
	had := make(map[int32]*partition, len(f.parts))
	for _, p := range f.parts {
		had[p.index] = p
	}
	f.parts = make([]*partition, 0, len(indexes))
	for _, i := range indexes {
		p := had[i]
		if p == nil {
			p = newPartition(i)
		}
		delete(had, i)
		f.parts = append(f.parts, p)
	}
	for _, p := range had {
		f.lose(p)
	}
	if len(f.parts) == 0 {
		f.trouble.clearWhere(func(place int32) bool { return place <= troubleCommit }) // nothing is asked for
	}
	f.check()
	kick(f.room)
	kick(f.hand)
}

// lose makes the deliveries of a partition void. f.mu is held.
func (f *feed) lose(p *partition) {
	p.gone = true
	close(p.lost)
	f.out -= p.out
	p.queue, p.window = nil, nil
	f.trouble.clear(p.index)
}

// restart gives up what is held of a partition whose log does not hold the offset
// where it stands. f.mu is held.
func (f *feed) restart(p *partition) {
	for i := range f.parts {
		if f.parts[i] == p {
			again := newPartition(p.index)
			again.first, again.pause = true, p.pause
			again.failed(time.Now())
			f.parts[i] = again
			f.lose(p)
			f.check()
			kick(f.hand)
			kick(f.room)
			return
		}
	}
}
