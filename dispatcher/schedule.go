package dispatcher

import (
	"context"
	"time"
)

// moveDue lets messages whose time has come enter the outbox, in one
// statement. The lock makes dispatchers take turns, so that messages of one key
// draw their ids in the order in which they fell due. A message that an open
// transaction is about to cancel is passed over until that ends. Messages are
// deleted by their place: they are never updated.
const moveDue = `
WITH turn AS MATERIALIZED (
    SELECT pg_try_advisory_xact_lock($1::int8) AS ours
), ripe AS MATERIALIZED (
    SELECT d.place FROM turn, LATERAL (
           SELECT ctid AS place FROM "postroom".outbox_scheduled
            WHERE turn.ours AND deliver_at <= now()
            ORDER BY deliver_at, id LIMIT 1000
              FOR UPDATE SKIP LOCKED) d
), due AS (
    DELETE FROM "postroom".outbox_scheduled WHERE ctid = ANY (ARRAY(SELECT place FROM ripe))
    RETURNING *
)
INSERT INTO "postroom".outbox_messages
       (created_at, hash, message_id, topic, key, payload, header_names, header_values, operation)
SELECT created_at, hash, message_id, topic, key, payload, header_names, header_values, operation
  FROM due ORDER BY deliver_at, id`

// scheduleEvery is how often a dispatcher looks for messages that are due.
const scheduleEvery = 500 * time.Millisecond

// schedule moves due messages until ctx ends.
func (d *Dispatcher) schedule(ctx context.Context) {
	lock := lockKey("postroom schedule " + d.cfg.Schema)
	for ctx.Err() == nil {
		var moved int64
		if len(d.held()) > 0 {
			tag, err := d.pool.Exec(ctx, d.sql.due, lock)
			switch {
			case ctx.Err() != nil:
				return
			case err != nil:
				d.trouble.set("schedule", err)
			default:
				d.trouble.clear("schedule")
				moved = tag.RowsAffected()
			}
		}
		if moved == 0 {
			wait(ctx, scheduleEvery)
		}
	}
}
