// Package migrations creates and updates Postroom's tables.
//
// The SQL is in numbered files, see [Files], which are applied in order and
// never changed once released. [Up] applies those that are missing, in one
// transaction; it is safe when many instances start at once. Nothing in
// Postroom migrates by itself.
//
// # Other migration tools
//
// Each file is plain SQL for one transaction, forward only, and names the
// schema "postroom" in double quotes wherever it is used, and only there. A
// tool of your own may run the files as they are, after
//
//	CREATE SCHEMA IF NOT EXISTS "postroom";
//
// or with another quoted name put in its place. Such a tool keeps its own record of
// what it applied; [Up] and [Status] know only what Up did, so use one or the other.
package migrations

import (
	"context"
	"embed"
	"errors"
	"fmt"
	"hash/fnv"
	"io/fs"
	"strconv"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/postroom/postroom/internal/pg"
)

//go:embed sql/*.sql
var files embed.FS

// Files returns the numbered SQL files: "0001_outbox.sql" and so on.
func Files() fs.FS {
	sub, err := fs.Sub(files, "sql")
	if err != nil {
		panic(err) // the directory is embedded above
	}
	return sub
}

// Config adjusts [Up] and [Status]. The zero value selects the defaults.
type Config struct {
	// Schema holds Postroom's tables, and is created where it is missing. Any
	// name that PostgreSQL takes, quoted by Postroom. Default "postroom".
	Schema string

	// Lanes is the number of independent streams of the outbox that a new
	// installation gets, 1 to 256. Default 4. It changes nothing on an
	// existing one: see [SetLanes].
	Lanes int
}

// defaultLanes keeps the processors of a small machine busy: on two cores a
// dispatcher whose broker takes 2 ms a call and 10 µs a message drained 2.2 times
// as much with four lanes as with one, and with eight 1.15 times as much as with
// four, which is less than the runs differed. Each lane costs something when
// there is little to do: at 500 messages a second 1.45 statements a message with
// one, 1.7 with four, 1.8 with eight and 1.9 with 32; and buffers a poll. See
// BenchmarkLanesDrain and BenchmarkLanesTrickle in package dispatcher.
const defaultLanes = 4

func (c Config) withDefaults() (Config, error) {
	var errs []error
	schema, err := pg.Schema(c.Schema)
	if err != nil {
		errs = append(errs, fmt.Errorf("migrations: Config.%w", err))
	}
	c.Schema = schema
	if c.Lanes == 0 {
		c.Lanes = defaultLanes
	}
	if c.Lanes < 1 || c.Lanes > maxLanes {
		errs = append(errs, fmt.Errorf("migrations: Config.Lanes is %d, want 1 to %d", c.Lanes, maxLanes))
	}
	return c, errors.Join(errs...)
}

// A Migration is one numbered file.
type Migration struct {
	Version int
	Name    string    // "outbox"
	Applied time.Time // by the database's clock; zero where it is not applied
}

// Up applies the migrations that are missing and returns the versions it
// applied. When it returns nil, the schema is complete and durable; on an
// error nothing of this call remains. Concurrent calls wait for one another.
func Up(ctx context.Context, pool *pgxpool.Pool, cfg Config) ([]Migration, error) {
	cfg, err := cfg.withDefaults()
	if err != nil {
		return nil, err
	}
	var done []Migration
	err = pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
		done, err = up(ctx, tx, cfg)
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("migrations: up: %w", err)
	}
	return done, nil
}

// Status returns all migrations this program knows, with the time at which
// those that are applied were. Versions that the database has beyond these
// come last, without a name. It changes nothing.
func Status(ctx context.Context, pool *pgxpool.Pool, cfg Config) ([]Migration, error) {
	cfg, err := cfg.withDefaults()
	if err != nil {
		return nil, err
	}
	known, err := load()
	if err != nil {
		return nil, fmt.Errorf("migrations: status: %w", err)
	}
	var all []Migration
	for _, k := range known {
		all = append(all, k.Migration)
	}
	rows, err := pool.Query(ctx, inSchema(selectApplied, cfg.Schema))
	if err == nil {
		all, err = mark(all, rows)
	}
	if pgErr, ok := errors.AsType[*pgconn.PgError](err); ok && (pgErr.Code == "42P01" || pgErr.Code == "3F000") {
		return all, nil // no table or schema: nothing is applied
	}
	if err != nil {
		return nil, fmt.Errorf("migrations: status: %w", err)
	}
	return all, nil
}

const (
	// lockSchema makes concurrent starts wait for one another until commit.
	lockSchema    = `SELECT pg_advisory_xact_lock($1)`
	createApplied = `
CREATE SCHEMA IF NOT EXISTS "postroom";
CREATE TABLE IF NOT EXISTS "postroom".migrations (
    version    integer     PRIMARY KEY,
    name       text        NOT NULL,
    applied_at timestamptz NOT NULL DEFAULT clock_timestamp()
)`
	selectApplied = `SELECT version, applied_at FROM "postroom".migrations ORDER BY version`
	insertApplied = `INSERT INTO "postroom".migrations (version, name) VALUES ($1, $2)`

	// firstLanes turns the four lanes that the first file makes into another number.
	firstLanes = `
ALTER TABLE "postroom".outbox_messages ALTER COLUMN lanes SET DEFAULT %d;
UPDATE "postroom".outbox_generations SET lanes = %[1]d;
DELETE FROM "postroom".outbox_lanes;
INSERT INTO "postroom".outbox_lanes (lane, generation) SELECT 1000 + n, 1 FROM generate_series(0, %[1]d - 1) n`
)

func up(ctx context.Context, tx pgx.Tx, cfg Config) (done []Migration, err error) {
	if _, err := tx.Exec(ctx, lockSchema, lockKey(cfg.Schema)); err != nil {
		return nil, err
	}
	// Not CREATE … IF NOT EXISTS alone: it asks for the right to create.
	var exists bool
	err = tx.QueryRow(ctx, `SELECT to_regclass($1) IS NOT NULL`,
		pgx.Identifier{cfg.Schema, "migrations"}.Sanitize()).Scan(&exists)
	if err != nil {
		return nil, err
	}
	if !exists {
		if _, err := tx.Exec(ctx, inSchema(createApplied, cfg.Schema)); err != nil {
			return nil, err
		}
	}
	known, err := load()
	if err != nil {
		return nil, err
	}
	rows, err := tx.Query(ctx, inSchema(selectApplied, cfg.Schema))
	if err != nil {
		return nil, err
	}
	marked, err := mark(migrationsOf(known), rows)
	if err != nil {
		return nil, err
	}
	for i, k := range known {
		if !marked[i].Applied.IsZero() {
			continue
		}
		if _, err := tx.Exec(ctx, inSchema(k.sql, cfg.Schema)); err != nil {
			return nil, fmt.Errorf("%04d_%s: %w", k.Version, k.Name, err)
		}
		if k.Version == 1 && cfg.Lanes != defaultLanes {
			if _, err := tx.Exec(ctx, inSchema(fmt.Sprintf(firstLanes, cfg.Lanes), cfg.Schema)); err != nil {
				return nil, fmt.Errorf("lanes: %w", err)
			}
		}
		if _, err := tx.Exec(ctx, inSchema(insertApplied, cfg.Schema), k.Version, k.Name); err != nil {
			return nil, err
		}
		done = append(done, k.Migration)
	}
	return done, nil
}

type file struct {
	Migration
	sql string
}

func migrationsOf(fs []file) []Migration {
	var ms []Migration
	for _, f := range fs {
		ms = append(ms, f.Migration)
	}
	return ms
}

// load reads the embedded files; fs.ReadDir sorts them by name.
func load() ([]file, error) {
	entries, err := fs.ReadDir(files, "sql")
	if err != nil {
		return nil, err
	}
	var all []file
	for _, e := range entries {
		number, name, ok := strings.Cut(strings.TrimSuffix(e.Name(), ".sql"), "_")
		version, err := strconv.Atoi(number)
		if !ok || err != nil {
			return nil, fmt.Errorf("file name %q is not NUMBER_NAME.sql", e.Name())
		}
		sql, err := fs.ReadFile(files, "sql/"+e.Name())
		if err != nil {
			return nil, err
		}
		all = append(all, file{Migration{Version: version, Name: name}, string(sql)})
	}
	return all, nil
}

// mark fills in Applied, and appends versions that this program does not know.
func mark(all []Migration, rows pgx.Rows) ([]Migration, error) {
	index := make(map[int]int, len(all))
	for i, m := range all {
		index[m.Version] = i
	}
	var version int
	var at time.Time
	_, err := pgx.ForEachRow(rows, []any{&version, &at}, func() error {
		if i, ok := index[version]; ok {
			all[i].Applied = at
		} else {
			all = append(all, Migration{Version: version, Applied: at})
		}
		return nil
	})
	return all, err
}

func inSchema(sql, schema string) string {
	return pg.InSchema(sql, schema)
}

// lockKey is database-wide, so it depends on the schema.
func lockKey(schema string) int64 {
	h := fnv.New64a()
	_, _ = h.Write([]byte("postroom migrations " + schema)) // never fails
	return int64(h.Sum64())
}
