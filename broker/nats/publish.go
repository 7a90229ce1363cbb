package nats

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	natsgo "github.com/nats-io/nats.go"

	"github.com/postroom/postroom"
	"github.com/postroom/postroom/broker"
)

// Publish implements [broker.Publisher]. What a call has cut off may reach the
// stream as much as Config.PublishTimeout later.
func (b *Bus) Publish(ctx context.Context, msgs []postroom.Message) []broker.Result {
	c := &call{
		b: b, msgs: msgs, results: make([]broker.Result, len(msgs)), left: len(msgs),
		notify: make(chan struct{}, 1), done: make(chan struct{}), over: make(chan struct{}),
		topics: make(map[string]*target),
	}
	if len(msgs) == 0 {
		return c.results
	}
	if ctx.Err() != nil {
		return c.cut(context.Cause(ctx))
	}
	b.callsMu.RLock()
	if b.isClosed.Load() {
		b.callsMu.RUnlock()
		return c.cut(broker.ErrClosed)
	}
	b.calls.Go(c.run)
	b.callsMu.RUnlock()

	select {
	case <-c.done:
		return c.results
	case <-ctx.Done():
		return c.cut(context.Cause(ctx))
	case <-b.closed:
		return c.cut(broker.ErrClosed)
	}
}

// A call is one running Publish. Its goroutine sends and settles; Publish
// itself only waits, so that it can return while a write hangs.
type call struct {
	b *Bus

	// mu guards what belongs to the caller once the call is over, and what cut
	// needs to know. The goroutine holds it whenever it reads msgs or writes
	// results.
	mu      sync.Mutex
	msgs    []postroom.Message
	results []broker.Result
	left    int // messages without a final result
	ended   bool
	flying  []*flight // in the order of sending; settled ones are dropped lazily

	topics map[string]*target // subject →
	chain  []int              // message → the next of its topic and key, or -1
	behind []bool             // message → another of its topic and key is before it
	scan   int                // messages below were looked at
	ready  []int              // to be sent before those from scan on
	next   int                // in ready

	answersMu sync.Mutex
	answers   []answer
	found     []lookup
	notify    chan struct{} // an answer came
	done      chan struct{} // every result is known
	over      chan struct{} // the caller has left
}

// A target is a subject as one call sees it.
type target struct {
	subject string
	topic   string
	stream  *streamInfo
	looking bool
	waiting []int     // messages that wait for the lookup
	err     error     // why nothing more is sent to it
	heard   time.Time // when it last answered
}

type lookup struct {
	t      *target
	stream *streamInfo
	err    error
}

// cut ends the call for its caller: what is on its way is Unreachable, what was
// not sent NotTried.
func (c *call) cut(err error) []broker.Result {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.ended {
		return c.results
	}
	if c.behind == nil {
		c.order()
	}
	c.settleAnswers() // what came and was not yet looked at is a result too
	c.ended = true
	close(c.over)
	for _, f := range c.flying {
		c.b.flights.take(f.token)
		if c.results[f.index].Outcome == broker.NotTried {
			c.results[f.index] = unreachable("", err)
		}
	}
	for i := range c.results {
		if c.results[i].Outcome == broker.NotTried && (c.behind == nil || !c.behind[i]) {
			c.results[i] = unreachable("", err) // the reason, once for each key
		}
	}
	c.msgs = nil
	return c.results
}

func unreachable(scope string, err error) broker.Result {
	return broker.Result{Outcome: broker.Unreachable, Err: fmt.Errorf("nats: %w", err), Scope: scope}
}

func (c *call) answer(a answer) {
	c.answersMu.Lock()
	c.answers = append(c.answers, a)
	c.answersMu.Unlock()
	c.wake()
}

func (c *call) wake() {
	select {
	case c.notify <- struct{}{}:
	default:
	}
}

func (c *call) run() {
	c.mu.Lock()
	c.order()
	c.mu.Unlock()
	var s sender
	timer := time.NewTimer(time.Hour)
	defer timer.Stop()
	for {
		c.mu.Lock()
		if c.ended {
			c.mu.Unlock()
			return
		}
		c.settleAnswers()
		c.expire(time.Now())
		if c.left == 0 {
			c.ended = true
			close(c.done)
			c.mu.Unlock()
			return
		}
		timer.Reset(c.nextDeadline())
		more := c.hasNext()
		c.mu.Unlock()

		var slots chan struct{}
		if more {
			slots = c.b.flights.slots
		}
		select {
		case slots <- struct{}{}:
			c.send(&s)
		case <-c.notify:
		case <-timer.C:
		case <-c.over:
			return
		}
	}
}

// order finds the chains of messages that share topic and key.
func (c *call) order() {
	type key struct{ topic, key string }
	var last map[key]int
	for i := range c.msgs {
		m := &c.msgs[i]
		if !m.HasKey() {
			continue
		}
		if last == nil {
			last = make(map[key]int)
			c.chain, c.behind = make([]int, len(c.msgs)), make([]bool, len(c.msgs))
			for j := range c.chain {
				c.chain[j] = -1
			}
		}
		k := key{m.Topic, m.Key}
		if before, ok := last[k]; ok {
			c.chain[before], c.behind[i] = i, true
		}
		last[k] = i
	}
}

// hasNext reports whether there is a message to send. c.mu is held.
func (c *call) hasNext() bool {
	if c.next < len(c.ready) {
		return true
	}
	for c.scan < len(c.msgs) && c.behind != nil && c.behind[c.scan] {
		c.scan++
	}
	return c.scan < len(c.msgs)
}

// pop returns the next message to send, or -1. c.mu is held.
func (c *call) pop() int {
	if !c.hasNext() {
		return -1
	}
	if c.next < len(c.ready) {
		i := c.ready[c.next]
		if c.next++; c.next == len(c.ready) {
			c.ready, c.next = c.ready[:0], 0
		}
		return i
	}
	c.scan++
	return c.scan - 1
}

// A sender holds what a call's goroutine writes messages with. Nothing in it
// belongs to the caller.
type sender struct {
	encoder encoder
	body    []byte
	msg     natsgo.Msg
}

// burst is how many messages are sent before answers are looked at again.
const burst = 64

// send sends messages as long as there are any and slots are free. The caller
// has taken one slot.
func (c *call) send(s *sender) {
	slots := c.b.flights.slots
	for n := 0; ; n++ {
		c.mu.Lock()
		f := c.prepare(s)
		c.mu.Unlock()
		if f == nil {
			<-slots
			return
		}
		if err := c.transmit(s); err != nil && c.b.flights.take(f.token) != nil {
			c.answer(answer{f: f, err: err})
		}
		if n == burst {
			return
		}
		select {
		case slots <- struct{}{}:
		default:
			return
		}
	}
}

func (c *call) transmit(s *sender) error {
	if !c.b.link.up.Load() {
		return errDisconnected // without nats.go, whose lock is held while it dials
	}
	err := c.b.nc.PublishMsg(&s.msg)
	if errors.Is(err, natsgo.ErrMaxPayload) {
		err = fmt.Errorf("%d bytes with headers: %w", s.encoder.size+len(s.body), err)
	}
	return err
}

// prepare writes the next message that can be sent into s and makes it wait for
// its answer. It settles those that can not. c.mu is held.
func (c *call) prepare(s *sender) *flight {
	for !c.ended {
		i := c.pop()
		if i < 0 {
			return nil
		}
		m := &c.msgs[i]
		t, err := c.target(m, i)
		switch {
		case err != nil:
			c.fail(i, broker.Result{Outcome: broker.Refused, Err: fmt.Errorf("nats: %w", err)})
			continue
		case t.err != nil:
			c.fail(i, unreachable(t.topic, t.err))
			continue
		case t.stream == nil:
			t.waiting = append(t.waiting, i)
			c.lookup(t)
			continue
		}
		header := s.encoder.encode(m, t.subject)
		if err := tooLarge(t.stream, s.encoder.size, len(m.Payload)); err != nil {
			if time.Since(t.stream.at) > streamFresh {
				t.stream, t.waiting = nil, append(t.waiting, i)
				c.lookup(t)
				continue
			}
			c.fail(i, broker.Result{Outcome: broker.Refused, Err: fmt.Errorf("nats: %w", err)})
			continue
		}
		s.body = append(s.body[:0], m.Payload...)
		f := &flight{call: c, index: i, subject: t.subject, sent: time.Now()}
		s.msg = natsgo.Msg{Subject: t.subject, Reply: c.b.flights.add(f), Header: header, Data: s.body}
		c.flying = append(c.flying, f)
		return f
	}
	return nil
}

// target returns the subject that a message goes to, or why it never can.
func (c *call) target(m *postroom.Message, i int) (*target, error) {
	subject := c.b.subject(m)
	if t := c.topics[subject]; t != nil {
		return t, nil
	}
	if err := checkSubject(m.Topic, i); err != nil {
		return nil, err
	}
	t := &target{subject: subject, topic: m.Topic, stream: c.b.streams.cached(subject)}
	c.topics[subject] = t
	return t, nil
}

// lookup asks for the stream of a target, while other messages go on.
func (c *call) lookup(t *target) {
	if t.looking {
		return
	}
	t.looking = true
	c.b.calls.Add(1)
	go func() {
		defer c.b.calls.Done()
		ctx, cancel := context.WithCancel(context.Background())
		defer cancel()
		defer context.AfterFunc(c.b.link.ctx, cancel)()
		l := lookup{t: t}
		l.stream, l.err = c.b.stream(ctx, t.subject)
		c.answersMu.Lock()
		c.found = append(c.found, l)
		c.answersMu.Unlock()
		c.wake()
	}()
}

// maxHeader is JetStream's limit for the bytes of a header.
const maxHeader = 65535

// tooLarge reports the limit of JetStream or the stream that a message exceeds.
// That of the server is known to nats.go.
func tooLarge(stream *streamInfo, header, body int) error {
	switch {
	case header > maxHeader:
		return fmt.Errorf("headers of %d bytes, JetStream takes %d", header, maxHeader)
	case stream.maxSize > 0 && header+body > stream.maxSize:
		return fmt.Errorf("%d bytes with headers, stream %q takes %d", header+body, stream.name, stream.maxSize)
	}
	return nil
}

// settleAnswers gives every message that was answered its result. c.mu is held.
func (c *call) settleAnswers() {
	c.answersMu.Lock()
	answers, found := c.answers, c.found
	c.answers, c.found = nil, nil
	c.answersMu.Unlock()
	for _, l := range found {
		l.t.looking, l.t.stream = false, l.stream
		if l.err != nil {
			l.t.err = l.err
		}
		c.ready = append(c.ready, l.t.waiting...)
		l.t.waiting = nil
	}
	for _, a := range answers {
		c.settle(a)
	}
}

func (c *call) settle(a answer) {
	i, t := a.f.index, c.topics[a.f.subject]
	if a.err != nil {
		switch {
		case errors.Is(a.err, natsgo.ErrMaxPayload):
			c.fail(i, broker.Result{Outcome: broker.Refused, Err: fmt.Errorf("nats: %w", a.err)})
		case errors.Is(a.err, natsgo.ErrPermissionViolation):
			c.fail(i, unreachable(t.topic, a.err))
		default:
			c.fail(i, unreachable("", a.err))
		}
		return
	}
	t.heard = time.Now()
	err, refused := verdict(a.reply, t.stream.name)
	switch {
	case err == nil:
		c.results[i].Outcome = broker.Stored
		c.left--
		if c.chain != nil && c.chain[i] >= 0 {
			c.ready = append(c.ready, c.chain[i])
		}
	case refused:
		c.b.streams.doubt(t.subject)
		c.fail(i, broker.Result{Outcome: broker.Refused, Err: fmt.Errorf("nats: %w", err)})
	default:
		c.b.streams.doubt(t.subject)
		c.fail(i, unreachable(t.topic, err))
	}
}

// fail gives a message its result; what is behind it in its key stays NotTried.
func (c *call) fail(i int, r broker.Result) {
	c.results[i] = r
	c.left--
	if c.chain == nil {
		return
	}
	for i = c.chain[i]; i >= 0; i = c.chain[i] {
		c.left--
	}
}

// expire fails messages whose time is over. Where their subject has not
// answered at all since, nothing more is sent to it by this call. c.mu is held.
func (c *call) expire(now time.Time) {
	for len(c.flying) > 0 {
		f := c.flying[0]
		if c.results[f.index].Outcome == broker.NotTried {
			if now.Sub(f.sent) < c.b.cfg.PublishTimeout {
				return
			}
			if c.b.flights.take(f.token) == nil {
				return // its answer is on its way to us
			}
			c.timeout(f)
		}
		c.flying = c.flying[1:]
	}
}

func (c *call) timeout(f *flight) {
	t := c.topics[f.subject]
	err := fmt.Errorf("no acknowledgement within %v", c.b.cfg.PublishTimeout)
	scope := t.topic
	if c.b.flights.lastHeard().Before(f.sent) {
		scope = ""
	}
	if t.heard.Before(f.sent) && t.err == nil {
		t.err = err
		c.b.streams.doubt(t.subject)
	}
	c.fail(f.index, unreachable(scope, err))
}

// nextDeadline returns the time until the oldest message in flight expires.
func (c *call) nextDeadline() time.Duration {
	if len(c.flying) == 0 {
		return time.Hour
	}
	return max(0, time.Until(c.flying[0].sent.Add(c.b.cfg.PublishTimeout)))
}
