package dispatcher

import (
	"context"
	"fmt"
)

// checkServer reads what the cursor's rules rest on.
const checkServer = `
SELECT current_setting('server_version_num')::int4, pg_is_in_recovery(),
       coalesce((SELECT s.seqcache FROM pg_catalog.pg_sequence s
                  WHERE s.seqrelid = to_regclass('"postroom".outbox_messages_id_seq')), 0)`

// A SetupError says what a person must mend before the dispatcher can work.
// [Dispatcher.Run] returns it.
type SetupError struct{ Problem string }

func (e *SetupError) Error() string { return "dispatcher: " + e.Problem }

// checkServer returns a [*SetupError] for what must be mended, and any other
// error where the server cannot be asked.
func (d *Dispatcher) checkServer(ctx context.Context) error {
	var version int
	var recovery bool
	var cache int64
	if err := d.pool.QueryRow(ctx, d.sql.check).Scan(&version, &recovery, &cache); err != nil {
		return err
	}
	switch {
	case version < 140000:
		return &SetupError{fmt.Sprintf("the server is PostgreSQL %d, want 14 or later", version/10000)}
	case recovery:
		return &SetupError{"the server is a standby in recovery, whose snapshots omit running transactions: connect to the primary (target_session_attrs=read-write)"}
	case cache == 0:
		return &SetupError{fmt.Sprintf("schema %q holds no Postroom tables: run migrations.Up", d.cfg.Schema)}
	case cache != 1:
		return &SetupError{fmt.Sprintf("sequence outbox_messages_id_seq has CACHE %d, which breaks the order of keys: ALTER SEQUENCE %q.outbox_messages_id_seq CACHE 1", cache, d.cfg.Schema)}
	}
	return d.checkLanes(ctx)
}

// checkLanes reads the newest generation of lanes, and the one that messages
// are written to. Rows that are copied into a fresh schema leave its columns'
// defaults behind.
const checkLanes = `
SELECT g.generation, g.lanes, coalesce((g.generation, g.lanes) = (
       SELECT max(d.value) FILTER (WHERE d.name = 'generation'), max(d.value) FILTER (WHERE d.name = 'lanes')
         FROM (SELECT a.attname AS name, substring(pg_get_expr(f.adbin, f.adrelid) FROM '[0-9]+')::int4 AS value
                 FROM pg_catalog.pg_attribute a
                 JOIN pg_catalog.pg_attrdef f ON f.adrelid = a.attrelid AND f.adnum = a.attnum
                WHERE a.attrelid = '"postroom".outbox_messages'::regclass AND a.attname IN ('generation', 'lanes')) d), false)
  FROM "postroom".outbox_generations g
 ORDER BY g.generation DESC LIMIT 1`

func (d *Dispatcher) checkLanes(ctx context.Context) error {
	var generation, lanes int
	var same bool
	err := d.pool.QueryRow(ctx, d.sql.checkLanes).Scan(&generation, &lanes, &same)
	if err != nil || same {
		return err
	}
	return &SetupError{fmt.Sprintf("messages are not written to the newest lanes, as after rows were copied into a fresh schema: "+
		"ALTER TABLE %q.outbox_messages ALTER COLUMN generation SET DEFAULT %d, ALTER COLUMN lanes SET DEFAULT %d", d.cfg.Schema, generation, lanes)}
}
