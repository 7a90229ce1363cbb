package migrations_test

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/postroom/postroom/internal/pgtest"
	"github.com/postroom/postroom/migrations"
)

// versions are those of the files, in order.
func versions(t *testing.T) (all []int) {
	t.Helper()
	names, err := fs.Glob(migrations.Files(), "*.sql")
	if err != nil {
		t.Fatal(err)
	}
	for i := range names {
		all = append(all, i+1)
	}
	if len(all) == 0 {
		t.Fatal("Files has no file")
	}
	return all
}

func versionsOf(ms []migrations.Migration) (all []int) {
	for _, m := range ms {
		all = append(all, m.Version)
	}
	return all
}

func TestFilesAreNumberedWithoutGap(t *testing.T) {
	names, err := fs.Glob(migrations.Files(), "*")
	if err != nil {
		t.Fatal(err)
	}
	for i, name := range names {
		if prefix := fmt.Sprintf("%04d_", i+1); !strings.HasPrefix(name, prefix) || !strings.HasSuffix(name, ".sql") {
			t.Errorf("file %d is %q, want %sNAME.sql", i+1, name, prefix)
		}
	}
}

func TestUpTwice(t *testing.T) {
	pgtest.Each(t, func(t *testing.T, db *pgtest.Server) {
		pool := db.Empty(t)
		if got, want := versionsOf(up(t, pool, migrations.Config{})), versions(t); !slices.Equal(got, want) {
			t.Errorf("first Up applied %v, want %v", got, want)
		}
		before := describe(t, pool, "postroom")
		if got := up(t, pool, migrations.Config{}); len(got) != 0 {
			t.Errorf("second Up applied %v, want nothing", got)
		}
		if after := describe(t, pool, "postroom"); !slices.Equal(before, after) {
			t.Errorf("second Up changed the schema from\n%q to\n%q", before, after)
		}
	})
}

func TestConcurrentUps(t *testing.T) {
	pgtest.Each(t, func(t *testing.T, db *pgtest.Server) {
		pool := db.Empty(t)
		var wg sync.WaitGroup
		applied := make([][]int, 20)
		errs := make([]error, len(applied))
		for i := range applied {
			wg.Go(func() {
				var ms []migrations.Migration
				ms, errs[i] = migrations.Up(t.Context(), pool, migrations.Config{})
				applied[i] = versionsOf(ms)
			})
		}
		wg.Wait()
		if err := errors.Join(errs...); err != nil {
			t.Fatal(err)
		}
		// One call did it all, the others found nothing to do.
		if got, want := slices.Concat(applied...), versions(t); !slices.Equal(got, want) {
			t.Errorf("20 concurrent Ups applied %v together, want %v", got, want)
		}
	})
}

func TestStatus(t *testing.T) {
	pgtest.Each(t, func(t *testing.T, db *pgtest.Server) {
		pool := db.Empty(t)
		check := func(when string, wantApplied bool, want []int) {
			t.Helper()
			all, err := migrations.Status(t.Context(), pool, migrations.Config{})
			if err != nil {
				t.Fatalf("%s: %v", when, err)
			}
			if got := versionsOf(all); !slices.Equal(got, want) {
				t.Errorf("%s: Status lists %v, want %v", when, got, want)
			}
			for _, m := range all {
				known := slices.Contains(versions(t), m.Version)
				if (m.Name != "") != known {
					t.Errorf("%s: version %d has the name %q", when, m.Version, m.Name)
				}
				if age := time.Since(m.Applied).Abs(); wantApplied != !m.Applied.IsZero() || wantApplied && age > time.Hour {
					t.Errorf("%s: version %d applied at %v", when, m.Version, m.Applied)
				}
			}
		}
		check("empty database", false, versions(t))
		if schemas := count(t, pool, `SELECT count(*) FROM pg_namespace WHERE nspname = 'postroom'`); schemas != 0 {
			t.Error("Status made the schema")
		}
		exec(t, pool, `CREATE SCHEMA "postroom"`)
		check("empty schema", false, versions(t))

		up(t, pool, migrations.Config{})
		check("migrated", true, versions(t))

		exec(t, pool, `INSERT INTO "postroom".migrations (version, name) VALUES (9999, 'later')`)
		check("later version", true, append(versions(t), 9999))
		if got := up(t, pool, migrations.Config{}); len(got) != 0 {
			t.Errorf("Up under a later version applied %v, want nothing", got)
		}
	})
}

// oddSchemas are names that break careless quoting.
var oddSchemas = []string{
	"Upper Case",
	`two "quotes" in it`,
	`it's`,
	`'`,
	`"`,
	`"postroom"`,
	"dollar$$name",
	"dot.ted",
	"per%cent %d %[1]d",
	`back\slash`,
	"select",
	"ünïcode",
	strings.Repeat("x", 63),
}

func TestSchemasSideBySide(t *testing.T) {
	pgtest.Each(t, func(t *testing.T, db *pgtest.Server) {
		pool := db.New(t) // the schema "postroom" is one of them
		want := describe(t, pool, "postroom")
		for _, schema := range oddSchemas {
			t.Run(schema, func(t *testing.T) {
				cfg := migrations.Config{Schema: schema, Lanes: 3}
				if got := versionsOf(up(t, pool, cfg)); !slices.Equal(got, versions(t)) {
					t.Errorf("Up applied %v, want %v", got, versions(t))
				}
				if got := describe(t, pool, schema); !slices.Equal(got, want) {
					t.Errorf("schema %q has\n%q, want\n%q", schema, got, want)
				}
				status, err := migrations.Status(t.Context(), pool, cfg)
				if err != nil {
					t.Fatal(err)
				}
				for _, m := range status {
					if m.Applied.IsZero() {
						t.Errorf("Status says that %d is not applied", m.Version)
					}
				}
				writeAndRead(t, pool, schema, 3)
			})
		}
		writeAndRead(t, pool, "postroom", 4)
	})
}

// writeAndRead inserts with the columns' defaults, which name the schema, too.
func writeAndRead(t *testing.T, pool *pgxpool.Pool, schema string, lanes int) {
	t.Helper()
	q := pgx.Identifier{schema}.Sanitize()
	var lane, origin int64
	row := pool.QueryRow(t.Context(), `INSERT INTO `+q+`.outbox_messages (hash, message_id, topic)
		VALUES (7, 'm', 't') RETURNING lane, origin`)
	if err := row.Scan(&lane, &origin); err != nil {
		t.Fatal(err)
	}
	if want := int64(1000 + 7%lanes); lane != want {
		t.Errorf("a message of hash 7 is in lane %d of %d, want %d", lane, lanes, want)
	}
	if n := count(t, pool, `SELECT count(*) FROM `+q+`.outbox_messages`); n != 1 {
		t.Errorf("%d messages in schema %q, want 1", n, schema)
	}
	if n := count(t, pool, `SELECT count(*) FROM `+q+`.outbox_lanes`); n != lanes {
		t.Errorf("%d lanes in schema %q, want %d", n, schema, lanes)
	}
}

// As another migration tool would: whole files, one transaction each.
func TestFilesRunByHand(t *testing.T) {
	pgtest.Each(t, func(t *testing.T, db *pgtest.Server) {
		want := describe(t, db.New(t), "postroom")
		for _, schema := range []string{"postroom", "other tool's"} {
			t.Run(schema, func(t *testing.T) {
				pool := db.Empty(t)
				q := pgx.Identifier{schema}.Sanitize()
				exec(t, pool, `CREATE SCHEMA IF NOT EXISTS `+q)
				names, err := fs.Glob(migrations.Files(), "*.sql")
				if err != nil {
					t.Fatal(err)
				}
				for _, name := range names {
					sql, err := fs.ReadFile(migrations.Files(), name)
					if err != nil {
						t.Fatal(err)
					}
					runByHand(t, pool, name, inSchema(string(sql), q))
				}
				if got := describe(t, pool, schema); !slices.Equal(got, withoutMigrations(want)) {
					t.Errorf("by hand:\n%q, by Up:\n%q", got, withoutMigrations(want))
				}
				writeAndRead(t, pool, schema, 4)
			})
		}
	})
}

// inSchema does what the package comment tells users to do. Inside a string
// literal, as nextval's, SQL wants a single quote doubled.
func inSchema(sql, quoted string) string {
	sql = strings.ReplaceAll(sql, `'"postroom"`, `'`+strings.ReplaceAll(quoted, `'`, `''`))
	return strings.ReplaceAll(sql, `"postroom"`, quoted)
}

// runByHand uses the simple protocol, as psql does.
func runByHand(t *testing.T, pool *pgxpool.Pool, name, sql string) {
	t.Helper()
	err := pool.AcquireFunc(t.Context(), func(conn *pgxpool.Conn) error {
		return pgx.BeginFunc(t.Context(), conn, func(tx pgx.Tx) error {
			_, err := tx.Conn().PgConn().Exec(t.Context(), sql).ReadAll()
			return err
		})
	})
	if err != nil {
		t.Fatalf("%s: %v", name, err)
	}
}

func TestConfigProblemsAreReportedTogether(t *testing.T) {
	tests := []struct {
		cfg  migrations.Config
		want []string
	}{
		{migrations.Config{Schema: strings.Repeat("x", 64), Lanes: -1}, []string{"Config.Schema", "64 bytes", "Config.Lanes is -1", "1 to 256"}},
		{migrations.Config{Schema: "a\x00b", Lanes: 257}, []string{"Config.Schema", "zero byte", "Config.Lanes is 257"}},
		{migrations.Config{Schema: "\xff"}, []string{"Config.Schema", "UTF-8"}},
	}
	for _, tt := range tests {
		// No pool: a wrong Config is noticed before one is used.
		_, upErr := migrations.Up(t.Context(), nil, tt.cfg)
		_, statusErr := migrations.Status(t.Context(), nil, tt.cfg)
		for _, err := range []error{upErr, statusErr} {
			for _, want := range tt.want {
				if err == nil || !strings.Contains(err.Error(), want) {
					t.Errorf("Config %+v: error %v, want one that says %q", tt.cfg, err, want)
				}
			}
		}
	}
}

func TestUpWithoutTheRightToCreate(t *testing.T) {
	pgtest.Each(t, func(t *testing.T, db *pgtest.Server) {
		pool := db.New(t)
		limited := asLimitedUser(t, db, pool)
		if got := up(t, limited, migrations.Config{}); len(got) != 0 {
			t.Errorf("Up applied %v, want nothing", got)
		}
		_, err := migrations.Up(t.Context(), limited, migrations.Config{Schema: "another"})
		if pgErr, ok := errors.AsType[*pgconn.PgError](err); !ok || pgErr.Code != "42501" {
			t.Errorf("Up of a new schema by a user who may not create one: %v, want insufficient_privilege (42501)", err)
		}
	})
}

// asLimitedUser returns a pool of a user who may work with Postroom's tables
// and create nothing. The role is the server's, so the name is the database's.
func asLimitedUser(t *testing.T, db *pgtest.Server, pool *pgxpool.Pool) *pgxpool.Pool {
	t.Helper()
	cfg, err := pgxpool.ParseConfig(db.URL(pool))
	if err != nil {
		t.Fatal(err)
	}
	role := cfg.ConnConfig.Database
	exec(t, pool, `CREATE ROLE "`+role+`" NOLOGIN`)
	exec(t, pool, `GRANT USAGE ON SCHEMA "postroom" TO "`+role+`"`)
	exec(t, pool, `GRANT SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA "postroom" TO "`+role+`"`)
	cfg.ConnConfig.RuntimeParams["role"] = role
	limited, err := pgxpool.NewWithConfig(t.Context(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		limited.Close()
		for _, sql := range []string{`DROP OWNED BY "` + role + `"`, `DROP ROLE "` + role + `"`} {
			if _, err := pool.Exec(context.Background(), sql); err != nil {
				t.Errorf("%s: %v", sql, err)
			}
		}
	})
	return limited
}

func TestUpThatFailsLeavesNothing(t *testing.T) {
	pgtest.Each(t, func(t *testing.T, db *pgtest.Server) {
		pool := db.Empty(t)
		// The last file's statements run into an event trigger after all else is done.
		exec(t, pool, `CREATE FUNCTION public.refuse() RETURNS event_trigger LANGUAGE plpgsql AS $$
			BEGIN
				IF to_regclass('"postroom".idempotency_calls') IS NOT NULL THEN
					RAISE EXCEPTION 'refused by the test';
				END IF;
			END $$`)
		exec(t, pool, `CREATE EVENT TRIGGER refuse ON ddl_command_end EXECUTE FUNCTION public.refuse()`)
		_, err := migrations.Up(t.Context(), pool, migrations.Config{})
		if err == nil || !strings.Contains(err.Error(), "refused by the test") || !strings.Contains(err.Error(), "_calls") {
			t.Fatalf("Up under a trigger that refuses the last file: %v, want its error with the file's name", err)
		}
		if n := count(t, pool, `SELECT count(*) FROM pg_namespace WHERE nspname = 'postroom'`); n != 0 {
			t.Error("Up left its schema behind")
		}
		exec(t, pool, `DROP EVENT TRIGGER refuse`)
		if got := versionsOf(up(t, pool, migrations.Config{})); !slices.Equal(got, versions(t)) {
			t.Errorf("Up afterwards applied %v, want %v", got, versions(t))
		}
	})
}

// A migration that adds a table adds its name here.
func TestTables(t *testing.T) {
	want := []string{
		"idempotency_answers", "idempotency_calls", "idempotency_keys",
		"inbox_dead_letters", "inbox_versions", "migrations", "outbox_cursors", "outbox_dispatchers", "outbox_generations",
		"outbox_lanes", "outbox_messages",
		"outbox_parked", "outbox_parked_history", "outbox_scheduled", "processed_messages",
		"webhook_conflicts", "webhook_receipts",
	}
	pgtest.Each(t, func(t *testing.T, db *pgtest.Server) {
		rows, err := db.New(t).Query(t.Context(), `SELECT tablename FROM pg_tables WHERE schemaname = 'postroom' ORDER BY tablename COLLATE "C"`)
		if err != nil {
			t.Fatal(err)
		}
		got, err := pgx.CollectRows(rows, pgx.RowTo[string])
		if err != nil {
			t.Fatal(err)
		}
		if !slices.Equal(got, want) {
			t.Errorf("tables %q, want %q", got, want)
		}
	})
}

// Identifiers decide the order of a key's messages: a sequence with a cache
// gives them out in another order than they are asked for.
func TestSequenceHasNoCache(t *testing.T) {
	pgtest.Each(t, func(t *testing.T, db *pgtest.Server) {
		got := count(t, db.New(t), `SELECT seqcache FROM pg_sequence
			WHERE seqrelid = '"postroom".outbox_messages_id_seq'::regclass`)
		if got != 1 {
			t.Errorf("outbox_messages_id_seq has CACHE %d, want 1", got)
		}
	})
}

func TestLanes(t *testing.T) {
	pgtest.Each(t, func(t *testing.T, db *pgtest.Server) {
		for _, lanes := range []int{1, 4, 8, 256} {
			t.Run(fmt.Sprint(lanes), func(t *testing.T) {
				pool := db.Empty(t)
				up(t, pool, migrations.Config{Lanes: lanes})
				exec(t, pool, `INSERT INTO "postroom".outbox_messages (hash, message_id, topic)
					SELECT h, 'm' || h, 't' FROM generate_series(0, 999) h`)
				// Every message has a lane's row, and every lane gets messages.
				if n := count(t, pool, `SELECT count(*) FROM "postroom".outbox_messages m
					LEFT JOIN "postroom".outbox_lanes l USING (lane) WHERE l.lane IS NULL`); n != 0 {
					t.Errorf("%d messages are in lanes that do not exist", n)
				}
				if n := count(t, pool, `SELECT count(DISTINCT lane) FROM "postroom".outbox_messages`); n != lanes {
					t.Errorf("messages are in %d lanes, want %d", n, lanes)
				}
				if n := count(t, pool, `SELECT count(*) FROM "postroom".outbox_lanes`); n != lanes {
					t.Errorf("there are %d lanes, want %d", n, lanes)
				}
				up(t, pool, migrations.Config{Lanes: lanes%256 + 1})
				if n := count(t, pool, `SELECT count(*) FROM "postroom".outbox_lanes`); n != lanes {
					t.Errorf("a second Up turned %d lanes into %d", lanes, n)
				}
			})
		}
	})
}

func up(t *testing.T, pool *pgxpool.Pool, cfg migrations.Config) []migrations.Migration {
	t.Helper()
	ms, err := migrations.Up(t.Context(), pool, cfg)
	if err != nil {
		t.Fatal(err)
	}
	return ms
}

func exec(t *testing.T, pool *pgxpool.Pool, sql string, args ...any) {
	t.Helper()
	if _, err := pool.Exec(t.Context(), sql, args...); err != nil {
		t.Fatalf("%s: %v", sql, err)
	}
}

func count(t *testing.T, pool *pgxpool.Pool, sql string, args ...any) (n int) {
	t.Helper()
	if err := pool.QueryRow(t.Context(), sql, args...).Scan(&n); err != nil {
		t.Fatalf("%s: %v", sql, err)
	}
	return n
}
