package main

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/postroom/postroom/internal/throwaway"
	"github.com/postroom/postroom/migrations"
)

// A stage is the servers and what the quick start made in them.
type stage struct {
	databaseURL string
	pool        *pgxpool.Pool
	route       route // to the broker
	sight       sight // of it

	closers []func() error // in the order of their making
}

// setStage starts or connects to the servers and prints which they are. Close
// the stage, also after an error.
func setStage(ctx context.Context, o options, s *screen) (*stage, error) {
	st := &stage{}
	postgres, err := throwaway.StartPostgres(ctx, throwaway.PostgresConfig{URL: o.databaseURL})
	if err != nil {
		return st, err
	}
	st.closers = append(st.closers, postgres.Close)
	st.databaseURL = postgres.URL
	s.line("%s", postgres.Source)

	if st.pool, err = openPool(ctx, st.databaseURL, producerCount+2); err != nil {
		return st, err
	}
	st.closers = append(st.closers, func() error { st.pool.Close(); return nil })
	if err := st.makeTables(ctx); err != nil {
		return st, err
	}

	is, err := st.setBroker(ctx, o)
	if err != nil {
		return st, err
	}
	s.line("%s", is)
	return st, nil
}

// openPool connects with at most so many connections.
func openPool(ctx context.Context, url string, connections int32) (*pgxpool.Pool, error) {
	cfg, err := pgxpool.ParseConfig(url)
	if err != nil {
		return nil, err
	}
	cfg.MaxConns = connections
	return pgxpool.NewWithConfig(ctx, cfg)
}

// makeTables puts Postroom's tables and those of the business into the
// database, in schemas that are marked so that Close, or the next quick start
// if this one is killed, may remove them.
func (st *stage) makeTables(ctx context.Context) error {
	alone, err := st.pool.Acquire(ctx)
	if err != nil {
		return err
	}
	st.closers = append(st.closers, func() error { alone.Release(); return nil })
	var first bool
	if err := alone.QueryRow(ctx, lockDatabase).Scan(&first); err != nil {
		return err
	}
	if !first {
		return errors.New("another quick start runs in this database")
	}
	var foreign int
	if err := st.pool.QueryRow(ctx, foreignSchemas, madeHere).Scan(&foreign); err != nil {
		return err
	}
	if foreign > 0 {
		return errors.New("the database has a schema postroom or quickstart that the quick start did not make: give it an empty database")
	}
	if _, err := st.pool.Exec(ctx, dropSchemas+makeSchemas); err != nil {
		return err
	}
	st.closers = append(st.closers, func() error {
		ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
		defer cancel()
		_, err := st.pool.Exec(ctx, dropSchemas)
		return err
	})
	if _, err := migrations.Up(ctx, st.pool, migrations.Config{}); err != nil {
		return err
	}
	_, err = st.pool.Exec(ctx, businessTables)
	return err
}

const (
	madeHere       = "made by the Postroom quick start, which removes it"
	lockDatabase   = `SELECT pg_try_advisory_lock(hashtextextended('postroom quick start', 0))`
	foreignSchemas = `
SELECT count(*) FROM pg_namespace
 WHERE nspname IN ('postroom', 'quickstart') AND obj_description(oid, 'pg_namespace') IS DISTINCT FROM $1`
	dropSchemas = `DROP SCHEMA IF EXISTS postroom, quickstart CASCADE;`
	makeSchemas = `
CREATE SCHEMA postroom;
CREATE SCHEMA quickstart;
COMMENT ON SCHEMA postroom IS '` + madeHere + `';
COMMENT ON SCHEMA quickstart IS '` + madeHere + `';`
)

// Close removes what setStage made, the last first.
func (st *stage) Close() error {
	var errs []error
	for i := len(st.closers) - 1; i >= 0; i-- {
		errs = append(errs, st.closers[i]())
	}
	if err := errors.Join(errs...); err != nil {
		return fmt.Errorf("clean up: %w", err)
	}
	return nil
}
