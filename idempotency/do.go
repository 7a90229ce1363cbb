package idempotency

import (
	"context"
	"errors"
	"fmt"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/postroom/postroom"
	"github.com/postroom/postroom/internal/handlertx"
	"github.com/postroom/postroom/internal/pg"
)

// A Call is what [Do] and [DoTx] do at most once.
type Call struct {
	Tenant    string // whose key it is, 1 to 255 bytes
	Operation string // what is done, 1 to 512 bytes
	Key       string // 1 to 255 characters of printable ASCII

	// Input, of which a hash is stored, tells calls apart that have come under one
	// key by mistake.
	Input []byte
}

func (c Call) check() (call, error) {
	var errs []error
	if !storable(c.Tenant, maxTenantLen) {
		errs = append(errs, fmt.Errorf("idempotency: Call.Tenant has %d bytes, want 1 to %d of UTF-8 without zero bytes", len(c.Tenant), maxTenantLen))
	}
	if !storable(c.Operation, maxOperationLen) {
		errs = append(errs, fmt.Errorf("idempotency: Call.Operation has %d bytes, want 1 to %d of UTF-8 without zero bytes", len(c.Operation), maxOperationLen))
	}
	if err := checkKey(c.Key); err != nil {
		errs = append(errs, fmt.Errorf("idempotency: Call.Key: %w", err))
	}
	print := inputPrint(c.Input)
	return call{
		id: id{c.Tenant, c.Operation, c.Key}, version: versionInput,
		fingerprint: func(version) []byte { return print },
	}, errors.Join(errs...)
}

// Do runs fn in a transaction, unless a call with the tenant, operation and key of
// c has succeeded before. fn's writes and its result commit together. When Do
// returns a nil error they are durable, and replayed says that the result is that
// of an earlier call.
//
// An error of fn is returned as it is; nothing of fn remains then, nor where it
// panics, and the next call runs. While another call with the key runs, Do returns
// [ErrInFlight] at once, or after [Config].Wait. It may also return [ErrKeyReused],
// [ErrExpired] and [ErrOutcomeUnknown]. After any other error the call may be
// repeated with its key; if it had committed after all, the repeat returns its
// result.
//
// fn may run more than once, since a transaction that loses a conflict is run
// again. Its context carries the call's operation, and ends with ctx. Cancelling
// ctx prevents a commit that has not begun. The transaction refuses Commit and
// Rollback, and calls from other goroutines once fn has returned.
func Do(
	ctx context.Context, pool *pgxpool.Pool, c Call, fn func(context.Context, pgx.Tx) ([]byte, error), cfg Config,
) (result []byte, replayed bool, err error) {
	cfg, err = cfg.withDefaults()
	k, wrong := c.check()
	if err := errors.Join(err, wrong); err != nil {
		return nil, false, err
	}
	cfg.Reconcile = nil // it is for handlers, and would let an unknown outcome pass
	s := &store{pool: pool, cfg: cfg}
	a, v, found, err := s.enterPatiently(ctx, k)
	if err != nil {
		return nil, false, fmt.Errorf("idempotency: claim a key: %w", err)
	}
	if v != verdictMine {
		return known(v, found)
	}
	var d decision
	var failed error
	e, err := a.run(ctx, func(ctx context.Context, tx pgx.Tx) decision {
		d, failed = s.invoke(ctx, k.id, tx, fn)
		return d
	})
	switch {
	case e == endDone && failed == nil:
		return d.answer.body, false, nil
	case e == endUnknown:
		return nil, false, errors.Join(ErrOutcomeUnknown, failed, err)
	case e == endLost:
		look, cancel := context.WithTimeout(context.WithoutCancel(ctx), claimTime)
		defer cancel()
		found, err := s.look(look, k.id)
		if err != nil {
			return nil, false, fmt.Errorf("idempotency: look a key up: %w", err)
		}
		return known(s.judge(k, found, -1), found)
	case failed != nil:
		return nil, false, failed
	}
	return nil, false, fmt.Errorf("idempotency: %w", err)
}

// invoke calls fn and decides.
func (s *store) invoke(
	ctx context.Context, k id, tx pgx.Tx, fn func(context.Context, pgx.Tx) ([]byte, error),
) (d decision, err error) {
	ctx, sc := s.in(ctx, "call", k, tx)
	d.answer.body, err = fn(ctx, tx)
	sc.mu.Lock()
	defer sc.mu.Unlock()
	switch n := len(d.answer.body); {
	case sc.unknown:
		d.act = actUnknown
	case err != nil:
	case n > s.cfg.MaxResponse:
		err = fmt.Errorf("idempotency: the result has %d bytes, Config.MaxResponse is %d", n, s.cfg.MaxResponse)
	case ctx.Err() != nil:
		err = ctx.Err()
	default:
		d.act = actCommit
		d.resourceType, d.resourceID = sc.resourceType, sc.resourceID
	}
	return d, err
}

// known is what Do returns for a call that is not run.
func known(v verdict, r *row) ([]byte, bool, error) {
	switch v {
	case verdictReplay:
		return r.answer.body, true, nil
	case verdictReused:
		return nil, false, ErrKeyReused
	case verdictExpired:
		return nil, false, ErrExpired
	case verdictUnknown:
		return nil, false, ErrOutcomeUnknown
	case verdictForeign:
		return nil, false, errors.New("idempotency: a newer release has made the key's record")
	}
	after := problemInFlight.after(0)
	if r != nil {
		after = problemInFlight.after(r.rest)
	}
	return nil, false, postroom.RetryAfter(ErrInFlight, after.retryAfter)
}

// DoTx is [Do] in the caller's transaction: whether the call was made commits with
// tx or not at all. fn gets a savepoint in it, which is rolled back where fn fails,
// so that the caller may go on.
//
// While tx is open, others with the key wait for up to a second before they are
// told that the call runs; another DoTx waits for as long as the lock_timeout of
// its transaction says. In repeatable read and serializable it fails with a
// serialization failure then. [Unknown] rolls back and is not recorded. Of cfg only
// Schema, Retention, Tombstone, ReuseExpired and MaxResponse count.
func DoTx(
	ctx context.Context, tx pgx.Tx, c Call, fn func(context.Context, pgx.Tx) ([]byte, error), cfg Config,
) (result []byte, replayed bool, err error) {
	cfg, err = cfg.withDefaults()
	k, wrong := c.check()
	if err := errors.Join(err, wrong); err != nil {
		return nil, false, err
	}
	sp, err := tx.Begin(ctx)
	if err != nil {
		return nil, false, fmt.Errorf("idempotency: %w", err)
	}
	defer func() { _ = sp.Rollback(context.WithoutCancel(ctx)) }() // does nothing after a commit
	cfg.Reconcile = nil
	s := &store{cfg: cfg}
	fence := newFence()
	v, found, err := s.claimIn(ctx, sp, k, fence)
	if err != nil {
		return nil, false, fmt.Errorf("idempotency: claim a key: %w", err)
	}
	if v != verdictMine {
		return known(v, found)
	}
	wrapped, g := handlertx.Wrap(sp, errManaged)
	d, err := s.invoke(ctx, k.id, wrapped, fn)
	running, open := g.Finish()
	switch {
	case running || open:
		return nil, false, errors.Join(handlertx.ErrLeftInUse, err)
	case d.act == actUnknown:
		return nil, false, errors.Join(ErrOutcomeUnknown, err)
	case err != nil:
		return nil, false, err
	case g.Ended():
		return nil, false, errManaged
	}
	a := attempt{id: k.id, fence: fence}
	if _, err := sp.Exec(ctx, pg.InSchema(completeOwn, cfg.Schema), a.completion(d)...); err != nil {
		return nil, false, fmt.Errorf("idempotency: store the result: %w", err)
	}
	if err := sp.Commit(ctx); err != nil {
		return nil, false, fmt.Errorf("idempotency: %w", err)
	}
	return d.answer.body, false, nil
}

// claimIn claims the key in a transaction of somebody else.
func (s *store) claimIn(ctx context.Context, tx pgx.Tx, c call, fence int64) (verdict, *row, error) {
	for range claimTries {
		r, err := scanRow(tx.QueryRow(ctx, pg.InSchema(claim, s.cfg.Schema), s.claiming(c, fence)...))
		if err != nil {
			return 0, nil, err
		}
		switch v := s.judge(c, r, fence); v {
		case verdictAbsent:
		case verdictFree:
			var locked, taken int
			err := tx.QueryRow(ctx, pg.InSchema(takeOver, s.cfg.Schema), s.takingOver(c, fence, r.fence)...).Scan(&locked, &taken)
			switch {
			case err != nil:
				return 0, nil, err
			case taken == 1:
				return verdictMine, r, nil
			case locked == 0:
				return verdictInFlight, r, nil
			}
		default:
			return v, r, nil
		}
	}
	return verdictInFlight, nil, nil
}

// Resolve says what an operator has found out about the call or request of c whose
// outcome is unknown, see [Unknown]: that it had its effect (done), so that repeats
// get status with an empty body for a day at least, or that it had none, so that the
// next may run. It reports whether there was such a key; when it returns nil the
// change is durable. c.Input is not looked at. The SQL function
// resolve_idempotency_key does the same. Of cfg only Schema counts.
func Resolve(ctx context.Context, pool *pgxpool.Pool, c Call, done bool, status int, cfg Config) (found bool, err error) {
	cfg, err = cfg.withDefaults()
	if done && (status < 200 || status > 599) {
		err = errors.Join(err, fmt.Errorf("idempotency: Resolve with status %d, want 200 to 599", status))
	}
	if err != nil {
		return false, err
	}
	err = pool.QueryRow(ctx, pg.InSchema(resolve, cfg.Schema), c.Tenant, c.Operation, c.Key, done, status).Scan(&found)
	if err != nil {
		return false, fmt.Errorf("idempotency: resolve a key: %w", err)
	}
	return found, nil
}

const resolve = `
SELECT "postroom".resolve_idempotency_key($1::text, $2::text, $3::text, $4::boolean, $5::integer)`
