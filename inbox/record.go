package inbox

import (
	"context"

	"github.com/jackc/pgx/v5"

	"github.com/postroom/postroom"
	"github.com/postroom/postroom/internal/pg"
)

// record is how a transaction records its message.
type record struct {
	// sql changes one row of processed_messages, or none where the transaction
	// must not go on. It bounds waits for locks by its third parameter, behind
	// the subscriber and the message's id.
	sql  string
	args []any // further ones

	// outcomes are those of a message whose transaction has committed, or whose
	// effect happened in another one. nil: none tells, and a repeat is safe.
	outcomes []string

	counted bool // a message that is recorded before counts as a repeat
}

var anyOutcome = []string{"handled", "dead", "waiting"}

// claim waits for a transaction that is recording the same message. It inserts no
// row where the message is recorded already.
const claim = `
INSERT INTO "postroom".processed_messages (subscriber_id, message_id)
SELECT $1::text, $2::text FROM set_config('lock_timeout', $3::text, true)
    ON CONFLICT DO NOTHING`

func recordNew() record { return record{sql: claim, outcomes: anyOutcome, counted: true} }

// claimInOrder is claim for a message that must wait behind its key's dead
// letters. It inserts no row then either.
const claimInOrder = `
INSERT INTO "postroom".processed_messages (subscriber_id, message_id)
SELECT $1::text, $2::text FROM set_config('lock_timeout', $3::text, true)
 WHERE NOT EXISTS (SELECT FROM "postroom".inbox_dead_letters
                    WHERE subscriber_id = $1::text AND topic = $4::text AND sha256(key) = sha256($5::bytea))
    ON CONFLICT DO NOTHING`

func recordInOrder(topic string, m *postroom.Message) record {
	return record{sql: claimInOrder, args: []any{topic, keyOf(m)}, outcomes: anyOutcome}
}

// claimWaiting sets a message aside behind its key's dead letters. If these have
// been handled meanwhile it is the next.
const claimWaiting = `
INSERT INTO "postroom".processed_messages (subscriber_id, message_id, outcome)
SELECT $1::text, $2::text, 'waiting' FROM set_config('lock_timeout', $3::text, true)
    ON CONFLICT DO NOTHING`

func recordWaiting() record { return record{sql: claimWaiting, outcomes: anyOutcome, counted: true} }

// claimDead records a message as dead. It inserts no row where the message is
// recorded already: another copy was handled, or set aside.
const claimDead = `
INSERT INTO "postroom".processed_messages (subscriber_id, message_id, outcome)
SELECT $1::text, $2::text, 'dead' FROM set_config('lock_timeout', $3::text, true)
    ON CONFLICT DO NOTHING`

// claimEnded is claimDead for a message whose handler may have committed the
// record itself: what it then did not do would be lost as a duplicate.
const claimEnded = `
INSERT INTO "postroom".processed_messages (subscriber_id, message_id, outcome)
SELECT $1::text, $2::text, 'dead' FROM set_config('lock_timeout', $3::text, true)
    ON CONFLICT (subscriber_id, message_id) DO UPDATE SET outcome = 'dead', processed_at = clock_timestamp()`

// claimDeadAgain is claimDead for a message that was set aside before. It changes
// no row where another consumer has handled it.
const claimDeadAgain = `
INSERT INTO "postroom".processed_messages AS p (subscriber_id, message_id, outcome)
SELECT $1::text, $2::text, 'dead' FROM set_config('lock_timeout', $3::text, true)
    ON CONFLICT (subscriber_id, message_id) DO UPDATE SET outcome = 'dead', processed_at = clock_timestamp()
 WHERE p.outcome IN ('dead', 'waiting')`

func recordDead(t *task) record {
	switch {
	case t.dead.ended:
		return record{sql: claimEnded}
	case t.letter != nil || t.redriven:
		return record{sql: claimDeadAgain}
	}
	return record{sql: claimDead, outcomes: anyOutcome}
}

// claimLetter takes a message out of the dead letters. It changes no row where it
// is not due any more, where another consumer has it, or where, if order is asked
// for, one of its key is before it.
const claimLetter = `
WITH due AS (
    SELECT d.subscriber_id, d.message_id
      FROM set_config('lock_timeout', $3::text, true), "postroom".inbox_dead_letters d
     WHERE d.subscriber_id = $1::text AND d.message_id = $2::text AND d.state <> 'dead'
       AND NOT ($4::boolean AND EXISTS (
           SELECT FROM "postroom".inbox_dead_letters e
            WHERE e.subscriber_id = d.subscriber_id AND e.topic = d.topic
              AND sha256(e.key) = sha256(d.key) AND e.number < d.number))
       FOR UPDATE OF d SKIP LOCKED
), taken AS (
    DELETE FROM "postroom".inbox_dead_letters d
     USING due
     WHERE d.subscriber_id = due.subscriber_id AND d.message_id = due.message_id
 RETURNING d.subscriber_id, d.message_id
)
INSERT INTO "postroom".processed_messages (subscriber_id, message_id)
SELECT subscriber_id, message_id FROM taken
    ON CONFLICT (subscriber_id, message_id) DO UPDATE SET outcome = 'handled', processed_at = excluded.processed_at`

func recordLetter(ordered bool) record {
	return record{sql: claimLetter, args: []any{ordered}, outcomes: []string{"handled"}}
}

// claimRedriven takes a message that comes back from a dead-letter topic out of
// the dead letters. It changes no row where it has been handled since.
const claimRedriven = `
WITH taken AS (
    DELETE FROM "postroom".inbox_dead_letters
     WHERE subscriber_id = $1::text AND message_id = $2::text AND state <> 'waiting'
)
INSERT INTO "postroom".processed_messages AS p (subscriber_id, message_id)
SELECT $1::text, $2::text FROM set_config('lock_timeout', $3::text, true)
    ON CONFLICT (subscriber_id, message_id) DO UPDATE SET outcome = 'handled', processed_at = excluded.processed_at
 WHERE p.outcome = 'dead'`

func recordRedriven() record { return record{sql: claimRedriven, outcomes: []string{"handled"}} }

// countRepeats counts a repeat of a dead letter, unless another one is being
// counted or the letter is being handled.
const countRepeats = `
UPDATE "postroom".inbox_dead_letters SET repeats = repeats + 1
 WHERE (subscriber_id, message_id) IN (
       SELECT subscriber_id, message_id FROM "postroom".inbox_dead_letters
        WHERE subscriber_id = $1::text AND message_id = $2::text
          FOR UPDATE SKIP LOCKED)`

// countRepeat ends t, which found its message recorded, and counts the repeat in
// the same round trip. The count is for people: a failure changes nothing else.
func (b *box) countRepeat(ctx context.Context, t *txn, id string) {
	var batch pgx.Batch
	batch.Queue("rollback")
	batch.Queue(pg.InSchema(countRepeats, b.cfg.Schema), b.subscriber, id)
	_ = t.conn.SendBatch(ctx, &batch).Close()
}
