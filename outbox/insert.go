package outbox

import (
	"context"

	"github.com/jackc/pgx/v5"

	"github.com/postroom/postroom/internal/pg"
)

// copyFrom is the number of messages from which COPY is faster than one INSERT;
// see BenchmarkWrite.
const copyFrom = 300

// insertOne is the statement of a Write of one message.
const insertOne = `
INSERT INTO "postroom".outbox_messages
       (hash, message_id, topic, key, payload, header_names, header_values, operation)
VALUES ($1, $2, $3, $4, $5, $6, $7, $8)`

// insertMany draws the ids in the order of the arrays: the defaults of an
// INSERT … SELECT are computed above the sort. Headers come as array literals,
// since unnest would flatten arrays of arrays.
const insertMany = `
INSERT INTO "postroom".outbox_messages
       (hash, message_id, topic, key, payload, header_names, header_values, operation)
SELECT m.hash, m.message_id, m.topic, m.key, m.payload, m.names::text[], m.vals::bytea[], m.operation
  FROM unnest($1::int4[], $2::text[], $3::text[], $4::text[], $5::bytea[], $6::text[], $7::text[], $8::text[])
       WITH ORDINALITY AS m(hash, message_id, topic, key, payload, names, vals, operation, n)
 ORDER BY m.n`

var copyColumns = []string{
	"hash", "message_id", "topic", "key", "payload", "header_names", "header_values", "operation",
}

// insertScheduled keeps the order of the arrays in its ids, as insertMany does.
const insertScheduled = `
INSERT INTO "postroom".outbox_scheduled
       (hash, message_id, topic, key, payload, header_names, header_values, operation, deliver_at)
SELECT m.hash, m.message_id, m.topic, m.key, m.payload, m.names::text[], m.vals::bytea[], m.operation, m.deliver_at
  FROM unnest($1::int4[], $2::text[], $3::text[], $4::text[], $5::bytea[], $6::text[], $7::text[], $8::text[],
              $9::timestamptz[])
       WITH ORDINALITY AS m(hash, message_id, topic, key, payload, names, vals, operation, deliver_at, n)
 ORDER BY m.n`

// insert adds rows to the outbox and to the schedule.
func insert(ctx context.Context, tx pgx.Tx, schema string, now, later []row) error {
	if len(now) >= copyFrom {
		if err := insertCopy(ctx, tx, schema, now); err != nil {
			return err
		}
		now = nil
	}
	var b pgx.Batch
	switch {
	case len(now) == 1:
		r := now[0]
		b.Queue(pg.InSchema(insertOne, schema),
			r.hash, r.id, r.topic, r.key, r.payload, r.names, r.values, r.operation)
	case len(now) > 1:
		a := arraysOf(now)
		b.Queue(pg.InSchema(insertMany, schema),
			a.hashes, a.ids, a.topics, a.keys, a.payloads, a.names, a.values, a.operations)
	}
	if len(later) > 0 {
		a := arraysOf(later)
		b.Queue(pg.InSchema(insertScheduled, schema),
			a.hashes, a.ids, a.topics, a.keys, a.payloads, a.names, a.values, a.operations, a.deliverAts)
	}
	switch len(b.QueuedQueries) {
	case 0:
		return nil
	case 1: // cheaper than a batch of one
		q := b.QueuedQueries[0]
		_, err := tx.Exec(ctx, q.SQL, q.Arguments...)
		return err
	}
	return tx.SendBatch(ctx, &b).Close()
}

func insertCopy(ctx context.Context, tx pgx.Tx, schema string, rows []row) error {
	_, err := tx.CopyFrom(ctx, pgx.Identifier{schema, "outbox_messages"}, copyColumns,
		pgx.CopyFromSlice(len(rows), func(i int) ([]any, error) {
			r := &rows[i]
			return []any{r.hash, r.id, r.topic, r.key, r.payload, r.names, r.values, r.operation}, nil
		}))
	return err
}
