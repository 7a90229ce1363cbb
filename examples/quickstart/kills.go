package main

import (
	"context"
	"math/rand/v2"
	"slices"
	"sync"
	"sync/atomic"
	"time"
)

// A kill is planned for a moment of the work, not of the clock, so that there
// is work in progress on any machine.
type kill struct {
	role   string
	at     float64 // share of the role's work that is done by then
	moment bool    // in the next moment that matters, else at once
}

// planKills spreads kills at random over the work, roles in turn, every other
// kill of a role in a moment that matters.
func planKills(kills int, seed uint64) []kill {
	rng := rand.New(rand.NewPCG(seed, 0xdead))
	plan := make([]kill, kills)
	for i := range plan {
		plan[i] = kill{
			role:   []string{roleDispatcher, roleConsumer}[i%2],
			at:     0.03 + 0.85*rng.Float64(),
			moment: i/2%2 == 0,
		}
	}
	slices.SortFunc(plan, func(a, b kill) int {
		if a.at < b.at {
			return -1
		}
		return 1
	})
	return plan
}

// carryOut kills as planned until all is done or ctx ends. done returns the
// share of a role's work that is done.
func (c *crew) carryOut(ctx context.Context, plan []kill, seed uint64, done func(role string) float64) {
	var both sync.WaitGroup
	defer both.Wait()
	for i, role := range []string{roleDispatcher, roleConsumer} {
		rng := rand.New(rand.NewPCG(seed, uint64(i)))
		both.Go(func() {
			last := time.Now()
			for _, k := range plan {
				if k.role != role {
					continue
				}
				// Somebody must have gone on with the work since the last kill.
				ready := func() bool { return done(role) >= k.at && c.busiest(role).active.Load() > last.UnixNano() }
				if !until(ctx, ready) {
					return
				}
				c.killOne(ctx, k, rng)
				last = time.Now()
			}
		})
	}
}

// killOne ends the dispatcher that publishes, or any consumer, and returns when
// it has ended.
func (c *crew) killOne(ctx context.Context, k kill, rng *rand.Rand) {
	victim := c.busiest(k.role)
	if k.role == roleConsumer {
		victim = c.ofRole(k.role)[rng.IntN(len(c.ofRole(k.role)))]
	}
	ended := victim.ended.Load()
	gone := func() bool { return victim.ended.Load() > ended }
	if k.moment {
		victim.order(orderDie)
		patience, cancel := context.WithTimeout(ctx, 2*time.Second)
		defer cancel()
		if until(patience, gone) {
			c.event("killed %s %s", victim.name, moments[k.role])
			return
		}
		if ctx.Err() != nil {
			return
		}
	}
	victim.kill()
	if until(ctx, gone) {
		c.event("killed %s", victim.name)
	}
}

var moments = map[string]string{
	roleDispatcher: "after a publish, before it could write its cursor",
	roleConsumer:   "after a commit, before the acknowledgement",
}

func (c *crew) ofRole(role string) (workers []*worker) {
	for _, w := range c.workers {
		if w.role == role {
			workers = append(workers, w)
		}
	}
	return workers
}

// busiest returns the worker of a role that said something last.
func (c *crew) busiest(role string) *worker {
	return slices.MaxFunc(c.ofRole(role), func(a, b *worker) int {
		return int(a.active.Load() - b.active.Load())
	})
}

// until waits for a condition, and returns false if ctx ends first.
func until(ctx context.Context, met func() bool) bool {
	tick := time.NewTicker(5 * time.Millisecond)
	defer tick.Stop()
	for !met() {
		select {
		case <-tick.C:
		case <-ctx.Done():
			return false
		}
	}
	return true
}

// A tally is what the main program itself counts while it all runs.
type tally struct {
	committed, rolledBack, savepoints atomic.Int64
	arrived                           atomic.Int64 // first arrivals at the broker
	repeated                          atomic.Int64 // repeats published on purpose
	kills                             atomic.Int64
}
