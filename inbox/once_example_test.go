package inbox_test

import (
	"context"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/postroom/postroom/inbox"
)

// A nightly job and an order's messages may both ask for the invoice.
func ExampleOnce() {
	var pool *pgxpool.Pool // your database
	invoice := func(ctx context.Context, orderID string) error {
		return pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
			first, err := inbox.Once(ctx, tx, "invoice", orderID)
			if err != nil || !first {
				return err
			}
			_, err = tx.Exec(ctx, `INSERT INTO invoices (order_id) VALUES ($1)`, orderID)
			return err
		})
	}
	_ = invoice
}
