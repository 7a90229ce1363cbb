package inbox

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"time"

	"github.com/cenkalti/backoff/v4"

	"github.com/postroom/postroom/broker"
	"github.com/postroom/postroom/internal/waits"
)

const (
	settleTime = 10 * time.Second // for telling the broker
	graceTime  = 2 * time.Second  // for handlers whose context was cancelled

	// maxAttemptsKept bounds the memory of attempts of messages that are not
	// held at the moment.
	maxAttemptsKept = 10_000
)

var errExited = errors.New("the handler ended its goroutine (runtime.Goexit)")

// run is one call of Run. Whoever brings news decides what runs next: the
// subscription with a delivery, a worker when it has run a task, and loop when
// time has passed. So a busy consumer hands no message from one goroutine to
// another but once.
type run struct {
	c      *Consumer
	ctx    context.Context    //nolint:containedctx // one call's: whether to take new work
	work   context.Context    //nolint:containedctx // one call's: carries what has begun
	cancel context.CancelFunc // of work
	ended  chan error         // of Subscribe
	news   chan struct{}      // tells loop to look
	halted chan error         // tells loop to stop
	drawn  chan struct{}      // tells takeLetters that all it took are settled

	mu       sync.Mutex
	s        *schedule
	attempts map[string]int // message id → attempts that failed
	running  map[*task]bool
	letters  map[string]bool // ids of the dead letters that are held
	giving   int             // batches that are being given back
	outage   *outage
	alarm    time.Time // when loop looks next; zero: when there are news
	stopping bool
	left     int // handlers that ran until the drain timeout
}

// outage is a time in which the database is away.
type outage struct {
	pause   *backoff.ExponentialBackOff
	until   time.Time
	probing bool // a transaction is looking whether it is over
}

func newRun(ctx, work context.Context, c *Consumer, cancel context.CancelFunc) *run {
	return &run{
		c: c, ctx: ctx, work: work, cancel: cancel,
		ended:    make(chan error, 1),
		news:     make(chan struct{}, 1),
		halted:   make(chan error, 1),
		drawn:    make(chan struct{}, 1),
		s:        newSchedule(c.box.cfg.MaxInFlight + maxLetters),
		attempts: make(map[string]int),
		running:  make(map[*task]bool),
		letters:  make(map[string]bool),
	}
}

// loop returns when Subscribe has and all is settled, or what is not must be
// left. halt ends r.ctx.
func (r *run) loop(halt func()) error {
	var failed error
	var drain, grace, end <-chan time.Time
	stop := r.ctx.Done()
	subscribed := true
	timer := time.NewTimer(0)
	defer timer.Stop()
	for {
		idle, next := r.look()
		if idle && !subscribed {
			return r.error(failed)
		}
		if !next.IsZero() {
			timer.Reset(time.Until(next))
		}
		select {
		case <-r.news:
		case <-timer.C:
		case <-r.c.begun:
			r.begun()
		case failed = <-r.halted:
			halt()
		case <-stop:
			stop, drain = nil, r.stop()
		case err := <-r.ended:
			subscribed = false
			if r.ctx.Err() == nil {
				failed = subscriptionError(err)
				stop, drain = nil, r.stop()
			} else if err != nil {
				failed = errors.Join(failed, err)
			}
		case <-drain:
			r.drained()
			grace = time.After(graceTime)
		case <-grace:
			r.abandon()
			end = time.After(settleTime)
		case <-end:
			return r.error(errors.Join(failed, errors.New("the broker did not end the subscription")))
		}
	}
}

func subscriptionError(err error) error {
	if err == nil {
		return errors.New("the subscription ended by itself")
	}
	return err
}

func (r *run) error(failed error) error {
	if r.left > 0 {
		failed = errors.Join(fmt.Errorf("%w: %d handlers were running after %v", ErrDrainTimeout, r.left,
			r.c.box.cfg.DrainTimeout), failed)
	}
	if failed != nil {
		return fmt.Errorf("inbox: subscriber %q: %w", r.c.box.subscriber, failed)
	}
	return nil
}

// look starts what may run. It returns whether nothing is held, and when loop
// has to look again, or the zero time.
func (r *run) look() (idle bool, next time.Time) {
	r.mu.Lock()
	defer r.mu.Unlock()
	now := time.Now()
	r.start(now)
	r.alarm = r.due(now)
	return r.s.held == 0 && r.giving == 0, r.alarm
}

// due returns when something may be started that start(now) did not, or the zero
// time.
func (r *run) due(now time.Time) time.Time {
	due := r.s.due()
	if o := r.outage; o != nil && !o.probing && r.s.held > 0 && now.Before(o.until) {
		due = o.until
	}
	if r.stopping {
		due = time.Time{}
	}
	return due
}

// tell makes loop look, if it has to look earlier than it means to.
func (r *run) tell(now time.Time) {
	if due := r.due(now); !r.stopping && (due.IsZero() || !r.alarm.IsZero() && !due.Before(r.alarm)) {
		return
	}
	select {
	case r.news <- struct{}{}:
	default: // it is told already
	}
}

// deliver takes what Subscribe delivers.
func (r *run) deliver(d broker.Delivery) {
	t := &task{d: d, m: d.Message()}
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.stopping {
		r.giveBack([]*task{t})
		return
	}
	r.c.identify(t, d.Position())
	t.attempts = r.attempts[t.m.ID]
	r.s.add(t)
	now := time.Now()
	r.start(now)
	r.tell(now)
}

// start runs what may run, each in a goroutine. r.mu is held.
func (r *run) start(now time.Time) {
	for t := r.next(now); t != nil; t = r.next(now) {
		go r.worker(t)
	}
	if r.outage != nil && !r.outage.probing && r.s.held == 0 {
		r.back() // nothing is left to look with
	}
}

// next returns a task that may run, and counts it as running, or nil. r.mu is
// held.
func (r *run) next(now time.Time) *task {
	if r.stopping || r.ctx.Err() != nil || len(r.running) == r.c.box.cfg.Concurrency {
		return nil
	}
	if r.outage != nil && (r.outage.probing || now.Before(r.outage.until)) {
		return nil
	}
	r.s.wake(now)
	t := r.s.next(now)
	if t == nil {
		return nil
	}
	if r.outage != nil {
		r.outage.probing = true
	}
	r.running[t] = true
	return t
}

// worker runs t and what may run after it.
func (r *run) worker(t *task) {
	defer func() {
		if t == nil {
			return
		}
		// The handler has ended this goroutine; another one goes on.
		o := r.c.failed(r.work, t, &failure{r.c.box.subscriber, t.m.ID, stageHandle, errExited, false, false})
		if next := r.settle(o); next != nil {
			go r.worker(next)
		}
	}()
	for t != nil {
		t = r.settle(r.c.process(r.work, t))
	}
}

// settle takes note of what came of a task, and returns another one for the same
// worker, or nil.
func (r *run) settle(o outcome) *task {
	r.mu.Lock()
	defer r.mu.Unlock()
	if !r.running[o.t] {
		return nil // it was abandoned
	}
	delete(r.running, o.t)
	now := time.Now()
	r.note(o, now)
	next := r.next(now)
	r.start(now)
	r.tell(now)
	return next
}

func (r *run) note(o outcome, now time.Time) {
	t := o.t
	if o.kind == away {
		r.away(o.err)
	} else {
		r.back()
	}
	if o.kind == stopHere {
		select {
		case r.halted <- o.err:
		default: // it stops at another one
		}
	}
	switch {
	case o.kind == settled:
		delete(r.attempts, t.m.ID)
		r.forget(t, o.result)
		if r.stopping {
			r.giveBack(r.s.takeLane(t)[1:])
		} else {
			r.s.done(t)
		}
	case r.stopping || o.kind == giveBack || o.kind == stopHere:
		r.giveBack(r.s.takeLane(t))
	default:
		r.remember(t)
		r.s.again(t, now.Add(o.wait))
	}
}

// remember keeps the attempts of t for the case that it is lost and comes again.
func (r *run) remember(t *task) {
	if t.attempts == 0 {
		return
	}
	if _, known := r.attempts[t.m.ID]; !known && len(r.attempts) >= maxAttemptsKept {
		for id := range r.attempts { // any
			delete(r.attempts, id)
			break
		}
	}
	r.attempts[t.m.ID] = t.attempts
}

// away pauses everything because a transaction could not begin.
func (r *run) away(err error) {
	switch {
	case r.outage == nil:
		select {
		case <-r.c.begun: // of the last outage
		default:
		}
		r.outage = &outage{pause: waits.Growing(r.c.box.cfg.RetryDelay, r.c.box.cfg.MaxRetryDelay)}
	case !r.outage.probing:
		return // it had begun before the pause
	}
	r.c.setDatabase(err)
	pause := r.outage.pause.NextBackOff()
	r.outage.probing, r.outage.until = false, time.Now().Add(pause)
	r.c.box.cfg.Logger.LogAttrs(r.work, slog.LevelWarn, "database trouble",
		slog.String("subscriber", r.c.box.subscriber), slog.Duration("retry_after", pause), slog.Any("error", err))
}

// back ends an outage.
func (r *run) back() {
	if r.outage == nil {
		return
	}
	r.outage = nil
	r.c.setDatabase(nil)
	r.c.box.cfg.Logger.LogAttrs(r.work, slog.LevelInfo, "database back",
		slog.String("subscriber", r.c.box.subscriber))
}

// begun takes note of a transaction that has begun during an outage.
func (r *run) begun() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.back()
}

// stop begins the end: it gives back what is not running.
func (r *run) stop() (drain <-chan time.Time) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.stopping {
		return nil
	}
	r.stopping = true
	r.giveBack(r.s.takeIdle())
	if d := r.c.box.cfg.DrainTimeout; d > 0 {
		drain = time.After(d)
	}
	return drain
}

// drained ends the context of the handlers that are still running.
func (r *run) drained() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.left = len(r.running)
	r.cancel()
}

// abandon gives back what is still being handled. Its handlers cannot commit any
// more.
func (r *run) abandon() {
	r.mu.Lock()
	defer r.mu.Unlock()
	for t := range r.running {
		delete(r.running, t)
		r.giveBack(r.s.takeLane(t))
	}
}

// giveBack returns tasks to the broker, in their order. r.mu is held.
func (r *run) giveBack(tasks []*task) {
	if len(tasks) == 0 {
		return
	}
	r.giving++
	go func() {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(r.work), settleTime)
		defer cancel()
		for _, t := range tasks {
			if !t.settled.CompareAndSwap(false, true) {
				continue
			}
			if err := t.d.Retry(ctx, 0); err != nil && !errors.Is(err, broker.ErrLost) {
				r.c.log(ctx, slog.LevelWarn, "give back", t, slog.Any("error", err))
			}
		}
		r.mu.Lock()
		defer r.mu.Unlock()
		r.giving--
		r.tell(time.Now())
	}()
}
