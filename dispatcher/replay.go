package dispatcher

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/postroom/postroom"
	"github.com/postroom/postroom/broker"
)

// A Replay says which retained messages [Dispatcher.Replay] publishes again. The
// fields narrow the choice together; the zero value chooses all.
type Replay struct {
	// Since and Until bound the time of publishing, by the database's clock.
	// It is known to the minute: some messages of just before and just after
	// may come too. Zero means no bound.
	Since, Until time.Time

	// Topic and Key choose the messages of a topic and of a key. Empty means all.
	Topic, Key string

	// IDs chooses messages by their ids. Empty means all.
	IDs []string

	// After goes on where an earlier replay of the same choice stopped.
	After Position

	// Progress, where set, is called after each page, with what has been done
	// since the start of the call.
	Progress func(Replayed)
}

// Replayed is what a replay has done.
type Replayed struct {
	Messages int      // published again
	Refused  int      // that the broker no longer takes; they are logged
	Position Position // how far it came
}

// A Position is a place among the retained messages. The zero value is before
// the first.
type Position struct {
	Lane   int32
	Origin int64
	ID     int64
}

// Replay publishes retained messages again, with the same ids and bytes and in
// the order of each topic and key, as far as they have been published before. It works beside Run, here
// or elsewhere, and needs none: what Run publishes for the first time keeps its
// order, and what is replayed comes among it as repeats, which subscribers drop
// unless they have forgotten the id. It ends with what was
// published when it reached the lane.
//
// It reads all retained messages within the bounds of time, a page at a time,
// and holds no connection while it publishes. What cannot be published is tried
// again until ctx ends. With any error the result says how far the call came;
// pass its Position as After to go on.
func (d *Dispatcher) Replay(ctx context.Context, r Replay) (Replayed, error) {
	done := Replayed{Position: r.After}
	rows, err := d.pool.Query(ctx, d.sql.places)
	if err != nil {
		return done, fmt.Errorf("dispatcher: replay: %w", err)
	}
	places, err := pgx.CollectRows(rows, pgx.RowToStructByPos[place])
	if err != nil {
		return done, fmt.Errorf("dispatcher: replay: %w", err)
	}
	started := r.After == Position{}
	for _, p := range places {
		var after int64
		if !started {
			if p != (place{r.After.Lane, r.After.Origin}) {
				continue
			}
			started, after = true, r.After.ID
		}
		if err := d.replayPlace(ctx, p, after, &r, &done); err != nil {
			return done, fmt.Errorf("dispatcher: replay lane %d: %w", p.Lane, err)
		}
	}
	if !started {
		return done, errors.New("dispatcher: replay: Replay.After is no place in this outbox")
	}
	return done, nil
}

// cursorPlaces lists lanes and origins, of each lane this database last: its
// messages are the newest.
const cursorPlaces = `
WITH RECURSIVE ` + everyPlace + `
SELECT lane, origin FROM place ORDER BY lane, origin = "postroom".origin(), origin`

// replayBounds finds the snapshots between which the messages of a time were
// published, and the lowest id among those that the first has not seen. It
// probes index outbox_cursors_time.
const replayBounds = `
SELECT coalesce(f.seen, '1:1:')::text, coalesce(u.until, n.until)::text,
       CASE WHEN f.seen IS NULL THEN 0 ELSE
       (SELECT coalesce(min(id), 9223372036854775807)
          FROM (SELECT id FROM "postroom".outbox_messages
                 WHERE lane = $1 AND origin = $2 AND xid >= pg_snapshot_xmin(f.seen)
                 ORDER BY xid OFFSET 0) s) - 1 END
  FROM (SELECT until FROM "postroom".outbox_cursors
         WHERE lane = $1::int4 AND origin = $2::int8 ORDER BY number DESC LIMIT 1) n
  LEFT JOIN LATERAL (
       SELECT CASE WHEN last_id = 9223372036854775807 THEN until ELSE prev END AS seen
         FROM "postroom".outbox_cursors
        WHERE lane = $1 AND origin = $2 AND created_at <= $3::timestamptz
        ORDER BY created_at DESC, number DESC LIMIT 1) f ON true
  LEFT JOIN LATERAL (
       SELECT until FROM "postroom".outbox_cursors
        WHERE lane = $1 AND origin = $2 AND created_at >= $4::timestamptz
        ORDER BY created_at, number LIMIT 1) u ON true`

// replayPage reads the next $4 messages of a lane and returns those that are
// chosen. Whatever the bounds say, nothing is replayed that the lane's newest
// cursor does not count as settled: a first arrival is the owner's to publish.
const replayPage = `
WITH page AS MATERIALIZED (
    SELECT id, xid, message_id, topic, key, payload, header_names, header_values, operation, created_at
      FROM "postroom".outbox_messages
     WHERE lane = $1::int4 AND origin = $2::int8 AND id > $3::int8
     ORDER BY id LIMIT $4::int4
), newest AS MATERIALIZED (
    SELECT CASE WHEN last_id = 9223372036854775807 THEN until ELSE prev END AS settled
      FROM "postroom".outbox_cursors
     WHERE lane = $1 AND origin = $2
       AND NOT pg_is_in_recovery()
     ORDER BY number DESC LIMIT 1
)
SELECT (SELECT max(id) FROM page),
       m.id, m.message_id, m.topic, m.key, m.payload, m.header_names, m.header_values, m.operation, m.created_at
  FROM (SELECT) one LEFT JOIN (
       SELECT page.* FROM page, newest
        WHERE pg_visible_in_snapshot(xid, newest.settled) AND pg_visible_in_snapshot(xid, $6::text::pg_snapshot)
          AND NOT pg_visible_in_snapshot(xid, $5::text::pg_snapshot)
          AND ($7::text = '' OR topic = $7) AND ($8::text = '' OR key = $8)
          AND (cardinality($9::text[]) = 0 OR message_id = ANY ($9))) m ON true
 ORDER BY m.id`

// replayPlace replays what one database wrote into one lane.
func (d *Dispatcher) replayPlace(ctx context.Context, p place, after int64, r *Replay, done *Replayed) error {
	var from, until string
	var low int64
	err := d.pool.QueryRow(ctx, d.sql.replayBounds, p.Lane, p.Origin, timeOrNull(r.Since), timeOrNull(r.Until)).
		Scan(&from, &until, &low)
	if errors.Is(err, pgx.ErrNoRows) {
		return nil // the lane has been opened anew
	}
	if err != nil {
		return err
	}
	ids := append([]string{}, r.IDs...)
	size := min(firstFit, d.cfg.PageSize)
	for at := max(after, low); ; {
		msgs, end, cut, err := d.replayRead(ctx, p, at, size, from, until, r.Topic, r.Key, ids)
		if err != nil {
			return err
		}
		if end == 0 {
			return nil
		}
		if err := d.publishAgain(ctx, msgs, done); err != nil {
			return err
		}
		at = end
		done.Position = Position{p.Lane, p.Origin, at}
		size = d.fit(size, len(msgs), cut)
		if r.Progress != nil {
			r.Progress(*done)
		}
	}
}

// replayRead returns the messages of a page that are chosen, up to PageBytes of
// them, and where the next page begins; 0 at the lane's end.
func (d *Dispatcher) replayRead(ctx context.Context, p place, at int64, size int, choice ...any) (
	msgs []postroom.Message, end int64, cut bool, err error,
) {
	rows, err := d.pool.Query(ctx, d.sql.replayPage, append([]any{p.Lane, p.Origin, at, size}, choice...)...)
	if err != nil {
		return nil, 0, false, err
	}
	defer rows.Close()
	var last *int64
	bytes := 0
	for rows.Next() {
		if cut { // read on to the end, but keep no more
			continue
		}
		var s scanned
		if err := rows.Scan(append([]any{&last}, s.fields()...)...); err != nil {
			return nil, 0, false, err
		}
		if last != nil && len(msgs) == 0 {
			end = *last
		}
		if s.id == nil {
			continue
		}
		bytes += s.bytes()
		if cut = len(msgs) > 0 && bytes > d.cfg.PageBytes; cut {
			end = at // of the last that is kept
			continue
		}
		e := s.entry()
		at, msgs = e.id, append(msgs, e.msg)
	}
	return msgs, end, cut, rows.Err()
}

// publishAgain publishes until each message has an answer, or ctx ends.
func (d *Dispatcher) publishAgain(ctx context.Context, msgs []postroom.Message, done *Replayed) error {
	retry := newBackoff(20*time.Millisecond, 5*time.Second)
	for len(msgs) > 0 {
		call, cancel := context.WithTimeout(ctx, d.cfg.PublishTimeout)
		results := d.pub.Publish(call, msgs)
		cancel()
		if len(results) != len(msgs) {
			return fmt.Errorf("the publisher returned %d results for %d messages", len(results), len(msgs))
		}
		var rest []postroom.Message
		trouble := errNoReason
		for i, m := range msgs {
			switch r := results[i]; r.Outcome {
			case broker.Stored:
				done.Messages++
			case broker.Refused:
				done.Refused++
				d.cfg.Logger.LogAttrs(ctx, levelError, "replayed message refused by the broker",
					topicAttr(m.Topic), idAttr(m.ID), errorAttr(r.Err))
			default:
				trouble = cmpErr(r.Err, trouble)
				rest = append(rest, m)
			}
		}
		if len(rest) == 0 {
			break
		}
		if ctx.Err() != nil {
			return fmt.Errorf("%w; the broker: %w", context.Cause(ctx), trouble)
		}
		d.trouble.set("replay", trouble)
		if len(rest) < len(msgs) {
			retry.Reset() // something moves
		}
		msgs = rest
		wait(ctx, retry.NextBackOff())
	}
	d.trouble.clear("replay")
	return nil
}

// timeOrNull turns the zero time into NULL.
func timeOrNull(t time.Time) *time.Time {
	if t.IsZero() {
		return nil
	}
	return &t
}
