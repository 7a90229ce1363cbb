package inbox

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"go.opentelemetry.io/otel/trace"

	"github.com/postroom/postroom"
	"github.com/postroom/postroom/broker"
	"github.com/postroom/postroom/internal/waits"
)

// ErrDrainTimeout is matched by the error of [Consumer.Run] when handlers were
// still running [Config].DrainTimeout after its context had ended.
var ErrDrainTimeout = errors.New("inbox: drain timeout passed")

// ErrStopped is matched by the error of [Consumer.Run] when a message would have
// become a dead letter under the policy [DeadLetterStop].
var ErrStopped = errors.New("inbox: stopped at a message that cannot be handled")

// A Consumer handles the messages of a topic for a subscriber.
type Consumer struct {
	box     *box
	sub     broker.Subscriber
	topic   string
	handler Handler
	metrics *metrics
	running atomic.Bool
	begun   chan struct{} // receives when a transaction has begun

	mu            sync.Mutex
	brokerAway    error
	databaseAway  error
	databaseKnown atomic.Bool // databaseAway is not nil
}

// New returns a consumer that runs h for each message of topic, once per message
// id. subscriber names it among all consumers of the database, and is its group
// at the broker; instances that share the work have the same one. It must not
// change, see the package comment.
//
// New reports everything that is wrong with its arguments. It uses neither the
// database nor the broker.
func New(
	pool *pgxpool.Pool, sub broker.Subscriber, subscriber, topic string, h Handler, cfg Config,
) (*Consumer, error) {
	var errs []error
	if problem := postroom.CheckID(subscriber); problem != "" {
		errs = append(errs, fmt.Errorf("inbox: subscriber %q %s", subscriber, problem))
	}
	if err := checkTopic(topic); err != nil {
		errs = append(errs, fmt.Errorf("inbox: topic %w", err))
	}
	if sub == nil {
		errs = append(errs, errors.New("inbox: the broker.Subscriber is nil"))
	}
	if h == nil {
		errs = append(errs, errors.New("inbox: the Handler is nil"))
	}
	if pool == nil {
		return nil, errors.Join(append(errs, errors.New("inbox: the pool is nil"))...)
	}
	cfg, err := cfg.forConsumer(int(pool.Stat().MaxConns()))
	if err := errors.Join(append(errs, err)...); err != nil {
		return nil, err
	}
	c := &Consumer{
		box:     newBox(pool, subscriber, cfg),
		sub:     sub,
		topic:   topic,
		handler: h,
		begun:   make(chan struct{}, 1),
	}
	if c.metrics, err = newMetrics(cfg.MeterProvider, subscriber, topic); err != nil {
		return nil, fmt.Errorf("inbox: Config.MeterProvider: %w", err)
	}
	c.box.outbox = newOutbox(cfg.Schema)
	c.box.began = c.began
	return c, nil
}

// checkTopic applies the rules of messages to a topic alone.
func checkTopic(topic string) error {
	err := (&postroom.Message{Topic: topic}).Validate(0)
	if invalid, ok := errors.AsType[*postroom.InvalidError](err); ok {
		return fmt.Errorf("%q %s", topic, invalid.Problem)
	}
	return err
}

// Run handles messages until ctx ends, one transaction for each, up to
// [Config].Concurrency at a time. It then starts no handler any more, waits for
// those that are running, gives back what it holds besides, and returns nil.
// Handlers get a context that outlives ctx by [Config].DrainTimeout; if some are
// running even then, Run cancels it, gives their messages back and returns an
// error that matches [ErrDrainTimeout] and says how many.
//
// Messages of one key are handled one after the other in the order of their
// delivery, also while the first of them waits for its retry; other keys and
// messages without a key go on. A message is acknowledged when its effect, or
// its dead letter, is committed, and not before.
//
// A handler's error is retried with growing random delays until the message
// succeeds or becomes a dead letter, see [Config].MaxAttempts. Trouble with the
// database ([ErrTransient]) is retried for ever and is no attempt; while the
// database is away one transaction at a time looks whether it is back.
//
// Dead letters that are requeued, see [DeadLetters], are handled besides, by one
// of the subscriber's consumers of their topic.
//
// Otherwise Run returns only when the subscription fails in a way that a person
// must mend, or with [ErrStopped]. Run may be called again after it has returned, not before.
func (c *Consumer) Run(ctx context.Context) error {
	if !c.running.CompareAndSwap(false, true) {
		return errors.New("inbox: Run is running already")
	}
	defer c.running.Store(false)

	// A trace of the caller's is not one of the messages.
	work := trace.ContextWithSpanContext(context.WithoutCancel(ctx), trace.SpanContext{})
	work, cancel := context.WithCancel(work)
	defer cancel()
	ctx, halt := context.WithCancel(ctx)
	r := newRun(ctx, work, c, cancel)
	var letters sync.WaitGroup
	defer letters.Wait()
	defer halt()
	letters.Go(r.takeLetters)
	defer c.setBroker(nil)
	defer c.setDatabase(nil)
	go func() {
		r.ended <- c.sub.Subscribe(ctx, broker.Subscription{
			Group:       c.box.subscriber,
			Topic:       c.topic,
			MaxInFlight: c.box.cfg.MaxInFlight,
			Trouble:     c.setBroker,
		}, r.deliver)
	}()
	return r.loop(halt)
}

// Health returns nil while messages can come and be handled, or why they cannot:
// the broker or the database is away. It says nothing of single messages.
func (c *Consumer) Health() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	return errors.Join(c.brokerAway, c.databaseAway)
}

func (c *Consumer) setBroker(err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.brokerAway = nil
	if err != nil {
		c.brokerAway = fmt.Errorf("inbox: subscriber %q: broker: %w", c.box.subscriber, err)
	}
}

func (c *Consumer) setDatabase(err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.databaseAway = err
	c.databaseKnown.Store(err != nil)
}

// began is told of every transaction that has begun.
func (c *Consumer) began() {
	if !c.databaseKnown.Load() {
		return
	}
	select {
	case c.begun <- struct{}{}:
	default:
	}
}

// outcome is what came of running a task.
type outcome struct {
	t      *task
	kind   outcomeKind
	result Result // of settled
	err    error
	wait   time.Duration // of retry
}

type outcomeKind uint8

const (
	settled  outcomeKind = iota // handled or set aside, and acknowledged
	retry                       // run it again after wait
	away                        // run it again when the database is back
	giveBack                    // the work has been cancelled
	stopHere                    // the consumer stops at it
)

// process runs t once.
func (c *Consumer) process(ctx context.Context, t *task) outcome {
	if t.dead != nil && c.stopsAt(t) {
		return outcome{t: t, kind: stopHere, err: fmt.Errorf("%w: message %q: %s", ErrStopped, t.m.ID, t.dead.reason)}
	}
	began := time.Now()
	result, f := c.attempt(ctx, t)
	c.metrics.attempted(ctx, began)
	switch {
	case f == nil:
		return c.done(ctx, t, result)
	case ctx.Err() != nil:
		return outcome{t: t, kind: giveBack}
	case f.stage == stageBegin && f.trouble && !contention(f):
		return outcome{t: t, kind: away, err: f}
	case f.trouble || t.dead != nil:
		return c.troubled(ctx, t, f)
	}
	return c.failed(ctx, t, f)
}

// attempt runs the transaction that t needs next.
func (c *Consumer) attempt(ctx context.Context, t *task) (Result, *failure) {
	inOrder := c.box.cfg.OnDeadLetter == DeadLetterWait && t.m.HasKey()
	switch {
	case t.dead != nil:
		return c.writeDead(ctx, t)
	case t.letter != nil:
		return c.box.attempt(ctx, t.m, recordLetter(inOrder), c.handler)
	case t.redriven:
		return c.box.attempt(ctx, t.m, recordRedriven(), c.handler)
	case !inOrder:
		return c.box.attempt(ctx, t.m, recordNew(), c.handler)
	}
	result, f := c.box.attempt(ctx, t.m, recordInOrder(c.topic, &t.m), c.handler)
	if f == nil && result == Duplicate { // or its turn has not come
		return c.writeWaiting(ctx, t)
	}
	return result, f
}

// stopsAt reports whether the consumer stops instead of setting t aside. It sets
// aside what was so before, and what a repeat would find handled.
func (c *Consumer) stopsAt(t *task) bool {
	return c.box.cfg.OnDeadLetter == DeadLetterStop && t.letter == nil && !t.redriven && !t.dead.ended
}

// done acknowledges t.
func (c *Consumer) done(ctx context.Context, t *task, result Result) outcome {
	c.metrics.done(ctx, t, result)
	switch {
	case result == Duplicate:
		c.log(ctx, slog.LevelDebug, "message is a duplicate", t)
	case t.dead != nil:
		c.log(ctx, slog.LevelError, "message became a dead letter", t,
			slog.Int("attempts", t.attempts), slog.String("reason", t.dead.reason))
	default:
		c.log(ctx, slog.LevelDebug, "message handled", t)
	}
	if t.settled.CompareAndSwap(false, true) {
		ctx, stop := bounds.with(context.WithoutCancel(ctx), settleTime)
		defer stop()
		switch err := t.d.Ack(ctx); {
		case errors.Is(err, broker.ErrLost):
			c.log(ctx, slog.LevelDebug, "message was given to another member meanwhile", t)
		case err != nil:
			c.log(ctx, slog.LevelWarn, "acknowledge", t, slog.Any("error", err))
		}
	}
	return outcome{t: t, kind: settled, result: result}
}

// failed counts an attempt and decides whether it was the last.
func (c *Consumer) failed(ctx context.Context, t *task, f *failure) outcome {
	t.attempts++
	t.troubles = 0
	c.metrics.failed.Add(ctx, 1, c.metrics.byHandler)
	last := c.box.cfg.MaxAttempts > 0 && t.attempts >= c.box.cfg.MaxAttempts
	if last || f.ended || postroom.IsPermanent(f) {
		t.dead = &deadLetter{reason: reasonOf(f.err), ended: f.ended}
		return outcome{t: t, kind: retry} // at once
	}
	wait := c.delay(t, f)
	c.log(ctx, slog.LevelWarn, "message failed", t,
		slog.Int("attempt", t.attempts), slog.Duration("retry_after", wait), slog.Any("error", f.err))
	return outcome{t: t, kind: retry, wait: wait}
}

// troubled retries what is no fault of the message, and says so now and then.
func (c *Consumer) troubled(ctx context.Context, t *task, f *failure) outcome {
	t.troubles++
	c.metrics.failed.Add(ctx, 1, c.metrics.byDatabase)
	wait := c.delay(t, f)
	level := slog.LevelDebug
	if n := t.troubles; n >= 4 && n&(n-1) == 0 {
		level = slog.LevelWarn
	}
	c.log(ctx, level, "transaction failed", t,
		slog.Int("count", t.troubles), slog.Duration("retry_after", wait), slog.Any("error", f.err))
	return outcome{t: t, kind: retry, wait: wait}
}

func (c *Consumer) delay(t *task, err error) time.Duration {
	if d, ok := postroom.RetryDelay(err); ok {
		return d
	}
	if t.delays == nil {
		t.delays = waits.Growing(c.box.cfg.RetryDelay, c.box.cfg.MaxRetryDelay)
	}
	return t.delays.NextBackOff()
}

func (c *Consumer) log(ctx context.Context, level slog.Level, msg string, t *task, attrs ...slog.Attr) {
	if !c.box.cfg.Logger.Enabled(ctx, level) {
		return
	}
	//nolint:sloglint // every caller's message is a constant
	c.box.cfg.Logger.LogAttrs(ctx, level, msg, append([]slog.Attr{
		slog.String("subscriber", c.box.subscriber),
		slog.String("topic", c.topic),
		slog.String("message_id", t.m.ID),
	}, attrs...)...)
}
