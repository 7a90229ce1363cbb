package inbox

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"time"

	"github.com/cenkalti/backoff/v4"

	"github.com/postroom/postroom"
	"github.com/postroom/postroom/broker"
)

const (
	settleTime = 10 * time.Second // for telling the broker
	graceTime  = 2 * time.Second  // for handlers whose context was cancelled

	// maxAttemptsKept bounds the memory of attempts of messages that are not
	// held at the moment.
	maxAttemptsKept = 10_000
)

var errExited = errors.New("the handler ended its goroutine (runtime.Goexit)")

// run is one call of Run. All is done by the goroutine of loop, except handling
// and giving back.
type run struct {
	c        *Consumer
	work     context.Context
	cancel   context.CancelFunc // of work
	in       chan broker.Delivery
	results  chan outcome
	given    chan struct{} // a batch was given back
	ended    chan error    // of Subscribe
	gone     chan struct{} // loop has returned
	s        *schedule
	attempts map[string]int // message id → attempts that failed
	running  map[*task]bool
	giving   int
	outage   *outage

	stopping   bool
	subscribed bool
	left       int // handlers that ran until the drain timeout
}

// outage is a time in which the database is away.
type outage struct {
	pause   *backoff.ExponentialBackOff
	until   time.Time
	probing bool // a transaction is looking whether it is over
}

func newRun(c *Consumer, work context.Context, cancel context.CancelFunc) *run {
	return &run{
		c: c, work: work, cancel: cancel,
		in:         make(chan broker.Delivery, c.box.cfg.MaxInFlight),
		results:    make(chan outcome, c.box.cfg.Concurrency),
		given:      make(chan struct{}),
		ended:      make(chan error, 1),
		gone:       make(chan struct{}),
		s:          newSchedule(c.box.cfg.MaxInFlight),
		attempts:   make(map[string]int),
		running:    make(map[*task]bool),
		subscribed: true,
	}
}

// deliver takes what Subscribe delivers.
func (r *run) deliver(d broker.Delivery) {
	select {
	case r.in <- d:
	case <-r.gone:
	}
}

func (r *run) loop(ctx context.Context) error {
	var failed error
	var drain, grace, end <-chan time.Time
	stop := ctx.Done()
	timer := time.NewTimer(0)
	defer timer.Stop()
	for r.subscribed || r.s.held > 0 || r.giving > 0 || len(r.in) > 0 {
		if next := r.start(time.Now()); !next.IsZero() {
			timer.Reset(time.Until(next))
		}
		select {
		case d := <-r.in:
			r.take(d)
		case o := <-r.results:
			r.settle(o)
		case <-r.given:
			r.giving--
		case <-r.c.begun:
			r.back()
		case <-timer.C:
		case <-stop:
			stop, drain = nil, r.stop()
		case err := <-r.ended:
			r.subscribed = false
			if ctx.Err() == nil {
				failed = subscriptionError(err)
				stop, drain = nil, r.stop()
			} else if err != nil {
				failed = err
			}
		case <-drain:
			r.left = len(r.running)
			r.cancel()
			grace = time.After(graceTime)
		case <-grace:
			r.abandon()
			end = time.After(settleTime)
		case <-end:
			return r.error(errors.Join(failed, errors.New("the broker did not end the subscription")))
		}
	}
	return r.error(failed)
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

// take queues a delivery.
func (r *run) take(d broker.Delivery) {
	t := &task{d: d, m: d.Message()}
	if r.stopping {
		r.giveBack([]*task{t})
		return
	}
	if problem := postroom.CheckID(t.m.ID); problem != "" {
		t.m.ID = positionID(d.Position())
		if r.c.box.cfg.MissingID == DeadLetterWithoutID {
			t.dead = &deadLetter{reason: "the message's id " + problem}
		}
	}
	t.attempts = r.attempts[t.m.ID]
	r.s.add(t)
}

// start runs what may run, and returns when to look again, or the zero time.
func (r *run) start(now time.Time) time.Time {
	if r.stopping {
		return time.Time{}
	}
	r.s.wake(now)
	if r.outage != nil && now.Before(r.outage.until) {
		return r.outage.until
	}
	for len(r.running) < r.c.box.cfg.Concurrency && (r.outage == nil || !r.outage.probing) {
		t := r.s.next(now)
		if t == nil {
			break
		}
		if r.outage != nil {
			r.outage.probing = true
		}
		r.running[t] = true
		go r.run(t)
	}
	if r.outage != nil && !r.outage.probing && r.s.held == 0 {
		r.back() // nothing is left to look with
	}
	return r.s.due()
}

// run handles t in a goroutine of its own, which the handler may end.
func (r *run) run(t *task) {
	o := outcome{t: t}
	returned := false
	defer func() {
		if !returned {
			o = r.c.failed(r.work, t, &failure{r.c.box.subscriber, t.m.ID, stageHandle, errExited, false, false})
		}
		r.results <- o // has room for every task that runs
	}()
	o = r.c.process(r.work, t)
	returned = true
}

// settle takes note of what came of a task.
func (r *run) settle(o outcome) {
	t := o.t
	if !r.running[t] {
		return // it was abandoned
	}
	delete(r.running, t)
	if o.kind == away {
		r.away(o.err)
	} else {
		r.back()
	}
	switch {
	case o.kind == settled:
		delete(r.attempts, t.m.ID)
		if r.stopping {
			r.giveBack(r.s.takeLane(t)[1:])
			return
		}
		r.s.done(t)
		return
	case r.stopping || o.kind == giveBack:
		r.giveBack(r.s.takeLane(t))
		return
	}
	r.remember(t)
	r.s.again(t, time.Now().Add(o.wait))
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
		r.outage = &outage{pause: newBackoff(r.c.box.cfg.RetryDelay, r.c.box.cfg.MaxRetryDelay)}
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

// stop begins the end: it gives back what is not running.
func (r *run) stop() (drain <-chan time.Time) {
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

// abandon gives back what is still being handled. Its handlers cannot commit any
// more.
func (r *run) abandon() {
	for t := range r.running {
		delete(r.running, t)
		r.giveBack(r.s.takeLane(t))
	}
}

// giveBack returns tasks to the broker, in their order.
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
		select {
		case r.given <- struct{}{}:
		case <-r.gone:
		}
	}()
}
