package idempotency_test

import (
	"fmt"
	"math/rand/v2"
	"net/http"
	"sync"
	"testing"
	"time"

	"github.com/postroom/postroom/idempotency"
)

// Clients repeat their requests until they are answered 201, three at a time for
// each key, while connections are cut at random statements, backends are killed,
// handlers fail, panic and are too slow for their lease. Each key has one effect,
// and all its answers are the same.
func TestChaos(t *testing.T) {
	for _, twoPhase := range []bool{false, true} {
		t.Run(fmt.Sprint("two-phase ", twoPhase), func(t *testing.T) {
			base := newPool(t)
			p, pool := newProxy(t, base, 6)
			cuts := 0
			p.mu.Lock()
			p.at = func(string) cut { // p.mu is held
				if rand.IntN(12) > 0 {
					return never
				}
				cuts++
				return before + cut(rand.IntN(3))
			}
			p.mu.Unlock()
			cfg := idempotency.Config{TwoPhase: twoPhase, Lease: 200 * time.Millisecond, QueueTimeout: patience}
			a := serve(t, pool, cfg, func(w http.ResponseWriter, r *http.Request) {
				if _, err := idempotency.Begin(r.Context()); err != nil {
					w.WriteHeader(503)
					return
				}
				switch rand.IntN(10) {
				case 0:
					note(r.Context(), "failed")
					w.WriteHeader(500)
					return
				case 1:
					note(r.Context(), "panicked")
					panic(http.ErrAbortHandler)
				case 2:
					<-time.After(250 * time.Millisecond) // beyond the lease
				case 3:
					_, _ = idempotency.Tx(r.Context()).Exec(r.Context(), `SELECT pg_terminate_backend(pg_backend_pid())`)
				}
				pay(w, r)
			})
			const keys, clients = 40, 3
			var mu sync.Mutex
			answers := make(map[string]map[string]int) // key → body → times
			var all sync.WaitGroup
			deadline := time.Now().Add(2 * patience)
			for n := range keys {
				key := fmt.Sprintf("k%02d", n)
				answers[key] = make(map[string]int)
				for range clients {
					all.Go(func() {
						for time.Now().Before(deadline) {
							got, err := a.try(t.Context(), ask{key: key, body: key})
							switch {
							case err == nil && got.status == 201:
								mu.Lock()
								answers[key][got.body]++
								mu.Unlock()
								return
							case err == nil && got.status != 409 && got.status != 500 && got.status != 503:
								t.Errorf("answer %d %s", got.status, got.body)
								return
							}
							<-time.After(time.Duration(rand.IntN(20)) * time.Millisecond)
						}
						t.Errorf("%s was not answered", key)
					})
				}
			}
			all.Wait()
			t.Logf("%d runs, %d cuts", a.runs.Load(), cuts)
			for key, bodies := range answers {
				if len(bodies) != 1 {
					t.Errorf("%s has the answers %v", key, bodies)
				}
			}
			if got := query(t, base, `SELECT note || ' ' || count(*) FROM payments GROUP BY note HAVING count(*) <> 1 OR note NOT LIKE 'k%'`); len(got) > 0 {
				t.Errorf("payments %q", got)
			}
			wantStrings(t, "payments", query(t, base, `SELECT count(*)::text FROM payments`), fmt.Sprint(keys))
		})
	}
}
