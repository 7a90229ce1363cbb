package dispatcher

import (
	"context"
	"errors"
	"fmt"
	"hash/fnv"
	"time"

	"github.com/jackc/pgx/v5"
)

// cleanable lists, for each lane and origin that no other dispatcher owns, the
// newest cursor that is older than the retention. What it names as settled was
// published by then. It probes index outbox_cursors_time once for each.
const cleanable = `
WITH RECURSIVE ` + everyPlace + `
SELECT p.lane, p.origin, c.number, c.prev::text, c.until::text, c.last_id
  FROM place p
  LEFT JOIN "postroom".outbox_lanes l ON l.lane = p.lane,
       LATERAL (
       SELECT number, prev, until, last_id FROM "postroom".outbox_cursors
        WHERE lane = p.lane AND origin = p.origin AND created_at <= now() - $2::interval
        ORDER BY created_at DESC, number DESC LIMIT 1) c
 WHERE l.owner IS NULL OR l.owner = $1::text OR l.lease < clock_timestamp()`

// everyPlace finds the lanes and origins that have cursors, by skipping from
// one to the next through the primary key.
const everyPlace = `place(lane, origin) AS (
    (SELECT lane, origin FROM "postroom".outbox_cursors ORDER BY lane, origin LIMIT 1)
    UNION ALL
    SELECT n.lane, n.origin
      FROM place p, LATERAL (
           SELECT lane, origin FROM "postroom".outbox_cursors
            WHERE (lane, origin) > (p.lane, p.origin)
            ORDER BY lane, origin LIMIT 1) n
)`

// horizon is the first part of both statements that delete. It takes the lane's
// turn, and demands that the cursor which memory goes by stands in the database
// and is old enough: another server may have taken the place of the one that was
// asked before, and given the same transaction ids to new messages. seen is what
// that cursor counts as settled, settled what the lane's newest cursor does;
// only what both have seen is deleted. A lane that was closed elsewhere and has come
// home is opened first.
const horizon = `horizon AS MATERIALIZED (
    SELECT CASE WHEN c.last_id = 9223372036854775807 THEN c.until ELSE c.prev END AS seen,
           CASE WHEN n.last_id = 9223372036854775807 THEN n.until ELSE n.prev END AS settled
      FROM "postroom".outbox_cursors c, LATERAL (
           SELECT prev, until, last_id FROM "postroom".outbox_cursors
            WHERE lane = c.lane AND origin = c.origin
            ORDER BY number DESC LIMIT 1) n
     WHERE c.lane = $1::int4 AND c.origin = $2::int8 AND c.number = $3::int8
       AND c.prev::text = $4::text AND c.until::text = $5::text AND c.last_id = $6::int8
       AND c.created_at <= now() - $7::interval
       AND (c.origin <> "postroom".origin() OR n.until::text <> '9223372036854775807:9223372036854775807:')
       AND NOT pg_is_in_recovery() AND pg_try_advisory_xact_lock($8::int8)
)`

// cleanEnded deletes a chunk of what the transactions $9 wrote, which were still
// running for the horizon of the last round.
const cleanEnded = `
WITH ` + horizon + `, old AS MATERIALIZED (
    SELECT o.place
      FROM horizon h CROSS JOIN unnest($9::text[]::xid8[]) AS x(x) CROSS JOIN LATERAL (
           SELECT ctid AS place FROM "postroom".outbox_messages
            WHERE lane = $1 AND origin = $2 AND xid = x.x
            ORDER BY id LIMIT $10::int4) o
     WHERE pg_visible_in_snapshot(x.x, h.seen) AND pg_visible_in_snapshot(x.x, h.settled)
     LIMIT $10
), deleted AS (
    DELETE FROM "postroom".outbox_messages WHERE ctid = ANY (ARRAY(SELECT place FROM old))
)
SELECT EXISTS (SELECT FROM horizon), count(*), '', 0::int8 FROM old`

// cleanRange deletes the next chunk behind transaction $9 and id $10, by index
// outbox_messages_xid, and says where it stopped. It starts there the next
// time: what was deleted before remains in the index until it is vacuumed.
const cleanRange = `
WITH ` + horizon + `, old AS MATERIALIZED (
    SELECT o.xid, o.id, o.place
      FROM horizon h, LATERAL (
           SELECT xid, id, ctid AS place FROM "postroom".outbox_messages
            WHERE lane = $1 AND origin = $2 AND (xid, id) > ($9::text::xid8, $10::int8)
              AND xid < pg_snapshot_xmax(h.seen)
              AND pg_visible_in_snapshot(xid, h.seen) AND pg_visible_in_snapshot(xid, h.settled)
            ORDER BY xid, id LIMIT $11::int4) o
), deleted AS (
    DELETE FROM "postroom".outbox_messages WHERE ctid = ANY (ARRAY(SELECT place FROM old))
)
SELECT EXISTS (SELECT FROM horizon), (SELECT count(*) FROM old), coalesce(o.xid::text, ''), coalesce(o.id, 0)
  FROM (SELECT) one LEFT JOIN (SELECT xid, id FROM old ORDER BY xid DESC, id DESC LIMIT 1) o ON true`

const (
	// cleanChunk is the number of messages that one statement deletes.
	cleanChunk = 1000

	// cleanAnew is how long the cleaner trusts its memory of what it has deleted.
	// A server that took another's place may hold older messages again.
	cleanAnew = time.Hour

	// defaultRetention is kept unless Config.Retention says otherwise; history is
	// how much longer than that the cursors are kept which say what was published
	// when, and leastHistory their least age.
	defaultRetention = 24 * time.Hour
	history          = 24 * time.Hour
	leastHistory     = 8 * 24 * time.Hour
)

// keepCursors returns how long cursors are kept.
func (c Config) keepCursors() time.Duration {
	return max(c.Retention+history, leastHistory)
}

// place is a lane's messages from one database.
type place struct {
	Lane   int32
	Origin int64
}

// aged is a cursor that is older than the retention.
type aged struct {
	place
	number      int64
	prev, until string
	lastID      int64
}

// seen is the snapshot up to which a cursor says that all is settled.
func (a aged) seen() string {
	if a.lastID == settledID {
		return a.until
	}
	return a.prev
}

// A cleaner deletes published messages whose retention has ended. It holds one
// connection, for one chunk at a time, and rests as long as it works.
type cleaner struct {
	d     *Dispatcher
	since time.Time
	done  map[place]string // the snapshot up to which all is deleted
}

// clean deletes what has been retained long enough, again and again until ctx
// ends.
func (d *Dispatcher) clean(ctx context.Context) {
	if d.cfg.Retention < 0 {
		return
	}
	every := min(max(d.cfg.Retention/10, 100*time.Millisecond), 10*time.Second)
	c := &cleaner{d: d}
	for ctx.Err() == nil {
		if time.Since(c.since) > cleanAnew {
			c.since, c.done = time.Now(), make(map[place]string)
		}
		err := c.round(ctx)
		switch {
		case ctx.Err() != nil:
			return
		case err != nil:
			d.trouble.set("retention", err)
		default:
			d.trouble.clear("retention")
		}
		wait(ctx, every)
	}
}

// round deletes all that the retention no longer covers.
func (c *cleaner) round(ctx context.Context) error {
	rows, err := c.d.pool.Query(ctx, c.d.sql.cleanable, c.d.owner, c.d.cfg.Retention)
	if err != nil {
		return err
	}
	all, err := pgx.CollectRows(rows, func(row pgx.CollectableRow) (a aged, err error) {
		err = row.Scan(&a.Lane, &a.Origin, &a.number, &a.prev, &a.until, &a.lastID)
		return a, err
	})
	if err != nil {
		return err
	}
	var errs []error
	for _, a := range all {
		if a.seen() == c.done[a.place] {
			continue
		}
		if err := c.cleanTo(ctx, a); err != nil && !errors.Is(err, errAnotherCleaner) {
			errs = append(errs, fmt.Errorf("lane %d: %w", a.Lane, err))
		}
	}
	return errors.Join(errs...)
}

// cleanTo deletes what a has seen and the last round's cursor had not.
func (c *cleaner) cleanTo(ctx context.Context, a aged) error {
	from := c.done[a.place]
	if from == "" {
		from = emptySnapshot
	}
	last, err := parseSnapshot(from)
	if err != nil {
		return err
	}
	next, err := parseSnapshot(a.seen())
	if err != nil {
		return err
	}
	if ended := next.finished(last); len(ended) > 0 {
		for full := true; full; {
			if full, _, _, err = c.chunk(ctx, c.d.sql.cleanEnded, a, ended); err != nil {
				return err
			}
		}
	}
	xid, id := fmt.Sprint(last.xmax), int64(0)
	for full := true; full; {
		if full, xid, id, err = c.chunk(ctx, c.d.sql.cleanRange, a, xid, id); err != nil {
			return err
		}
	}
	c.done[a.place] = a.seen()
	return nil
}

// errAnotherCleaner means that another cleaner is at the lane, or that the
// cursor is gone. The next round finds out.
var errAnotherCleaner = errors.New("another dispatcher cleans the lane, or its cursor is gone")

// chunk deletes one chunk, rests, and says where it stopped and whether there
// may be more.
func (c *cleaner) chunk(ctx context.Context, query string, a aged, from ...any) (full bool, xid string, id int64, err error) {
	began := time.Now()
	args := append([]any{
		a.Lane, a.Origin, a.number, a.prev, a.until, a.lastID, c.d.cfg.Retention, c.turn(a.Lane),
	}, from...)
	var same bool
	var n int
	if err := c.d.pool.QueryRow(ctx, query, append(args, cleanChunk)...).Scan(&same, &n, &xid, &id); err != nil {
		return false, "", 0, err
	}
	if !same {
		return false, "", 0, errAnotherCleaner
	}
	if full = n == cleanChunk; full {
		wait(ctx, time.Since(began))
	}
	return full, xid, id, nil
}

// turn is the lock by which cleaners of a lane take turns.
func (c *cleaner) turn(lane int32) int64 {
	return lockKey(fmt.Sprintf("postroom clean %s %d", c.d.cfg.Schema, lane))
}

// lockKey returns the advisory lock that stands for name.
func lockKey(name string) int64 {
	h := fnv.New64a()
	_, _ = h.Write([]byte(name)) // never fails
	return int64(h.Sum64())
}
