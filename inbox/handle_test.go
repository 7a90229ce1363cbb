package inbox_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"go.opentelemetry.io/otel/trace"

	"github.com/postroom/postroom"
	"github.com/postroom/postroom/inbox"
	"github.com/postroom/postroom/internal/pgtest"
	"github.com/postroom/postroom/migrations"
	"github.com/postroom/postroom/outbox"
)

func TestHandleOnce(t *testing.T) {
	pgtest.Each(t, func(t *testing.T, s *pgtest.Server) {
		pool := newPool(t, s)
		mustHandle(t, pool, "m1", effect, inbox.Handled)
		mustHandle(t, pool, "m1", effect, inbox.Duplicate)
		mustHandle(t, pool, "m2", effect, inbox.Handled)
		wantStrings(t, "effects", effects(t, pool), "m1", "m2")
		wantStrings(t, "processed", outcomes(t, pool), "billing m1 handled", "billing m2 handled")
		if n := pool.Stat().AcquiredConns(); n != 0 {
			t.Errorf("%d connections are still acquired", n)
		}
	})
}

func TestHandleInEveryExecMode(t *testing.T) {
	pool := newPool(t, pgtest.First(t))
	for _, mode := range []pgx.QueryExecMode{
		pgx.QueryExecModeCacheStatement, pgx.QueryExecModeCacheDescribe, pgx.QueryExecModeDescribeExec,
		pgx.QueryExecModeExec, pgx.QueryExecModeSimpleProtocol,
	} {
		t.Run(mode.String(), func(t *testing.T) {
			exec(t, pool, `TRUNCATE effects, postroom.processed_messages`)
			pool := withPool(t, pool, func(c *pgxpool.Config) {
				c.ConnConfig.DefaultQueryExecMode = mode
				c.MaxConns = 1
			})
			for range 2 { // also with statements that are known
				mustHandle(t, pool, "m1", effect, map[bool]inbox.Result{true: inbox.Handled, false: inbox.Duplicate}[len(effects(t, pool)) == 0])
			}
			_, err := handleOne(t, pool, "m2", func(ctx context.Context, tx pgx.Tx, m postroom.Message) error {
				return errors.Join(effect(ctx, tx, m), errors.New("no"))
			}, inbox.Config{})
			if err == nil {
				t.Error("a handler's error is not returned")
			}
			_, err = handleOne(t, pool, "m2", func(ctx context.Context, tx pgx.Tx, m postroom.Message) error {
				_, err := tx.Exec(ctx, "COMMIT AND CHAIN")
				return err
			}, inbox.Config{})
			if !errors.Is(err, inbox.ErrTxManaged) {
				t.Errorf("COMMIT AND CHAIN: %v, want ErrTxManaged", err)
			}
			mustHandle(t, pool, "m3", effect, inbox.Handled)
			wantStrings(t, "effects", effects(t, pool), "m1", "m3")
		})
	}
}

func TestHandleInAnotherSchema(t *testing.T) {
	pool := pgtest.First(t).Empty(t)
	const schema = `odd "name's`
	if _, err := migrations.Up(t.Context(), pool, migrations.Config{Schema: schema}); err != nil {
		t.Fatal(err)
	}
	exec(t, pool, `CREATE TABLE effects (n serial, message_id text)`)
	for _, want := range []inbox.Result{inbox.Handled, inbox.Duplicate} {
		if got, err := handleOne(t, pool, "m1", effect, inbox.Config{Schema: schema}); got != want || err != nil {
			t.Fatalf("Handle = %v, %v, want %v", got, err, want)
		}
	}
	bus, rec := newBus()
	publish(t, bus, message("m2"))
	start(t, pool, rec, failing(postroom.Permanent(errors.New("no"))), inbox.Config{Schema: schema, DeadLetterTopic: "dead"})
	eventually(t, "an ack", func() bool { return rec.count("ack") == 1 })
	q := pgx.Identifier{schema}.Sanitize()
	wantStrings(t, "dead letters", query(t, pool, `SELECT message_id FROM `+q+`.inbox_dead_letters`), "m2")
	wantStrings(t, "outbox", query(t, pool, `SELECT topic FROM `+q+`.outbox_messages`), "dead")
}

func TestHandleReportsBadArguments(t *testing.T) {
	pool := pgtest.New(t)
	for _, id := range []string{"", " ", "a\x00b", "\xff", strings.Repeat("x", 256), " m", "m\n"} {
		_, err := handleOne(t, pool, id, effect, inbox.Config{})
		if !errors.Is(err, postroom.ErrInvalid) {
			t.Errorf("Handle of id %q: %v, want ErrInvalid", id, err)
		}
	}
	_, err := inbox.Handle(t.Context(), pool, "", message("m1"), effect, inbox.Config{
		LockTimeout: -1, IsoLevel: "snapshot", Schema: strings.Repeat("s", 64),
	})
	for _, part := range []string{"subscriber", "LockTimeout", "IsoLevel", "Schema"} {
		if err == nil || !strings.Contains(err.Error(), part) {
			t.Errorf("error %v does not name %s", err, part)
		}
	}
}

func TestOddIDs(t *testing.T) {
	pool := newPool(t, pgtest.First(t))
	odd := []string{"'; DROP TABLE effects; --", `"quoted"`, "ünïcødé ✓ 漢字", `back\slash`, "$1", strings.Repeat("é", 127), "0"}
	for _, id := range odd {
		mustHandle(t, pool, id, effect, inbox.Handled)
		mustHandle(t, pool, id, effect, inbox.Duplicate)
	}
	wantStrings(t, "effects", effects(t, pool), odd...)
}

func TestOperationAndTraceReachTheHandler(t *testing.T) {
	pool := newPool(t, pgtest.First(t))
	const parent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
	m := message("m1")
	m.Headers = []postroom.Header{{Name: "Traceparent", Value: []byte(parent)}, {Name: "tracestate", Value: []byte("a=b")}}
	var box outbox.Outbox
	var keys, ids []string
	failOnce := errors.New("once")
	for range 2 {
		_, err := inbox.Handle(t.Context(), pool, "billing", m, func(ctx context.Context, tx pgx.Tx, m postroom.Message) error {
			want := postroom.Operation{Kind: "message", Scope: "billing", Key: "m1"}
			if o, ok := postroom.OperationFrom(ctx); !ok || o != want {
				t.Errorf("operation = %v, %v, want %v", o, ok, want)
			}
			if sc := trace.SpanContextFromContext(ctx); sc.SpanID().String() != "b7ad6b7169203331" || sc.TraceState().Get("a") != "b" {
				t.Errorf("span context = %v", sc)
			}
			key, err := postroom.OperationKey(ctx, "charge")
			keys = append(keys, key)
			if err != nil {
				return err
			}
			if err := box.Write(ctx, tx, postroom.Message{Topic: "invoices", Key: "k"}); err != nil {
				return err
			}
			var id string
			if err := tx.QueryRow(ctx, `SELECT message_id FROM postroom.outbox_messages`).Scan(&id); err != nil {
				return err
			}
			ids = append(ids, id)
			if len(ids) == 1 {
				return failOnce
			}
			return nil
		}, inbox.Config{Logger: testLogger(t)})
		if err != nil && !errors.Is(err, failOnce) {
			t.Fatal(err)
		}
	}
	if len(ids) != 2 || ids[0] != ids[1] || keys[0] != keys[1] {
		t.Errorf("a repeat has other ids: messages %q, keys %q", ids, keys)
	}
	wantStrings(t, "trace of what was sent",
		query(t, pool, `SELECT convert_from(header_values[1], 'UTF8') FROM postroom.outbox_messages`), parent)
}

func TestCallersSpanOfTheSameTraceIsKept(t *testing.T) {
	pool := newPool(t, pgtest.First(t))
	tid, _ := trace.TraceIDFromHex("0af7651916cd43dd8448eb211c80319c")
	own := trace.NewSpanContext(trace.SpanContextConfig{TraceID: tid, SpanID: trace.SpanID{1}})
	m := message("m1")
	m.Headers = []postroom.Header{{Name: "traceparent", Value: []byte("00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01")}}
	_, err := inbox.Handle(trace.ContextWithSpanContext(t.Context(), own), pool, "billing", m,
		func(ctx context.Context, tx pgx.Tx, m postroom.Message) error {
			if got := trace.SpanContextFromContext(ctx); got.SpanID() != own.SpanID() {
				t.Errorf("span = %v, want the caller's", got.SpanID())
			}
			return nil
		}, inbox.Config{})
	if err != nil {
		t.Fatal(err)
	}
}

// A copy that waits for too long is an error that may be retried, and soon.
func TestCopiesWaitForABoundedTime(t *testing.T) {
	pool := newPool(t, pgtest.First(t))
	entered, leave := make(chan struct{}), make(chan struct{})
	first := make(chan error, 1)
	go func() {
		_, err := handleOne(t, pool, "m1", func(ctx context.Context, tx pgx.Tx, m postroom.Message) error {
			close(entered)
			<-leave
			return effect(ctx, tx, m)
		}, inbox.Config{})
		first <- err
	}()
	receive(t, "the first copy runs", entered)
	elsewhere := withPool(t, pool, func(*pgxpool.Config) {}) // as in another process
	for _, p := range []*pgxpool.Pool{pool, elsewhere} {
		begin := time.Now()
		_, err := handleOne(t, p, "m1", effect, inbox.Config{LockTimeout: 50 * time.Millisecond})
		if !errors.Is(err, inbox.ErrTransient) {
			t.Errorf("second copy: %v, want ErrTransient", err)
		}
		if d := time.Since(begin); d < 50*time.Millisecond || d > 5*time.Second {
			t.Errorf("second copy waited for %v, want about 50ms", d)
		}
		ctx, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
		_, err = inbox.Handle(ctx, p, "billing", message("m1"), effect, inbox.Config{})
		if !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("second copy with 20ms: %v, want DeadlineExceeded", err)
		}
		cancel()
	}
	close(leave)
	if err := receive(t, "the first copy ends", first); err != nil {
		t.Error(err)
	}
	mustHandle(t, pool, "m1", effect, inbox.Duplicate)
	wantStrings(t, "effects", effects(t, pool), "m1")
}

// The caller's context prevents a commit, and an end of it is no database trouble.
func TestHandleWithEndedContext(t *testing.T) {
	pool := newPool(t, pgtest.First(t))
	ctx, cancel := context.WithCancel(t.Context())
	_, err := inbox.Handle(ctx, pool, "billing", message("m1"), func(ctx context.Context, tx pgx.Tx, m postroom.Message) error {
		defer cancel()
		return effect(ctx, tx, m)
	}, inbox.Config{})
	if !errors.Is(err, context.Canceled) {
		t.Errorf("Handle = %v, want context.Canceled", err)
	}
	wantStrings(t, "effects", effects(t, pool))
	if _, err := inbox.Handle(ctx, pool, "billing", message("m1"), effect, inbox.Config{}); !errors.Is(err, context.Canceled) {
		t.Errorf("Handle = %v, want context.Canceled", err)
	}
	wantStrings(t, "processed", outcomes(t, pool))
}

func TestErrorTextsHoldNoContents(t *testing.T) {
	pool := newPool(t, pgtest.First(t))
	m := keyed("m1", "secret-key")
	m.Payload = []byte("secret-payload")
	m.Headers = []postroom.Header{{Name: "token", Value: []byte("secret-header")}}
	l := &logs{}
	bus, rec := newBus()
	publish(t, bus, m)
	start(t, pool, rec, func(ctx context.Context, tx pgx.Tx, m postroom.Message) error { panic("boom") },
		inbox.Config{Logger: l.logger(), MaxAttempts: 2})
	eventually(t, "an ack", func() bool { return rec.count("ack") == 1 })
	_, err := inbox.Handle(t.Context(), pool, "other", m, failing(errors.New("no")), inbox.Config{Logger: l.logger()})
	for _, text := range []string{l.String(), fmt.Sprint(err)} {
		if strings.Contains(text, "secret") {
			t.Errorf("contents of the message in %q", text)
		}
	}
	reasons := query(t, pool, `SELECT reason FROM postroom.inbox_dead_letters`)
	wantStrings(t, "reasons", reasons, "the handler panicked: boom")
	if text := l.String(); !strings.Contains(text, "handle_test.go") || !strings.Contains(text, "message_id=m1") {
		t.Errorf("the log has no stack or id: %s", text)
	}
}

// failing returns a handler that writes and fails.
func failing(failure error) inbox.Handler {
	return func(ctx context.Context, tx pgx.Tx, m postroom.Message) error {
		if err := effect(ctx, tx, m); err != nil {
			return err
		}
		return failure
	}
}
