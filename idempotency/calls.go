package idempotency

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/postroom/postroom/internal/pg"
)

// Errors of a call that is not sent, to be tested for with errors.Is.
var (
	// ErrHorizon says that the service may have forgotten the key of an earlier attempt:
	// look at the other side what became of it.
	ErrHorizon = errors.New("idempotency: the first attempt under this key is older than the service remembers")

	// ErrBodyChanged says that an earlier attempt had another body: what a call sends
	// must be decided before its first attempt, and kept.
	ErrBodyChanged = errors.New("idempotency: the first attempt under this key had another body")
)

// Calls remembers in PostgreSQL when the first attempt under a key was sent, and the
// hash of its body, for [Transport.Calls]: attempts of other processes and of later
// days count. Pool must be set. A [Cleaner] forgets.
type Calls struct {
	Pool   *pgxpool.Pool
	Schema string // holds Postroom's tables. Default "postroom".
}

const remember = `
WITH old AS MATERIALIZED (
    SELECT body_sha256, extract(epoch FROM clock_timestamp() - first_sent)::float8 AS age
      FROM "postroom".idempotency_calls WHERE target = $1::text AND key = $2::text
), ins AS (
    INSERT INTO "postroom".idempotency_calls (target, key, body_sha256)
    SELECT $1::text, $2::text, $3::bytea WHERE NOT EXISTS (SELECT FROM old)
        ON CONFLICT DO NOTHING
 RETURNING body_sha256, 0::float8 AS age
)
SELECT r.*, CASE current_setting('synchronous_commit') WHEN 'off' THEN set_config('synchronous_commit', 'on', true) END
  FROM (SELECT * FROM old UNION ALL SELECT * FROM ins) r`

// first returns how long ago the first attempt under the key was sent. hash is that of
// the body, or nil where it is too long to be kept. It must be known to be durable
// before anything is sent.
func (c *Calls) first(ctx context.Context, target, key string, hash []byte) (time.Duration, error) {
	if c.Pool == nil {
		return 0, errors.New("idempotency: Calls.Pool is nil")
	}
	schema, err := pg.Schema(c.Schema)
	if err != nil {
		return 0, fmt.Errorf("idempotency: Calls.%w", err)
	}
	for range 3 { // another one's row may have been committed meanwhile
		var was []byte
		var age float64
		err := pgx.BeginTxFunc(ctx, c.Pool, pgx.TxOptions{IsoLevel: pgx.ReadCommitted}, func(tx pgx.Tx) error {
			return tx.QueryRow(ctx, pg.InSchema(remember, schema), target, key, hash).Scan(&was, &age, nil)
		})
		switch {
		case errors.Is(err, pgx.ErrNoRows):
			continue
		case err != nil:
			return 0, fmt.Errorf("idempotency: remember the call: %w", err)
		case was != nil && hash != nil && !bytes.Equal(was, hash):
			return 0, ErrBodyChanged
		}
		return time.Duration(age * float64(time.Second)), nil
	}
	return 0, errors.New("idempotency: the call's row comes and goes")
}
