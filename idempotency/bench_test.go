package idempotency_test

import (
	"fmt"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/postroom/postroom/idempotency"
)

// BenchmarkRequest compares a request under a new key and a repeat with a handler
// that has its transaction alone, without HTTP connections.
//
//	go test -run '^$' -bench Request ./idempotency
func BenchmarkRequest(b *testing.B) {
	pool := newPool(b)
	once, err := idempotency.Middleware(pool, func(*http.Request) string { return "acme" }, idempotency.Config{})
	if err != nil {
		b.Fatal(err)
	}
	protected := once(http.HandlerFunc(pay))
	var keys atomic.Int64
	for _, bench := range []struct {
		name string
		key  func() string
		h    http.Handler
	}{
		{"bare", func() string { return "k" }, bare(pool)},
		{"first", func() string { return fmt.Sprint("first", keys.Add(1)) }, protected},
		{"repeat", func() string { return "repeat" }, protected},
	} {
		b.Run(bench.name, func(b *testing.B) {
			run(b, bench.h, bench.key) // a repeat needs a first
			b.SetParallelism(4)
			b.RunParallel(func(pb *testing.PB) {
				for pb.Next() {
					run(b, bench.h, bench.key)
				}
			})
		})
	}
}

func run(b *testing.B, h http.Handler, key func() string) {
	r := httptest.NewRequestWithContext(b.Context(), "POST", "/payments", strings.NewReader("10 EUR"))
	r.Pattern = "POST /payments"
	r.Header.Set("Idempotency-Key", key())
	w := httptest.NewRecorder()
	h.ServeHTTP(w, r)
	if w.Code != 201 {
		b.Errorf("answer %d %s", w.Code, w.Body)
	}
}

// bare is pay in a transaction of its own.
func bare(pool *pgxpool.Pool) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		err := pgx.BeginFunc(r.Context(), pool, func(tx pgx.Tx) error {
			var n int
			if err := tx.QueryRow(r.Context(), insertPayment, "10 EUR").Scan(&n); err != nil {
				return err
			}
			w.Header().Set("Location", fmt.Sprintf("/payments/%d", n))
			return nil
		})
		if err != nil {
			http.Error(w, err.Error(), http.StatusInternalServerError)
			return
		}
		w.WriteHeader(http.StatusCreated)
	})
}
