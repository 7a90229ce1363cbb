package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sync/errgroup"
)

// A game is one run of the quick start.
type game struct {
	options
	stage     *stage
	producers *producers
	crew      *crew
	tally     tally
	screen    *screen
	written   atomic.Bool // the producers have finished
}

// play sets the stage, lets everything run, counts and prints the table.
func play(ctx context.Context, o options, s *screen) (r *report, err error) {
	hooks, err := loadWebhooks()
	if err != nil {
		return nil, err
	}
	s.line("Postroom quick start: %s GitHub webhooks, %d kills, seed %d", grouped(o.messages), o.kills, o.seed)
	st, err := setStage(ctx, o, s)
	defer func() { err = errors.Join(err, st.Close()) }()
	if err != nil {
		return nil, err
	}
	program, err := os.Executable()
	if err != nil {
		return nil, err
	}
	g := &game{options: o, stage: st, screen: s}
	g.producers = &producers{pool: st.pool, hooks: hooks, ledger: newLedger(), tally: &g.tally}
	if o.breaks == breakOutbox {
		bus, err := st.route.open(ctx, slog.New(slog.DiscardHandler))
		if err != nil {
			return nil, err
		}
		defer bus.Close()
		g.producers.bypass = bus
	}
	g.crew = newCrew(program, assignment{
		DatabaseURL: st.databaseURL, Route: st.route, Seed: o.seed, Break: o.breaks,
	}, &g.tally, s.event)

	s.event("begin: %d producers here, 2 dispatchers and %d subscribers as processes", producerCount, len(subscribers))
	begun := time.Now()
	stalled, err := g.run(ctx)
	took := time.Since(begun)
	g.show(ctx)
	s.end()
	if err != nil {
		return nil, err
	}
	s.event("counting: the business tables, and every record at the broker")
	if r, err = g.count(ctx); err != nil {
		return nil, err
	}
	r.stalled, r.took = stalled, took
	s.line("\n%s", r)
	return r, nil
}

var errStalled = errors.New("nothing has moved for the time that -timeout gives")

// run lets everything run until all is done, or nothing moves any more.
func (g *game) run(ctx context.Context) (stalled bool, err error) {
	all, ctx := errgroup.WithContext(ctx)
	all.Go(func() error { return g.crew.run(ctx) })
	all.Go(func() error {
		defer g.crew.stop()
		ctx, cancel := context.WithCancelCause(ctx)
		defer cancel(nil)
		go g.watch(ctx, cancel)
		err := g.finish(ctx)
		if stalled = errors.Is(context.Cause(ctx), errStalled); stalled {
			return nil
		}
		return err
	})
	return stalled, all.Wait()
}

// finish returns when every message is written, published, repeated and
// settled by every subscriber. The kills are spread over that work, and end
// with it.
func (g *game) finish(ctx context.Context) error {
	killing, stopKilling := context.WithCancel(ctx)
	defer stopKilling()
	var kills sync.WaitGroup
	kills.Go(func() { g.crew.carryOut(killing, planKills(g.kills, g.seed), g.seed, g.done) })

	all, work := errgroup.WithContext(ctx)
	all.Go(func() error {
		err := g.producers.run(work, g.messages, g.seed)
		g.written.Store(true)
		return err
	})
	all.Go(func() error { return g.repeat(work) })
	if err := all.Wait(); err != nil {
		return err
	}
	if err := g.settle(ctx); err != nil {
		return err
	}
	stopKilling()
	kills.Wait()
	return g.settle(ctx) // the last kill may have left something
}

// settle waits until the subscribers have settled all that the broker holds.
func (g *game) settle(ctx context.Context) error {
	tick := time.NewTicker(50 * time.Millisecond)
	defer tick.Stop()
	for {
		settled, err := g.stage.sight.settled(ctx)
		if settled || err != nil {
			return err
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
}

// done returns the share of a role's work that is done.
func (g *game) done(role string) float64 {
	if role == roleDispatcher {
		return float64(g.tally.arrived.Load()) / float64(g.messages)
	}
	return float64(g.crew.said(sayEffect)) / float64(g.messages*len(subscribers))
}

// repeat reads what the broker holds as it grows and stores two more copies of every
// third message, one at once and one later. It returns when all messages have
// arrived and all copies are stored.
func (g *game) repeat(ctx context.Context) error {
	reading, stop := context.WithCancel(ctx)
	defer stop()
	go func() {
		defer stop()
		until(reading, func() bool { return g.written.Load() && g.tally.arrived.Load() >= g.tally.committed.Load() })
	}()
	rng := rand.New(rand.NewPCG(g.seed, 0xc0b7))
	seen := map[string]bool{}
	var later []record
	var failed error
	again := func(r record) {
		if failed = r.repeat(ctx); failed == nil {
			g.tally.repeated.Add(1)
		}
	}
	err := g.stage.sight.read(reading, func(r record) bool {
		if seen[r.id] {
			return true
		}
		seen[r.id] = true
		g.tally.arrived.Add(1)
		if rng.IntN(3) == 0 {
			again(r)
			later = append(later, r)
		}
		if len(later) > 0 && rng.IntN(4) == 0 && failed == nil {
			i := rng.IntN(len(later))
			again(later[i])
			later[i] = later[len(later)-1]
			later = later[:len(later)-1]
		}
		return failed == nil
	})
	for _, r := range later {
		if err == nil && failed == nil && ctx.Err() == nil {
			again(r)
		}
	}
	return errors.Join(err, failed, ctx.Err())
}

// watch shows the progress, and cancels when there is none.
func (g *game) watch(ctx context.Context, cancel context.CancelCauseFunc) {
	timer := time.NewTimer(g.screen.pace())
	defer timer.Stop()
	var last string
	moved := time.Now()
	for {
		select {
		case <-ctx.Done():
			return
		case <-timer.C:
		}
		begun := time.Now()
		now := g.show(ctx)
		if now != last {
			last, moved = now, time.Now()
		}
		if time.Since(moved) > g.timeout {
			cancel(errStalled)
			return
		}
		timer.Reset(max(g.screen.pace(), 20*time.Since(begun))) // counting rows takes time when there are many
	}
}

// show puts the progress on the screen and returns it.
func (g *game) show(ctx context.Context) string {
	var effects int64
	if err := g.stage.pool.QueryRow(ctx, `SELECT count(*) FROM quickstart.effects`).Scan(&effects); err != nil {
		return "" // whoever needs the database more will report it
	}
	progress := fmt.Sprintf("written %s  published %s  effects %s  duplicates %s",
		grouped(g.tally.committed.Load()), grouped(g.tally.arrived.Load()), grouped(effects), grouped(g.crew.said(sayDuplicate)))
	g.screen.update("%s", progress)
	return progress
}
