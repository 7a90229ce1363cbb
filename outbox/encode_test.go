package outbox

import (
	"fmt"
	"testing"
)

// The hash decides a message's lane: it must never change, and spread evenly.
func TestLaneHashIsFixedAndEven(t *testing.T) {
	for _, tt := range []struct {
		topic, key string
		want       int32
	}{
		{"orders", "42", 2139258494}, {"orders", "", 1825851397}, {"", "", 527631890},
	} {
		if got := laneHash(tt.topic, tt.key); got != tt.want {
			t.Errorf("laneHash(%q, %q) = %d, want %d", tt.topic, tt.key, got, tt.want)
		}
	}
	if laneHash("ab", "c") == laneHash("a", "bc") {
		t.Error("topic and key run together")
	}
	for _, lanes := range []int32{2, 3, 4, 8, 32} {
		counts := make([]int, lanes)
		const n = 100_000
		for i := range n {
			h := laneHash("orders", fmt.Sprint("customer-", i))
			if h < 0 {
				t.Fatal("negative")
			}
			counts[h%lanes]++
		}
		for lane, c := range counts {
			if even := n / int(lanes); c < even*9/10 || c > even*11/10 {
				t.Errorf("lane %d of %d gets %d of %d keys", lane, lanes, c, n)
			}
		}
	}
}
