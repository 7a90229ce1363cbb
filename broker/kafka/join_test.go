package kafka

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
)

// Whatever members come, go and claim, each partition has one owner, shares differ
// by one at most, and nobody loses a partition that evenness lets it keep.
func TestShare(t *testing.T) {
	t.Parallel()
	for seed := range uint64(2000) {
		rnd := rand.New(rand.NewPCG(seed, 0))
		n, members := rnd.IntN(20), 1+rnd.IntN(6)
		owned := make(map[string][]int)
		for i := range members {
			owned[fmt.Sprint(i)] = nil
		}
		for p := range n + 2 { // two were removed
			for range rnd.IntN(3) { // nobody, one or two claim it
				id := fmt.Sprint(rnd.IntN(members))
				if !slices.Contains(owned[id], p) {
					owned[id] = append(owned[id], p)
				}
			}
		}
		shares := share(n, owned)
		owner := make(map[int]string)
		for id, partitions := range shares {
			if len(partitions) < n/members || len(partitions) > (n+members-1)/members {
				t.Fatalf("seed %d: %q has %d of %d partitions among %d: %v of %v", seed, id, len(partitions), n, members, shares, owned)
			}
			for _, p := range partitions {
				if other, ok := owner[p]; ok {
					t.Fatalf("seed %d: partition %d is given to %q and %q", seed, p, id, other)
				}
				owner[p] = id
			}
		}
		if len(owner) != n || len(shares) != members {
			t.Fatalf("seed %d: %d of %d partitions are given, to %d of %d", seed, len(owner), n, len(shares), members)
		}
		again := share(n, shares)
		for id := range shares {
			if !slices.Equal(again[id], shares[id]) {
				t.Fatalf("seed %d: an even division is changed: %v to %v", seed, shares, again)
			}
		}
	}
}

// One member leaves: the others keep all that they have.
func TestShareKeepsWhatItCan(t *testing.T) {
	t.Parallel()
	owned := map[string][]int{"a": {0, 4, 8}, "b": {1, 5, 9}} // "c" had 2, 3, 6, 7
	for id, partitions := range share(10, owned) {
		for _, p := range owned[id] {
			if !slices.Contains(partitions, p) {
				t.Errorf("%q does not keep partition %d: %v", id, p, partitions)
			}
		}
	}
}
