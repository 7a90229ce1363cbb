package idempotency

import (
	"context"
	"errors"
	"log/slog"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/postroom/postroom/internal/pg"
	"github.com/postroom/postroom/internal/waits"
)

// releaseOwn lets the next attempt run at once. A row that is locked it leaves to
// the lease: behind a dead network its lock may last.
const releaseOwn = `
WITH free AS MATERIALIZED (
    SELECT tenant, operation, key FROM "postroom".idempotency_keys
     WHERE tenant = $1::text AND operation = $2::text AND key = $3::text
       AND fence = $4::bigint AND state = 'in_flight'
       FOR NO KEY UPDATE SKIP LOCKED
), changed AS (
    UPDATE "postroom".idempotency_keys k
       SET state = $5::text, locked_until = clock_timestamp()
      FROM free
     WHERE k.tenant = free.tenant AND k.operation = free.operation AND k.key = free.key
       AND k.fence = $4::bigint AND k.state = 'in_flight'
 RETURNING 1
)
SELECT count(*) FROM changed`

// release gives the key free. Where it cannot, the lease ends by itself.
func (a *attempt) release(ctx context.Context) {
	if _, err := a.leaveAs(context.WithoutCancel(ctx), stateReleased); err != nil {
		a.s.cfg.Logger.LogAttrs(ctx, slog.LevelWarn, "release an idempotency key: it is free when its lease ends",
			slog.String("operation", a.id.operation), slog.Any("error", err))
	}
}

// markUnknown keeps the key from all attempts. It tries for longer than release,
// since the end of the lease would let another attempt run.
func (a *attempt) markUnknown(ctx context.Context, cause error) (end, error) {
	patient, cancel := context.WithTimeout(context.WithoutCancel(ctx), settleTime)
	defer cancel()
	pause := waits.Growing(20*time.Millisecond, time.Second)
	n, err := a.leaveAs(patient, stateUnknown)
	for err != nil && waits.For(patient, pause.NextBackOff()) == nil {
		n, err = a.leaveAs(patient, stateUnknown)
	}
	if err == nil && n == 0 {
		err = errFence
	}
	a.s.cfg.Logger.LogAttrs(ctx, slog.LevelError, "the outcome under an idempotency key is unknown: see resolve_idempotency_key",
		slog.String("operation", a.id.operation), slog.Any("error", errors.Join(cause, err)))
	return endUnknown, cause
}

// leaveAs moves the row out of the state in flight, on the attempt's connection
// where that lives, else on another one. The server may need a moment to notice
// that the former connection is closed, and to free its lock.
func (a *attempt) leaveAs(ctx context.Context, state string) (changed int, err error) {
	if a.id.key == "" {
		return 1, nil
	}
	ctx, cancel := context.WithTimeout(ctx, releaseTime)
	defer cancel()
	settings := quickly
	if state == stateUnknown {
		settings = durably
	}
	for try := 1; ; try++ {
		elsewhere := a.conn == nil || a.conn.Conn().IsClosed()
		if elsewhere {
			a.disconnect()
			if err := a.connect(ctx); err != nil {
				return 0, err
			}
		}
		err = own(ctx, a.conn, settings, a.s.cfg.Schema, releaseOwn, func(r pgx.Row) error { return r.Scan(&changed) },
			a.id.tenant, a.id.operation, a.id.key, a.fence, state)
		lost := a.conn.Conn().IsClosed()
		a.elsewhere = a.elsewhere || elsewhere || lost
		if try == releaseTries || changed > 0 || !a.elsewhere || err != nil && !lost {
			return changed, err
		}
		if err := waits.For(ctx, time.Duration(try)*releasePause); err != nil {
			return changed, err
		}
	}
}

const (
	releaseTries = 6
	releasePause = 10 * time.Millisecond
)

const lockToSettle = `
SELECT state, fence FROM "postroom".idempotency_keys
 WHERE tenant = $1::text AND operation = $2::text AND key = $3::text
   FOR NO KEY UPDATE`

// settle finds out what became of a COMMIT whose answer was lost.
func (a *attempt) settle(ctx context.Context, cause error) (end, error) {
	if a.id.key == "" {
		return endPending, cause
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), settleTime)
	defer cancel()
	pause := waits.Growing(20*time.Millisecond, time.Second)
	for {
		a.disconnect()
		e, err := a.settleOnce(ctx)
		if err == nil && e == endDone {
			return e, nil
		}
		if err == nil {
			return e, cause
		}
		if isCode(err, "55P03") || waits.For(ctx, pause.NextBackOff()) != nil {
			return endPending, errors.Join(cause, err)
		}
	}
}

// settleOnce reads first: where the COMMIT was executed nothing waits. Else it
// waits for the transaction's lock, behind which the state is final.
func (a *attempt) settleOnce(ctx context.Context) (end, error) {
	r, err := a.s.look(ctx, a.id)
	if err != nil {
		return 0, err
	}
	if r != nil && r.state == stateCompleted && r.fence == a.fence {
		return endDone, nil
	}
	if err := a.connect(ctx); err != nil {
		return 0, err
	}
	var state string
	var fence int64
	var b pgx.Batch
	b.Queue(beginOwn)
	b.Queue(`SELECT set_config('lock_timeout', '2s', true)`)
	b.Queue(pg.InSchema(lockToSettle, a.s.cfg.Schema), a.id.tenant, a.id.operation, a.id.key).
		QueryRow(func(r pgx.Row) error { return r.Scan(&state, &fence) })
	b.Queue("rollback") // a COMMIT might wait for a standby that is away
	err = a.conn.SendBatch(ctx, &b).Close()
	rollback(ctx, a.conn.Conn())
	switch {
	case errors.Is(err, pgx.ErrNoRows):
		return endLost, nil
	case err != nil:
		return 0, err
	case fence != a.fence:
		return endLost, nil
	case state == stateCompleted:
		return endDone, nil
	case state == stateInFlight:
		return endTrouble, nil // and so it is released
	}
	return endUnknown, nil
}
