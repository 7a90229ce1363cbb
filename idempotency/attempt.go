package idempotency

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/postroom/postroom/internal/handlertx"
	"github.com/postroom/postroom/internal/pg"
	"github.com/postroom/postroom/internal/waits"
)

// attempt holds a key under a fence, and the connection for its transaction. One
// for a request without a key has a transaction alone.
type attempt struct {
	s     *store
	id    id // without key: names the operation alone
	fence int64
	free  func() // gives the slot back

	inherited bool // nobody knows what the attempt before has done

	conn      *pgxpool.Conn
	elsewhere bool // conn is not the one that had the transaction
	g         *handlertx.Guard
}

func (a *attempt) connect(ctx context.Context) (err error) {
	if a.conn == nil {
		a.conn, err = a.s.pool.Acquire(ctx)
	}
	return err
}

// disconnect gives the connection back. One that is not idle is closed.
func (a *attempt) disconnect() {
	if a.conn != nil {
		a.conn.Release()
		a.conn = nil
	}
}

// leave ends the attempt, which must not be in a transaction.
func (a *attempt) leave() {
	a.disconnect()
	a.free()
}

// act is what a handler wants to become of its transaction.
type act int

const (
	actRelease act = iota // no effect, and the next attempt may run
	actStore              // no effect, and the answer is kept
	actCommit             // the effect commits together with the answer
	actUnknown            // no effect here, but perhaps elsewhere
)

// decision is what a handler has decided.
type decision struct {
	act          act
	answer       answer
	resourceType *string
	resourceID   *string
}

// end is how an attempt ended.
type end int

const (
	endDone     end = iota // as the handler has decided
	endFailed              // rolled back and released, against the decision
	endConflict            // endFailed by another transaction, every time
	endTrouble             // endFailed by the database
	endLost                // another attempt has the key
	endUnknown             // an operator has to decide
	endPending             // what became of the COMMIT could not be found out
)

const runTries = 3

// run runs work in the attempt's transaction and ends the attempt. A panic of work
// passes through, after the key is released.
func (a *attempt) run(ctx context.Context, work func(context.Context, pgx.Tx) decision) (e end, err error) {
	defer a.leave()
	pause := waits.Growing(10*time.Millisecond, 100*time.Millisecond)
	for try := 1; ; try++ {
		tx, err := a.beginAlive(ctx)
		if err != nil || tx == nil {
			return a.notBegun(ctx, err)
		}
		d := a.work(ctx, tx, work)
		e, err = a.finish(ctx, d)
		if e != endConflict || try == runTries {
			a.releaseAfter(ctx, e, d)
			return e, err
		}
		_ = waits.For(ctx, pause.NextBackOff()) // an ended context shows in work
	}
}

// releaseAfter releases the key after an end without an effect.
func (a *attempt) releaseAfter(ctx context.Context, e end, d decision) {
	if e == endConflict || e == endFailed || e == endTrouble || e == endDone && d.act == actRelease {
		a.release(ctx)
	}
}

func (a *attempt) notBegun(ctx context.Context, err error) (end, error) {
	if a.conn != nil {
		rollback(ctx, a.conn.Conn())
	}
	if err == nil {
		return endLost, errors.New("the key was taken over before the transaction began")
	}
	a.release(ctx)
	return endTrouble, fmt.Errorf("begin: %w", err)
}

// work calls the handler. Where that does not return, the key is released.
func (a *attempt) work(ctx context.Context, tx pgx.Tx, work func(context.Context, pgx.Tx) decision) decision {
	returned := false
	defer func() {
		if !returned {
			a.drop(ctx)
		}
	}()
	d := work(ctx, tx)
	returned = true
	return d
}

// drop ends the transaction, if there is one, and releases the key.
func (a *attempt) drop(ctx context.Context) {
	if a.g != nil {
		if running, open := a.g.Finish(); running || open {
			a.abandon(ctx, running)
		} else {
			rollback(ctx, a.conn.Conn())
			a.closeLarge(ctx)
		}
	}
	a.release(ctx)
}

// lockOwn locks the attempt's row, which tells others that the attempt lives. FOR
// UPDATE would keep them from referring to it. The second setting frees the row
// of a process that the network has cut off; a shorter one stays.
const lockOwn = `
SELECT set_config('idle_in_transaction_session_timeout',
           CASE WHEN current_setting('idle_in_transaction_session_timeout')::interval BETWEEN '1ms' AND $5::interval
                THEN current_setting('idle_in_transaction_session_timeout')
                ELSE (extract(epoch FROM $5::interval) * 1000)::bigint::text END, true)
  FROM (SELECT FROM "postroom".idempotency_keys
         WHERE tenant = $1::text AND operation = $2::text AND key = $3::text
           AND fence = $4::bigint AND state = 'in_flight'
           FOR NO KEY UPDATE) own`

const (
	setSavepoint      = "savepoint postroom"
	releaseSavepoint  = "release savepoint postroom"
	rollbackSavepoint = "rollback to savepoint postroom"
)

// beginAlive is begin that takes another connection for one that turns out to be
// dead: nothing has been done on it.
func (a *attempt) beginAlive(ctx context.Context) (pgx.Tx, error) {
	wait, cancel := context.WithTimeout(ctx, a.s.cfg.QueueTimeout)
	defer cancel()
	for losses := int32(0); ; losses++ {
		if err := a.connect(wait); err != nil {
			return nil, err
		}
		tx, err := a.begin(ctx)
		if err == nil || !a.conn.Conn().IsClosed() || losses == a.s.pool.Stat().MaxConns() || wait.Err() != nil {
			return tx, err
		}
		a.disconnect()
	}
}

// begin begins the transaction, in one round trip. It returns nil where the key
// is lost.
func (a *attempt) begin(ctx context.Context) (pgx.Tx, error) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), claimTime)
	defer cancel()
	locked := false
	var b pgx.Batch
	b.BeginTx(pgx.TxOptions{IsoLevel: a.s.cfg.IsoLevel, AccessMode: pgx.ReadWrite})
	if a.id.key == "" {
		locked = true
	} else {
		b.Queue(pg.InSchema(lockOwn, a.s.cfg.Schema), a.id.tenant, a.id.operation, a.id.key, a.fence,
			a.s.cfg.Timeout+time.Second).Exec(func(tag pgconn.CommandTag) error {
			locked = tag.RowsAffected() == 1
			return nil
		})
	}
	b.Queue(setSavepoint)
	results := a.conn.SendBatch(ctx, &b)
	tx := results.Tx()
	if err := results.Close(); err != nil || !locked {
		return nil, err
	}
	tx, a.g = handlertx.Wrap(tx, errManaged)
	return tx, nil
}

var (
	errManaged = errors.New("idempotency: the handler's transaction is ended by the middleware alone: " +
		"by the answer's status, or the error that is returned")
	errEnded = errors.New("the handler ended its transaction by an SQL command")
	errFence = errors.New("another attempt has taken the key over")
)

// finish ends the transaction as d says, if the connection's state allows it.
func (a *attempt) finish(ctx context.Context, d decision) (end, error) {
	if running, open := a.g.Finish(); running || open {
		a.abandon(ctx, running)
		return a.undone(ctx, d, endFailed, handlertx.ErrLeftInUse)
	}
	defer a.closeLarge(ctx)
	conn := a.conn.Conn()
	cause := a.g.Cause()
	switch status := conn.PgConn().TxStatus(); {
	case conn.IsClosed():
		return a.undone(ctx, d, endTrouble, fmt.Errorf("the connection was lost: %w", orUnknown(cause)))
	case status == 'I':
		return a.markUnknown(ctx, errEnded)
	case status == 'E' && conflict(cause):
		rollback(ctx, conn)
		return a.undone(ctx, d, endConflict, cause)
	case d.act == actRelease || d.act == actUnknown:
		return a.giveUp(ctx, d)
	case a.g.Ended():
		rollback(ctx, conn)
		return endFailed, errManaged
	case status == 'E' && d.act == actCommit:
		rollback(ctx, conn)
		return endFailed, fmt.Errorf("the handler ignored an error: %w", orUnknown(cause))
	}
	return a.complete(ctx, d)
}

// undone is the end of a transaction that is rolled back. Only where the handler
// speaks of an effect elsewhere it is not e.
func (a *attempt) undone(ctx context.Context, d decision, e end, err error) (end, error) {
	if d.act == actUnknown {
		return a.markUnknown(ctx, err)
	}
	return e, err
}

// giveUp rolls back what the handler has done. That the savepoint is still there
// tells that it is our transaction.
func (a *attempt) giveUp(ctx context.Context, d decision) (end, error) {
	ours := true
	own, cancel := context.WithTimeout(context.WithoutCancel(ctx), rollbackTime)
	defer cancel()
	if a.g.Suspect() {
		_, err := a.conn.Exec(own, rollbackSavepoint)
		ours = !isReplaced(err)
	}
	rollback(ctx, a.conn.Conn())
	if !ours || d.act == actUnknown {
		var err error
		if !ours {
			err = errEnded
		}
		return a.markUnknown(ctx, err)
	}
	return endDone, nil
}

// isReplaced reports whether err says that the transaction is not the one in
// which the savepoint was set.
func isReplaced(err error) bool { return isCode(err, "3B001") || isCode(err, "25P01") }

// completeOwn stores the answer and completes the key. It fails, and with it the
// COMMIT behind it, where the key has another fence.
const completeOwn = `
WITH done AS (
    UPDATE "postroom".idempotency_keys
       SET state = 'completed', completed_at = clock_timestamp(), locked_until = clock_timestamp(),
           resource_type = $5::text, resource_id = $6::text
     WHERE tenant = $1::text AND operation = $2::text AND key = $3::text
       AND fence = $4::bigint AND state = 'in_flight'
 RETURNING expires_at
), kept AS (
    INSERT INTO "postroom".idempotency_answers AS a
           (tenant, operation, key, expires_at, status, header_names, header_values, body)
    SELECT $1::text, $2::text, $3::text, expires_at, $7::integer, $8::text[], $9::bytea[], $10::bytea FROM done
        ON CONFLICT (tenant, operation, key) DO UPDATE
       SET expires_at = excluded.expires_at, status = excluded.status, header_names = excluded.header_names,
           header_values = excluded.header_values, body = excluded.body
)
SELECT 1 / count(*) FROM done`

// complete ends the transaction with the answer stored, in one round trip.
func (a *attempt) complete(ctx context.Context, d decision) (end, error) {
	own, cancel := context.WithTimeout(context.WithoutCancel(ctx), commitTime)
	defer cancel()
	conn := a.conn.Conn()
	first := releaseSavepoint
	if d.act == actStore {
		first = rollbackSavepoint
	}
	if conn.PgConn().TxStatus() == 'E' {
		// Nothing else can be prepared, and so be sent with it, in this state.
		if _, err := conn.Exec(own, first); err != nil {
			return a.notCompleted(ctx, 0, err)
		}
	}
	var (
		b       pgx.Batch
		reached int // how many of the batch's statements have succeeded
		tag     string
	)
	b.Queue(first).Exec(func(pgconn.CommandTag) error { reached = 1; return nil })
	if a.id.key != "" {
		b.Queue(pg.InSchema(completeOwn, a.s.cfg.Schema), a.completion(d)...).
			Exec(func(pgconn.CommandTag) error { reached = 2; return nil })
	}
	b.Queue("commit").Exec(func(t pgconn.CommandTag) error { tag = t.String(); return nil })
	err := conn.SendBatch(own, &b).Close()
	if err == nil && tag != "COMMIT" {
		err = pgx.ErrTxCommitRollback
	}
	if err == nil {
		return endDone, nil
	}
	return a.notCompleted(ctx, reached, err)
}

// completion are the arguments of completeOwn.
func (a *attempt) completion(d decision) []any {
	return []any{
		a.id.tenant, a.id.operation, a.id.key, a.fence, d.resourceType, d.resourceID,
		d.answer.status, orEmpty(d.answer.names), orEmpty(d.answer.values), d.answer.body,
	}
}

func orEmpty[T any](s []T) []T {
	if s == nil {
		return []T{}
	}
	return s
}

// notCompleted judges the end of a transaction whose COMMIT was not confirmed.
func (a *attempt) notCompleted(ctx context.Context, reached int, err error) (end, error) {
	conn := a.conn.Conn()
	if conn.IsClosed() || ambiguous(err) {
		a.s.cfg.Logger.LogAttrs(ctx, slog.LevelWarn, "the answer to a commit was lost",
			slog.String("operation", a.id.operation), slog.Any("error", err))
		return a.settle(ctx, err)
	}
	rollback(ctx, conn)
	switch {
	case reached == 0 && isReplaced(err):
		return a.markUnknown(ctx, errEnded)
	case reached == 1 && isCode(err, "22012"):
		return endLost, errFence
	case conflict(err):
		return endConflict, err
	case trouble(err):
		return endTrouble, err
	}
	return endFailed, fmt.Errorf("commit: %w", err)
}

// ambiguous reports whether a COMMIT that failed with err may have been executed.
func ambiguous(err error) bool {
	pgErr, ok := errors.AsType[*pgconn.PgError](err)
	if !ok {
		return !errors.Is(err, pgx.ErrTxCommitRollback)
	}
	return pgErr.Code == "40003" || strings.HasPrefix(pgErr.Code, "08") || strings.HasPrefix(pgErr.Code, "57P")
}

// abandon closes a connection that the handler has left in use.
func (a *attempt) abandon(ctx context.Context, running bool) {
	handlertx.Abandon(ctx, a.conn, running)
	a.conn = nil
}

// closeLarge closes the connection where the handler may still reach it.
func (a *attempt) closeLarge(ctx context.Context) {
	if a.conn != nil && a.g.Large() {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), rollbackTime)
		defer cancel()
		_ = a.conn.Conn().Close(ctx)
	}
}

func orUnknown(err error) error {
	if err == nil {
		return errors.New("without a reason")
	}
	return err
}
