package dispatcher

import (
	"context"
	"errors"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
)

// A database is a pool whose statements have deadlines: a connection that has
// died without a word would else be waited for as long as TCP does.
//
// A statement that was cut off gets twice the time when it is run again, up to
// stretch times the usual, and the usual again once that is enough. So a
// database that is slow and alive gets its work done.
type database struct {
	*pgxpool.Pool
	timeout time.Duration

	mu    sync.Mutex
	times map[string]time.Duration // statements that were cut off → their time now
}

const stretch = 16

func newDatabase(pool *pgxpool.Pool, timeout time.Duration) *database {
	return &database{Pool: pool, timeout: timeout, times: make(map[string]time.Duration)}
}

// Exec is [pgxpool.Pool.Exec] with a deadline.
func (db *database) Exec(ctx context.Context, sql string, args ...any) (pgconn.CommandTag, error) {
	ctx, end := db.begin(ctx, sql)
	tag, err := db.Pool.Exec(ctx, sql, args...)
	end()
	return tag, err
}

// Query is [pgxpool.Pool.Query] with a deadline, within which the rows are to be
// read.
func (db *database) Query(ctx context.Context, sql string, args ...any) (pgx.Rows, error) {
	ctx, end := db.begin(ctx, sql)
	rows, err := db.Pool.Query(ctx, sql, args...)
	if err != nil {
		end()
		return nil, err
	}
	return &timedRows{rows, end}, nil
}

// QueryRow is [pgxpool.Pool.QueryRow] with a deadline.
func (db *database) QueryRow(ctx context.Context, sql string, args ...any) pgx.Row {
	ctx, end := db.begin(ctx, sql)
	return &timedRow{db.Pool.QueryRow(ctx, sql, args...), end}
}

// begin returns the context of a statement, and the call that ends it.
func (db *database) begin(ctx context.Context, sql string) (context.Context, func()) {
	db.mu.Lock()
	defer db.mu.Unlock()
	timeout := db.timeout
	if longer, ok := db.times[sql]; ok {
		timeout = longer
	}
	began := time.Now()
	ctx, cancel := context.WithTimeout(ctx, timeout)
	return ctx, sync.OnceFunc(func() {
		cutOff := errors.Is(ctx.Err(), context.DeadlineExceeded)
		cancel()
		db.ended(sql, timeout, time.Since(began), cutOff)
	})
}

func (db *database) ended(sql string, timeout, took time.Duration, cutOff bool) {
	db.mu.Lock()
	defer db.mu.Unlock()
	switch {
	case cutOff && took >= timeout: // not by the caller's own deadline
		db.times[sql] = min(2*timeout, stretch*db.timeout)
	case took < db.timeout:
		delete(db.times, sql)
	}
}

// timedRows ends its statement's time with the last row.
type timedRows struct {
	pgx.Rows
	end func()
}

func (r *timedRows) Next() bool {
	more := r.Rows.Next()
	if !more {
		r.end()
	}
	return more
}

func (r *timedRows) Close() {
	r.Rows.Close()
	r.end()
}

type timedRow struct {
	pgx.Row
	end func()
}

func (r *timedRow) Scan(dest ...any) error {
	err := r.Row.Scan(dest...)
	r.end()
	return err
}
