package dispatcher

import (
	"context"
	"time"
)

// The number of lanes changes by generations: [migrations.SetLanes] makes the
// lanes of a new one, to which all is written from then on, and keeps a
// snapshot, former, that has seen all that was written to the one before. Keys
// move between lanes, so the new generation starts when the former one is
// drained up to that snapshot: each of its lanes settled under a cursor that has
// seen at least as much.

// drainLane ends a lane for good where its newest cursor is memory's, is settled
// and has seen what the next generation's snapshot has seen: it is taken later,
// and no transaction that had ended then was running for it. A snapshot of
// another database says nothing here: a dump brought it along with the columns'
// defaults, so that nothing of this database was ever written to the lane.
//
// What is set aside in the lane goes to the next generation in the same
// statement, where its keys' later messages must find it.
const drainLane = `
WITH setting AS MATERIALIZED (
    SELECT set_config('synchronous_commit', 'on', true)
), ` + newestCursor + `, heir AS MATERIALIZED (
    SELECT generation, lanes, origin, former
      FROM "postroom".outbox_generations
     WHERE generation > $1 / 1000 ORDER BY generation LIMIT 1
), drained AS (
    UPDATE "postroom".outbox_lanes l
       SET drained_at = clock_timestamp(), owner = NULL, lease = NULL
      FROM setting, newest c, heir h
     WHERE ` + sameCursor + `
       AND c.last_id = 9223372036854775807 AND "postroom".origin() = $2
       AND (h.origin <> $2
            OR pg_snapshot_xmax(c.until) >= pg_snapshot_xmax(h.former)
               AND NOT EXISTS (SELECT FROM pg_snapshot_xip(c.until) AS x(x) WHERE pg_visible_in_snapshot(x.x, h.former)))
    RETURNING l.lane
), moved AS (
    UPDATE "postroom".outbox_parked p
       SET lane = h.generation * 1000 + p.hash % h.lanes
      FROM heir h, drained
     WHERE p.lane = drained.lane
)
SELECT count(*) FROM drained`

// end has the lane be drained, as soon as it can be.
func (l *lane) end() {
	l.ends.Store(true)
	l.rouse(true)
}

// drain ends the lane for good, if it may be.
func (l *lane) drain(work context.Context) error {
	if err := l.advance(work, settledID); err != nil {
		return err
	}
	l.parking.mu.Lock()
	defer l.parking.mu.Unlock()
	if l.parking.busy() { // its messages go to another lane: none may be outstanding
		return nil
	}
	var n int
	if err := l.d.pool.QueryRow(work, l.d.sql.drain, l.identity()...).Scan(&n); err != nil {
		return err
	}
	l.drained = n == 1
	if l.drained {
		l.stop() // under the lock, so that none of its messages is published any more
	}
	return nil
}

// sweepLanes forgets lanes that are drained and whose messages are no longer
// kept, with their cursors. It probes the primary key of the messages.
const sweepLanes = `
WITH empty AS MATERIALIZED (
    SELECT l.lane FROM "postroom".outbox_lanes l
     WHERE l.drained_at IS NOT NULL
       AND l.generation < (SELECT min(generation) FROM "postroom".outbox_lanes WHERE drained_at IS NULL)
       AND (SELECT true FROM "postroom".outbox_messages m
             WHERE m.lane = l.lane ORDER BY m.lane, m.origin, m.id LIMIT 1) IS NULL
       FOR UPDATE SKIP LOCKED
), history AS (
    DELETE FROM "postroom".outbox_cursors c USING empty WHERE c.lane = empty.lane
)
DELETE FROM "postroom".outbox_lanes l USING empty WHERE l.lane = empty.lane`

// sweepEvery is the pause between two looks through drained lanes.
const sweepEvery = 10 * time.Second

func (k *keeper) sweep(step context.Context) error {
	if time.Since(k.swept) < sweepEvery {
		return nil
	}
	k.swept = time.Now()
	_, err := k.d.pool.Exec(step, k.d.sql.sweep)
	return err
}
