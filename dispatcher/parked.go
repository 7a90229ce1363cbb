package dispatcher

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/postroom/postroom"
	"github.com/postroom/postroom/internal/pg"
)

// Parked is an operator's access to the messages that were set aside: those
// that the broker refused, and those that wait, behind a refused one of their
// topic and key or for a topic that is away. They are never cleaned.
//
// It needs no dispatcher in its process. What it does is a mark on rows; the
// dispatcher that owns their lane acts on it within a second. The same can be
// done from psql, by the functions requeue_parked, discard_parked and
// redirect_parked of the schema. Who did what and when is kept in
// outbox_parked_history.
type Parked struct {
	// Pool is the outbox's database. Required.
	Pool *pgxpool.Pool

	// Schema holds Postroom's tables. Default "postroom".
	Schema string

	// By is who acts, for the history. Default: the database session's user.
	By string
}

// A Filter chooses parked messages: those that match each field that is set.
// The zero Filter is refused, lest a name that is empty by mistake choose all.
type Filter struct {
	ID    string // of the message
	Topic string
	Key   string
	Error string        // a part of the broker's reason
	Age   time.Duration // at least so long ago set aside
	All   bool          // every message that the other fields leave
}

// A ParkedMessage is one that was set aside.
type ParkedMessage struct {
	postroom.Message

	// Number is its place: messages of a key leave in its order.
	Number int64

	// Refused says that the broker refused it; otherwise it waits.
	Refused bool

	// Away names the topic, or the part of it, for which it waits. Empty where
	// it waits behind a refused message of its key.
	Away string

	// Attempts is how often it was refused since it was last requeued, Error
	// why, and Tried when; zero for one that waits.
	Attempts int
	Error    string
	Tried    time.Time

	// Due is when a refused message is tried again; zero: an operator decides.
	Due time.Time

	// Parked is when it was set aside.
	Parked time.Time
}

// changeChunk is how many rows one statement changes.
const changeChunk = 1000

// listParked reads what a filter chooses, in order.
const listParked = `
SELECT number, state = 'refused', coalesce(away, ''), attempts, coalesce(error, ''), tried_at,
       CASE WHEN state = 'refused' THEN due_at END, parked_at,
       id, message_id, topic, key, payload, header_names, header_values, operation, created_at
  FROM "postroom".outbox_parked
 WHERE state <> 'discarded' AND number > $7::int8
   AND ($1::text IS NULL OR topic = $1) AND ($2::text IS NULL OR key = $2)
   AND ($3::text IS NULL OR message_id = $3) AND ($4::text IS NULL OR strpos(error, $4) > 0)
   AND ($5::interval IS NULL OR parked_at < clock_timestamp() - $5) AND $6::bool IS NOT NULL
 ORDER BY number LIMIT $8::int4`

// List returns the first n messages that f chooses whose Number is above after,
// in the order of Number.
func (p Parked) List(ctx context.Context, f Filter, after int64, n int) ([]ParkedMessage, error) {
	all := []ParkedMessage{}
	err := p.with("list", f, func(schema string, args []any) error {
		rows, err := p.Pool.Query(ctx, pg.InSchema(listParked, schema), append(args, after, n)...)
		if err != nil {
			return err
		}
		defer rows.Close()
		for rows.Next() {
			var m ParkedMessage
			var e scanned
			var tried, due *time.Time
			err := rows.Scan(append([]any{&m.Number, &m.Refused, &m.Away, &m.Attempts, &m.Error, &tried, &due, &m.Parked},
				e.fields()...)...)
			if err != nil {
				return err
			}
			if tried != nil {
				m.Tried = *tried
			}
			if due != nil {
				m.Due = *due
			}
			m.Message = e.entry().msg
			all = append(all, m)
		}
		return rows.Err()
	})
	return all, err
}

// Requeue has the refused messages that f chooses tried at once, with their
// attempts counted anew, and returns how many. What waits behind them follows in
// order, before any newer message of the key.
//
// This and the other changes work in chunks of a thousand, each committed, with
// a pause after each as long as it took. An error, or the end of ctx, leaves done what
// the number says. reason is for the history, and may be empty.
func (p Parked) Requeue(ctx context.Context, f Filter, reason string) (int64, error) {
	return p.change(ctx, "requeue", nil, f, reason)
}

// Discard gives up the messages that f chooses, refused and waiting ones, and
// returns how many. They will not be published, unless that is under way, and
// are kept in outbox_parked_history. What waits behind a refused one follows.
func (p Parked) Discard(ctx context.Context, f Filter, reason string) (int64, error) {
	return p.change(ctx, "discard", nil, f, reason)
}

// Redirect sends the messages that f chooses, refused and waiting ones, to
// another topic, as for a name that was misspelt, and returns how many. They enter the
// outbox in their order, behind what is there, with their ids, keys and contents.
func (p Parked) Redirect(ctx context.Context, f Filter, topic, reason string) (int64, error) {
	check := postroom.Message{ID: "x", Topic: topic}
	if err := check.Validate(0); err != nil {
		return 0, fmt.Errorf("dispatcher: redirect parked messages: %w", err)
	}
	return p.change(ctx, "redirect", &topic, f, reason)
}

const (
	lastParked   = `SELECT coalesce(max(number), 0) FROM "postroom".outbox_parked`
	changeParked = `SELECT messages, last FROM "postroom".change_parked($7::text, $8::text, $1::text, $2::text, $3::text, $4::text,
	$5::interval, $6::bool, $9::text, $10::text, $11::int8, $12::int4)`
)

func (p Parked) change(ctx context.Context, action string, target *string, f Filter, reason string) (total int64, err error) {
	err = p.with(action, f, func(schema string, args []any) error {
		// What comes meanwhile is not chosen, so that the call ends.
		var end, last int64
		if err := p.Pool.QueryRow(ctx, pg.InSchema(lastParked, schema)).Scan(&end); err != nil {
			return err
		}
		change := pg.InSchema(changeParked, schema)
		args = append(args, action, target, orNull(p.By), orNull(reason))
		for {
			began := time.Now()
			var n int64
			if err := p.Pool.QueryRow(ctx, change, append(args, last, changeChunk)...).Scan(&n, &last); err != nil {
				return err
			}
			total += n
			if n < changeChunk || last >= end {
				return nil
			}
			wait(ctx, time.Since(began))
		}
	})
	return total, err
}

// with calls do with the filter as parameters $1 to $6.
func (p Parked) with(action string, f Filter, do func(schema string, args []any) error) error {
	schema, err := pg.Schema(p.Schema)
	switch {
	case err != nil:
		err = fmt.Errorf("Parked.%w", err)
	case p.Pool == nil:
		err = errors.New("Parked.Pool is nil")
	case f == Filter{}:
		err = errors.New("the filter is empty: set one of its fields, or All")
	case f.Age < 0:
		err = fmt.Errorf("Filter.Age is %v, want 0 or more", f.Age)
	default:
		var age *time.Duration
		if f.Age > 0 {
			age = &f.Age
		}
		err = do(schema, []any{orNull(f.Topic), orNull(f.Key), orNull(f.ID), orNull(f.Error), age, f.All})
	}
	if err != nil {
		return fmt.Errorf("dispatcher: %s parked messages: %w", action, err)
	}
	return nil
}

func orNull(s string) *string {
	if s == "" {
		return nil
	}
	return &s
}
