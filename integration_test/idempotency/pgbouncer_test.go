// Package idempotency_test runs package idempotency behind PgBouncer.
package idempotency_test

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

	"github.com/postroom/postroom/idempotency"
	"github.com/postroom/postroom/internal/throwaway"
	"github.com/postroom/postroom/migrations"
)

// Calls with 20 keys, each made ten times at once, through PgBouncer in transaction
// mode with fewer connections than the pool has.
func TestThroughPgBouncer(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), 3*time.Minute)
	defer cancel()
	db, err := throwaway.StartPostgres(ctx, throwaway.PostgresConfig{})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := db.Close(); err != nil {
			t.Error(err)
		}
	})
	b, err := throwaway.StartPgBouncer(ctx, throwaway.PgBouncerConfig{URL: db.URL, PoolSize: 3})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := b.Close(); err != nil {
			t.Error(err)
		}
	})
	direct := connect(t, db.URL, pgx.QueryExecModeCacheStatement)
	if _, err := migrations.Up(ctx, direct, migrations.Config{}); err != nil {
		t.Fatal(err)
	}
	if _, err := direct.Exec(ctx, `CREATE TABLE effects (key text)`); err != nil {
		t.Fatal(err)
	}
	for _, mode := range []pgx.QueryExecMode{pgx.QueryExecModeExec, pgx.QueryExecModeSimpleProtocol} {
		t.Run(mode.String(), func(t *testing.T) {
			pool := connect(t, b.URL, mode)
			var runs atomic.Int32
			var all sync.WaitGroup
			for n := range 20 {
				c := idempotency.Call{Tenant: mode.String(), Operation: "op", Key: fmt.Sprint("k", n)}
				for range 10 {
					all.Go(func() {
						_, _, err := idempotency.Do(ctx, pool, c, func(ctx context.Context, tx pgx.Tx) ([]byte, error) {
							runs.Add(1)
							_, err := tx.Exec(ctx, `INSERT INTO effects VALUES ($1)`, mode.String()+c.Key)
							return []byte(c.Key), err
						}, idempotency.Config{Wait: time.Minute, QueueTimeout: time.Minute})
						if err != nil && !errors.Is(err, idempotency.ErrInFlight) {
							t.Error(err)
						}
					})
				}
			}
			all.Wait()
			if n := runs.Load(); n != 20 {
				t.Errorf("%d runs, want 20", n)
			}
		})
	}
	var effects, keys int
	if err := direct.QueryRow(ctx, `SELECT count(*), count(DISTINCT key) FROM effects`).Scan(&effects, &keys); err != nil {
		t.Fatal(err)
	}
	if effects != 40 || keys != 40 {
		t.Errorf("%d effects of %d keys, want 40 of 40", effects, keys)
	}
}

func connect(t *testing.T, url string, mode pgx.QueryExecMode) *pgxpool.Pool {
	t.Helper()
	cfg, err := pgxpool.ParseConfig(url)
	if err != nil {
		t.Fatal(err)
	}
	cfg.ConnConfig.DefaultQueryExecMode = mode
	cfg.MaxConns = 8
	pool, err := pgxpool.NewWithConfig(t.Context(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(pool.Close)
	return pool
}
