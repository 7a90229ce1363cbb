package inbox

import (
	"container/heap"
	"slices"
	"sync/atomic"
	"time"

	"github.com/cenkalti/backoff/v4"

	"github.com/postroom/postroom"
	"github.com/postroom/postroom/broker"
)

// task is a delivery that a Consumer holds.
type task struct {
	d        broker.Delivery
	m        postroom.Message // with an id, see MissingID
	lane     *lane
	attempts int
	troubles int // transactions in a row that failed by no fault of the message
	delays   *backoff.ExponentialBackOff
	letter   *letter     // not nil: it comes from the dead letters
	redriven bool        // a foreign tool has copied it back from a dead-letter topic
	dead     *deadLetter // not nil: it remains to write this
	settled  atomic.Bool // by Ack or Retry, or about to be
}

func (t *task) lost() bool {
	select {
	case <-t.d.Lost():
		return true
	default:
		return false
	}
}

// laneKey names the messages that are handled one after the other: those of one
// key, or the copies of one message without a key.
type laneKey struct {
	keyed bool
	name  string
}

func laneKeyOf(m *postroom.Message) laneKey {
	if m.HasKey() {
		return laneKey{true, m.Key}
	}
	return laneKey{false, m.ID}
}

// lane holds the tasks of one laneKey in the order of their delivery.
type lane struct {
	key     laneKey
	tasks   []*task
	running bool      // its first task is
	due     time.Time // when the first task may run, where it has to wait
	index   int       // in schedule.waiting, or -1
}

// schedule decides what may run: the first task of each lane. It is used by one
// goroutine.
type schedule struct {
	lanes   map[laneKey]*lane
	ready   []*lane // not running, not waiting
	waiting laneHeap
	held    int // tasks
	max     int // tasks, beyond which lost ones are looked for
}

func newSchedule(limit int) *schedule {
	return &schedule{lanes: make(map[laneKey]*lane), max: limit}
}

// add puts t behind the tasks of its lane.
func (s *schedule) add(t *task) {
	key := laneKeyOf(&t.m)
	l := s.lanes[key]
	if l != nil && l.index >= 0 && (len(l.tasks) == 0 || l.tasks[0].lost()) {
		heap.Remove(&s.waiting, l.index)
		s.ready = append(s.ready, l) // t need not wait for what is lost
	}
	if l == nil {
		l = &lane{key: key, index: -1}
		s.lanes[key] = l
		s.ready = append(s.ready, l)
	}
	t.lane = l
	l.tasks = append(l.tasks, t)
	s.held++
	if s.held > s.max {
		for _, l := range s.lanes {
			s.dropLost(l)
		}
	}
}

// dropLost forgets the tasks of l that may have been given to others, and
// reports whether there were any. A lane that becomes empty stays until next
// finds it.
func (s *schedule) dropLost(l *lane) bool {
	first := 0
	if l.running {
		first = 1
	}
	kept := slices.DeleteFunc(l.tasks[first:], (*task).lost)
	dropped := len(l.tasks) - first - len(kept)
	s.held -= dropped
	l.tasks = l.tasks[:first+len(kept)]
	return dropped > 0
}

// settling is how long a lane rests after a loss. The broker may be about to say
// the same of those behind, which must not run before what others now have.
const settling = 20 * time.Millisecond

// next returns a task that may run, and counts it as running, or nil.
func (s *schedule) next(now time.Time) *task {
	for len(s.ready) > 0 {
		l := s.ready[0]
		s.ready[0] = nil
		s.ready = s.ready[1:]
		lost := s.dropLost(l)
		if len(l.tasks) == 0 {
			delete(s.lanes, l.key)
			continue
		}
		if lost {
			l.due = now.Add(settling)
			heap.Push(&s.waiting, l)
			continue
		}
		l.running = true
		return l.tasks[0]
	}
	return nil
}

// done forgets t, which was running.
func (s *schedule) done(t *task) {
	l := t.lane
	l.running = false
	l.tasks[0] = nil
	l.tasks = l.tasks[1:]
	s.held--
	if len(l.tasks) == 0 {
		delete(s.lanes, l.key)
		return
	}
	s.ready = append(s.ready, l)
}

// again lets t, which was running, wait for due at the head of its lane. Where t is
// lost, what came behind it meanwhile need not wait.
func (s *schedule) again(t *task, due time.Time) {
	t.lane.running = false
	if len(t.lane.tasks) > 1 && t.lost() {
		s.ready = append(s.ready, t.lane)
		return
	}
	t.lane.due = due
	heap.Push(&s.waiting, t.lane)
}

// wake makes ready what is due.
func (s *schedule) wake(now time.Time) {
	for len(s.waiting) > 0 && !s.waiting[0].due.After(now) {
		s.ready = append(s.ready, heap.Pop(&s.waiting).(*lane))
	}
}

// due returns when the next waiting lane is due, or the zero time.
func (s *schedule) due() time.Time {
	if len(s.waiting) == 0 {
		return time.Time{}
	}
	return s.waiting[0].due
}

// takeIdle removes all tasks of lanes that are not running.
func (s *schedule) takeIdle() []*task {
	var all []*task
	for key, l := range s.lanes {
		if !l.running {
			all = append(all, l.tasks...)
			delete(s.lanes, key)
		}
	}
	s.ready, s.waiting = nil, nil
	s.held -= len(all)
	return all
}

// takeLane removes t, which was running, and all behind it.
func (s *schedule) takeLane(t *task) []*task {
	delete(s.lanes, t.lane.key)
	s.held -= len(t.lane.tasks)
	return t.lane.tasks
}

// laneHeap orders waiting lanes by the time at which they are due.
type laneHeap []*lane

func (h laneHeap) Len() int           { return len(h) }
func (h laneHeap) Less(i, j int) bool { return h[i].due.Before(h[j].due) }
func (h laneHeap) Swap(i, j int) {
	h[i], h[j] = h[j], h[i]
	h[i].index, h[j].index = i, j
}

func (h *laneHeap) Push(x any) {
	l := x.(*lane)
	l.index = len(*h)
	*h = append(*h, l)
}

func (h *laneHeap) Pop() any {
	last := len(*h) - 1
	l := (*h)[last]
	(*h)[last] = nil
	*h = (*h)[:last]
	l.index = -1
	return l
}
