// Package dispatcher publishes what committed transactions have written to the
// outbox: each message at least once, and those of one topic and key in the
// order in which their transactions wrote them.
//
//	d, err := dispatcher.New(pool, bus, dispatcher.Config{})
//	…
//	err = d.Run(ctx)
//
// Run as many dispatchers as you like, in processes of their own or beside
// other work. One owns the outbox's lanes by a lease and publishes; when it
// stops, or dies, another takes over. Ownership rests on rows and works
// through a transaction-pooling PgBouncer.
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

	mu    sync.Mutex
	lanes map[int32]*lane
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
	host, _ := os.Hostname() // only for people to read
	return &Dispatcher{
		cfg: cfg, pool: newDatabase(pool, cfg.StatementTimeout), pub: pub, sql: newSQL(cfg.Schema),
		owner:   fmt.Sprintf("%s/%d/%s", host, os.Getpid(), postroom.NewID()),
		began:   time.Now(),
		trouble: &troubles{log: cfg.Logger, at: make(map[string]*trouble)},
		lanes:   make(map[int32]*lane),
	}, nil
}

// Health returns what keeps messages from being published at present (the
// database, the broker, a topic that is away), or nil. It is safe for
// concurrent use.
func (d *Dispatcher) Health() error { return d.trouble.err() }

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

// keep claims free lanes and renews the leases of those that are held, and
// goes on renewing after ctx ends until the last of them has settled. It
// then releases them.
func (d *Dispatcher) keep(ctx, work context.Context) {
	every := min(d.cfg.Lease/3, time.Second)
	var renewed time.Time
	for {
		d.dropEnded(ctx)
		if ctx.Err() != nil && d.allEnded() {
			break
		}
		if held := d.held(); len(held) > 0 && time.Since(renewed) >= d.cfg.Lease/3 {
			if d.renewAll(work, held) {
				renewed = time.Now()
			}
		}
		if ctx.Err() == nil {
			d.claimFree(ctx, work)
			wait(ctx, every)
		} else {
			wait(work, every/20+time.Millisecond)
		}
		if work.Err() != nil {
			return // drain timeout: leases end by themselves
		}
	}
	if err := d.releaseAll(work, d.held()); err != nil {
		d.trouble.set("release", err)
	}
}

func (d *Dispatcher) claimFree(ctx, work context.Context) {
	free, until, err := d.claim(ctx)
	if ctx.Err() != nil && err != nil {
		return
	}
	if err != nil {
		d.trouble.set("lease", err)
		return
	}
	d.trouble.clear("lease")
	if len(free) > 0 {
		home, err := d.readHome(work)
		if err != nil {
			d.trouble.set("lease", err)
			return // the leases end, and are claimed again
		}
		d.home.Store(home)
	}
	for _, c := range free {
		l := &lane{
			d: d, number: c.Lane, fence: c.Fence,
			wake: make(chan bool, 1), ended: make(chan struct{}),
			fit: min(firstFit, d.cfg.PageSize),
		}
		l.parking = newParking(l)
		l.lease.Store(int64(until.Sub(d.began)))
		d.mu.Lock()
		d.lanes[l.number] = l
		d.mu.Unlock()
		go l.run(ctx, work)
	}
}

func (d *Dispatcher) readHome(ctx context.Context) (home int64, err error) {
	err = d.pool.QueryRow(ctx, d.sql.home).Scan(&home)
	return home, err
}

// renewAll extends the leases of lanes. What is no longer ours ends at once.
func (d *Dispatcher) renewAll(work context.Context, lanes []*lane) bool {
	ask := slices.DeleteFunc(slices.Clone(lanes), func(l *lane) bool { return l.stuck.Load() })
	held, until, err := d.renew(work, ask)
	if err != nil {
		d.trouble.set("lease", err)
		return false
	}
	for _, l := range ask {
		if held[claimed{l.number, l.fence}] {
			l.lease.Store(int64(until.Sub(d.began)))
		} else {
			l.lease.Store(0)
			l.rouse(false)
		}
	}
	return true
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

// dropEnded forgets lanes that were lost and have come to rest. Those that
// came to rest because ctx ended are kept, to be released.
func (d *Dispatcher) dropEnded(ctx context.Context) {
	d.mu.Lock()
	defer d.mu.Unlock()
	maps.DeleteFunc(d.lanes, func(_ int32, l *lane) bool {
		return l.hasEnded() && ctx.Err() == nil
	})
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
