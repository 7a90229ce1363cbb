package brokertest

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"sync"
	"time"

	"github.com/postroom/postroom"
	"github.com/postroom/postroom/broker"
)

// soon is how long a call may take that has nothing to wait for.
const soon = 2 * time.Second

func oneResult(ctx context.Context, e *env) error {
	topic, p, err := e.topicAndPublisher(ctx)
	if err != nil {
		return err
	}
	for _, none := range [][]postroom.Message{nil, {}} {
		if r := p.Publish(ctx, none); len(r) != 0 {
			return fmt.Errorf("%d results for no message", len(r))
		}
	}
	for _, n := range []int{1, 2, 1000} {
		if err := store(ctx, p, messages(topic, "", n)...); err != nil {
			return err
		}
	}
	return nil
}

// alone publishes msgs, of which those with index in bad must have the given
// outcome and the others be stored, and checks that the others arrive.
func alone(ctx context.Context, e *env, p broker.Publisher, topic string, msgs []postroom.Message, want broker.Outcome, bad ...int) ([]broker.Result, error) {
	results := p.Publish(ctx, msgs)
	if len(results) != len(msgs) {
		return nil, fmt.Errorf("%d results for %d messages", len(results), len(msgs))
	}
	var good []string
	for i, r := range results {
		w := broker.Stored
		if slices.Contains(bad, i) {
			w = want
		} else {
			good = append(good, msgs[i].ID)
		}
		if r.Outcome != w {
			return nil, fmt.Errorf("message %d is %v (%v), want %v", i, r.Outcome, r.Err, w)
		}
		if (r.Outcome == broker.Refused || r.Outcome == broker.Unreachable) != (r.Err != nil) {
			return nil, fmt.Errorf("message %d is %v with the error %v", i, r.Outcome, r.Err)
		}
	}
	m, err := e.subscribe(ctx, topic, "group", len(msgs))
	if err != nil {
		return nil, err
	}
	got, err := m.all(ctx, len(good))
	if err != nil {
		return nil, err
	}
	if err := sameSet(ids(got), good); err != nil {
		return nil, err
	}
	return results, m.quiet(ctx)
}

// sameSet compares two lists of ids without regard to order.
func sameSet(got, want []string) error {
	g, w := slices.Sorted(slices.Values(got)), slices.Sorted(slices.Values(want))
	if !slices.Equal(g, w) {
		return fmt.Errorf("%d messages arrived, %d of them different, want %d", len(got), len(slices.Compact(g)), len(want))
	}
	return nil
}

func oversizeIsRefused(ctx context.Context, e *env) error {
	topic, p, err := e.topicAndPublisher(ctx)
	if err != nil {
		return err
	}
	msgs := slices.Concat(messages(topic, "", 3), messages(topic, "a", 3), messages(topic, "b", 3))
	msgs[1].Payload = make([]byte, e.h.TooLarge)
	_, err = alone(ctx, e, p, topic, msgs, broker.Refused, 1)
	return err
}

func invalidTopicIsRefused(ctx context.Context, e *env) error {
	topic, p, err := e.topicAndPublisher(ctx)
	if err != nil {
		return err
	}
	msgs := messages(topic, "a", 7)
	for i, bad := range []string{e.h.InvalidTopic, "", "white space"} {
		msgs[2*i+1].Topic = bad
	}
	_, err = alone(ctx, e, p, topic, msgs, broker.Refused, 1, 3, 5)
	return err
}

func unknownTopic(ctx context.Context, e *env) error {
	topic, p, err := e.topicAndPublisher(ctx)
	if err != nil {
		return err
	}
	unknown := e.unique("unknown")
	msgs := messages(topic, "", 5)
	msgs[1].Topic, msgs[3].Topic = unknown, unknown
	results, err := alone(ctx, e, p, topic, msgs, broker.Unreachable, 1, 3)
	if err != nil {
		return err
	}
	for _, i := range []int{1, 3} {
		if s := results[i].Scope; s != unknown && s != unknown+"/0" {
			return fmt.Errorf("scope of message %d is %q, want the topic", i, s)
		}
	}
	if made, err := e.h.TopicExists(ctx, unknown); err != nil || made {
		return fmt.Errorf("the topic exists: %v (%v)", made, err)
	}
	return nil
}

func sameIDOnTwoTopics(ctx context.Context, e *env) error {
	topic, p, err := e.topicAndPublisher(ctx)
	if err != nil {
		return err
	}
	other, err := e.topic(ctx)
	if err != nil {
		return err
	}
	msgs := messages(topic, "key", 2)
	msgs[1].ID, msgs[1].Topic = msgs[0].ID, other
	if err := store(ctx, p, msgs...); err != nil {
		return err
	}
	for _, topic := range []string{topic, other} {
		m, err := e.subscribe(ctx, topic, "group", 1)
		if err != nil {
			return err
		}
		if _, err := m.nextID(ctx, msgs[0].ID); err != nil {
			return fmt.Errorf("on topic %s: %w", topic, err)
		}
	}
	return nil
}

// interleaved returns per messages for each of n keys and for no key, in turns.
func interleaved(topic string, n, per int) []postroom.Message {
	var msgs []postroom.Message
	for range per {
		msgs = append(msgs, messages(topic, "", 1)...)
		for k := range n {
			msgs = append(msgs, messages(topic, "key-"+strconv.Itoa(k), 1)...)
		}
	}
	return msgs
}

// byKey returns the ids of each key's messages in their order; those without a
// key are left out.
func byKey(msgs []postroom.Message) map[string][]string {
	all := map[string][]string{}
	for _, m := range msgs {
		if m.HasKey() {
			all[m.Key] = append(all[m.Key], m.ID)
		}
	}
	return all
}

// firstArrivals drops repeats.
func firstArrivals(msgs []postroom.Message) []postroom.Message {
	seen := map[string]bool{}
	return slices.DeleteFunc(slices.Clone(msgs), func(m postroom.Message) bool {
		again := seen[m.ID]
		seen[m.ID] = true
		return again
	})
}

func compareOrder(got, want []postroom.Message) error {
	g, w := byKey(got), byKey(want)
	for key, ids := range w {
		if !slices.Equal(g[key], ids) {
			return fmt.Errorf("key %q arrived in the order %q, want %q", key, g[key], ids)
		}
	}
	return nil
}

func keyOrder(ctx context.Context, e *env) error {
	topic, p, err := e.topicAndPublisher(ctx)
	if err != nil {
		return err
	}
	msgs := slices.Concat(interleaved(topic, 25, 40), messages(topic, "hot", 200), interleaved(topic, 3, 20))
	m, err := e.subscribe(ctx, topic, "group", 64)
	if err != nil {
		return err
	}
	published := make(chan error, 1)
	go func() {
		for call := range slices.Chunk(msgs, 300) {
			if err := store(ctx, p, call...); err != nil {
				published <- err
				return
			}
		}
		published <- nil
	}()
	got, err := m.all(ctx, len(msgs))
	if err = errors.Join(<-published, err); err != nil {
		return err
	}
	if err := sameSet(ids(got), ids(msgs)); err != nil {
		return err
	}
	return compareOrder(got, msgs)
}

func failureStopsItsKey(ctx context.Context, e *env) error {
	topic, p, err := e.topicAndPublisher(ctx)
	if err != nil {
		return err
	}
	msgs := interleaved(topic, 10, 30)
	failing := 4 + 11*12 // the thirteenth of key-3
	if err := e.h.FailOnce(topic, msgs[failing].ID); err != nil {
		return wrap("arm the fault", err)
	}
	var again []postroom.Message
	failed := false
	for i, r := range p.Publish(ctx, msgs) {
		want := broker.Stored
		switch {
		case i == failing:
			want, failed = broker.Unreachable, true
		case failed && msgs[i].Key == msgs[failing].Key:
			want = broker.NotTried
		}
		if r.Outcome != want {
			return fmt.Errorf("message %d of key %q is %v (%v), want %v: message %d of key %q had failed",
				i, msgs[i].Key, r.Outcome, r.Err, want, failing, msgs[failing].Key)
		}
		if want != broker.Stored {
			again = append(again, msgs[i])
		}
	}
	if err := store(ctx, p, again...); err != nil {
		return wrap("publish the rest", err)
	}
	m, err := e.subscribe(ctx, topic, "group", len(msgs))
	if err != nil {
		return err
	}
	// The message that failed may have been stored, and so come twice.
	var got []postroom.Message
	for len(firstArrivals(got)) < len(msgs) {
		one, err := m.all(ctx, 1)
		if err != nil {
			return fmt.Errorf("after %d messages of %d: %w", len(got), len(msgs), err)
		}
		got = append(got, one...)
	}
	return compareOrder(firstArrivals(got), msgs)
}

func cancelledPublish(ctx context.Context, e *env) error {
	topic, p, err := e.topicAndPublisher(ctx)
	if err != nil {
		return err
	}
	cancelled, cancel := context.WithCancel(ctx)
	cancel()
	begun := time.Now()
	msgs := messages(topic, "key", 3)
	for i, r := range p.Publish(cancelled, msgs) {
		if r.Outcome != broker.Unreachable && r.Outcome != broker.NotTried {
			return fmt.Errorf("message %d of a call whose context had ended is %v (%v)", i, r.Outcome, r.Err)
		}
	}
	if took := time.Since(begun); took > soon {
		return fmt.Errorf("Publish took %v though its context had ended", took)
	}
	// Now in the middle of a long call.
	msgs = slices.Concat(messages(topic, "hot", 3000), interleaved(topic, 3, 500))
	under, cancel := context.WithTimeout(ctx, 10*time.Millisecond)
	defer cancel()
	begun = time.Now()
	results := p.Publish(under, msgs)
	if took := time.Since(begun); took > soon {
		return fmt.Errorf("Publish took %v though its context ended after 10ms", took)
	}
	if len(results) != len(msgs) {
		return fmt.Errorf("%d results for %d messages", len(results), len(msgs))
	}
	stored := map[string]bool{}
	failed := map[string]bool{} // key → a message of it failed
	for i, r := range results {
		if r.Outcome == broker.Refused {
			return fmt.Errorf("message %d is refused (%v): its context ended, and nothing is wrong with it", i, r.Err)
		}
		if r.Outcome != broker.Stored {
			failed[msgs[i].Key] = true
			continue
		}
		if failed[msgs[i].Key] && msgs[i].HasKey() {
			return fmt.Errorf("message %d of key %q is stored after an earlier one was not", i, msgs[i].Key)
		}
		stored[msgs[i].ID] = true
	}
	m, err := e.subscribe(ctx, topic, "group", 100)
	if err != nil {
		return err
	}
	for len(stored) > 0 {
		got, err := m.all(ctx, 1)
		if err != nil {
			return fmt.Errorf("%d messages are said to be stored and did not come: %w", len(stored), err)
		}
		delete(stored, got[0].ID)
	}
	return nil
}

func concurrentPublishers(ctx context.Context, e *env) error {
	topic, p, err := e.topicAndPublisher(ctx)
	if err != nil {
		return err
	}
	const callers, calls, size = 8, 5, 50
	var (
		wg   sync.WaitGroup
		all  [callers][]postroom.Message
		errs [callers]error
	)
	for i := range callers {
		all[i] = slices.Concat(messages(topic, "key-"+strconv.Itoa(i), calls*size), messages(topic, "", calls*size))
		wg.Go(func() {
			for call := range slices.Chunk(all[i], size) {
				if errs[i] = store(ctx, p, call...); errs[i] != nil {
					return
				}
			}
		})
	}
	wg.Wait()
	if err := errors.Join(errs[:]...); err != nil {
		return err
	}
	want := slices.Concat(all[:]...)
	m, err := e.subscribe(ctx, topic, "group", 100)
	if err != nil {
		return err
	}
	got, err := m.all(ctx, len(want))
	if err != nil {
		return err
	}
	if err := sameSet(ids(got), ids(want)); err != nil {
		return err
	}
	return compareOrder(got, want)
}

func publishAfterClose(ctx context.Context, e *env) error {
	topic, p, err := e.topicAndPublisher(ctx)
	if err != nil {
		return err
	}
	if err := store(ctx, p, messages(topic, "", 1)...); err != nil {
		return err
	}
	for i := range 2 {
		if err := p.Close(); err != nil {
			return fmt.Errorf("Close number %d: %w", i+1, err)
		}
	}
	results := p.Publish(ctx, messages(topic, "", 2))
	if len(results) != 2 {
		return fmt.Errorf("%d results for 2 messages", len(results))
	}
	for i, r := range results {
		if r.Outcome != broker.Unreachable || !errors.Is(r.Err, broker.ErrClosed) {
			return fmt.Errorf("message %d after Close is %v (%v), want unreachable with ErrClosed", i, r.Outcome, r.Err)
		}
	}
	return nil
}

func closeEndsPublish(ctx context.Context, e *env) error {
	topic, p, err := e.topicAndPublisher(ctx)
	if err != nil {
		return err
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		for p.Publish(ctx, messages(topic, "hot", 500))[499].Outcome == broker.Stored {
		}
	}()
	if err := store(ctx, p, messages(topic, "other", 1)...); err != nil {
		return err
	}
	if err := p.Close(); err != nil {
		return wrap("close", err)
	}
	select {
	case <-done:
		return nil
	case <-time.After(soon):
		return errors.New("Publish still runs after Close has returned")
	}
}
