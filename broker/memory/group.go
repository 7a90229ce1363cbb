package memory

import (
	"container/heap"
	"slices"
	"time"

	"github.com/postroom/postroom"
)

// A group is the position of one group of consumers in a topic. Its fields are
// guarded by the store's mutex.
type group struct {
	topic   *topic
	next    int                 // the first position that was not looked at
	floor   int                 // everything below is acknowledged
	acked   map[int]bool        // acknowledged positions at or above floor
	count   map[int]int         // deliveries of positions that are not acknowledged
	chains  map[chainKey]*chain // what is out or waits
	ready   []*chain            // chains whose head may be delivered now, oldest first
	delayed delayHeap           // chains whose head waits for its time
	changed chan struct{}       // closed when a waiting member should look again
}

// A chainKey names messages that keep an order: those of a key, or a single
// message without one, by its position.
type chainKey struct {
	key   string
	keyed bool
	alone int
}

// A chain is the messages of one key that are out or wait.
type chain struct {
	key     chainKey
	owner   *member  // who holds those that are out
	out     int      // how many are out
	waiting []waiter // in order of their positions
	listed  bool     // it stands in ready or delayed
}

type waiter struct {
	pos int
	due time.Time // zero: at once
}

func newGroup(t *topic) *group {
	return &group{
		topic: t, next: t.first, floor: t.first,
		acked: make(map[int]bool), count: make(map[int]int), chains: make(map[chainKey]*chain),
		changed: make(chan struct{}),
	}
}

// wake makes every waiting member look again.
func (g *group) wake() {
	close(g.changed)
	g.changed = make(chan struct{})
}

func (g *group) message(pos int) *postroom.Message { return &g.topic.log[pos-g.topic.first] }

// take returns the next position for a member and the chain it belongs to.
// Where there is none it returns the time until a delayed one is due, or -1.
func (g *group) take(m *member, now time.Time) (pos int, c *chain, wait time.Duration) {
	for len(g.delayed) > 0 && !g.delayed[0].waiting[0].due.After(now) {
		g.ready = append(g.ready, heap.Pop(&g.delayed).(*chain))
	}
	for i, c := range g.ready {
		if c.out > 0 && c.owner != m {
			continue
		}
		g.ready = slices.Delete(g.ready, i, i+1)
		c.listed = false
		pos, c.waiting = c.waiting[0].pos, c.waiting[1:]
		g.give(pos, c, m)
		g.list(c)
		return pos, c, 0
	}
	for end := g.topic.first + len(g.topic.log); g.next < end; {
		pos, g.next = g.next, g.next+1
		c := g.chain(pos)
		if len(c.waiting) > 0 || c.out > 0 && c.owner != m {
			c.waiting = append(c.waiting, waiter{pos: pos})
			g.list(c)
			continue
		}
		g.give(pos, c, m)
		return pos, c, 0
	}
	if len(g.delayed) > 0 {
		return 0, nil, g.delayed[0].waiting[0].due.Sub(now)
	}
	return 0, nil, -1
}

func (g *group) chain(pos int) *chain {
	m := g.message(pos)
	key := chainKey{key: m.Key, keyed: true}
	if !m.HasKey() {
		key = chainKey{alone: pos}
	}
	c := g.chains[key]
	if c == nil {
		c = &chain{key: key}
		g.chains[key] = c
	}
	return c
}

func (g *group) give(pos int, c *chain, m *member) {
	c.owner = m
	c.out++
	g.count[pos]++
}

// list puts a chain where take finds it.
func (g *group) list(c *chain) {
	switch {
	case c.listed || len(c.waiting) == 0:
	case c.waiting[0].due.IsZero():
		c.listed = true
		g.ready = append(g.ready, c)
	default:
		c.listed = true
		heap.Push(&g.delayed, c)
	}
}

// ack settles a position for good.
func (g *group) ack(pos int, c *chain) {
	g.acked[pos] = true
	for g.acked[g.floor] {
		delete(g.acked, g.floor)
		g.floor++
	}
	delete(g.count, pos)
	c.out--
	if c.out == 0 && len(c.waiting) == 0 {
		delete(g.chains, c.key)
	}
	g.wake()
}

// giveBack lets a position wait until due, in its place in the chain.
func (g *group) giveBack(pos int, c *chain, due time.Time) {
	c.out--
	g.unlist(c)
	i, _ := slices.BinarySearchFunc(c.waiting, pos, func(w waiter, pos int) int { return w.pos - pos })
	c.waiting = slices.Insert(c.waiting, i, waiter{pos, due})
	g.list(c)
	g.wake()
}

func (g *group) unlist(c *chain) {
	if !c.listed {
		return
	}
	c.listed = false
	if i := slices.Index(g.ready, c); i >= 0 {
		g.ready = slices.Delete(g.ready, i, i+1)
		return
	}
	heap.Remove(&g.delayed, slices.Index(g.delayed, c))
}

// delayHeap orders chains by the time at which their heads are due.
type delayHeap []*chain

func (h delayHeap) Len() int           { return len(h) }
func (h delayHeap) Less(i, j int) bool { return h[i].waiting[0].due.Before(h[j].waiting[0].due) }
func (h delayHeap) Swap(i, j int)      { h[i], h[j] = h[j], h[i] }
func (h *delayHeap) Push(x any)        { *h = append(*h, x.(*chain)) }
func (h *delayHeap) Pop() any {
	last := len(*h) - 1
	c := (*h)[last]
	(*h)[last] = nil
	*h = (*h)[:last]
	return c
}
