package idempotency

import (
	"bytes"
	"context"
	"crypto/rand"
	"encoding/binary"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/postroom/postroom/internal/pg"
)

// Bounds of what the package's own statements may take.
const (
	claimTime    = 10 * time.Second
	commitTime   = 30 * time.Second
	rollbackTime = 5 * time.Second
	releaseTime  = 5 * time.Second
	settleTime   = 10 * time.Second
)

const (
	stateInFlight  = "in_flight"
	stateReleased  = "released"
	stateCompleted = "completed"
	stateUnknown   = "unknown"
)

// store is the table of keys, as one middleware or call uses it.
type store struct {
	pool *pgxpool.Pool
	cfg  Config
}

// id is what a key's row is found by.
type id struct{ tenant, operation, key string }

// call is one request for what a key stands for.
type call struct {
	id
	version     version
	fingerprint func(version) []byte
}

// row is a key's row, and its answer where it is completed and not expired.
type row struct {
	fingerprint  []byte
	version      version
	state        string
	fence        int64
	rest         time.Duration // of the lease
	expired      bool
	resourceType *string
	resourceID   *string
	answer       *answer
}

// answer is what is stored of an answer.
type answer struct {
	status int // 0 for what Do stores
	names  []string
	values [][]byte
	body   []byte // nil: not kept
}

// columns are those that scanRow reads, of o and a.
const columns = `
SELECT o.fingerprint, o.fingerprint_version, o.state, o.fence,
       extract(epoch FROM o.locked_until - clock_timestamp())::float8, o.expires_at <= clock_timestamp(),
       o.resource_type, o.resource_id, a.status, a.header_names, a.header_values, a.body`

// look reads a key without a claim.
const look = columns + `
  FROM "postroom".idempotency_keys o
  LEFT JOIN "postroom".idempotency_answers a
       ON o.state = 'completed' AND a.tenant = o.tenant AND a.operation = o.operation AND a.key = o.key
 WHERE o.tenant = $1::text AND o.operation = $2::text AND o.key = $3::text`

// claim reads first: an insert that came first would wait for whoever is changing
// the row, and a repeat draws no transaction id. It returns no row where another
// one has inserted it meanwhile, or where that one is gone again.
const claim = `
WITH old AS MATERIALIZED (
    SELECT * FROM "postroom".idempotency_keys
     WHERE tenant = $1::text AND operation = $2::text AND key = $3::text
), new AS (
    INSERT INTO "postroom".idempotency_keys
           (tenant, operation, key, fingerprint, fingerprint_version, state, fence,
            locked_until, first_seen, expires_at, tombstone_until)
    SELECT $1::text, $2::text, $3::text, $4::bytea, $5::smallint, 'in_flight', $6::bigint,
           now + $7::interval, now, now + $8::interval, now + $8::interval + $9::interval
      FROM clock_timestamp() now
     WHERE NOT EXISTS (SELECT FROM old)
        ON CONFLICT DO NOTHING
 RETURNING *
), o AS (
    SELECT * FROM old UNION ALL SELECT * FROM new
)` + columns + `
  FROM o
  LEFT JOIN "postroom".idempotency_answers a
       ON o.state = 'completed' AND a.tenant = o.tenant AND a.operation = o.operation AND a.key = o.key`

func scanRow(r pgx.Row) (*row, error) {
	var (
		f      row
		rest   float64
		status *int
		a      answer
	)
	err := r.Scan(&f.fingerprint, &f.version, &f.state, &f.fence, &rest, &f.expired,
		&f.resourceType, &f.resourceID, &status, &a.names, &a.values, &a.body)
	if errors.Is(err, pgx.ErrNoRows) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	f.rest = time.Duration(rest * float64(time.Second))
	if status != nil {
		a.status = *status
		f.answer = &a
	}
	return &f, nil
}

// takeOver gives the row to another fence, if nobody has it locked: a lock says
// that the holder lives, whatever its lease. It returns how many rows it locked,
// and how many it changed. A key that begins anew gets new times.
const takeOver = `
WITH free AS MATERIALIZED (
    SELECT tenant, operation, key FROM "postroom".idempotency_keys
     WHERE tenant = $1::text AND operation = $2::text AND key = $3::text
       FOR NO KEY UPDATE SKIP LOCKED
), taken AS (
    UPDATE "postroom".idempotency_keys k
       SET state = 'in_flight', fence = $4::bigint, completed_at = NULL,
           resource_type = NULL, resource_id = NULL, locked_until = now + $6::interval,
           first_seen = CASE WHEN k.expires_at > now THEN k.first_seen ELSE now END,
           expires_at = CASE WHEN k.expires_at > now THEN k.expires_at ELSE now + $7::interval END,
           tombstone_until = CASE WHEN k.expires_at > now THEN k.tombstone_until
                                  ELSE now + $7::interval + $8::interval END
      FROM free, clock_timestamp() now
     WHERE k.tenant = free.tenant AND k.operation = free.operation AND k.key = free.key
       AND k.fence = $5::bigint
       AND (k.state IN ('in_flight', 'released') AND k.locked_until <= now
            OR $9::boolean AND k.state = 'completed' AND k.expires_at <= now
            OR $10::boolean AND k.state = 'unknown')
 RETURNING 1
)
SELECT (SELECT count(*) FROM free), (SELECT count(*) FROM taken)`

// quickly and durably are settings of the package's own short transactions. A
// claim that a crash takes back is one that nothing was done under, so it needs no
// flush, nor does a release.
const (
	quickly = `SELECT set_config('lock_timeout', '1s', true), set_config('synchronous_commit', 'off', true)`
	durably = `SELECT set_config('lock_timeout', '1s', true)`
)

// beginOwn makes short transactions independent of the database's defaults: in
// another isolation level they would fail for what happens beside them.
const beginOwn = "begin isolation level read committed read write"

// own runs one statement in a short transaction, in one round trip. On an error
// the connection is idle again, or closed.
func own(
	ctx context.Context, conn *pgxpool.Conn, settings, schema, sql string, read func(pgx.Row) error, args ...any,
) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), claimTime)
	defer cancel()
	var b pgx.Batch
	b.Queue(beginOwn)
	b.Queue(settings)
	b.Queue(pg.InSchema(sql, schema), args...).QueryRow(read)
	b.Queue("commit")
	err := conn.SendBatch(ctx, &b).Close()
	if err != nil {
		rollback(ctx, conn.Conn())
	}
	return err
}

// rollback ends what transaction there is. Where that fails the connection is
// closed.
func rollback(ctx context.Context, conn *pgx.Conn) {
	if conn.IsClosed() || conn.PgConn().TxStatus() == 'I' {
		return
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), rollbackTime)
	defer cancel()
	if _, err := conn.Exec(ctx, "rollback"); err != nil {
		_ = conn.Close(ctx)
	}
}

// newFence draws the number of an attempt. One that counted from 1 would let a
// paused attempt at a deleted row run under the next row with the key.
func newFence() int64 {
	var b [8]byte
	_, _ = rand.Read(b[:]) // never fails, see crypto/rand
	return int64(binary.BigEndian.Uint64(b[:]) >> 1)
}

// verdict is what a key's row says to a request.
type verdict int

const (
	verdictMine     verdict = iota // the request holds the key
	verdictAbsent                  // there is no row
	verdictFree                    // it may be taken over, if nobody has it locked
	verdictReplay                  // there is an answer
	verdictReused                  // it belongs to another request
	verdictForeign                 // a release that is newer than this one made it
	verdictInFlight                // the request runs
	verdictExpired                 // the answer is gone
	verdictUnknown                 // nobody knows the outcome
)

// judge compares the fingerprint before it looks at the state: a changed request
// can never succeed under the key, so it is not to be sent again either.
func (s *store) judge(c call, r *row, fence int64) verdict {
	switch {
	case r == nil:
		return verdictAbsent
	case !r.version.known():
		return verdictForeign
	case !bytes.Equal(r.fingerprint, c.fingerprint(r.version)):
		return verdictReused
	case r.state == stateInFlight && r.fence == fence:
		return verdictMine
	case r.state == stateUnknown && s.cfg.Reconcile != nil:
		return verdictFree
	case r.state == stateUnknown:
		return verdictUnknown
	case r.state == stateCompleted && r.expired && s.cfg.ReuseExpired:
		return verdictFree
	case r.state == stateCompleted && (r.expired || r.answer == nil):
		return verdictExpired
	case r.state == stateCompleted:
		return verdictReplay
	case r.state == stateReleased, r.rest <= 0:
		return verdictFree
	}
	return verdictInFlight
}

const claimTries = 3

// enter claims the key of c. With verdictMine it returns an attempt, which holds
// a connection; else the row, if there is one, and no attempt. ctx bounds the
// waits for a connection.
func (s *store) enter(ctx context.Context, c call) (*attempt, verdict, *row, error) {
	ctx, cancel := context.WithTimeout(ctx, s.cfg.QueueTimeout)
	defer cancel()
	free := running.try(s.pool)
	// All connections but one may be with slow handlers.
	for patience := 100 * time.Millisecond; free == nil; patience = min(2*patience, 2*time.Second) {
		r, err := s.look(ctx, c.id)
		if err != nil {
			return nil, 0, nil, err
		}
		if v := s.judge(c, r, -1); v != verdictAbsent && v != verdictFree {
			return nil, v, r, nil
		}
		if free, err = running.wait(ctx, s.pool, patience); err != nil {
			return nil, 0, nil, fmt.Errorf("wait for a connection: %w", err)
		}
	}
	a := &attempt{s: s, id: c.id, fence: newFence(), free: free}
	v, r, err := s.claim(ctx, c, a)
	if err != nil || v != verdictMine {
		a.leave()
		return nil, v, r, err
	}
	return a, v, r, nil
}

// enterPlain returns an attempt without a key.
func (s *store) enterPlain(ctx context.Context, operation string) (*attempt, error) {
	ctx, cancel := context.WithTimeout(ctx, s.cfg.QueueTimeout)
	defer cancel()
	free, err := running.wait(ctx, s.pool, s.cfg.QueueTimeout)
	if err == nil && free == nil {
		err = context.DeadlineExceeded
	}
	if err != nil {
		return nil, fmt.Errorf("wait for a connection: %w", err)
	}
	a := &attempt{s: s, id: id{operation: operation}, free: free}
	if err := a.connect(ctx); err != nil {
		a.leave()
		return nil, err
	}
	return a, nil
}

// look reads a key on any connection.
func (s *store) look(ctx context.Context, k id) (r *row, err error) {
	for losses := int32(0); ; losses++ {
		r, err = scanRow(s.pool.QueryRow(ctx, pg.InSchema(look, s.cfg.Schema), k.tenant, k.operation, k.key))
		if err == nil || ctx.Err() != nil || !isDead(err) || losses == s.pool.Stat().MaxConns() {
			return r, err
		}
	}
}

// claim claims the key for a. A claim whose answer was lost is made again on another
// connection, and known by its fence.
func (s *store) claim(ctx context.Context, c call, a *attempt) (v verdict, r *row, err error) {
	losses := int32(0) // a restart of the server leaves all connections of the pool dead
	for try := 0; try < claimTries; try++ {
		if err := a.connect(ctx); err != nil {
			return 0, nil, err
		}
		v, r, err = s.claimOnce(ctx, c, a)
		switch {
		case err == nil && v != verdictAbsent:
			return v, r, nil
		case err == nil: // what was in the way is gone, or not yet to be seen
		case isCode(err, "55P03"): // a caller's open transaction claims the key
			return verdictInFlight, nil, nil
		case a.conn.Conn().IsClosed() && losses < s.pool.Stat().MaxConns():
			losses++
			try--
			a.disconnect()
		case isCode(err, "40001"), isCode(err, "40P01"):
		default:
			return 0, nil, err
		}
	}
	return verdictInFlight, nil, nil // never run without a row
}

// claimOnce claims an absent key, or takes it over. It returns verdictAbsent where
// that is to be tried again.
func (s *store) claimOnce(ctx context.Context, c call, a *attempt) (v verdict, r *row, err error) {
	err = own(ctx, a.conn, quickly, s.cfg.Schema, claim, func(q pgx.Row) (err error) {
		r, err = scanRow(q)
		return err
	}, s.claiming(c, a.fence)...)
	if err != nil {
		return 0, nil, err
	}
	v = s.judge(c, r, a.fence)
	if v != verdictFree {
		return v, r, nil
	}
	var locked, taken int
	err = own(ctx, a.conn, quickly, s.cfg.Schema, takeOver, func(q pgx.Row) error { return q.Scan(&locked, &taken) },
		s.takingOver(c, a.fence, r.fence)...)
	switch {
	case err != nil:
		return 0, nil, err
	case locked == 0:
		return verdictInFlight, r, nil
	case taken == 0:
		return verdictAbsent, nil, nil
	}
	a.inherited = r.state == stateInFlight || r.state == stateUnknown
	return verdictMine, r, nil
}

// claiming are the arguments of claim.
func (s *store) claiming(c call, fence int64) []any {
	return []any{
		c.tenant, c.operation, c.key, c.fingerprint(c.version), int16(c.version), fence,
		s.cfg.Lease, s.cfg.Retention, s.cfg.Tombstone,
	}
}

// takingOver are the arguments of takeOver.
func (s *store) takingOver(c call, fence, old int64) []any {
	return []any{
		c.tenant, c.operation, c.key, fence, old,
		s.cfg.Lease, s.cfg.Retention, s.cfg.Tombstone, s.cfg.ReuseExpired, s.cfg.Reconcile != nil,
	}
}

// isDead reports whether err says that a connection was dead, and not that none
// can be had.
func isDead(err error) bool {
	if _, ok := errors.AsType[*pgconn.ConnectError](err); ok {
		return false
	}
	pgErr, ok := errors.AsType[*pgconn.PgError](err)
	return !ok || strings.HasPrefix(pgErr.Code, "57P")
}

func isCode(err error, code string) bool {
	pgErr, ok := errors.AsType[*pgconn.PgError](err)
	return ok && pgErr.Code == code
}

// conflict reports whether err says that a transaction lost against another one.
func conflict(err error) bool { return isCode(err, "40001") || isCode(err, "40P01") }

// trouble reports whether err says that the database is at fault.
func trouble(err error) bool {
	if conflict(err) || isCode(err, "55P03") {
		return true
	}
	pgErr, ok := errors.AsType[*pgconn.PgError](err)
	if !ok {
		return true // no answer
	}
	switch pgErr.Code[:min(2, len(pgErr.Code))] {
	case "08", "53", "57", "58":
		return true
	}
	return strings.HasPrefix(pgErr.Code, "25006")
}
