package inbox_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"runtime"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/postroom/postroom"
	"github.com/postroom/postroom/broker"
	"github.com/postroom/postroom/broker/memory"
	"github.com/postroom/postroom/inbox"
	"github.com/postroom/postroom/internal/pgtest"
)

const patience = time.Minute // for what must happen

// newPool returns a database with a table for effects.
func newPool(t testing.TB, s *pgtest.Server) *pgxpool.Pool {
	t.Helper()
	pool := s.New(t)
	exec(t, pool, `CREATE TABLE effects (n serial, message_id text, note text, PRIMARY KEY (n))`)
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

func exec(t testing.TB, pool *pgxpool.Pool, sql string, args ...any) {
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

func effects(t testing.TB, pool *pgxpool.Pool) []string {
	t.Helper()
	return query(t, pool, `SELECT message_id FROM effects ORDER BY n`)
}

func outcomes(t testing.TB, pool *pgxpool.Pool) []string {
	t.Helper()
	return query(t, pool, `SELECT concat_ws(' ', subscriber_id, message_id, outcome)
		FROM postroom.processed_messages ORDER BY 1`)
}

func wantStrings(t testing.TB, what string, got []string, want ...string) {
	t.Helper()
	if strings.Join(got, "\n") != strings.Join(want, "\n") {
		t.Errorf("%s = %q, want %q", what, got, want)
	}
}

const insertEffect = `INSERT INTO effects (message_id) VALUES ($1)`

// effect is the usual handler.
func effect(ctx context.Context, tx pgx.Tx, m postroom.Message) error {
	_, err := tx.Exec(ctx, insertEffect, m.ID)
	return err
}

func message(id string) postroom.Message {
	return postroom.Message{ID: id, Topic: "orders", Payload: []byte("{}")}
}

func keyed(id, key string) postroom.Message {
	m := message(id)
	m.Key = key
	return m
}

func publish(t testing.TB, bus broker.Publisher, msgs ...postroom.Message) {
	t.Helper()
	for i, r := range bus.Publish(t.Context(), msgs) {
		if r.Outcome != broker.Stored {
			t.Fatalf("publish message %d: %v: %v", i, r.Outcome, r.Err)
		}
	}
}

func handleOne(t testing.TB, pool *pgxpool.Pool, id string, h inbox.Handler, cfg inbox.Config) (inbox.Result, error) {
	t.Helper()
	if cfg.Logger == nil {
		cfg.Logger = testLogger(t)
	}
	return inbox.Handle(t.Context(), pool, "billing", message(id), h, cfg)
}

// mustHandle fails the test unless handling gives want.
func mustHandle(t testing.TB, pool *pgxpool.Pool, id string, h inbox.Handler, want inbox.Result) {
	t.Helper()
	if got, err := handleOne(t, pool, id, h, inbox.Config{}); err != nil || got != want {
		t.Fatalf("Handle(%q) = %v, %v, want %v", id, got, err, want)
	}
}

// running is a Consumer that runs until stop.
type running struct {
	*inbox.Consumer
	t      testing.TB
	cancel context.CancelFunc
	ended  chan error
	once   sync.Once
	err    error
}

// start runs a consumer of topic orders, quick in its retries.
func start(t testing.TB, pool *pgxpool.Pool, sub broker.Subscriber, h inbox.Handler, cfg inbox.Config) *running {
	t.Helper()
	if cfg.RetryDelay == 0 {
		cfg.RetryDelay = 2 * time.Millisecond
	}
	if cfg.MaxRetryDelay == 0 {
		cfg.MaxRetryDelay = 50 * time.Millisecond
	}
	if cfg.Logger == nil {
		cfg.Logger = testLogger(t)
	}
	c, err := inbox.New(pool, sub, "billing", "orders", h, cfg)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	r := &running{Consumer: c, t: t, cancel: cancel, ended: make(chan error, 1)}
	go func() { r.ended <- c.Run(ctx) }()
	t.Cleanup(func() {
		if err := r.stop(); err != nil && !t.Failed() {
			t.Errorf("Run: %v", err)
		}
	})
	return r
}

// stop ends the consumer and returns what Run returned.
func (r *running) stop() error {
	r.cancel()
	return r.wait()
}

func (r *running) wait() error {
	r.once.Do(func() {
		select {
		case r.err = <-r.ended:
		case <-time.After(patience):
			r.t.Errorf("Run has not returned after %v\n%s", patience, stacks())
			r.err = errors.New("Run did not return")
		}
	})
	return r.err
}

// wipe forgets the error that Run returned, which the test has judged.
func (r *running) wipe() { r.err = nil }

func stacks() []byte {
	b := make([]byte, 1<<20)
	return b[:runtime.Stack(b, true)]
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

// testLogger shows what was logged where the test fails.
func testLogger(t testing.TB) *slog.Logger {
	l := &logs{}
	t.Cleanup(func() {
		if t.Failed() {
			s := l.String()
			t.Logf("log:\n%s", s[:min(len(s), 4_000)])
		}
	})
	return l.logger()
}

// recorder counts what is settled at a broker, in order.
type recorder struct {
	broker.Subscriber
	mu      sync.Mutex
	settled []string // "ack id" or "retry id"
}

func record(sub broker.Subscriber) *recorder { return &recorder{Subscriber: sub} }

func (r *recorder) Subscribe(ctx context.Context, s broker.Subscription, deliver func(broker.Delivery)) error {
	return r.Subscriber.Subscribe(ctx, s, func(d broker.Delivery) { deliver(&recorded{d, r}) })
}

func (r *recorder) add(what, id string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.settled = append(r.settled, what+" "+id)
}

func (r *recorder) all() []string {
	r.mu.Lock()
	defer r.mu.Unlock()
	return append([]string(nil), r.settled...)
}

func (r *recorder) count(what string) (n int) {
	for _, s := range r.all() {
		if strings.HasPrefix(s, what+" ") {
			n++
		}
	}
	return n
}

type recorded struct {
	broker.Delivery
	r *recorder
}

func (d *recorded) Ack(ctx context.Context) error {
	d.r.add("ack", d.Message().ID)
	return d.Delivery.Ack(ctx)
}

func (d *recorded) Retry(ctx context.Context, delay time.Duration) error {
	d.r.add("retry", d.Message().ID)
	return d.Delivery.Retry(ctx, delay)
}

func newBus() (*memory.Broker, *recorder) {
	bus := memory.New()
	return bus, record(bus)
}

func ids(prefix string, n int) []string {
	all := make([]string, n)
	for i := range all {
		all[i] = fmt.Sprintf("%s%03d", prefix, i)
	}
	return all
}
