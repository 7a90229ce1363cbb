package dispatcher

import (
	"context"
	"time"

	"github.com/jackc/pgx/v5"
)

// lookAround counts who is there, what they ask for and, of the generation of
// lanes whose turn it is, which are free: as [claimLanes] sees it.
const lookAround = `
WITH living AS MATERIALIZED (
    SELECT owner, joined_at, CASE WHEN wants_until > clock_timestamp() THEN wants ELSE 0 END AS wants
      FROM "postroom".outbox_dispatchers
     WHERE lease > clock_timestamp()
), turn AS MATERIALIZED (
    SELECT min(generation) AS generation FROM "postroom".outbox_lanes WHERE drained_at IS NULL
)
SELECT (SELECT count(*) FROM living),
       (SELECT count(*) FROM living l, living me
         WHERE me.owner = $1::text AND (l.joined_at, l.owner) < (me.joined_at, me.owner)),
       EXISTS (SELECT FROM living WHERE owner = $1),
       (SELECT coalesce(sum(wants), 0) FROM living WHERE owner <> $1),
       count(*),
       count(*) FILTER (WHERE drained_at IS NULL AND (owner IS NULL OR lease < clock_timestamp()
                              OR owner = $1 AND lane <> ALL ($2::int4[]))),
       (SELECT max(generation) FROM "postroom".outbox_generations) > (SELECT generation FROM turn),
       (SELECT min(generation) FROM "postroom".outbox_lanes) < (SELECT generation FROM turn)
  FROM "postroom".outbox_lanes WHERE generation = (SELECT generation FROM turn)`

// standing is what a look around shows.
type standing struct {
	Living  int  // dispatchers that are there
	Earlier int  // of those, how many joined before this one
	Present bool // whether this one is among them
	Wanted  int  // lanes that the others ask for
	Lanes   int  // of the generation whose turn it is, drained ones included
	Free    int
	Ending  bool // a newer generation waits until this one is drained
	Drained bool // lanes of older generations are kept for their messages
}

func (d *Dispatcher) look(ctx context.Context) (standing, error) {
	rows, err := d.pool.Query(ctx, d.sql.look, d.owner, d.running())
	if err != nil {
		return standing{}, err
	}
	return pgx.CollectExactlyOneRow(rows, pgx.RowToStructByPos[standing])
}

// quota is the share of this dispatcher. Those of all that are there add up to
// the number of lanes, and when one more joins or leaves no share grows or
// shrinks that need not. A dispatcher that keeps away has none, unless nobody
// else is there.
func (s standing) quota() int {
	switch {
	case s.Living == 0:
		return s.Lanes
	case !s.Present:
		return 0
	}
	return (s.Lanes - s.Earlier + s.Living - 1) / s.Living
}

// joinDispatchers says that this dispatcher is there, with what is wrong, and forgets
// those that have long died. One whose lease had ended joins anew, behind the others.
const joinDispatchers = `
WITH dead AS (
    DELETE FROM "postroom".outbox_dispatchers
     WHERE lease < clock_timestamp() - interval '10 minutes' AND owner <> $1
)
INSERT INTO "postroom".outbox_dispatchers AS d (owner, lease, troubles)
VALUES ($1::text, clock_timestamp() + $2::interval, $3::text[])
ON CONFLICT (owner) DO UPDATE
   SET lease = excluded.lease, troubles = excluded.troubles,
       joined_at = CASE WHEN d.lease < clock_timestamp() THEN clock_timestamp() ELSE d.joined_at END`

// wantLanes asks the others for lanes. The wish is short-lived, so that nobody
// gives lanes to a dispatcher that has died.
const wantLanes = `
UPDATE "postroom".outbox_dispatchers
   SET wants = $2::int4, wants_until = clock_timestamp() + $3::interval
 WHERE owner = $1::text`

// leaveDispatchers says that this dispatcher is not there.
const leaveDispatchers = `DELETE FROM "postroom".outbox_dispatchers WHERE owner = $1::text`

// patience is the number of beats after which a lane that nobody takes is
// taken by one that has its share: the one that it was left for may be dead.
const patience = 3

// share takes what is due to this dispatcher, asks for what others have of it
// and gives up what is due to those that ask. It only ever gives to those who
// ask, so that no dispatcher that dies young leaves lanes without an owner.
func (k *keeper) share(ctx, work, step context.Context) error {
	s, err := k.d.look(step)
	if err != nil {
		return err
	}
	held := k.d.staying()
	if s.Ending {
		for _, l := range held {
			l.end()
		}
	}
	if s.Drained {
		if err := k.sweep(step); err != nil {
			return err
		}
	}
	missing := s.quota() - len(held)
	if missing > 0 && s.Free > 0 {
		n, err := k.claim(ctx, work, step, missing)
		if err != nil {
			return err
		}
		missing -= n
		s.Free -= n
	}
	if missing > 0 {
		_, err = k.d.pool.Exec(step, k.d.sql.want, k.d.owner, missing, patience*k.every)
		return err
	}
	if s.Free == 0 {
		k.unclaimed = 0
	} else if k.unclaimed++; k.unclaimed > patience {
		_, err = k.claim(ctx, work, step, s.Free)
		return err
	}
	give := min(-missing, s.Wanted-s.Free)
	for _, l := range held[max(len(held)-max(give, 0), 0):] {
		l.give()
	}
	return nil
}

// claim takes up to most free lanes and runs them. It returns their number.
func (k *keeper) claim(ctx, work, step context.Context, most int) (int, error) {
	d := k.d
	free, until, err := d.claim(step, most)
	if err != nil || len(free) == 0 {
		return 0, err
	}
	var home int64
	if err := d.pool.QueryRow(step, d.sql.home).Scan(&home); err != nil {
		return 0, err // the next claim takes them again
	}
	d.home.Store(home)
	for _, c := range free {
		staying, stop := context.WithCancel(ctx)
		l := &lane{
			d: d, number: c.Lane, fence: c.Fence,
			wake: make(chan bool, 1), stop: stop, ended: make(chan struct{}),
			fit: min(firstFit, d.cfg.PageSize), starts: c.Starts, careful: c.Starts > 0,
		}
		l.parking = newParking(l)
		l.lease.Store(int64(until.Sub(d.began)))
		d.mu.Lock()
		d.lanes[l.number] = l
		d.mu.Unlock()
		go l.run(staying, work)
	}
	return len(free), nil
}

// beat is the time between two looks around.
func (d *Dispatcher) beat() time.Duration { return min(d.cfg.Lease/3, time.Second) }
