package inbox_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/postroom/postroom"
	"github.com/postroom/postroom/inbox"
	"github.com/postroom/postroom/internal/pgtest"
	"github.com/postroom/postroom/outbox"
)

// TestFailedHandlers lists what makes a message fail. Each time nothing remains,
// and the message can be handled afterwards.
func TestFailedHandlers(t *testing.T) {
	pool := newPool(t, pgtest.First(t))
	exec(t, pool, `CREATE TABLE later (n int PRIMARY KEY DEFERRABLE INITIALLY DEFERRED)`)
	exec(t, pool, `INSERT INTO later VALUES (1)`)
	no := errors.New("no")
	ignored := func(sql string) inbox.Handler {
		return func(ctx context.Context, tx pgx.Tx, m postroom.Message) error {
			_, _ = tx.Exec(ctx, sql)
			return nil
		}
	}
	tests := []struct {
		name string
		do   inbox.Handler
		want func(error) bool
	}{
		{"error", failing(no), is(no)},
		{"panic", func(context.Context, pgx.Tx, postroom.Message) error { panic("at the disco") }, says("at the disco")},
		{"panic with an error", func(context.Context, pgx.Tx, postroom.Message) error { panic(no) }, is(no)},
		{"Commit", func(ctx context.Context, tx pgx.Tx, m postroom.Message) error {
			if err := tx.Commit(ctx); !errors.Is(err, inbox.ErrTxManaged) {
				t.Errorf("Commit = %v", err)
			}
			return nil
		}, is(inbox.ErrTxManaged)},
		{"Rollback", func(ctx context.Context, tx pgx.Tx, m postroom.Message) error {
			if err := tx.Rollback(ctx); !errors.Is(err, inbox.ErrTxManaged) {
				t.Errorf("Rollback = %v", err)
			}
			return nil
		}, is(inbox.ErrTxManaged)},
		{"ignored SQL error", ignored(`INSERT INTO nowhere VALUES (1)`), func(err error) bool {
			return errors.Is(err, pgx.ErrTxCommitRollback) && says("nowhere")(err)
		}},
		{"ignored SQL error, then others", func(ctx context.Context, tx pgx.Tx, m postroom.Message) error {
			_, _ = tx.Exec(ctx, `SELECT 1/0`)
			_, _ = tx.Exec(ctx, `SELECT 2`)
			return nil
		}, func(err error) bool { return errors.Is(err, pgx.ErrTxCommitRollback) && says("zero")(err) }},
		{"error at commit", ignored(`INSERT INTO later VALUES (1)`), says("23505")},
		{"raw ROLLBACK", ignored(`ROLLBACK`), is(inbox.ErrTxManaged)},
		{"raw ROLLBACK and BEGIN", ignored(`ROLLBACK; BEGIN; INSERT INTO effects (message_id) VALUES ('lost')`), is(inbox.ErrTxManaged)},
		{"raw ROLLBACK AND CHAIN", ignored(`ROLLBACK AND CHAIN`), is(inbox.ErrTxManaged)},
		{"raw ROLLBACK by the connection", func(ctx context.Context, tx pgx.Tx, m postroom.Message) error {
			_, err := tx.Conn().Exec(ctx, "rollback and chain")
			return err
		}, is(inbox.ErrTxManaged)},
		{"raw ROLLBACK in a batch", func(ctx context.Context, tx pgx.Tx, m postroom.Message) error {
			var b pgx.Batch
			b.Queue("rollback")
			b.Queue("begin")
			return tx.SendBatch(ctx, &b).Close()
		}, is(inbox.ErrTxManaged)},
		{"rows left open", func(ctx context.Context, tx pgx.Tx, m postroom.Message) error {
			_, err := tx.Query(ctx, `SELECT generate_series(1, 10)`)
			return err
		}, says("not closed")},
		{"row not scanned", func(ctx context.Context, tx pgx.Tx, m postroom.Message) error {
			_ = tx.QueryRow(ctx, `SELECT 1`)
			return nil
		}, says("not closed")},
		{"batch left open", func(ctx context.Context, tx pgx.Tx, m postroom.Message) error {
			var b pgx.Batch
			b.Queue("select 1")
			tx.SendBatch(ctx, &b)
			return nil
		}, says("not closed")},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			exec(t, pool, `TRUNCATE effects, postroom.processed_messages`)
			_, err := handleOne(t, pool, "m1", func(ctx context.Context, tx pgx.Tx, m postroom.Message) error {
				if err := effect(ctx, tx, m); err != nil {
					return err
				}
				return test.do(ctx, tx, m)
			}, inbox.Config{})
			if err == nil || !test.want(err) {
				t.Errorf("error = %v", err)
			}
			if errors.Is(err, inbox.ErrTransient) {
				t.Errorf("error %v counts as database trouble", err)
			}
			wantStrings(t, "effects", effects(t, pool))
			wantStrings(t, "processed", outcomes(t, pool))
			mustHandle(t, pool, "m1", effect, inbox.Handled)
			wantStrings(t, "effects", effects(t, pool), "m1")
		})
	}
	if n := pool.Stat().AcquiredConns(); n != 0 {
		t.Errorf("%d connections are still acquired", n)
	}
}

func is(target error) func(error) bool { return func(err error) bool { return errors.Is(err, target) } }

func says(text string) func(error) bool {
	return func(err error) bool { return strings.Contains(err.Error(), text) }
}

// What escapes the wrapper cannot be undone, but it is reported, and what the
// handler does after it is not committed.
func TestRawCommitIsReported(t *testing.T) {
	pool := newPool(t, pgtest.First(t))
	for _, sql := range []string{"COMMIT", "commit and chain", "COMMIT; BEGIN", "PREPARE TRANSACTION 'p'"} {
		if strings.HasPrefix(sql, "PREPARE") && query(t, pool, `SHOW max_prepared_transactions`)[0] == "0" {
			continue // the server refuses it
		}
		exec(t, pool, `TRUNCATE effects, postroom.processed_messages`)
		_, err := handleOne(t, pool, "m1", func(ctx context.Context, tx pgx.Tx, m postroom.Message) error {
			if err := effect(ctx, tx, m); err != nil {
				return err
			}
			if _, err := tx.Exec(ctx, sql); err != nil {
				return err
			}
			if sql != "COMMIT" {
				return effect(ctx, tx, m)
			}
			return nil
		}, inbox.Config{})
		if !errors.Is(err, inbox.ErrTxManaged) {
			t.Errorf("%s: %v, want ErrTxManaged", sql, err)
		}
		wantStrings(t, sql+": effects", effects(t, pool), "m1")
		if strings.HasPrefix(sql, "PREPARE") {
			exec(t, pool, `ROLLBACK PREPARED 'p'`)
		}
	}
}

func TestCase_B37_SwallowedError(t *testing.T) {
	pool := newPool(t, pgtest.First(t))
	bus, rec := newBus()
	publish(t, bus, message("m1"))
	var tries int
	start(t, pool, rec, func(ctx context.Context, tx pgx.Tx, m postroom.Message) error {
		if err := effect(ctx, tx, m); err != nil {
			return err
		}
		if tries++; tries < 3 {
			if n := rec.count("ack"); n != 0 {
				t.Errorf("%d messages were acknowledged", n)
			}
			_, _ = tx.Exec(ctx, `SELECT 1/0`)
		}
		return nil
	}, inbox.Config{})
	eventually(t, "an ack", func() bool { return rec.count("ack") == 1 })
	if tries != 3 {
		t.Errorf("handled %d times, want 3", tries)
	}
	wantStrings(t, "effects", effects(t, pool), "m1")
}

func TestCase_B79_CommitOfAFailedTransaction(t *testing.T) {
	pgtest.Each(t, func(t *testing.T, s *pgtest.Server) {
		pool := newPool(t, s)
		_, err := handleOne(t, pool, "m1", func(ctx context.Context, tx pgx.Tx, m postroom.Message) error {
			_, _ = tx.Exec(ctx, `INSERT INTO nowhere VALUES (1)`)
			return nil
		}, inbox.Config{})
		if !errors.Is(err, pgx.ErrTxCommitRollback) {
			t.Errorf("Handle = %v, want pgx.ErrTxCommitRollback", err)
		}
		wantStrings(t, "processed", outcomes(t, pool))

		// With a savepoint around the failing part the rest commits.
		mustHandle(t, pool, "m1", func(ctx context.Context, tx pgx.Tx, m postroom.Message) error {
			err := pgx.BeginFunc(ctx, tx, func(tx pgx.Tx) error {
				_, err := tx.Exec(ctx, `INSERT INTO nowhere VALUES (1)`)
				return err
			})
			if err == nil {
				t.Error("the savepoint's error is lost")
			}
			return effect(ctx, tx, m)
		}, inbox.Handled)
		wantStrings(t, "effects", effects(t, pool), "m1")
	})
}

func TestSavepoints(t *testing.T) {
	pool := newPool(t, pgtest.First(t))
	var box outbox.Outbox
	mustHandle(t, pool, "m1", func(ctx context.Context, tx pgx.Tx, m postroom.Message) error {
		for _, fail := range []bool{false, true} {
			outer, err := tx.Begin(ctx)
			if err != nil {
				return err
			}
			inner, err := outer.Begin(ctx)
			if err != nil {
				return err
			}
			if err := box.Write(ctx, inner, postroom.Message{ID: fmt.Sprint("out ", fail), Topic: "invoices"}); err != nil {
				return err
			}
			if err := inner.Commit(ctx); err != nil {
				return err
			}
			if fail {
				err = outer.Rollback(ctx)
			} else {
				err = outer.Commit(ctx)
			}
			if err != nil {
				return err
			}
			if err := outer.Commit(ctx); !errors.Is(err, pgx.ErrTxClosed) {
				t.Errorf("second Commit of a savepoint = %v, want ErrTxClosed", err)
			}
		}
		return effect(ctx, tx, m)
	}, inbox.Handled)
	wantStrings(t, "outbox", query(t, pool, `SELECT message_id FROM postroom.outbox_messages`), "out false")
	wantStrings(t, "effects", effects(t, pool), "m1")
}

func TestEveryMethodOfTheTransaction(t *testing.T) {
	pool := newPool(t, pgtest.First(t))
	mustHandle(t, pool, "m1", func(ctx context.Context, tx pgx.Tx, m postroom.Message) error {
		if _, err := tx.Prepare(ctx, "series", `SELECT generate_series(1, $1::int)::text`); err != nil {
			return err
		}
		rows, err := tx.Query(ctx, "series", 3)
		if err != nil {
			return err
		}
		got, err := pgx.CollectRows(rows, pgx.RowTo[string])
		if err != nil {
			return err
		}
		wantStrings(t, "rows", got, "1", "2", "3")
		if tag := rows.CommandTag(); tag.RowsAffected() != 3 {
			t.Errorf("tag = %v", tag)
		}
		var n int
		if err := tx.QueryRow(ctx, `SELECT 1 WHERE false`).Scan(&n); !errors.Is(err, pgx.ErrNoRows) {
			t.Errorf("no row: %v", err)
		}
		rows, _ = tx.Query(ctx, `SELECT 'x'`)
		rows.Next()
		if err := rows.Scan(&n); err == nil {
			t.Error("scanned a text as a number")
		} // the rows are closed now
		rows, _ = tx.Query(ctx, `SELECT 1, 2 UNION SELECT 3, 4`)
		rows.Next()
		if _, err := tx.Exec(ctx, `SELECT 1`); err == nil || errors.Is(err, pgx.ErrTxClosed) {
			t.Errorf("Exec beside open rows: %v", err)
		}
		if v, err := rows.Values(); err != nil || len(v) != 2 || len(rows.RawValues()) != 2 || len(rows.FieldDescriptions()) != 2 {
			t.Errorf("values %v, %v", v, err)
		}
		rows.Close()
		if rows.Next() || rows.Err() != nil {
			t.Errorf("closed rows: %v", rows.Err())
		}
		var b pgx.Batch
		b.Queue(`SELECT 1`)
		b.Queue(`SELECT 2`)
		b.Queue(`SELECT 3`)
		b.Queue(insertEffect, m.ID).Exec(func(pgconn.CommandTag) error {
			if _, err := tx.Exec(ctx, `SELECT 1`); err == nil {
				t.Error("Exec in a batch's callback succeeded")
			}
			return nil
		})
		results := tx.SendBatch(ctx, &b)
		if _, err := results.Exec(); err != nil {
			return err
		}
		if err := results.QueryRow().Scan(&n); err != nil || n != 2 {
			t.Errorf("second of the batch: %d, %v", n, err)
		}
		rows, err = results.Query()
		if err != nil {
			return err
		}
		if got, err := pgx.CollectRows(rows, pgx.RowTo[int]); err != nil || got[0] != 3 {
			t.Errorf("third of the batch: %v, %v", got, err)
		}
		if err := errors.Join(results.Close(), results.Close()); err != nil {
			return err
		}
		copied, err := tx.CopyFrom(ctx, pgx.Identifier{"effects"}, []string{"message_id"}, pgx.CopyFromSlice(2, func(int) ([]any, error) {
			if _, err := tx.Exec(ctx, `SELECT 1`); err == nil {
				t.Error("Exec in a copy's source succeeded")
			}
			return []any{m.ID}, nil
		}))
		if err != nil || copied != 2 {
			t.Errorf("CopyFrom = %d, %v", copied, err)
		}
		large := tx.LargeObjects()
		_, err = large.Create(ctx, 0)
		return err
	}, inbox.Handled)
	if got := effects(t, pool); len(got) != 3 {
		t.Errorf("effects = %q", got)
	}
	mustHandle(t, pool, "m2", effect, inbox.Handled)
}
