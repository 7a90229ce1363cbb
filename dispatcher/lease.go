package dispatcher

import (
	"context"
	"errors"
	"time"

	"github.com/jackc/pgx/v5"
)

// errLostLane means that another dispatcher owns the lane, or may.
var errLostLane = errors.New("the lane has another owner")

// claimLanes takes every lane whose lease has ended, but for $3: those whose
// former run in this process has not come to its end. The fence goes up, which
// makes each statement of the former owner a no-op.
const claimLanes = `
UPDATE "postroom".outbox_lanes
   SET fence = fence + 1, owner = $1::text, lease = clock_timestamp() + $2::interval
 WHERE lane IN (SELECT lane FROM "postroom".outbox_lanes
                 WHERE (owner IS NULL OR lease < clock_timestamp()) AND lane <> ALL ($3::int4[])
                 ORDER BY lane FOR UPDATE SKIP LOCKED)
   AND NOT pg_is_in_recovery()
RETURNING lane, fence`

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

// claimed is a lane and the fence under which it is held.
type claimed struct {
	Lane  int32
	Fence int64
}

func (d *Dispatcher) claim(ctx context.Context) (lanes []claimed, until time.Time, err error) {
	until = time.Now().Add(d.cfg.Lease)
	rows, err := d.pool.Query(ctx, d.sql.claim, d.owner, d.cfg.Lease, d.running())
	if err != nil {
		return nil, until, err
	}
	lanes, err = pgx.CollectRows(rows, pgx.RowToStructByPos[claimed])
	return lanes, until, err
}

// renew extends the leases of lanes and returns those that are still held.
func (d *Dispatcher) renew(ctx context.Context, lanes []*lane) (held map[claimed]bool, until time.Time, err error) {
	until = time.Now().Add(d.cfg.Lease) // before asking: never later than the database's
	numbers, fences := split(lanes)
	rows, err := d.pool.Query(ctx, d.sql.renew, d.owner, d.cfg.Lease, numbers, fences)
	if err != nil {
		return nil, until, err
	}
	held = make(map[claimed]bool)
	var c claimed
	_, err = pgx.ForEachRow(rows, []any{&c.Lane, &c.Fence}, func() error {
		held[c] = true
		return nil
	})
	return held, until, err
}

func (d *Dispatcher) releaseAll(ctx context.Context, lanes []*lane) error {
	if len(lanes) == 0 {
		return nil
	}
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
