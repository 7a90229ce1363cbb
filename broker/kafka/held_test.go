package kafka

import (
	"math/rand/v2"
	"testing"
	"time"
)

// However fetches, deliveries, acks and returns mix, every offset is handed over
// until it is settled, in order, never twice at a time, and the position never
// passes one that is not.
func TestPartitionKeepsThePrefix(t *testing.T) {
	t.Parallel()
	const records, most = 200, 20
	for seed := range uint64(100) {
		rnd := rand.New(rand.NewPCG(seed, 0))
		p := newPartition(0)
		p.fetchAt = 0
		done := make(map[int64]bool)
		held := make(map[int64]*entry)
		now := time.Now()
		for steps := 0; p.position() < records; steps++ {
			if steps > 100_000 {
				t.Fatalf("seed %d: stuck at %d", seed, p.position())
			}
			switch rnd.IntN(4) {
			case 0:
				var es []*entry
				for o := p.fetchAt; o < min(p.fetchAt+int64(rnd.IntN(10)), records); o++ {
					es = append(es, &entry{offset: o, size: 1})
				}
				p.take(es, p.fetchAt+int64(len(es)))
			case 1, 2:
				e, due := p.next(now, most)
				if !due.IsZero() {
					now = due
				}
				if e == nil {
					continue
				}
				if held[e.offset] != nil || done[e.offset] {
					t.Fatalf("seed %d: offset %d is handed over again", seed, e.offset)
				}
				for o := range e.offset {
					if !done[o] && held[o] == nil {
						t.Fatalf("seed %d: offset %d comes before %d", seed, e.offset, o)
					}
				}
				if held[e.offset] = e; len(held) > most {
					t.Fatalf("seed %d: %d are handed over, want at most %d", seed, len(held), most)
				}
			case 3:
				for o, e := range held { // any
					delete(held, o)
					if rnd.IntN(3) == 0 {
						p.giveBack(e, now.Add(time.Duration(rnd.IntN(2))*time.Minute))
					} else {
						p.settle(e)
						done[o] = true
					}
					break
				}
			}
			for o := range p.position() {
				if !done[o] {
					t.Fatalf("seed %d: the position is %d, and %d is not settled", seed, p.position(), o)
				}
			}
			if p.out != len(held) {
				t.Fatalf("seed %d: %d are out, counted %d", seed, len(held), p.out)
			}
		}
	}
}
