package dispatcher

import (
	"context"
	"errors"
	"maps"
	"slices"
	"time"
)

// leaveTime bounds the statements that give everything up after work has ended.
const leaveTime = 5 * time.Second

// A keeper is the upkeep of a dispatcher's leases, in one goroutine.
type keeper struct {
	d         *Dispatcher
	every     time.Duration // between two looks around
	present   bool          // the others count on this dispatcher
	joined    time.Time     // when it last said so
	told      []string      // what it then said is wrong
	tried     time.Time     // when it last tried to say something
	renewed   time.Time     // when the lanes' leases were last extended
	unclaimed int           // looks in a row that have seen free lanes
	swept     time.Time     // when drained lanes were last looked through
	stopping  bool          // the last turn has seen that Run is to return
}

// keep takes this dispatcher's share of the lanes and renews their leases, and
// goes on renewing after ctx ends until the last of them has settled. Each
// lane is released as soon as it has.
func (d *Dispatcher) keep(ctx, work context.Context) {
	k := &keeper{d: d, every: d.beat()}
	for ctx.Err() == nil || !d.allEnded() && work.Err() == nil {
		err := k.turn(ctx, work)
		switch {
		case work.Err() != nil:
		case err != nil:
			d.trouble.set("lease", err)
		default:
			d.trouble.clear("lease")
		}
		k.wait(ctx, work)
	}
	k.leave(work)
}

// turn is the upkeep of one beat. A statement that hangs is given up before
// leases end of it.
func (k *keeper) turn(ctx, work context.Context) error {
	step, cancel := context.WithTimeout(work, k.d.cfg.Lease/3)
	defer cancel()
	k.stopping = ctx.Err() != nil
	err := errors.Join(k.renew(step), k.release(step), k.attend(step))
	if err != nil || k.stopping {
		return err
	}
	return k.share(ctx, work, step)
}

// wait returns after a beat, when a lane has come to rest or, where the last
// turn has not seen it, when ctx has ended.
func (k *keeper) wait(ctx, work context.Context) {
	done := ctx.Done()
	if k.stopping {
		done = nil
	}
	t := time.NewTimer(k.every)
	defer t.Stop()
	select {
	case <-t.C:
	case <-k.d.nudge:
	case <-done:
	case <-work.Done():
	}
}

// attend says that this dispatcher is there, or no longer. One that is
// stopping keeps away, and so does one whose publisher hangs, lest lanes be
// left to it that it does not publish.
func (k *keeper) attend(step context.Context) error {
	if k.stopping || k.d.hangs() {
		if !k.present {
			return nil
		}
		_, err := k.d.pool.Exec(step, k.d.sql.absent, k.d.owner)
		k.present = err != nil
		return err
	}
	troubles := k.d.trouble.texts()
	news := !slices.Equal(troubles, k.told) && time.Since(k.tried) >= k.d.cfg.Lease/10
	if k.present && time.Since(k.joined) < k.d.cfg.Lease/3 && !news {
		return nil
	}
	k.tried = time.Now()
	_, err := k.d.pool.Exec(step, k.d.sql.join, k.d.owner, k.d.cfg.Lease, troubles)
	if err == nil {
		k.present, k.joined, k.told = true, time.Now(), troubles
	}
	return err
}

// renew extends the leases of the lanes when a third of them has passed. What
// is no longer ours ends at once.
func (k *keeper) renew(step context.Context) error {
	ask := slices.DeleteFunc(k.d.held(), func(l *lane) bool { return l.stuck.Load() })
	if len(ask) == 0 || time.Since(k.renewed) < k.d.cfg.Lease/3 {
		return nil
	}
	began := time.Now()
	held, until, err := k.d.renew(step, ask)
	if err != nil {
		return err
	}
	k.renewed = began
	for _, l := range ask {
		if held[holding{l.number, l.fence}] {
			l.lease.Store(int64(until.Sub(k.d.began)))
		} else {
			l.lease.Store(0)
			l.rouse(false)
		}
	}
	return nil
}

// release gives back the lanes that have come to rest, and forgets those that
// were lost.
func (k *keeper) release(step context.Context) error {
	held, lost := k.d.settled()
	for _, l := range lost {
		k.d.cfg.Logger.LogAttrs(step, levelWarn,
			"lane lost: its lease ended while it was being published, what was in flight may be repeated", l.attr())
	}
	if len(held) == 0 {
		return nil
	}
	if err := k.d.release(step, held); err != nil {
		return err
	}
	k.d.mu.Lock()
	defer k.d.mu.Unlock()
	for _, l := range held {
		delete(k.d.lanes, l.number)
	}
	return nil
}

// leave gives up what is left, but for lanes that are still being published
// at the end of the drain timeout: their leases end by themselves.
func (k *keeper) leave(work context.Context) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(work), leaveTime)
	defer cancel()
	if _, err := k.d.pool.Exec(ctx, k.d.sql.leave, k.d.owner, k.d.running()); err != nil {
		k.d.trouble.set("release", err)
	}
}

// settled returns the lanes that have come to rest and are still held, and
// removes those that were lost, and those that are drained.
func (d *Dispatcher) settled() (held, lost []*lane) {
	d.mu.Lock()
	defer d.mu.Unlock()
	for _, n := range slices.Sorted(maps.Keys(d.lanes)) {
		l := d.lanes[n]
		switch {
		case !l.hasEnded():
		case l.drained:
			delete(d.lanes, n)
		case l.held() && !l.stuck.Load():
			held = append(held, l)
		default:
			lost = append(lost, l)
			d.lost++
			delete(d.lanes, n)
		}
	}
	return held, lost
}

// staying returns the lanes that are held and are not being given up.
func (d *Dispatcher) staying() []*lane {
	return slices.DeleteFunc(d.held(), func(l *lane) bool { return l.hasEnded() || l.stuck.Load() || l.gives.Load() })
}

// hangs reports whether a call of the publisher has not returned in time.
func (d *Dispatcher) hangs() bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	for _, l := range d.lanes {
		if l.stuck.Load() && !l.hasEnded() {
			return true
		}
	}
	return false
}
