package outbox_test

import (
	"context"
	"errors"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/postroom/postroom/dispatcher"
	"github.com/postroom/postroom/internal/throwaway"
)

// standby makes a standby of s that is closed when the test ends.
func (s *server) standby(t testing.TB) *throwaway.Standby {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), startTime)
	defer cancel()
	b, err := s.Standby(ctx)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := b.Close(); err != nil {
			t.Error(err)
		}
	})
	return b
}

func do(t testing.TB, f func(context.Context) error) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	if err := f(ctx); err != nil {
		t.Fatal(err)
	}
}

// at returns u on another server.
func at(t testing.TB, u string, p *throwaway.Postgres) string {
	t.Helper()
	return strings.Replace(u, hostOf(t, u), hostOf(t, p.URL), 1)
}

// TestStandbyIsRefused: the snapshots of a server in recovery omit running
// transactions, so no cursor may come from one.
func TestStandbyIsRefused(t *testing.T) {
	each(t, func(t *testing.T, s *server) {
		u := s.database(t)
		b := s.standby(t)
		d, err := dispatcher.New(connect(t, at(t, u, b.Postgres)), &recorder{}, dispatcher.Config{})
		if err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
		defer cancel()
		err = d.Run(ctx)
		if _, ok := errors.AsType[*dispatcher.SetupError](err); !ok || !strings.Contains(err.Error(), "recovery") {
			t.Errorf("Run on a standby returned %v, want a SetupError that speaks of recovery", err)
		}

		// What the rule is for: a transaction that runs on the primary.
		tx, err := connect(t, u).Begin(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		defer tx.Rollback(context.Background())
		xid := scan[string](t, tx, `SELECT pg_current_xact_id()::text`)
		exec(t, connect(t, u), `SELECT pg_current_xact_id()`)
		do(t, b.CatchUp)
		if scan[bool](t, connect(t, at(t, u, b.Postgres)), `SELECT pg_visible_in_snapshot($1::text::xid8, pg_current_snapshot())`, xid) {
			t.Log("a standby's snapshot calls a running transaction ended")
		}
	})
}

// TestPromotedStandby: a standby that lagged takes over, under the same address
// and with the same names of everything, and gives transaction ids out again.
func TestPromotedStandby(t *testing.T) {
	each(t, func(t *testing.T, s *server) {
		for _, way := range []string{"direct", "pgbouncer"} {
			t.Run(way, func(t *testing.T) {
				u := s.database(t)
				old := connect(t, u)
				exec(t, old, `CREATE UNLOGGED TABLE junk (n int)`)
				b := s.standby(t)
				address := startRelay(t, u)
				through := address.through(t, u)
				h := &hook{}
				options := []func(*pgxpool.Config){h.watch}
				if way == "pgbouncer" {
					through = startPgBouncer(t, pgBouncer(through, 0)).URL
					options = append(options, transactional(pgx.QueryExecModeExec))
				}
				r := &recorder{}
				start(t, connect(t, through, options...), r, quick())
				write(t, old, numbered(10, 0, 20)...)
				waitNumbers(t, r, 0, 20)
				waitCursors(t, old)
				do(t, b.CatchUp)
				do(t, b.PauseReplay)

				// What the standby never receives, with cursors and ids.
				for n := 20; n < 60; n += 4 {
					write(t, old, numbered(10, n, 4)...)
					waitNumbers(t, r, 0, n+4)
				}
				before := burn(t, old, 400)
				polls := h.ended(pollPart)
				eventually(t, time.Minute, func() string {
					if h.ended(pollPart) < polls+3 {
						return "the dispatcher does not poll"
					}
					return ""
				})
				address.lead("")
				do(t, b.Promote)
				promoted := at(t, u, b.Postgres)
				address.lead(hostOf(t, promoted))

				writer := connect(t, promoted)
				next := 1000
				for range 60 {
					write(t, writer, numbered(10, next, 1)...)
					next++
				}
				if last := scan[int64](t, writer, `SELECT max(xid::text::int8) FROM "postroom".outbox_messages`); last > before {
					t.Errorf("transaction id %d is new: want ids given out a second time, up to %d", last, before)
				}
				want := rows(t, writer)
				eventually(t, time.Minute, func() string {
					if ids := missing(want, arrived(r.messages())); ids != "" {
						return "committed and not published: " + ids
					}
					return ""
				})
			})
		}
	})
}

// TestPagesReadWhileOnStandby: for a moment, the dispatcher's address leads to a
// standby that lags. What it reads there must not count.
func TestPagesReadWhileOnStandby(t *testing.T) {
	each(t, func(t *testing.T, s *server) {
		u := s.database(t)
		b := s.standby(t)
		writer := connect(t, u)

		// target and epoch say where connections go; older ones are not used.
		var mu sync.Mutex
		target, epoch := hostOf(t, u), 0
		lead := func(host string) { mu.Lock(); target, epoch = host, epoch+1; mu.Unlock() }
		var armed, led atomic.Bool
		h := &hook{after: func(sql string) {
			switch {
			case strings.Contains(sql, beginPart) && armed.CompareAndSwap(true, false):
				led.Store(true)
				lead(hostOf(t, b.URL))
			case led.Load() && strings.Contains(sql, boundsPart):
				led.Store(false)
				lead(hostOf(t, u))
			}
		}}
		epochs := map[*pgx.Conn]int{}
		reader := connect(t, u, h.watch, func(cfg *pgxpool.Config) {
			cfg.BeforeConnect = func(_ context.Context, c *pgx.ConnConfig) error {
				mu.Lock()
				defer mu.Unlock()
				_, port, _ := strings.Cut(target, ":")
				c.Port = parsePort(port)
				return nil
			}
			cfg.AfterConnect = func(_ context.Context, c *pgx.Conn) error {
				mu.Lock()
				defer mu.Unlock()
				epochs[c] = epoch
				return nil
			}
			cfg.PrepareConn = func(_ context.Context, c *pgx.Conn) (bool, error) {
				mu.Lock()
				defer mu.Unlock()
				return epochs[c] == epoch, nil
			}
		})
		cfg := quick()
		cfg.PageSize, cfg.Lease = 5, time.Minute
		r := &recorder{}
		start(t, reader, r, cfg)
		write(t, writer, numbered(1, 0, 10)...) // one key, one lane
		waitNumbers(t, r, 0, 10)
		waitCursors(t, writer)
		do(t, b.CatchUp)
		do(t, b.PauseReplay)
		armed.Store(true)
		write(t, writer, numbered(1, 10, 50)...)
		waitNumbers(t, r, 0, 60)
		if armed.Load() || led.Load() {
			t.Error("the dispatcher was not led to the standby while it read a difference")
		}
	})
}
