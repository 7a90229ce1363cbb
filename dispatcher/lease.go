package dispatcher

import (
	"context"
	"errors"
	"time"

	"github.com/jackc/pgx/v5"
)

// errLostLane means that another dispatcher owns the lane, or may.
var errLostLane = errors.New("the lane has another owner")

// claimLanes takes up to $4 lanes that are free: released, or their lease has
// ended, or claimed by this dispatcher in a statement whose answer was lost. No
// lane of a generation is free before all of the former one are drained. It
// leaves out those whose former run in this process has not come to its end,
// $3. The fence goes up, which makes each statement of the former owner a
// no-op.
//
// An owner that has not released the lane may have died of one of its messages,
// and is counted: see poison.go.
const claimLanes = `
WITH free AS MATERIALIZED (
    SELECT lane FROM "postroom".outbox_lanes
     WHERE (owner IS NULL OR owner = $1::text OR lease < clock_timestamp())
       AND lane <> ALL ($3::int4[]) AND drained_at IS NULL
       AND generation = (SELECT min(generation) FROM "postroom".outbox_lanes WHERE drained_at IS NULL)
     ORDER BY lane LIMIT $4::int4 FOR UPDATE SKIP LOCKED
)
UPDATE "postroom".outbox_lanes l
   SET fence = fence + 1, owner = $1, lease = clock_timestamp() + $2::interval,
       starts = CASE WHEN owner IS NULL OR owner = $1 THEN starts
                     WHEN starts < 2 OR suspect THEN least(starts + 1, 100)
                     ELSE starts END,
       suspect = false
  FROM free
 WHERE l.lane = free.lane AND NOT pg_is_in_recovery()
RETURNING l.lane, l.fence, l.starts`

// renewLanes extends the leases of the lanes that are still ours.
const renewLanes = `
UPDATE "postroom".outbox_lanes l
   SET lease = clock_timestamp() + $2::interval
  FROM unnest($3::int4[], $4::int8[]) held(lane, fence)
 WHERE l.lane = held.lane AND l.fence = held.fence AND l.owner = $1::text
RETURNING l.lane, l.fence`

// releaseLanes gives lanes back before their lease ends.
const releaseLanes = `
UPDATE "postroom".outbox_lanes l
   SET owner = NULL, lease = NULL
  FROM unnest($2::int4[], $3::int8[]) held(lane, fence)
 WHERE l.lane = held.lane AND l.fence = held.fence AND l.owner = $1::text`

// leaveLanes says that this dispatcher is gone and gives back whatever it owns,
// what a claim without an answer has brought included, but for $2: what is still
// being published.
const leaveLanes = `
WITH gone AS (
    DELETE FROM "postroom".outbox_dispatchers WHERE owner = $1
)
UPDATE "postroom".outbox_lanes
   SET owner = NULL, lease = NULL
 WHERE owner = $1::text AND lane <> ALL ($2::int4[])`

// holding is a lane and the fence under which it is held.
type holding struct {
	lane  int32
	fence int64
}

// claimed is a lane that was claimed.
type claimed struct {
	Lane   int32
	Fence  int64
	Starts int
}

// claim takes up to most free lanes. The time is until when they are held.
func (d *Dispatcher) claim(ctx context.Context, most int) (lanes []claimed, until time.Time, err error) {
	until = time.Now().Add(d.cfg.Lease) // before asking: never later than the database's
	rows, err := d.pool.Query(ctx, d.sql.claim, d.owner, d.cfg.Lease, d.running(), most)
	if err != nil {
		return nil, until, err
	}
	lanes, err = pgx.CollectRows(rows, pgx.RowToStructByPos[claimed])
	return lanes, until, err
}

// renew extends the leases of lanes and returns those that are still held.
func (d *Dispatcher) renew(ctx context.Context, lanes []*lane) (held map[holding]bool, until time.Time, err error) {
	until = time.Now().Add(d.cfg.Lease)
	numbers, fences := split(lanes)
	rows, err := d.pool.Query(ctx, d.sql.renew, d.owner, d.cfg.Lease, numbers, fences)
	if err != nil {
		return nil, until, err
	}
	held = make(map[holding]bool)
	var h holding
	_, err = pgx.ForEachRow(rows, []any{&h.lane, &h.fence}, func() error {
		held[h] = true
		return nil
	})
	return held, until, err
}

func (d *Dispatcher) release(ctx context.Context, lanes []*lane) error {
	numbers, fences := split(lanes)
	_, err := d.pool.Exec(ctx, d.sql.release, d.owner, numbers, fences)
	return err
}

func split(lanes []*lane) (numbers []int32, fences []int64) {
	numbers, fences = []int32{}, []int64{}
	for _, l := range lanes {
		numbers, fences = append(numbers, l.number), append(fences, l.fence)
	}
	return numbers, fences
}
