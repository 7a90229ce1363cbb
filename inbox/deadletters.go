package inbox

import (
	"context"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/postroom/postroom"
	"github.com/postroom/postroom/internal/pg"
)

// DeadLetters lists and requeues what subscribers have set aside. Pool must be
// set. It is safe for concurrent use.
type DeadLetters struct {
	Pool   *pgxpool.Pool
	Schema string // holds Postroom's tables. Default "postroom".
}

// DeadLetterState says what a dead letter waits for.
type DeadLetterState string

const (
	// LetterDead waits for a person.
	LetterDead DeadLetterState = "dead"

	// LetterRequeued waits for a consumer that handles it again.
	LetterRequeued DeadLetterState = "requeued"

	// LetterWaiting has not been handled yet: it waits for a dead letter of its
	// key that stands before it. See [DeadLetterWait].
	LetterWaiting DeadLetterState = "waiting"
)

// A DeadLetter is a message that a subscriber has set aside.
type DeadLetter struct {
	Number   int64 // grows in the order in which messages were set aside
	Message  postroom.Message
	State    DeadLetterState
	Time     time.Time // when it was set aside the last time
	Attempts int       // that failed, before that; 0 where it is waiting
	Reason   string    // of the last one; empty where it is waiting
	Source   string    // its place in the broker, such as "orders/3/17"
	Requeues int       // how often it was requeued
	Repeats  int64     // how often it came again meanwhile and was acknowledged; some may not be counted
}

const selectLetters = `
SELECT number, message_id, topic, key, payload, header_names, header_values, coalesce(operation, ''), written_at,
       state, dead_at, attempts, coalesce(reason, ''), source, requeues, repeats
  FROM "postroom".inbox_dead_letters
 WHERE subscriber_id = $1::text AND number > $2::bigint
 ORDER BY number
 LIMIT $3::int`

// List returns at most limit of subscriber's dead letters, those with the lowest
// numbers above after. The first page is after 0.
func (d DeadLetters) List(ctx context.Context, subscriber string, after int64, limit int) ([]DeadLetter, error) {
	schema, err := pg.Schema(d.Schema)
	if err != nil {
		return nil, fmt.Errorf("inbox: %w", err)
	}
	rows, err := d.Pool.Query(ctx, pg.InSchema(selectLetters, schema), subscriber, after, limit)
	if err != nil {
		return nil, fmt.Errorf("inbox: list dead letters: %w", err)
	}
	letters, err := pgx.CollectRows(rows, scanDeadLetter)
	if err != nil {
		return nil, fmt.Errorf("inbox: list dead letters: %w", err)
	}
	return letters, nil
}

func scanDeadLetter(row pgx.CollectableRow) (DeadLetter, error) {
	var d DeadLetter
	var stored storedMessage
	err := row.Scan(&d.Number, &d.Message.ID, &d.Message.Topic, &stored.key, &d.Message.Payload,
		&stored.names, &stored.values, &d.Message.Operation, &stored.written,
		&d.State, &d.Time, &d.Attempts, &d.Reason, &d.Source, &d.Requeues, &d.Repeats)
	stored.into(&d.Message)
	return d, err
}

// callRequeue takes the letters' row locks in the order of their ids.
const callRequeue = `
SELECT "postroom".requeue_dead_letters($1::text, $2::text[])`

// Requeue has the dead letters with the given message ids handled again, under
// the same ids, by the subscriber's consumers that run or will run. It returns
// how many it found; a letter that is not there, not dead, or of another
// subscriber is left alone.
//
// The handler's effect, the message's new outcome and the end of its dead letter
// commit together. A message that fails again, up to [Config].MaxAttempts, is a
// dead letter again, in its old place. Letters of one key are handled in the
// order in which they were set aside.
//
// In SQL: SELECT postroom.requeue_dead_letters('billing', '{id1,id2}').
func (d DeadLetters) Requeue(ctx context.Context, subscriber string, ids ...string) (int64, error) {
	if ids == nil {
		ids = []string{} // not all of them
	}
	return d.requeue(ctx, subscriber, ids)
}

// RequeueAll is Requeue for all dead letters of subscriber, in one transaction.
//
// In SQL: SELECT postroom.requeue_dead_letters('billing').
func (d DeadLetters) RequeueAll(ctx context.Context, subscriber string) (int64, error) {
	return d.requeue(ctx, subscriber, nil)
}

func (d DeadLetters) requeue(ctx context.Context, subscriber string, ids []string) (n int64, err error) {
	schema, err := pg.Schema(d.Schema)
	if err != nil {
		return 0, fmt.Errorf("inbox: %w", err)
	}
	if err := d.Pool.QueryRow(ctx, pg.InSchema(callRequeue, schema), subscriber, ids).Scan(&n); err != nil {
		return 0, fmt.Errorf("inbox: requeue dead letters: %w", err)
	}
	return n, nil
}
