package dispatcher

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/postroom/postroom"
	"github.com/postroom/postroom/broker"
)

// topicKey is what has an order.
type topicKey struct{ topic, key string }

// publishPage returns nil when every message of the page is settled: stored by
// the broker, or set aside. While the broker is unreachable, it tries again, with
// backoff, for as long as it takes; ctx ends the wait.
func (l *lane) publishPage(ctx, work context.Context, page []entry) error {
	pending, err := l.setAside(work, page)
	if err != nil {
		return err
	}
	retry := newBackoff(20*time.Millisecond, 5*time.Second)
	watch := awayWatch{l: l}
	for len(pending) > 0 {
		if ctx.Err() != nil {
			return errStopped
		}
		began := l.d.clock()
		results, err := l.call(work, pending)
		if err != nil {
			return err
		}
		before := len(pending)
		s := sortOut(pending, results)
		if s.stored > 0 {
			l.d.lastStored.Store(int64(l.d.clock()))
		}
		away, rest := watch.lasting(s, began)
		if pending, err = l.parkFailed(work, s.refused, away, rest); err != nil {
			return err
		}
		if len(pending) == 0 {
			break
		}
		if i := slices.IndexFunc(page, func(e entry) bool { return e.id == pending[0].id }); i > 0 {
			l.done = page[i-1].id
		}
		l.d.trouble.set(l.broker(), s.trouble())
		if len(pending) < before {
			retry.Reset() // something moves
		}
		wait(ctx, retry.NextBackOff())
	}
	l.d.trouble.clear(l.broker())
	return nil
}

func (l *lane) broker() string { return fmt.Sprintf("broker of lane %d", l.number) }

// failure is a message that was not stored, and why.
type failure struct {
	entry
	outcome broker.Outcome
	scope   string // of what is away, if it is not the whole broker
	err     error
}

// sorted is what a call of the publisher has left, in order.
type sorted struct {
	stored  int
	refused []failure
	rest    []failure // unreachable or not tried
}

// sortOut tells apart what became of the messages that were sent.
func sortOut(sent []entry, results []broker.Result) (s sorted) {
	for i, e := range sent {
		r := results[i]
		f := failure{e, r.Outcome, r.Scope, cmpErr(r.Err, errNoReason)}
		switch r.Outcome {
		case broker.Stored:
			s.stored++
		case broker.Refused:
			s.refused = append(s.refused, f)
		default:
			s.rest = append(s.rest, f)
		}
	}
	return s
}

// trouble returns why the first unreachable message was not taken.
func (s sorted) trouble() error {
	for _, f := range s.rest {
		if f.outcome == broker.Unreachable {
			return fmt.Errorf("topic %q: %w", f.msg.Topic, f.err)
		}
	}
	return errNoReason
}

var errNoReason = errors.New("the publisher gave no reason")

func cmpErr(err, otherwise error) error {
	if err != nil {
		return err
	}
	return otherwise
}

// call publishes once for the lane's run, which looks for messages that kill the
// process, see poison.go.
func (l *lane) call(work context.Context, page []entry) ([]broker.Result, error) {
	leave := l.enter()
	defer leave()
	results, err := l.callWithin(work, page, l.d.cfg.PublishTimeout, func() {
		_ = l.returned(work) // it hangs, and the process lives; at worst this is not known
		leave()
	})
	if err == nil {
		err = l.returned(work)
	}
	return results, err
}

// callWithin publishes once, within the lane's lease. A publisher that does not
// return by its deadline loses the lane: another dispatcher may go on with it,
// this one must not, since messages of the same keys are outstanding. hangs is
// called then.
func (l *lane) callWithin(work context.Context, page []entry, timeout time.Duration, hangs func()) ([]broker.Result, error) {
	timeout = min(timeout, l.left())
	if timeout <= 0 || l.stuck.Load() {
		return nil, errLostLane
	}
	msgs := make([]postroom.Message, len(page))
	for i := range page {
		msgs[i] = page[i].msg
	}
	ctx, cancel := context.WithTimeout(work, timeout)
	defer cancel()
	began := time.Now()
	returned := make(chan []broker.Result, 1)
	go func() { returned <- l.d.pub.Publish(ctx, msgs) }()
	grace := time.NewTimer(timeout + l.d.cfg.PublishTimeout/2)
	defer grace.Stop()
	var results []broker.Result
	select {
	case results = <-returned:
	case <-grace.C:
		l.stuck.Store(true)
		hangs()
		l.d.trouble.set(l.broker(), fmt.Errorf("the publisher has not returned %v after its deadline; the lane is given up", l.d.cfg.PublishTimeout/2))
		select {
		case <-returned:
		case <-work.Done():
		}
		return nil, errLostLane
	}
	if len(results) != len(msgs) {
		l.d.trouble.set(l.broker(), fmt.Errorf("the publisher returned %d results for %d messages", len(results), len(msgs)))
		return make([]broker.Result, len(msgs)), nil // nothing was tried
	}
	l.d.metrics.called(work, msgs, results, time.Since(began))
	return results, nil
}
