package inbox

import (
	"context"
	"errors"
	"fmt"

	"github.com/jackc/pgx/v5"

	"github.com/postroom/postroom"
	"github.com/postroom/postroom/internal/pg"
)

// Schema names the schema that holds Postroom's tables, for [Once] and [Newer]
// where it is not "postroom", the default, which the empty Schema means too.
type Schema string

// Once claims an action in the caller's transaction and reports whether this is
// its first claim. It is for actions that several different messages, requests or
// jobs may trigger, such as the one invoice that follows from an order's
// confirmation or from its payment:
//
//	first, err := inbox.Once(ctx, tx, "send-invoice", orderID)
//	if err != nil || !first {
//		return err
//	}
//
// The claim commits with tx or not at all, and a savepoint that is rolled back
// takes the claims behind it along. What it guards belongs into the same
// transaction.
//
// A claim waits while another transaction holds the same one: for ever, or for
// the lock_timeout of tx, which a [Handler]'s transaction has. In repeatable read
// and serializable it then fails with a serialization failure, if the other one
// has committed, and the transaction has to be run again; in a handler that
// happens by itself. Transactions that claim several actions cannot deadlock if
// they claim them in one order.
//
// scope names the kind of action and is apart from all subscribers; scope and key
// follow the rules of [postroom.CheckID]. Claims are kept as long as the records
// of messages.
func Once(ctx context.Context, tx pgx.Tx, scope, key string) (first bool, err error) {
	return Schema("").Once(ctx, tx, scope, key)
}

// Newer records version as the one of the entity that tx applies, and reports
// whether it is newer than the last one applied: the first, or a greater number.
// It is for sources that deliver the changes of an entity out of order or more
// than once, where only the newest state counts:
//
//	newer, err := inbox.Newer(ctx, tx, "customers", customerID, change.Version)
//	if err != nil || !newer {
//		return err
//	}
//
// The version is recorded with tx or not at all, savepoints included. Newer locks
// the entity until tx ends, also where it reports false, so that changes of one
// entity are applied one after the other. It waits, fails and is kept from
// deadlocks as [Once].
//
// version grows with each change: a counter, a log position, or a time, as far as
// no two changes share one. scope and entity follow the rules of
// [postroom.CheckID]. The last version of an entity is kept for ever, in the
// table inbox_versions; a row that is deleted there lets any version pass.
func Newer(ctx context.Context, tx pgx.Tx, scope, entity string, version int64) (newer bool, err error) {
	return Schema("").Newer(ctx, tx, scope, entity, version)
}

// claimOnce waits for a transaction that is claiming the same action. It inserts
// no row where one has.
const claimOnce = `
INSERT INTO "postroom".processed_messages (subscriber_id, message_id, outcome)
VALUES (' ' || $1::text, $2::text, 'once')
    ON CONFLICT DO NOTHING`

// Once is the function [Once] for the tables in s.
func (s Schema) Once(ctx context.Context, tx pgx.Tx, scope, key string) (first bool, err error) {
	if err := checkNames(scope, "key", key); err != nil {
		return false, fmt.Errorf("inbox: claim an action: %w", err)
	}
	return s.change(ctx, tx, "claim an action", claimOnce, scope, key)
}

// claimVersion locks the entity's row, and changes it where the version is newer.
const claimVersion = `
INSERT INTO "postroom".inbox_versions AS v (scope, entity, version)
VALUES ($1::text, $2::text, $3::bigint)
    ON CONFLICT (scope, entity) DO UPDATE
   SET version = excluded.version, applied_at = excluded.applied_at
 WHERE v.version < excluded.version`

// Newer is the function [Newer] for the tables in s.
func (s Schema) Newer(
	ctx context.Context, tx pgx.Tx, scope, entity string, version int64,
) (newer bool, err error) {
	if err := checkNames(scope, "entity", entity); err != nil {
		return false, fmt.Errorf("inbox: compare versions: %w", err)
	}
	return s.change(ctx, tx, "compare versions", claimVersion, scope, entity, version)
}

// checkNames puts neither name into its error's text.
func checkNames(scope, what, value string) error {
	var errs []error
	if problem := postroom.CheckID(scope); problem != "" {
		errs = append(errs, fmt.Errorf("scope %s", problem))
	}
	if problem := postroom.CheckID(value); problem != "" {
		errs = append(errs, fmt.Errorf("%s %s", what, problem))
	}
	return errors.Join(errs...)
}

// change runs a statement that changes a row or none.
func (s Schema) change(ctx context.Context, tx pgx.Tx, doing, sql string, args ...any) (changed bool, err error) {
	schema, err := pg.Schema(string(s))
	if err != nil {
		return false, fmt.Errorf("inbox: %w", err)
	}
	tag, err := tx.Exec(ctx, pg.InSchema(sql, schema), args...)
	if err != nil {
		return false, fmt.Errorf("inbox: %s: %w", doing, err)
	}
	return tag.RowsAffected() == 1, nil
}
