package inbox_test

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/postroom/postroom"
	"github.com/postroom/postroom/inbox"
	"github.com/postroom/postroom/internal/pgtest"
)

// BenchmarkHandle compares Handle with the least that a careful program would
// write by hand: begin, record, effect, commit. Each message is new. The two take
// turns in short rounds, so that what else the machine does hits both alike;
// ratio is the throughput of Handle divided by that of the other.
func BenchmarkHandle(b *testing.B) {
	const round = 200 // messages
	viaInbox := func(ctx context.Context, pool *pgxpool.Pool, m postroom.Message) error {
		_, err := inbox.Handle(ctx, pool, "handle", m, effect, inbox.Config{})
		return err
	}
	pool := newPool(b, pgtest.First(b))
	for _, workers := range []int{1, 8} {
		b.Run(fmt.Sprintf("workers=%d", workers), func(b *testing.B) {
			exec(b, pool, `TRUNCATE effects, postroom.processed_messages`)
			each(b, pool, workers, round, byHand) // connects and prepares
			each(b, pool, workers, round, viaInbox)
			var hand, handle time.Duration
			b.ResetTimer()
			for done := 0; done < b.N; done += round {
				hand += each(b, pool, workers, round, byHand)
				handle += each(b, pool, workers, round, viaInbox)
			}
			n := float64((b.N + round - 1) / round * round)
			b.ReportMetric(n/hand.Seconds(), "by_hand/s")
			b.ReportMetric(n/handle.Seconds(), "handle/s")
			b.ReportMetric(hand.Seconds()/handle.Seconds(), "ratio")
		})
	}
}

// each lets workers handle n new messages, and returns the time it took.
func each(
	b *testing.B, pool *pgxpool.Pool, workers, n int, handle func(context.Context, *pgxpool.Pool, postroom.Message) error,
) time.Duration {
	begin := time.Now()
	var next atomic.Int64
	var all sync.WaitGroup
	for range workers {
		all.Go(func() {
			for next.Add(1) <= int64(n) {
				if err := handle(b.Context(), pool, message(postroom.NewID())); err != nil {
					b.Error(err)
					return
				}
			}
		})
	}
	all.Wait()
	return time.Since(begin)
}

// BenchmarkDuplicate is a message that was handled before.
func BenchmarkDuplicate(b *testing.B) {
	pool := newPool(b, pgtest.First(b))
	m := message(postroom.NewID())
	for b.Loop() {
		if _, err := inbox.Handle(b.Context(), pool, "handle", m, effect, inbox.Config{}); err != nil {
			b.Fatal(err)
		}
	}
}

// BenchmarkConsumer counts messages from the broker in memory to the ack.
func BenchmarkConsumer(b *testing.B) {
	pool := newPool(b, pgtest.First(b))
	for _, workers := range []int{1, 8} {
		b.Run(fmt.Sprintf("workers=%d", workers), func(b *testing.B) {
			exec(b, pool, `TRUNCATE effects, postroom.processed_messages`)
			bus, _ := newBus()
			for range b.N {
				publish(b, bus, message(postroom.NewID()))
			}
			done := make(chan struct{})
			var handled atomic.Int64
			b.ResetTimer()
			start(b, pool, bus, func(ctx context.Context, tx pgx.Tx, m postroom.Message) error {
				if handled.Add(1) == int64(b.N) {
					defer close(done)
				}
				return effect(ctx, tx, m)
			}, inbox.Config{Concurrency: workers})
			<-done
			b.ReportMetric(float64(b.N)/b.Elapsed().Seconds(), "messages/s")
		})
	}
}

func byHand(ctx context.Context, pool *pgxpool.Pool, m postroom.Message) error {
	tx, err := pool.Begin(ctx)
	if err != nil {
		return err
	}
	defer tx.Rollback(ctx)
	tag, err := tx.Exec(ctx, `INSERT INTO postroom.processed_messages (subscriber_id, message_id)
		VALUES ('by hand', $1) ON CONFLICT DO NOTHING`, m.ID)
	if err != nil {
		return err
	}
	if tag.RowsAffected() == 0 {
		return errors.New("duplicate")
	}
	if err := effect(ctx, tx, m); err != nil {
		return err
	}
	return tx.Commit(ctx)
}
