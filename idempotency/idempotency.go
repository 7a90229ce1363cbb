// Package idempotency runs what a key stands for once, however often a request
// or call with the key is repeated, and answers each repeat as the first.
//
// # Requests
//
// [Middleware] protects HTTP handlers by the header Idempotency-Key. A handler
// gets a transaction: its writes, the messages it sends through package outbox
// and its answer commit together or not at all, and no byte of the answer is sent
// before.
//
//	once, err := idempotency.Middleware(pool, tenant, idempotency.Config{})
//	...
//	mux.Handle("POST /payments", once(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
//		tx := idempotency.Tx(r.Context())
//		...
//	})))
//
// A repeat gets the stored answer with the header Idempotent-Replayed: true. One
// that comes while the first still runs is answered 409 at once, one with another
// payload 422. Answers of 200 to 399 are stored and the transaction commits;
// after most of 400 to 499 the handler's writes are rolled back and the answer is
// stored; after the others, a panic, or a loss of the connection nothing remains
// and a repeat runs the handler again.
//
// What authenticates, authorises or limits requests belongs outside of the
// middleware, and so do compression, an [http.TimeoutHandler] and headers of one
// exchange, such as request ids and CORS. Nothing outside may read the body. A
// browser's preflight needs Idempotency-Key among the allowed headers, and
// Idempotent-Replayed, Retry-After and Location among the exposed ones.
//
// Each running handler holds a connection of the pool. One connection is left for
// repeats, so the pool should have several. A handler that takes further
// connections of the same pool can wait for itself for ever: give it the
// transaction or a pool of its own. One that waits for other services should hold
// none meanwhile: see [Config].TwoPhase. Behind PgBouncer in transaction mode the
// pool needs [pgx.QueryExecModeExec] or another mode without named statements.
//
// # Calls
//
// [Do] runs a function once, [DoTx] does so in the caller's transaction: for jobs,
// commands, and protocols other than HTTP.
//
// # Calls to other services
//
// A [Transport] gives them keys and repeats them where their outcome is open;
// [Profile.Key] derives the key for a client of another kind. Where a repeat may come
// days later, set [Transport.Calls].
//
// Run a [Cleaner] beside all of them.
package idempotency

import (
	"context"
	"errors"
	"log/slog"
	"net/http"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
)

// Middleware returns what protects handlers whose effect shall happen once per
// tenant, operation and key. It reports every wrong field of cfg.
//
// tenant names whose key it is, 1 to 255 bytes, taken from what the request was
// authenticated by and never from what a caller may choose: with a name in common,
// callers would get one another's answers. A service without tenants gives a
// constant. A request for which it returns "" is answered 500.
//
// A protected handler's context holds the transaction ([Tx]) and the operation, by
// which messages and outgoing calls get the same identity in each repeat
// ([github.com/postroom/postroom.OperationFrom]). It does not end with the client's
// connection but after [Config].Timeout. The handler's answer is buffered: Flush
// and Hijack are not supported, and what it sends by 1xx statuses is dropped. The
// answer is what it was when the handler returned; goroutines that outlive it can
// change nothing. A panic passes through.
//
// A handler that ends its transaction by itself leaves an unknown outcome, see
// [Unknown].
func Middleware(pool *pgxpool.Pool, tenant func(*http.Request) string, cfg Config) (func(http.Handler) http.Handler, error) {
	cfg, err := cfg.withDefaults()
	if pool == nil {
		err = errors.Join(err, errors.New("idempotency: Middleware without a pool"))
	}
	if tenant == nil {
		err = errors.Join(err, errors.New("idempotency: Middleware without a function for the tenant"))
	}
	if err != nil {
		return nil, err
	}
	if n := pool.Config().MaxConns; n < 2 {
		cfg.Logger.LogAttrs(context.Background(), slog.LevelWarn,
			"the pool has one connection: while a handler has it no repeat is answered")
	}
	s := &store{pool: pool, cfg: cfg}
	return func(next http.Handler) http.Handler { return &handler{s, tenant, next} }, nil
}

var (
	// ErrInFlight is returned by [Do] and [DoTx], wrapped with the time after which to
	// try again ([github.com/postroom/postroom.RetryDelay]), while another call with
	// the key runs.
	ErrInFlight = errors.New("idempotency: a call with this key is running")

	// ErrKeyReused is returned by [Do] and [DoTx] where the key has come with
	// another input before.
	ErrKeyReused = errors.New("idempotency: the key belongs to another input")

	// ErrExpired is returned by [Do] and [DoTx] where the call with the key was made,
	// and its result is kept no longer.
	ErrExpired = errors.New("idempotency: the result under this key has expired")

	// ErrOutcomeUnknown is returned by [Do] and [DoTx] where nobody knows whether the
	// call with the key had its effect, see [Unknown].
	ErrOutcomeUnknown = errors.New("idempotency: the outcome under this key is unknown")
)

// Tx returns the transaction of the request or call whose context ctx is. A handler
// makes all of its writes in it. Begin makes a savepoint; Commit and Rollback are
// refused, and make the request fail. It returns nil where there is none: outside of
// protected handlers, for methods that are not protected, where
// [Config].FailOpen lets a request pass, and before [Begin].
func Tx(ctx context.Context) pgx.Tx {
	if s := scopeOf(ctx); s != nil {
		s.mu.Lock()
		defer s.mu.Unlock()
		return s.tx
	}
	return nil
}

// Refer names the resource that the request in ctx has made or changed, so that
// [Config].Rebuild can write its answer again. The last call counts. Both names are
// text, of UTF-8 without zero bytes. It does nothing in other contexts.
func Refer(ctx context.Context, resourceType, resourceID string) {
	if s := scopeOf(ctx); s != nil {
		s.mu.Lock()
		defer s.mu.Unlock()
		s.resourceType, s.resourceID = &resourceType, &resourceID
	}
}

// Unknown says that the request or call in ctx may have had an effect elsewhere
// which nobody can tell, such as a call to another service whose answer was lost.
// Its transaction is rolled back whatever the answer, and all requests with the key
// are answered 409, until an operator has found out and calls [Resolve], or
// [Config].Reconcile finds out. A call that can be repeated under a derived key does not
// need this. It does nothing in other contexts.
func Unknown(ctx context.Context) {
	if s := scopeOf(ctx); s != nil {
		s.mu.Lock()
		defer s.mu.Unlock()
		s.unknown = true
	}
}
