package outbox_test

import (
	"context"
	"io"
	"net"
	"net/url"
	"strconv"
	"strings"
	"sync"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
)

// hook watches the statements of a pool, told apart by a part of their text.
type hook struct {
	// before, where set, runs before a statement is sent; where it returns
	// false the statement fails.
	before func(sql string) bool

	// after, where set, runs when a statement has ended.
	after func(sql string)

	mu     sync.Mutex
	counts map[string]int
}

type hookKey struct{}

func (h *hook) TraceQueryStart(ctx context.Context, _ *pgx.Conn, data pgx.TraceQueryStartData) context.Context {
	ctx = context.WithValue(ctx, hookKey{}, data.SQL)
	if h.before != nil && !h.before(data.SQL) {
		var cancel context.CancelFunc
		ctx, cancel = context.WithCancel(ctx)
		cancel()
	}
	return ctx
}

func (h *hook) TraceQueryEnd(ctx context.Context, _ *pgx.Conn, _ pgx.TraceQueryEndData) {
	sql, _ := ctx.Value(hookKey{}).(string)
	h.mu.Lock()
	if h.counts == nil {
		h.counts = map[string]int{}
	}
	h.counts[sql]++
	h.mu.Unlock()
	if h.after != nil {
		h.after(sql)
	}
}

// ended returns how many statements that contain part have ended.
func (h *hook) ended(part string) (n int) {
	h.mu.Lock()
	defer h.mu.Unlock()
	for sql, count := range h.counts {
		if strings.Contains(sql, part) {
			n += count
		}
	}
	return n
}

func (h *hook) watch(cfg *pgxpool.Config) { cfg.ConnConfig.Tracer = h }

// Parts of the dispatcher's statements by which a hook knows them.
const (
	pollPart   = "pg_snapshot_xmax(l.until)"
	beginPart  = "pg_current_xact_id_if_assigned() IS NULL"
	boundsPart = "AS low"
	behindPart = "AS k(topic, key)"
)

// relay is a TCP proxy whose target can be changed, as the address of a
// database is that fails over.
type relay struct {
	listener net.Listener

	mu     sync.Mutex
	target string // host:port; empty: nobody is there
	conns  map[net.Conn]bool
}

func startRelay(t testing.TB, u string) *relay {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	r := &relay{listener: l, target: hostOf(t, u), conns: map[net.Conn]bool{}}
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			go r.serve(c)
		}
	}()
	t.Cleanup(func() {
		_ = l.Close()
		r.lead("")
	})
	return r
}

func hostOf(t testing.TB, u string) string {
	t.Helper()
	parsed, err := url.Parse(u)
	if err != nil {
		t.Fatal(err)
	}
	return parsed.Host
}

// through returns u with the relay in the place of its server.
func (r *relay) through(t testing.TB, u string) string {
	t.Helper()
	parsed, err := url.Parse(u)
	if err != nil {
		t.Fatal(err)
	}
	parsed.Host = r.listener.Addr().String()
	return parsed.String()
}

// lead cuts all connections and leads new ones to target.
func (r *relay) lead(target string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.target = target
	for c := range r.conns {
		_ = c.Close()
	}
	clear(r.conns)
}

func (r *relay) serve(c net.Conn) {
	defer c.Close()
	r.mu.Lock()
	target := r.target
	r.mu.Unlock()
	if target == "" {
		return
	}
	s, err := net.Dial("tcp", target)
	if err != nil {
		return
	}
	defer s.Close()
	r.mu.Lock()
	if r.target != target {
		r.mu.Unlock()
		return
	}
	r.conns[c], r.conns[s] = true, true
	r.mu.Unlock()
	done := make(chan struct{})
	go func() {
		_, _ = io.Copy(s, c)
		_ = s.Close()
		close(done)
	}()
	_, _ = io.Copy(c, s)
	_ = c.Close()
	<-done
	r.mu.Lock()
	delete(r.conns, c)
	delete(r.conns, s)
	r.mu.Unlock()
}

func parsePort(s string) uint16 {
	n, err := strconv.ParseUint(s, 10, 16)
	if err != nil {
		panic(err)
	}
	return uint16(n)
}
