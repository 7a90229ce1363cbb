package kafka

import (
	"cmp"
	"slices"
	"time"

	"github.com/cenkalti/backoff/v4"

	"github.com/postroom/postroom"
)

type state uint8

const (
	ready     state = iota // fetched
	out                    // handed over
	givenBack              // to be fetched and handed over again, not before due
	settled
)

// An entry is one message in a partition, from its fetching until all before it
// are settled.
type entry struct {
	offset  int64
	size    int
	message postroom.Message // only while ready
	state   state
	due     time.Time
}

// A partition is what a member holds of one partition for the time that it is
// assigned to it. Its mutable fields are guarded by the feed's mu.
type partition struct {
	index int32
	lost  chan struct{} // closed when it is taken away
	gone  bool

	// fetchAt is the next offset to be fetched, or unknown. All records before
	// it are in queue or in window, or were settled, or are not for readers.
	fetchAt int64
	// first says that the first offset which the broker holds is to be taken in
	// the place of the committed one, which it does not hold.
	first bool

	// below is behind the last entry that left window: all before it is settled,
	// though it may be fetched again where something was given back.
	below int64

	queue  []*entry // to be handed over
	bytes  int      // of queue
	window []*entry // handed over, from the first unsettled one on
	out    int      // of window

	committed int64 // what the group's offset is, or unknown

	visit    int  // counts the times that fetchAt was moved back
	fetching bool // a request with it is under way
	busy     bool // the last fetch brought something
	alone    bool // fetch it without others: a response with it failed
	pause    *backoff.ExponentialBackOff
	notUntil time.Time // fetch it no earlier
}

const unknown = -1

func newPartition(index int32) *partition {
	return &partition{index: index, lost: make(chan struct{}), fetchAt: unknown, committed: unknown, pause: newPause()}
}

// position is the offset up to which all is settled, or unknown.
func (p *partition) position() int64 {
	switch {
	case len(p.window) > 0:
		return p.window[0].offset
	case len(p.queue) > 0:
		return p.queue[0].offset
	}
	return p.fetchAt
}

// next takes the record that may be handed over, or returns nil, and when there
// may be one where that is a matter of time.
func (p *partition) next(now time.Time, most int) (*entry, time.Time) {
	if len(p.queue) == 0 {
		return nil, time.Time{}
	}
	r := p.queue[0]
	switch {
	case r.state == givenBack && r.due.After(now):
		return nil, r.due
	case r.state == givenBack: // it stands in window
	case len(p.window) >= most:
		return nil, time.Time{}
	default:
		p.window = append(p.window, r)
	}
	p.queue[0] = nil
	p.queue = p.queue[1:]
	p.bytes -= r.size
	p.out++
	r.state = out
	return r, time.Time{}
}

// take puts fetched records into the queue, those in window only where they were
// given back.
func (p *partition) take(records []*entry, next int64) {
	for _, r := range records {
		if r.offset < p.below {
			continue
		}
		if w := p.find(r.offset); w != nil {
			if w.state != givenBack {
				continue
			}
			w.message, w.size = r.message, r.size
			r = w
		}
		p.queue = append(p.queue, r)
		p.bytes += r.size
	}
	p.fetchAt = max(next, p.below)
}

// find returns the record of window with an offset, or nil.
func (p *partition) find(offset int64) *entry {
	if n := len(p.window); n == 0 || offset > p.window[n-1].offset {
		return nil
	}
	i, ok := slices.BinarySearchFunc(p.window, offset, atOffset)
	if !ok {
		return nil
	}
	return p.window[i]
}

func atOffset(e *entry, offset int64) int { return cmp.Compare(e.offset, offset) }

// settle ends a record's stay, and that of those settled before, of which it was
// the last one to be waited for.
func (p *partition) settle(r *entry) {
	p.out--
	r.state = settled
	n := 0
	for n < len(p.window) && p.window[n].state == settled {
		p.below = p.window[n].offset + 1
		p.window[n] = nil
		n++
	}
	p.window = p.window[n:]
	p.fetchAt = max(p.fetchAt, p.below)
}

// giveBack has a record fetched again, and all that lies behind it.
func (p *partition) giveBack(r *entry, due time.Time) {
	p.out--
	r.state, r.due = givenBack, due
	if p.fetchAt <= r.offset {
		return // another one has moved it back
	}
	p.fetchAt = r.offset
	n, _ := slices.BinarySearchFunc(p.queue, r.offset, atOffset)
	for _, e := range p.queue[n:] {
		p.bytes -= e.size
	}
	p.queue = slices.Delete(p.queue, n, len(p.queue))
	p.visit++
	p.fetching = false // what is under way is of no use
}

// failed puts the next fetch off.
func (p *partition) failed(now time.Time) {
	p.fetching = false
	p.notUntil = now.Add(p.pause.NextBackOff())
}
