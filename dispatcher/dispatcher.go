// Package dispatcher publishes what committed transactions have written to the
// outbox: each message at least once, and those of one topic and key in the
// order in which their transactions wrote them.
//
//	d, err := dispatcher.New(pool, bus, dispatcher.Config{})
//	…
//	err = d.Run(ctx)
//
// Run as many dispatchers as you like, in processes of their own or beside
// other work. They share the outbox's lanes evenly, each owning its own by a
// lease; when one joins, stops or dies, the others give or take what is due.
// Ownership rests on rows and works through a transaction-pooling PgBouncer.
//
// How far a lane has been published is remembered as a PostgreSQL snapshot, not as a
// number: a poll reads exactly what has committed since, whatever the order in which
// transactions began and ended, and no long transaction delays it.
package dispatcher

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/postroom/postroom"
	"github.com/postroom/postroom/broker"
)

// ErrDrainTimeout is returned by [Dispatcher.Run] when publishes were still
// running at the end of Config.DrainTimeout. Their messages will be published
// again.
var ErrDrainTimeout = errors.New("dispatcher: publishes were still running at the end of DrainTimeout")

// A Dispatcher publishes the messages of one outbox.
type Dispatcher struct {
	cfg   Config
	pool  *database
	pub   broker.Publisher
	sql   sql
	owner string
	began time.Time
	home  atomic.Int64 // the database's origin

	lastStored atomic.Int64 // when the broker last stored something, in nanoseconds of clock
	trouble    *troubles
	metrics    *metrics
	woken      chan struct{} // Wake was called

	nudge chan struct{} // a lane has come to rest: see to it at once

	publishing sync.RWMutex // held alone while a message is suspected of killing the process

	mu    sync.Mutex
	lanes map[int32]*lane
	lost  int64 // lanes that were lost while they were being published
}

// New returns a dispatcher that reads the outbox through pool and publishes to
// pub. It reports every problem of cfg at once, and does not connect.
//
// The dispatcher holds at most one connection for each lane that it publishes,
// a second one while it reads ahead, one for each topic whose set-aside messages
// leave, and four for its own upkeep, each for one statement at a time: any pool
// size works. No connection is held while
// the broker is being waited for.
func New(pool *pgxpool.Pool, pub broker.Publisher, cfg Config) (*Dispatcher, error) {
	cfg, err := cfg.withDefaults()
	if pool == nil {
		err = errors.Join(errors.New("dispatcher: pool is nil"), err)
	}
	if pub == nil {
		err = errors.Join(errors.New("dispatcher: publisher is nil"), err)
	}
	if err != nil {
		return nil, err
	}
	metrics, err := newMetrics(cfg.MeterProvider, cfg.Name)
	if err != nil {
		return nil, fmt.Errorf("dispatcher: Config.MeterProvider: %w", err)
	}
	host, _ := os.Hostname() // only for people to read
	return &Dispatcher{
		cfg: cfg, pool: newDatabase(pool, cfg.StatementTimeout), pub: pub, sql: newSQL(cfg.Schema),
		metrics: metrics,
		owner:   fmt.Sprintf("%s/%d/%s", host, os.Getpid(), postroom.NewID()),
		began:   time.Now(),
		trouble: &troubles{name: cfg.Name, log: cfg.Logger, at: make(map[string]*trouble)},
		nudge:   make(chan struct{}, 1),
		woken:   make(chan struct{}, 1),
		lanes:   make(map[int32]*lane),
	}, nil
}

// Wake makes the dispatcher look for new messages now rather than at its next
// poll, after a commit in the same process. Calls that come faster than polls
// count as one. It does not block, and is safe for concurrent use.
func (d *Dispatcher) Wake() {
	select {
	case d.woken <- struct{}{}:
	default:
	}
}

// Health returns what keeps messages from being published at present (the
// database, the broker, a topic that is away), or nil. It is safe for
// concurrent use.
func (d *Dispatcher) Health() error { return d.trouble.err() }

// Lanes says which part of the outbox a dispatcher publishes.
type Lanes struct {
	// Held are the numbers of the lanes that are owned at present, ascending.
	Held []int

	// Lost counts the lanes that came to another dispatcher, or might have,
	// while this one was publishing them: it was paused, or cut off from the
	// database, for longer than its lease. Each may have repeated what was in
	// flight, and nothing else.
	Lost int64
}

// Lanes returns the dispatcher's share at present. It is safe for concurrent
// use.
func (d *Dispatcher) Lanes() Lanes {
	var all Lanes
	for _, l := range d.held() {
		all.Held = append(all.Held, int(l.number))
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	all.Lost = d.lost
	return all
}

// Run publishes until ctx ends, settles what is being published, gives its
// lanes to other dispatchers and returns nil, or [ErrDrainTimeout]. It
// returns a [*SetupError] at once for what only a person can mend. Trouble with database or broker
// is logged, shown by [Dispatcher.Health] and tried again without end.
//
// The publisher gets a context that outlives ctx by up to Config.DrainTimeout.
// Call Run once.
func (d *Dispatcher) Run(ctx context.Context) error {
	if err := d.waitForServer(ctx); err != nil || ctx.Err() != nil {
		return err
	}
	observed, err := d.metrics.observe(d)
	if err != nil {
		return fmt.Errorf("dispatcher: Config.MeterProvider: %w", err)
	}
	defer func() { _ = observed.Unregister() }()
	work, cancel := context.WithCancel(context.WithoutCancel(ctx))
	defer cancel()
	drained := make(chan struct{})
	defer close(drained)
	var timedOut atomic.Bool
	if d.cfg.DrainTimeout >= 0 {
		go func() {
			select {
			case <-ctx.Done():
			case <-drained:
				return
			}
			t := time.NewTimer(d.cfg.DrainTimeout)
			defer t.Stop()
			select {
			case <-t.C:
				timedOut.Store(true)
				cancel()
			case <-drained:
			}
		}()
	}
	var wg sync.WaitGroup
	wg.Go(func() { d.poll(ctx) })
	wg.Go(func() { d.schedule(ctx) })
	wg.Go(func() { d.watchParked(ctx) })
	wg.Go(func() { d.clean(ctx) })
	d.keep(ctx, work)
	wg.Wait()
	if timedOut.Load() {
		return ErrDrainTimeout
	}
	return nil
}

// waitForServer returns when the server has answered that all is in order.
func (d *Dispatcher) waitForServer(ctx context.Context) error {
	retry := newBackoff(50*time.Millisecond, 5*time.Second)
	for ctx.Err() == nil {
		err := d.checkServer(ctx)
		if _, ok := errors.AsType[*SetupError](err); ok {
			return err
		}
		if err == nil {
			d.trouble.clear("start")
			return nil
		}
		if ctx.Err() == nil {
			d.trouble.set("start", err)
			wait(ctx, retry.NextBackOff())
		}
	}
	return nil
}

// see has the keeper look after the lanes at once; it does not block.
func (d *Dispatcher) see() {
	select {
	case d.nudge <- struct{}{}:
	default:
	}
}

// clock is a monotonic clock, for leases.
func (d *Dispatcher) clock() time.Duration { return time.Since(d.began) }

// held returns the lanes whose leases have not ended, by number.
func (d *Dispatcher) held() []*lane {
	d.mu.Lock()
	defer d.mu.Unlock()
	var lanes []*lane
	for _, n := range slices.Sorted(maps.Keys(d.lanes)) {
		if d.lanes[n].held() {
			lanes = append(lanes, d.lanes[n])
		}
	}
	return lanes
}

func (d *Dispatcher) idleLanes() (lanes []*lane, states []*pollState) {
	for _, l := range d.held() {
		if s := l.idle.Load(); s != nil {
			lanes, states = append(lanes, l), append(states, s)
		}
	}
	return lanes, states
}

func (d *Dispatcher) allEnded() bool { return len(d.running()) == 0 }

// running returns the numbers of the lanes whose runs have not ended.
func (d *Dispatcher) running() []int32 {
	d.mu.Lock()
	defer d.mu.Unlock()
	numbers := []int32{}
	for n, l := range d.lanes {
		if !l.hasEnded() {
			numbers = append(numbers, n)
		}
	}
	return numbers
}

func (l *lane) hasEnded() bool {
	select {
	case <-l.ended:
		return true
	default:
		return false
	}
}
