package inbox_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/postroom/postroom"
	"github.com/postroom/postroom/inbox"
	"github.com/postroom/postroom/internal/pgtest"
)

// proxy stands between a pool and its server.
type proxy struct {
	target   string
	listener net.Listener
	all      sync.WaitGroup

	mu       sync.Mutex
	away     bool
	onCommit func() cut // is asked at every COMMIT; nil: none is cut
	conns    map[net.Conn]bool
	refused  int
}

// cut says when a connection is cut that carries a COMMIT.
type cut int

const (
	never  cut = iota
	before     // the server does not see the COMMIT
	after      // it has executed it, the client does not know
	amid       // it sees the COMMIT, and nobody knows
)

// newProxy returns a pool of size connections to pool's database through a proxy.
func newProxy(t *testing.T, pool *pgxpool.Pool, size int32) (*proxy, *pgxpool.Pool) {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	to := pool.Config().ConnConfig
	p := &proxy{target: fmt.Sprintf("%s:%d", to.Host, to.Port), listener: l, conns: make(map[net.Conn]bool)}
	p.all.Go(p.accept)
	t.Cleanup(func() {
		_ = l.Close()
		p.setAway(true)
		p.all.Wait()
	})
	return p, withPool(t, pool, func(c *pgxpool.Config) {
		c.ConnConfig.Host, c.ConnConfig.Port = "127.0.0.1", uint16(l.Addr().(*net.TCPAddr).Port)
		c.ConnConfig.Fallbacks = nil
		c.MaxConns = size
	})
}

func (p *proxy) accept() {
	for {
		client, err := p.listener.Accept()
		if err != nil {
			return
		}
		p.mu.Lock()
		server, err := net.Dial("tcp", p.target)
		if p.away || err != nil {
			p.refused++
			p.mu.Unlock()
			_ = client.Close()
			if err == nil {
				_ = server.Close()
			}
			continue
		}
		p.conns[client], p.conns[server] = true, true
		p.mu.Unlock()
		hide := &atomic.Bool{} // the answer to a COMMIT
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
		if hide != nil && hide.Load() { // the COMMIT is executed
			return
		}
		var how cut
		if hideAnswer != nil && bytes.Contains(buf[:n], []byte("commit\x00")) {
			how = p.ask()
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

func (p *proxy) ask() cut {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.onCommit == nil {
		return never
	}
	return p.onCommit()
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

func (p *proxy) cutCommits(f func() cut) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.onCommit = f
}

func TestAmbiguousCommit(t *testing.T) {
	pgtest.Each(t, func(t *testing.T, s *pgtest.Server) {
		for how, wantRuns := range map[cut]int32{before: 2, after: 1} {
			t.Run(fmt.Sprint(how), func(t *testing.T) {
				base := newPool(t, s)
				p, pool := newProxy(t, base, 2)
				cuts := 0
				p.cutCommits(func() cut {
					if cuts++; cuts > 1 {
						return never
					}
					return how
				})
				var runs atomic.Int32
				mustHandle(t, pool, "m1", func(ctx context.Context, tx pgx.Tx, m postroom.Message) error {
					runs.Add(1)
					return effect(ctx, tx, m)
				}, inbox.Handled)
				if n := runs.Load(); n != wantRuns {
					t.Errorf("handled %d times, want %d", n, wantRuns)
				}
				wantStrings(t, "effects", effects(t, base), "m1")
			})
		}
	})
}

// Where the lookup cannot be made either, the error says that the call may be
// repeated, and the repeat finds what had become of the COMMIT.
func TestAmbiguousCommitThatCannotBeSettled(t *testing.T) {
	base := newPool(t, pgtest.First(t))
	p, pool := newProxy(t, base, 2)
	p.cutCommits(func() cut {
		p.away = true // p.mu is held
		return after
	})
	_, err := handleOne(t, pool, "m1", effect, inbox.Config{})
	if !errors.Is(err, inbox.ErrTransient) {
		t.Fatalf("Handle = %v, want ErrTransient", err)
	}
	p.cutCommits(nil)
	p.setAway(false)
	mustHandle(t, pool, "m1", effect, inbox.Duplicate)
	wantStrings(t, "effects", effects(t, base), "m1")
}

// Every third COMMIT is cut in one of three ways.
func TestConsumerOverCutCommits(t *testing.T) {
	base := newPool(t, pgtest.First(t))
	p, pool := newProxy(t, base, 5)
	n := 0
	p.cutCommits(func() cut {
		if n++; n%3 != 0 {
			return never
		}
		return before + cut(n/3)%3
	})
	bus, rec := newBus()
	const messages = 90
	for i, id := range ids("m", messages) {
		publish(t, bus, keyed(id, fmt.Sprint(i%8)))
	}
	start(t, pool, rec, effect, inbox.Config{MaxAttempts: 1})
	eventually(t, "all acks", func() bool { return rec.count("ack") == messages })
	if got := query(t, base, `SELECT DISTINCT message_id FROM effects`); len(got) != messages {
		t.Errorf("%d messages have an effect, want %d", len(got), messages)
	}
	if got := effects(t, base); len(got) != messages {
		t.Errorf("%d effects, want %d", len(got), messages)
	}
	wantStrings(t, "dead letters", query(t, base, `SELECT reason FROM postroom.inbox_dead_letters`))
	for k := range 8 {
		got := query(t, base, `SELECT message_id FROM effects WHERE right(message_id, 3)::int % 8 = $1 ORDER BY n`, k)
		for i := 1; i < len(got); i++ {
			if got[i] < got[i-1] {
				t.Errorf("key %d: %q", k, got)
			}
		}
	}
}

func TestDatabaseAwayAndBack(t *testing.T) {
	base := newPool(t, pgtest.First(t))
	p, pool := newProxy(t, base, 5)
	bus, rec := newBus()
	l := &logs{}
	c := start(t, pool, rec, effect, inbox.Config{MaxAttempts: 1, Logger: l.logger()})
	publish(t, bus, message("before"))
	eventually(t, "the first ack", func() bool { return rec.count("ack") == 1 })
	if err := c.Health(); err != nil {
		t.Errorf("Health = %v", err)
	}
	p.setAway(true)
	for _, id := range ids("m", 100) {
		publish(t, bus, message(id))
	}
	eventually(t, "bad health", func() bool { return c.Health() != nil })
	if err := c.Health(); !errors.Is(err, inbox.ErrTransient) {
		t.Errorf("Health = %v, want ErrTransient", err)
	}
	refused := func() int {
		p.mu.Lock()
		defer p.mu.Unlock()
		return p.refused
	}
	eventually(t, "several looks", func() bool { return refused() > 10 })
	begin := time.Now()
	eventually(t, "20 more", func() bool { return refused() > 30 })
	if d := time.Since(begin); d < 100*time.Millisecond { // 20 times 25ms, on average
		t.Errorf("20 looks within %v", d)
	}
	if n := strings.Count(l.String(), "level=WARN"); n > refused() {
		t.Errorf("%d warnings for %d looks", n, refused())
	}
	if n := rec.count("ack") + rec.count("retry"); n != 1 {
		t.Errorf("%d deliveries were settled while the database was away", n-1)
	}
	p.setAway(false)
	eventually(t, "all acks", func() bool { return rec.count("ack") == 101 })
	if err := c.Health(); err != nil {
		t.Errorf("Health = %v after the outage", err)
	}
	if n := len(effects(t, base)); n != 101 {
		t.Errorf("%d effects, want 101", n)
	}
	if n := strings.Count(l.String(), "database back"); n == 0 || n > 5 {
		t.Errorf("the log says %d times that the database is back", n)
	}
	wantStrings(t, "dead letters", query(t, base, `SELECT reason FROM postroom.inbox_dead_letters`))
}

// A stop while the database is away gives everything back.
func TestStopWhileTheDatabaseIsAway(t *testing.T) {
	base := newPool(t, pgtest.First(t))
	p, pool := newProxy(t, base, 5)
	p.setAway(true)
	bus, rec := newBus()
	for _, id := range ids("m", 20) {
		publish(t, bus, message(id))
	}
	c := start(t, pool, rec, effect, inbox.Config{})
	eventually(t, "bad health", func() bool { return c.Health() != nil })
	if err := c.stop(); err != nil {
		t.Errorf("Run = %v", err)
	}
	if n := rec.count("retry"); n != 20 || rec.count("ack") != 0 {
		t.Errorf("%d messages were given back, %d acknowledged, want 20 and none", n, rec.count("ack"))
	}
	if err := c.Health(); err != nil {
		t.Errorf("Health = %v after the end", err)
	}
	p.setAway(false)
	start(t, pool, rec, effect, inbox.Config{})
	eventually(t, "all acks", func() bool { return rec.count("ack") == 20 })
}
