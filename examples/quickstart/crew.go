package main

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os/exec"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sync/errgroup"
)

// An assignment is what a worker process is told on its standard input, before
// its orders.
type assignment struct {
	DatabaseURL string
	Route       route
	Subscriber  string // of a consumer
	Seed        uint64
	Break       string
}

// The orders a worker takes, one a line. When its input ends, so does it.
const (
	orderStop = "stop" // finish what you have and end
	orderDie  = "die"  // end in the next moment that matters, see probe
)

// A crew keeps worker processes running: whoever is killed is replaced.
type crew struct {
	program string // this program
	base    assignment
	tally   *tally
	event   func(format string, args ...any)

	workers  []*worker
	stopping atomic.Bool
	overdue  atomic.Bool // stop was asked for long ago
}

// A worker is a place in the crew, held by one process after the other.
type worker struct {
	name, role, subscriber string

	counts [256]atomic.Int64 // what its processes said, by the byte
	active atomic.Int64      // when they last said something, in ns
	ended  atomic.Int64      // how many of them have ended

	mu      sync.Mutex
	process *exec.Cmd // nil between two of them
	orders  io.WriteCloser
}

func newCrew(program string, base assignment, tally *tally, event func(string, ...any)) *crew {
	c := &crew{program: program, base: base, tally: tally, event: event}
	for i := range 2 {
		c.workers = append(c.workers, &worker{name: fmt.Sprintf("dispatcher %d", i+1), role: roleDispatcher})
	}
	for _, s := range subscribers {
		c.workers = append(c.workers, &worker{name: "subscriber " + s, role: roleConsumer, subscriber: s})
	}
	return c
}

// run keeps every place filled until stop is called or ctx ends.
func (c *crew) run(ctx context.Context) error {
	g, ctx := errgroup.WithContext(ctx)
	for _, w := range c.workers {
		g.Go(func() error {
			for !c.stopping.Load() && ctx.Err() == nil {
				if err := c.fill(ctx, w); err != nil {
					return fmt.Errorf("%s: %w", w.name, err)
				}
			}
			return nil
		})
	}
	return g.Wait()
}

// fill runs one process in w's place until it ends. It returns an error if
// that was neither asked for nor a kill.
func (c *crew) fill(ctx context.Context, w *worker) error {
	cmd := exec.CommandContext(ctx, c.program, w.role)
	cmd.WaitDelay = 5 * time.Second
	output := &tail{}
	cmd.Stderr = output
	orders, err := cmd.StdinPipe()
	if err != nil {
		return err
	}
	said, err := cmd.StdoutPipe()
	if err != nil {
		return err
	}
	if err := cmd.Start(); err != nil {
		return err
	}
	told := c.base
	told.Subscriber = w.subscriber
	err = json.NewEncoder(orders).Encode(told)
	w.take(cmd, orders)
	if c.stopping.Load() {
		w.order(orderStop) // stop may have come too early for this process
	}
	c.listen(w, said)
	w.take(nil, nil)
	err = errors.Join(err, cmd.Wait())
	w.ended.Add(1)
	switch {
	case ctx.Err() != nil:
		return nil
	case cmd.ProcessState.ExitCode() == -1 && !c.overdue.Load(): // by a signal
		c.tally.kills.Add(1)
		return nil
	case c.stopping.Load() && err == nil:
		return nil
	case err == nil:
		err = errors.New("ended without having been asked to")
	}
	return fmt.Errorf("%w\n%s", err, output)
}

// listen counts what a process says until it ends.
func (c *crew) listen(w *worker, said io.Reader) {
	r := bufio.NewReader(said)
	for {
		what, err := r.ReadByte()
		if err != nil {
			return // the process has ended
		}
		w.counts[what].Add(1)
		w.active.Store(time.Now().UnixNano())
	}
}

func (w *worker) take(process *exec.Cmd, orders io.WriteCloser) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.process, w.orders = process, orders
}

// order tells the process in w's place what to do, if there is one.
func (w *worker) order(what string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.orders != nil {
		_, _ = io.WriteString(w.orders, what+"\n") // a process that has just ended needs no orders
	}
}

// kill sends SIGKILL to the process in w's place.
func (w *worker) kill() {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.process != nil {
		_ = w.process.Process.Kill() // it may have just ended
	}
}

// said adds up what all workers said of something.
func (c *crew) said(what byte) (n int64) {
	for _, w := range c.workers {
		n += w.counts[what].Load()
	}
	return n
}

// stop asks every process to finish what it has; run then returns, with an
// error if one of them cannot be stopped.
func (c *crew) stop() {
	c.stopping.Store(true)
	for _, w := range c.workers {
		w.order(orderStop)
	}
	time.AfterFunc(15*time.Second, func() {
		c.overdue.Store(true)
		for _, w := range c.workers {
			w.kill()
		}
	})
}

// A tail keeps the end of what is written to it.
type tail struct {
	mu   sync.Mutex
	kept []byte
}

func (t *tail) Write(p []byte) (int, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.kept = append(t.kept, p...)
	if n := len(t.kept) - 4096; n > 0 {
		t.kept = t.kept[n:]
	}
	return len(p), nil
}

func (t *tail) String() string {
	t.mu.Lock()
	defer t.mu.Unlock()
	return string(t.kept)
}
