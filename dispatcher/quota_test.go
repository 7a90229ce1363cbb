package dispatcher

import "testing"

// The shares add up to the number of lanes, differ by one at most, and change
// no more than they must when a dispatcher joins or leaves.
func TestQuota(t *testing.T) {
	of := func(lanes, living, earlier int) int {
		return standing{Living: living, Earlier: earlier, Present: true, Lanes: lanes}.quota()
	}
	for lanes := 1; lanes <= 40; lanes++ {
		for living := 1; living <= 12; living++ {
			sum := 0
			for i := range living {
				q := of(lanes, living, i)
				sum += q
				if q != lanes/living && q != lanes/living+1 {
					t.Errorf("share %d of %d in %d lanes is %d", i, living, lanes, q)
				}
				if more := of(lanes, living+1, i); more > q {
					t.Errorf("share %d of %d in %d lanes grows from %d to %d when one joins", i, living, lanes, q, more)
				}
				for gone := range living {
					if gone == i || living == 1 {
						continue
					}
					rank := i
					if gone < i {
						rank--
					}
					if rest := of(lanes, living-1, rank); rest < q {
						t.Errorf("share %d of %d in %d lanes shrinks from %d to %d when %d leaves", i, living, lanes, q, rest, gone)
					}
				}
			}
			if sum != lanes {
				t.Errorf("%d dispatchers share %d of %d lanes", living, sum, lanes)
			}
		}
	}
	if q := (standing{Living: 0, Lanes: 4}).quota(); q != 4 {
		t.Errorf("one that keeps away and is alone has %d lanes", q)
	}
	if q := (standing{Living: 1, Lanes: 4}).quota(); q != 0 {
		t.Errorf("one that keeps away beside another has %d lanes", q)
	}
}
