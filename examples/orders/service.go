// Orders is the least that a service writes: an order and its message in one
// transaction, a dispatcher that publishes it, a subscriber that bills it once.
// In main.go are servers to run it with.
package main

import (
	"context"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"golang.org/x/sync/errgroup"

	"github.com/postroom/postroom"
	"github.com/postroom/postroom/broker/nats"
	"github.com/postroom/postroom/dispatcher"
	"github.com/postroom/postroom/inbox"
	"github.com/postroom/postroom/migrations"
	"github.com/postroom/postroom/outbox"
)

// serve places an order, publishes and handles messages until ctx ends.
func serve(ctx context.Context, databaseURL, natsURL string) error {
	pool, err := pgxpool.New(ctx, databaseURL)
	if err != nil {
		return err
	}
	defer pool.Close()
	if _, err := migrations.Up(ctx, pool, migrations.Config{}); err != nil {
		return err
	}
	bus, err := nats.Open(ctx, natsURL, nats.Config{})
	if err != nil {
		return err
	}
	defer bus.Close()
	d, err := dispatcher.New(pool, bus, dispatcher.Config{})
	if err != nil {
		return err
	}
	c, err := inbox.New(pool, bus, "billing", "orders", bill, inbox.Config{})
	if err != nil {
		return err
	}
	g, ctx := errgroup.WithContext(ctx)
	g.Go(func() error { return d.Run(ctx) })
	g.Go(func() error { return c.Run(ctx) })
	g.Go(func() error { return placeOrder(ctx, pool, "A-1001") })
	return g.Wait()
}

var box outbox.Outbox

// placeOrder commits the order and its message together, or neither.
func placeOrder(ctx context.Context, pool *pgxpool.Pool, id string) error {
	return pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
		if _, err := tx.Exec(ctx, `INSERT INTO orders (id) VALUES ($1)`, id); err != nil {
			return err
		}
		return box.Write(ctx, tx, postroom.Message{Topic: "orders", Key: id, Payload: []byte(`{"total": 42}`)})
	})
}

// bill handles a message. Its invoice is committed once, however often the
// message comes.
func bill(ctx context.Context, tx pgx.Tx, m postroom.Message) error {
	_, err := tx.Exec(ctx, `INSERT INTO invoices (order_id) VALUES ($1)`, m.Key)
	return err
}
