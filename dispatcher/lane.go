package dispatcher

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"github.com/cenkalti/backoff/v4"
)

const (
	// appendEvery bounds how often progress within a difference is recorded,
	// and settleAfter how long its end may go unrecorded.
	appendEvery = 100 * time.Millisecond
	settleAfter = 500 * time.Millisecond

	// thinEvery is the pause between two thinnings of a lane's cursors.
	thinEvery = 10 * time.Second

	// forgetEvery is the pause between two looks for cursors that are too old.
	forgetEvery = time.Hour

	// smallDifference is the size below which a lane lets the next poll, a
	// moment later, collect what comes, instead of asking again at once.
	smallDifference = 100
)

// errStopped ends a lane's work when Run is to return.
var errStopped = errors.New("stopped")

// A lane is one stream of the outbox under this dispatcher's ownership. One
// goroutine runs it; what others may touch is atomic.
type lane struct {
	d      *Dispatcher
	number int32
	fence  int64

	lease atomic.Int64              // until when it is held, in nanoseconds of d.clock
	stuck atomic.Bool               // a publish did not end: let the lease lapse
	idle  atomic.Pointer[pollState] // what the poller asks for; nil: the lane is busy
	wake  chan bool                 // true: append a row even if nothing has come
	stop  context.CancelFunc        // ends run as Run's context does
	gives atomic.Bool               // the lane is being given to another dispatcher
	ends  atomic.Bool               // its generation ends: it is to be drained
	ended chan struct{}             // closed when run has returned

	drained bool // for good; read after ended

	home   int64 // this database
	origin int64 // the one whose messages are being published
	cur    cursor
	began  int64 // number of the row that opened cur's difference, or a later one of it

	published  bool  // all of cur's difference is settled, though its row may not say so
	done       int64 // settled up to this id within the difference
	parked     bool  // the lane may have parked messages
	parking    *parking
	fit        int // messages that are expected to fit into a page's bytes
	lastAppend time.Time

	starts  int  // owners in a row that may have died of a message: see poison.go
	careful bool // progress is recorded after every page
	alone   bool // the next call is of a suspect and has d.publishing for itself

	thinnedTo  int64
	lastThin   time.Time
	lastForget time.Time

	askedParked time.Time // when it was last asked whether it has parked messages
}

// pollState is what a poll needs to know of an idle lane.
type pollState struct {
	number int64
	until  string
	since  time.Time
}

// held reports whether the lane's lease has not ended.
func (l *lane) held() bool { return l.left() > 0 }

func (l *lane) left() time.Duration {
	return time.Duration(l.lease.Load()) - l.d.clock()
}

// run publishes the lane's messages until ctx ends or the lane is lost. work
// outlives ctx and carries what has begun.
func (l *lane) run(ctx, work context.Context) {
	var leaving sync.WaitGroup
	leaving.Go(func() { l.parking.run(ctx, work) })
	defer func() {
		l.idle.Store(nil)
		l.stop()
		leaving.Wait()
		l.d.trouble.clear(l.name())
		l.d.trouble.clear(l.broker())
		close(l.ended)
		l.d.see()
	}()
	retry := newBackoff(10*time.Millisecond, 5*time.Second)
	started, force := false, false
	for ctx.Err() == nil && l.held() {
		var err error
		if !started {
			err = l.start(ctx, work)
			started = err == nil
		}
		if started {
			err = l.publishAll(ctx, work, force || l.ends.Load())
		}
		if err == nil && l.ends.Load() {
			err = l.drain(work)
		}
		switch {
		case l.drained:
			return
		case err == nil:
			l.d.trouble.clear(l.name())
			retry.Reset()
			force = l.rest(ctx, work)
		case errors.Is(err, errStopped), errors.Is(err, errLostLane):
			// The loop's condition, or the next start, sees it.
			if errors.Is(err, errLostLane) {
				l.lease.Store(0)
			}
		case errors.Is(err, errReload):
			started = false
			l.d.cfg.Logger.LogAttrs(ctx, levelWarn, "cursor differs from memory, reading it again", l.attr(), errorAttr(err))
			wait(ctx, retry.NextBackOff())
		default:
			started = false
			l.d.trouble.set(l.name(), err)
			wait(ctx, retry.NextBackOff())
		}
	}
	if started && l.held() && ctx.Err() != nil {
		l.settle(work)
	}
}

// give has the lane settle what is in flight and come to rest, to be released.
func (l *lane) give() {
	l.gives.Store(true)
	l.stop()
}

// start learns what parked messages wait for and settles what other databases
// left in the lane, then loads the cursor of this one.
func (l *lane) start(ctx, work context.Context) error {
	if err := l.parking.load(work); err != nil {
		return err
	}
	others, err := l.otherOrigins(work)
	if err != nil {
		return err
	}
	for _, o := range others {
		if err := l.closeOther(ctx, work, o); err != nil {
			return err
		}
	}
	l.origin = 0
	if err := l.d.pool.QueryRow(work, l.d.sql.home).Scan(&l.origin); err != nil {
		return err
	}
	if err := l.load(work); err != nil {
		return err
	}
	if l.published { // nobody can have died of what was not being published
		return l.clear(work, 0)
	}
	return nil
}

// closeOther publishes what another database wrote and had not settled when
// it was dumped: a set that does not grow.
func (l *lane) closeOther(ctx, work context.Context, origin int64) error {
	l.origin = origin
	if err := l.load(work); err != nil {
		return err
	}
	for {
		if !l.published {
			if err := l.publishPages(ctx, work); err != nil {
				return err
			}
		}
		if l.cur.until == closedSnapshot {
			return l.advance(work, settledID)
		}
		if err := l.beginClosed(work); err != nil {
			return err
		}
	}
}

// publishAll publishes one difference after another until little or nothing is
// left.
func (l *lane) publishAll(ctx, work context.Context, force bool) error {
	for {
		if !l.published { // left from before a restart, or after an error
			if err := l.publishPages(ctx, work); err != nil {
				return err
			}
		}
		if ctx.Err() != nil {
			return errStopped
		}
		if !l.held() {
			return errLostLane
		}
		l.thin(work)
		msgs, more, err := l.begin(work, force)
		if err != nil {
			return err
		}
		force = false
		if more {
			continue // page by page
		}
		if len(msgs) > 0 {
			if err := l.publishPage(ctx, work, msgs); err != nil {
				return err
			}
			l.published = true
		}
		if len(msgs) < smallDifference {
			l.careful = false
			return nil
		}
	}
}

// publishPages publishes the rest of the lane's difference, reading one page
// ahead.
func (l *lane) publishPages(ctx, work context.Context) error {
	if l.starts >= narrowFrom {
		if err := l.publishSingly(ctx, work); err != nil || l.published {
			return err
		}
	}
	l.done = l.cur.lastID
	r, err := l.newReader(work)
	if err != nil {
		return err
	}
	type page struct {
		msgs []entry
		err  error
	}
	pages := make(chan page)
	reading, stop := context.WithCancel(work)
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		defer close(pages)
		for {
			msgs, err := r.page(reading)
			select {
			case pages <- page{msgs, err}:
			case <-reading.Done():
				return
			}
			if err != nil || len(msgs) == 0 {
				return
			}
		}
	}()
	defer func() { stop(); <-ended }()
	for {
		p, ok := <-pages
		switch {
		case !ok:
			return context.Cause(work)
		case p.err != nil:
			return p.err
		case len(p.msgs) == 0:
			l.published = true
			return l.clear(work, 0) // as in start
		}
		if err := l.publishPage(ctx, work, p.msgs); err != nil {
			return err
		}
		l.done = p.msgs[len(p.msgs)-1].id
		if l.careful || time.Since(l.lastAppend) >= appendEvery {
			if err := l.advance(work, l.done); err != nil {
				return err
			}
			l.lastAppend = time.Now()
		}
	}
}

// rest waits until a poll has found something. It records, when nothing
// follows for a while, that the last difference is settled.
func (l *lane) rest(ctx, work context.Context) (force bool) {
	state := func() { l.idle.Store(&pollState{l.cur.number, l.cur.until, time.Now()}) }
	state()
	defer l.idle.Store(nil)
	tick := time.NewTicker(settleAfter)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return false
		case force = <-l.wake:
			return force
		case <-tick.C:
			if !l.held() {
				return false
			}
			if l.cur.settled() {
				continue
			}
			if !l.settle(work) {
				return false // the next round finds out why
			}
			state()
		}
	}
}

// settle records how far the difference is settled, as far as it can.
func (l *lane) settle(work context.Context) bool {
	to := max(l.done, l.cur.lastID)
	if l.published {
		to = settledID
	}
	err := l.advance(work, to)
	if err != nil && !errors.Is(err, errReload) {
		l.d.trouble.set(l.name(), err)
	}
	return err == nil
}

// thin removes cursors that neither the present nor the history needs.
func (l *lane) thin(work context.Context) {
	if time.Since(l.lastThin) < thinEvery || l.began <= l.thinnedTo {
		return
	}
	l.lastThin = time.Now()
	if time.Since(l.lastForget) >= forgetEvery {
		l.lastForget, l.thinnedTo = time.Now(), 0 // from the oldest on
	}
	_, err := l.d.pool.Exec(work, l.d.sql.thin, l.number, l.origin, max(l.thinnedTo-1, 0), l.began,
		l.d.cfg.keepCursors())
	if err != nil {
		l.d.trouble.set(l.name(), fmt.Errorf("thin cursors: %w", err))
		return
	}
	l.thinnedTo = l.began
}

func (l *lane) name() string { return fmt.Sprintf("lane %d", l.number) }

// newBackoff returns full-jitter exponential backoff without an end.
func newBackoff(first, most time.Duration) *backoff.ExponentialBackOff {
	return backoff.NewExponentialBackOff(
		backoff.WithInitialInterval(first),
		backoff.WithRandomizationFactor(0.5),
		backoff.WithMultiplier(2),
		backoff.WithMaxInterval(most),
		backoff.WithMaxElapsedTime(0),
	)
}

// wait returns after d, or when ctx ends.
func wait(ctx context.Context, d time.Duration) {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
	case <-ctx.Done():
	}
}
