// Package handlertx wraps the transaction that a handler works in, so that only
// its owner can end it, and nothing reaches the connection once the handler has
// returned.
package handlertx

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
)

var (
	// ErrLeftInUse says that Finish found the connection in use.
	ErrLeftInUse = errors.New("the handler returned while its transaction was in use: " +
		"rows or batch results were not closed, or a goroutine is still running a statement")

	// errReturned matches pgx.ErrTxClosed, which is what pgx says of any other
	// transaction that is over.
	errReturned = fmt.Errorf("postroom: the handler has returned: %w", pgx.ErrTxClosed)

	errInUse = errors.New("postroom: the transaction is in use: rows or batch results are not closed, or a copy is running")
)

const inFailedTransaction = "25P02"

// A Guard is what the handler's transaction shares with its savepoints, rows and
// batch results. It lets one call at a time reach the connection, and none once
// the handler has returned.
type Guard struct {
	managed error // of Commit and Rollback

	mu       sync.Mutex
	busy     bool          // a call is running
	freed    chan struct{} // closed when it ends; nil where nobody waits
	open     bool          // rows, batch results or a copy own the connection
	returned bool          // the handler has
	ended    bool          // Commit or Rollback was called on the transaction
	large    bool          // LargeObjects was called, whose use is not guarded
	suspect  bool          // the transaction may have been replaced, see suspected
	cause    error         // why the transaction is aborted or its connection lost, if it is
}

// Wrap returns tx for a handler, and its guard. Commit and Rollback of the
// transaction, not of savepoints in it, return managed and do nothing else.
func Wrap(tx pgx.Tx, managed error) (pgx.Tx, *Guard) {
	g := &Guard{managed: managed}
	return &handlerTx{Tx: tx, g: g}, g
}

// Finish refuses all further calls. It reports whether a call is running in
// another goroutine, and whether rows, batch results or a copy are open.
func (g *Guard) Finish() (running, open bool) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.returned = true
	return g.busy, g.open
}

// Cause is why the transaction is aborted or its connection lost, if it is.
func (g *Guard) Cause() error {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.cause
}

// Ended reports whether Commit or Rollback was called on the transaction.
func (g *Guard) Ended() bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.ended
}

// Large reports whether LargeObjects was called, whose use is not guarded: the
// connection has to be closed.
func (g *Guard) Large() bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.large
}

// Suspect reports whether the transaction may have been replaced by another one.
// That it was merely ended shows in the connection's status.
func (g *Guard) Suspect() bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.suspect
}

// Abandon closes a connection that the handler has left in use. One on which a
// goroutine is still running a statement is touched no more, since it belongs to
// that goroutine until the statement fails.
func Abandon(ctx context.Context, conn *pgxpool.Conn, running bool) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), abandonTime)
	defer cancel()
	if running {
		c := conn.Hijack().PgConn()
		_ = c.CancelRequest(ctx) // lest the server hold what the transaction locks until the statement ends
		_ = c.Conn().Close()
		return
	}
	_ = conn.Conn().Close(ctx)
	conn.Release()
}

const abandonTime = 5 * time.Second

// enter waits for its turn. The caller leaves, see leave.
func (g *Guard) enter(ctx context.Context) error {
	for {
		g.mu.Lock()
		switch {
		case g.returned:
			g.mu.Unlock()
			return errReturned
		case g.open:
			g.mu.Unlock()
			return errInUse
		case !g.busy:
			g.busy = true
			g.mu.Unlock()
			return nil
		}
		if g.freed == nil {
			g.freed = make(chan struct{})
		}
		freed := g.freed
		g.mu.Unlock()
		select {
		case <-freed:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// enterOpen is enter for the rows, batch results or copy that own the
// connection: they have no turn to wait for.
func (g *Guard) enterOpen() error {
	g.mu.Lock()
	defer g.mu.Unlock()
	switch {
	case g.returned:
		return errReturned
	case g.busy:
		return errInUse
	}
	g.busy = true
	return nil
}

// leave ends a call that returned err to the handler. open says whether the
// connection stays with rows, batch results or a copy.
func (g *Guard) leave(err error, open bool) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if pgErr, ok := errors.AsType[*pgconn.PgError](err); ok && pgErr.Code != inFailedTransaction {
		g.cause = err
	} else if !ok && g.cause == nil && err != nil && !errors.Is(err, pgx.ErrNoRows) {
		g.cause = err // of interest where the connection is lost
	}
	g.busy, g.open = false, open
	if g.freed != nil {
		close(g.freed)
		g.freed = nil
	}
}

// whole runs a call that is over when it returns. callbacks says that it may
// call back into the handler's code, which then finds the connection in use.
func (g *Guard) whole(ctx context.Context, callbacks bool, call func() error) error {
	if err := g.enter(ctx); err != nil {
		return err
	}
	if callbacks {
		g.mu.Lock()
		g.open = true
		g.mu.Unlock()
	}
	err := errPanicked
	defer func() { g.leave(err, false) }()
	err = call()
	return err
}

var errPanicked = errors.New("postroom: a call panicked")

// handlerTx is the transaction that a handler gets, or a savepoint in it. It
// embeds pgx.Tx for methods that later versions of pgx may add.
type handlerTx struct {
	pgx.Tx
	g         *Guard
	savepoint bool
}

func (t *handlerTx) Begin(ctx context.Context) (sp pgx.Tx, err error) {
	err = t.g.whole(ctx, false, func() error {
		inner, err := t.Tx.Begin(ctx)
		if err == nil {
			sp = &handlerTx{Tx: inner, g: t.g, savepoint: true}
		}
		return err
	})
	return sp, err
}

func (t *handlerTx) Commit(ctx context.Context) error {
	if !t.savepoint {
		return t.refuseEnd()
	}
	return t.g.whole(ctx, false, func() error { return t.Tx.Commit(ctx) })
}

func (t *handlerTx) Rollback(ctx context.Context) error {
	if !t.savepoint {
		return t.refuseEnd()
	}
	return t.g.whole(ctx, false, func() error {
		err := t.Tx.Rollback(ctx)
		if err == nil {
			t.g.mu.Lock()
			t.g.cause = nil // what failed is undone
			t.g.mu.Unlock()
		}
		return err
	})
}

func (t *handlerTx) refuseEnd() error {
	t.g.mu.Lock()
	defer t.g.mu.Unlock()
	if t.g.returned {
		return errReturned
	}
	t.g.ended = true
	return t.g.managed
}

func (t *handlerTx) Exec(ctx context.Context, sql string, args ...any) (tag pgconn.CommandTag, err error) {
	t.g.suspectIf(suspected(sql, args))
	err = t.g.whole(ctx, false, func() error {
		tag, err = t.Tx.Exec(ctx, sql, args...)
		return err
	})
	return tag, err
}

func (t *handlerTx) Prepare(ctx context.Context, name, sql string) (sd *pgconn.StatementDescription, err error) {
	t.g.suspectIf(suspected(sql, nil))
	err = t.g.whole(ctx, false, func() error {
		sd, err = t.Tx.Prepare(ctx, name, sql)
		return err
	})
	return sd, err
}

func (t *handlerTx) CopyFrom(
	ctx context.Context, table pgx.Identifier, columns []string, src pgx.CopyFromSource,
) (n int64, err error) {
	err = t.g.whole(ctx, true, func() error {
		n, err = t.Tx.CopyFrom(ctx, table, columns, src)
		return err
	})
	return n, err
}

func (t *handlerTx) Query(ctx context.Context, sql string, args ...any) (pgx.Rows, error) {
	if err := t.g.enter(ctx); err != nil {
		return failedRows(err), err
	}
	t.g.suspectIf(suspected(sql, args))
	inner, err := t.Tx.Query(ctx, sql, args...)
	t.g.leave(err, err == nil)
	return &handlerRows{Rows: inner, g: t.g, last: true}, err
}

func (t *handlerTx) QueryRow(ctx context.Context, sql string, args ...any) pgx.Row {
	if err := t.g.enter(ctx); err != nil {
		return failedRow{err}
	}
	t.g.suspectIf(suspected(sql, args))
	inner := t.Tx.QueryRow(ctx, sql, args...)
	t.g.leave(nil, true)
	return &handlerRow{Row: inner, g: t.g, last: true}
}

func (t *handlerTx) SendBatch(ctx context.Context, b *pgx.Batch) pgx.BatchResults {
	if err := t.g.enter(ctx); err != nil {
		return pgx.FailedBatchResults(b, err)
	}
	for _, q := range b.QueuedQueries {
		t.g.suspectIf(suspected(q.SQL, q.Arguments))
	}
	inner := t.Tx.SendBatch(ctx, b)
	t.g.leave(nil, true)
	return &handlerBatch{BatchResults: inner, g: t.g}
}

// Conn cannot be guarded.
func (t *handlerTx) Conn() *pgx.Conn {
	t.g.suspectIf(true)
	return t.Tx.Conn()
}

// LargeObjects cannot be guarded, since pgx alone can make one. The connection
// is closed afterwards, so that late use fails.
func (t *handlerTx) LargeObjects() pgx.LargeObjects {
	t.g.mu.Lock()
	defer t.g.mu.Unlock()
	t.g.large = true
	return t.Tx.LargeObjects()
}

// suspectIf notes that the handler may have replaced its transaction by another
// one. That it has merely ended it shows in the connection's status.
func (g *Guard) suspectIf(may bool) {
	if may {
		g.mu.Lock()
		defer g.mu.Unlock()
		g.suspect = true
	}
}

// suspected reports whether a statement may begin a transaction: COMMIT AND CHAIN,
// ROLLBACK AND CHAIN, BEGIN, START TRANSACTION. A word that is meant otherwise
// costs one small query at the commit. What rewrites a query gets the connection.
func suspected(sql string, args []any) bool {
	if len(args) > 0 {
		switch args[0].(type) {
		case pgx.NamedArgs, pgx.StrictNamedArgs:
		case pgx.QueryRewriter:
			return true
		}
	}
	for i := range len(sql) {
		switch sql[i] | 0x20 { // lower case, for letters
		case 'b':
			if hasWord(sql[i:], "begin") {
				return true
			}
		case 'c':
			if hasWord(sql[i:], "chain") {
				return true
			}
		case 's':
			if hasWord(sql[i:], "start") {
				return true
			}
		}
	}
	return false
}

func hasWord(s, word string) bool {
	return len(s) >= len(word) && strings.EqualFold(s[:len(word)], word)
}
