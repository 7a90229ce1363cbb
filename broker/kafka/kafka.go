// Package kafka publishes Postroom's messages to Kafka and delivers them from there.
// It stands on the lower level of segmentio/kafka-go.
//
//	bus, err := kafka.Open(ctx, brokers, kafka.Config{})
//	d, err := dispatcher.New(pool, bus, dispatcher.Config{})
//	c, err := inbox.New(pool, bus, "billing", "orders", handle, inbox.Config{})
//
// Topics are made by whoever runs the brokers, never by this package, also where
// the brokers make topics by themselves.
//
// # Publishing
//
// A message counts as stored when all in-sync replicas have acknowledged its
// batch; nothing less is offered. Nothing waits for a batch to fill: what a call
// holds goes out at once, one request for each leader with one batch for each of
// its partitions, and the next batch of a partition after the former's answer.
//
// Kafka stores or rejects a batch as a whole. When one fails, the first message
// of each of its keys is Unreachable, the others of the key NotTried although
// they were sent in that batch, and what the call holds for the partition beyond
// it is NotTried and was not sent.
//
// A batch that met a broken connection is sent once more, and one whose leader
// has moved three times more within a moment, each time after the cluster's
// layout was read anew. So a record may stand in the log twice, with the same id.
//
// A record whose size, headers included, exceeds the topic's max.message.bytes
// is Refused alone and not sent. Where compression is on it is sent in a batch
// of its own and the broker decides, since the limit holds for compressed
// batches. So it does where this program may not read the limit, which takes the
// permission to describe the topic's configuration.
//
// # Subscribing
//
// A partition's offset is committed up to its first unsettled message and no
// further, a moment after that was settled, and when the group is divided anew or
// left; it never goes back. Messages that were settled behind it come again after a
// crash. Config.MaxAhead bounds how many.
//
// A message given back by Retry holds up those behind it in its partition that have
// not been handed over. Deliveries are not counted.
//
// Partitions are handed over in turns. Where a subscription may have four messages in
// flight for each of its partitions, or more, one place is kept for each partition
// that has none, so that a slow one does not stop the others.
//
// Records of aborted transactions and transaction markers are never handed over,
// and an open transaction holds up what lies behind it, unless
// Config.ReadUncommitted is set.
//
// Members divide a topic's partitions evenly and keep what they have where they
// can; handlers go on meanwhile. Only members that divide alike can share a group:
// to move a group here from another client, stop its members first; its offsets are
// taken over. A member that is silent for Config.SessionTimeout loses its partitions:
// Lost is closed and settling a delivery is [broker.ErrLost]. A silent coordinator
// does the same, since it may have given them to others.
//
// Where the broker does not hold the group's offset, because the log was cut or made
// anew, its first message is taken: messages may come again, and none is passed
// over. A partition without an offset begins at its first message too. A topic that
// was deleted is read from its start when it is made anew, provided that it was away
// for three heartbeats at least: one that takes its place at once cannot be told
// from it, so stop the subscribers first.
//
// A record that the client cannot decode, one with a wrong checksum say, stops its
// partition and is told to Trouble until the log no longer holds it.
//
// # Security
//
// TLS, SASL and both; credentials are asked for on every connection, so that they
// may change while the program runs. A broker that does not let this program in is
// away: messages are Unreachable, with an error that says what was not taken.
//
// # On the wire
//
// The record's key is the key, null where there is none, and its value the
// payload, null where that is nil. Before the message's own headers, which keep
// their order, stand
//
//	postroom-id         the message's id
//	postroom-time       Time, RFC 3339 with microseconds, where it is set
//	postroom-operation  Operation, where there is one
//
// The record's own timestamp is the time of publishing.
package kafka

import (
	"cmp"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"slices"
	"sync"
	"time"

	kafkago "github.com/segmentio/kafka-go"
	"github.com/segmentio/kafka-go/sasl"

	"github.com/postroom/postroom/broker"
)

// Config adjusts a [Bus]. The zero value of each field selects the default that
// its comment names.
type Config struct {
	// TLS is used for every connection; it is cloned. Where its ServerName is
	// empty the broker's host is expected. See [ClientCertificate] for client
	// certificates that are renewed on disk. Default: no TLS.
	TLS *tls.Config

	// SASL returns the mechanism, with its credentials, that authenticates one
	// connection. It is called for each, from several goroutines, so credentials
	// may change at any time:
	//
	//	SASL: func(context.Context) (sasl.Mechanism, error) {
	//		return scram.Mechanism(scram.SHA512, user, currentPassword())
	//	},
	//
	// It must return soon after ctx ends. What its error says goes into results
	// and logs. Default: no authentication.
	SASL func(ctx context.Context) (sasl.Mechanism, error)

	// Dial opens connections. Default: a [net.Dialer].
	Dial func(ctx context.Context, network, address string) (net.Conn, error)

	// DialTimeout bounds opening a connection to one broker, TLS and
	// authentication included. Default 5s, at least 10ms.
	DialTimeout time.Duration

	// ClientID names this program in the brokers' logs and quotas. Default
	// "postroom".
	ClientID string

	// Balancer chooses the partition of each message. It is given topic and
	// key, nil where there is none, and must always give the same partition for
	// the same key, topic and partitions, else the key has no order. It is
	// shared by all topics and called from several goroutines.
	//
	// Default: keys by murmur2 as Kafka's Java client does, messages without a
	// key in turns.
	Balancer kafkago.Balancer

	// Compression of batches. Default none.
	Compression kafkago.Compression

	// PublishTimeout bounds one request and its answer. Default 10s, at least
	// 10ms.
	PublishTimeout time.Duration

	// BatchBytes is the most bytes of one batch before compression, where the
	// topic's max.message.bytes is not less. A larger record goes alone.
	// Default 1 MiB, at least 1 KiB.
	BatchBytes int

	// RequestBytes is the most bytes of one request; one batch is always sent.
	// Default 16 MiB, at least 1 KiB.
	RequestBytes int

	// SessionTimeout is how long a member of a group may be silent before its
	// partitions go to others. Brokers allow 6s to 30m unless they are set
	// otherwise. Default 10s, at least 1s.
	SessionTimeout time.Duration

	// PrefetchBytes is how much a subscription keeps fetched ahead of delivery,
	// apart from one record for each partition, which is taken whatever its
	// size. Default 16 MiB, at least 1 KiB.
	PrefetchBytes int

	// MaxAhead is how many messages of a partition are handed over from the
	// first unsettled one on: what a message that takes long may leave to be
	// repeated after a crash. Default 10000, at least 1.
	MaxAhead int

	// ReadUncommitted hands over messages of transactions that are open or were
	// aborted. Default: they are held back until the transaction is committed.
	ReadUncommitted bool

	// Logger receives warnings about limits that could not be read and offsets
	// that the broker does not hold. Default slog.Default().
	Logger *slog.Logger
}

func (c Config) withDefaults(brokers []string) (Config, error) {
	c.DialTimeout = cmp.Or(c.DialTimeout, 5*time.Second)
	c.ClientID = cmp.Or(c.ClientID, "postroom")
	c.PublishTimeout = cmp.Or(c.PublishTimeout, 10*time.Second)
	c.BatchBytes = cmp.Or(c.BatchBytes, 1<<20)
	c.RequestBytes = cmp.Or(c.RequestBytes, 16<<20)
	c.SessionTimeout = cmp.Or(c.SessionTimeout, 10*time.Second)
	c.PrefetchBytes = cmp.Or(c.PrefetchBytes, 16<<20)
	c.MaxAhead = cmp.Or(c.MaxAhead, 10_000)
	c.Logger = cmp.Or(c.Logger, slog.Default())
	if c.TLS != nil {
		c.TLS = c.TLS.Clone()
	}
	if c.Dial == nil {
		c.Dial = new(net.Dialer).DialContext
	}

	var errs []error
	bad := func(format string, args ...any) {
		errs = append(errs, fmt.Errorf("kafka: "+format, args...))
	}
	if len(brokers) == 0 {
		bad("no broker is given")
	}
	if slices.Contains(brokers, "") {
		bad("a broker's address is empty")
	}
	if d := c.DialTimeout; d < 10*time.Millisecond {
		bad("Config.DialTimeout is %v, want at least 10ms", d)
	}
	if d := c.PublishTimeout; d < 10*time.Millisecond {
		bad("Config.PublishTimeout is %v, want at least 10ms", d)
	}
	if n := c.BatchBytes; n < 1<<10 {
		bad("Config.BatchBytes is %d, want at least 1024", n)
	}
	if n := c.RequestBytes; n < 1<<10 {
		bad("Config.RequestBytes is %d, want at least 1024", n)
	}
	if d := c.SessionTimeout; d < time.Second {
		bad("Config.SessionTimeout is %v, want at least 1s", d)
	}
	if n := c.PrefetchBytes; n < 1<<10 {
		bad("Config.PrefetchBytes is %d, want at least 1024", n)
	}
	if n := c.MaxAhead; n < 1 {
		bad("Config.MaxAhead is %d, want at least 1", n)
	}
	if k := c.Compression; k < 0 || k > kafkago.Zstd {
		bad("Config.Compression is %d, want 0 to %d", int(k), int(kafkago.Zstd))
	}
	return c, errors.Join(errs...)
}

// A Bus publishes to one Kafka cluster and subscribes to its topics. It is safe for concurrent use.
type Bus struct {
	cfg    Config
	link   *link
	limits limits
	turn   turns

	mu     sync.Mutex // held to add to calls, and to close
	closed bool
	calls  sync.WaitGroup
}

var _ broker.Publisher = (*Bus)(nil)

// Open connects to the cluster that the brokers at the given addresses
// (host:port) belong to. ctx bounds Open only. It fails where none of them
// answers, or none lets this program in.
func Open(ctx context.Context, brokers []string, cfg Config) (*Bus, error) {
	cfg, err := cfg.withDefaults(brokers)
	if err != nil {
		return nil, err
	}
	b := &Bus{cfg: cfg, link: newLink(brokers, cfg)}
	ctx, cancel := context.WithTimeout(ctx, time.Duration(len(brokers)+1)*cfg.DialTimeout)
	defer cancel()
	if _, err := b.link.metadata(ctx, nil); err != nil {
		_ = b.Close()
		if hungUp(err) && (cfg.TLS == nil || cfg.SASL == nil) {
			err = fmt.Errorf("%w: the broker hung up, as one does that expects TLS or SASL", err)
		}
		return nil, fmt.Errorf("kafka: open: %w", err)
	}
	return b, nil
}

// Close closes all connections. Publish and Subscribe calls that are running return.
// End the context of a Subscribe call first, so that it leaves its group. A second
// Close returns nil.
func (b *Bus) Close() error {
	b.mu.Lock()
	b.closed = true
	b.mu.Unlock()
	b.link.close()
	b.calls.Wait()
	return nil
}

// begin enters a call, unless the bus is closed.
func (b *Bus) begin() bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.closed {
		return false
	}
	b.calls.Add(1)
	return true
}
