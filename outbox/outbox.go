// Package outbox writes messages in the transaction of the business change that
// they report. A message is published, by package dispatcher, if and only if
// that transaction commits.
//
//	var box outbox.Outbox
//	err := pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
//		if _, err := tx.Exec(ctx, insertOrder, o.ID, o.Total); err != nil {
//			return err
//		}
//		return box.Write(ctx, tx, postroom.Message{Topic: "orders", Key: o.ID, Payload: o.JSON()})
//	})
//
// Order: messages of one topic and key are published in the order in which
// their writers held a lock in common, such as the row of the order above. Writers of a key
// that share no lock have no order among them.
package outbox

import (
	"context"
	"errors"
	"fmt"

	"github.com/jackc/pgx/v5"

	"github.com/postroom/postroom"
	"github.com/postroom/postroom/internal/pg"
	"github.com/postroom/postroom/internal/reserved"
)

// An Outbox writes messages. The zero value is usable; set the fields before
// the first call. It is safe for concurrent use.
type Outbox struct {
	// Schema holds Postroom's tables. Default "postroom".
	Schema string

	// MaxSize is the most bytes that payload, key and headers of one message
	// may have together. What is larger is refused before the broker has to.
	// Default 1 MiB; negative means no limit.
	MaxSize int

	// Wake, where set, is called by Transact after each commit that has written
	// messages. The Wake method of a dispatcher in the same process fits: it
	// then publishes without waiting for its next poll.
	Wake func()
}

const defaultMaxSize = 1 << 20

// Write adds messages to the outbox, in the order given, as part of tx. They
// are published after tx commits, and never if it, or the savepoint around the
// call, is rolled back.
//
// A message without an ID gets one, see [postroom.Message.Identify]; an ID that
// the caller gives promises that every message with it is the same message:
// subscribers handle the first that reaches them, and none of the others. The
// trace in ctx travels as traceparent and tracestate unless the message has
// such a header. A message with DeliverAt enters the outbox when that time has
// come by the database's clock.
//
// A message that is invalid or too large, or an ID twice for one topic in the
// call, is reported as [*postroom.InvalidError], all of them joined, before
// any SQL: nothing is written, and tx stays usable. Any other error comes from
// the database and leaves tx aborted.
//
// It makes one round trip for any number of messages, by one INSERT; from
// several hundred on it uses COPY, which is faster although pgx asks for the
// columns' types first. It changes nothing in msgs and keeps no reference to them.
func (o *Outbox) Write(ctx context.Context, tx pgx.Tx, msgs ...postroom.Message) error {
	if len(msgs) == 0 {
		return nil
	}
	schema, err := pg.Schema(o.Schema)
	if err != nil {
		return fmt.Errorf("outbox: Outbox.%w", err)
	}
	if err := o.check(ctx, msgs); err != nil {
		return err
	}
	now, later := encode(ctx, msgs)
	if err := insert(ctx, tx, schema, now, later); err != nil {
		return fmt.Errorf("outbox: write %d messages: %w", len(msgs), err)
	}
	return nil
}

// check reports everything that is wrong with msgs.
func (o *Outbox) check(ctx context.Context, msgs []postroom.Message) error {
	maxSize := o.MaxSize
	if maxSize == 0 {
		maxSize = defaultMaxSize
	}
	var errs []error
	var seen map[[2]string]int
	for i := range msgs {
		m := &msgs[i]
		if err := validate(ctx, m, i); err != nil {
			errs = append(errs, err)
		}
		if n := size(m); maxSize > 0 && n > maxSize {
			errs = append(errs, &postroom.InvalidError{Index: i, Field: "Payload", Problem: fmt.Sprintf(
				"makes a message of %d bytes with key and headers, want at most %d (Outbox.MaxSize)", n, maxSize)})
		}
		if m.ID == "" || len(msgs) == 1 {
			continue
		}
		if seen == nil {
			seen = make(map[[2]string]int, len(msgs))
		}
		if first, ok := seen[[2]string{m.Topic, m.ID}]; ok {
			errs = append(errs, &postroom.InvalidError{Index: i, Field: "ID", Problem: fmt.Sprintf(
				"is that of message %d, which goes to the same topic", first)})
		} else {
			seen[[2]string{m.Topic, m.ID}] = i
		}
	}
	return errors.Join(errs...)
}

func validate(ctx context.Context, m *postroom.Message, index int) error {
	if !reserved.Allowed(ctx) {
		return m.Validate(index)
	}
	own := *m
	own.Headers = nil
	for _, h := range m.Headers {
		if !postroom.Reserved(h.Name) {
			own.Headers = append(own.Headers, h)
		}
	}
	return own.Validate(index)
}

func size(m *postroom.Message) int {
	n := len(m.Payload) + len(m.Key)
	for _, h := range m.Headers {
		n += len(h.Name) + len(h.Value)
	}
	return n
}
