package idempotency

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/postroom/postroom/internal/pg"
	"github.com/postroom/postroom/internal/waits"
)

// A Cleaner deletes answers that have expired and, later, the keys themselves, as
// the Config under which each key was first used says ([Config].Retention,
// [Config].Tombstone). A request with a key that is deleted is a new one. Keys whose
// outcome is unknown are kept until it is resolved, and those of a running request
// as long as it runs.
//
// It also forgets calls to other services ([Calls]).
//
// Several cleaners may run at a time. Pool must be set.
type Cleaner struct {
	Pool   *pgxpool.Pool
	Schema string // holds Postroom's tables. Default "postroom".

	// CallRetention is how long a call to another service is remembered, from its first
	// attempt on. A repeat after that is taken for a first attempt, so it must be longer
	// than any repeat may take. Default 90 days, at least an hour.
	CallRetention time.Duration

	// Interval is the time between the end of one cleaning and the next.
	// Default 10min, at least 1ms.
	Interval time.Duration

	// Logger receives what Run cannot return. Default slog.Default().
	Logger *slog.Logger
}

func (c Cleaner) withDefaults() (Cleaner, error) {
	var errs []error
	bad := func(format string, args ...any) {
		errs = append(errs, fmt.Errorf("idempotency: Cleaner."+format, args...))
	}
	if c.Pool == nil {
		bad("Pool is nil")
	}
	schema, err := pg.Schema(c.Schema)
	if err != nil {
		bad("%w", err)
	}
	c.Schema = schema
	if c.CallRetention == 0 {
		c.CallRetention = 90 * 24 * time.Hour
	}
	if c.CallRetention < time.Hour {
		bad("CallRetention is %v, want at least 1h", c.CallRetention)
	}
	if c.Interval == 0 {
		c.Interval = 10 * time.Minute
	}
	if c.Interval < time.Millisecond {
		bad("Interval is %v, want at least 1ms", c.Interval)
	}
	if c.Logger == nil {
		c.Logger = slog.Default()
	}
	return c, errors.Join(errs...)
}

// Run cleans at once and then after each Interval, until ctx ends, and returns nil.
// What fails is logged and tried again; Run returns an error only for wrong fields.
func (c Cleaner) Run(ctx context.Context) error {
	c, err := c.withDefaults()
	if err != nil {
		return err
	}
	for ctx.Err() == nil {
		answers, keys, calls, err := c.clean(ctx)
		counts := []slog.Attr{slog.Int64("answers", answers), slog.Int64("keys", keys), slog.Int64("calls", calls)}
		switch {
		case err != nil && ctx.Err() == nil:
			c.Logger.LogAttrs(ctx, slog.LevelWarn, "clean idempotency keys", append(counts, slog.Any("error", err))...)
		case answers+keys+calls > 0:
			c.Logger.LogAttrs(ctx, slog.LevelInfo, "idempotency keys cleaned", counts...)
		}
		_ = waits.For(ctx, c.Interval)
	}
	return nil
}

// Clean deletes once what is too old now, and returns how many answers, keys and
// calls that was, also beside an error. It deletes in chunks that each commit, and
// rests after each for as long as it took.
func (c Cleaner) Clean(ctx context.Context) (answers, keys, calls int64, err error) {
	c, err = c.withDefaults()
	if err != nil {
		return 0, 0, 0, err
	}
	return c.clean(ctx)
}

// deleteAnswers deletes a chunk of expired answers, from a time on: behind what the
// chunk before has deleted, which the index still holds. It passes over what others
// have locked. now() ends the scan of the index, as clock_timestamp() would not.
const deleteAnswers = `
WITH gone AS (
    DELETE FROM "postroom".idempotency_answers
     WHERE ctid = ANY (ARRAY(
           SELECT ctid FROM "postroom".idempotency_answers
            WHERE expires_at >= $1::timestamptz AND expires_at <= now()
            ORDER BY expires_at
            LIMIT $2::int
              FOR UPDATE SKIP LOCKED))
 RETURNING expires_at AS at
)
SELECT count(*), coalesce(max(at), $1::timestamptz) FROM gone`

// deleteKeys deletes a chunk of keys. The lock that a running request has on its
// row, and the lease before it, keep that row.
const deleteKeys = `
WITH gone AS (
    DELETE FROM "postroom".idempotency_keys
     WHERE ctid = ANY (ARRAY(
           SELECT ctid FROM "postroom".idempotency_keys
            WHERE tombstone_until >= $1::timestamptz AND tombstone_until <= now()
              AND state <> 'unknown' AND locked_until <= now()
            ORDER BY tombstone_until
            LIMIT $2::int
              FOR UPDATE SKIP LOCKED))
 RETURNING tombstone_until AS at
)
SELECT count(*), coalesce(max(at), $1::timestamptz) FROM gone`

// deleteCalls deletes a chunk of calls.
const deleteCalls = `
WITH gone AS (
    DELETE FROM "postroom".idempotency_calls
     WHERE ctid = ANY (ARRAY(
           SELECT ctid FROM "postroom".idempotency_calls
            WHERE first_sent >= $1::timestamptz AND first_sent <= now() - $3::interval
            ORDER BY first_sent
            LIMIT $2::int
              FOR UPDATE SKIP LOCKED))
 RETURNING first_sent AS at
)
SELECT count(*), coalesce(max(at), $1::timestamptz) FROM gone`

const cleanChunk = 1000

func (c Cleaner) clean(ctx context.Context) (answers, keys, calls int64, err error) {
	if answers, err = c.delete(ctx, deleteAnswers); err != nil {
		return answers, 0, 0, fmt.Errorf("idempotency: clean answers: %w", err)
	}
	if keys, err = c.delete(ctx, deleteKeys); err != nil {
		return answers, keys, 0, fmt.Errorf("idempotency: clean keys: %w", err)
	}
	if calls, err = c.delete(ctx, deleteCalls, c.CallRetention); err != nil {
		return answers, keys, calls, fmt.Errorf("idempotency: clean calls: %w", err)
	}
	return answers, keys, calls, nil
}

func (c Cleaner) delete(ctx context.Context, sql string, more ...any) (total int64, err error) {
	from := time.Unix(0, 0)
	for {
		begin := time.Now()
		var n int64
		err := c.Pool.QueryRow(ctx, pg.InSchema(sql, c.Schema), append([]any{from, cleanChunk}, more...)...).Scan(&n, &from)
		if err != nil {
			return total, err
		}
		total += n
		if n < cleanChunk {
			return total, nil
		}
		if err := waits.For(ctx, time.Since(begin)); err != nil {
			return total, err
		}
	}
}
