package idempotency_test

import (
	"context"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/postroom/postroom/idempotency"
)

// A job that a queue may deliver twice.
func ExampleDo() {
	var pool *pgxpool.Pool // your database
	invoice := func(ctx context.Context, order string) (number []byte, err error) {
		call := idempotency.Call{Tenant: "acme", Operation: "invoice", Key: order}
		number, _, err = idempotency.Do(ctx, pool, call, func(ctx context.Context, tx pgx.Tx) ([]byte, error) {
			var number string
			err := tx.QueryRow(ctx, `INSERT INTO invoices (order_id) VALUES ($1) RETURNING number`, order).Scan(&number)
			return []byte(number), err
		}, idempotency.Config{})
		return number, err
	}
	_ = invoice
}
