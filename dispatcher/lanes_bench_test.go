package dispatcher_test

import (
	"bytes"
	"context"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/postroom/postroom"
	"github.com/postroom/postroom/broker"
	"github.com/postroom/postroom/dispatcher"
	"github.com/postroom/postroom/outbox"
)

// remote is a publisher that counts and takes as long as a broker might: a
// round trip for each call, and its time for each message.
type remote struct {
	counter
	trip, each time.Duration
	arrived    func(postroom.Message)
}

func (r *remote) Publish(ctx context.Context, msgs []postroom.Message) []broker.Result {
	t := time.NewTimer(r.trip + time.Duration(len(msgs))*r.each)
	defer t.Stop()
	select {
	case <-t.C:
	case <-ctx.Done():
	}
	if r.arrived != nil {
		for _, m := range msgs {
			r.arrived(m)
		}
	}
	return r.counter.Publish(ctx, msgs)
}

// backlog writes n messages in one transaction, whose end is left to the caller.
func backlog(b *testing.B, pool *pgxpool.Pool, n int) pgx.Tx {
	b.Helper()
	tx, err := pool.Begin(b.Context())
	if err != nil {
		b.Fatal(err)
	}
	payload := bytes.Repeat([]byte(`{"a":"0123456789"},`), 27)[:500]
	var box outbox.Outbox
	const batch = 5000
	msgs := make([]postroom.Message, batch)
	for i := 0; i < n; i += batch {
		for j := range msgs {
			msgs[j] = postroom.Message{Topic: "orders", Key: fmt.Sprint("k", (i+j)*7919%10_000), Payload: payload}
		}
		if err := box.Write(b.Context(), tx, msgs...); err != nil {
			b.Fatal(err)
		}
	}
	return tx
}

// drain has dispatchers, each of which has its share already, publish a
// backlog, and reports the rate.
func drain(b *testing.B, lanes, dispatchers int, pub func() *remote) {
	const n = 150_000
	pool := withLanes(b, lanes)
	all := make([]*remote, dispatchers)
	members := make([]member, dispatchers)
	for i := range members {
		all[i] = pub()
		own, err := pgxpool.NewWithConfig(b.Context(), pool.Config())
		if err != nil {
			b.Fatal(err)
		}
		b.Cleanup(own.Close)
		members[i] = join(b, own, all[i], dispatcher.Config{})
		waitShares(b, members[:i+1], shares(lanes, i+1)...)
	}
	tx := backlog(b, pool, n)
	if _, err := pool.Exec(b.Context(), `CHECKPOINT`); err != nil {
		b.Fatal(err)
	}
	b.ResetTimer()
	began := time.Now()
	if err := tx.Commit(b.Context()); err != nil {
		b.Fatal(err)
	}
	eventually(b, time.Minute, func() string {
		var sum int64
		for _, p := range all {
			sum += p.n.Load()
		}
		if sum < n {
			return fmt.Sprint(sum)
		}
		return ""
	})
	b.ReportMetric(n/time.Since(began).Seconds(), "msg/s")
	b.StopTimer()
	for _, m := range members {
		m.stop()
	}
}

func shares(lanes, dispatchers int) (all []int) {
	for i := range dispatchers {
		all = append(all, (lanes-i+dispatchers-1)/dispatchers)
	}
	return all
}

// BenchmarkLanesDrain publishes a backlog with several numbers of lanes, to a
// publisher that is instant, and to one that takes 2 ms a call and 10 µs a
// message. One op is one backlog: use -benchtime=1x, and compare within a round.
func BenchmarkLanesDrain(b *testing.B) {
	for round := range 3 {
		for _, lanes := range []int{1, 2, 4, 8, 16, 32} {
			b.Run(fmt.Sprintf("instant/%d/%d", lanes, round), func(b *testing.B) {
				drain(b, lanes, 1, func() *remote { return &remote{} })
			})
			b.Run(fmt.Sprintf("remote/%d/%d", lanes, round), func(b *testing.B) {
				drain(b, lanes, 1, func() *remote { return &remote{trip: 2 * time.Millisecond, each: 10 * time.Microsecond} })
			})
		}
	}
}

// BenchmarkLanesTrickle writes one message each in 500 transactions a second and
// reports the statements that the dispatcher spends on a message, and the time
// from commit to publishing.
func BenchmarkLanesTrickle(b *testing.B) {
	for round := range 3 {
		for _, lanes := range []int{1, 2, 4, 8, 16, 32} {
			b.Run(fmt.Sprintf("%d/%d", lanes, round), func(b *testing.B) { trickle(b, lanes) })
		}
	}
}

func trickle(b *testing.B, lanes int) {
	const n, pause = 2000, 2 * time.Millisecond
	direct := withLanes(b, lanes)
	cfg := direct.Config()
	var count tracer
	cfg.ConnConfig.Tracer = &count
	pool, err := pgxpool.NewWithConfig(b.Context(), cfg)
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(pool.Close)
	var mu sync.Mutex
	committed := make(map[string]time.Time, n)
	var late []time.Duration
	var seen atomic.Int64
	pub := &remote{arrived: func(m postroom.Message) {
		now := time.Now()
		mu.Lock()
		defer mu.Unlock()
		if at, ok := committed[m.ID]; ok {
			late = append(late, now.Sub(at))
		}
		seen.Add(1)
	}}
	d := join(b, pool, pub, dispatcher.Config{})
	waitShares(b, []member{d}, lanes)
	tick := time.NewTicker(pause)
	defer tick.Stop()
	count.n.Store(0)
	b.ResetTimer()
	for i := range n {
		<-tick.C
		id := fmt.Sprint("m", i)
		write(b, direct, postroom.Message{ID: id, Topic: "orders", Key: fmt.Sprint("k", i*7919%1000)})
		mu.Lock()
		committed[id] = time.Now()
		mu.Unlock()
	}
	eventually(b, time.Minute, func() string {
		if seen.Load() < n {
			return fmt.Sprint(seen.Load())
		}
		return ""
	})
	b.StopTimer()
	b.ReportMetric(float64(count.n.Load())/n, "statements/msg")
	mu.Lock()
	slices.Sort(late)
	b.ReportMetric(float64(late[len(late)/2].Microseconds())/1000, "p50-ms")
	b.ReportMetric(float64(late[len(late)*99/100].Microseconds())/1000, "p99-ms")
	mu.Unlock()
	d.stop()
}

// BenchmarkDispatchers publishes a backlog in four lanes with one dispatcher and
// with two, in one process, as BenchmarkLanesDrain does.
func BenchmarkDispatchers(b *testing.B) {
	for round := range 5 {
		for _, dispatchers := range []int{1, 2} {
			b.Run(fmt.Sprintf("instant/%d/%d", dispatchers, round), func(b *testing.B) {
				drain(b, 4, dispatchers, func() *remote { return &remote{} })
			})
			b.Run(fmt.Sprintf("remote/%d/%d", dispatchers, round), func(b *testing.B) {
				drain(b, 4, dispatchers, func() *remote { return &remote{trip: 2 * time.Millisecond, each: 10 * time.Microsecond} })
			})
		}
	}
}
