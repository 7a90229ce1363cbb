package main

import (
	"context"
	"hash/crc32"
	"math/rand/v2"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/postroom/postroom"
	"github.com/postroom/postroom/broker"
)

// What -break takes: each breaks one promise on purpose, to show that the check
// at the end notices.
const (
	breakDedupe   = "dedupe"   // subscribers without an inbox: doubled
	breakOutbox   = "outbox"   // producers publish inside the transaction: published although rolled back
	breakOrder    = "order"    // the publisher sends a page in any order: out of order at the broker
	breakPublish  = "publish"  // the publisher reports what it did not send: lost
	breakDelivery = "delivery" // messages reach the inbox in any order: out of order in effect
)

// withoutInbox is what a subscriber without an inbox does: handle, commit,
// acknowledge.
func (s *subscriber) withoutInbox(ctx context.Context, pool *pgxpool.Pool, sub broker.Subscriber) error {
	work := context.WithoutCancel(ctx) // what has begun is finished
	subscription := broker.Subscription{Group: s.name, Topic: topic, MaxInFlight: 16}
	var busy sync.WaitGroup
	defer busy.Wait()
	return sub.Subscribe(ctx, subscription, func(d broker.Delivery) {
		busy.Go(func() {
			err := pgx.BeginFunc(work, pool, func(tx pgx.Tx) error { return s.handle(work, tx, d.Message()) })
			if err != nil {
				_ = d.Retry(work, 0) // a lost delivery comes again
				return
			}
			_ = d.Ack(work) // likewise
		})
	})
}

// shuffled returns a deliver that passes deliveries on in any order, and what
// waits until all are passed on.
func shuffled(deliver func(broker.Delivery)) (func(broker.Delivery), func()) {
	var one sync.Mutex
	var all sync.WaitGroup
	return func(d broker.Delivery) {
		all.Go(func() {
			time.Sleep(rand.N(20 * time.Millisecond))
			one.Lock()
			defer one.Unlock()
			deliver(d)
		})
	}, all.Wait
}

// publishShuffled sends messages in any order.
func publishShuffled(ctx context.Context, pub broker.Publisher, msgs []postroom.Message) []broker.Result {
	results := make([]broker.Result, len(msgs))
	for _, i := range rand.Perm(len(msgs)) {
		results[i] = pub.Publish(ctx, msgs[i:i+1])[0]
	}
	return results
}

// publishSome leaves out about every fiftieth message.
func publishSome(ctx context.Context, pub broker.Publisher, msgs []postroom.Message) []broker.Result {
	results := make([]broker.Result, len(msgs))
	for i := range msgs {
		if crc32.ChecksumIEEE([]byte(msgs[i].ID))%50 == 0 { // in every try
			results[i].Outcome = broker.Stored
			continue
		}
		results[i] = pub.Publish(ctx, msgs[i:i+1])[0]
	}
	return results
}
