package inbox_test

import (
	"fmt"
	"os"
	"strings"
	"testing"
	"time"
)

// TestMain runs a child of TestCase_B38 where the environment asks for one, and
// otherwise the tests, after which no goroutine of the package may be left.
func TestMain(m *testing.M) {
	if point := os.Getenv(childPoint); point != "" {
		child(point)
	}
	code := m.Run()
	if code == 0 {
		deadline := time.Now().Add(10 * time.Second)
		for leaked() && time.Now().Before(deadline) {
			<-time.After(10 * time.Millisecond)
		}
		if leaked() {
			fmt.Printf("goroutines are left:\n%s\n", stacks())
			code = 1
		}
	}
	os.Exit(code)
}

func leaked() bool {
	for g := range strings.SplitSeq(string(stacks()), "\n\n") {
		if strings.Contains(g, "/inbox.") || strings.Contains(g, "pgxpool.(*Pool).backgroundHealthCheck") {
			return true
		}
	}
	return false
}
