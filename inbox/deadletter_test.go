package inbox_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/postroom/postroom"
	"github.com/postroom/postroom/broker/memory"
	"github.com/postroom/postroom/inbox"
	"github.com/postroom/postroom/internal/pgtest"
)

func TestDeadLetters(t *testing.T) {
	pgtest.Each(t, func(t *testing.T, s *pgtest.Server) {
		pool := newPool(t, s)
		bus, rec := newBus()
		m := keyed("m1", "k1")
		m.Payload = []byte{0, 1, 0xff}
		m.Headers = []postroom.Header{{Name: "a", Value: []byte{0xfe}}, {Name: "a", Value: nil}, {Name: "B", Value: []byte{}}}
		m.Operation, m.Time = "op", time.Date(2024, 5, 6, 7, 8, 9, 123000, time.UTC)
		publish(t, bus, m)
		odd := "odd \x00 \xff text\n" + strings.Repeat("é", 2000)
		start(t, pool, rec, failing(errors.New(odd)), inbox.Config{MaxAttempts: 3, DeadLetterTopic: "dead.orders"})
		eventually(t, "an ack", func() bool { return rec.count("ack") == 1 })
		wantStrings(t, "effects", effects(t, pool))
		wantStrings(t, "processed", outcomes(t, pool), "billing m1 dead")
		wantStrings(t, "dead letters", query(t, pool, `SELECT concat_ws('|', subscriber_id, message_id, attempts, source, topic,
			convert_from(key, 'UTF8'), encode(payload, 'hex'), header_names::text, header_values::text, operation, written_at AT TIME ZONE 'UTC')
			FROM postroom.inbox_dead_letters`),
			`billing|m1|3|orders/0|orders|k1|0001ff|{"\\x61","\\x61","\\x42"}|{"\\xfe",NULL,"\\x"}|op|2024-05-06 07:08:09.000123`)
		reason := query(t, pool, `SELECT reason FROM postroom.inbox_dead_letters`)[0]
		if !strings.HasPrefix(reason, "odd   \uFFFD text ééé") || len([]rune(reason)) != 1000 {
			t.Errorf("reason = %.60q of %d characters", reason, len([]rune(reason)))
		}
		wantStrings(t, "outbox", query(t, pool, `SELECT concat_ws('|', topic, key, encode(payload, 'hex'), header_names::text)
			FROM postroom.outbox_messages`),
			"dead.orders|k1|0001ff|{a,a,B,postroom-dead-id,postroom-dead-subscriber,postroom-dead-reason,postroom-dead-attempts,postroom-dead-source}")
		wantStrings(t, "outbox headers", query(t, pool, `SELECT concat_ws('|', convert_from(header_values[4], 'UTF8'),
			convert_from(header_values[5], 'UTF8'), convert_from(header_values[7], 'UTF8'), convert_from(header_values[8], 'UTF8'))
			FROM postroom.outbox_messages`), "m1|billing|3|orders/0")

		// A plain repeat is a duplicate, for the consumer and for Handle.
		publish(t, bus, m)
		eventually(t, "a second ack", func() bool { return rec.count("ack") == 2 })
		mustHandle(t, pool, "m1", effect, inbox.Duplicate)
		wantStrings(t, "dead letters", query(t, pool, `SELECT attempts::text FROM postroom.inbox_dead_letters`), "3")
	})
}

func TestPermanentIsDeadAtOnce(t *testing.T) {
	pool := newPool(t, pgtest.First(t))
	bus, rec := newBus()
	publish(t, bus, message("m1"))
	var n int
	start(t, pool, rec, func(ctx context.Context, tx pgx.Tx, m postroom.Message) error {
		n++
		return fmt.Errorf("decode: %w", postroom.Permanent(errors.New("not JSON")))
	}, inbox.Config{})
	eventually(t, "an ack", func() bool { return rec.count("ack") == 1 })
	if n != 1 {
		t.Errorf("handled %d times, want once", n)
	}
	wantStrings(t, "reason", query(t, pool, `SELECT reason FROM postroom.inbox_dead_letters`), "decode: not JSON")
}

// The dead letter and the record commit together: where one cannot be written,
// neither is, and nothing is acknowledged.
func TestDeadLetterIsAtomic(t *testing.T) {
	pool := newPool(t, pgtest.First(t))
	exec(t, pool, `ALTER TABLE postroom.outbox_messages RENAME TO outbox_away`)
	bus, rec := newBus()
	publish(t, bus, message("m1"))
	l := &logs{}
	var handled atomic.Int32
	start(t, pool, rec, func(context.Context, pgx.Tx, postroom.Message) error {
		handled.Add(1)
		return errors.New("no")
	}, inbox.Config{MaxAttempts: 1, DeadLetterTopic: "dead", Logger: l.logger()})
	eventually(t, "some tries", func() bool { return strings.Count(l.String(), "transaction failed") >= 5 })
	wantStrings(t, "dead letters", query(t, pool, `SELECT message_id FROM postroom.inbox_dead_letters`))
	wantStrings(t, "processed", outcomes(t, pool))
	if n := rec.count("ack"); n != 0 {
		t.Errorf("%d acks", n)
	}
	exec(t, pool, `ALTER TABLE postroom.outbox_away RENAME TO outbox_messages`)
	eventually(t, "an ack", func() bool { return rec.count("ack") == 1 })
	wantStrings(t, "dead letters", query(t, pool, `SELECT message_id FROM postroom.inbox_dead_letters`), "m1")
	wantStrings(t, "processed", outcomes(t, pool), "billing m1 dead")
	if n := handled.Load(); n != 1 {
		t.Errorf("handled %d times, want once", n)
	}
}

// A dead letter whose topic the outbox refuses stands in the table.
func TestDeadLetterThatCannotBePublished(t *testing.T) {
	pool := newPool(t, pgtest.First(t))
	bus, rec := newBus()
	m := keyed("m1", strings.Repeat("k", 3000)) // longer than the outbox takes
	publish(t, bus, m)
	l := &logs{}
	start(t, pool, rec, failing(postroom.Permanent(errors.New("no"))), inbox.Config{DeadLetterTopic: "dead", Logger: l.logger()})
	eventually(t, "an ack", func() bool { return rec.count("ack") == 1 })
	wantStrings(t, "dead letters", query(t, pool, `SELECT length(key)::text FROM postroom.inbox_dead_letters`), "3000")
	if !strings.Contains(l.String(), "dead letter not published") {
		t.Errorf("log = %s", l.String())
	}
}

// A handler that commits by SQL and fails is set aside, although the record is
// there: the rest of its effect would be lost as a duplicate.
func TestHandlerThatEndsItsTransactionIsSetAside(t *testing.T) {
	pool := newPool(t, pgtest.First(t))
	bus, rec := newBus()
	publish(t, bus, message("m1"))
	start(t, pool, rec, func(ctx context.Context, tx pgx.Tx, m postroom.Message) error {
		_, err := tx.Exec(ctx, `COMMIT`)
		return err
	}, inbox.Config{})
	eventually(t, "an ack", func() bool { return rec.count("ack") == 1 })
	wantStrings(t, "processed", outcomes(t, pool), "billing m1 dead")
	wantStrings(t, "dead letters", query(t, pool, `SELECT message_id FROM postroom.inbox_dead_letters`), "m1")
}

// A dead letter outlives its record; a later one under the same id replaces it.
func TestDeadLetterIsReplaced(t *testing.T) {
	pool := newPool(t, pgtest.First(t))
	bus, rec := newBus()
	publish(t, bus, message("m1"))
	var n atomic.Int32
	start(t, pool, rec, func(context.Context, pgx.Tx, postroom.Message) error {
		return postroom.Permanent(fmt.Errorf("time %d", n.Add(1)))
	}, inbox.Config{})
	eventually(t, "an ack", func() bool { return rec.count("ack") == 1 })
	exec(t, pool, `DELETE FROM postroom.processed_messages`)
	publish(t, bus, message("m1"))
	eventually(t, "a second ack", func() bool { return rec.count("ack") == 2 })
	wantStrings(t, "reasons", query(t, pool, `SELECT reason FROM postroom.inbox_dead_letters`), "time 2")
}

func TestMessagesWithoutID(t *testing.T) {
	foreign := []postroom.Message{
		{Topic: "orders", Payload: []byte("1")},
		{Topic: "orders", ID: " ", Payload: []byte("2")},
		{Topic: "orders", ID: strings.Repeat("x", 300), Payload: []byte("3")},
		{Topic: "orders", ID: "a\x00b", Key: "k", Payload: []byte("4")},
		{Topic: "orders", ID: "\xff", Payload: []byte("5")},
	}
	t.Run("from position", func(t *testing.T) {
		pool := newPool(t, pgtest.First(t))
		bus, rec := newBus()
		publish(t, bus, foreign...)
		c := start(t, pool, rec, effect, inbox.Config{})
		eventually(t, "five acks", func() bool { return rec.count("ack") == 5 })
		got := effects(t, pool)
		slices.Sort(got)
		wantStrings(t, "effects", got, "position:orders/0", "position:orders/1", "position:orders/2", "position:orders/3", "position:orders/4")
		if err := c.stop(); err != nil {
			t.Error(err)
		}
		// Another group of the same subscriber's name gets the same positions: redelivery.
		again := memory.New()
		publish(t, again, foreign...)
		rec = record(again)
		start(t, pool, rec, effect, inbox.Config{})
		eventually(t, "five acks", func() bool { return rec.count("ack") == 5 })
		if n := len(effects(t, pool)); n != 5 {
			t.Errorf("%d effects, want 5", n)
		}
	})
	t.Run("dead letters", func(t *testing.T) {
		pool := newPool(t, pgtest.First(t))
		bus, rec := newBus()
		publish(t, bus, foreign...)
		publish(t, bus, message("good"))
		start(t, pool, rec, effect, inbox.Config{MissingID: inbox.DeadLetterWithoutID})
		eventually(t, "six acks", func() bool { return rec.count("ack") == 6 })
		wantStrings(t, "effects", effects(t, pool), "good")
		wantStrings(t, "dead letters", query(t, pool, `SELECT concat_ws('|', message_id, reason, convert_from(payload, 'UTF8'))
			FROM postroom.inbox_dead_letters ORDER BY message_id`),
			"position:orders/0|the message's id is empty|1",
			"position:orders/1|the message's id begins or ends with white space|2",
			"position:orders/2|the message's id has 300 bytes, want at most 255|3",
			"position:orders/3|the message's id contains a character that is not printable|4",
			"position:orders/4|the message's id is not valid UTF-8|5")
	})
}

// A key of bytes that are no text, as other programs send on Kafka.
func TestForeignMessage(t *testing.T) {
	pool := newPool(t, pgtest.First(t))
	sub := newHandSubscriber()
	start(t, pool, sub, failing(postroom.Permanent(errors.New("no"))), inbox.Config{DeadLetterTopic: "dead"})
	d := sub.deliver(postroom.Message{
		Topic: "orders", Key: "\xff\x00", Payload: []byte{}, Operation: "o\x00p", Time: time.Date(20000, 1, 1, 0, 0, 0, 0, time.UTC),
		Headers: []postroom.Header{{Name: "\xfe", Value: []byte("v")}, {Name: "", Value: nil}, {Name: "postroom-dead-id", Value: []byte("x")}},
	})
	if got := receive(t, "it is settled", d.settled); got != "ack" {
		t.Errorf("settled by %s, want ack", got)
	}
	wantStrings(t, "dead letters", query(t, pool, `SELECT concat_ws('|', message_id, source, encode(key, 'hex'),
		encode(payload, 'hex'), cardinality(header_names), operation, coalesce(written_at::text, 'no time'))
		FROM postroom.inbox_dead_letters`), "position:orders/3/7|orders/3/7|ff00||3|o p|no time")
}
