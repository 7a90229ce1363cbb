package bench

import (
	"fmt"
	"slices"
	"testing"
	"time"
)

// A contender moves the backlog once and returns how long that took.
type contender struct {
	name string
	run  func(b *testing.B) time.Duration
}

// rounds has two contenders take turns, each first in every other round, so that
// other work on the machine, and a broker that gets warm, strike both. Reported are
// medians over the rounds, and of the ratio of their speeds the quartiles.
func rounds(b *testing.B, ours, hand contender) {
	b.Helper()
	const rounds = 7
	var ratios []float64
	speeds := make(map[string][]float64)
	for round := range rounds {
		order := []contender{ours, hand}
		if round%2 == 1 {
			slices.Reverse(order)
		}
		took := make(map[string]time.Duration)
		for _, c := range order {
			b.Run(fmt.Sprintf("%s/%d", c.name, round), func(b *testing.B) {
				took[c.name] = c.run(b)
				b.ReportMetric(backlog/took[c.name].Seconds(), "msg/s")
				b.ReportMetric(0, "ns/op")
			})
		}
		if len(took) < 2 {
			return // not all of them were asked for, or one failed
		}
		for name, d := range took {
			speeds[name] = append(speeds[name], backlog/d.Seconds())
		}
		ratios = append(ratios, took[hand.name].Seconds()/took[ours.name].Seconds())
	}
	b.Run("all", func(b *testing.B) {
		b.ReportMetric(0, "ns/op")
		for name, all := range speeds {
			b.ReportMetric(quantile(all, 50), name+"-msg/s")
		}
		for _, q := range []int{25, 50, 75} {
			b.ReportMetric(quantile(ratios, q), fmt.Sprintf("x-p%d", q))
		}
	})
}

func quantile(all []float64, percent int) float64 {
	sorted := slices.Sorted(slices.Values(all))
	return sorted[(len(sorted)-1)*percent/100]
}
