package dispatcher

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/postroom/postroom"
)

// A message is read with its place in the lane.
type entry struct {
	id  int64
	msg postroom.Message
}

// beginDifference opens the next difference of a lane, in one statement and so
// in one transaction: it demands memory's row, takes the snapshot while it has
// no transaction id of its own, reads what the new snapshot sees and the
// last one did not, appends the row that names the difference where there is
// anything, and commits durably, which also makes durable every commit that
// the snapshot has seen. Nothing of it may be published before that.
//
// It reads up to $13 messages. A larger difference is read page by page later;
// its contents no longer change.
//
// The range part walks index outbox_messages_xid from prev's xmax, the list
// part probes it for the transactions that have ended since.
const beginDifference = `
WITH setting AS MATERIALIZED (
    SELECT set_config('synchronous_commit', 'on', true)
), ` + newestCursor + `, here AS MATERIALIZED (
    SELECT pg_current_snapshot() AS cur
      FROM setting, newest c, "postroom".outbox_lanes l
     WHERE ` + sameCursor + `
       AND "postroom".origin() = $2 AND NOT pg_is_in_recovery()
       AND pg_current_xact_id_if_assigned() IS NULL
), found AS MATERIALIZED (
    (SELECT r.* FROM here, LATERAL (
            SELECT id, message_id, topic, key, payload, header_names, header_values, operation, created_at
              FROM "postroom".outbox_messages
             WHERE lane = $1 AND origin = $2 AND xid >= $11::text::xid8
               AND pg_visible_in_snapshot(xid, here.cur)
             ORDER BY xid LIMIT $13::int4 + 1) r)
    UNION ALL
    (SELECT r.* FROM here CROSS JOIN unnest($12::text[]::xid8[]) AS x(x) CROSS JOIN LATERAL (
            SELECT id, message_id, topic, key, payload, header_names, header_values, operation, created_at
              FROM "postroom".outbox_messages
             WHERE lane = $1 AND origin = $2 AND xid = x.x
             ORDER BY id LIMIT $13 + 1) r
      WHERE pg_visible_in_snapshot(x.x, here.cur)
      LIMIT $13 + 1)
), appended AS (
    INSERT INTO "postroom".outbox_cursors (lane, origin, number, fence, owner, prev, until, last_id)
    SELECT $1, $2, $5 + 1, $3, $4, $9::pg_snapshot, here.cur,
           CASE WHEN EXISTS (SELECT FROM found) THEN 0 ELSE 9223372036854775807 END
      FROM here
     WHERE $14::bool OR EXISTS (SELECT FROM found)
    RETURNING number
)
SELECT here.cur::text, (SELECT number FROM appended) IS NOT NULL,
       f.id, f.message_id, f.topic, f.key, f.payload, f.header_names, f.header_values, f.operation, f.created_at
  FROM here LEFT JOIN found f ON true
 ORDER BY f.id`

// begin opens the next difference; the current one must be published. It
// returns its messages in order where they are few, or more = true. force
// appends a row even if nothing has come.
func (l *lane) begin(ctx context.Context, force bool) (msgs []entry, more bool, err error) {
	prev, err := parseSnapshot(l.cur.until)
	if err != nil {
		return nil, false, err
	}
	xip := make([]string, len(prev.xip))
	for i, x := range prev.xip {
		xip[i] = strconv.FormatUint(x, 10)
	}
	size := l.fit
	rows, err := l.d.pool.Query(ctx, l.d.sql.begin, append(l.identity(),
		strconv.FormatUint(prev.xmax, 10), xip, size, force)...)
	if err != nil {
		return nil, false, reloadOn(err)
	}
	defer rows.Close()
	var cur string
	var appended bool
	seen, bytes := 0, 0
	for rows.Next() {
		if more { // read on to the end, but keep no more
			continue
		}
		var e scanned
		if err := rows.Scan(append([]any{&cur, &appended}, e.fields()...)...); err != nil {
			return nil, false, err
		}
		if e.id == nil {
			continue // a row that only says: nothing new
		}
		seen++
		bytes += e.bytes()
		if more = seen > size || seen > 1 && bytes > l.d.cfg.PageBytes; !more {
			msgs = append(msgs, e.entry())
		}
	}
	if err := rows.Err(); err != nil { // only now is the row committed
		return nil, false, reloadOn(err)
	}
	if cur == "" {
		return nil, false, errReload
	}
	l.fit = l.d.fit(size, len(msgs), bytes > l.d.cfg.PageBytes)
	if !appended {
		return nil, false, nil
	}
	l.cur = l.next(l.cur.until, cur, 0)
	if seen == 0 {
		l.cur.lastID = settledID
	}
	l.opened()
	l.lastAppend = time.Now()
	if more {
		return nil, true, nil
	}
	return msgs, false, nil
}

// closeOrigin opens the last difference of a lane of another database, which
// a dump brought along: all that it wrote and that was not settled there.
const closeOrigin = `
WITH ` + newestCursor + `
INSERT INTO "postroom".outbox_cursors (lane, origin, number, fence, owner, prev, until, last_id)
SELECT $1, $2, c.number + 1, l.fence, l.owner, c.until, '9223372036854775807:9223372036854775807:', 0
  FROM newest c, "postroom".outbox_lanes l,
       (SELECT set_config('synchronous_commit', 'on', true)) durable
 WHERE ` + sameCursor + `
   AND "postroom".origin() = $11::int8 AND NOT pg_is_in_recovery()`

func (l *lane) beginClosed(ctx context.Context) error {
	tag, err := l.d.pool.Exec(ctx, l.d.sql.close, append(l.identity(), l.home)...)
	if err != nil {
		return reloadOn(err)
	}
	if tag.RowsAffected() != 1 {
		return errReload
	}
	l.cur = l.next(l.cur.until, closedSnapshot, 0)
	l.opened()
	return nil
}

// opened adjusts memory to a cursor that was just appended or read.
func (l *lane) opened() {
	l.published, l.began, l.done = l.cur.settled(), l.cur.number, 0
}

// differenceBounds finds the lowest id in the range part. OFFSET 0 keeps the
// planner from walking the primary key for it.
const differenceBounds = `
SELECT g.same, b.low
  FROM (` + guard + `) g CROSS JOIN LATERAL (
       SELECT coalesce(min(id), 9223372036854775807) AS low
         FROM (SELECT id FROM "postroom".outbox_messages
                WHERE lane = $1 AND origin = $2 AND xid >= $7::text::xid8
                  AND pg_visible_in_snapshot(xid, $8::pg_snapshot)
                ORDER BY xid OFFSET 0) s) b`

// guard is the first part of whatever reads a difference after it was opened: it
// demands the primary, the database that memory knows and the row that opened
// the difference. A standby may answer, and not yet hold its messages.
const guard = `
SELECT NOT pg_is_in_recovery() AND "postroom".origin() = $3::int8
       AND EXISTS (SELECT FROM "postroom".outbox_cursors
                    WHERE lane = $1::int4 AND origin = $2::int8 AND number = $4::int8
                      AND prev::text = $5::text AND until::text = $6::text) AS same`

// differencePageA reads what transactions wrote that were running for prev, below
// the range part: $7 are those transactions.
const differencePageA = `
SELECT g.same, m.id, m.message_id, m.topic, m.key, m.payload, m.header_names, m.header_values, m.operation, m.created_at
  FROM (` + guard + `) g
  LEFT JOIN LATERAL (
       SELECT p.* FROM unnest($7::text[]::xid8[]) x(x) CROSS JOIN LATERAL (
              SELECT id, message_id, topic, key, payload, header_names, header_values, operation, created_at
                FROM "postroom".outbox_messages
               WHERE lane = $1 AND origin = $2 AND xid = x.x AND id > $8::int8 AND id < $9::int8
               ORDER BY id LIMIT $10::int4) p
        ORDER BY p.id LIMIT $10) m ON g.same
 ORDER BY m.id`

// differencePageB reads the rest by id, from the primary key.
const differencePageB = `
SELECT g.same, m.id, m.message_id, m.topic, m.key, m.payload, m.header_names, m.header_values, m.operation, m.created_at
  FROM (` + guard + `) g
  LEFT JOIN LATERAL (
       SELECT id, message_id, topic, key, payload, header_names, header_values, operation, created_at
         FROM "postroom".outbox_messages
        WHERE lane = $1 AND origin = $2 AND id > $7::int8
          AND NOT pg_visible_in_snapshot(xid, $8::pg_snapshot) AND pg_visible_in_snapshot(xid, $9::pg_snapshot)
        ORDER BY id LIMIT $10::int4) m ON g.same
 ORDER BY m.id`

// A reader pages through the difference of a lane's row, from its last id. It
// uses nothing of the lane that changes while the difference lasts.
type reader struct {
	l           *lane
	began       int64
	prev, until string
	fin         []string // transactions of part A; empty: there is none
	low, last   int64
	partB       bool
	size        int
}

func (l *lane) newReader(ctx context.Context) (*reader, error) {
	r := &reader{l: l, began: l.began, prev: l.cur.prev, until: l.cur.until, last: l.cur.lastID, size: l.fit}
	prev, err := parseSnapshot(r.prev)
	if err != nil {
		return nil, err
	}
	until, err := parseSnapshot(r.until)
	if err != nil {
		return nil, err
	}
	r.fin = until.finished(prev)
	if r.prev == emptySnapshot {
		r.partB = true // everything is new: there is nothing to skip
		return r, nil
	}
	var same bool
	err = l.d.pool.QueryRow(ctx, l.d.sql.bounds, l.number, l.origin, l.home, r.began, r.prev, r.until,
		strconv.FormatUint(prev.xmax, 10), r.until).Scan(&same, &r.low)
	if err != nil {
		return nil, err
	}
	if !same {
		return nil, errReload
	}
	if len(r.fin) == 0 || r.last >= r.low {
		r.startB()
	}
	return r, nil
}

// firstFit is the number of messages that a lane asks for at first: what does
// not fit into a page's bytes has been sent for nothing.
const firstFit = 100

// fit returns how many messages to ask for next, after having asked for size
// and kept n, all of them unless they were cut for their bytes.
func (d *Dispatcher) fit(size, n int, cut bool) int {
	if cut {
		return max(1, n)
	}
	return min(2*size, d.cfg.PageSize)
}

// startB goes on with part B, which begins at the range part's lowest id.
func (r *reader) startB() {
	r.partB = true
	if r.low > 0 {
		r.last = max(r.last, r.low-1)
	}
}

// page returns the next messages of the difference, none at its end.
func (r *reader) page(ctx context.Context) ([]entry, error) {
	if !r.partB {
		msgs, err := r.read(ctx, r.l.d.sql.pageA, r.fin, r.last, r.low, r.size)
		if err != nil || len(msgs) > 0 {
			return msgs, err
		}
		r.startB()
	}
	return r.read(ctx, r.l.d.sql.pageB, r.last, r.prev, r.until, r.size)
}

func (r *reader) read(ctx context.Context, query string, args ...any) (msgs []entry, err error) {
	l := r.l
	rows, err := l.d.pool.Query(ctx, query, append([]any{
		l.number, l.origin, l.home, r.began, r.prev, r.until,
	}, args...)...)
	if err != nil {
		return nil, err
	}
	defer rows.Close()
	same, full, bytes := false, false, 0
	for rows.Next() {
		if full {
			continue
		}
		var e scanned
		if err := rows.Scan(append([]any{&same}, e.fields()...)...); err != nil {
			return nil, err
		}
		if e.id == nil {
			continue
		}
		bytes += e.bytes()
		if full = len(msgs) > 0 && bytes > l.d.cfg.PageBytes; !full {
			msgs = append(msgs, e.entry())
		}
	}
	if err := rows.Err(); err != nil {
		return nil, err
	}
	if !same {
		return nil, errReload
	}
	r.size = l.d.fit(r.size, len(msgs), full)
	if len(msgs) > 0 {
		r.last = msgs[len(msgs)-1].id
	}
	return msgs, nil
}

// scanned is a row of a page. Its id is nil where the row brings no message.
type scanned struct {
	id         *int64
	messageID  *string
	topic, key *string
	payload    []byte
	names      []string
	values     [][]byte
	operation  *string
	createdAt  *time.Time
}

func (s *scanned) fields() []any {
	return []any{
		&s.id, &s.messageID, &s.topic, &s.key, &s.payload, &s.names, &s.values, &s.operation, &s.createdAt,
	}
}

func (s *scanned) bytes() int {
	n := len(s.payload)
	for i, v := range s.values {
		n += len(s.names[i]) + len(v)
	}
	return n
}

func (s *scanned) entry() entry {
	m := postroom.Message{
		ID:      *s.messageID,
		Topic:   *s.topic,
		Payload: s.payload,
		Time:    s.createdAt.UTC(),
	}
	if s.key != nil {
		m.Key, m.EmptyKey = *s.key, *s.key == ""
	}
	if s.operation != nil {
		m.Operation = *s.operation
	}
	if len(s.names) > 0 {
		m.Headers = make([]postroom.Header, len(s.names))
		for i := range s.names {
			m.Headers[i] = postroom.Header{Name: s.names[i], Value: s.values[i]}
		}
	}
	return entry{*s.id, m}
}

// reloadOn turns a violation of the cursor's primary key, which is how a stale
// owner's write ends, into errReload.
func reloadOn(err error) error {
	if pgErr, ok := errors.AsType[*pgconn.PgError](err); ok && pgErr.Code == "23505" {
		return fmt.Errorf("%w: %s", errReload, pgErr.Message)
	}
	return err
}

// otherOrigins lists the databases other than this one that left messages or
// cursors in a lane, in the order of their messages, by skipping from one to
// the next through the primary keys.
const otherOrigins = `
WITH RECURSIVE m(origin) AS (
    (SELECT origin FROM "postroom".outbox_messages WHERE lane = $1::int4 ORDER BY origin LIMIT 1)
    UNION ALL
    SELECT (SELECT origin FROM "postroom".outbox_messages
             WHERE lane = $1 AND origin > m.origin ORDER BY origin LIMIT 1)
      FROM m WHERE m.origin IS NOT NULL
)
SELECT m.origin
  FROM m
 WHERE m.origin IS NOT NULL AND m.origin <> "postroom".origin()
 ORDER BY (SELECT min(id) FROM "postroom".outbox_messages WHERE lane = $1 AND origin = m.origin)`

func (l *lane) otherOrigins(ctx context.Context) ([]int64, error) {
	rows, err := l.d.pool.Query(ctx, l.d.sql.origins, l.number)
	if err != nil {
		return nil, err
	}
	origins, err := pgx.CollectRows(rows, pgx.RowTo[int64])
	return slices.Clip(origins), err
}
