package franz_test

import (
	"context"
	"fmt"
	"math/rand/v2"
	"sync"
	"testing"
	"time"

	"github.com/postroom/postroom"
	"github.com/postroom/postroom/broker"
)

// While members come and go, every message arrives, and first arrivals of each
// key are in order.
func TestRebalancesKeepOrder(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	r.topic("t", 8)
	const keys, per = 40, 100
	var (
		mu   sync.Mutex
		seen = map[string]int{} // key → messages that arrived, in order
		left = keys * per
	)
	deliver := func(d broker.Delivery) {
		m := d.Message()
		select {
		case <-d.Lost():
			return // it was given to another before its turn
		default:
		}
		mu.Lock()
		defer mu.Unlock()
		var n int
		if _, err := fmt.Sscan(string(m.Payload), &n); err != nil {
			t.Error(err)
		}
		switch next := seen[m.Key]; {
		case n == next:
			seen[m.Key]++
			left--
		case n > next:
			t.Errorf("message %d of key %s came when %d had not", n, m.Key, next)
		}
		_ = d.Ack(t.Context())
	}
	done := make(chan struct{})
	var members sync.WaitGroup
	for i := range 4 {
		members.Go(func() {
			random := rand.New(rand.NewPCG(uint64(i), 7))
			b := r.open()
			for {
				ctx, cancel := context.WithTimeout(t.Context(), time.Duration(50+random.IntN(1000))*time.Millisecond)
				err := b.Subscribe(ctx, broker.Subscription{Group: "g", Topic: "t", MaxInFlight: 1 + random.IntN(50)}, deliver)
				cancel()
				if err != nil {
					t.Error(err)
				}
				select {
				case <-done:
					return
				default:
				}
			}
		})
	}
	b := r.open()
	for n := range per {
		var msgs []postroom.Message
		for k := range keys {
			msgs = append(msgs, messages("t", fmt.Sprint("k", k), n, n)...)
		}
		store(t, b, msgs...)
	}
	until(t, "everything arrived", func() bool {
		mu.Lock()
		defer mu.Unlock()
		return left == 0
	})
	close(done)
	members.Wait()
}
