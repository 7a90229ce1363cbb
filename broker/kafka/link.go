package kafka

import (
	"context"
	"errors"
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
			return l.dial(ctx, cfg, network, address)
		},
		// For one broker after the other; each has its own DialTimeout.
		DialTimeout: time.Duration(len(brokers)) * cfg.DialTimeout,
		MetadataTTL: metadataTTL,
		ClientID:    cfg.ClientID,
		Context:     ctx,
	}
	return l
}

// dial opens a connection on which requests may be sent.
func (l *link) dial(ctx context.Context, cfg Config, network, address string) (net.Conn, error) {
	ctx, cancel := context.WithTimeout(ctx, cfg.DialTimeout)
	defer cancel()
	c, err := cfg.Dial(ctx, network, address)
	if err != nil {
		return nil, err
	}
	if c, err = l.track(c); err != nil {
		return nil, err
	}
	entered, err := cfg.enter(ctx, c, address)
	if err != nil {
		_ = c.Close()
		return nil, err
	}
	return entered, nil
}

// A conn is a connection of a link.
type conn struct {
	net.Conn
	l *link
}

func (l *link) track(c net.Conn) (net.Conn, error) {
	tracked := &conn{Conn: c, l: l}
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.closed {
		_ = c.Close()
		return nil, net.ErrClosed
	}
	l.conns[tracked] = struct{}{}
	return tracked, nil
}

func (c *conn) Close() error {
	c.l.mu.Lock()
	delete(c.l.conns, c)
	c.l.mu.Unlock()
	return c.Conn.Close()
}

// send sends a request and waits for its answer. ctx must have a deadline.
func (l *link) send(ctx context.Context, req protocol.Message) (protocol.Message, error) {
	m, err := l.transport.RoundTrip(ctx, l.addr, req)
	if notRouted(err) {
		// The transport says so too where no broker answered it, or let it in.
		if _, why := l.metadata(ctx, []string{}); why != nil {
			return nil, why
		}
	}
	return m, err
}

// notRouted reports whether the transport found no broker for a request.
func notRouted(err error) bool {
	return errors.Is(err, protocol.ErrNoTopic) || errors.Is(err, protocol.ErrNoPartition) ||
		errors.Is(err, protocol.ErrNoLeader) || errors.Is(err, kafkago.BrokerNotAvailable)
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
