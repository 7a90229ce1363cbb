package outbox_test

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
	"github.com/postroom/postroom/internal/pgtest"
	"github.com/postroom/postroom/migrations"
	"github.com/postroom/postroom/outbox"
)

// stored lists the ids in the outbox, in the order in which they will leave.
func stored(t testing.TB, pool *pgxpool.Pool) []string {
	t.Helper()
	rows, err := pool.Query(t.Context(), `SELECT message_id FROM postroom.outbox_messages ORDER BY id`)
	if err != nil {
		t.Fatal(err)
	}
	ids, err := pgx.CollectRows(rows, pgx.RowTo[string])
	if err != nil {
		t.Fatal(err)
	}
	return ids
}

func inTx(t testing.TB, pool *pgxpool.Pool, f func(tx pgx.Tx) error) {
	t.Helper()
	if err := pgx.BeginFunc(t.Context(), pool, f); err != nil {
		t.Fatal(err)
	}
}

func TestWriteKeepsTheOrderGiven(t *testing.T) {
	pgtest.Each(t, func(t *testing.T, s *pgtest.Server) {
		pool := s.New(t)
		var box outbox.Outbox
		var want []string
		inTx(t, pool, func(tx pgx.Tx) error {
			for _, n := range []int{1, 2, 50, 299, 300, 1000, 0} {
				var msgs []postroom.Message
				for i := range n {
					id := fmt.Sprintf("%d/%d", n, i)
					msgs = append(msgs, postroom.Message{ID: id, Topic: "t", Key: fmt.Sprint(i % 3)})
					want = append(want, id)
				}
				if err := box.Write(t.Context(), tx, msgs...); err != nil {
					return err
				}
			}
			return nil
		})
		if got := stored(t, pool); strings.Join(got, " ") != strings.Join(want, " ") {
			t.Errorf("the order differs: %d rows of %d", len(got), len(want))
		}
	})
}

func TestRollbackAndSavepoints(t *testing.T) {
	pool := pgtest.New(t)
	var box outbox.Outbox
	put := func(tx pgx.Tx, id string) {
		if err := box.Write(t.Context(), tx, postroom.Message{ID: id, Topic: "t"}); err != nil {
			t.Fatal(err)
		}
	}
	boom := errors.New("boom")
	err := pgx.BeginFunc(t.Context(), pool, func(tx pgx.Tx) error {
		put(tx, "rolled back")
		return boom
	})
	if !errors.Is(err, boom) {
		t.Fatal(err)
	}
	inTx(t, pool, func(tx pgx.Tx) error {
		put(tx, "1")
		err := pgx.BeginFunc(t.Context(), tx, func(sp pgx.Tx) error {
			put(sp, "in a savepoint rolled back")
			return boom
		})
		if !errors.Is(err, boom) {
			return err
		}
		return pgx.BeginFunc(t.Context(), tx, func(sp pgx.Tx) error {
			put(sp, "2")
			return nil
		})
	})
	if got := strings.Join(stored(t, pool), ","); got != "1,2" {
		t.Errorf("stored %s", got)
	}
}

// B26 and B44: what is refused is refused before any SQL.
func TestCase_B26_BadMessagesLeaveTheTransactionUsable(t *testing.T) {
	pool := pgtest.New(t)
	box := outbox.Outbox{MaxSize: 20}
	inTx(t, pool, func(tx pgx.Tx) error {
		err := box.Write(t.Context(), tx,
			postroom.Message{ID: "fine", Topic: "t"},
			postroom.Message{ID: "a", Topic: ""},
			postroom.Message{ID: "b", Topic: "t", Key: "\x00"},
			postroom.Message{ID: "c", Topic: "t", Payload: make([]byte, 19), Headers: []postroom.Header{{Name: "ab"}}},
			postroom.Message{ID: "fine", Topic: "t"},
			postroom.Message{ID: "fine", Topic: "other"},
			postroom.Message{Topic: "t", Headers: []postroom.Header{{Name: "postroom-id"}}})
		if !errors.Is(err, postroom.ErrInvalid) {
			t.Errorf("Write: %v", err)
		}
		for _, want := range []string{
			"message 1: Topic", "message 2: Key", "message 3: Payload makes a message of 21 bytes", "message 4: ID is that of message 0", "message 6: Headers[0]",
		} {
			if !strings.Contains(err.Error(), want) {
				t.Errorf("%q is missing in:\n%v", want, err)
			}
		}
		if strings.Contains(err.Error(), "message 5") || strings.Contains(err.Error(), "message 0: ") {
			t.Errorf("a good message is reported:\n%v", err)
		}
		// Odd payloads are no problem: they are bytes.
		return box.Write(t.Context(), tx,
			postroom.Message{ID: "1", Topic: "t", Payload: []byte(`{"a":"\u0000"}`)},
			postroom.Message{ID: "2", Topic: "t", Payload: []byte("\x00")},
			postroom.Message{ID: "3", Topic: "t", Payload: []byte(`"\ud800"`)},
			postroom.Message{ID: "4", Topic: "t", Payload: []byte(`\\u0000`)})
	})
	if got := strings.Join(stored(t, pool), ","); got != "1,2,3,4" {
		t.Errorf("stored %s", got)
	}
	var payload []byte
	err := pool.QueryRow(t.Context(), `SELECT payload FROM postroom.outbox_messages WHERE message_id = '1'`).Scan(&payload)
	if err != nil || string(payload) != `{"a":"\u0000"}` {
		t.Errorf("payload %q, %v", payload, err)
	}
}

// B44: an id is the caller's promise. A second message with it is written
// (subscribers drop it), and never replaces or disturbs the first.
func TestCase_B44_SameIDAgain(t *testing.T) {
	pool := pgtest.New(t)
	var box outbox.Outbox
	first := postroom.Message{ID: "same", Topic: "t", Payload: []byte("1")}
	second := postroom.Message{ID: "same", Topic: "t", Payload: []byte("2")}
	inTx(t, pool, func(tx pgx.Tx) error {
		if err := box.Write(t.Context(), tx, first); err != nil {
			return err
		}
		return box.Write(t.Context(), tx, second)
	})
	var all string
	err := pool.QueryRow(t.Context(), `
		SELECT string_agg(convert_from(payload, 'UTF8'), ',' ORDER BY id) FROM postroom.outbox_messages`).Scan(&all)
	if err != nil || all != "1,2" {
		t.Errorf("payloads %s, %v", all, err)
	}
}

func TestWriteTakesTraceAndOperation(t *testing.T) {
	pool := pgtest.New(t)
	var box outbox.Outbox
	span := trace.NewSpanContext(trace.SpanContextConfig{
		TraceID: trace.TraceID{1}, SpanID: trace.SpanID{2}, TraceFlags: trace.FlagsSampled,
	})
	op := postroom.Operation{Kind: "http", Scope: "t/POST", Key: "k"}
	for range 2 { // a repeat writes the same id
		ctx := trace.ContextWithSpanContext(postroom.WithOperation(t.Context(), op), span)
		inTx(t, pool, func(tx pgx.Tx) error {
			return box.Write(ctx, tx,
				postroom.Message{Topic: "t", Key: "k"},
				postroom.Message{Topic: "t", Key: "k", Headers: []postroom.Header{{Name: "Traceparent", Value: []byte("mine")}}})
		})
	}
	rows, err := pool.Query(t.Context(), `
		SELECT message_id, operation, header_names, header_values FROM postroom.outbox_messages ORDER BY id`)
	if err != nil {
		t.Fatal(err)
	}
	type row struct {
		ID, Operation string
		Names         []string
		Values        [][]byte
	}
	got, err := pgx.CollectRows(rows, pgx.RowToStructByPos[row])
	if err != nil || len(got) != 4 {
		t.Fatal(got, err)
	}
	if got[0].ID == got[1].ID || got[0].ID != got[2].ID || got[1].ID != got[3].ID {
		t.Errorf("ids %s %s %s %s", got[0].ID, got[1].ID, got[2].ID, got[3].ID)
	}
	for i, r := range got {
		name, value := "traceparent", "00-01000000000000000000000000000000-0200000000000000-01"
		if i%2 == 1 {
			name, value = "Traceparent", "mine"
		}
		if len(r.Names) != 1 || r.Names[0] != name || string(r.Values[0]) != value || r.Operation != op.ID() {
			t.Errorf("row %d: %q %q %s", i, r.Names, r.Values, r.Operation)
		}
	}
}

func TestWriteTouchesNoArguments(t *testing.T) {
	pool := pgtest.New(t)
	var box outbox.Outbox
	msgs := []postroom.Message{
		{Topic: "t", Headers: make([]postroom.Header, 1, 5)},
		{Topic: "t", DeliverAt: time.Now()},
	}
	msgs[0].Headers[0].Name = "a"
	want := fmt.Sprintf("%#v", msgs)
	ctx := trace.ContextWithSpanContext(t.Context(), trace.NewSpanContext(trace.SpanContextConfig{
		TraceID: trace.TraceID{1}, SpanID: trace.SpanID{2},
	}))
	inTx(t, pool, func(tx pgx.Tx) error { return box.Write(ctx, tx, msgs...) })
	if got := fmt.Sprintf("%#v", msgs); got != want {
		t.Errorf("got  %s\nwant %s", got, want)
	}
	if extra := msgs[0].Headers[:2][1]; extra.Name != "" {
		t.Errorf("wrote %q behind the caller's slice", extra.Name)
	}
}

func TestOtherSchema(t *testing.T) {
	pool := pgtest.First(t).Empty(t)
	name := `it's "odd" Schema`
	if _, err := migrations.Up(t.Context(), pool, migrations.Config{Schema: name}); err != nil {
		t.Fatal(err)
	}
	box := outbox.Outbox{Schema: name}
	for _, n := range []int{1, 5, 400} {
		inTx(t, pool, func(tx pgx.Tx) error {
			return box.Write(t.Context(), tx, make5(n)...)
		})
	}
	var n int
	err := pool.QueryRow(t.Context(), `SELECT count(*) FROM `+pgx.Identifier{name, "outbox_messages"}.Sanitize()).Scan(&n)
	if err != nil || n != 406 {
		t.Errorf("%d rows, %v", n, err)
	}
	bad := outbox.Outbox{Schema: strings.Repeat("x", 64)}
	inTx(t, pool, func(tx pgx.Tx) error {
		if err := bad.Write(t.Context(), tx, make5(1)...); err == nil || !strings.Contains(err.Error(), "Outbox.Schema") {
			t.Errorf("Write: %v", err)
		}
		return nil
	})
}

func make5(n int) []postroom.Message {
	msgs := make([]postroom.Message, n)
	for i := range msgs {
		msgs[i] = postroom.Message{Topic: "t", Key: fmt.Sprint(i % 5), Payload: []byte("x")}
	}
	return msgs
}

// B83 (the part of Write): every mode in which pgx can run statements.
func TestEveryExecMode(t *testing.T) {
	pool := pgtest.New(t)
	var box outbox.Outbox
	for _, mode := range []pgx.QueryExecMode{
		pgx.QueryExecModeCacheStatement, pgx.QueryExecModeCacheDescribe, pgx.QueryExecModeDescribeExec,
		pgx.QueryExecModeExec, pgx.QueryExecModeSimpleProtocol,
	} {
		t.Run(mode.String(), func(t *testing.T) {
			cfg := pool.Config()
			cfg.ConnConfig.DefaultQueryExecMode = mode
			other, err := pgxpool.NewWithConfig(t.Context(), cfg)
			if err != nil {
				t.Fatal(err)
			}
			defer other.Close()
			odd := postroom.Message{
				Topic: "t", EmptyKey: true, Payload: []byte("\x00\xff'\\"),
				Headers: []postroom.Header{{Name: `"'\`, Value: []byte("\x00")}, {Name: "b", Value: nil}},
			}
			for _, msgs := range [][]postroom.Message{
				{odd}, {odd, odd}, {odd, {Topic: "t", DeliverAt: time.Now()}}, append(make5(399), odd),
			} {
				inTx(t, other, func(tx pgx.Tx) error { return box.Write(t.Context(), tx, msgs...) })
			}
			var good int
			err = pool.QueryRow(t.Context(), `
				SELECT count(*) FROM postroom.outbox_messages
				 WHERE key = '' AND payload = '\x00ff275c' AND header_names = ARRAY['"''\', 'b']
				   AND header_values = ARRAY['\x00'::bytea, NULL]`).Scan(&good)
			if err != nil || good != 5 {
				t.Errorf("%d rows came through whole, want 5; %v", good, err)
			}
			if _, err := pool.Exec(t.Context(), `DELETE FROM postroom.outbox_messages`); err != nil {
				t.Fatal(err)
			}
		})
	}
}

func TestDatabaseErrorsAreWrapped(t *testing.T) {
	pool := pgtest.First(t).Empty(t)
	var box outbox.Outbox
	err := pgx.BeginFunc(t.Context(), pool, func(tx pgx.Tx) error {
		return box.Write(context.Background(), tx, postroom.Message{Topic: "t", Key: "secret", Payload: []byte("secret")})
	})
	if err == nil || !strings.HasPrefix(err.Error(), "outbox: write 1 messages: ") || strings.Contains(err.Error(), "secret") {
		t.Errorf("Write: %v", err)
	}
}
