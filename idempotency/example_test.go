package idempotency_test

import (
	"net/http"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/postroom/postroom"
	"github.com/postroom/postroom/idempotency"
	"github.com/postroom/postroom/outbox"
)

// newPayments makes each payment once per account and Idempotency-Key. The row, the
// message and the answer commit together.
func newPayments(pool *pgxpool.Pool) (http.Handler, error) {
	account := func(r *http.Request) string {
		name, _, _ := r.BasicAuth() // who was authenticated before
		return name
	}
	once, err := idempotency.Middleware(pool, account, idempotency.Config{})
	if err != nil {
		return nil, err
	}
	var box outbox.Outbox
	mux := http.NewServeMux()
	mux.Handle("POST /payments", once(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		ctx, tx := r.Context(), idempotency.Tx(r.Context())
		var id string
		err := tx.QueryRow(ctx, `INSERT INTO payments (note) VALUES ($1) RETURNING n`, r.FormValue("note")).Scan(&id)
		if err == nil {
			err = box.Write(ctx, tx, postroom.Message{Topic: "payments", Key: id, Payload: []byte(r.FormValue("note"))})
		}
		if err != nil {
			http.Error(w, "try again", http.StatusInternalServerError) // rolled back
			return
		}
		w.Header().Set("Location", "/payments/"+id)
		w.WriteHeader(http.StatusCreated) // sent after the commit, and again to repeats
	})))
	return mux, nil
}

func ExampleMiddleware() {
	var pool *pgxpool.Pool // your database
	payments, err := newPayments(pool)
	if err != nil {
		return // pool is nil
	}
	http.Handle("/", payments)
}
