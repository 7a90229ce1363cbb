package outbox

import (
	"context"
	"fmt"

	"github.com/jackc/pgx/v5"

	"github.com/postroom/postroom/internal/pg"
)

// deleteScheduled finds the message by index outbox_scheduled_message.
const deleteScheduled = `
DELETE FROM "postroom".outbox_scheduled WHERE message_id = $1::text`

// Cancel removes the scheduled message with this id, on whatever topics, as part of tx: it is
// not published if tx commits, and falls due as if nothing had been if tx
// is rolled back. It reports whether the message was still waiting for its
// time. A false says that it is in the outbox already, or was published, or
// never written.
//
// A message that falls due while tx is open is not published before tx ends.
func (o *Outbox) Cancel(ctx context.Context, tx pgx.Tx, id string) (bool, error) {
	schema, err := pg.Schema(o.Schema)
	if err != nil {
		return false, fmt.Errorf("outbox: Outbox.%w", err)
	}
	tag, err := tx.Exec(ctx, pg.InSchema(deleteScheduled, schema), id)
	if err != nil {
		return false, fmt.Errorf("outbox: cancel a scheduled message: %w", err)
	}
	return tag.RowsAffected() > 0, nil
}
