package idempotency

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"

	"github.com/jackc/pgx/v5"

	"github.com/postroom/postroom/internal/waits"
)

var (
	errNotProtected = errors.New("idempotency: Begin outside of a protected handler that is running")
	errLost         = fmt.Errorf("idempotency: %w", errFence)
)

// Begin begins the transaction of a handler under [Config].TwoPhase, and returns it.
// It waits for a connection for at most [Config].QueueTimeout. Where it fails the
// handler must not answer as if it had succeeded: such answers are not stored, and
// the client is told to repeat the request. A second call, and one in a handler of
// the usual form, returns the transaction that is there.
func Begin(ctx context.Context) (pgx.Tx, error) {
	s := scopeOf(ctx)
	if s == nil {
		return nil, errNotProtected
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.tx != nil {
		return s.tx, nil
	}
	if s.begin == nil {
		return nil, errNotProtected
	}
	tx, err := s.begin(ctx)
	if err == nil {
		s.tx = tx
	}
	return tx, err
}

// late is an attempt whose transaction begins when the handler asks for it.
type late struct {
	*attempt
	stop func() // ends the renewal of the lease
	tx   pgx.Tx // nil before
	err  error  // of the last try to begin
}

// begin takes a connection again and locks the key's row, which from then on is
// what tells that the attempt lives.
func (l *late) begin(ctx context.Context) (tx pgx.Tx, err error) {
	l.stop()
	defer func() { l.err = err }()
	if errors.Is(l.err, errLost) {
		return nil, errLost
	}
	free, err := running.wait(ctx, l.s.pool, l.s.cfg.QueueTimeout)
	if err == nil && free == nil {
		err = context.DeadlineExceeded
	}
	if err != nil {
		return nil, fmt.Errorf("idempotency: wait for a connection: %w", err)
	}
	l.free = free
	tx, err = l.beginAlive(ctx)
	if err == nil && tx == nil {
		err = errLost
	}
	if err != nil {
		if l.conn != nil {
			rollback(ctx, l.conn.Conn())
		}
		l.leave()
		return nil, fmt.Errorf("idempotency: begin: %w", err)
	}
	l.tx = tx
	return tx, nil
}

// runLate is run for a handler that begins its transaction itself. Until then the
// attempt holds no connection, and its lease is renewed.
func (a *attempt) runLate(
	ctx context.Context, work func(context.Context, func(context.Context) (pgx.Tx, error)) decision,
) (e end, err error) {
	a.leave()
	defer func() { a.leave() }()
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	l := &late{attempt: a, stop: a.renew(ctx, cancel)}
	defer l.stop()
	returned := false
	defer func() {
		if !returned {
			l.stop()
			a.drop(ctx)
		}
	}()
	d := work(ctx, l.begin)
	returned = true
	l.stop()
	switch {
	case l.tx == nil && (errors.Is(l.err, errLost) || errors.Is(context.Cause(ctx), errLost)):
		return endLost, errLost
	case l.tx == nil && d.act == actUnknown:
		return a.markUnknown(ctx, nil)
	case l.tx == nil && d.act == actRelease:
		a.release(ctx)
		return endDone, nil
	case l.tx == nil && l.err == nil:
		if _, err := l.begin(ctx); errors.Is(err, errLost) {
			return endLost, err
		}
	}
	if l.tx == nil {
		a.release(ctx)
		return endTrouble, l.err
	}
	e, err = a.finish(ctx, d)
	a.releaseAfter(ctx, e, d)
	return e, err
}

// renewOwn moves the end of the attempt's lease.
const renewOwn = `
WITH renewed AS (
    UPDATE "postroom".idempotency_keys SET locked_until = clock_timestamp() + $5::interval
     WHERE tenant = $1::text AND operation = $2::text AND key = $3::text
       AND fence = $4::bigint AND state = 'in_flight'
 RETURNING 1
)
SELECT count(*) FROM renewed`

// renew renews the lease three times in its length, until stop is called. Where the
// key is lost it ends the handler's context, by lost.
func (a *attempt) renew(ctx context.Context, lost context.CancelCauseFunc) (stop func()) {
	if a.id.key == "" {
		return func() {}
	}
	ctx, cancel := context.WithCancel(ctx)
	var beat sync.WaitGroup
	beat.Go(func() {
		for waits.For(ctx, a.s.cfg.Lease/3) == nil {
			n, err := a.s.renewOnce(ctx, a.id, a.fence)
			switch {
			case err == nil && n == 0:
				lost(errLost)
				return
			case err != nil && ctx.Err() == nil:
				a.s.cfg.Logger.LogAttrs(ctx, slog.LevelWarn, "renew the lease of an idempotency key",
					slog.String("operation", a.id.operation), slog.Any("error", err))
			}
		}
	})
	return sync.OnceFunc(func() {
		cancel()
		beat.Wait()
	})
}

func (s *store) renewOnce(ctx context.Context, k id, fence int64) (renewed int, err error) {
	conn, err := s.pool.Acquire(ctx)
	if err != nil {
		return 0, err
	}
	defer conn.Release()
	err = own(ctx, conn, quickly, s.cfg.Schema, renewOwn, func(r pgx.Row) error { return r.Scan(&renewed) },
		k.tenant, k.operation, k.key, fence, s.cfg.Lease)
	return renewed, err
}
