package franz

import (
	"slices"
	"time"

	"github.com/twmb/franz-go/pkg/kgo"
)

// window is how many messages of a partition may be delivered from the first
// unsettled one on. Only their places are kept.
const window = 1 << 16

// A partition is what a member holds of one partition, from being assigned it to
// losing it. The member's mutex guards it.
type partition struct {
	id     int32
	lost   chan struct{}
	isLost bool
	idle   chan struct{} // closed when it is to be given away and nothing is out; nil: it is not

	queue  []*kgo.Record // fetched and not delivered
	paused bool          // nothing is fetched
	next   int64         // the offset that is expected next; -1: unknown

	// What was delivered, from the first that is not settled on. Places are
	// numbered from the assignment on.
	first   int64
	entries []entry
	out     int     // deliveries that are not settled
	retries []retry // ordered by due
	commit  kgo.EpochOffset
	dirty   bool // commit has moved since it was committed
}

// An entry is one message that was delivered, or a transaction's mark.
type entry struct {
	after kgo.EpochOffset // to commit when it and all before are settled
	done  bool
}

// A retry is a message that was given back.
type retry struct {
	seq    int64
	record *kgo.Record
	due    time.Time
}

func newPartition(id int32) *partition {
	return &partition{id: id, lost: make(chan struct{}), next: -1}
}

// lose makes the partition another member's.
func (p *partition) lose() {
	if !p.isLost {
		p.isLost = true
		close(p.lost)
	}
	p.queue, p.retries = nil, nil
}

// retire has nothing more delivered.
func (p *partition) retire() {
	p.queue, p.retries = nil, nil
	p.idle = make(chan struct{})
	if p.out == 0 {
		close(p.idle)
	}
}

// settled counts a delivery that was settled.
func (p *partition) settled() {
	if p.out--; p.out == 0 && p.idle != nil {
		close(p.idle)
	}
}

// add appends to the window and returns the place.
func (p *partition) add(r *kgo.Record) (seq int64) {
	p.entries = append(p.entries, entry{after: kgo.EpochOffset{Epoch: r.LeaderEpoch, Offset: r.Offset + 1}})
	return p.first + int64(len(p.entries)) - 1
}

// done settles a place, and moves on what may be committed.
func (p *partition) done(seq int64) {
	p.entries[seq-p.first].done = true
	n := 0
	for n < len(p.entries) && p.entries[n].done {
		n++
	}
	if n > 0 {
		p.commit, p.dirty = p.entries[n-1].after, true
		p.entries, p.first = p.entries[n:], p.first+int64(n)
	}
}

// giveBack has a message delivered again, here or, once the partition was given
// away, there.
func (p *partition) giveBack(seq int64, r *kgo.Record, due time.Time) {
	if p.idle != nil {
		return
	}
	i, _ := slices.BinarySearchFunc(p.retries, due, func(r retry, due time.Time) int {
		if r.due.After(due) {
			return 1
		}
		return -1 // behind those that are due at the same time
	})
	p.retries = slices.Insert(p.retries, i, retry{seq, r, due})
}

// passMarks settles the marks of transactions at the head of the queue.
func (p *partition) passMarks() {
	for len(p.queue) > 0 && p.queue[0].Attrs.IsControl() {
		p.done(p.add(p.queue[0]))
		p.queue = p.queue[1:]
	}
}

// ready reports whether the head of the queue may be delivered.
func (p *partition) ready() bool {
	p.passMarks()
	return len(p.queue) > 0 && len(p.entries) < window
}

// take delivers the head of the queue.
func (p *partition) take() (seq int64, r *kgo.Record) {
	r = p.queue[0]
	p.queue[0] = nil
	p.queue = p.queue[1:]
	p.out++
	return p.add(r), r
}

// takeBack delivers once more what is due first.
func (p *partition) takeBack() (seq int64, r *kgo.Record) {
	first := p.retries[0]
	p.retries = slices.Delete(p.retries, 0, 1)
	p.out++
	return first.seq, first.record
}
