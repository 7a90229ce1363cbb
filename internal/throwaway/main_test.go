package throwaway_test

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/postroom/postroom/internal/throwaway"
)

// childVariable has the test program start servers, report them, and end in the
// way that the variable names.
const childVariable = "THROWAWAY_TEST_CHILD"

func TestMain(m *testing.M) {
	if end := os.Getenv(childVariable); end != "" {
		if err := startAndEnd(end); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(3)
		}
		os.Exit(0)
	}
	os.Exit(m.Run())
}

// started is what a child reports.
type started struct {
	URL    string
	Source string
	Dirs   []string
	Ports  []int
	Pid    int // of Kafka
}

// startAndEnd never closes what it starts, unless end is "close".
func startAndEnd(end string) error {
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	if end == "kafka" {
		return startKafkaAndWait(ctx)
	}
	p, err := throwaway.StartPostgres(ctx, throwaway.PostgresConfig{})
	if err != nil {
		return err
	}
	n, err := throwaway.StartNATS(ctx, throwaway.NATSConfig{})
	if err != nil {
		return err
	}
	err = json.NewEncoder(os.Stdout).Encode(started{
		URL:    p.URL,
		Source: p.Source,
		Dirs:   []string{filepath.Dir(p.DataDir), filepath.Dir(n.StoreDir)},
		Ports:  []int{p.Port, n.Port},
	})
	if err != nil {
		return err
	}
	_, _ = os.Stdin.Read(make([]byte, 1)) // until the test wants the end
	switch end {
	case "close":
		return p.Close()
	case "panic":
		panic("as the test wants")
	case "exit":
		os.Exit(0)
	case "goexit":
		return nil
	}
	select {} // until a signal
}

func startKafkaAndWait(ctx context.Context) error {
	k, err := throwaway.StartKafka(ctx, throwaway.KafkaConfig{RequireReal: true})
	if err != nil {
		return err
	}
	dir, pid := k.Process()
	told := started{URL: k.Brokers[0], Source: k.Source, Dirs: []string{dir}, Pid: pid}
	if err := json.NewEncoder(os.Stdout).Encode(told); err != nil {
		return err
	}
	select {} // until a signal
}

// eventually polls until done is true, and fails the test after a minute.
func eventually(t *testing.T, what string, done func() bool) {
	t.Helper()
	tick := time.NewTicker(10 * time.Millisecond)
	defer tick.Stop()
	deadline := time.After(time.Minute)
	for !done() {
		select {
		case <-tick.C:
		case <-deadline:
			t.Fatalf("not within a minute: %s", what)
		}
	}
}
