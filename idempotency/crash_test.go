package idempotency_test

import (
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/postroom/postroom/idempotency"
)

// A connection that is lost at any statement, in any way, leaves one effect, one
// answer, and a key that soon can be used.
func TestLostConnections(t *testing.T) {
	base := newPool(t)
	for _, text := range []string{atClaim, atTakeOver, atBegin, atComplete} {
		for _, how := range []cut{before, after, amid} {
			t.Run(fmt.Sprintf("%s %d", strings.Trim(text, ")(, "), how), func(t *testing.T) {
				mustExec(t, base, `TRUNCATE payments, postroom.idempotency_keys, postroom.idempotency_answers`)
				p, pool := newProxy(t, base, 4)
				failing := text == atTakeOver // there is nothing to take over before
				a := serve(t, pool, idempotency.Config{Lease: 30 * time.Second}, func(w http.ResponseWriter, r *http.Request) {
					if failing {
						w.WriteHeader(500)
						return
					}
					pay(w, r)
				})
				if failing {
					a.post("k1", "x").want(t, 500, "")
					failing = false
					a.runs.Store(0)
				}
				p.cutAt(text, how, 1)
				first := a.post("k1", "x")
				p.mu.Lock()
				if p.left != 0 {
					t.Error("nothing was cut")
				}
				p.mu.Unlock()
				switch {
				case how != amid && (text == atClaim || text == atTakeOver), text == atComplete && how == after:
					if first.status != 201 || first.replayed() {
						t.Errorf("answer %+v", first)
					}
				case first.status != 503 && first.status != 201 || first.replayed():
					t.Errorf("answer %+v", first)
				}
				if first.status == 503 && first.header.Get("Retry-After") == "" {
					t.Error("there is no Retry-After")
				}
				var again reply
				eventually(t, "a repeat", func() bool {
					again = a.post("k1", "x")
					return again.status == 201
				})
				if first.status == 201 && (!again.replayed() || again.body != first.body) {
					t.Errorf("first %+v, repeat %+v", first, again)
				}
				wantStrings(t, "payments", payments(t, base), "x")
				wantStrings(t, "keys", states(t, base), "k1 completed")
			})
		}
	}
}

// Where the outcome of a COMMIT cannot be found out, the answer says so, and a
// repeat finds it.
func TestCommitThatCannotBeSettled(t *testing.T) {
	base := newPool(t)
	p, pool := newProxy(t, base, 1) // so that no other connection is open
	a := serve(t, pool, idempotency.Config{}, pay)
	p.mu.Lock()
	p.at = func(s string) cut {
		if s != atComplete {
			return never
		}
		p.away = true
		return after
	}
	p.mu.Unlock()
	got := a.post("k1", "x") // after the time for settling
	got.want(t, 503, "idempotency-store-unavailable")
	p.cutAt("", never, 0)
	p.setAway(false)
	eventually(t, "the stored answer", func() bool { got = a.post("k1", "x"); return got.status == 201 })
	if !got.replayed() {
		t.Errorf("repeat %+v", got)
	}
	wantStrings(t, "payments", payments(t, base), "x")
}

// Row 7: without the database nothing runs, unless that was asked for.
func TestDatabaseAway(t *testing.T) {
	base := newPool(t)
	p, pool := newProxy(t, base, 4)
	closed := serve(t, pool, idempotency.Config{QueueTimeout: time.Second}, pay)
	open := serve(t, pool, idempotency.Config{QueueTimeout: time.Second, FailOpen: true}, func(_ http.ResponseWriter, r *http.Request) {
		if body, err := io.ReadAll(r.Body); err != nil || string(body) != "x" {
			t.Errorf("body %q, %v", body, err)
		}
		if idempotency.Tx(r.Context()) != nil {
			t.Error("there is a transaction")
		}
	})
	p.setAway(true)
	got := closed.post("k1", "x")
	got.want(t, 503, "idempotency-store-unavailable")
	if got.header.Get("Retry-After") == "" {
		t.Error("there is no Retry-After")
	}
	closed.wantRuns(0)
	open.post("k1", "x").want(t, 200, "")
	open.wantRuns(1)
}

// Row 21: the holder's backend is killed. Its key is free at once, since the holder
// lives to release it.
func TestKilledBackend(t *testing.T) {
	pool := newPool(t)
	entered, leave := make(chan int), make(chan int)
	a := serve(t, pool, idempotency.Config{Lease: 30 * time.Second}, func(w http.ResponseWriter, r *http.Request) {
		note(r.Context(), "lost")
		entered <- 0
		<-leave
		w.WriteHeader(201)
	})
	done := a.start(ask{key: "k1", body: "x"})
	receive(t, "the handler", entered)
	mustExec(t, pool, `SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE state = 'idle in transaction' AND datname = current_database()`)
	leave <- 0
	receive(t, "the answer", done).want(t, 503, "idempotency-store-unavailable")
	wantStrings(t, "payments", payments(t, pool))
	done = a.start(ask{key: "k1", body: "x"})
	receive(t, "the handler again", entered)
	leave <- 0
	receive(t, "the answer", done).want(t, 201, "")
	wantStrings(t, "payments", payments(t, pool), "lost")
}

// A restart of the server, which leaves the pool with dead connections, is not
// seen by requests after it.
func TestDeadConnectionsInThePool(t *testing.T) {
	base := newPool(t)
	pool := sized(t, base, 6)
	kill := func() {
		var conns []*pgxpool.Conn
		for range 6 {
			c, err := pool.Acquire(t.Context())
			if err != nil {
				t.Fatal(err)
			}
			conns = append(conns, c)
		}
		for _, c := range conns {
			mustExec(t, base, `SELECT pg_terminate_backend($1)`, int32(c.Conn().PgConn().PID()))
			c.Release()
		}
	}
	usual := serve(t, pool, idempotency.Config{Optional: true}, pay)
	twoPhase := serve(t, pool, idempotency.Config{TwoPhase: true}, func(w http.ResponseWriter, r *http.Request) {
		kill()
		begun(w, r)
	})
	usual.post("before", "1").want(t, 201, "")
	for _, key := range []string{"before", "after", ""} {
		kill()
		usual.post(key, "1").want(t, 201, "")
	}
	kill()
	twoPhase.post("two-phase", "2").want(t, 201, "")
	twoPhase.wantRuns(1)
	wantStrings(t, "payments", payments(t, base), "1", "1", "1", "2")
}

const childURL = "POSTROOM_TEST_IDEMPOTENCY_CHILD"

// TestChild is the process that TestCase_B89_KilledProcess kills.
func TestChild(t *testing.T) {
	url := os.Getenv(childURL)
	if url == "" {
		return // nothing to test in the parent
	}
	pool, err := pgxpool.New(t.Context(), url)
	if err != nil {
		t.Fatal(err)
	}
	a := serve(t, pool, idempotency.Config{Lease: 500 * time.Millisecond}, func(_ http.ResponseWriter, r *http.Request) {
		note(r.Context(), "child")
		fmt.Println("IN THE HANDLER")
		select {}
	})
	a.post("k1", "x")
}

// A process that dies in its handler leaves no effect, and its key is free when
// the lease has ended.
func TestCase_B89_KilledProcess(t *testing.T) {
	pool := newPool(t)
	child := exec.CommandContext(t.Context(), os.Args[0], "-test.run=^TestChild$")
	child.Env = append(os.Environ(), childURL+"="+urlOf(pool))
	out, err := child.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := child.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = child.Process.Kill() })
	var said strings.Builder
	buf := make([]byte, 1024)
	for !strings.Contains(said.String(), "IN THE HANDLER") {
		n, err := out.Read(buf)
		said.Write(buf[:n])
		if err != nil {
			t.Fatalf("child: %v\n%s", err, said.String())
		}
	}
	a := serve(t, pool, idempotency.Config{}, pay)
	a.post("k1", "x").want(t, 409, "idempotency-in-flight")
	_ = child.Process.Kill()
	_ = child.Wait()
	eventually(t, "the lease's end", func() bool { return a.post("k1", "x").status == 201 })
	a.wantRuns(1)
	wantStrings(t, "payments", payments(t, pool), "x")
}

func urlOf(pool *pgxpool.Pool) string {
	c := pool.Config().ConnConfig
	return fmt.Sprintf("postgres://%s:%s@%s/%s?sslmode=disable", c.User, c.Password,
		net.JoinHostPort(c.Host, fmt.Sprint(c.Port)), c.Database)
}

// A holder that the network has cut off is noticed by the server, which frees its
// row: by the handler's time, not by TCP's.
func TestSilentHolder(t *testing.T) {
	pool := newPool(t)
	leave := make(chan int)
	a := serve(t, pool, idempotency.Config{Timeout: 50 * time.Millisecond, Lease: 10 * time.Millisecond}, func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Query().Has("silent") {
			note(r.Context(), "silent")
			<-leave // whatever its context says
		}
		w.WriteHeader(201)
	})
	done := a.start(ask{key: "k1", path: "/payments?silent"})
	eventually(t, "the end of its transaction", func() bool {
		return len(query(t, pool, `SELECT 'x' FROM pg_stat_activity WHERE state = 'idle in transaction' AND datname = current_database()`)) == 0 &&
			a.runs.Load() == 1
	})
	mustExec(t, pool, `UPDATE postroom.idempotency_keys SET fence = 1`) // another has taken it over
	close(leave)
	receive(t, "the answer", done).want(t, 409, "idempotency-in-flight")
	wantStrings(t, "payments", payments(t, pool))
}

// Case 31: a client that goes, at any time, changes nothing for the request. The
// server notices as soon as the body has been read.
func TestDisconnects(t *testing.T) {
	pool := newPool(t)
	for _, stage := range []string{"in the handler", "before the commit", "before the answer"} {
		t.Run(stage, func(t *testing.T) {
			mustExec(t, pool, `TRUNCATE payments, postroom.idempotency_keys, postroom.idempotency_answers`)
			entered, leave := make(chan int), make(chan error)
			a := serve(t, pool, idempotency.Config{}, func(w http.ResponseWriter, r *http.Request) {
				if stage == "in the handler" {
					entered <- 0
					<-leave
				}
				note(r.Context(), "x")
				if stage == "before the commit" {
					entered <- 0
					<-leave
				}
				if r.Context().Err() != nil {
					t.Errorf("the handler's context: %v", r.Context().Err())
				}
				_, _ = w.Write(make([]byte, 1<<19)) // more than a dead connection takes
				if stage == "before the answer" {
					entered <- 0
					<-leave
				}
			})
			ctx, cancel := context.WithCancel(t.Context())
			gone := make(chan error, 1)
			go func() {
				_, err := a.try(ctx, ask{key: "k1", body: "x"})
				gone <- err
			}()
			receive(t, "the handler", entered)
			cancel()
			if err := receive(t, "the client's end", gone); err == nil {
				t.Error("the client did not go")
			}
			leave <- nil
			eventually(t, "the stored answer", func() bool { got := a.post("k1", "x"); return got.status == 200 && got.replayed() })
			a.wantRuns(1)
			wantStrings(t, "payments", payments(t, pool), "x")
		})
	}
	t.Run("before the claim", func(t *testing.T) {
		base := newPool(t)
		pool := sized(t, base, 1)
		a := serve(t, pool, idempotency.Config{}, pay)
		conn, err := pool.Acquire(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithCancel(t.Context())
		gone := make(chan error, 1)
		go func() {
			_, err := a.try(ctx, ask{key: "k1", body: "x"})
			gone <- err
		}()
		eventually(t, "a request that waits", func() bool {
			return pool.Stat().EmptyAcquireCount() > 0 || strings.Contains(string(stacks()), "pgxpool.(*Pool).Acquire")
		})
		cancel()
		if err := receive(t, "the client's end", gone); err == nil {
			t.Error("the client did not go")
		}
		eventually(t, "the request's end", func() bool { return !strings.Contains(string(stacks()), "pgxpool.(*Pool).Acquire") })
		conn.Release()
		wantStrings(t, "keys", states(t, base))
		a.wantRuns(0)
	})
}

// A handler's time ends its statements; what it answers then counts.
func TestTimeout(t *testing.T) {
	pool := newPool(t)
	a := serve(t, pool, idempotency.Config{Timeout: time.Second}, func(w http.ResponseWriter, r *http.Request) {
		note(r.Context(), "x")
		if _, err := idempotency.Tx(r.Context()).Exec(r.Context(), `SELECT pg_sleep(60)`); err == nil {
			t.Error("the statement did not end")
		}
		w.WriteHeader(504)
	})
	a.post("k1", "x").want(t, 504, "")
	wantStrings(t, "payments", payments(t, pool))
	eventually(t, "the release", func() bool { return states(t, pool)[0] == "k1 released" })
}
