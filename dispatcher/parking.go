package dispatcher

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"time"

	"github.com/cenkalti/backoff/v4"
	"github.com/jackc/pgx/v5"
)

const (
	// parkedEvery is how often a dispatcher looks for parked messages that are
	// due, or that an operator has requeued or discarded.
	parkedEvery = 500 * time.Millisecond

	// firstRetry and mostRetry bound the pause after a refusal: it doubles from
	// the one to the other, and a random part of it is waited.
	firstRetry = 5 * time.Second
	mostRetry  = 30 * time.Minute

	// firstProbe and mostProbe bound the pause between two attempts to reach
	// what is away.
	firstProbe = 100 * time.Millisecond
	mostProbe  = 10 * time.Second

	// leaving is how many queues of parked messages a lane publishes from at a
	// time, and of how many it probes whether what they wait for is back.
	leaving = 4
)

// retryPause is how long to wait after the n-th refusal.
func retryPause(n int) time.Duration {
	most := mostRetry
	if n < 20 {
		most = min(most, firstRetry<<(n-1))
	}
	return rand.N(most) + time.Millisecond
}

// parking is what a lane knows of its parked messages. They stand in queues: one
// for each scope that is away, and one for all keys behind a refused message,
// named "". A queue's messages are published beside the lane's own, by a
// goroutine of its own, so that what does not answer holds up nothing else.
//
// A key belongs to the lane's run while it has no parked message and to its
// queue while it has. Only the run adds rows, and only the queues take rows out. Each does so
// under mu, so neither acts on what the other is about to change.
type parking struct {
	l     *lane
	wake  chan struct{}
	isDue atomic.Bool // the queue "" is to be looked at

	mu     sync.Mutex
	queues map[string]*queue
}

// A queue is the parked messages that wait for one scope. What is behind refused
// messages has the queue "", which is always there.
type queue struct {
	scope string
	topic string

	at      time.Time // when to publish from it next; zero: not before something comes
	running bool
	ill     error // why the last call stored nothing: probe, with few messages
	joined  bool  // rows have come from another queue, perhaps with lower numbers

	// These belong to the goroutine that publishes from it.
	retry *backoff.ExponentialBackOff
	after int64 // rows up to this number have left
	fit   int   // as in lane
	last  bool  // little is left: see [lane.leavePage]

	tries map[int64]int // of the first messages of keys, how often each was not reached
}

// mostTries bounds the memory of a queue's tries. What is forgotten is tried
// again sooner.
const mostTries = 10_000

// delay returns how long to leave a message alone whose topic was not reached.
func (q *queue) delay(number int64) time.Duration {
	if len(q.tries) >= mostTries {
		clear(q.tries)
	}
	most := mostProbe
	if n := q.tries[number]; n < 10 {
		most = min(most, firstProbe<<n)
	}
	q.tries[number]++
	return rand.N(most) + time.Millisecond
}

func newParking(l *lane) *parking {
	p := &parking{l: l, wake: make(chan struct{}, 1), queues: make(map[string]*queue)}
	p.open("", "")
	return p
}

// open makes sure that there is a queue for scope and that it is looked at,
// unless it waits to be probed. p.mu is held, or p not shared yet.
func (p *parking) open(scope, topic string) {
	q := p.queues[scope]
	if q == nil {
		q = &queue{
			scope: scope, topic: topic, fit: min(firstFit, p.l.d.cfg.PageSize),
			retry: newBackoff(firstProbe, mostProbe), tries: make(map[int64]int),
		}
		p.queues[scope] = q
	}
	if q.ill == nil {
		q.at = time.Now()
	}
	p.rouse()
}

// away reports whether a topic, or a part of it, is away. p.mu is held.
func (p *parking) away(topic string) bool {
	for scope, q := range p.queues {
		if scope != "" && q.topic == topic {
			return true
		}
	}
	return false
}

// waitedFor reports whether messages wait for a scope.
func (p *parking) waitedFor(scope string) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return scope != "" && p.queues[scope] != nil
}

// alone reports whether q is all of its topic that is away. p.mu is held.
func (p *parking) alone(q *queue) bool {
	for _, other := range p.queues {
		if other != q && other.scope != "" && other.topic == q.topic {
			return false
		}
	}
	return true
}

// busy reports whether messages are being published from a queue. p.mu is held.
func (p *parking) busy() bool {
	for _, q := range p.queues {
		if q.running {
			return true
		}
	}
	return false
}

// rouse has run look at the queues; it does not block.
func (p *parking) rouse() {
	select {
	case p.wake <- struct{}{}:
	default:
	}
}

// due has the messages behind refused ones looked at; it does not block.
func (p *parking) due() {
	p.isDue.Store(true)
	p.rouse()
}

// awayScopes lists what a lane's parked messages wait for, by skipping from one
// to the next through index outbox_parked_away.
const awayScopes = `
WITH RECURSIVE a(away, topic) AS (
    (SELECT away, topic FROM "postroom".outbox_parked
      WHERE lane = $1::int4 AND away IS NOT NULL ORDER BY away, number LIMIT 1)
    UNION ALL
    SELECT n.away, n.topic FROM a CROSS JOIN LATERAL (
           SELECT away, topic FROM "postroom".outbox_parked
            WHERE lane = $1 AND away > a.away ORDER BY away, number LIMIT 1) n
)
SELECT away, topic FROM a`

// load opens a queue for whatever the lane's parked messages wait for.
func (p *parking) load(ctx context.Context) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	rows, err := p.l.d.pool.Query(ctx, p.l.d.sql.away, p.l.number)
	if err != nil {
		return err
	}
	var scope, topic string
	_, err = pgx.ForEachRow(rows, []any{&scope, &topic}, func() error {
		p.open(scope, topic)
		return nil
	})
	return err
}

// run publishes from the queues until ctx ends or the lane is lost. It returns
// when nothing is being published any more.
func (p *parking) run(ctx, work context.Context) {
	var running sync.WaitGroup
	defer func() {
		running.Wait()
		p.mu.Lock()
		defer p.mu.Unlock()
		for _, q := range p.queues { // the next owner's troubles
			p.l.d.trouble.clear(p.place(q))
		}
	}()
	for ctx.Err() == nil && p.l.held() {
		next := p.start(ctx, work, &running)
		timer := time.NewTimer(next)
		select {
		case <-p.wake:
		case <-timer.C:
		case <-ctx.Done():
		}
		timer.Stop()
	}
}

// start starts what is to be published from now, and returns when to look
// again.
func (p *parking) start(ctx, work context.Context, running *sync.WaitGroup) (next time.Duration) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if ctx.Err() != nil {
		return 0
	}
	next = time.Second // the lane may be lost
	if p.isDue.Swap(false) {
		p.queues[""].at = time.Now()
	}
	now := time.Now()
	busy := make(map[bool]int) // ill or not → queues that are running
	for _, q := range p.queues {
		if q.running {
			busy[q.ill != nil]++
		}
	}
	for _, q := range p.queues {
		if q.running || q.at.IsZero() {
			continue
		}
		if d := q.at.Sub(now); d > 0 {
			next = min(next, d)
		} else if q.scope == "" || busy[q.ill != nil] < leaving {
			busy[q.ill != nil]++
			q.running, q.at = true, time.Time{}
			running.Go(func() { p.leave(ctx, work, q) })
		}
	}
	return next
}

// leave publishes from a queue until it is empty, or what it waits for is away.
func (p *parking) leave(ctx, work context.Context, q *queue) {
	var err error
	again := true
	for again && err == nil && ctx.Err() == nil && p.l.held() {
		again, err = p.l.leavePage(work, q)
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	q.running = false
	switch {
	case errors.Is(err, errLostLane):
		p.l.lease.Store(0)
		p.l.rouse(false)
	case err != nil:
		p.l.d.trouble.set(p.place(q), err)
		q.at = time.Now().Add(q.retry.NextBackOff())
	case q.ill != nil:
		p.l.d.trouble.set(p.place(q), q.ill)
		q.at = time.Now().Add(q.retry.NextBackOff())
	default:
		p.l.d.trouble.clear(p.place(q))
	}
	p.rouse()
}

func (p *parking) place(q *queue) string {
	if q.scope == "" {
		return fmt.Sprintf("parked messages of lane %d", p.l.number)
	}
	return fmt.Sprintf("%s, for which messages of lane %d wait", q.scope, p.l.number)
}

// dueParked lists the lanes that have parked messages to be tried now, by a
// probe of index outbox_parked_due for each.
const dueParked = `
SELECT l.lane
  FROM unnest($1::int4[]) AS l(lane)
 WHERE (SELECT p.due_at FROM "postroom".outbox_parked p
         WHERE p.lane = l.lane AND p.due_at IS NOT NULL
         ORDER BY p.due_at LIMIT 1) <= clock_timestamp()`

// watchParked looks for parked messages that are due, until ctx ends.
func (d *Dispatcher) watchParked(ctx context.Context) {
	for ctx.Err() == nil {
		if held := d.held(); len(held) > 0 {
			err := d.rouseParked(ctx, held)
			if ctx.Err() != nil {
				return
			}
			if err != nil {
				d.trouble.set("parked messages", err)
			} else {
				d.trouble.clear("parked messages")
			}
		}
		wait(ctx, parkedEvery-rand.N(parkedEvery/5))
	}
}

func (d *Dispatcher) rouseParked(ctx context.Context, held []*lane) error {
	byNumber := make(map[int32]*lane, len(held))
	for _, l := range held {
		byNumber[l.number] = l
	}
	numbers, _ := split(held)
	rows, err := d.pool.Query(ctx, d.sql.parkedDue, numbers)
	if err != nil {
		return err
	}
	var number int32
	_, err = pgx.ForEachRow(rows, []any{&number}, func() error {
		byNumber[number].parking.due()
		return nil
	})
	return err
}
