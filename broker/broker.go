// Package broker holds the contracts between Postroom and a message broker:
// what a [Publisher] promises to the dispatcher and a [Subscriber] to the
// inbox. Package brokertest checks an implementation against every promise.
//
// Adapters know nothing of PostgreSQL. What they must keep is written for
// their authors, on the interfaces.
package broker

import (
	"context"
	"errors"
	"time"

	"github.com/postroom/postroom"
)

var (
	// ErrClosed is returned, possibly wrapped, by a call on something closed.
	ErrClosed = errors.New("broker: closed")

	// ErrLost is returned, possibly wrapped, when a [Delivery] is settled that
	// the broker has meanwhile given, or may give, to another member of the
	// group. The message will be delivered again.
	ErrLost = errors.New("broker: delivery lost")
)

// A Publisher stores messages at a broker.
//
// Implementations are safe for concurrent use.
type Publisher interface {
	// Publish sends msgs and returns one [Result] for each, in their order,
	// also for no messages at all. It returns when every result is known, and
	// no later than a moment after ctx ends: what is undecided then is
	// Unreachable. What ctx has cut off may still be stored later, as a repeat.
	//
	// Stored is said only after the broker acknowledged that very message.
	//
	// Order: of one topic and key, a message is never stored after an earlier
	// one of the same call failed; it comes back as NotTried. This holds for
	// what the call has in flight too, so it waits where the broker could
	// store a later one first. The caller has at most one call outstanding
	// that holds messages of the same topic and key.
	//
	// A message that fails delays no message of another key.
	//
	// Publish must not keep or change msgs or what they point to after it
	// returns, and adds nothing to a topic's name or its existence: a topic
	// that the broker does not know is Unreachable, and is not made.
	Publish(ctx context.Context, msgs []postroom.Message) []Result

	// Close releases what the publisher holds. Publish calls that are running
	// return; later ones report ErrClosed. A second Close returns nil.
	Close() error
}

// Outcome says what became of one message of a Publish call.
type Outcome uint8

// The zero Outcome is NotTried, so that a result that was never filled in is
// not taken for a stored message.
const (
	// NotTried: a message before it of the same topic and key failed in this
	// call, or the call ended before its turn. It was not sent.
	NotTried Outcome = iota

	// Stored: the broker has acknowledged it.
	Stored

	// Refused: the broker will never take this message as it is (too large, an
	// invalid topic name). A retry is useless.
	Refused

	// Unreachable: nothing is wrong with the message. The broker, the topic or
	// its leader is away, full, unknown, forbidden, or did not answer in time.
	// It may have been stored nevertheless.
	Unreachable
)

func (o Outcome) String() string {
	switch o {
	case NotTried:
		return "not tried"
	case Stored:
		return "stored"
	case Refused:
		return "refused"
	case Unreachable:
		return "unreachable"
	}
	return "unknown"
}

// A Result is the outcome of one message.
type Result struct {
	Outcome Outcome

	// Err is the reason where the outcome is Refused or Unreachable, with the
	// broker's own error code in its text. It holds no payload, key or header.
	Err error

	// Scope names the part of the broker that is away when the outcome is
	// Unreachable and other parts may work: a topic, or a topic and partition
	// as "topic/3". Empty means the whole broker, or unknown.
	Scope string
}

// A Subscriber delivers the messages of a topic to groups of consumers.
//
// Implementations are safe for concurrent use.
type Subscriber interface {
	// Subscribe joins s.Group on s.Topic and calls deliver with one message
	// after the other, until ctx ends; it then fetches no more, waits until
	// every delivery is settled or lost, leaves the group and returns nil. A
	// new group starts at the first message that the broker holds.
	//
	// deliver is called from one goroutine at a time. At most s.MaxInFlight
	// deliveries are unsettled, so a caller that queues as many never blocks
	// it. Deliveries of one topic and key come in the order in which the
	// broker stored them; a repeat may come late.
	//
	// Connection loss, a restarted server, a deleted consumer or group are
	// repaired with backoff and reported to s.Trouble. Subscribe returns an
	// error only for what a person must mend: no such topic at start, access
	// refused, settings that would lose messages.
	Subscribe(ctx context.Context, s Subscription, deliver func(Delivery)) error
}

// A Subscription says what to deliver.
type Subscription struct {
	// Group shares the topic's messages among its members; each group gets all.
	Group string

	// Topic is the one topic to deliver.
	Topic string

	// MaxInFlight bounds the deliveries that are unsettled at a time, and the
	// adapter's memory with it. At least 1.
	MaxInFlight int

	// Trouble is told why messages have stopped coming, and nil when they may
	// come again. nil: not wanted. It must not block.
	Trouble func(error)
}

// A Delivery is one message on its way to a handler. The receiver settles it
// exactly once, by Ack or Retry. Until then the adapter keeps it alive: it
// extends the broker's deadline and moves no offset past it.
type Delivery interface {
	// Message returns the message, whose contents belong to the receiver. Its
	// ID is empty where the broker's message names none.
	Message() postroom.Message

	// Position says where the message stands in the broker.
	Position() Position

	// Deliveries returns how often the broker has delivered the message, this
	// time included, or 0 where it does not count.
	Deliveries() int

	// Lost is closed when the message may have been given to another member of
	// the group: a partition was taken away, a deadline passed. Work on it
	// that has not begun must not begin.
	Lost() <-chan struct{}

	// Ack tells the broker that the message is handled, or durably set aside.
	// An error means that it may come again.
	Ack(ctx context.Context) error

	// Retry gives the message back, to be delivered again, to this or another
	// member, after about delay. Messages behind it may overtake it where the
	// broker keeps no order.
	Retry(ctx context.Context, delay time.Duration) error
}

// Position is the place of a message in a broker: the Kafka partition and
// offset, or the JetStream stream's sequence.
type Position struct {
	Topic     string
	Partition int32  // -1 where there are no partitions
	Offset    uint64 // Kafka offset or JetStream stream sequence
}
