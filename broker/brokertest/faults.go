package brokertest

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"slices"
	"strings"

	"github.com/postroom/postroom"
	"github.com/postroom/postroom/broker"
)

func outage(ctx context.Context, e *env) (err error) {
	topic, p, err := e.topicAndPublisher(ctx)
	if err != nil {
		return err
	}
	m, err := e.subscribe(ctx, topic, "group", 10)
	if err != nil {
		return err
	}
	before := messages(topic, "key", 5)
	if err := store(ctx, p, before...); err != nil {
		return err
	}
	got, err := m.all(ctx, len(before))
	if err != nil {
		return err
	}
	restore, err := e.h.Outage(ctx)
	if err != nil {
		return wrap("begin the outage", err)
	}
	restored := false
	defer func() {
		if !restored {
			err = errors.Join(err, restore())
		}
	}()
	during := messages(topic, "key", 5)
	for i, r := range p.Publish(ctx, during) {
		want := broker.Unreachable
		if i > 0 {
			want = broker.NotTried
		}
		if r.Outcome != want {
			return fmt.Errorf("message %d published in an outage is %v (%v), want %v", i, r.Outcome, r.Err, want)
		}
	}
	restored = true
	if err := restore(); err != nil {
		return wrap("end the outage", err)
	}
	// The same publisher and the same subscription.
	err = e.until(ctx, "the publisher works again", func() bool {
		var left []postroom.Message
		for i, r := range p.Publish(ctx, during) {
			if r.Outcome != broker.Stored {
				left = append(left, during[i])
			}
		}
		during = left
		return len(during) == 0
	})
	if err != nil {
		return err
	}
	for len(firstArrivals(got)) < 10 {
		one, err := m.all(ctx, 1)
		if err != nil {
			return fmt.Errorf("after the outage: %w", err)
		}
		got = append(got, one...)
	}
	if w := m.trouble.Load(); w != nil && *w != nil {
		return fmt.Errorf("Trouble was told %w and not nil although messages come again", *w)
	}
	return compareOrder(firstArrivals(got)[:5], before)
}

func noGoroutineLeft(ctx context.Context, e *env) error {
	var before []string
	for i := range 4 {
		if i == 1 { // the first round lets the harness start what it keeps
			before = e.goroutines()
		}
		inner := &env{h: e.h}
		err := func() error {
			_, m, ds, err := inner.delivered(ctx, 3)
			if err != nil {
				return err
			}
			for _, d := range ds[:2] {
				if err := d.Ack(ctx); err != nil {
					return wrap("ack", err)
				}
			}
			m.kill() // with one unsettled
			return nil
		}()
		if err = errors.Join(err, inner.cleanUp()); err != nil {
			return err
		}
	}
	err := e.until(ctx, "goroutines ended", func() bool { return len(e.goroutines()) <= len(before) })
	if err != nil {
		after := e.goroutines()
		return fmt.Errorf("%d goroutines were running before and %d are after: %w\n%s",
			len(before), len(after), err, strings.Join(after, "\n\n"))
	}
	return nil
}

// goroutines returns the stacks of all goroutines but the broker's own.
func (e *env) goroutines() (stacks []string) {
	buf := make([]byte, 4<<20)
	buf = buf[:runtime.Stack(buf, true)]
	for stack := range strings.SplitSeq(string(buf), "\n\n") {
		if !slices.ContainsFunc(e.h.ServerPackages, func(p string) bool { return strings.Contains(stack, p) }) {
			stacks = append(stacks, stack)
		}
	}
	return stacks
}
