package dispatcher

import (
	"context"
	"math/rand/v2"
	"time"

	"github.com/jackc/pgx/v5"
)

// pollLanes asks for all idle lanes at once whether something has come: in the
// range from the cursor's xmax, or from the transactions that it saw running.
// Each transaction is a probe of its own: = ANY of an array that is not known
// when the plan is made reads the whole lane. It also brings the number of the newest cursor where $4 asks for it, so that
// a cursor that memory does not know is noticed even when nothing seems new.
const pollLanes = `
SELECT l.lane, pg_snapshot_xmax(pg_current_snapshot())::text::int8,
       (SELECT true FROM "postroom".outbox_messages m
         WHERE m.lane = l.lane AND m.origin = $3::int8 AND m.xid >= pg_snapshot_xmax(l.until)
         ORDER BY m.xid LIMIT 1) IS NOT NULL
       OR
       (SELECT true FROM pg_snapshot_xip(l.until) AS x(x) CROSS JOIN LATERAL (
               SELECT m.id FROM "postroom".outbox_messages m
                WHERE m.lane = l.lane AND m.origin = $3 AND m.xid = x.x
                ORDER BY m.id LIMIT 1) f
         WHERE pg_visible_in_snapshot(x.x, pg_current_snapshot())
         LIMIT 1) IS NOT NULL,
       CASE WHEN $4::bool THEN
       (SELECT c.number FROM "postroom".outbox_cursors c
         WHERE c.lane = l.lane AND c.origin = $3
         ORDER BY c.number DESC LIMIT 1) END
  FROM unnest($1::int4[], $2::text[]::pg_snapshot[]) AS l(lane, until)`

const (
	// emptyAdvance is the number of transaction ids after which an idle lane's
	// cursor moves up, at most once a second, so that what an open or aborted
	// transaction has written is not walked by every poll. Each such advance
	// draws an id of its own. A poll that takes longer than slowPoll is a reason
	// too: the snapshot passes an open transaction's id only when a later one
	// has ended, and on a quiet server none but the advance's own will.
	emptyAdvance      = 1000
	emptyAdvanceEvery = time.Second
	slowPoll          = 5 * time.Millisecond
)

// poll wakes idle lanes, again and again until ctx ends: every 2 ms while
// there is traffic, and less and less often without.
func (d *Dispatcher) poll(ctx context.Context) {
	retry := newBackoff(10*time.Millisecond, 5*time.Second)
	busy := time.Now()    // when a poll last found something
	checked := time.Now() // when the cursors' numbers were last compared
	for ctx.Err() == nil {
		lanes, states := d.idleLanes()
		if len(lanes) == 0 {
			if len(d.held()) > 0 {
				busy = time.Now()
				wait(ctx, minPollInterval)
			} else {
				wait(ctx, 10*minPollInterval)
			}
			continue
		}
		check := time.Since(checked) >= time.Second
		if check {
			checked = time.Now()
		}
		found, err := d.pollOnce(ctx, lanes, states, check)
		if ctx.Err() != nil {
			return
		}
		if err != nil {
			d.trouble.set("poll", err)
			wait(ctx, retry.NextBackOff())
			continue
		}
		d.trouble.clear("poll")
		retry.Reset()
		if found {
			busy = time.Now()
		}
		if d.waitOrWake(ctx, pause(time.Since(busy), d.cfg.MaxPollInterval)) {
			busy = time.Now()
		}
	}
}

// waitOrWake waits as [wait] does, and reports whether Wake was called. Another
// poll follows the last within a minPollInterval at the soonest.
func (d *Dispatcher) waitOrWake(ctx context.Context, pause time.Duration) bool {
	wait(ctx, min(pause, minPollInterval))
	t := time.NewTimer(pause - minPollInterval)
	defer t.Stop()
	select {
	case <-d.woken:
		return true
	case <-t.C:
	case <-ctx.Done():
	}
	return false
}

// pause grows with the time since something last came: a twentieth of it.
func pause(idle, most time.Duration) time.Duration {
	d := min(max(idle/20, minPollInterval), most)
	return d - time.Duration(rand.Int64N(int64(d)/5+1)) // so that instances do not march in step
}

func (d *Dispatcher) pollOnce(ctx context.Context, lanes []*lane, states []*pollState, check bool) (found bool, err error) {
	numbers, untils := make([]int32, len(lanes)), make([]string, len(lanes))
	byNumber := make(map[int32]int, len(lanes))
	for i, l := range lanes {
		numbers[i], untils[i], byNumber[l.number] = l.number, states[i].until, i
	}
	began := time.Now()
	rows, err := d.pool.Query(ctx, d.sql.poll, numbers, untils, d.home.Load(), check)
	if err != nil {
		return false, err
	}
	var number int32
	var xmax int64
	var something bool
	var newest *int64
	_, err = pgx.ForEachRow(rows, []any{&number, &xmax, &something, &newest}, func() error {
		i := byNumber[number]
		differs := check && (newest == nil || *newest != states[i].number)
		force := differs || states[i].stale(xmax, time.Since(began) > slowPoll)
		if something || force {
			lanes[i].rouse(force)
		}
		found = found || something
		return nil
	})
	return found, err
}

// stale reports whether the cursor should move although nothing has come.
func (s *pollState) stale(xmax int64, slow bool) bool {
	if time.Since(s.since) < emptyAdvanceEvery {
		return false
	}
	until, err := parseSnapshot(s.until)
	if err != nil {
		return true
	}
	return slow || xmax > int64(until.xmax)+emptyAdvance
}

// rouse wakes the lane; it does not block.
func (l *lane) rouse(force bool) {
	select {
	case l.wake <- force:
	default:
	}
}
