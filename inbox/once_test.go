package inbox_test

import (
	"context"
	"errors"
	"fmt"
	"math"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/postroom/postroom"
	"github.com/postroom/postroom/inbox"
	"github.com/postroom/postroom/internal/pgtest"
	"github.com/postroom/postroom/migrations"
)

func beginTx(t testing.TB, pool *pgxpool.Pool, level pgx.TxIsoLevel) pgx.Tx {
	t.Helper()
	tx, err := pool.BeginTx(t.Context(), pgx.TxOptions{IsoLevel: level})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = tx.Rollback(context.WithoutCancel(t.Context())) })
	return tx
}

func wantOnce(t testing.TB, tx pgx.Tx, scope, key string, want bool) {
	t.Helper()
	if got, err := inbox.Once(t.Context(), tx, scope, key); err != nil || got != want {
		t.Errorf("Once(%q, %q) = %v, %v, want %v", scope, key, got, err, want)
	}
}

func wantNewer(t testing.TB, tx pgx.Tx, entity string, version int64, want bool) {
	t.Helper()
	if got, err := inbox.Newer(t.Context(), tx, "customers", entity, version); err != nil || got != want {
		t.Errorf("Newer(%q, %d) = %v, %v, want %v", entity, version, got, err, want)
	}
}

func commit(t testing.TB, tx pgx.Tx) {
	t.Helper()
	if err := tx.Commit(t.Context()); err != nil {
		t.Error(err)
	}
}

func rollback(t testing.TB, tx pgx.Tx) {
	t.Helper()
	if err := tx.Rollback(t.Context()); err != nil {
		t.Error(err)
	}
}

func TestOnce(t *testing.T) {
	pgtest.Each(t, func(t *testing.T, s *pgtest.Server) {
		pool := newPool(t, s)
		tx := beginTx(t, pool, "")
		wantOnce(t, tx, "invoice", "o1", true)
		wantOnce(t, tx, "invoice", "o1", false)
		wantOnce(t, tx, "invoice", "o2", true)
		wantOnce(t, tx, "reminder", "o1", true)
		rollback(t, tx)

		tx = beginTx(t, pool, "")
		wantOnce(t, tx, "invoice", "o1", true) // what was rolled back is not claimed
		sp, err := tx.Begin(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		wantOnce(t, sp, "invoice", "o1", false)
		wantOnce(t, sp, "invoice", "o3", true)
		rollback(t, sp)
		wantOnce(t, tx, "invoice", "o3", true)
		commit(t, tx)

		tx = beginTx(t, pool, "")
		wantOnce(t, tx, "invoice", "o1", false)
		wantOnce(t, tx, "invoice", "o3", false)
		commit(t, tx)
		wantStrings(t, "claims", query(t, pool, `SELECT concat_ws('|', subscriber_id, message_id, outcome)
			FROM postroom.processed_messages ORDER BY message_id`), " invoice|o1|once", " invoice|o3|once")
	})
}

// A scope and a subscriber of one name do not meet.
func TestOnceIsApartFromMessages(t *testing.T) {
	pool := newPool(t, pgtest.First(t))
	tx := beginTx(t, pool, "")
	wantOnce(t, tx, "billing", "m1", true)
	commit(t, tx)
	mustHandle(t, pool, "m1", effect, inbox.Handled)
	mustHandle(t, pool, "m2", effect, inbox.Handled)
	tx = beginTx(t, pool, "")
	wantOnce(t, tx, "billing", "m2", true)
}

// Two messages, one action, in the handler's transaction: it fails and succeeds
// with the message.
func TestOnceInHandlers(t *testing.T) {
	pool := newPool(t, pgtest.First(t))
	fail := errors.New("no")
	h := func(failure error) inbox.Handler {
		return func(ctx context.Context, tx pgx.Tx, m postroom.Message) error {
			first, err := inbox.Once(ctx, tx, "invoice", "o1")
			if err != nil || !first {
				return err
			}
			return errors.Join(effect(ctx, tx, m), failure)
		}
	}
	if _, err := handleOne(t, pool, "confirmed", h(fail), inbox.Config{}); !errors.Is(err, fail) {
		t.Errorf("Handle = %v, want the handler's error", err)
	}
	mustHandle(t, pool, "paid", h(nil), inbox.Handled)
	mustHandle(t, pool, "confirmed", h(nil), inbox.Handled)
	wantStrings(t, "effects", effects(t, pool), "paid")
}

// The second of two transactions waits for the first's end and goes by it.
func TestClaimsWait(t *testing.T) {
	claims := map[string]func(context.Context, pgx.Tx) (bool, error){
		"Once":  func(ctx context.Context, tx pgx.Tx) (bool, error) { return inbox.Once(ctx, tx, "invoice", "o1") },
		"Newer": func(ctx context.Context, tx pgx.Tx) (bool, error) { return inbox.Newer(ctx, tx, "customers", "c1", 7) },
	}
	type answer struct {
		ok  bool
		err error
	}
	pgtest.Each(t, func(t *testing.T, s *pgtest.Server) {
		for name, claim := range claims {
			for _, level := range levels {
				for _, commits := range []bool{true, false} {
					t.Run(fmt.Sprintf("%s/%s/commits %v", name, level, commits), func(t *testing.T) {
						pool := newPool(t, s)
						first, second := beginTx(t, pool, level), beginTx(t, pool, level)
						if _, err := second.Exec(t.Context(), `SELECT 1 FROM effects`); err != nil { // takes its snapshot
							t.Fatal(err)
						}
						if ok, err := claim(t.Context(), first); !ok || err != nil {
							t.Fatalf("first claim = %v, %v", ok, err)
						}
						waiting := make(chan answer, 1)
						go func() {
							ok, err := claim(t.Context(), second)
							waiting <- answer{ok, err}
						}()
						eventually(t, "the second claim waits", func() bool {
							return len(query(t, pool, `SELECT pid::text FROM pg_stat_activity
								WHERE datname = current_database() AND wait_event_type = 'Lock'`)) == 1
						})
						if commits {
							commit(t, first)
						} else {
							rollback(t, first)
						}
						got := receive(t, "the second claim ends", waiting)
						pgErr, failed := errors.AsType[*pgconn.PgError](got.err)
						switch {
						case commits && level != pgx.ReadCommitted:
							if !failed || pgErr.Code != "40001" {
								t.Errorf("second claim = %v, %v, want a serialization failure", got.ok, got.err)
							}
						case got.err != nil || got.ok == commits:
							t.Errorf("second claim = %v, %v, want %v", got.ok, got.err, !commits)
						}
					})
				}
			}
		}
	})
}

func TestNewer(t *testing.T) {
	pgtest.Each(t, func(t *testing.T, s *pgtest.Server) {
		pool := newPool(t, s)
		tx := beginTx(t, pool, "")
		wantNewer(t, tx, "c1", math.MinInt64, true)
		wantNewer(t, tx, "c1", 5, true)
		wantNewer(t, tx, "c1", 5, false)
		wantNewer(t, tx, "c1", 4, false)
		wantNewer(t, tx, "c2", 4, true)
		commit(t, tx)

		tx = beginTx(t, pool, "")
		sp, err := tx.Begin(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		wantNewer(t, sp, "c1", 9, true)
		rollback(t, sp)
		wantNewer(t, tx, "c1", 6, true)
		rollback(t, tx)

		tx = beginTx(t, pool, "")
		wantNewer(t, tx, "c1", 6, true)
		wantNewer(t, tx, "c1", math.MaxInt64, true)
		wantNewer(t, tx, "c1", math.MaxInt64, false)
	})
}

// Changes that come out of order, twice, and many at a time leave the newest.
func TestNewerAtOnce(t *testing.T) {
	pool := newPool(t, pgtest.First(t))
	exec(t, pool, `CREATE TABLE customers (id text PRIMARY KEY, version bigint)`)
	const changes, writers = 60, 6
	var all sync.WaitGroup
	var next atomic.Int64
	apply := func(ctx context.Context, tx pgx.Tx, m postroom.Message) error {
		var version int64
		if _, err := fmt.Sscanf(m.ID, "change-%d", &version); err != nil {
			return err
		}
		newer, err := inbox.Newer(ctx, tx, "customers", "c1", version)
		if err != nil || !newer {
			return err
		}
		_, err = tx.Exec(ctx, `INSERT INTO customers VALUES ('c1', $1) ON CONFLICT (id) DO UPDATE SET version = $1`, version)
		return err
	}
	for range writers {
		all.Go(func() {
			for n := next.Add(1); n <= changes; n = next.Add(1) {
				version := n * 37 % (changes + 1) // every number from 1 to changes, in disorder
				_, err := handleOne(t, pool, fmt.Sprintf("change-%d", version), apply, inbox.Config{LockTimeout: patience})
				if err != nil {
					t.Error(err)
				}
			}
		})
	}
	all.Wait()
	wantStrings(t, "version", query(t, pool, `SELECT version::text FROM customers`), "60")
}

func TestClaimsRefuseNames(t *testing.T) {
	pool := newPool(t, pgtest.First(t))
	tx := beginTx(t, pool, "")
	for _, bad := range []string{"", " billing", "a\x00b", "\xff", strings.Repeat("x", 256)} {
		for _, names := range [][2]string{{bad, "good"}, {"good", bad}} {
			if ok, err := inbox.Once(t.Context(), tx, names[0], names[1]); ok || err == nil {
				t.Errorf("Once(%.10q, %.10q) = %v, %v, want an error", names[0], names[1], ok, err)
			}
			if ok, err := inbox.Newer(t.Context(), tx, names[0], names[1], 1); ok || err == nil {
				t.Errorf("Newer(%.10q, %.10q) = %v, %v, want an error", names[0], names[1], ok, err)
			}
		}
	}
	if _, err := inbox.Schema(strings.Repeat("x", 64)).Once(t.Context(), tx, "a", "b"); err == nil {
		t.Error("Once in a schema whose name is too long succeeded")
	}
	wantOnce(t, tx, "good", "good", true) // the transaction is as good as new
}

func TestClaimsInAnotherSchema(t *testing.T) {
	pool := newPool(t, pgtest.First(t))
	if _, err := migrations.Up(t.Context(), pool, migrations.Config{Schema: `o'ther "one"`}); err != nil {
		t.Fatal(err)
	}
	other := inbox.Schema(`o'ther "one"`)
	tx := beginTx(t, pool, "")
	wantOnce(t, tx, "invoice", "o1", true)
	wantNewer(t, tx, "c1", 1, true)
	if first, err := other.Once(t.Context(), tx, "invoice", "o1"); !first || err != nil {
		t.Errorf("Once = %v, %v, want true", first, err)
	}
	if newer, err := other.Newer(t.Context(), tx, "customers", "c1", 1); !newer || err != nil {
		t.Errorf("Newer = %v, %v, want true", newer, err)
	}
}
