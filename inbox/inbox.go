// Package inbox handles messages so that each has its effect exactly once per
// subscriber, however often the network, the broker or an operator repeats it.
//
// A handler gets a transaction in which the message's id is already recorded.
// What it writes there, the record and the messages it sends through package
// outbox commit together or not at all; a message whose id is recorded is a
// duplicate and is not handled.
//
//	bill := func(ctx context.Context, tx pgx.Tx, m postroom.Message) error {
//		_, err := tx.Exec(ctx, insertInvoice, m.Key)
//		return err
//	}
//	c, err := inbox.New(pool, bus, "billing", "orders", bill, inbox.Config{})
//	...
//	err = c.Run(ctx) // until ctx ends
//
// Programs that receive messages in another way call [Handle] for each.
//
// # What identifies a message
//
// The subscriber's name and [postroom.Message.ID], or what [Config].MessageID takes
// in its place, and nothing else: not the topic, not the content. Two subscribers in one database each handle a message
// once. An id that comes on two topics is one message to a subscriber of both,
// so producers that number their messages alone (tenants, services) need a
// subscriber each, or ids that hold the producer's name. A second message under
// a known id is a duplicate, whatever it contains. A subscriber under a new name
// starts without memory.
//
// # What a handler may do
//
// A handler's writes outside its transaction, such as calls to other services,
// happen at least once; [postroom.OperationKey] gives them a key by which the
// other side can recognise a repeat. While a handler runs, it holds one
// connection of the pool and its locks; one that takes further connections of
// the same pool needs a pool that is larger by as many.
//
// Its statements wait for locks no longer than [Config].LockTimeout; SET LOCAL
// lock_timeout in the handler changes that.
package inbox

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/postroom/postroom"
	"github.com/postroom/postroom/internal/waits"
)

var (
	// ErrTransient is matched by errors of [Handle] for which the database, and
	// not the message, is at fault: it is away, full or shutting down, the
	// transaction lost a conflict, or another copy of the message held its row
	// for too long. The same call may succeed later.
	ErrTransient = errors.New("inbox: database trouble")

	// ErrTxManaged is returned by Commit and Rollback of a handler's
	// transaction, and matched by the error of every message whose handler
	// called them or ended the transaction in another way.
	ErrTxManaged = errors.New("inbox: the handler's transaction is ended by the inbox alone; " +
		"return nil to commit, an error to roll back")

	errEnded = fmt.Errorf("the handler ended its transaction by an SQL command: %w", ErrTxManaged)
)

// A Handler has a message's effect. The effect commits if it returns nil, and is
// rolled back if it returns an error, panics or ends its goroutine.
// [postroom.Permanent] and [postroom.RetryAfter] qualify an error for a
// [Consumer].
//
// ctx carries the message's operation (kind "message", the subscriber, the
// message's id) and the trace of its traceparent header. It ends when the
// handler has returned, and no sooner than the caller's.
//
// tx is for this call. Begin makes a savepoint; Commit and Rollback are refused
// and make the message fail ([ErrTxManaged]). Calls from several goroutines take
// turns, and fail while rows, batch results or a copy are open; so does every
// call after the handler has returned. A failed statement that the handler
// ignores makes the message fail, as COMMIT would only roll back.
type Handler func(ctx context.Context, tx pgx.Tx, m postroom.Message) error

// A Result says what [Handle] did.
type Result uint8

const (
	// Failed comes with an error. The message had no effect.
	Failed Result = iota

	// Handled says that the handler ran, and its effect is committed.
	Handled

	// Duplicate says that the subscriber has handled this message before, or set it
	// aside as a dead letter. The handler did not run.
	Duplicate
)

func (r Result) String() string {
	switch r {
	case Failed:
		return "failed"
	case Handled:
		return "handled"
	case Duplicate:
		return "duplicate"
	}
	return "unknown"
}

// Handle runs h for m in a transaction of its own, unless subscriber has handled
// a message of that id before. When it returns nil the message is settled, and
// may be acknowledged.
//
// Of copies that are handled at the same time, one runs and the others wait for
// it, at most for [Config].LockTimeout; with a connection each where they are in
// different processes. They end as a duplicate, run themselves if the first
// failed, or fail with [ErrTransient].
//
// A transaction that lost a conflict or its connection is repeated a few times
// at short intervals, so h may run more than once. A COMMIT whose answer was
// lost is looked up. An error says that the message is not settled, to the best
// of knowledge: where it matches ErrTransient the call may be repeated, and where
// the message had been committed after all, the repeat finds a duplicate. A
// message whose id [postroom.CheckID] refuses is a [*postroom.InvalidError].
//
// An error of h is returned in a wrapper, a panic of h as an error.
// Cancelling ctx is left to h to obey while it runs, and prevents a commit that
// has not begun.
func Handle(
	ctx context.Context, pool *pgxpool.Pool, subscriber string, m postroom.Message, h Handler, cfg Config,
) (Result, error) {
	cfg, err := cfg.withDefaults()
	if problem := postroom.CheckID(subscriber); problem != "" {
		err = errors.Join(err, fmt.Errorf("inbox: subscriber %q %s", subscriber, problem))
	}
	if err != nil {
		return Failed, err
	}
	if problem := postroom.CheckID(m.ID); problem != "" {
		return Failed, fmt.Errorf("inbox: %w", &postroom.InvalidError{Field: "ID", Problem: problem})
	}
	b := newBox(pool, subscriber, cfg)
	pause := waits.Growing(handlePause, time.Second)
	for try := 1; ; try++ {
		result, f := b.attempt(ctx, m, recordNew(), h)
		if f == nil {
			return result, nil
		}
		if !f.trouble || try == handleTries || timedOutOnLock(f) || ctx.Err() != nil {
			return Failed, f
		}
		if waits.For(ctx, pause.NextBackOff()) != nil {
			return Failed, f
		}
	}
}

const (
	handleTries = 4
	handlePause = 20 * time.Millisecond
)
