package inbox

import (
	"context"
	"errors"
	"fmt"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
)

// SQLSTATE codes that are told apart by name.
const (
	idleInTransactionTimeout = "25P03"
	transactionTimeout       = "25P04"
	lockNotAvailable         = "55P03"
)

// databaseTrouble reports whether err says that the database, not the message,
// is at fault, so that the same transaction may succeed later. It goes by
// SQLSTATE, never by text.
func databaseTrouble(err error) bool {
	if _, ok := errors.AsType[*pgconn.ConnectError](err); ok {
		return true
	}
	pgErr, ok := errors.AsType[*pgconn.PgError](err)
	if !ok {
		return errors.Is(err, pgconn.ErrConnClosed)
	}
	switch pgErr.Code {
	case "40001", // serialization failure
		"40003", // completion unknown
		"40P01", // deadlock
		lockNotAvailable,
		"57P01", "57P02", "57P03", // shutdown, crash, starting up
		"57P04",          // database dropped
		"57P05",          // idle session timeout
		"58000", "58030", // system or input/output error of the server
		"25006",          // read-only: a server that is no longer, or not yet, the primary
		"26000", "42P05": // a prepared statement that a pooler does not know, or knows already
		return true
	case "0A000": // not supported, unless a plan's result has changed after a migration
		return pgErr.Routine == "RevalidateCachedQuery"
	}
	switch pgErr.Code[:min(2, len(pgErr.Code))] {
	case "08", // connection
		"53": // out of memory, disk or connections
		return true
	}
	return false
}

// contention reports whether err concerns one transaction and not the server.
func contention(err error) bool {
	pgErr, ok := errors.AsType[*pgconn.PgError](err)
	if !ok {
		return errors.Is(err, errCopyRuns)
	}
	switch pgErr.Code {
	case "40001", "40P01", lockNotAvailable, "0A000":
		return true
	}
	return false
}

// timedOutOnLock reports whether another transaction held a lock for too long.
func timedOutOnLock(err error) bool {
	pgErr, ok := errors.AsType[*pgconn.PgError](err)
	return ok && pgErr.Code == lockNotAvailable || errors.Is(err, errCopyRuns)
}

// timedOut reports whether the server ended the transaction because the handler
// let it wait, which another try does not cure.
func timedOut(err error) bool {
	pgErr, ok := errors.AsType[*pgconn.PgError](err)
	return ok && (pgErr.Code == idleInTransactionTimeout || pgErr.Code == transactionTimeout)
}

// stage is how far a transaction had come when it failed.
type stage string

const (
	stageBegin  stage = "begin"
	stageHandle stage = "handle"
	stageCommit stage = "commit"
)

// failure is why one transaction for a message failed.
type failure struct {
	subscriber, id string
	stage          stage
	err            error
	trouble        bool // the database is at fault, see [ErrTransient]
	ended          bool // the handler ended the transaction in a way that cannot be undone
}

func (f *failure) Error() string {
	return fmt.Sprintf("inbox: subscriber %q, message %q: %s: %v", f.subscriber, f.id, f.stage, f.err)
}

func (f *failure) Unwrap() error { return f.err }

// Is makes errors.Is(err, ErrTransient) true where the database is at fault.
func (f *failure) Is(target error) bool { return target == ErrTransient && f.trouble }

// beginFailed judges an error before the handler ran: nothing is wrong with the
// message, unless its id is what the server cannot take.
func (b *box) beginFailed(ctx context.Context, id string, err error) *failure {
	trouble := ctx.Err() == nil
	if pgErr, ok := errors.AsType[*pgconn.PgError](err); ok {
		class := pgErr.Code[:min(2, len(pgErr.Code))]
		trouble = trouble && class != "22" && class != "23"
	}
	return &failure{b.subscriber, id, stageBegin, err, trouble, false}
}

// handlerFailed judges the end of a handler that returned err, by what the
// connection says. It returns nil where nothing stands against a commit.
func (b *box) handlerFailed(t *txn, id string, err error) *failure {
	f := &failure{b.subscriber, id, stageHandle, err, databaseTrouble(err), false}
	switch lost := t.conn.Conn().IsClosed(); {
	case lost || t.conn.Conn().PgConn().TxStatus() == 'E':
		cause := t.g.Cause()
		if err == nil && lost {
			f.err = fmt.Errorf("the handler ignored an error: %w", orLost(cause))
		} else if err == nil {
			f.err = fmt.Errorf("%w: the handler ignored an error: %w", pgx.ErrTxCommitRollback, orLost(cause))
		}
		f.trouble = f.trouble || databaseTrouble(cause) || lost && !ownTimeout(errors.Join(err, cause))
	case t.conn.Conn().PgConn().TxStatus() == 'I':
		f.err = errors.Join(errEnded, err)
		f.trouble, f.ended = false, true
	case err == nil && t.g.Ended():
		f.err = ErrTxManaged
	case err == nil:
		return nil
	}
	return f
}

// ownTimeout reports whether a connection was lost because the handler's own
// time for a statement was over, or the server's for the handler.
func ownTimeout(err error) bool {
	return errors.Is(err, context.DeadlineExceeded) || errors.Is(err, context.Canceled) || timedOut(err)
}

func orLost(cause error) error {
	if cause == nil {
		return errors.New("the connection was lost")
	}
	return cause
}
