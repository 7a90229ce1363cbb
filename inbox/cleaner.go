package inbox

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

// A Cleaner deletes the records of messages and of actions ([Once]) that are
// older than their retention. A message that comes again after that is handled
// again, so the retention must be longer than any repeat may take: the broker's
// own retention or redelivery, a replay by an operator, the time for which a
// consumer may be down. The records of messages that stand among the dead letters
// are kept.
//
// Several cleaners may run at a time. Pool must be set.
type Cleaner struct {
	Pool   *pgxpool.Pool
	Schema string // holds Postroom's tables. Default "postroom".

	// Retention is how long records are kept. Default 7 days, at least an hour.
	Retention time.Duration

	// Subscribers holds other retentions: subscriber → at least an hour, or
	// negative, which keeps its records for ever.
	Subscribers map[string]time.Duration

	// Delay is how long Run waits before it cleans for the first time, so that
	// what a broker repeats to consumers that were down finds its records.
	// Default 1h; negative means no delay.
	Delay time.Duration

	// Interval is the time between the end of one cleaning and the next.
	// Default 10min, at least 1ms.
	Interval time.Duration

	// Logger receives what Run cannot return. Default slog.Default().
	Logger *slog.Logger
}

const leastRetention = time.Hour

func (c Cleaner) withDefaults() (Cleaner, error) {
	var errs []error
	bad := func(format string, args ...any) {
		errs = append(errs, fmt.Errorf("inbox: Cleaner."+format, args...))
	}
	if c.Pool == nil {
		bad("Pool is nil")
	}
	schema, err := pg.Schema(c.Schema)
	if err != nil {
		bad("%w", err)
	}
	c.Schema = schema
	if c.Retention == 0 {
		c.Retention = 7 * 24 * time.Hour
	}
	if c.Retention < leastRetention {
		bad("Retention is %v, want at least %v", c.Retention, leastRetention)
	}
	for subscriber, d := range c.Subscribers {
		if d >= 0 && d < leastRetention {
			bad("Subscribers[%q] is %v, want at least %v, or less than 0", subscriber, d, leastRetention)
		}
	}
	if c.Delay == 0 {
		c.Delay = time.Hour
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

// Run cleans until ctx ends, and then returns nil. What fails is logged and tried
// again after Interval; Run returns an error only for wrong fields.
func (c Cleaner) Run(ctx context.Context) error {
	c, err := c.withDefaults()
	if err != nil {
		return err
	}
	pause := c.Delay
	for waits.For(ctx, pause) == nil {
		n, err := c.clean(ctx)
		switch {
		case err != nil && ctx.Err() == nil:
			c.Logger.LogAttrs(ctx, slog.LevelWarn, "clean the inbox", slog.Int64("count", n), slog.Any("error", err))
		case n > 0:
			c.Logger.LogAttrs(ctx, slog.LevelInfo, "inbox cleaned", slog.Int64("count", n))
		}
		pause = c.Interval
	}
	return nil
}

// Clean deletes once what is too old now, and returns how many records it was,
// also beside an error. It deletes in chunks that each commit, and rests after
// each for as long as it took.
func (c Cleaner) Clean(ctx context.Context) (int64, error) {
	c, err := c.withDefaults()
	if err != nil {
		return 0, err
	}
	return c.clean(ctx)
}

// nextSubscriber steps through the primary key from one subscriber to the next.
const nextSubscriber = `
SELECT coalesce((SELECT subscriber_id FROM "postroom".processed_messages
                  WHERE subscriber_id > $1::text
                  ORDER BY subscriber_id
                  LIMIT 1), '')`

func (c Cleaner) clean(ctx context.Context) (total int64, err error) {
	subscriber := ""
	for {
		err := c.Pool.QueryRow(ctx, pg.InSchema(nextSubscriber, c.Schema), subscriber).Scan(&subscriber)
		if err != nil {
			return total, fmt.Errorf("inbox: clean: %w", err)
		}
		if subscriber == "" {
			return total, nil
		}
		retention, ok := c.Subscribers[subscriber]
		if !ok {
			retention = c.Retention
		}
		if retention < 0 {
			continue
		}
		for _, sql := range []string{deleteHandled, deleteGivenUp} {
			n, err := c.delete(ctx, sql, subscriber, retention)
			total += n
			if err != nil {
				return total, fmt.Errorf("inbox: clean subscriber %q: %w", subscriber, err)
			}
		}
	}
}

// deleteHandled deletes a chunk of old records, from a time on: behind what the
// chunk before has deleted, which the index still holds. It passes over what
// another cleaner is deleting. now() ends the scan of the index, as
// clock_timestamp() would not.
const deleteHandled = `
WITH old AS (
    SELECT message_id FROM "postroom".processed_messages
     WHERE subscriber_id = $1::text AND outcome IN ('handled', 'once')
       AND processed_at >= $3::timestamptz AND processed_at < now() - $2::interval
     ORDER BY processed_at
     LIMIT $4::int
       FOR UPDATE SKIP LOCKED
), gone AS (
    DELETE FROM "postroom".processed_messages p
     USING old
     WHERE p.subscriber_id = $1::text AND p.message_id = old.message_id
 RETURNING p.processed_at
)
SELECT count(*), coalesce(max(processed_at), $3::timestamptz) FROM gone`

// deleteGivenUp is deleteHandled for messages that were set aside and whose dead
// letter a person has deleted. There are few of them.
const deleteGivenUp = `
WITH old AS (
    SELECT message_id FROM "postroom".processed_messages p
     WHERE subscriber_id = $1::text AND outcome IN ('dead', 'waiting')
       AND processed_at >= $3::timestamptz AND processed_at < now() - $2::interval
       AND NOT EXISTS (SELECT FROM "postroom".inbox_dead_letters d
                        WHERE d.subscriber_id = p.subscriber_id AND d.message_id = p.message_id)
     ORDER BY processed_at
     LIMIT $4::int
       FOR UPDATE SKIP LOCKED
), gone AS (
    DELETE FROM "postroom".processed_messages p
     USING old
     WHERE p.subscriber_id = $1::text AND p.message_id = old.message_id
 RETURNING p.processed_at
)
SELECT count(*), coalesce(max(processed_at), $3::timestamptz) FROM gone`

const cleanChunk = 1000

func (c Cleaner) delete(
	ctx context.Context, sql, subscriber string, retention time.Duration,
) (total int64, err error) {
	from := time.Unix(0, 0)
	for {
		begin := time.Now()
		var n int64
		err := c.Pool.QueryRow(ctx, pg.InSchema(sql, c.Schema), subscriber, retention, from, cleanChunk).Scan(&n, &from)
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
