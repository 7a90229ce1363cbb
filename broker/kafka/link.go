package kafka

import (
	"context"
	"net"
	"sync"
	"time"

	kafkago "github.com/segmentio/kafka-go"
	"github.com/segmentio/kafka-go/protocol"
	"github.com/segmentio/kafka-go/protocol/createtopics"
	"github.com/segmentio/kafka-go/protocol/metadata"
)

// metadataTTL is how old the cluster's layout grows where nothing fails.
const metadataTTL = 15 * time.Second

// A link is the transport, and all its connections, so that they can be closed.
type link struct {
	addr      net.Addr
	transport *kafkago.Transport
	cancel    context.CancelFunc
	done      <-chan struct{}

	mu     sync.Mutex
	conns  map[*conn]struct{}
	closed bool
}

func newLink(brokers []string, cfg Config) *link {
	ctx, cancel := context.WithCancel(context.Background())
	l := &link{
		addr: kafkago.TCP(brokers...), cancel: cancel, done: ctx.Done(), conns: make(map[*conn]struct{}),
	}
	l.transport = &kafkago.Transport{
		Dial: func(ctx context.Context, network, address string) (net.Conn, error) {
			c, err := cfg.Dial(ctx, network, address)
			if err != nil {
				return nil, err
			}
			return l.track(c, time.Now().Add(cfg.DialTimeout))
		},
		DialTimeout: cfg.DialTimeout,
		MetadataTTL: metadataTTL,
		ClientID:    cfg.ClientID,
		TLS:         cfg.TLS,
		SASL:        cfg.SASL,
		Context:     ctx,
	}
	return l
}

// A conn is a connection of a link. The transport takes the deadline away before
// it authenticates; a stalled handshake would then last for ever. So the deadline
// is never taken away: every request brings its own.
type conn struct {
	net.Conn
	l    *link
	open time.Time
}

func (l *link) track(c net.Conn, open time.Time) (net.Conn, error) {
	tracked := &conn{Conn: c, l: l, open: open}
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.closed {
		_ = c.Close()
		return nil, net.ErrClosed
	}
	l.conns[tracked] = struct{}{}
	return tracked, nil
}

func (c *conn) SetDeadline(t time.Time) error {
	if t.IsZero() {
		t = c.open
	}
	return c.Conn.SetDeadline(t)
}

func (c *conn) Close() error {
	c.l.mu.Lock()
	delete(c.l.conns, c)
	c.l.mu.Unlock()
	return c.Conn.Close()
}

// send sends a request and waits for its answer. ctx must have a deadline.
func (l *link) send(ctx context.Context, req protocol.Message) (protocol.Message, error) {
	return l.transport.RoundTrip(ctx, l.addr, req)
}

// metadata returns what is known of the topics; nil asks for all. A failure is
// not remembered: the next call tries anew.
func (l *link) metadata(ctx context.Context, topics []string) (*metadata.Response, error) {
	m, err := l.send(ctx, &metadata.Request{TopicNames: topics})
	if err != nil {
		l.transport.CloseIdleConnections()
		return nil, err
	}
	return m.(*metadata.Response), nil
}

// refresh has the cluster's layout read anew. A request to make no topics does
// that and nothing else.
func (l *link) refresh(ctx context.Context) {
	if _, err := l.send(ctx, &createtopics.Request{TimeoutMs: 1000}); err != nil {
		l.reset()
	}
}

// reset gives up the connections that are idle, which may be dead, and what is
// known of the cluster.
func (l *link) reset() { l.transport.CloseIdleConnections() }

func (l *link) close() {
	l.mu.Lock()
	l.closed = true
	conns := l.conns
	l.conns = make(map[*conn]struct{})
	l.mu.Unlock()
	l.cancel()
	l.transport.CloseIdleConnections()
	for c := range conns {
		_ = c.Conn.Close()
	}
}
