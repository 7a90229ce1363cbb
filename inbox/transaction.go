package inbox

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/postroom/postroom"
	"github.com/postroom/postroom/internal/handlertx"
	"github.com/postroom/postroom/internal/pg"
	"github.com/postroom/postroom/internal/waits"
	"github.com/postroom/postroom/outbox"
)

// ownTime bounds what the inbox's own statements may take, beyond the wait for a
// lock: a server that does not answer in it is away.
const ownTime = 15 * time.Second

const (
	commitTime   = 30 * time.Second
	rollbackTime = 5 * time.Second
	lookUpTime   = 10 * time.Second
	lookUpTries  = 5
)

// box is what handling a message for one subscriber needs.
type box struct {
	pool       *pgxpool.Pool
	subscriber string
	cfg        Config
	lock       string         // Config.LockTimeout for PostgreSQL
	outbox     *outbox.Outbox // for dead letters
	began      func()         // is told of every transaction that has begun; may be nil
}

func newBox(pool *pgxpool.Pool, subscriber string, cfg Config) *box {
	return &box{
		pool: pool, subscriber: subscriber, cfg: cfg,
		lock: fmt.Sprintf("%dms", cfg.LockTimeout.Milliseconds()),
	}
}

// txn is a transaction for one message.
type txn struct {
	conn *pgxpool.Conn
	pgx.Tx
	handler pgx.Tx // t for the handler
	g       *handlertx.Guard
}

// attempt runs one transaction for m: begin, record, handler, commit. It makes two round trips besides those of the handler.
func (b *box) attempt(ctx context.Context, m postroom.Message, rec record, h Handler) (Result, *failure) {
	end, err := copies.take(ctx, turnKey{b.pool, b.subscriber, m.ID}, b.cfg.LockTimeout)
	if err != nil {
		return Failed, b.beginFailed(ctx, m.ID, err)
	}
	defer end()
	t, err := b.begin(ctx, m.ID, rec)
	if err != nil {
		return Failed, b.beginFailed(ctx, m.ID, err)
	}
	if b.began != nil {
		b.began()
	}
	if t == nil {
		return Duplicate, nil
	}
	settled := false
	defer func() {
		if !settled { // the handler ended its goroutine
			b.discard(ctx, t)
		}
	}()
	err = b.call(ctx, t, m, h)
	settled = true

	if running, open := t.g.Finish(); running || open {
		handlertx.Abandon(ctx, t.conn, running)
		return Failed, &failure{b.subscriber, m.ID, stageHandle, errors.Join(handlertx.ErrLeftInUse, err), false, false}
	}
	if f := b.handlerFailed(t, m.ID, err); f != nil {
		b.rollback(ctx, t)
		return Failed, f
	}
	if err := ctx.Err(); err != nil {
		b.rollback(ctx, t)
		return Failed, &failure{b.subscriber, m.ID, stageCommit, err, false, false}
	}
	if f := b.commit(ctx, t, m.ID, rec); f != nil {
		return Failed, f
	}
	return Handled, nil
}

// begin returns a transaction in which the message is recorded, or nil where it
// was before.
func (b *box) begin(ctx context.Context, id string, rec record) (*txn, error) {
	ctx, stop := bounds.with(ctx, b.cfg.LockTimeout+ownTime)
	defer stop()
	conn, err := b.pool.Acquire(ctx)
	if err != nil {
		return nil, noAnswer(ctx, err)
	}
	t := &txn{conn: conn}
	var recorded bool
	var batch pgx.Batch
	batch.BeginTx(pgx.TxOptions{IsoLevel: b.cfg.IsoLevel})
	args := append([]any{b.subscriber, id, b.lock}, rec.args...)
	batch.Queue(pg.InSchema(rec.sql, b.cfg.Schema), args...).Exec(func(tag pgconn.CommandTag) error {
		recorded = tag.RowsAffected() == 1
		return nil
	})
	results := conn.SendBatch(ctx, &batch)
	t.Tx = results.Tx()
	err = results.Close()
	if err == nil && !recorded && rec.counted {
		b.countRepeat(ctx, t, id)
	}
	if err != nil || !recorded {
		b.rollback(ctx, t)
		return nil, noAnswer(ctx, err)
	}
	t.handler, t.g = handlertx.Wrap(t.Tx, ErrTxManaged)
	return t, nil
}

// stillOurs fails where the record of the message was not written by the current
// transaction, because the handler has ended ours and begun another one. The
// COMMIT behind it is not executed then.
const stillOurs = `
SELECT (CASE WHEN EXISTS (SELECT FROM "postroom".processed_messages
                           WHERE subscriber_id = $1::text AND message_id = $2::text
                             AND xmin = pg_current_xact_id_if_assigned()::xid)
             THEN '1' ELSE 'postroom: the handler ended its transaction' END)::integer`

// sendCommit sends COMMIT. ours is false where the handler had put another
// transaction in the place of t, which is then still open.
func (b *box) sendCommit(ctx context.Context, t *txn, id string) (ours bool, tag pgconn.CommandTag, err error) {
	if !t.g.Suspect() {
		tag, err = t.conn.Exec(ctx, "commit")
		return true, tag, err
	}
	var batch pgx.Batch
	batch.Queue(pg.InSchema(stillOurs, b.cfg.Schema), b.subscriber, id).QueryRow(func(row pgx.Row) error {
		err := row.Scan(nil)
		ours = err == nil
		return err
	})
	batch.Queue("commit").Exec(func(ct pgconn.CommandTag) error {
		tag = ct
		return nil
	})
	err = t.conn.SendBatch(ctx, &batch).Close()
	return ours, tag, err
}

// commit ends t. ctx no longer bounds it: an interrupted COMMIT would have to be
// looked up.
func (b *box) commit(ctx context.Context, t *txn, id string, rec record) *failure {
	ctx, stop := bounds.with(context.WithoutCancel(ctx), commitTime)
	defer stop()
	ours, tag, err := b.sendCommit(ctx, t, id)
	lost := t.conn.Conn().IsClosed()
	b.rollback(ctx, t)

	f := &failure{subscriber: b.subscriber, id: id, stage: stageCommit, err: noAnswer(ctx, err), trouble: databaseTrouble(err)}
	switch {
	case err == nil && tag.String() == "ROLLBACK":
		f.err = pgx.ErrTxCommitRollback
	case err == nil:
		return nil
	case timedOut(err):
		f.trouble = false
	case lost || ambiguous(err):
		f.trouble = true
		if rec.outcomes != nil && b.isRecorded(ctx, id, rec.outcomes) {
			return nil
		}
	case !ours && isCastError(err):
		f.err, f.trouble, f.ended = errEnded, false, true
	}
	return f
}

// ambiguous reports whether a COMMIT that failed with err may have been executed.
func ambiguous(err error) bool {
	pgErr, ok := errors.AsType[*pgconn.PgError](err)
	return !ok || pgErr.Code == "40003" || strings.HasPrefix(pgErr.Code, "08") || strings.HasPrefix(pgErr.Code, "57P")
}

func isCastError(err error) bool {
	pgErr, ok := errors.AsType[*pgconn.PgError](err)
	return ok && pgErr.Code == "22P02"
}

const selectRecorded = `
SELECT EXISTS (SELECT FROM "postroom".processed_messages
                WHERE subscriber_id = $1::text AND message_id = $2::text AND outcome = ANY ($3::text[]))`

// isRecorded looks up, on a new connection, what became of a COMMIT whose answer
// was lost: whether the message has one of the outcomes. false means that it failed, or is not over yet, or cannot be looked
// up: in each case a repeat of the message is safe.
func (b *box) isRecorded(ctx context.Context, id string, outcomes []string) bool {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), lookUpTime)
	defer cancel()
	pause := waits.Growing(20*time.Millisecond, time.Second)
	for range lookUpTries {
		var recorded bool
		err := b.pool.QueryRow(ctx, pg.InSchema(selectRecorded, b.cfg.Schema), b.subscriber, id, outcomes).Scan(&recorded)
		if err == nil {
			return recorded
		}
		if waits.For(ctx, pause.NextBackOff()) != nil {
			return false
		}
	}
	return false
}

// discard ends a transaction whose handler has ended its goroutine.
func (b *box) discard(ctx context.Context, t *txn) {
	if running, open := t.g.Finish(); running || open {
		handlertx.Abandon(ctx, t.conn, running)
		return
	}
	b.rollback(ctx, t)
}

// rollback ends t, if it is not over, and gives the connection back.
func (b *box) rollback(ctx context.Context, t *txn) {
	defer t.conn.Release() // closes a connection that is not idle
	conn := t.conn.Conn()
	if large := t.g != nil && t.g.Large(); !large && (conn.IsClosed() || conn.PgConn().TxStatus() == 'I') {
		return
	}
	ctx, stop := bounds.with(context.WithoutCancel(ctx), rollbackTime)
	defer stop()
	if !conn.IsClosed() && conn.PgConn().TxStatus() != 'I' {
		_, _ = conn.Exec(ctx, "rollback") // on an error Release closes the connection
	}
	if t.g != nil && t.g.Large() {
		_ = conn.Close(ctx)
	}
}
