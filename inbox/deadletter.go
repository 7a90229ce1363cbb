package inbox

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"log/slog"
	"strconv"
	"strings"
	"time"
	"unicode"
	"unicode/utf8"

	"github.com/jackc/pgx/v5"

	"github.com/postroom/postroom"
	"github.com/postroom/postroom/broker"
	"github.com/postroom/postroom/internal/pg"
	"github.com/postroom/postroom/internal/reserved"
	"github.com/postroom/postroom/outbox"
)

// deadLetter says why a message was given up.
type deadLetter struct {
	reason string // cleaned
	ended  bool   // the handler may have committed the message's record itself
}

// insertDead replaces a letter of the message: it was requeued and has failed
// again, or its record was cleaned up long ago.
const insertDead = `
INSERT INTO "postroom".inbox_dead_letters AS d
       (subscriber_id, message_id, attempts, reason, source, topic, key, payload,
        header_names, header_values, operation, written_at)
VALUES ($1::text, $2::text, $3::int4, $4::text, $5::text, $6::text, $7::bytea, $8::bytea,
        $9::bytea[], $10::bytea[], $11::text, $12::timestamptz)
    ON CONFLICT (subscriber_id, message_id) DO UPDATE
   SET state = 'dead', dead_at = clock_timestamp(), attempts = excluded.attempts, reason = excluded.reason,
       source = excluded.source, topic = excluded.topic, key = excluded.key, payload = excluded.payload,
       header_names = excluded.header_names, header_values = excluded.header_values,
       operation = excluded.operation, written_at = excluded.written_at`

// writeDead records t as dead together with its dead letter.
func (c *Consumer) writeDead(ctx context.Context, t *task) (Result, *failure) {
	return c.box.attempt(ctx, t.m, recordDead(t), func(ctx context.Context, tx pgx.Tx, m postroom.Message) error {
		names, values := headersOf(&m)
		_, err := tx.Exec(ctx, pg.InSchema(insertDead, c.box.cfg.Schema),
			c.box.subscriber, m.ID, t.deadAttempts(), t.dead.reason, t.source(), c.topic,
			keyOf(&m), m.Payload, names, values, operationOf(&m), timeOf(&m))
		if err != nil || c.box.cfg.DeadLetterTopic == "" {
			return err
		}
		err = c.box.outbox.Write(reserved.Allow(ctx), tx, c.deadMessage(t))
		if errors.Is(err, postroom.ErrInvalid) { // nothing was written; the row remains
			c.log(ctx, slog.LevelError, "dead letter not published", t, slog.Any("error", err))
			return nil
		}
		return err
	})
}

const insertWaiting = `
INSERT INTO "postroom".inbox_dead_letters
       (subscriber_id, message_id, state, attempts, source, topic, key, payload,
        header_names, header_values, operation, written_at)
VALUES ($1::text, $2::text, 'waiting', 0, $3::text, $4::text, $5::bytea, $6::bytea,
        $7::bytea[], $8::bytea[], $9::text, $10::timestamptz)`

// writeWaiting sets t aside behind its key's dead letters.
func (c *Consumer) writeWaiting(ctx context.Context, t *task) (Result, *failure) {
	return c.box.attempt(ctx, t.m, recordWaiting(), func(ctx context.Context, tx pgx.Tx, m postroom.Message) error {
		names, values := headersOf(&m)
		_, err := tx.Exec(ctx, pg.InSchema(insertWaiting, c.box.cfg.Schema),
			c.box.subscriber, m.ID, t.source(), c.topic,
			keyOf(&m), m.Payload, names, values, operationOf(&m), timeOf(&m))
		return err
	})
}

// deadMessage is what is sent to the dead-letter topic.
func (c *Consumer) deadMessage(t *task) postroom.Message {
	m := postroom.Message{
		Topic:    c.box.cfg.DeadLetterTopic,
		Key:      t.m.Key,
		EmptyKey: t.m.EmptyKey,
		Payload:  t.m.Payload,
		Step:     "dead letter",
	}
	if t.letter != nil { // another message than the one of its first death
		m.Step = fmt.Sprintf("dead letter %d", t.letter.requeues)
	}
	for _, h := range t.m.Headers {
		if !postroom.Reserved(h.Name) {
			m.Headers = append(m.Headers, h)
		}
	}
	add := func(name, value string) {
		m.Headers = append(m.Headers, postroom.Header{Name: "postroom-dead-" + name, Value: []byte(value)})
	}
	add("id", t.m.ID)
	add("subscriber", c.box.subscriber)
	add("reason", t.dead.reason)
	add("attempts", strconv.Itoa(int(t.deadAttempts())))
	add("source", t.source())
	return m
}

// deadAttempts is at least 1, as if finding no id were one.
func (t *task) deadAttempts() int32 { return int32(max(1, t.attempts)) }

// newOutbox has no limit of size: the message came from a broker.
func newOutbox(schema string) *outbox.Outbox {
	return &outbox.Outbox{Schema: schema, MaxSize: -1}
}

// source names the place in the broker that t came from.
func (t *task) source() string {
	if t.letter != nil {
		return t.letter.source
	}
	return source(t.d.Position())
}

// source names a position for people: "orders/3/17", or "orders/17" where there
// are no partitions.
func source(p broker.Position) string {
	topic := clean(p.Topic, 1000)
	if p.Partition < 0 {
		return fmt.Sprintf("%s/%d", topic, p.Offset)
	}
	return fmt.Sprintf("%s/%d/%d", topic, p.Partition, p.Offset)
}

// positionID is the id of a message that has none.
func positionID(p broker.Position) string {
	id := "position:" + source(p)
	if postroom.CheckID(id) == "" {
		return id
	}
	sum := sha256.Sum256([]byte(id))
	return "position:" + hex.EncodeToString(sum[:])
}

func headersOf(m *postroom.Message) (names, values [][]byte) {
	names, values = make([][]byte, len(m.Headers)), make([][]byte, len(m.Headers))
	for i, h := range m.Headers {
		names[i], values[i] = []byte(h.Name), h.Value
	}
	return names, values
}

func keyOf(m *postroom.Message) []byte {
	if !m.HasKey() {
		return nil
	}
	return []byte(m.Key)
}

func operationOf(m *postroom.Message) *string {
	if m.Operation == "" {
		return nil
	}
	op := clean(m.Operation, 1000)
	return &op
}

func timeOf(m *postroom.Message) *time.Time {
	if m.Time.IsZero() || m.Time.Year() < 1 || m.Time.Year() > 9999 {
		return nil
	}
	return &m.Time
}

const maxReason = 1000 // characters

func reasonOf(err error) string {
	if reason := clean(err.Error(), maxReason); reason != "" {
		return reason
	}
	return "the handler's error has no text"
}

// clean returns s as printable, valid text of at most limit characters.
func clean(s string, limit int) string {
	s = s[:min(len(s), limit*utf8.UTFMax)] // no more than these can remain
	s = strings.Map(func(r rune) rune {
		if unicode.IsPrint(r) {
			return r
		}
		return ' '
	}, strings.ToValidUTF8(s, "\uFFFD"))
	s = strings.TrimSpace(s)
	if utf8.RuneCountInString(s) > limit {
		s = string([]rune(s)[:limit])
	}
	return s
}
