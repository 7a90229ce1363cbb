package franz

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/postroom/postroom"
	"github.com/postroom/postroom/broker"
)

// Publish implements [broker.Publisher]. See the package's comment for what a
// failed batch means for its messages.
func (b *Bus) Publish(ctx context.Context, msgs []postroom.Message) []broker.Result {
	c := &call{
		b: b, msgs: msgs, results: make([]broker.Result, len(msgs)),
		failed: make(map[topicKey]int), width: make(map[string]int), anew: make(map[string]bool),
	}
	if len(msgs) == 0 {
		return c.results
	}
	ctx, done, ok := b.begin(ctx)
	if !ok {
		c.failAll(fmt.Errorf("franz: publish: %w", broker.ErrClosed))
		return c.results
	}
	defer done()
	ctx, cancel := context.WithTimeoutCause(ctx, b.cfg.PublishTimeout, fmt.Errorf("franz: no answer within %v", b.cfg.PublishTimeout))
	defer cancel()
	c.run(ctx)
	return c.results
}

type topicKey struct{ topic, key string }

// A call is one Publish call.
type call struct {
	b       *Bus
	msgs    []postroom.Message
	results []broker.Result
	failed  map[topicKey]int // index of the first message that failed

	width map[string]int  // most messages of a topic that the next round sends
	anew  map[string]bool // topics whose id was looked up anew
}

func (c *call) run(ctx context.Context) {
	todo := make([]int, 0, len(c.msgs))
	for i := range c.msgs {
		if !validTopic(c.msgs[i].Topic) {
			c.fail(i, broker.Refused, "", fmt.Errorf("franz: message %d: the topic's name is not valid: %w", i, kerr.InvalidTopicException))
			continue
		}
		todo = append(todo, i)
	}
	// Each round settles messages, halves what it sends of a topic, or looks up a
	// topic's id, once; so this ends.
	for len(todo) > 0 {
		if ctx.Err() != nil {
			c.failAll(context.Cause(ctx))
			return
		}
		todo = c.round(ctx, todo)
	}
}

// A round is what a call buffers, and then sends, at a time.
type round struct {
	c       *call
	s       *sender
	batch   []int // the messages
	records []kgo.Record
	errs    []error        // of the records, when their promises are kept
	left    sync.WaitGroup // records whose promises are not
}

// round sends what it can of the messages, and returns those that another round
// should send.
func (c *call) round(ctx context.Context, todo []int) (again []int) {
	s, err := c.b.take()
	if err != nil {
		c.failAll(fmt.Errorf("franz: publish: %w", err))
		return nil
	}
	clean := false
	defer func() {
		if clean {
			c.b.give(s)
		} else {
			s.close()
		}
	}()
	limits, err := c.prepare(ctx, s, c.topics(todo))
	if err != nil {
		c.failAll(fmt.Errorf("franz: ask for the cluster's layout: %w", err))
		return nil
	}
	if !s.use(limits) {
		return todo
	}
	r := &round{c: c, s: s}
	r.batch, again = c.choose(todo)
	if len(r.batch) == 0 {
		clean = true
		return again
	}
	sent := r.buffer(ctx)
	decided := sent && r.flush(ctx)
	if !decided {
		s.close() // which decides the rest
	}
	r.left.Wait()
	clean = decided && !slices.ContainsFunc(r.errs, func(err error) bool { return err != nil })
	again = append(again, r.settle(ctx, sent)...)
	slices.Sort(again)
	return again
}

func (c *call) topics(todo []int) (topics []string) {
	for _, i := range todo {
		topics = append(topics, c.msgs[i].Topic)
	}
	slices.Sort(topics)
	return slices.Compact(topics)
}

// prepare finds out which topics there are, settles the messages of others, and
// returns the limits.
func (c *call) prepare(ctx context.Context, s *sender, topics []string) (map[string]int32, error) {
	wrong, err := s.learn(ctx, topics)
	if err != nil {
		if ctx.Err() != nil {
			err = cause(ctx, s.lastFailure())
		}
		return nil, err
	}
	for i := range c.msgs {
		if topic := c.msgs[i].Topic; wrong[topic] != nil && c.results[i].Outcome == broker.NotTried {
			c.fail(i, broker.Unreachable, topic, fmt.Errorf("franz: topic %q: %w", topic, wrong[topic]))
		}
	}
	known := slices.DeleteFunc(topics, func(topic string) bool { return wrong[topic] != nil })
	limits := c.b.limits.get(ctx, c.b, known)
	return limits, context.Cause(ctx) // after which the limits are not the true ones
}

// choose returns the messages that this round sends, and those that wait.
func (c *call) choose(todo []int) (batch, rest []int) {
	count := make(map[string]int)
	for _, i := range todo {
		topic := c.msgs[i].Topic
		width, narrow := c.width[topic]
		switch {
		case c.results[i].Outcome != broker.NotTried || c.behindFailed(i):
		case narrow && count[topic] >= width:
			rest = append(rest, i)
		default:
			count[topic]++
			batch = append(batch, i)
		}
	}
	for topic := range count {
		if width, narrow := c.width[topic]; narrow {
			c.width[topic] = 2 * width
		}
	}
	return batch, rest
}

// buffer hands the records to the client, and returns true when all of them have
// their places in partitions. Before that none is sent, so that one that fails
// meanwhile is not followed by others of its key.
func (r *round) buffer(ctx context.Context) bool {
	n := len(r.batch)
	r.records, r.errs = make([]kgo.Record, n), make([]error, n)
	r.left.Add(n)
	r.s.expect(n)
	var failed sync.Once
	early := make(chan struct{})
	uncut := context.WithoutCancel(ctx) // Close ends what is undecided
	for k, i := range r.batch {
		rec := &r.records[k]
		rec.Partition = -1
		fill(rec, &r.c.msgs[i])
		r.s.client.Produce(uncut, rec, func(_ *kgo.Record, err error) {
			if r.errs[k] = err; err != nil {
				failed.Do(func() { close(early) })
			}
			r.left.Done()
		})
	}
	select {
	case <-r.s.ready:
	case <-early:
		return false
	case <-ctx.Done():
		return false
	}
	select {
	case <-early:
		return false
	default:
		return true
	}
}

// flush sends the records and returns true when all are decided.
func (r *round) flush(ctx context.Context) bool {
	decided := make(chan bool, 1)
	go func() { decided <- r.s.client.Flush(ctx) == nil }()
	// The places in a topic that is new to the client are announced a moment
	// before Flush can see them. One that does not wait finds them then.
	ended, cancel := context.WithCancel(ctx)
	cancel()
	for wait := firstPause / 10; ; wait *= 2 {
		select {
		case ok := <-decided:
			return ok
		case <-time.After(wait):
			_ = r.s.client.Flush(ended) // which is its error
		}
	}
}

// settle settles the messages whose fate is known, and returns the others. Unless
// sent is set, none was sent.
func (r *round) settle(ctx context.Context, sent bool) (again []int) {
	c := r.c
	why := ctx.Err() // before it can end in between
	if why != nil {
		why = cause(ctx, r.s.lastFailure())
	}
	type place struct {
		topic     string
		partition int32
	}
	tooLarge := make(map[place][]int)
	stale := make(map[string]bool)
	for k, i := range r.batch {
		rec, err := &r.records[k], r.errs[k]
		switch {
		case err == nil:
			c.results[i] = broker.Result{Outcome: broker.Stored}
		case errors.Is(err, kgo.ErrClientClosed) && why != nil:
			c.fail(i, broker.Unreachable, scope(rec), fmt.Errorf("franz: %s: %w", scope(rec), why))
		case errors.Is(err, kgo.ErrClientClosed) && !sent:
			again = append(again, i) // another record failed before any was sent
		case refusal(err) && !sent:
			c.fail(i, broker.Refused, "", fmt.Errorf("franz: topic %q: the record is larger than max.message.bytes: %w", rec.Topic, err))
		case refusal(err):
			p := place{rec.Topic, rec.Partition}
			tooLarge[p] = append(tooLarge[p], i)
		case errors.Is(err, kerr.UnknownTopicID) && !c.anew[rec.Topic]:
			stale[rec.Topic] = true // it was made anew
			again = append(again, i)
		default:
			c.fail(i, broker.Unreachable, scope(rec), fmt.Errorf("franz: %s: %w", scope(rec), err))
		}
	}
	for topic := range stale {
		c.anew[topic] = true
	}
	for p, indexes := range tooLarge {
		// The limit was lowered, or the broker's is below the topic's.
		c.b.limits.forget(p.topic)
		if len(indexes) > 1 {
			c.width[p.topic] = len(indexes) / 2
			again = append(again, indexes...)
			continue
		}
		c.fail(indexes[0], broker.Refused, "", fmt.Errorf("franz: %s/%d: the broker does not take the message: %w",
			p.topic, p.partition, r.errs[slices.Index(r.batch, indexes[0])]))
	}
	return again
}

// refusal reports whether the broker will never take a batch as it is.
func refusal(err error) bool {
	return errors.Is(err, kerr.MessageTooLarge) || errors.Is(err, kerr.RecordListTooLarge) || errors.Is(err, kerr.InvalidRecord)
}

func scope(r *kgo.Record) string {
	if r.Partition < 0 {
		return r.Topic
	}
	return fmt.Sprintf("%s/%d", r.Topic, r.Partition)
}

// fail settles one message, unless an earlier one of its key failed: it then
// stays not tried. A later one that was settled as failed before becomes that.
func (c *call) fail(i int, o broker.Outcome, scope string, err error) {
	if c.behindFailed(i) {
		return
	}
	if m := &c.msgs[i]; m.HasKey() {
		k := topicKey{m.Topic, m.Key}
		if later, ok := c.failed[k]; ok {
			c.results[later] = broker.Result{}
		}
		c.failed[k] = i
	}
	c.results[i] = broker.Result{Outcome: o, Err: err, Scope: scope}
}

// failAll settles what is not settled.
func (c *call) failAll(err error) {
	for i := range c.msgs {
		if c.results[i].Outcome == broker.NotTried {
			c.fail(i, broker.Unreachable, "", err)
		}
	}
}

// behindFailed reports whether an earlier message of the same topic and key
// failed in this call.
func (c *call) behindFailed(i int) bool {
	m := &c.msgs[i]
	if !m.HasKey() {
		return false
	}
	first, ok := c.failed[topicKey{m.Topic, m.Key}]
	return ok && first < i
}
