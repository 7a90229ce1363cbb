package migrations

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/cenkalti/backoff/v4"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
)

// SetLanes changes the number of lanes of an existing installation, 1 to 256,
// while writers and dispatchers run. It does nothing where there are as many.
//
// When it returns nil, everything is written to lanes of a new generation from
// then on. Dispatchers begin with those when the former ones are drained, within
// seconds where the broker takes messages, and nothing changes its order.
//
// It needs outbox_messages for itself for a moment, and so waits for every
// transaction that has written or read it, a prepared one or a pg_dump
// included. It asks for that moment again and again, and lets others pass in
// between: writers wait for at most 1.5 seconds at a time. It gives up when
// ctx ends, without a trace.
//
// Of cfg only Schema is used.
func SetLanes(ctx context.Context, pool *pgxpool.Pool, lanes int, cfg Config) error {
	cfg, err := cfg.withDefaults()
	if lanes < 1 || lanes > maxLanes {
		err = errors.Join(err, fmt.Errorf("migrations: SetLanes to %d lanes, want 1 to %d", lanes, maxLanes))
	}
	if err != nil {
		return err
	}
	retry := backoff.NewExponentialBackOff(
		backoff.WithInitialInterval(100*time.Millisecond), backoff.WithMaxInterval(5*time.Second), backoff.WithMaxElapsedTime(0))
	for patience := 100 * time.Millisecond; ; patience = min(2*patience, mostPatience) {
		// Each statement must see what was committed before it.
		err := pgx.BeginTxFunc(ctx, pool, pgx.TxOptions{IsoLevel: pgx.ReadCommitted, AccessMode: pgx.ReadWrite}, func(tx pgx.Tx) error {
			return setLanes(ctx, tx, lanes, patience, cfg.Schema)
		})
		if err == nil {
			return nil
		}
		pgErr, ok := errors.AsType[*pgconn.PgError](err)
		if !ok || pgErr.Code != "55P03" && pgErr.Code != "40P01" {
			return fmt.Errorf("migrations: set lanes: %w", err)
		}
		t := time.NewTimer(retry.NextBackOff())
		select {
		case <-t.C:
		case <-ctx.Done():
			t.Stop()
			return fmt.Errorf("migrations: set lanes: %w: %w", ctx.Err(), err)
		}
	}
}

const (
	maxLanes = 256

	// mostPatience exceeds PostgreSQL's deadlock_timeout of one second, after
	// which an autovacuum that is in the way is cancelled.
	mostPatience = 1500 * time.Millisecond

	newestLanes = `SELECT generation, lanes FROM "postroom".outbox_generations ORDER BY generation DESC LIMIT 1`

	setLaneTimeouts = `SELECT set_config('lock_timeout', $1, true), set_config('synchronous_commit', 'on', true)`

	// alterLanes waits for all who have written to the former lanes: their locks
	// last until they have ended. What is written after it takes the new
	// defaults, whatever snapshot its transaction has and whoever planned it
	// when.
	alterLanes = `
ALTER TABLE "postroom".outbox_messages
      ALTER COLUMN generation SET DEFAULT %d, ALTER COLUMN lanes SET DEFAULT %d`

	// insertGeneration takes its snapshot while alterLanes' lock is held.
	insertGeneration = `
WITH made AS (
    INSERT INTO "postroom".outbox_generations (generation, lanes, origin, former)
    VALUES ($1::int2, $2::int2, "postroom".origin(), pg_current_snapshot())
)
INSERT INTO "postroom".outbox_lanes (lane, generation)
SELECT $1::int4 * 1000 + n, $1 FROM generate_series(0, $2::int4 - 1) n`
)

func setLanes(ctx context.Context, tx pgx.Tx, lanes int, patience time.Duration, schema string) error {
	if _, err := tx.Exec(ctx, setLaneTimeouts, fmt.Sprintf("%dms", patience.Milliseconds())); err != nil {
		return err
	}
	if _, err := tx.Exec(ctx, lockSchema, lockKey(schema)); err != nil {
		return err
	}
	var generation, present int
	if err := tx.QueryRow(ctx, inSchema(newestLanes, schema)).Scan(&generation, &present); err != nil {
		return err
	}
	if present == lanes {
		return nil
	}
	if _, err := tx.Exec(ctx, inSchema(fmt.Sprintf(alterLanes, generation+1, lanes), schema)); err != nil {
		return err
	}
	_, err := tx.Exec(ctx, inSchema(insertGeneration, schema), generation+1, lanes)
	return err
}
