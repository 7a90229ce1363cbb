// Package pgtest gives tests a real PostgreSQL. Nothing need be installed or set:
// the first use in a test process starts a server, which ends with the process
// and leaves nothing. All tests of the process share it, each with databases of
// its own.
//
//	func TestX(t *testing.T) {
//		pool := pgtest.New(t) // a fresh database with Postroom's tables
//
// Tests that depend on what differs between versions of PostgreSQL use [Each].
//
// The variable POSTROOM_TEST_POSTGRES chooses the servers: a list of major
// versions as in "14,15,18", or the URL of a running server whose user may
// create databases. By default there is one server, of the newest version that
// is installed, or else of one that is fetched.
//
// A test fails, and never skips, where its server cannot be had.
package pgtest

import (
	"context"
	"crypto/rand"
	"fmt"
	"net/url"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/postroom/postroom/migrations"
)

const (
	maxConns    = 20
	startTime   = 3 * time.Minute // a first run builds the command and fetches PostgreSQL
	cleanupTime = time.Minute
)

// A Server is one PostgreSQL server, shared by the tests of this process.
type Server struct {
	Version int    // major: 15
	Source  string // "PostgreSQL 15.18 from /usr/lib/postgresql/15/bin"

	url string // of the database postgres
	own bool   // started by this process

	mu       sync.Mutex
	template string // a migrated database, once there is one
}

// Each runs test as a subtest for each server that is chosen.
func Each(t *testing.T, test func(t *testing.T, db *Server)) {
	t.Helper()
	for _, choice := range choices(t) {
		name := "postgres" + choice
		if isURL(choice) {
			name = "postgres-given"
		}
		t.Run(name, func(t *testing.T) { test(t, get(t, choice)) })
	}
}

// First returns the first server that is chosen, for tests that do not depend
// on the version.
func First(t testing.TB) *Server {
	t.Helper()
	return get(t, choices(t)[0])
}

// New is [Server.New] of the first server.
func New(t testing.TB) *pgxpool.Pool {
	t.Helper()
	return First(t).New(t)
}

// New returns a pool of at most 20 connections on a fresh database with
// Postroom's tables in the schema "postroom". The pool is closed and the
// database dropped when the test ends.
func (s *Server) New(t testing.TB) *pgxpool.Pool {
	t.Helper()
	template, err := s.migrated()
	if err != nil {
		t.Fatalf("pgtest: make a migrated database: %v", err)
	}
	pool := s.pool(t, template)
	if template == "" {
		if _, err := migrations.Up(t.Context(), pool, migrations.Config{}); err != nil {
			t.Fatalf("pgtest: %v", err)
		}
	}
	return pool
}

// Empty is New without Postroom's tables.
func (s *Server) Empty(t testing.TB) *pgxpool.Pool {
	t.Helper()
	return s.pool(t, "")
}

// URL returns the URL of the pool's database.
func (s *Server) URL(pool *pgxpool.Pool) string {
	return s.databaseURL(pool.Config().ConnConfig.Database)
}

func (s *Server) databaseURL(name string) string {
	u, err := url.Parse(s.url)
	if err != nil {
		panic(err) // it was parsed when the server was started
	}
	u.Path = "/" + name
	return u.String()
}

// pool creates a database, as a copy of template where that is not empty.
func (s *Server) pool(t testing.TB, template string) *pgxpool.Pool {
	t.Helper()
	ctx := t.Context()
	name := databaseName()
	if err := s.create(ctx, name, template); err != nil {
		t.Fatalf("pgtest: %v", err)
	}
	var pool *pgxpool.Pool
	t.Cleanup(func() {
		if pool != nil {
			closePool(t, pool)
		}
		ctx, cancel := context.WithTimeout(context.Background(), cleanupTime)
		defer cancel()
		if err := s.exec(ctx, "DROP DATABASE IF EXISTS "+quote(name)+" WITH (FORCE)"); err != nil {
			t.Errorf("pgtest: drop database: %v", err)
		}
	})
	cfg, err := pgxpool.ParseConfig(s.databaseURL(name))
	if err != nil {
		t.Fatalf("pgtest: %v", err)
	}
	cfg.MaxConns = maxConns
	pool, err = pgxpool.NewWithConfig(ctx, cfg)
	if err != nil {
		t.Fatalf("pgtest: %v", err)
	}
	return pool
}

// closePool reports connections that a test did not give back, for which Close
// would wait until the whole run times out.
func closePool(t testing.TB, pool *pgxpool.Pool) {
	closed := make(chan struct{})
	go func() {
		pool.Close()
		close(closed)
	}()
	select {
	case <-closed:
	case <-time.After(20 * time.Second):
		t.Errorf("pgtest: %d connections were not given back to the pool within 20s of the test's end: "+
			"close rows, end transactions, release connections", pool.Stat().AcquiredConns())
	}
}

// migrated returns the name of a database to copy, which is quicker than to
// migrate each. A server that was given would keep it for ever, so there is none.
func (s *Server) migrated() (string, error) {
	if !s.own {
		return "", nil
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.template != "" {
		return s.template, nil
	}
	ctx, cancel := context.WithTimeout(context.Background(), cleanupTime)
	defer cancel()
	name := "postroom_template"
	if err := s.create(ctx, name, ""); err != nil {
		return "", err
	}
	pool, err := pgxpool.New(ctx, s.databaseURL(name))
	if err != nil {
		return "", err
	}
	_, err = migrations.Up(ctx, pool, migrations.Config{})
	pool.Close() // a database that is in use cannot be copied
	if err != nil {
		return "", err
	}
	s.template = name
	return name, nil
}

func (s *Server) create(ctx context.Context, name, template string) error {
	sql := "CREATE DATABASE " + quote(name)
	if template != "" {
		sql += " TEMPLATE " + quote(template)
	}
	if err := s.exec(ctx, sql); err != nil {
		return fmt.Errorf("create database: %w", err)
	}
	return nil
}

func (s *Server) exec(ctx context.Context, sql string) error {
	conn, err := pgx.Connect(ctx, s.url)
	if err != nil {
		return err
	}
	defer conn.Close(context.WithoutCancel(ctx))
	_, err = conn.Exec(ctx, sql)
	return err
}

func databaseName() string {
	return "postroom_test_" + strings.ToLower(rand.Text())
}

func quote(name string) string {
	return pgx.Identifier{name}.Sanitize()
}
