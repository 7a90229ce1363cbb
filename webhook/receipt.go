package webhook

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"maps"
	"net/http"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/postroom/postroom"
)

type outcome int

const (
	taken       outcome = iota + 1 // a receipt and a message are committed
	repeated                       // they were before
	conflicting                    // the id was received with another body
)

// receive inserts a receipt unless there is one, and says which it is: of the same
// id, or of the same body where the id is not signed. It reads first, so that a repeat
// writes nothing and waits for nobody. Where it returns neither, somebody else's
// receipt has been committed meanwhile. The answer tells the sender to forget the
// delivery, so the commit is on disk before it.
const receive = `
WITH old AS MATERIALIZED (
    SELECT body_sha256 = $3::bytea AS same FROM "postroom".webhook_receipts
     WHERE endpoint = $1::text AND delivery_id = $2::text
    UNION ALL
    SELECT true FROM "postroom".webhook_receipts
     WHERE $4::boolean AND endpoint = $1::text AND unsigned_id AND body_sha256 = $3::bytea AND delivery_id <> $2::text
), ins AS (
    INSERT INTO "postroom".webhook_receipts (endpoint, delivery_id, body_sha256, unsigned_id, message_id, secret, sent_at,
                                             header_names, header_values, body)
    SELECT $1::text, $2::text, $3::bytea, $4::boolean, $5::text, $6::text, $7::timestamptz, $8::bytea[], $9::bytea[], $10::bytea
     WHERE NOT EXISTS (SELECT FROM old)
        ON CONFLICT DO NOTHING
 RETURNING 1
)
SELECT (SELECT count(*) FROM ins) > 0, (SELECT bool_and(same) FROM old),
       CASE current_setting('synchronous_commit') WHEN 'off' THEN set_config('synchronous_commit', 'on', true) END`

const keepConflict = `
INSERT INTO "postroom".webhook_conflicts (endpoint, delivery_id, body_sha256, secret, sent_at, header_names, header_values, body)
VALUES ($1, $2, $3, $4, $5, $6, $7, $8)
    ON CONFLICT DO NOTHING`

// receiveTries is how often it is looked whose receipt was committed meanwhile.
const receiveTries = 3

// errKey says that Config.Key, or what it returned, is at fault.
var errKey = errors.New("the message cannot be made")

func (h *Handler) takeInTime(ctx context.Context, header http.Header, body []byte, proof Proof) (outcome, error) {
	ctx, cancel := context.WithTimeout(ctx, h.cfg.Timeout)
	defer cancel()
	return h.take(ctx, header, body, proof)
}

// take keeps a proven delivery, and writes its message, in one transaction.
func (h *Handler) take(ctx context.Context, header http.Header, body []byte, proof Proof) (outcome, error) {
	ctx = postroom.WithOperation(ctx, postroom.Operation{Kind: "receipt", Scope: h.endpoint, Key: proof.ID})
	message, err := h.message(header, body)
	if err != nil {
		return 0, err
	}
	message.Identify(ctx)
	if err := message.Validate(0); err != nil {
		return 0, fmt.Errorf("%w: %w", errKey, err)
	}
	var sent *time.Time
	if !proof.Sent.IsZero() {
		sent = &proof.Sent
	}
	sum := sha256.Sum256(body)
	names, values := kept(header)
	if body == nil {
		body = []byte{}
	}
	for range receiveTries {
		var result outcome
		err := pgx.BeginTxFunc(ctx, h.pool, pgx.TxOptions{IsoLevel: pgx.ReadCommitted}, func(tx pgx.Tx) error {
			var inserted bool
			var same *bool
			err := tx.QueryRow(ctx, h.receive, h.endpoint, proof.ID, sum[:], proof.Unsigned, message.ID, proof.Secret, sent,
				names, values, body).Scan(&inserted, &same, nil)
			switch {
			case err != nil:
				return err
			case inserted:
				result = taken
				return h.box.Write(ctx, tx, message)
			case same == nil:
				return nil
			case *same:
				result = repeated
				return nil
			}
			result = conflicting
			_, err = tx.Exec(ctx, h.conflict, h.endpoint, proof.ID, sum[:], proof.Secret, sent, names, values, body)
			return err
		})
		if err != nil || result != 0 {
			return result, err
		}
	}
	return 0, errors.New("a receipt of the delivery comes and goes")
}

// message is what the outbox gets.
func (h *Handler) message(header http.Header, body []byte) (postroom.Message, error) {
	m := postroom.Message{Topic: h.topic, Payload: body}
	if h.cfg.Key != nil {
		key, err := h.cfg.Key(header, body)
		if err != nil {
			return m, fmt.Errorf("%w: Config.Key: %w", errKey, err)
		}
		m.Key = key
	}
	for _, name := range h.cfg.Headers {
		for _, value := range header.Values(name) {
			m.Headers = append(m.Headers, postroom.Header{Name: name, Value: []byte(value)})
		}
	}
	return m, nil
}

// kept returns the header fields that a receipt keeps: all but those by which the
// sender, or a proxy, logs in.
func kept(header http.Header) (names, values [][]byte) {
	names, values = [][]byte{}, [][]byte{}
	for _, name := range slices.Sorted(maps.Keys(header)) {
		switch name {
		case "Authorization", "Cookie", "Proxy-Authorization":
			continue
		}
		for _, value := range header[name] {
			names, values = append(names, []byte(name)), append(values, []byte(value))
		}
	}
	return names, values
}
