package webhook

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/postroom/postroom/internal/pg"
	"github.com/postroom/postroom/internal/waits"
)

// A Cleaner drops what receipts keep of old deliveries, and forgets them later. A
// delivery that comes again after that is taken as a new one, if its signature still
// counts: so Retention must be longer than the time for which a sender repeats, and
// than twice the tolerance of its timestamps. Where a sender signs no timestamp, as
// GitHub does, a captured delivery counts for as long as its secret does.
//
// Several cleaners may run at a time. Pool must be set.
type Cleaner struct {
	Pool   *pgxpool.Pool
	Schema string // holds Postroom's tables. Default "postroom".

	// Bodies is how long header fields and bodies are kept, conflicts among them.
	// Default 7 days, at least an hour.
	Bodies time.Duration

	// Retention is how long a delivery is known. Default 90 days, at least Bodies.
	Retention time.Duration

	// Interval is the time between the end of one cleaning and the next.
	// Default 10min, at least 1ms.
	Interval time.Duration

	// Logger receives what Run cannot return. Default slog.Default().
	Logger *slog.Logger
}

func (c Cleaner) withDefaults() (Cleaner, error) {
	var errs []error
	bad := func(format string, args ...any) {
		errs = append(errs, fmt.Errorf("webhook: Cleaner."+format, args...))
	}
	if c.Pool == nil {
		bad("Pool is nil")
	}
	schema, err := pg.Schema(c.Schema)
	if err != nil {
		bad("%w", err)
	}
	c.Schema = schema
	c.Bodies = cmp.Or(c.Bodies, 7*24*time.Hour)
	if c.Bodies < time.Hour {
		bad("Bodies is %v, want at least 1h", c.Bodies)
	}
	c.Retention = cmp.Or(c.Retention, max(90*24*time.Hour, c.Bodies))
	if c.Retention < c.Bodies {
		bad("Retention is %v, want at least %v, for which bodies are kept", c.Retention, c.Bodies)
	}
	c.Interval = cmp.Or(c.Interval, 10*time.Minute)
	if c.Interval < time.Millisecond {
		bad("Interval is %v, want at least 1ms", c.Interval)
	}
	if c.Logger == nil {
		c.Logger = slog.Default()
	}
	return c, errors.Join(errs...)
}

// Run cleans until ctx ends, and then returns nil. What fails is logged and tried
// again after Interval; Run returns an error only for wrong fields.
func (c Cleaner) Run(ctx context.Context) error {
	c, err := c.withDefaults()
	if err != nil {
		return err
	}
	for {
		n, err := c.clean(ctx)
		switch {
		case err != nil && ctx.Err() == nil:
			c.Logger.LogAttrs(ctx, slog.LevelWarn, "clean webhook receipts", slog.Int64("count", n), slog.Any("error", err))
		case n > 0:
			c.Logger.LogAttrs(ctx, slog.LevelInfo, "webhook receipts cleaned", slog.Int64("count", n))
		}
		if waits.For(ctx, c.Interval) != nil {
			return nil
		}
	}
}

// Clean drops once what is too old now, and returns how many rows it changed, also
// beside an error. It works in chunks that each commit, and rests after each for as
// long as it took.
func (c Cleaner) Clean(ctx context.Context) (int64, error) {
	c, err := c.withDefaults()
	if err != nil {
		return 0, err
	}
	return c.clean(ctx)
}

// The statements change one chunk of rows that are older than an interval, and pass
// over what another cleaner is changing. now() ends their scan of an index, as
// clock_timestamp() would not.
const (
	dropBodies = `
WITH old AS (
    SELECT endpoint, delivery_id FROM "postroom".webhook_receipts
     WHERE body IS NOT NULL AND received_at < now() - $1::interval
     ORDER BY received_at LIMIT $2::int FOR UPDATE SKIP LOCKED
)
UPDATE "postroom".webhook_receipts r SET header_names = NULL, header_values = NULL, body = NULL
  FROM old WHERE r.endpoint = old.endpoint AND r.delivery_id = old.delivery_id`

	dropConflicts = `
WITH old AS (
    SELECT endpoint, delivery_id, body_sha256 FROM "postroom".webhook_conflicts
     WHERE received_at < now() - $1::interval
     ORDER BY received_at LIMIT $2::int FOR UPDATE SKIP LOCKED
)
DELETE FROM "postroom".webhook_conflicts c
 USING old WHERE c.endpoint = old.endpoint AND c.delivery_id = old.delivery_id AND c.body_sha256 = old.body_sha256`

	dropReceipts = `
WITH old AS (
    SELECT endpoint, delivery_id FROM "postroom".webhook_receipts
     WHERE received_at < now() - $1::interval
     ORDER BY received_at LIMIT $2::int FOR UPDATE SKIP LOCKED
)
DELETE FROM "postroom".webhook_receipts r
 USING old WHERE r.endpoint = old.endpoint AND r.delivery_id = old.delivery_id`
)

const cleanChunk = 1000

func (c Cleaner) clean(ctx context.Context) (total int64, err error) {
	for _, step := range []struct {
		sql string
		age time.Duration
	}{{dropBodies, c.Bodies}, {dropConflicts, c.Bodies}, {dropReceipts, c.Retention}} {
		n, err := c.change(ctx, pg.InSchema(step.sql, c.Schema), step.age)
		total += n
		if err != nil {
			return total, fmt.Errorf("webhook: clean: %w", err)
		}
	}
	return total, nil
}

func (c Cleaner) change(ctx context.Context, sql string, age time.Duration) (total int64, err error) {
	for {
		begin := time.Now()
		tag, err := c.Pool.Exec(ctx, sql, age, cleanChunk)
		if err != nil {
			return total, err
		}
		total += tag.RowsAffected()
		if tag.RowsAffected() < cleanChunk {
			return total, nil
		}
		if err := waits.For(ctx, time.Since(begin)); err != nil {
			return total, err
		}
	}
}
