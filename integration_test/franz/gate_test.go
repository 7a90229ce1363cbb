package franz_test

import (
	"context"
	"errors"
	"io"
	"net"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"
)

// A gate stands in the connections of a bus, to cut or to stall them.
type gate struct {
	refuse     atomic.Bool
	dropAnswer atomic.Bool // of the next produce request: cut instead
	read       atomic.Int64

	next func(ctx context.Context, network, address string) (net.Conn, error) // how it connects

	mu    sync.Mutex
	conns map[*gated]struct{}
	away  chan struct{} // open while shut
}

func newGate(t testing.TB) *gate {
	g := &gate{conns: make(map[*gated]struct{}), next: new(net.Dialer).DialContext}
	t.Cleanup(g.cut)
	return g
}

var errRefused = errors.New("connection refused by the gate")

func (g *gate) dial(ctx context.Context, network, address string) (net.Conn, error) {
	if g.refuse.Load() {
		return nil, errRefused
	}
	c, err := g.next(ctx, network, address)
	if err != nil {
		return nil, err
	}
	gc := &gated{Conn: c, g: g}
	g.mu.Lock()
	defer g.mu.Unlock()
	g.conns[gc] = struct{}{}
	return gc, nil
}

// shut makes the brokers silent: nothing that is sent arrives, and the
// connections stay.
func (g *gate) shut(shut bool) {
	g.mu.Lock()
	defer g.mu.Unlock()
	switch {
	case shut && g.away == nil:
		g.away = make(chan struct{})
	case !shut && g.away != nil:
		close(g.away)
		g.away = nil
	}
}

func (g *gate) cut() {
	g.mu.Lock()
	defer g.mu.Unlock()
	for c := range g.conns {
		_ = c.Conn.Close()
	}
}

func (g *gate) open() int {
	g.mu.Lock()
	defer g.mu.Unlock()
	return len(g.conns)
}

func (g *gate) silent() bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.away != nil
}

type gated struct {
	net.Conn
	g    *gate
	drop atomic.Bool
}

func (c *gated) Write(p []byte) (int, error) {
	if c.g.silent() {
		return len(p), nil
	}
	// Size, then the api key: 0 is produce.
	if len(p) > 6 && p[4] == 0 && p[5] == 0 && c.g.dropAnswer.CompareAndSwap(true, false) {
		c.drop.Store(true)
	}
	return c.Conn.Write(p)
}

func (c *gated) Read(p []byte) (int, error) {
	n, err := c.Conn.Read(p)
	c.g.read.Add(int64(n))
	if c.drop.Load() && err == nil {
		_ = c.Conn.Close()
		return 0, io.ErrUnexpectedEOF
	}
	return n, err
}

func (c *gated) Close() error {
	c.g.mu.Lock()
	delete(c.g.conns, c)
	c.g.mu.Unlock()
	return c.Conn.Close()
}

// until polls a condition.
func until(t testing.TB, what string, ok func() bool) {
	t.Helper()
	deadline := time.NewTimer(time.Minute)
	defer deadline.Stop()
	tick := time.NewTicker(5 * time.Millisecond)
	defer tick.Stop()
	for !ok() {
		select {
		case <-tick.C:
		case <-deadline.C:
			t.Fatalf("did not come about: %s", what)
		}
	}
}

// firstArrivals drops repeats.
func firstArrivals(ids []string) (first []string) {
	for _, id := range ids {
		if !slices.Contains(first, id) {
			first = append(first, id)
		}
	}
	return first
}
