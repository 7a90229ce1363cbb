// Package nats connects Postroom to NATS JetStream.
//
//	bus, err := nats.Open(ctx, url, nats.Config{Topics: []string{"orders"}})
//	d, err := dispatcher.New(pool, bus, dispatcher.Config{})
//	c, err := inbox.New(pool, bus, "billing", "orders", handle, inbox.Config{})
//
// A topic is a subject. The stream that holds it is made by whoever runs the
// servers, never by this package. A consumer is made for each group and topic.
//
// # Publishing
//
// A message counts as stored when the stream that holds its subject has
// acknowledged it with a sequence. Thousands are in flight at a time, of one
// topic and key only one: the next goes out when the former is acknowledged, so
// a single hot key is bound by the round trip. Each message has its own
// deadline. A repeat within the stream's duplicate window is removed by the
// server, by Nats-Msg-Id; a later one is stored again, with the same id.
//
// # What an acknowledgement is worth
//
// A server acknowledges what it has handed to the operating system. With the
// default sync_interval of two minutes, a loss of power on all replicas at once
// loses what was acknowledged since; a stream with one replica needs only one
// machine to fail. Set sync_interval: always, at the cost of throughput, or run
// three replicas in places that do not fail together. For the rest, the
// dispatcher keeps published messages for a time and can publish them again with
// the same ids. Open warns of memory storage and single replicas. The sync
// interval is not visible to a client.
//
// # Subscribing
//
// Group and topic name a durable pull consumer, shared by all members. Its order
// is the stream's as long as nothing goes wrong. A message that was out at a
// member that died comes again after AckWait, and behind newer ones of its key;
// so does one that was given back.
//
// Unsettled deliveries are extended, waiting ones too, and are lost once their
// deadline may have passed. Acks are not confirmed by the server, which would
// cost a round trip each: one that gets lost leads to a repeat. A consumer that
// was deleted is made anew and starts at the first message that the stream holds.
//
// # On the wire
//
// The body is the payload. These headers are ours, in this spelling; they are
// read in any case, and where a name comes several times the exact spelling
// wins, then the first in byte order:
//
//	postroom-id         the message's id. No other header counts as one.
//	Nats-Msg-Id         id and subject, with a space between
//	postroom-key        the key; present and empty where EmptyKey is set
//	postroom-null       "1" where the payload is nil
//	postroom-time       Time, RFC 3339 with microseconds
//	postroom-operation  Operation
//
// Other headers travel under their own names. NATS keeps the order of values of
// one name, but none among names, which arrive sorted. Values that NATS cannot
// carry (control characters, white space at the ends, bytes that are not UTF-8,
// nil, and what begins with "=?") make the message carry postroom-encoded: 1. In
// such a message a value of the form
//
//	=?binary?B?<base64>?=    stands for the bytes
//	=?nil?B??=               stands for no value
//
// and each header whose name cannot travel (no token of RFC 9110, Status,
// Description, Nats-…, the names above, or two names that differ only in case)
// is one header postroom-header: <base64 of the name> <value in that form>.
//
// Messages of other programs are delivered as they are, with no ID unless they
// carry postroom-id.
package nats

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	natsgo "github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/postroom/postroom/broker"
)

// Config adjusts a [Bus]. The zero value of each field selects the default that
// its comment names.
type Config struct {
	// Options go to nats.go: TLS, credentials, names, handlers. What Postroom's
	// promises stand on is set after them: no reconnect buffer, reconnecting
	// for ever, also after authentication errors.
	Options []natsgo.Option

	// Topics are checked by Open: each must belong to a stream that loses
	// nothing by its settings. Others are checked when they are first used.
	Topics []string

	// Partitions spreads topics over subjects: a topic with n partitions uses
	// <topic>.0 to <topic>.<n-1>, by the 32-bit FNV-1a hash of the key, or of
	// the id where there is no key, modulo n. A topic that is not named is one
	// subject, its own name.
	Partitions map[string]int

	// AllowDiscard accepts streams that drop messages which nobody has read:
	// discard policy "old" with a limit on messages or bytes, or retention by
	// interest.
	AllowDiscard bool

	// MaxPending is the most messages in flight to the server, over all calls.
	// Default 4096, at most 65536.
	MaxPending int

	// PublishTimeout is how long to wait for the acknowledgement of one
	// message. Default 5s, at least 10ms.
	PublishTimeout time.Duration

	// AckWait is how long the server waits before it gives an unsettled message
	// to another member, unless it is extended. It is set on consumers that are
	// made; on one that exists, its own holds. Default 30s, at least 100ms.
	AckWait time.Duration

	// MaxAckPending is the most unsettled messages of a group over all its
	// members, those that wait for a delayed retry included. It is set on
	// consumers that are made. Default 10000.
	MaxAckPending int

	// Logger receives warnings about risky streams and lost connections.
	// Default slog.Default().
	Logger *slog.Logger
}

func (c Config) withDefaults() (Config, error) {
	c.Options = slices.Clone(c.Options)
	c.Topics = slices.Clone(c.Topics)
	c.Partitions = maps.Clone(c.Partitions)
	c.MaxPending = cmp.Or(c.MaxPending, 4096)
	c.PublishTimeout = cmp.Or(c.PublishTimeout, 5*time.Second)
	c.AckWait = cmp.Or(c.AckWait, 30*time.Second)
	c.MaxAckPending = cmp.Or(c.MaxAckPending, 10_000)
	c.Logger = cmp.Or(c.Logger, slog.Default())

	var errs []error
	bad := func(format string, args ...any) {
		errs = append(errs, fmt.Errorf("nats: Config."+format, args...))
	}
	if n := c.MaxPending; n < 1 || n > 65536 {
		bad("MaxPending is %d, want 1 to 65536", n)
	}
	if d := c.PublishTimeout; d < 10*time.Millisecond {
		bad("PublishTimeout is %v, want at least 10ms", d)
	}
	if d := c.AckWait; d < 100*time.Millisecond {
		bad("AckWait is %v, want at least 100ms", d)
	}
	if n := c.MaxAckPending; n < 1 {
		bad("MaxAckPending is %d, want at least 1", n)
	}
	for i, topic := range c.Topics {
		if err := checkSubject(topic, i); err != nil {
			bad("Topics: %w", err)
		}
	}
	for _, topic := range slices.Sorted(maps.Keys(c.Partitions)) {
		if err := checkSubject(topic, 0); err != nil {
			bad("Partitions: %w", err)
		}
		if n := c.Partitions[topic]; n < 1 || n > 1024 {
			bad("Partitions[%q] is %d, want 1 to 1024", topic, n)
		}
	}
	for i, o := range c.Options {
		if o == nil {
			bad("Options[%d] is nil", i)
		}
	}
	return c, errors.Join(errs...)
}

// A Bus is a connection to NATS that publishes and subscribes. It is safe for
// concurrent use.
type Bus struct {
	cfg  Config
	nc   *natsgo.Conn
	js   jetstream.JetStream
	link *link

	streams streams
	flights flights

	closed    chan struct{}
	closeOnce sync.Once
	calls     sync.WaitGroup // goroutines of Publish calls
	callsMu   sync.RWMutex   // held to add to calls, and to close
	isClosed  atomic.Bool
}

var (
	_ broker.Publisher  = (*Bus)(nil)
	_ broker.Subscriber = (*Bus)(nil)
)

// Open connects to the servers at url, of which several may be given with
// commas between them, and checks cfg.Topics. ctx bounds Open only.
//
// It fails where no server answers, unless cfg.Options hold
// RetryOnFailedConnect. The error lists every topic that has no stream or an
// unsafe one.
func Open(ctx context.Context, url string, cfg Config) (*Bus, error) {
	cfg, err := cfg.withDefaults()
	if err != nil {
		return nil, err
	}
	b := &Bus{cfg: cfg, closed: make(chan struct{})}
	b.streams.init()
	if err := b.connect(ctx, url); err != nil {
		return nil, err
	}
	if err := b.checkTopics(ctx); err != nil {
		_ = b.Close()
		return nil, err
	}
	return b, nil
}

// checkTopics reports every topic of Config.Topics that cannot be published to.
func (b *Bus) checkTopics(ctx context.Context) error {
	var errs []error
	for _, topic := range b.cfg.Topics {
		for _, subject := range b.subjects(topic) {
			if _, err := b.stream(ctx, subject); err != nil {
				errs = append(errs, fmt.Errorf("nats: topic %q: %w", topic, err))
				if ctx.Err() != nil {
					return errors.Join(errs...)
				}
			}
		}
	}
	return errors.Join(errs...)
}

// Close closes the connection. Publish and Subscribe calls that are running
// return; unsettled deliveries are lost and come again after AckWait. End the
// Subscribe calls by their contexts first to settle them. A second Close
// returns nil.
func (b *Bus) Close() error {
	b.closeOnce.Do(func() {
		b.callsMu.Lock()
		b.isClosed.Store(true)
		close(b.closed)
		b.callsMu.Unlock()
		b.link.close()
		b.calls.Wait()
	})
	return nil
}
