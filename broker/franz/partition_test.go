package franz

import (
	"math/rand/v2"
	"testing"
	"time"

	"github.com/twmb/franz-go/pkg/kgo"
)

// B55: whatever the order in which messages are settled, what may be committed
// is behind the first unsettled one, and never moves backwards.
func TestCommitFollowsTheFirstUnsettled(t *testing.T) {
	t.Parallel()
	random := rand.New(rand.NewPCG(1, 2))
	for range 200 {
		p := newPartition(0)
		offsets := make([]int64, 1+random.IntN(50))
		seqs := make([]int64, len(offsets))
		offset := int64(0)
		for i := range offsets {
			offset += 1 + random.Int64N(3) // compaction leaves gaps
			offsets[i] = offset
			p.queue = append(p.queue, &kgo.Record{Offset: offset})
		}
		for i := range seqs {
			seqs[i], _ = p.take()
		}
		settled := make([]bool, len(offsets))
		last := int64(0)
		for _, i := range random.Perm(len(offsets)) {
			settled[i] = true
			p.done(seqs[i])
			want := int64(0)
			for n := 0; n < len(settled) && settled[n]; n++ {
				want = offsets[n] + 1
			}
			if p.commit.Offset != want || want < last {
				t.Fatalf("offset %d may be committed, want %d, was %d", p.commit.Offset, want, last)
			}
			last = want
		}
		if len(p.entries) != 0 {
			t.Fatalf("%d places are left", len(p.entries))
		}
	}
}

func TestRetriesAreOrderedByTime(t *testing.T) {
	t.Parallel()
	p := newPartition(0)
	now := time.Now()
	for seq, after := range []time.Duration{3, 1, 2, 1, 0} {
		p.queue = append(p.queue, &kgo.Record{Offset: int64(seq)})
		p.take()
		p.giveBack(int64(seq), nil, now.Add(after))
	}
	for _, want := range []int64{4, 1, 3, 2, 0} {
		if seq, _ := p.takeBack(); seq != want {
			t.Errorf("%d is due, want %d", seq, want)
		}
	}
}

// A full window delivers no more until its first message is settled.
func TestWindow(t *testing.T) {
	t.Parallel()
	p := newPartition(0)
	p.entries = make([]entry, window)
	p.queue = []*kgo.Record{{Offset: 8}}
	if p.ready() {
		t.Error("a message is ready behind a full window")
	}
	p.done(0)
	if !p.ready() {
		t.Error("no message is ready although the first is settled")
	}
}
