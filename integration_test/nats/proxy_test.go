package nats_test

import (
	"bufio"
	"bytes"
	"fmt"
	"io"
	"net"
	"strconv"
	"strings"
	"sync"
	"testing"
)

// A frame is one operation of the NATS protocol. Body includes headers and the
// line's end behind it.
type frame struct {
	fromServer bool
	fields     []string // of the line
	body       []byte
}

func (f *frame) op() string { return strings.ToUpper(f.fields[0]) }

// id returns the postroom-id of a message, or "".
func (f *frame) id() string {
	_, rest, ok := bytes.Cut(f.body, []byte("\r\npostroom-id: "))
	if !ok {
		return ""
	}
	id, _, _ := bytes.Cut(rest, []byte("\r\n"))
	return string(id)
}

// A proxy stands before a server and understands its protocol, so that single
// messages can be changed or swallowed.
type proxy struct {
	target   string
	listener net.Listener
	wg       sync.WaitGroup

	mu     sync.Mutex
	change sync.Cond         // stalled has changed
	conns  map[net.Conn]bool // both sides
	filter func(*frame) bool // false: swallow
	stall  bool              // nothing passes, in either direction
	refuse bool              // new connections are closed
}

func newProxy(t testing.TB, target string) *proxy {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	p := &proxy{target: target, listener: l, conns: make(map[net.Conn]bool)}
	p.change.L = &p.mu
	p.wg.Go(p.accept)
	t.Cleanup(func() {
		_ = l.Close()
		p.stalled(false)
		p.refusing(true)
		p.cut()
		p.wg.Wait()
	})
	return p
}

func (p *proxy) url() string { return "nats://" + p.listener.Addr().String() }

// filtered lets f decide about every frame from now on; it may change it. nil:
// everything passes.
func (p *proxy) filtered(f func(*frame) bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.filter = f
}

func (p *proxy) stalled(v bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.stall = v
	p.change.Broadcast()
}

func (p *proxy) refusing(v bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.refuse = v
}

// cut closes every connection.
func (p *proxy) cut() {
	p.mu.Lock()
	defer p.mu.Unlock()
	for c := range p.conns {
		_ = c.Close()
	}
}

func (p *proxy) accept() {
	for {
		client, err := p.listener.Accept()
		if err != nil {
			return
		}
		p.mu.Lock()
		refuse := p.refuse
		p.mu.Unlock()
		if refuse {
			_ = client.Close()
			continue
		}
		server, err := net.Dial("tcp", p.target)
		if err != nil {
			_ = client.Close()
			continue
		}
		p.mu.Lock()
		p.conns[client], p.conns[server] = true, true
		p.mu.Unlock()
		p.wg.Go(func() { p.copy(server, client, false) })
		p.wg.Go(func() { p.copy(client, server, true) })
	}
}

func (p *proxy) copy(dst, src net.Conn, fromServer bool) {
	defer func() {
		_ = dst.Close()
		_ = src.Close()
		p.mu.Lock()
		delete(p.conns, src)
		p.mu.Unlock()
	}()
	in, out := bufio.NewReaderSize(src, 64<<10), bufio.NewWriterSize(dst, 64<<10)
	for {
		line, err := in.ReadString('\n')
		if err != nil {
			return
		}
		f := &frame{fromServer: fromServer, fields: strings.Fields(line)}
		if len(f.fields) == 0 {
			continue
		}
		raw := line
		switch f.op() {
		case "PUB", "HPUB", "MSG", "HMSG":
			n, err := strconv.Atoi(f.fields[len(f.fields)-1])
			if err != nil {
				return
			}
			f.body = make([]byte, n+2)
			if _, err := io.ReadFull(in, f.body); err != nil {
				return
			}
			raw = ""
		}
		p.mu.Lock()
		for p.stall {
			p.change.Wait()
		}
		pass := p.filter == nil || p.filter(f)
		p.mu.Unlock()
		if pass {
			if raw == "" {
				raw = strings.Join(f.fields, " ") + "\r\n"
			}
			_, _ = out.WriteString(raw)
			_, _ = out.Write(f.body)
		}
		if in.Buffered() == 0 {
			if out.Flush() != nil {
				return
			}
		}
	}
}

// once returns a filter that swallows the first frame for which match holds.
func once(match func(*frame) bool) (filter func(*frame) bool, done func() bool) {
	var mu sync.Mutex
	swallowed := false
	return func(f *frame) bool {
			mu.Lock()
			defer mu.Unlock()
			if swallowed || !match(f) {
				return true
			}
			swallowed = true
			return false
		}, func() bool {
			mu.Lock()
			defer mu.Unlock()
			return swallowed
		}
}

func (f *frame) String() string { return fmt.Sprint(f.fields) }
