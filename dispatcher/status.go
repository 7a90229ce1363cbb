package dispatcher

import (
	"context"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/postroom/postroom/internal/pg"
)

// Status is the state of an outbox as it stands in the database.
type Status struct {
	Time  time.Time // by the database's clock
	Lanes []LaneStatus
	Heads []HeadStatus // refused messages, the oldest first, at most 100

	// Dispatchers are those that are there or were a while ago, at most 100.
	Dispatchers []InstanceStatus

	Refused, Waiting, Scheduled Count

	// OldestTransaction is the longest open transaction that may hold messages
	// back or keep deleted rows from being vacuumed; nil means there is none.
	// It shows only what the role may see: all with pg_read_all_stats.
	OldestTransaction *TransactionStatus

	// DeadRows is how many deleted messages wait to be vacuumed, as estimated
	// by PostgreSQL's statistics.
	DeadRows int64
}

// A Count is a number of rows. Up to 100,000 are counted; more are Estimated
// as at least that.
type Count struct {
	Rows      int64
	Estimated bool
}

// LaneStatus is the state of one lane.
type LaneStatus struct {
	Lane  int32
	Owner string // empty: nobody
	Fence int64
	Lease time.Time // until when it is owned; zero: it is not

	// Unpublished counts what has been committed and is not settled, Oldest is
	// how long ago the first of these was written, zero where there are none.
	// The first is that of the lowest transaction.
	Unpublished Count
	Oldest      time.Duration

	// Published is how long ago the lane last recorded progress, and Retained
	// for how long its oldest published message has been retained, by the time
	// at which it was written: far more than the retention says that
	// the cleaner lags.
	Published, Retained time.Duration
}

// HeadStatus is a refused message.
type HeadStatus struct {
	Lane     int32
	ID       string
	Topic    string
	Error    string
	ParkedAt time.Time
	Waiting  Count // messages of its topic and key behind it
}

// InstanceStatus is a dispatcher, as it has last said of itself.
type InstanceStatus struct {
	Owner string
	Lease time.Time // it is gone where this has passed

	// Troubles is what is wrong there, such as a topic that is away, with the
	// broker's last error: at most 20 texts without payloads and keys. It changes
	// within a tenth of the dispatcher's lease of what it tells of.
	Troubles []string
}

// TransactionStatus is an open transaction.
type TransactionStatus struct {
	PID         int32
	Age         time.Duration
	State       string // as in pg_stat_activity; "prepared" for a prepared one, which has no PID
	Application string
}

// countMost is how many rows are counted.
const countMost = 100_000

// statusLanes reads each lane's owner, its newest cursor and what that has not
// settled: in the range behind prev, and from the transactions that prev saw
// running. Whatever the number of messages, it reads $1 of each at most.
const statusLanes = `
SELECT l.lane, coalesce(l.owner, ''), l.fence, l.lease,
       r.n + x.n, least(r.oldest, x.oldest), c.created_at,
       (SELECT m.created_at FROM "postroom".outbox_messages m
         WHERE m.lane = l.lane AND m.origin = o.origin ORDER BY m.xid LIMIT 1), clock_timestamp()
  FROM (SELECT "postroom".origin() AS origin OFFSET 0) o, "postroom".outbox_lanes l
  LEFT JOIN LATERAL (
       SELECT until, prev, last_id, created_at
         FROM "postroom".outbox_cursors
        WHERE lane = l.lane AND origin = "postroom".origin()
        ORDER BY number DESC LIMIT 1) c ON true
 CROSS JOIN LATERAL (
       SELECT CASE WHEN c.last_id IS NULL THEN '1:1:'
                   WHEN c.last_id = 9223372036854775807 THEN c.until ELSE c.prev END AS seen) s
 CROSS JOIN LATERAL (
       SELECT count(*) AS n, min(created_at) AS oldest
         FROM (SELECT created_at FROM "postroom".outbox_messages
                WHERE lane = l.lane AND origin = o.origin AND xid >= pg_snapshot_xmax(s.seen)
                  AND NOT (c.last_id IS NOT NULL AND id <= c.last_id AND c.last_id < 9223372036854775807
                           AND pg_visible_in_snapshot(xid, c.until))
                ORDER BY xid LIMIT $1::int4) m) r
 CROSS JOIN LATERAL (
       SELECT count(*) AS n, min(created_at) AS oldest
         FROM (SELECT m.created_at FROM pg_snapshot_xip(s.seen) AS x(x) CROSS JOIN LATERAL (
                      SELECT created_at FROM "postroom".outbox_messages
                       WHERE lane = l.lane AND origin = o.origin AND xid = x.x
                         AND NOT (id <= c.last_id AND c.last_id < 9223372036854775807
                                  AND pg_visible_in_snapshot(xid, c.until))
                       ORDER BY id LIMIT $1) m
                LIMIT $1) m) x
 ORDER BY l.lane`

// statusHeads reads the refused messages that were parked first, and counts
// what waits behind each, by index outbox_parked_key.
const statusHeads = `
SELECT h.lane, h.message_id, h.topic, h.error, h.parked_at,
       (SELECT count(*) FROM (SELECT FROM "postroom".outbox_parked w
                               WHERE w.lane = h.lane AND w.topic = h.topic AND w.key = h.key
                                 AND w.number > h.number AND w.state = 'waiting'
                               LIMIT $1::int4) w)
  FROM (SELECT * FROM "postroom".outbox_parked WHERE state = 'refused'
         ORDER BY number LIMIT 100) h
 ORDER BY h.number`

const statusDispatchers = `
SELECT owner, lease, troubles FROM "postroom".outbox_dispatchers ORDER BY joined_at, owner LIMIT 100`

// statusCounts counts rows up to $1, and reads what PostgreSQL knows.
const statusCounts = `
SELECT (SELECT count(*) FROM (SELECT FROM "postroom".outbox_parked WHERE state = 'refused' LIMIT $1::int4) s),
       (SELECT count(*) FROM (SELECT FROM "postroom".outbox_parked WHERE state = 'waiting' LIMIT $1) s),
       (SELECT count(*) FROM (SELECT FROM "postroom".outbox_scheduled LIMIT $1) s),
       coalesce((SELECT n_dead_tup FROM pg_catalog.pg_stat_all_tables
                  WHERE relid = to_regclass('"postroom".outbox_messages')), 0)`

// statusTransactions finds the open transaction that began first.
const statusTransactions = `
SELECT pid, began, state, application FROM (
       SELECT pid, xact_start AS began, coalesce(state, '') AS state, coalesce(application_name, '') AS application
         FROM pg_catalog.pg_stat_activity
        WHERE xact_start IS NOT NULL AND pid <> pg_backend_pid() AND backend_type = 'client backend'
          AND datname = current_database()
       UNION ALL
       SELECT 0, prepared, 'prepared', gid FROM pg_catalog.pg_prepared_xacts WHERE database = current_database()) t
 ORDER BY began LIMIT 1`

// A Queryer is what [ReadStatus] reads through: a pool, a connection or a
// transaction.
type Queryer interface {
	Query(ctx context.Context, sql string, args ...any) (pgx.Rows, error)
}

// ReadStatus reads the state of the outbox in schema; empty means "postroom". It
// needs no dispatcher. Its cost does not grow with what is retained: each count
// ends at 100,000.
func ReadStatus(ctx context.Context, db Queryer, schema string) (*Status, error) {
	schema, err := pg.Schema(schema)
	if err != nil {
		return nil, fmt.Errorf("dispatcher: read status: %w", err)
	}
	s := &Status{}
	for _, part := range []struct {
		sql  string
		args []any
		scan func(pgx.CollectableRow) error
	}{
		{statusLanes, []any{countMost}, s.addLane},
		{statusHeads, []any{countMost}, s.addHead},
		{statusDispatchers, nil, s.addDispatcher},
		{statusCounts, []any{countMost}, s.setCounts},
		{statusTransactions, nil, s.setTransaction},
	} {
		rows, err := db.Query(ctx, pg.InSchema(part.sql, schema), part.args...)
		if err == nil {
			_, err = pgx.CollectRows(rows, func(row pgx.CollectableRow) (struct{}, error) {
				return struct{}{}, part.scan(row)
			})
		}
		if err != nil {
			return nil, fmt.Errorf("dispatcher: read status: %w", err)
		}
	}
	return s, nil
}

// counted marks a count that has reached its bound.
func counted(n int64) Count { return Count{n, n >= countMost} }

func (s *Status) addLane(row pgx.CollectableRow) error {
	l := LaneStatus{}
	var lease, oldest, published, retained *time.Time
	var n int64
	if err := row.Scan(&l.Lane, &l.Owner, &l.Fence, &lease, &n, &oldest, &published, &retained, &s.Time); err != nil {
		return err
	}
	if lease != nil {
		l.Lease = *lease
	}
	l.Unpublished = counted(n)
	l.Oldest, l.Published, l.Retained = s.since(oldest), s.since(published), s.since(retained)
	s.Lanes = append(s.Lanes, l)
	return nil
}

// since returns the age of a time that may be missing.
func (s *Status) since(t *time.Time) time.Duration {
	if t == nil {
		return 0
	}
	return max(0, s.Time.Sub(*t))
}

func (s *Status) addHead(row pgx.CollectableRow) error {
	var h HeadStatus
	var n int64
	err := row.Scan(&h.Lane, &h.ID, &h.Topic, &h.Error, &h.ParkedAt, &n)
	h.Waiting = counted(n)
	s.Heads = append(s.Heads, h)
	return err
}

func (s *Status) addDispatcher(row pgx.CollectableRow) error {
	var d InstanceStatus
	err := row.Scan(&d.Owner, &d.Lease, &d.Troubles)
	s.Dispatchers = append(s.Dispatchers, d)
	return err
}

func (s *Status) setCounts(row pgx.CollectableRow) error {
	var refused, waiting, scheduled int64
	err := row.Scan(&refused, &waiting, &scheduled, &s.DeadRows)
	s.Refused, s.Waiting, s.Scheduled = counted(refused), counted(waiting), counted(scheduled)
	return err
}

func (s *Status) setTransaction(row pgx.CollectableRow) error {
	var t TransactionStatus
	var began time.Time
	if err := row.Scan(&t.PID, &began, &t.State, &t.Application); err != nil {
		return err
	}
	t.Age = s.since(&began)
	s.OldestTransaction = &t
	return nil
}
