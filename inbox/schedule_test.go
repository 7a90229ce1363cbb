package inbox

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/postroom/postroom"
	"github.com/postroom/postroom/broker"
)

// fakeDelivery can be lost.
type fakeDelivery struct{ lost chan struct{} }

func (d *fakeDelivery) Message() postroom.Message                  { return postroom.Message{} }
func (d *fakeDelivery) Position() broker.Position                  { return broker.Position{} }
func (d *fakeDelivery) Deliveries() int                            { return 1 }
func (d *fakeDelivery) Lost() <-chan struct{}                      { return d.lost }
func (d *fakeDelivery) Ack(context.Context) error                  { return nil }
func (d *fakeDelivery) Retry(context.Context, time.Duration) error { return nil }

func newTask(id, key string) *task {
	return &task{d: &fakeDelivery{make(chan struct{})}, m: postroom.Message{ID: id, Key: key}}
}

func (t *task) lose() { close(t.d.(*fakeDelivery).lost) }

// runnable takes all that may run now.
func runnable(s *schedule) (ids []string, tasks []*task) {
	now := time.Now()
	for t := s.next(now); t != nil; t = s.next(now) {
		ids, tasks = append(ids, t.m.ID), append(tasks, t)
	}
	return ids, tasks
}

func wantIDs(t *testing.T, what string, got []string, want ...string) {
	t.Helper()
	if !slices.Equal(got, want) {
		t.Errorf("%s: %q, want %q", what, got, want)
	}
}

func TestScheduleRunsOneOfAKey(t *testing.T) {
	s := newSchedule(100)
	for _, id := range strings.Fields("a1 b1 a2 - b2 a3 -") {
		key := id[:1]
		if key == "-" {
			key, id = "", fmt.Sprint("none", s.held)
		}
		s.add(newTask(id, key))
	}
	ids, tasks := runnable(s)
	wantIDs(t, "at first", ids, "a1", "b1", "none3", "none6")
	s.done(tasks[0])
	ids, _ = runnable(s)
	wantIDs(t, "after a1", ids, "a2")

	now := time.Now()
	s.again(tasks[1], now.Add(time.Second))
	s.done(tasks[2])
	if ids, _ = runnable(s); len(ids) != 0 {
		t.Errorf("while b1 waits: %q", ids)
	}
	s.wake(now)
	if due := s.due(); !due.Equal(now.Add(time.Second)) {
		t.Errorf("due = %v", due)
	}
	s.wake(now.Add(time.Second))
	if due := s.due(); !due.IsZero() {
		t.Errorf("due = %v, want none", due)
	}
	ids, _ = runnable(s)
	wantIDs(t, "when b1 is due", ids, "b1")
	if s.held != 5 {
		t.Errorf("held = %d, want 5", s.held)
	}
}

func TestScheduleCopiesOfAMessageTakeTurns(t *testing.T) {
	s := newSchedule(100)
	s.add(newTask("x", ""))
	s.add(newTask("x", ""))
	ids, tasks := runnable(s)
	wantIDs(t, "at first", ids, "x")
	s.done(tasks[0])
	ids, tasks = runnable(s)
	wantIDs(t, "then", ids, "x")
	s.done(tasks[0])
	if len(s.lanes) != 0 || s.held != 0 {
		t.Errorf("%d lanes, %d tasks remain", len(s.lanes), s.held)
	}
}

func TestScheduleDropsWhatIsLost(t *testing.T) {
	s := newSchedule(3)
	a1, a2 := newTask("a1", "a"), newTask("a2", "a")
	s.add(a1)
	s.add(a2)
	runnable(s)
	s.again(a1, time.Now().Add(time.Hour))
	a1.lose()
	a2.lose()
	s.add(newTask("a1 again", "a")) // does not wait for the lost one's hour
	ids, _ := runnable(s)
	wantIDs(t, "at the loss", ids)
	s.wake(time.Now().Add(settling))
	ids, tasks := runnable(s)
	wantIDs(t, "after the loss", ids, "a1 again")
	if s.held != 1 {
		t.Errorf("held = %d, want 1", s.held)
	}
	// Behind a running one the lost are dropped when too many are held.
	for range 100 {
		lost := newTask("b", "a")
		s.add(lost)
		lost.lose()
	}
	if s.held > 5 {
		t.Errorf("held = %d of at most 3", s.held)
	}
	s.done(tasks[0])
	runnable(s)
	s.wake(time.Now().Add(settling))
	runnable(s)
	if s.held != 0 || len(s.lanes) != 0 {
		t.Errorf("held = %d, lanes = %d at the end", s.held, len(s.lanes))
	}
}

// One behind a lost one that is about to be lost too does not run.
func TestScheduleRestsAfterALoss(t *testing.T) {
	s := newSchedule(100)
	a1, a2 := newTask("a1", "a"), newTask("a2", "a")
	s.add(a1)
	s.add(a2)
	a1.lose()
	ids, _ := runnable(s)
	wantIDs(t, "at the loss", ids)
	a2.lose()
	s.add(newTask("a1 again", "a"))
	s.wake(time.Now().Add(time.Hour))
	ids, _ = runnable(s)
	wantIDs(t, "at the second loss", ids)
	s.wake(time.Now().Add(time.Hour))
	ids, _ = runnable(s)
	wantIDs(t, "after it", ids, "a1 again")
}

func TestScheduleLostWhileWaiting(t *testing.T) {
	s := newSchedule(1)
	a := newTask("a", "a")
	s.add(a)
	runnable(s)
	s.again(a, time.Now().Add(time.Hour))
	a.lose()
	s.add(newTask("b", "b"))
	s.add(newTask("c", "c")) // too many: a is dropped, its lane is empty
	s.add(newTask("a again", "a"))
	ids, _ := runnable(s)
	wantIDs(t, "after the loss", ids, "b", "c", "a again")
}

func TestScheduleTake(t *testing.T) {
	s := newSchedule(100)
	for _, id := range []string{"a1", "b1", "a2", "c1", "c2"} {
		s.add(newTask(id, id[:1]))
	}
	a1 := s.next(time.Now())
	b1 := s.next(time.Now())
	s.again(b1, time.Now().Add(time.Hour))
	if idle := s.takeIdle(); len(idle) != 3 {
		t.Errorf("%d tasks are idle, want b1, c1, c2", len(idle))
	}
	if lane := s.takeLane(a1); len(lane) != 2 || lane[0] != a1 {
		t.Errorf("lane of a1 = %v", lane)
	}
	if s.held != 0 || len(s.lanes) != 0 {
		t.Errorf("held = %d, lanes = %d", s.held, len(s.lanes))
	}
}

func TestDeadlines(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var ds deadlines
		short, stopShort := ds.with(t.Context(), 3*time.Second)
		defer stopShort()
		long, stopLong := ds.with(t.Context(), time.Hour)
		begin := time.Now()
		<-short.Done()
		if d := time.Since(begin); d < 3*time.Second || d > 5*time.Second {
			t.Errorf("ended after %v, want 3s to 5s", d)
		}
		if err := noAnswer(short, short.Err()); err.Error() == short.Err().Error() {
			t.Errorf("error = %v, want that there was no answer", err)
		}
		if long.Err() != nil {
			t.Error("another context was ended")
		}
		stopLong()
		if err := noAnswer(long, long.Err()); !errors.Is(err, context.Canceled) || errors.Is(err, errNoAnswer) {
			t.Errorf("error = %v, want context.Canceled", err)
		}
		<-time.After(3 * deadlineTick)
		ds.mu.Lock()
		defer ds.mu.Unlock()
		if ds.armed || len(ds.pending) != 0 {
			t.Errorf("armed = %v with %d pending, at rest", ds.armed, len(ds.pending))
		}
	})
}
