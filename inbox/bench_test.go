package inbox_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/postroom/postroom"
	"github.com/postroom/postroom/broker"
	"github.com/postroom/postroom/broker/memory"
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

// BenchmarkConsumer compares a Consumer with a loop by hand over the same broker,
// from the start to the last acknowledgement, in turns as BenchmarkHandle does.
func BenchmarkConsumer(b *testing.B) {
	const round = 1000 // messages
	pool := newPool(b, pgtest.First(b))
	for _, workers := range []int{1, 8} {
		b.Run(fmt.Sprintf("workers=%d", workers), func(b *testing.B) {
			exec(b, pool, `TRUNCATE effects, postroom.processed_messages`)
			byHand := func(ctx context.Context, bus broker.Subscriber) error { return loopByHand(ctx, pool, bus, workers) }
			consumer := func(ctx context.Context, bus broker.Subscriber) error {
				c, err := inbox.New(pool, bus, "billing", "orders", effect, inbox.Config{
					Concurrency: workers, Logger: slog.New(slog.DiscardHandler),
				})
				if err != nil {
					return err
				}
				return c.Run(ctx)
			}
			var hand, ours time.Duration
			b.ResetTimer()
			for done := 0; done < b.N; done += round {
				hand += drain(b, round, byHand)
				ours += drain(b, round, consumer)
			}
			n := float64((b.N + round - 1) / round * round)
			b.ReportMetric(n/hand.Seconds(), "by_hand/s")
			b.ReportMetric(n/ours.Seconds(), "consumer/s")
			b.ReportMetric(hand.Seconds()/ours.Seconds(), "ratio")
		})
	}
}

// drain lets run consume n messages, and returns the time it took.
func drain(b *testing.B, n int, run func(context.Context, broker.Subscriber) error) time.Duration {
	bus := memory.New()
	for range n {
		publish(b, bus, message(postroom.NewID()))
	}
	ctx, cancel := context.WithCancel(b.Context())
	defer cancel()
	begin := time.Now()
	if err := run(ctx, &countdown{Subscriber: bus, left: int64(n), end: cancel}); err != nil {
		b.Fatal(err)
	}
	return time.Since(begin)
}

// countdown calls end at the last acknowledgement.
type countdown struct {
	broker.Subscriber
	left int64
	end  func()
}

func (c *countdown) Subscribe(ctx context.Context, s broker.Subscription, deliver func(broker.Delivery)) error {
	return c.Subscriber.Subscribe(ctx, s, func(d broker.Delivery) { deliver(&counted{d, c}) })
}

type counted struct {
	broker.Delivery
	c *countdown
}

func (d *counted) Ack(ctx context.Context) error {
	err := d.Delivery.Ack(ctx)
	if atomic.AddInt64(&d.c.left, -1) == 0 {
		d.c.end()
	}
	return err
}

func loopByHand(ctx context.Context, pool *pgxpool.Pool, bus broker.Subscriber, workers int) error {
	queue := make(chan broker.Delivery, 16*workers)
	var all sync.WaitGroup
	for range workers {
		all.Go(func() {
			for d := range queue {
				work := context.WithoutCancel(ctx)
				if err := byHand(work, pool, d.Message()); err != nil {
					panic(err)
				}
				if err := d.Ack(work); err != nil {
					panic(err)
				}
			}
		})
	}
	err := bus.Subscribe(ctx, broker.Subscription{Group: "billing", Topic: "orders", MaxInFlight: 16 * workers},
		func(d broker.Delivery) { queue <- d })
	close(queue)
	all.Wait()
	return err
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
