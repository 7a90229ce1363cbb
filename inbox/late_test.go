package inbox_test

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/postroom/postroom"
	"github.com/postroom/postroom/inbox"
	"github.com/postroom/postroom/internal/pgtest"
	"github.com/postroom/postroom/outbox"
)

func TestCase_B14_LateAndConcurrentUse(t *testing.T) {
	t.Run("after the handler has returned", func(t *testing.T) {
		pool := newPool(t, pgtest.First(t))
		var kept pgx.Tx
		var keptRows pgx.Rows
		var large pgx.LargeObjects
		mustHandle(t, pool, "m1", func(ctx context.Context, tx pgx.Tx, m postroom.Message) error {
			kept, large = tx, tx.LargeObjects()
			keptRows, _ = tx.Query(ctx, `SELECT 1`)
			keptRows.Close()
			return nil
		}, inbox.Handled)
		ctx := t.Context()
		var box outbox.Outbox
		_, execErr := kept.Exec(ctx, `SELECT 1`)
		_, queryErr := kept.Query(ctx, `SELECT 1`)
		_, beginErr := kept.Begin(ctx)
		_, copyErr := kept.CopyFrom(ctx, pgx.Identifier{"effects"}, []string{"message_id"}, pgx.CopyFromRows(nil))
		_, prepareErr := kept.Prepare(ctx, "x", `SELECT 1`)
		var b pgx.Batch
		b.Queue("select 1")
		for name, err := range map[string]error{
			"Exec": execErr, "Query": queryErr, "Begin": beginErr, "CopyFrom": copyErr, "Prepare": prepareErr,
			"QueryRow":     kept.QueryRow(ctx, `SELECT 1`).Scan(),
			"SendBatch":    kept.SendBatch(ctx, &b).Close(),
			"Commit":       kept.Commit(ctx),
			"Rollback":     kept.Rollback(ctx),
			"outbox.Write": box.Write(ctx, kept, postroom.Message{Topic: "late"}),
		} {
			if !errors.Is(err, pgx.ErrTxClosed) || !strings.Contains(err.Error(), "handler has returned") {
				t.Errorf("%s after the handler has returned: %v", name, err)
			}
		}
		if _, err := large.Create(ctx, 0); err == nil {
			t.Error("LargeObjects after the handler has returned: no error")
		}
		if keptRows.Next() {
			t.Error("rows after the handler has returned: a row")
		}
		wantStrings(t, "outbox", query(t, pool, `SELECT message_id FROM postroom.outbox_messages`))
	})

	t.Run("a goroutine that writes later", func(t *testing.T) {
		pool := newPool(t, pgtest.First(t))
		returned, late := make(chan struct{}), make(chan error, 1)
		mustHandle(t, pool, "m1", func(ctx context.Context, tx pgx.Tx, m postroom.Message) error {
			go func() {
				<-returned
				var box outbox.Outbox
				late <- box.Write(ctx, tx, postroom.Message{Topic: "late"})
			}()
			return effect(ctx, tx, m)
		}, inbox.Handled)
		close(returned)
		if err := receive(t, "the late write", late); !errors.Is(err, pgx.ErrTxClosed) {
			t.Errorf("late write: %v, want pgx.ErrTxClosed", err)
		}
	})

	t.Run("a goroutine that is writing meanwhile", func(t *testing.T) {
		pool := newPool(t, pgtest.First(t))
		exec(t, pool, `CREATE FUNCTION busy() RETURNS void LANGUAGE sql AS 'SELECT pg_sleep(20)'`)
		late := make(chan error, 1)
		begin := time.Now()
		_, err := handleOne(t, pool, "m1", func(ctx context.Context, tx pgx.Tx, m postroom.Message) error {
			go func() {
				_, err := tx.Exec(context.WithoutCancel(ctx), `SELECT busy()`)
				late <- err
			}()
			eventually(t, "the goroutine's statement runs", func() bool {
				return len(query(t, pool, `SELECT pid::text FROM pg_stat_activity WHERE query = 'SELECT busy()'`)) == 1
			})
			return nil
		}, inbox.Config{})
		if err == nil || !strings.Contains(err.Error(), "in use") {
			t.Errorf("Handle = %v, want that the transaction is in use", err)
		}
		if err := receive(t, "the statement ends", late); err == nil {
			t.Error("the goroutine's statement succeeded")
		}
		if d := time.Since(begin); d > 10*time.Second {
			t.Errorf("took %v", d)
		}
		wantStrings(t, "processed", outcomes(t, pool))
		if n := pool.Stat().AcquiredConns(); n != 0 {
			t.Errorf("%d connections are still acquired", n)
		}
	})

	t.Run("two goroutines at once", func(t *testing.T) {
		pool := newPool(t, pgtest.First(t))
		var box outbox.Outbox
		mustHandle(t, pool, "m1", func(ctx context.Context, tx pgx.Tx, m postroom.Message) error {
			var all sync.WaitGroup
			errs := make([]error, 8)
			for i := range errs {
				all.Go(func() {
					for j := range 10 {
						id := fmt.Sprintf("%d-%d", i, j)
						errs[i] = errors.Join(errs[i], box.Write(ctx, tx, postroom.Message{ID: id, Topic: "out"}))
					}
				})
			}
			all.Wait()
			return errors.Join(errs...)
		}, inbox.Handled)
		if got := query(t, pool, `SELECT message_id FROM postroom.outbox_messages`); len(got) != 80 {
			t.Errorf("%d messages in the outbox, want 80", len(got))
		}
	})
}

// The goroutine that a handler ends is the consumer's own; the consumer goes on.
func TestGoexitAndPanicInAConsumer(t *testing.T) {
	pool := newPool(t, pgtest.First(t))
	bus, rec := newBus()
	publish(t, bus, message("exit"), message("panic"), message("good"))
	start(t, pool, rec, func(ctx context.Context, tx pgx.Tx, m postroom.Message) error {
		if err := effect(ctx, tx, m); err != nil {
			return err
		}
		switch m.ID {
		case "exit":
			runtime.Goexit()
		case "panic":
			panic(fmt.Errorf("wrapped: %w", context.Canceled))
		}
		return nil
	}, inbox.Config{MaxAttempts: 3, Concurrency: 2})
	eventually(t, "all acks", func() bool { return rec.count("ack") == 3 })
	wantStrings(t, "effects", effects(t, pool), "good")
	wantStrings(t, "processed", outcomes(t, pool), "billing exit dead", "billing good handled", "billing panic dead")
	wantStrings(t, "attempts", query(t, pool, `SELECT attempts::text FROM postroom.inbox_dead_letters`), "3", "3")
	eventually(t, "all connections are free", func() bool { return pool.Stat().AcquiredConns() == 0 })
}

func TestGoexitInHandle(t *testing.T) {
	pool := newPool(t, pgtest.First(t))
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		_, _ = inbox.Handle(t.Context(), pool, "billing", message("m1"), func(ctx context.Context, tx pgx.Tx, m postroom.Message) error {
			_ = effect(ctx, tx, m)
			runtime.Goexit()
			return nil
		}, inbox.Config{})
	}()
	receive(t, "the goroutine ends", ended)
	if n := pool.Stat().AcquiredConns(); n != 0 {
		t.Errorf("%d connections are still acquired", n)
	}
	mustHandle(t, pool, "m1", effect, inbox.Handled)
	wantStrings(t, "effects", effects(t, pool), "m1")
}
