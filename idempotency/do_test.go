package idempotency_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/postroom/postroom"
	"github.com/postroom/postroom/idempotency"
)

func transfer(input string) idempotency.Call {
	return idempotency.Call{Tenant: "acme", Operation: "transfer", Key: "k1", Input: []byte(input)}
}

func returning(result string) func(context.Context, pgx.Tx) ([]byte, error) {
	return func(ctx context.Context, tx pgx.Tx) ([]byte, error) {
		_, err := tx.Exec(ctx, insertPayment, result)
		return []byte(result), err
	}
}

// doer is Do, or DoTx in a transaction of its own.
type doer func(t *testing.T, pool *pgxpool.Pool, c idempotency.Call, fn func(context.Context, pgx.Tx) ([]byte, error), cfg idempotency.Config) ([]byte, bool, error)

var doers = map[string]doer{
	"Do": func(t *testing.T, pool *pgxpool.Pool, c idempotency.Call, fn func(context.Context, pgx.Tx) ([]byte, error), cfg idempotency.Config) ([]byte, bool, error) {
		return idempotency.Do(t.Context(), pool, c, fn, cfg)
	},
	"DoTx": func(t *testing.T, pool *pgxpool.Pool, c idempotency.Call, fn func(context.Context, pgx.Tx) ([]byte, error), cfg idempotency.Config) (result []byte, replayed bool, err error) {
		txErr := pgx.BeginFunc(t.Context(), pool, func(tx pgx.Tx) error {
			result, replayed, err = idempotency.DoTx(t.Context(), tx, c, fn, cfg)
			return nil // what fails in it leaves the transaction usable
		})
		if txErr != nil {
			t.Errorf("the caller's transaction: %v", txErr)
		}
		return result, replayed, err
	},
}

func TestDo(t *testing.T) {
	for name, do := range doers {
		t.Run(name, func(t *testing.T) {
			pool := newPool(t)
			failure := errors.New("no")
			check := func(what string, c idempotency.Call, fn func(context.Context, pgx.Tx) ([]byte, error), cfg idempotency.Config, want string, replayed bool, is error) {
				t.Helper()
				got, again, err := do(t, pool, c, fn, cfg)
				if string(got) != want || again != replayed || (err == nil) != (is == nil) || !errors.Is(is, errAny) && !errors.Is(err, is) {
					t.Errorf("%s: %q, %v, %v, want %q, %v, %v", what, got, again, err, want, replayed, is)
				}
			}
			check("failure", transfer("in"), func(ctx context.Context, tx pgx.Tx) ([]byte, error) {
				_, _ = returning("failed")(ctx, tx)
				return nil, failure
			}, idempotency.Config{}, "", false, failure)
			check("too large", transfer("in"), returning("large"), idempotency.Config{MaxResponse: 4}, "", false, errAny)
			check("Commit", transfer("in"), func(ctx context.Context, tx pgx.Tx) ([]byte, error) {
				_ = tx.Commit(ctx)
				return []byte("x"), nil
			}, idempotency.Config{}, "", false, errAny)
			check("ignored error", transfer("in"), func(ctx context.Context, tx pgx.Tx) ([]byte, error) {
				_, _ = tx.Exec(ctx, `SELECT 1/0`)
				return []byte("x"), nil
			}, idempotency.Config{}, "", false, errAny)
			wantStrings(t, "payments", payments(t, pool))
			check("success", transfer("in"), returning("paid"), idempotency.Config{}, "paid", false, nil)
			check("repeat", transfer("in"), returning("again"), idempotency.Config{}, "paid", true, nil)
			check("other input", transfer("other"), returning("again"), idempotency.Config{}, "", false, idempotency.ErrKeyReused)
			other := transfer("in")
			other.Tenant = "other"
			check("other tenant", other, returning("other"), idempotency.Config{}, "other", false, nil)
			other.Operation = "other"
			check("nil", other, func(context.Context, pgx.Tx) ([]byte, error) { return nil, nil }, idempotency.Config{}, "", false, nil)
			check("nil again", other, returning("again"), idempotency.Config{}, "", true, nil)
			wantStrings(t, "payments", payments(t, pool), "paid", "other")
			mustExec(t, pool, `UPDATE postroom.idempotency_keys SET expires_at = clock_timestamp()`)
			check("expired", transfer("in"), returning("again"), idempotency.Config{}, "", false, idempotency.ErrExpired)
			check("expired, again", transfer("in"), returning("anew"), idempotency.Config{ReuseExpired: true}, "anew", false, nil)
			check("repeat", transfer("in"), returning("again"), idempotency.Config{ReuseExpired: true}, "anew", true, nil)
			mustExec(t, pool, `UPDATE postroom.idempotency_keys SET state = 'unknown', completed_at = NULL`)
			for _, cfg := range []idempotency.Config{{}, {
				TwoPhase: true, Reconcile: func(context.Context, postroom.Operation) (int, error) { return 0, nil },
			}} {
				check("unknown", transfer("in"), returning("again"), cfg, "", false, idempotency.ErrOutcomeUnknown)
			}
			mustExec(t, pool, `UPDATE postroom.idempotency_keys SET state = 'in_flight', locked_until = clock_timestamp() + '1 minute'`)
			_, _, err := do(t, pool, transfer("in"), returning("again"), idempotency.Config{})
			if d, ok := postroom.RetryDelay(err); !errors.Is(err, idempotency.ErrInFlight) || !ok || d != 5*time.Second {
				t.Errorf("in flight: %v, after %v", err, d)
			}
			mustExec(t, pool, `UPDATE postroom.idempotency_keys SET locked_until = clock_timestamp()`)
			check("dead", transfer("in"), returning("taken over"), idempotency.Config{}, "taken over", false, nil)
			for _, c := range []idempotency.Call{
				{},
				{Tenant: strings.Repeat("t", 256), Operation: "o\x00", Key: "schlüssel"},
				{Tenant: "t", Operation: strings.Repeat("o", 513), Key: "k\n"},
			} {
				if _, _, err := do(t, pool, c, returning("x"), idempotency.Config{}); err == nil || strings.Contains(err.Error(), "schl") {
					t.Errorf("%.60q: %v", c, err)
				}
			}
		})
	}
}

// errAny stands for each error.
var errAny error = every{}

type every struct{}

func (every) Error() string { return "any" }

func TestDoStorm(t *testing.T) {
	for name, do := range doers {
		t.Run(name, func(t *testing.T) {
			base := newPool(t)
			pool := sized(t, base, 4)
			var runs, replays atomic.Int32
			var all sync.WaitGroup
			for range 50 {
				all.Go(func() {
					for {
						result, replayed, err := do(t, pool, transfer("in"), func(ctx context.Context, tx pgx.Tx) ([]byte, error) {
							runs.Add(1)
							return returning("paid")(ctx, tx)
						}, idempotency.Config{})
						if errors.Is(err, idempotency.ErrInFlight) {
							continue
						}
						if err != nil || string(result) != "paid" {
							t.Errorf("%q, %v", result, err)
						}
						if replayed {
							replays.Add(1)
						}
						return
					}
				})
			}
			all.Wait()
			if runs.Load() != 1 || replays.Load() != 49 {
				t.Errorf("%d runs, %d replays", runs.Load(), replays.Load())
			}
			wantStrings(t, "payments", payments(t, base), "paid")
		})
	}
}

// DoTx belongs to its transaction: what is rolled back was not done, and others
// wait for it no longer than a second.
func TestDoTxEndsWithItsTransaction(t *testing.T) {
	pool := newPool(t)
	ctx := t.Context()
	tx, err := pool.Begin(ctx)
	if err != nil {
		t.Fatal(err)
	}
	if _, _, err := idempotency.DoTx(ctx, tx, transfer("in"), returning("rolled back"), idempotency.Config{}); err != nil {
		t.Fatal(err)
	}
	// In the transaction itself it is known.
	if result, replayed, err := idempotency.DoTx(ctx, tx, transfer("in"), returning("again"), idempotency.Config{}); err != nil || !replayed || string(result) != "rolled back" {
		t.Errorf("%q, %v, %v", result, replayed, err)
	}
	if _, _, err := idempotency.Do(ctx, pool, transfer("in"), returning("beside"), idempotency.Config{}); !errors.Is(err, idempotency.ErrInFlight) {
		t.Errorf("beside it: %v", err)
	}
	if err := tx.Rollback(ctx); err != nil {
		t.Fatal(err)
	}
	result, replayed, err := idempotency.Do(ctx, pool, transfer("in"), returning("paid"), idempotency.Config{})
	if err != nil || replayed || string(result) != "paid" {
		t.Errorf("afterwards: %q, %v, %v", result, replayed, err)
	}
	wantStrings(t, "payments", payments(t, pool), "paid")
}

func TestDoIsCancelled(t *testing.T) {
	pool := newPool(t)
	ctx, cancel := context.WithCancel(t.Context())
	_, _, err := idempotency.Do(ctx, pool, transfer("in"), func(ctx context.Context, tx pgx.Tx) ([]byte, error) {
		defer cancel()
		return returning("cancelled")(ctx, tx)
	}, idempotency.Config{})
	if !errors.Is(err, context.Canceled) {
		t.Errorf("Do = %v", err)
	}
	wantStrings(t, "keys", states(t, pool), "k1 released")
	wantStrings(t, "payments", payments(t, pool))
}

func TestDoPanics(t *testing.T) {
	for name, do := range doers {
		t.Run(name, func(t *testing.T) {
			pool := newPool(t)
			func() {
				defer func() {
					if v := recover(); v != "at the disco" {
						t.Errorf("recovered %v", v)
					}
				}()
				_, _, _ = do(t, pool, transfer("in"), func(ctx context.Context, tx pgx.Tx) ([]byte, error) {
					_, _ = returning("lost")(ctx, tx)
					panic("at the disco")
				}, idempotency.Config{})
			}()
			if _, replayed, err := do(t, pool, transfer("in"), returning("paid"), idempotency.Config{}); err != nil || replayed {
				t.Errorf("afterwards: %v, %v", replayed, err)
			}
			wantStrings(t, "payments", payments(t, pool), "paid")
		})
	}
}

// A COMMIT whose answer was lost is settled.
func TestDoOverLostCommits(t *testing.T) {
	base := newPool(t)
	for _, how := range []cut{before, after, amid} {
		t.Run(fmt.Sprint(how), func(t *testing.T) {
			mustExec(t, base, `TRUNCATE payments, postroom.idempotency_keys, postroom.idempotency_answers`)
			p, pool := newProxy(t, base, 4)
			p.cutAt(atComplete, how, 1)
			var result []byte
			eventually(t, "a result", func() bool {
				var err error
				result, _, err = idempotency.Do(t.Context(), pool, transfer("in"), returning("paid"), idempotency.Config{Logger: (&logs{}).logger()})
				return err == nil
			})
			if string(result) != "paid" {
				t.Errorf("result %q", result)
			}
			wantStrings(t, "payments", payments(t, base), "paid")
		})
	}
}

// The operation of a call is in its context, with its transaction.
func TestDoContext(t *testing.T) {
	for name, do := range doers {
		t.Run(name, func(t *testing.T) {
			_, _, err := do(t, newPool(t), transfer("in"), func(ctx context.Context, tx pgx.Tx) ([]byte, error) {
				o, ok := postroom.OperationFrom(ctx)
				if want := (postroom.Operation{Kind: "call", Scope: "4:acme transfer", Key: "k1"}); !ok || o != want {
					t.Errorf("operation %+v, want %+v", o, want)
				}
				if idempotency.Tx(ctx) != tx {
					t.Error("the context holds another transaction")
				}
				return nil, nil
			}, idempotency.Config{})
			if err != nil {
				t.Error(err)
			}
		})
	}
}
