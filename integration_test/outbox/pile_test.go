package outbox_test

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"runtime"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/postroom/postroom"
	"github.com/postroom/postroom/broker"
)

var pileFlag = flag.Int("pile", 10_000, "how many messages pile up for a topic that is away")

// pileKeys is the number of keys of the pile.
const pileKeys = 1000

// half is a publisher of which one topic may be away. It keeps no message.
type half struct {
	away atomic.Bool // topic "lost"

	mu    sync.Mutex
	last  [pileKeys]int // the last number of each key of the pile
	lost  int           // messages of the pile that have come
	wrong string
	ages  []time.Duration // of the other topic's messages
}

func (h *half) Publish(_ context.Context, msgs []postroom.Message) []broker.Result {
	h.mu.Lock()
	defer h.mu.Unlock()
	results := make([]broker.Result, len(msgs))
	for i, m := range msgs {
		results[i].Outcome = broker.Stored
		if m.Topic != "lost" {
			h.ages = append(h.ages, time.Since(m.Time))
			continue
		}
		if h.away.Load() {
			results[i] = broker.Result{Outcome: broker.Unreachable, Scope: "lost", Err: errors.New("no such topic")}
			continue
		}
		n, err := strconv.Atoi(string(m.Payload))
		if key := n % pileKeys; err != nil || h.last[key] >= n {
			h.wrong = fmt.Sprintf("key %d: %s came after %d", key, m.Payload, h.last[key])
		} else {
			h.last[key] = n
			h.lost++
		}
	}
	return results
}

func (h *half) Close() error { return nil }

// since returns what the other topic's messages took since the last call.
func (h *half) since() (n int, p50, p99 time.Duration) {
	h.mu.Lock()
	defer h.mu.Unlock()
	ages := h.ages
	h.ages = nil
	slices.Sort(ages)
	if len(ages) == 0 {
		return 0, 0, 0
	}
	return len(ages), ages[len(ages)/2], ages[len(ages)*99/100]
}

func (h *half) came() int {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.lost
}

// TestPileOfATopicThatIsAway: while a topic is away and messages pile up for it,
// another flows as it did while both did; memory stays bounded; then the pile
// leaves in order.
func TestPileOfATopicThatIsAway(t *testing.T) {
	each(t, func(t *testing.T, s *server) {
		u := s.database(t)
		pool := connect(t, u)
		h := &half{}
		cfg := quick()
		cfg.Lease, cfg.PublishTimeout = 30*time.Second, 5*time.Second
		start(t, connect(t, u), h, cfg)

		writing, cancel := context.WithCancel(t.Context())
		var writers sync.WaitGroup
		writers.Go(func() { writeOthers(t, writing, pool) })
		defer writers.Wait()
		defer cancel()
		var heap atomic.Uint64
		writers.Go(func() { watchHeap(writing, &heap) })

		phase := func(name string, do func()) (p50, p99 time.Duration) {
			t.Helper()
			runtime.GC()
			heap.Store(0)
			h.since()
			began := time.Now()
			do()
			n, p50, p99 := h.since()
			took := time.Since(began)
			t.Logf("%-8s %8v; the other topic: %5.0f/s, p50 %v, p99 %v; heap up to %d MiB",
				name, took.Round(time.Millisecond), float64(n)/took.Seconds(), p50.Round(10*time.Microsecond), p99.Round(10*time.Microsecond), heap.Load()>>20)
			if heap.Load() > 200<<20 {
				t.Errorf("%s: the heap had %d MiB", name, heap.Load()>>20)
			}
			return p50, p99
		}
		came := func(n int) {
			t.Helper()
			eventually(t, 10*time.Minute, func() string {
				if got := h.came(); got < n {
					return fmt.Sprintf("%d of the pile have come, want %d", got, n)
				}
				return ""
			})
		}
		parked := func(n int) {
			t.Helper()
			eventually(t, 10*time.Minute, func() string {
				if got := scan[int](t, pool, `SELECT count(*) FROM "postroom".outbox_parked`); got != n {
					return fmt.Sprintf("%d messages are parked, want %d", got, n)
				}
				return ""
			})
		}
		p50, p99 := phase("flowing", func() {
			pile(t, pool, 1, *pileFlag)
			came(*pileFlag)
		})
		h.away.Store(true)
		phase("noticing", func() {
			pile(t, pool, *pileFlag+1, pileKeys) // all lanes notice
			parked(pileKeys)
		})
		away50, away99 := phase("piling", func() {
			pile(t, pool, *pileFlag+pileKeys+1, *pileFlag)
			parked(*pileFlag + pileKeys)
		})
		if away50 > 4*p50+50*time.Millisecond || away99 > 4*p99+time.Second {
			t.Errorf("the other topic's messages took %v (p50) and %v (p99) while the first was away, %v and %v before", away50, away99, p50, p99)
		}
		h.away.Store(false)
		phase("leaving", func() { came(2**pileFlag + pileKeys) })
		parked(0)
		cancel()
		writers.Wait()
		if h.wrong != "" {
			t.Error(h.wrong)
		}
	})
}

// pile writes n messages for topic "lost" with the numbers from from on, a
// hundred a transaction and up to two thousand a second.
func pile(t *testing.T, db queryer, from, n int) {
	t.Helper()
	for i := from; i < from+n; i += 100 {
		exec(t, db, `INSERT INTO "postroom".outbox_messages (hash, message_id, topic, key, payload)
			SELECT g % $3::int, 'p' || g, 'lost', 'k' || g % $3::int, convert_to(g::text, 'UTF8')
			  FROM generate_series($1::int, $2::int) g`, i, i+99, pileKeys)
		pause(t.Context(), 50*time.Millisecond)
	}
}

// writeOthers writes messages of another topic, one by one.
func writeOthers(t *testing.T, ctx context.Context, pool *pgxpool.Pool) {
	for n := 0; ctx.Err() == nil; n++ {
		m := postroom.Message{Topic: "orders", Key: itoa(n % 100), Payload: []byte(itoa(n))}
		if err := tryWrite(context.WithoutCancel(ctx), pool, m); err != nil {
			t.Errorf("write: %v", err)
			return
		}
		pause(ctx, 2*time.Millisecond)
	}
}

// watchHeap remembers the most bytes that were in use.
func watchHeap(ctx context.Context, most *atomic.Uint64) {
	var m runtime.MemStats
	for ctx.Err() == nil {
		runtime.ReadMemStats(&m)
		if m.HeapAlloc > most.Load() {
			most.Store(m.HeapAlloc)
		}
		pause(ctx, 20*time.Millisecond)
	}
}
