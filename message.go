// Package postroom holds what every part of Postroom shares: the [Message],
// its identity, the [Operation] that a request or message hands to everything
// it causes, and the verdicts that a handler returns.
//
// Messages are written to the outbox inside a business transaction (package
// outbox), published from there at least once (package dispatcher) and handled
// so that each has its effect exactly once per subscriber (package inbox).
package postroom

import (
	"strings"
	"time"
)

// A Message is the unit that travels: it is written to the outbox, published
// to a topic and handed to subscribers.
//
// Payload, header values, repeated headers and their order reach the subscriber
// as they were given (across different header names NATS keeps no order).
type Message struct {
	// ID identifies the message at every subscriber: a second message with the
	// same ID is a duplicate there and has no effect, whatever its content.
	// Empty: the outbox derives it from the operation in the context, or draws
	// a [NewID] where there is none. At most [MaxIDLen] bytes of printable text.
	ID string

	// Topic is where the message goes: a Kafka topic, or a NATS subject.
	Topic string

	// Key orders: messages of one topic and key keep the order in which their
	// transactions wrote them. Empty means no order, unless EmptyKey is set.
	Key string

	// EmptyKey tells a key that is present and empty from no key at all, which
	// only Kafka can carry apart. It is ignored where Key is not empty.
	EmptyKey bool

	// Payload is carried byte for byte. nil (a Kafka tombstone) and empty are
	// different.
	Payload []byte

	// Headers travel in order and may repeat. Names that begin with
	// "postroom-" or "Nats-" are refused.
	Headers []Header

	// Step names this message among those that one operation writes to one
	// topic and key. It takes the place of their ordinal in a derived ID, for
	// handlers whose repeated run may write in another order. It is not sent.
	Step string

	// DeliverAt in the future delays publishing until then. The zero time means
	// at once. It is not sent.
	DeliverAt time.Time

	// Time is when the message was written, by the database's clock, in
	// microseconds. The outbox ignores what the caller sets.
	Time time.Time

	// Operation is the id of the operation that wrote the message, or empty.
	// The outbox takes it from the context, see [WithOperation].
	Operation string
}

// HasKey reports whether the message has a key, and so a place in an order.
func (m *Message) HasKey() bool { return m.Key != "" || m.EmptyKey }

// Header returns the value of the first header of that name, without regard
// to case, and whether there is one.
func (m *Message) Header(name string) ([]byte, bool) {
	for i := range m.Headers {
		if strings.EqualFold(m.Headers[i].Name, name) {
			return m.Headers[i].Value, true
		}
	}
	return nil, false
}

// A Header is one name and value that travels with a message. A nil value and
// an empty one are different.
type Header struct {
	Name  string
	Value []byte
}
