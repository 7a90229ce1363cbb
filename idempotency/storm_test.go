package idempotency_test

import (
	"context"
	"crypto/sha256"
	"fmt"
	"net/http"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/postroom/postroom/idempotency"
)

// Row 32: of 200 requests one runs, and the others are answered while it does.
func TestCase_B88_Storm(t *testing.T) {
	base := newPool(t)
	const requests = 200
	entered, leave := make(chan int, requests), make(chan int)
	h := func(w http.ResponseWriter, r *http.Request) {
		entered <- 0
		<-leave
		pay(w, r)
	}
	// Two processes, as far as the database can tell.
	apis := []*api{
		serve(t, sized(t, base, 4), idempotency.Config{Lease: 50 * time.Millisecond}, h),
		serve(t, sized(t, base, 4), idempotency.Config{Lease: 50 * time.Millisecond}, h),
	}
	replies := make(chan reply, requests)
	var all sync.WaitGroup
	begin := time.Now()
	for i := range requests {
		all.Go(func() {
			got, err := apis[i%2].try(t.Context(), ask{key: "k1", body: "x"})
			if err != nil {
				t.Error(err)
			}
			replies <- got
		})
	}
	for range requests - 1 {
		got := receive(t, "an answer while the first runs", replies)
		got.want(t, 409, "idempotency-in-flight")
		if ra := got.header.Get("Retry-After"); ra != "1" {
			t.Errorf("Retry-After = %q", ra)
		}
	}
	t.Logf("%d answers after %v", requests-1, time.Since(begin))
	receive(t, "the handler", entered)
	// The holder has outlived its lease, and still lives.
	eventually(t, "the end of the lease", func() bool {
		return query(t, base, `SELECT (locked_until < clock_timestamp())::text FROM postroom.idempotency_keys`)[0] == "true"
	})
	for _, a := range apis {
		a.post("k1", "x").want(t, 409, "idempotency-in-flight")
	}
	close(leave)
	receive(t, "the first answer", replies).want(t, 201, "")
	all.Wait()
	if n := apis[0].runs.Load() + apis[1].runs.Load(); n != 1 {
		t.Errorf("the handler ran %d times", n)
	}
	wantStrings(t, "payments", payments(t, base), "x")
	for _, a := range apis {
		if got := a.post("k1", "x"); !got.replayed() {
			t.Errorf("repeat = %+v", got)
		}
	}
}

// Repeats are answered while slow handlers hold all connections but one, and new
// requests wait for one.
func TestRepeatsBehindSlowHandlers(t *testing.T) {
	base := newPool(t)
	leave := make(chan int)
	a := serve(t, sized(t, base, 4), idempotency.Config{QueueTimeout: patience}, func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Query().Has("slow") {
			<-leave
		}
		pay(w, r)
	})
	a.post("done", "x").want(t, 201, "")
	var all sync.WaitGroup
	for i := range 12 {
		all.Go(func() {
			got, err := a.try(t.Context(), ask{key: fmt.Sprint("slow", i), path: "/payments?slow"})
			if err != nil {
				t.Error(err)
			}
			got.want(t, 201, "")
		})
	}
	eventually(t, "three slow handlers", func() bool { return a.runs.Load() == 4 })
	var longest time.Duration
	for range 20 {
		begin := time.Now()
		if got := a.post("done", "x"); !got.replayed() {
			t.Fatalf("repeat = %+v", got)
		}
		longest = max(longest, time.Since(begin))
	}
	t.Logf("the longest of 20 repeats took %v", longest)
	if n := a.runs.Load(); n != 4 {
		t.Errorf("%d handlers ran beside three connections", n-1)
	}
	wantStrings(t, "claims", query(t, base, `SELECT count(*)::text FROM postroom.idempotency_keys`), "4")
	close(leave)
	all.Wait()
	a.wantRuns(13)
}

// A request that gets no connection in time is told to come again.
func TestNoConnection(t *testing.T) {
	base := newPool(t)
	pool := sized(t, base, 2)
	a := serve(t, pool, idempotency.Config{QueueTimeout: 50 * time.Millisecond}, pay)
	var conns []interface{ Release() }
	for range 2 {
		c, err := pool.Acquire(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		conns = append(conns, c)
	}
	got := a.post("k1", "x")
	got.want(t, 503, "idempotency-store-unavailable")
	if got.header.Get("Retry-After") != "1" {
		t.Errorf("Retry-After = %q", got.header.Get("Retry-After"))
	}
	a.wantRuns(0)
	for _, c := range conns {
		c.Release()
	}
	serve(t, pool, idempotency.Config{}, pay).post("k1", "x").want(t, 201, "")
}

// A bounded wait ends with the first one's answer, and runs if that failed.
func TestWait(t *testing.T) {
	for _, status := range []int{201, 500} {
		pool := newPool(t)
		entered, leave := make(chan int, 2), make(chan int, 2)
		a := serve(t, pool, idempotency.Config{Wait: patience}, func(w http.ResponseWriter, _ *http.Request) {
			entered <- 0
			w.WriteHeader(<-leave)
		})
		replies := make(chan reply, 2)
		var all sync.WaitGroup
		for range 2 {
			all.Go(func() {
				got, err := a.try(t.Context(), ask{key: "k1", body: "x"})
				if err != nil {
					t.Error(err)
				}
				replies <- got
			})
		}
		receive(t, "the handler", entered)
		leave <- status
		if status == 500 {
			receive(t, "the handler again", entered)
			leave <- 201
		}
		all.Wait()
		one, two := <-replies, <-replies
		if status == 201 && (one.status != 201 || two.status != 201 || one.replayed() == two.replayed()) ||
			status == 500 && one.status+two.status != 701 {
			t.Errorf("%d: answers %+v, %+v", status, one, two)
		}
	}
	pool := newPool(t)
	leave := make(chan int)
	a := serve(t, pool, idempotency.Config{Wait: 10 * time.Millisecond}, func(http.ResponseWriter, *http.Request) { <-leave })
	done := make(chan reply, 1)
	go func() {
		got, _ := a.try(context.WithoutCancel(t.Context()), ask{key: "k1"})
		done <- got
	}()
	eventually(t, "the handler", func() bool { return a.runs.Load() == 1 })
	a.post("k1", "").want(t, 409, "idempotency-in-flight")
	close(leave)
	receive(t, "the answer", done).want(t, 200, "")
}

// All leases and expiries rest on the database's clock, however far that is from
// the process's.
func TestClocksDiffer(t *testing.T) {
	for _, by := range []string{"1 hour", "-1 hour"} {
		t.Run(by, func(t *testing.T) {
			base := newPool(t)
			mustExec(t, base, `CREATE SCHEMA shifted`)
			for _, clock := range []string{"clock_timestamp", "now"} {
				mustExec(t, base, fmt.Sprintf(`CREATE FUNCTION shifted.%s() RETURNS timestamptz LANGUAGE sql VOLATILE
					AS $$ SELECT pg_catalog.%[1]s() + interval '%s' $$`, clock, by))
			}
			pool := withPool(t, base, func(c *pgxpool.Config) {
				c.ConnConfig.RuntimeParams["search_path"] = "shifted, pg_catalog, public"
			})
			entered, leave := make(chan int), make(chan int)
			a := serve(t, pool, idempotency.Config{Retention: 10 * time.Minute}, func(w http.ResponseWriter, _ *http.Request) {
				entered <- 0
				w.WriteHeader(<-leave)
			})
			for _, status := range []int{500, 201} {
				done := a.start(ask{key: "k1"})
				receive(t, "the handler", entered)
				a.post("k1", "").want(t, 409, "idempotency-in-flight")
				leave <- status
				receive(t, "the answer", done).want(t, status, "")
			}
			if got := a.post("k1", ""); !got.replayed() {
				t.Errorf("repeat = %+v", got)
			}
			answers, keys, _, err := idempotency.Cleaner{Pool: pool}.Clean(t.Context())
			if answers+keys != 0 || err != nil {
				t.Errorf("Clean = %d, %d, %v", answers, keys, err)
			}
		})
	}
}

// Requests with different keys do not disturb one another in serializable
// transactions.
func TestSerializable(t *testing.T) {
	pool := newPool(t)
	a := serve(t, pool, idempotency.Config{IsoLevel: pgx.Serializable, QueueTimeout: patience}, pay)
	const requests = 400
	var all sync.WaitGroup
	for worker := range 8 {
		all.Go(func() {
			for n := range requests / 8 {
				key := fmt.Sprintf("%x", sha256.Sum256(fmt.Appendf(nil, "%d %d", worker, n)))
				for range 2 {
					if got, err := a.try(t.Context(), ask{key: key}); err != nil || got.status != 201 {
						t.Errorf("%d %s, %v", got.status, got.body, err)
					}
				}
			}
		})
	}
	all.Wait()
	again := a.runs.Load() - requests
	if t.Logf("%d requests, %d runs more", requests, again); again > requests/20 {
		t.Errorf("%d of %d transactions were run again", again, requests)
	}
	wantStrings(t, "payments", query(t, pool, `SELECT count(*)::text FROM payments`), fmt.Sprint(requests))
}
