package idempotency_test

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"os"
	"runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/postroom/postroom/idempotency"
	"github.com/postroom/postroom/internal/pgtest"
)

const patience = 60 * time.Second // for what must happen

// TestMain sees that no goroutine of the package is left.
func TestMain(m *testing.M) {
	code := m.Run()
	deadline := time.Now().Add(10 * time.Second)
	for code == 0 && leaked() {
		if time.Now().After(deadline) {
			fmt.Printf("goroutines are left:\n%s\n", stacks())
			code = 1
		}
		<-time.After(10 * time.Millisecond)
	}
	os.Exit(code)
}

func leaked() bool {
	for g := range strings.SplitSeq(string(stacks()), "\n\n") {
		if strings.Contains(g, "/idempotency.") || strings.Contains(g, "pgxpool.(*Pool).backgroundHealthCheck") {
			return true
		}
	}
	return false
}

func stacks() []byte {
	b := make([]byte, 1<<20)
	return b[:runtime.Stack(b, true)]
}

// newPool returns a database with a table for effects.
func newPool(t testing.TB) *pgxpool.Pool {
	t.Helper()
	pool := pgtest.New(t)
	mustExec(t, pool, `CREATE TABLE payments (n serial PRIMARY KEY, note text)`)
	mustExec(t, pool, `CREATE TABLE later (n int UNIQUE DEFERRABLE INITIALLY DEFERRED)`)
	mustExec(t, pool, `INSERT INTO later VALUES (1)`)
	return pool
}

// withPool opens another pool on pool's database.
func withPool(t testing.TB, pool *pgxpool.Pool, change func(*pgxpool.Config)) *pgxpool.Pool {
	t.Helper()
	cfg := pool.Config()
	change(cfg)
	other, err := pgxpool.NewWithConfig(t.Context(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(other.Close)
	return other
}

func sized(t testing.TB, pool *pgxpool.Pool, n int32) *pgxpool.Pool {
	t.Helper()
	return withPool(t, pool, func(c *pgxpool.Config) { c.MaxConns = n })
}

func mustExec(t testing.TB, pool *pgxpool.Pool, sql string, args ...any) {
	t.Helper()
	if _, err := pool.Exec(t.Context(), sql, args...); err != nil {
		t.Fatalf("%s: %v", sql, err)
	}
}

// query returns the rows of a query of one text column.
func query(t testing.TB, pool *pgxpool.Pool, sql string, args ...any) []string {
	t.Helper()
	rows, err := pool.Query(t.Context(), sql, args...)
	if err != nil {
		t.Fatalf("%s: %v", sql, err)
	}
	all, err := pgx.CollectRows(rows, pgx.RowTo[string])
	if err != nil {
		t.Fatalf("%s: %v", sql, err)
	}
	return all
}

func payments(t testing.TB, pool *pgxpool.Pool) []string {
	t.Helper()
	return query(t, pool, `SELECT note FROM payments ORDER BY n`)
}

func states(t testing.TB, pool *pgxpool.Pool) []string {
	t.Helper()
	return query(t, pool, `SELECT key || ' ' || state FROM postroom.idempotency_keys ORDER BY key COLLATE "C"`)
}

func wantStrings(t testing.TB, what string, got []string, want ...string) {
	t.Helper()
	if !slices.Equal(got, want) {
		t.Errorf("%s = %q, want %q", what, got, want)
	}
}

// eventually waits for ok. It looks again in short intervals, since what it
// waits for happens in the database.
func eventually(t testing.TB, what string, ok func() bool) {
	t.Helper()
	deadline := time.After(patience)
	for !ok() {
		select {
		case <-deadline:
			t.Fatalf("not within %v: %s", patience, what)
		case <-time.After(2 * time.Millisecond):
		}
	}
}

func receive[T any](t testing.TB, what string, c <-chan T) T {
	t.Helper()
	select {
	case v := <-c:
		return v
	case <-time.After(patience):
		t.Fatalf("not within %v: %s\n%s", patience, what, stacks())
		panic("unreachable")
	}
}

// logs keeps what is logged.
type logs struct {
	mu  sync.Mutex
	buf bytes.Buffer
}

func (l *logs) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.buf.Write(p)
}

func (l *logs) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.buf.String()
}

func (l *logs) logger() *slog.Logger {
	return slog.New(slog.NewTextHandler(l, &slog.HandlerOptions{Level: slog.LevelDebug}))
}

// api is a server with one protected handler on several routes.
type api struct {
	t    testing.TB
	url  string
	runs atomic.Int32
	log  *logs
	http *http.Client
}

// tenantOf takes the tenant from what authenticates the request.
func tenantOf(r *http.Request) string {
	name, _, _ := r.BasicAuth()
	return name
}

func serve(t testing.TB, pool *pgxpool.Pool, cfg idempotency.Config, h http.HandlerFunc) *api {
	t.Helper()
	a := &api{t: t, log: &logs{}, http: &http.Client{
		Transport:     &http.Transport{MaxIdleConnsPerHost: 10},
		CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
	}}
	if cfg.Logger == nil {
		cfg.Logger = a.log.logger()
	}
	once, err := idempotency.Middleware(pool, tenantOf, cfg)
	if err != nil {
		t.Fatal(err)
	}
	counted := once(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		a.runs.Add(1)
		h(w, r)
	}))
	mux := http.NewServeMux()
	for _, pattern := range []string{"POST /payments", "PATCH /payments/{id}", "POST /refunds", "/any"} {
		mux.Handle(pattern, counted)
	}
	outer := http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("X-Request-Id", "outer")
		mux.ServeHTTP(w, r)
	})
	srv := httptest.NewUnstartedServer(outer)
	srv.Config.ErrorLog = slog.NewLogLogger(a.log.logger().Handler(), slog.LevelDebug)
	srv.Start()
	a.url = srv.URL
	t.Cleanup(func() {
		srv.Close()
		a.http.CloseIdleConnections()
		if t.Failed() {
			s := a.log.String()
			t.Logf("log:\n%s", s[:min(len(s), 4_000)])
		}
	})
	return a
}

// pay is the usual handler: it notes the body, and answers with its row's number.
func pay(w http.ResponseWriter, r *http.Request) {
	body, err := io.ReadAll(r.Body)
	if err != nil {
		http.Error(w, err.Error(), http.StatusBadRequest)
		return
	}
	var n int
	err = idempotency.Tx(r.Context()).QueryRow(r.Context(), insertPayment, string(body)).Scan(&n)
	if err != nil {
		http.Error(w, err.Error(), http.StatusInternalServerError)
		return
	}
	w.Header().Set("Location", fmt.Sprintf("/payments/%d", n))
	w.WriteHeader(http.StatusCreated)
	fmt.Fprintf(w, "payment %d", n)
}

const insertPayment = `INSERT INTO payments (note) VALUES ($1) RETURNING n`

// note inserts a payment without an answer.
func note(ctx context.Context, text string) {
	if _, err := idempotency.Tx(ctx).Exec(ctx, insertPayment, text); err != nil {
		panic(err)
	}
}

// reply is an answer that was read whole.
type reply struct {
	status int
	header http.Header
	body   string
}

func (r reply) replayed() bool { return r.header.Get("Idempotent-Replayed") != "" }

// want fails the test unless the status and the last part of the problem's type,
// if one is wanted, are those.
func (r reply) want(t testing.TB, status int, problem string) {
	t.Helper()
	if r.status != status || problem != "" && !strings.Contains(r.body, "#"+problem+`"`) {
		t.Errorf("answer %d %.300s, want %d %s", r.status, r.body, status, problem)
	}
}

// ask is a request.
type ask struct {
	method string // default POST
	path   string // default /payments
	tenant string // default acme
	key    string // not sent where empty
	body   string
	header http.Header
}

func (a *api) request(ctx context.Context, q ask) (*http.Request, error) {
	if q.method == "" {
		q.method = http.MethodPost
	}
	if q.path == "" {
		q.path = "/payments"
	}
	if q.tenant == "" {
		q.tenant = "acme"
	}
	r, err := http.NewRequestWithContext(ctx, q.method, a.url+q.path, strings.NewReader(q.body))
	if err != nil {
		return nil, err
	}
	r.GetBody = nil // the transport shall not repeat
	for name, values := range q.header {
		r.Header[name] = values
	}
	if q.key != "" {
		r.Header.Set("Idempotency-Key", q.key)
	}
	if q.tenant != "-" {
		r.SetBasicAuth(q.tenant, "")
	}
	return r, nil
}

func (a *api) try(ctx context.Context, q ask) (reply, error) {
	r, err := a.request(ctx, q)
	if err != nil {
		return reply{}, err
	}
	res, err := a.http.Do(r)
	if err != nil {
		return reply{}, err
	}
	defer res.Body.Close()
	body, err := io.ReadAll(res.Body)
	return reply{res.StatusCode, res.Header, string(body)}, err
}

func (a *api) do(q ask) reply {
	a.t.Helper()
	got, err := a.try(a.t.Context(), q)
	if err != nil {
		a.t.Fatalf("%+v: %v", q, err)
	}
	return got
}

func (a *api) post(key, body string) reply {
	a.t.Helper()
	return a.do(ask{key: key, body: body})
}

func (a *api) wantRuns(n int32) {
	a.t.Helper()
	if got := a.runs.Load(); got != n {
		a.t.Errorf("the handler ran %d times, want %d", got, n)
	}
}

// start sends a request in the background.
func (a *api) start(q ask) <-chan reply {
	done := make(chan reply, 1)
	go func() {
		got, err := a.try(a.t.Context(), q)
		if err != nil {
			a.t.Error(err)
		}
		done <- got
	}()
	return done
}
