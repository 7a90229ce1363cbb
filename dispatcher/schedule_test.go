package dispatcher_test

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/postroom/postroom"
	"github.com/postroom/postroom/dispatcher"
	"github.com/postroom/postroom/internal/pgtest"
	"github.com/postroom/postroom/outbox"
)

// A cancelled message is not published; one whose cancelling is rolled back is;
// the row decides which of cancelling and falling due came first, and nobody
// waits for the transaction that cancels.
func TestCancel(t *testing.T) {
	pgtest.Each(t, func(t *testing.T, s *pgtest.Server) {
		pool := s.New(t)
		r := &recorder{}
		start(t, pool, r, dispatcher.Config{})
		var box outbox.Outbox
		var soon time.Time
		if err := pool.QueryRow(t.Context(), `SELECT clock_timestamp() + interval '1 second'`).Scan(&soon); err != nil {
			t.Fatal(err)
		}
		for _, id := range []string{"gone", "kept", "other"} {
			write(t, pool, postroom.Message{ID: id, Topic: "orders", DeliverAt: soon})
		}
		cancel := func(tx pgx.Tx, id string) bool {
			there, err := box.Cancel(t.Context(), tx, id)
			if err != nil {
				t.Fatal(err)
			}
			return there
		}
		open, err := pool.Begin(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		defer open.Rollback(context.Background())
		if !cancel(open, "gone") || !cancel(open, "kept") || cancel(open, "never") {
			t.Error("Cancel does not say what was there")
		}
		waitStored(t, r, 1) // "other" falls due while the transaction is open
		back := errors.New("back")
		err = pgx.BeginFunc(t.Context(), pool, func(tx pgx.Tx) error {
			if cancel(tx, "other") {
				t.Error("Cancel says that a published message was waiting")
			}
			return back
		})
		if !errors.Is(err, back) {
			t.Fatal(err)
		}
		if err := open.Rollback(t.Context()); err != nil {
			t.Fatal(err)
		}
		waitStored(t, r, 3)
		write(t, pool, postroom.Message{ID: "last", Topic: "orders", DeliverAt: soon.Add(2 * time.Second)})
		err = pgx.BeginFunc(t.Context(), pool, func(tx pgx.Tx) error {
			if !cancel(tx, "last") {
				t.Error("a waiting message was not there")
			}
			return nil
		})
		if err != nil {
			t.Fatal(err)
		}
		if n := count(t, pool, `SELECT count(*) FROM postroom.outbox_scheduled`); n > 0 {
			t.Errorf("%d messages are still scheduled", n)
		}
	})
}

// Several dispatchers move what is due: each message once, those of a key in
// the order in which they fell due.
func TestScheduleWithSeveralDispatchers(t *testing.T) {
	pgtest.Each(t, func(t *testing.T, s *pgtest.Server) {
		pool := s.New(t)
		const n = 5000
		exec(t, pool, `INSERT INTO postroom.outbox_scheduled (deliver_at, hash, message_id, topic, key, payload)
			SELECT now() + g * interval '0.4 ms', g % 7, 'm' || g, 'orders', 'k' || g % 7, convert_to(g::text, 'UTF8')
			  FROM generate_series($1::int4, 1, -1) g`, n)
		r := &recorder{}
		for range 3 {
			start(t, pool, r, dispatcher.Config{})
		}
		waitStored(t, r, n)
		if got := len(r.messages()); got != n {
			t.Errorf("%d publishes of %d messages", got, n)
		}
		if p := keyOrder(r); p != "" {
			t.Error(p)
		}
		if left := count(t, pool, `SELECT count(*) FROM postroom.outbox_scheduled`); left > 0 {
			t.Error(fmt.Sprint(left, " messages are still scheduled"))
		}
	})
}
