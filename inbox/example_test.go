package inbox_test

import (
	"context"
	"encoding/json"
	"errors"
	"net/http"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/postroom/postroom"
	"github.com/postroom/postroom/broker/memory"
	"github.com/postroom/postroom/inbox"
	"github.com/postroom/postroom/outbox"
)

// A consumer of orders writes an invoice for each and announces it. The record,
// the invoice and the announcement commit together.
func ExampleNew() {
	var (
		ctx  context.Context // ends when the program shall
		pool *pgxpool.Pool
		bus  = memory.New() // or nats.Open, kafka.Open
		box  outbox.Outbox
	)
	bill := func(ctx context.Context, tx pgx.Tx, m postroom.Message) error {
		var order struct{ Total int }
		if err := json.Unmarshal(m.Payload, &order); err != nil {
			return postroom.Permanent(err) // a dead letter: no retry makes it JSON
		}
		_, err := tx.Exec(ctx, `INSERT INTO invoices (order_id, total) VALUES ($1, $2)`, m.Key, order.Total)
		if err != nil {
			return err // tried again
		}
		return box.Write(ctx, tx, postroom.Message{Topic: "invoices", Key: m.Key, Payload: m.Payload})
	}
	run := func() error {
		c, err := inbox.New(pool, bus, "billing", "orders", bill, inbox.Config{DeadLetterTopic: "orders.dead"})
		if err != nil {
			return err
		}
		return c.Run(ctx)
	}
	_ = run // by the program's errgroup, say
}

// A message that arrives in another way, here by HTTP.
func ExampleHandle() {
	var pool *pgxpool.Pool
	credit := func(ctx context.Context, tx pgx.Tx, m postroom.Message) error {
		_, err := tx.Exec(ctx, `UPDATE accounts SET balance = balance + 1 WHERE id = $1`, m.Key)
		return err
	}
	http.HandleFunc("POST /credit", func(w http.ResponseWriter, r *http.Request) {
		m := postroom.Message{ID: r.Header.Get("Message-Id"), Key: r.FormValue("account")}
		_, err := inbox.Handle(r.Context(), pool, "credit", m, credit, inbox.Config{})
		switch {
		case err == nil: // handled now or before
			w.WriteHeader(http.StatusNoContent)
		case errors.Is(err, postroom.ErrInvalid):
			http.Error(w, "no usable Message-Id", http.StatusBadRequest)
		default: // the sender repeats it
			http.Error(w, "try again", http.StatusServiceUnavailable)
		}
	})
}
