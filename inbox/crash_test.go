package inbox_test

import (
	"bufio"
	"context"
	"fmt"
	"os"
	osexec "os/exec"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/postroom/postroom"
	"github.com/postroom/postroom/inbox"
	"github.com/postroom/postroom/internal/pgtest"
)

// The child process of TestCase_B38 is told by these variables.
const (
	childPoint = "POSTROOM_INBOX_TEST_POINT"
	childURL   = "POSTROOM_INBOX_TEST_URL"
)

const (
	afterRecord  = "after the record is inserted"
	afterWrite   = "after the business write"
	afterReturn  = "after the handler has returned"
	duringCommit = "during COMMIT"
	afterCommit  = "after COMMIT, before the ack"
)

// A process is killed at each point; the broker, which outlives it, delivers the
// message again.
func TestCase_B38_KilledAtEachPoint(t *testing.T) {
	pgtest.Each(t, func(t *testing.T, s *pgtest.Server) {
		for _, point := range []string{afterRecord, afterWrite, afterReturn, duringCommit, afterCommit} {
			t.Run(point, func(t *testing.T) {
				pool := newPool(t, s)
				slowCommits(t, pool)
				runChild(t, s.URL(pool), point)

				bus, rec := newBus()
				publish(t, bus, message("m1"))
				start(t, pool, rec, effect, inbox.Config{})
				eventually(t, "an ack", func() bool { return rec.count("ack") == 1 })
				wantStrings(t, "effects", effects(t, pool), "m1")
				wantStrings(t, "processed", outcomes(t, pool), "billing m1 handled")
				mustHandle(t, pool, "m1", effect, inbox.Duplicate)
			})
		}
	})
}

// slowCommits makes a table whose inserts take a second of the COMMIT.
func slowCommits(t *testing.T, pool *pgxpool.Pool) {
	exec(t, pool, `CREATE TABLE slow (n int)`)
	exec(t, pool, `CREATE FUNCTION slowly() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN PERFORM pg_sleep(1); RETURN NULL; END $$`)
	exec(t, pool, `CREATE CONSTRAINT TRIGGER slow AFTER INSERT ON slow DEFERRABLE INITIALLY DEFERRED
		FOR EACH ROW EXECUTE FUNCTION slowly()`)
}

// runChild starts this program as a child that handles m1 up to the point, and
// kills it there.
func runChild(t *testing.T, url, point string) {
	t.Helper()
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	cmd := osexec.CommandContext(t.Context(), exe)
	cmd.Env = append(os.Environ(), childPoint+"="+point, childURL+"="+url)
	cmd.Stderr = os.Stderr
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	reached := make(chan string, 1)
	go func() {
		line, err := bufio.NewReader(out).ReadString('\n')
		reached <- fmt.Sprint(strings.TrimSpace(line), errText(err))
	}()
	if got := receive(t, "the child is there", reached); got != point {
		t.Errorf("the child says %q, want %q", got, point)
	}
	if err := cmd.Process.Kill(); err != nil { // SIGKILL
		t.Fatal(err)
	}
	_ = cmd.Wait()
}

func errText(err error) string {
	if err == nil {
		return ""
	}
	return ": " + err.Error()
}

// child handles m1, says when it is at the point, and waits there to be killed.
func child(point string) {
	here := func(p string) {
		if p == point {
			fmt.Println(p)
			select {}
		}
	}
	ctx := context.Background()
	cfg, err := pgxpool.ParseConfig(os.Getenv(childURL))
	if err != nil {
		panic(err)
	}
	cfg.ConnConfig.Tracer = commitTracer{here}
	pool, err := pgxpool.NewWithConfig(ctx, cfg)
	if err != nil {
		panic(err)
	}
	_, err = inbox.Handle(ctx, pool, "billing", message("m1"), func(ctx context.Context, tx pgx.Tx, m postroom.Message) error {
		here(afterRecord)
		if err := effect(ctx, tx, m); err != nil {
			return err
		}
		here(afterWrite)
		if point == duringCommit {
			if _, err := tx.Exec(ctx, `INSERT INTO slow VALUES (1)`); err != nil {
				return err
			}
			go func() {
				other, err := pgx.Connect(context.Background(), os.Getenv(childURL))
				if err != nil {
					panic(err)
				}
				for n := 0; n == 0; {
					if err := other.QueryRow(context.Background(), `SELECT count(*) FROM pg_stat_activity
						WHERE datname = current_database() AND query = 'commit' AND wait_event = 'PgSleep'`).Scan(&n); err != nil {
						panic(err)
					}
				}
				here(duringCommit)
			}()
		}
		return nil
	}, inbox.Config{})
	if err != nil {
		panic(err)
	}
	here(afterCommit)
	if point == duringCommit {
		select {}
	}
	panic("the child passed " + point)
}

type commitTracer struct{ here func(string) }

func (c commitTracer) TraceQueryStart(ctx context.Context, _ *pgx.Conn, d pgx.TraceQueryStartData) context.Context {
	if d.SQL == "commit" {
		c.here(afterReturn)
	}
	return ctx
}
func (commitTracer) TraceQueryEnd(context.Context, *pgx.Conn, pgx.TraceQueryEndData) {}
