package nats

import (
	"context"
	"fmt"
	"log/slog"
	"net"
	"regexp"
	"sync"
	"sync/atomic"
	"time"

	natsgo "github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
)

// A link watches over the connection of nats.go, which hides two things: it
// writes and dials under its lock, where no context reaches it, and it tells
// what it lost only through handlers.
type link struct {
	nc   *natsgo.Conn
	up   atomic.Bool
	ctx  context.Context //nolint:containedctx // nats.go dials without one; this ends it
	stop context.CancelFunc

	mu      sync.Mutex
	conns   map[net.Conn]struct{}
	changed chan struct{}     // closed at every change of up
	denied  map[string]denial // subject → when publishing to it was refused
}

type denial struct {
	at  time.Time
	err error
}

// maxDenied bounds the memory for refused subjects.
const maxDenied = 256

// connect opens b's connection.
func (b *Bus) connect(ctx context.Context, url string) error {
	l := &link{conns: make(map[net.Conn]struct{}), changed: make(chan struct{}), denied: make(map[string]denial)}
	l.ctx, l.stop = context.WithCancel(context.Background())
	b.link = l
	options := append([]natsgo.Option{
		natsgo.Timeout(5 * time.Second),
		natsgo.PingInterval(10 * time.Second), // a silent server is noticed after 30 s
		natsgo.ReconnectWait(250 * time.Millisecond),
		natsgo.ReconnectJitter(250*time.Millisecond, 500*time.Millisecond),
		natsgo.FlusherTimeout(10 * time.Second),
	}, b.cfg.Options...)
	options = append(options, b.enforce)

	type opened struct {
		nc  *natsgo.Conn
		err error
	}
	done := make(chan opened, 1)
	go func() {
		nc, err := natsgo.Connect(url, options...)
		done <- opened{nc, err}
	}()
	var o opened
	select {
	case o = <-done:
	case <-ctx.Done():
		o.err = context.Cause(ctx)
		go func() {
			if late := <-done; late.err == nil {
				late.nc.Close()
			}
		}()
	}
	if o.err != nil {
		l.breakAll()
		return fmt.Errorf("nats: connect: %w", o.err)
	}
	b.nc, l.nc = o.nc, o.nc
	for b.nc.IsConnected() && !l.up.Load() { // until its handler has run
		changed := l.changes()
		if l.up.Load() {
			break
		}
		select {
		case <-changed:
		case <-ctx.Done():
			l.close()
			return fmt.Errorf("nats: connect: %w", context.Cause(ctx))
		}
	}
	js, err := jetstream.New(b.nc)
	if err == nil {
		b.js = js
		err = b.flights.open(b)
	}
	if err != nil {
		l.close()
		return fmt.Errorf("nats: connect: %w", err)
	}
	return nil
}

// enforce is the last option: it sets what our promises stand on, and stands
// between nats.go and the caller's handlers.
func (b *Bus) enforce(o *natsgo.Options) error {
	o.AllowReconnect = true
	o.MaxReconnect = -1
	o.IgnoreAuthErrorAbort = true // credentials may be mended while we run
	o.ReconnectBufSize = -1       // it would store later what was reported as failed
	o.ReconnectOnFlusherError = true
	o.NoEcho = false // deliveries are timed by an echo
	o.SkipSubjectValidation = false

	l := b.link
	connected, disconnected := o.ConnectedCB, o.DisconnectedErrCB
	reconnected, failed, closed := o.ReconnectedCB, o.AsyncErrorCB, o.ClosedCB
	oldDisconnected := o.DisconnectedCB
	o.DisconnectedCB = nil // the other has priority and calls it
	o.ConnectedCB = func(nc *natsgo.Conn) {
		l.set(true)
		if connected != nil {
			connected(nc)
		}
	}
	o.ReconnectedCB = func(nc *natsgo.Conn) {
		l.set(true)
		b.cfg.Logger.LogAttrs(l.ctx, slog.LevelInfo, "nats connection is back")
		if reconnected != nil {
			reconnected(nc)
		}
	}
	o.DisconnectedErrCB = func(nc *natsgo.Conn, err error) {
		b.disconnected(err)
		if disconnected != nil {
			disconnected(nc, err)
		} else if oldDisconnected != nil {
			oldDisconnected(nc)
		}
	}
	o.ClosedCB = func(nc *natsgo.Conn) {
		b.disconnected(natsgo.ErrConnectionClosed)
		if closed != nil {
			closed(nc)
		}
	}
	o.AsyncErrorCB = func(nc *natsgo.Conn, sub *natsgo.Subscription, err error) {
		b.asyncError(err)
		if failed != nil {
			failed(nc, sub, err)
		}
	}
	if o.InProcessServer != nil {
		o.InProcessServer = trackedServer{o.InProcessServer, l}
	} else {
		o.CustomDialer = &trackedDialer{custom: o.CustomDialer, net: o.Dialer, timeout: o.Timeout, l: l}
	}
	return nil
}

func (b *Bus) disconnected(err error) {
	if b.link.set(false) && !b.isClosed.Load() {
		b.cfg.Logger.LogAttrs(b.link.ctx, slog.LevelWarn, "nats connection is lost", slog.Any("error", err))
	}
	b.flights.failAll(errDisconnected)
}

var permissionSubject = regexp.MustCompile(`(?i)permissions violation for publish to "([^"]+)"`)

// asyncError handles what the server reports about no request in particular.
// Refused permission is never answered otherwise.
func (b *Bus) asyncError(err error) {
	match := permissionSubject.FindStringSubmatch(err.Error())
	if match == nil {
		return
	}
	l := b.link
	l.mu.Lock()
	if len(l.denied) >= maxDenied {
		clear(l.denied)
	}
	l.denied[match[1]] = denial{time.Now(), err}
	l.mu.Unlock()
	b.flights.failSubject(match[1], err)
}

// deniedSince returns the error by which the server refused publishing to a
// subject for which match holds, at or after t.
func (l *link) deniedSince(t time.Time, match func(subject string) bool) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	for subject, d := range l.denied {
		if !d.at.Before(t) && match(subject) {
			return d.err
		}
	}
	return nil
}

// set records whether the connection stands, and reports a change.
func (l *link) set(up bool) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	if !l.up.CompareAndSwap(!up, up) {
		return false
	}
	close(l.changed)
	l.changed = make(chan struct{})
	return true
}

// changes returns a channel that is closed when the connection is lost or back.
func (l *link) changes() <-chan struct{} {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.changed
}

// close closes the connection without waiting for writes that hang.
func (l *link) close() {
	l.breakAll()
	l.nc.Close()
}

// breakAll ends dialling for good and breaks every network connection.
func (l *link) breakAll() {
	l.stop()
	l.mu.Lock()
	conns := l.conns
	l.conns = nil
	l.mu.Unlock()
	for c := range conns {
		_ = c.Close()
	}
}

// track makes a connection known to breakAll.
func (l *link) track(c net.Conn, err error) (net.Conn, error) {
	if err != nil {
		return nil, err
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.conns == nil {
		_ = c.Close()
		return nil, net.ErrClosed
	}
	l.conns[c] = struct{}{}
	return &trackedConn{Conn: c, l: l}, nil
}

type trackedConn struct {
	net.Conn
	l *link
}

func (c *trackedConn) Close() error {
	c.l.mu.Lock()
	delete(c.l.conns, c.Conn)
	c.l.mu.Unlock()
	return c.Conn.Close()
}

type trackedDialer struct {
	custom  natsgo.CustomDialer
	net     *net.Dialer
	timeout time.Duration
	l       *link
}

func (d *trackedDialer) Dial(network, address string) (net.Conn, error) {
	if d.custom != nil {
		return d.l.track(d.custom.Dial(network, address))
	}
	dialer := net.Dialer{Timeout: d.timeout}
	if d.net != nil {
		dialer = *d.net
	}
	return d.l.track(dialer.DialContext(d.l.ctx, network, address))
}

// SkipTLSHandshake passes on what nats.go asks custom dialers for.
func (d *trackedDialer) SkipTLSHandshake() bool {
	s, ok := d.custom.(interface{ SkipTLSHandshake() bool })
	return ok && s.SkipTLSHandshake()
}

type trackedServer struct {
	natsgo.InProcessConnProvider
	l *link
}

func (s trackedServer) InProcessConn() (net.Conn, error) {
	return s.l.track(s.InProcessConnProvider.InProcessConn())
}

// await runs f, which may hang in nats.go's lock, and waits for it as long as
// ctx lasts. Closing the bus ends f.
func await[T any](ctx context.Context, f func() (T, error)) (T, error) {
	type outcome struct {
		value T
		err   error
	}
	done := make(chan outcome, 1)
	go func() {
		v, err := f()
		done <- outcome{v, err}
	}()
	select {
	case o := <-done:
		return o.value, o.err
	case <-ctx.Done():
		var none T
		return none, context.Cause(ctx)
	}
}
