// Package franz publishes Postroom's messages to Kafka and delivers them from
// there, by franz-go. It is the adapter for those who want idempotent
// publishing or have franz-go in their program; what it writes and reads on the
// wire is the same as package kafka's.
//
//	bus, err := franz.Open(ctx, brokers, franz.Config{})
//	d, err := dispatcher.New(pool, bus, dispatcher.Config{})
//	c, err := inbox.New(pool, bus, "billing", "orders", bill, inbox.Config{})
//
// Topics are made by whoever runs the brokers, never by this package, also where
// the brokers make topics by themselves.
//
// # Publishing
//
// A message counts as stored when all in-sync replicas have acknowledged its
// batch; nothing less is offered. Nothing waits for a batch to fill: what a call
// holds goes out at once.
//
// Each call has a franz-go client for itself while it runs, which is kept for a
// later call. A client that several calls share would break the order: where one
// call's batch fails, franz-go fails whatever else is buffered for the
// partition, but not what another goroutine adds a moment later, which may be
// the next message of the same key. So there are as many clients as there were
// calls at a time, each with its connections and its idempotent producer. Within
// a call, all is buffered before the first record is sent.
//
// The producer sends a batch again whose answer was lost, and the broker stores
// it once. Only what a call leaves behind undecided at its end, and the caller
// publishes again, may stand in the log twice, with the same id.
//
// Kafka stores or rejects a batch as a whole. When one fails, the first message
// of each of its keys is Unreachable, the others of the key NotTried, and so is
// what the call holds for the partition beyond it.
//
// A record that exceeds the topic's max.message.bytes, headers included, is
// Refused alone and not sent. Its size before compression counts.
//
// # Subscribing
//
// Each Subscribe call is one member of a consumer group, on a client of its own.
// Members share a topic's partitions by the cooperative sticky assignor. Those of
// package kafka do so in another way and cannot be in the same group at the same
// time; where one has stopped, the other goes on.
//
// A partition that another member is to have is given away when what is delivered
// of it is settled, and after SessionTimeout in any case; it is then lost.
//
// Offsets are committed soon after messages are settled, of each partition up to
// the first one that is not. So a crash repeats what was settled behind it. A
// message that is given back is delivered again by the same member when its delay
// has passed, unless it has lost the partition; messages behind it go on.
//
// Messages that retention removed before they were delivered are reported to
// Trouble, and delivery goes on with the first that there is. It never jumps to
// the end.
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
package franz

import (
	"context"
	"errors"
	"fmt"
	"sync"

	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/postroom/postroom/broker"
)

// A Bus publishes to one Kafka cluster and subscribes to its topics. It is safe
// for concurrent use.
type Bus struct {
	cfg     Config
	brokers []string
	control *kgo.Client // asks questions; publishes and consumes nothing
	limits  limits
	senders senders

	closing chan struct{} // closed by Close
	mu      sync.Mutex    // held to add to calls, and to close
	closed  bool
	calls   sync.WaitGroup
}

var (
	_ broker.Publisher  = (*Bus)(nil)
	_ broker.Subscriber = (*Bus)(nil)
)

// Open connects to the cluster that the brokers at the given addresses
// (host:port) belong to. ctx bounds Open only. It fails where none of them
// answers, or none lets this program in.
func Open(ctx context.Context, brokers []string, cfg Config) (*Bus, error) {
	cfg, err := cfg.withDefaults(brokers)
	if err != nil {
		return nil, err
	}
	b := &Bus{cfg: cfg, brokers: brokers, closing: make(chan struct{})}
	if b.control, err = b.client(); err != nil {
		return nil, fmt.Errorf("franz: open: %w", err)
	}
	ctx, cancel := context.WithTimeout(ctx, 2*cfg.DialTimeout)
	defer cancel()
	if err := b.control.Ping(ctx); err != nil {
		b.control.Close()
		return nil, fmt.Errorf("franz: open: %w", err)
	}
	return b, nil
}

// Close closes all connections. Publish and Subscribe calls that are running
// return; what they had delivered and is not settled is lost, and comes again. A
// second Close returns nil.
func (b *Bus) Close() error {
	b.mu.Lock()
	if !b.closed {
		b.closed = true
		close(b.closing)
	}
	b.mu.Unlock()
	b.calls.Wait()
	b.senders.close()
	b.control.Close()
	return nil
}

var errClosed = fmt.Errorf("franz: %w", broker.ErrClosed)

// begin enters a call, unless the bus is closed. The context it returns ends
// with the bus too. The caller calls done in the end.
func (b *Bus) begin(ctx context.Context) (_ context.Context, done func(), ok bool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.closed {
		return ctx, nil, false
	}
	b.calls.Add(1)
	ctx, cancel := context.WithCancelCause(ctx)
	over := make(chan struct{})
	go func() {
		defer b.calls.Done()
		select {
		case <-b.closing:
			cancel(errClosed)
			<-over
		case <-over:
			cancel(nil)
		}
	}()
	return ctx, func() { close(over) }, true
}

// cause is why ctx ended, with what was known to be wrong before.
func cause(ctx context.Context, last error) error {
	why := context.Cause(ctx)
	if last != nil && !errors.Is(why, broker.ErrClosed) {
		return fmt.Errorf("%w (%w)", why, last)
	}
	return why
}
