package dispatcher

import (
	"context"
	"errors"

	"github.com/jackc/pgx/v5"

	"github.com/postroom/postroom/internal/pg"
)

// A cursor is the newest row of outbox_cursors of a lane, as it stands in the
// database: everything before prev is settled; what lies between prev and until
// is being published and is settled up to lastID.
//
// No memory of a lane is ever ahead of that row. Transaction ids are given out
// a second time after a crash that lost asynchronous commits, and on a promoted
// standby that lagged; a cursor remembered from before would skip the rows of
// their new owners. So every statement below that appends a row demands that
// the newest one is, to the letter, the one in memory.
type cursor struct {
	number      int64
	fence       int64
	owner       string
	prev, until string
	lastID      int64
}

func (c cursor) settled() bool { return c.lastID == settledID }

// errReload means that the database does not hold the row that memory holds.
var errReload = errors.New("the lane's cursor is not the one in memory")

// sql holds the package's statements with the schema filled in.
type sql struct {
	check, checkLanes, load, first, origins, home           string
	look, join, want, absent, claim, renew, release, leave  string
	poll, begin, close, advance, bounds, pageA, pageB, thin string
	behind, anyParked, park, due, drain, sweep, suspect     string
	away, parkedDue, readAway, readDue, try, settle         string
	cleanable, cleanEnded, cleanRange                       string
	places, replayBounds, replayPage                        string
}

func newSQL(schema string) sql {
	in := func(s string) string { return pg.InSchema(s, schema) }
	return sql{
		check: in(checkServer), checkLanes: in(checkLanes), look: in(lookAround), join: in(joinDispatchers), want: in(wantLanes), absent: in(leaveDispatchers),
		claim: in(claimLanes), renew: in(renewLanes), release: in(releaseLanes), leave: in(leaveLanes),
		load: in(loadCursor), first: in(firstCursor), origins: in(otherOrigins), home: in(`SELECT "postroom".origin()`),
		poll: in(pollLanes), begin: in(beginDifference), close: in(closeOrigin), advance: in(advanceCursor),
		bounds: in(differenceBounds), pageA: in(differencePageA), pageB: in(differencePageB), thin: in(thinCursors),
		behind: in(keysBehind), anyParked: in(anyParked), park: in(parkMessages), due: in(moveDue),
		drain: in(drainLane), sweep: in(sweepLanes), suspect: in(suspectMessage),
		away: in(awayScopes), parkedDue: in(dueParked), readAway: in(readAway), readDue: in(readDue), try: in(tryParked), settle: in(leaveParked),
		cleanable: in(cleanable), cleanEnded: in(cleanEnded), cleanRange: in(cleanRange),
		places: in(cursorPlaces), replayBounds: in(replayBounds), replayPage: in(replayPage),
	}
}

// loadCursor reads a lane's fence and owner and its newest cursor, if any.
const loadCursor = `
SELECT l.fence, coalesce(l.owner, ''), "postroom".origin(),
       coalesce(c.number, 0), coalesce(c.fence, 0), coalesce(c.owner, ''),
       coalesce(c.prev::text, ''), coalesce(c.until::text, ''), coalesce(c.last_id, 0)
  FROM "postroom".outbox_lanes l
  LEFT JOIN LATERAL (
       SELECT number, fence, owner, prev, until, last_id
         FROM "postroom".outbox_cursors
        WHERE lane = l.lane AND origin = $2::int8
        ORDER BY number DESC LIMIT 1) c ON true
 WHERE l.lane = $1::int4`

// firstCursor starts a lane at the empty snapshot: the row that all others
// follow. It is also written, with the next number, over a closed cursor of
// the database's own origin, which a dump that returns home brings along: its
// rows cannot be told from new ones, so all are published, some once more. The
// history that came along says nothing of when, and goes.
const firstCursor = `
WITH history AS (
    DELETE FROM "postroom".outbox_cursors
     WHERE lane = $1::int4 AND origin = $2::int8 AND number <= $3::int8
       AND EXISTS (SELECT FROM "postroom".outbox_lanes
                    WHERE lane = $1 AND fence = $4::int8 AND owner = $5::text)
)
INSERT INTO "postroom".outbox_cursors (lane, origin, number, fence, owner, prev, until, last_id)
SELECT l.lane, $2, $3 + 1, l.fence, l.owner, '1:1:', '1:1:', 9223372036854775807
  FROM "postroom".outbox_lanes l,
       (SELECT set_config('synchronous_commit', 'on', true)) durable
 WHERE l.lane = $1 AND l.fence = $4 AND l.owner = $5
ON CONFLICT DO NOTHING`

// load reads what the database holds for the lane and makes it memory's. It
// returns [errLostLane] where the lane has another owner or fence.
func (l *lane) load(ctx context.Context) error {
	for {
		var fence, home int64
		var owner string
		var c cursor
		err := l.d.pool.QueryRow(ctx, l.d.sql.load, l.number, l.origin).Scan(
			&fence, &owner, &home, &c.number, &c.fence, &c.owner, &c.prev, &c.until, &c.lastID)
		if errors.Is(err, pgx.ErrNoRows) {
			return errLostLane
		}
		if err != nil {
			return err
		}
		if fence != l.fence || owner != l.d.owner {
			return errLostLane
		}
		l.home = home
		reopened := l.origin == home && c.until == closedSnapshot
		if c.number > 0 && !reopened {
			l.cur = c
			l.opened()
			l.parked = true // perhaps: a page asks
			return nil
		}
		_, err = l.d.pool.Exec(ctx, l.d.sql.first, l.number, l.origin, c.number, l.fence, l.d.owner)
		if err != nil {
			return err
		}
	}
}

const (
	// newestCursor is the lane's newest row, $1 being the lane and $2 the origin.
	newestCursor = `newest AS MATERIALIZED (
    SELECT number, fence, owner, prev, until, last_id
      FROM "postroom".outbox_cursors
     WHERE lane = $1::int4 AND origin = $2::int8
     ORDER BY number DESC LIMIT 1
)`

	// sameCursor demands, of that row as c and the lane's row as l, that they
	// are what memory holds: the parameters that [lane.identity] returns.
	sameCursor = `l.lane = $1 AND l.fence = $3::int8 AND l.owner = $4::text
       AND c.number = $5::int8 AND c.fence = $6::int8 AND c.owner = $7::text
       AND c.prev::text = $8::text AND c.until::text = $9::text AND c.last_id = $10::int8`
)

// advanceCursor appends progress within a difference, or its end. It is the
// fence of the lane's owner: a stale one finds another fence in outbox_lanes,
// or, where the takeover is too fresh for its snapshot, the number taken.
// Losing the row repeats messages and no more, so it may be asynchronous.
const advanceCursor = `
WITH setting AS MATERIALIZED (
    SELECT set_config('synchronous_commit', 'off', true)
), ` + newestCursor + `
INSERT INTO "postroom".outbox_cursors (lane, origin, number, fence, owner, prev, until, last_id)
SELECT $1, $2, c.number + 1, l.fence, l.owner, c.prev, c.until, $11::int8
  FROM setting, newest c, "postroom".outbox_lanes l
 WHERE ` + sameCursor + `
   AND "postroom".origin() = $12::int8`

// identity is the parameters by which a statement demands memory's row.
func (l *lane) identity() []any {
	return []any{
		l.number, l.origin, l.fence, l.d.owner,
		l.cur.number, l.cur.fence, l.cur.owner, l.cur.prev, l.cur.until, l.cur.lastID,
	}
}

// next is the row that a statement has appended behind memory's.
func (l *lane) next(prev, until string, lastID int64) cursor {
	return cursor{l.cur.number + 1, l.fence, l.d.owner, prev, until, lastID}
}

// advance records that the difference is settled up to lastID.
func (l *lane) advance(ctx context.Context, lastID int64) error {
	if lastID == l.cur.lastID {
		return nil
	}
	tag, err := l.d.pool.Exec(ctx, l.d.sql.advance, append(l.identity(), lastID, l.home)...)
	if err != nil {
		return reloadOn(err)
	}
	if tag.RowsAffected() != 1 {
		return errReload
	}
	l.cur = l.next(l.cur.prev, l.cur.until, lastID)
	return nil
}

// thinCursors leaves the last row of every minute below the current
// difference, as the history of what was published when. Old rows go.
const thinCursors = `
DELETE FROM "postroom".outbox_cursors c
 WHERE c.lane = $1::int4 AND c.origin = $2::int8 AND c.number >= $3::int8 AND c.number < $4::int8
   AND (c.created_at < now() - $5::interval
        OR EXISTS (SELECT FROM "postroom".outbox_cursors n
                    WHERE n.lane = c.lane AND n.origin = c.origin AND n.number = c.number + 1
                      AND date_trunc('minute', n.created_at) = date_trunc('minute', c.created_at)))`
