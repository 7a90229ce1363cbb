package idempotency_test

import (
	"bytes"
	"fmt"
	"net"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
)

// proxy stands between a pool and its server, and cuts connections at statements.
type proxy struct {
	target string
	all    sync.WaitGroup

	mu    sync.Mutex
	away  bool
	at    func(statement string) cut // is asked at each part of a statement's text below
	conns map[net.Conn]bool
	left  int // cuts to come, see cutAt
}

// Texts by which the proxy knows statements.
const (
	atClaim    = "WITH old AS MATERIALIZED"
	atTakeOver = "), taken AS ("
	atBegin    = "idle_in_transaction_session_timeout"
	atComplete = "SELECT 1 / count(*) FROM done"
)

// cut says when a connection is cut.
type cut int

const (
	never  cut = iota
	before     // the server does not see the statement
	after      // it has executed it, the client does not know
	amid       // it sees it, and nobody knows
)

// newProxy returns a pool of size connections to pool's database through a proxy.
func newProxy(t *testing.T, pool *pgxpool.Pool, size int32) (*proxy, *pgxpool.Pool) {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	to := pool.Config().ConnConfig
	p := &proxy{target: fmt.Sprintf("%s:%d", to.Host, to.Port), conns: make(map[net.Conn]bool)}
	p.all.Go(func() { p.accept(l) })
	t.Cleanup(func() {
		_ = l.Close()
		p.setAway(true)
		p.all.Wait()
	})
	return p, withPool(t, pool, func(c *pgxpool.Config) {
		c.ConnConfig.Host, c.ConnConfig.Port = "127.0.0.1", uint16(l.Addr().(*net.TCPAddr).Port)
		c.ConnConfig.Fallbacks = nil
		c.ConnConfig.DefaultQueryExecMode = pgx.QueryExecModeExec // every statement travels as text
		c.MaxConns = size
	})
}

func (p *proxy) accept(l net.Listener) {
	for {
		client, err := l.Accept()
		if err != nil {
			return
		}
		p.mu.Lock()
		server, err := net.Dial("tcp", p.target)
		if p.away || err != nil {
			p.mu.Unlock()
			_ = client.Close()
			if err == nil {
				_ = server.Close()
			}
			continue
		}
		p.conns[client], p.conns[server] = true, true
		p.mu.Unlock()
		hide := &atomic.Bool{} // the answer
		p.all.Go(func() { p.forward(client, server, hide, nil) })
		p.all.Go(func() { p.forward(server, client, nil, hide) })
	}
}

// forward copies from one side to the other until either is closed.
func (p *proxy) forward(from, to net.Conn, hideAnswer, hide *atomic.Bool) {
	defer func() {
		_, _ = from.Close(), to.Close()
		p.mu.Lock()
		delete(p.conns, from)
		p.mu.Unlock()
	}()
	buf := make([]byte, 1<<16)
	for {
		n, err := from.Read(buf)
		if err != nil {
			return
		}
		if hide != nil && hide.Load() { // the statement is executed
			return
		}
		var how cut
		if hideAnswer != nil {
			how = p.ask(buf[:n])
		}
		if how == before {
			return
		}
		if how == after {
			hideAnswer.Store(true)
		}
		if _, err := to.Write(buf[:n]); err != nil || how == amid {
			return
		}
	}
}

func (p *proxy) ask(sent []byte) cut {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, text := range []string{atClaim, atTakeOver, atBegin, atComplete} {
		if p.at != nil && bytes.Contains(sent, []byte(text)) {
			return p.at(text)
		}
	}
	return never
}

func (p *proxy) setAway(away bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.away = away
	if away {
		for c := range p.conns {
			_ = c.Close()
		}
	}
}

// cutAt cuts the next n statements that contain text.
func (p *proxy) cutAt(text string, how cut, n int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.left = n
	p.at = func(s string) cut {
		if s != text || p.left == 0 {
			return never
		}
		p.left--
		return how
	}
}
