// Package readme holds the code that the README shows, so that it compiles.
package readme

import (
	"context"
	"net/http"
	"os"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/postroom/postroom"
	"github.com/postroom/postroom/broker/nats"
	"github.com/postroom/postroom/dispatcher"
	"github.com/postroom/postroom/idempotency"
	"github.com/postroom/postroom/inbox"
	"github.com/postroom/postroom/outbox"
	"github.com/postroom/postroom/webhook"
)

var box outbox.Outbox // the zero value is ready

func placeOrder(ctx context.Context, pool *pgxpool.Pool, id string, total int) error {
	return pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
		_, err := tx.Exec(ctx, `INSERT INTO orders (id, total) VALUES ($1, $2)`, id, total)
		if err != nil {
			return err
		}
		return box.Write(ctx, tx, postroom.Message{Topic: "orders", Key: id, Payload: []byte(`{"placed":true}`)})
	})
}

func dispatch(ctx context.Context, pool *pgxpool.Pool, bus *nats.Bus) error {
	d, err := dispatcher.New(pool, bus, dispatcher.Config{})
	if err != nil {
		return err
	}
	return d.Run(ctx) // until ctx ends; run as many as you like
}

func consume(ctx context.Context, pool *pgxpool.Pool, bus *nats.Bus) error {
	bill := func(ctx context.Context, tx pgx.Tx, m postroom.Message) error {
		_, err := tx.Exec(ctx, `INSERT INTO invoices (order_id) VALUES ($1)`, m.Key)
		return err // nil acknowledges; an error is retried, then a dead letter
	}
	c, err := inbox.New(pool, bus, "billing", "orders", bill, inbox.Config{})
	if err != nil {
		return err
	}
	return c.Run(ctx)
}

func serve(pool *pgxpool.Pool, account func(*http.Request) string) (http.Handler, error) {
	once, err := idempotency.Middleware(pool, account, idempotency.Config{})
	if err != nil {
		return nil, err
	}
	secret := webhook.Secret{Value: os.Getenv("STRIPE_SECRET")}
	hooks, err := webhook.New(pool, "stripe", webhook.Stripe(secret), "stripe-events", webhook.Config{})
	if err != nil {
		return nil, err
	}
	order := func(w http.ResponseWriter, r *http.Request) {
		id, ctx := r.FormValue("id"), r.Context()
		_, err := idempotency.Tx(ctx).Exec(ctx, `INSERT INTO orders (id, total) VALUES ($1, $2::text::int)`, id, r.FormValue("total"))
		if err != nil {
			http.Error(w, "try again", http.StatusInternalServerError) // rolled back
			return
		}
		w.Header().Set("Location", "/orders/"+id)
		w.WriteHeader(http.StatusCreated) // after the commit, and again to repeats
	}
	mux := http.NewServeMux()
	mux.Handle("POST /orders", once(http.HandlerFunc(order)))
	mux.Handle("POST /webhooks/stripe", hooks)
	return mux, nil
}
