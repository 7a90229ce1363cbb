package readme

import (
	"context"
	"errors"
	"os"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	natsgo "github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/postroom/postroom/broker/nats"
	"github.com/postroom/postroom/internal/throwaway"
	"github.com/postroom/postroom/migrations"
)

// What the README shows is what compiles here, and what the CI runs.
func TestREADMEShowsThisCode(t *testing.T) {
	readme := read(t, "../../README.md")
	code := read(t, "readme.go")
	blocks := regexp.MustCompile("(?s)```go\n(.*?)```").FindAllStringSubmatch(readme, -1)
	if len(blocks) != 4 {
		t.Errorf("the README has %d Go blocks, want 4", len(blocks))
	}
	for _, b := range blocks {
		if !strings.Contains(code, b[1]) {
			t.Errorf("not in readme.go:\n%s", b[1])
		}
	}
	first := strings.Join(strings.Split(readme, "\n")[:25], "\n")
	for _, command := range []string{"go run ./examples/quickstart", "go test -race -timeout 30m github.com/postroom/postroom/..."} {
		if !strings.Contains(first, command) {
			t.Errorf("the README's first screen lacks %q", command)
		}
	}
	if !strings.Contains(read(t, "../../.ci/run"), "go test -race -timeout 30m github.com/postroom/postroom/...") {
		t.Error("CI does not run the README's test command")
	}
}

func read(t *testing.T, name string) string {
	t.Helper()
	b, err := os.ReadFile(name)
	if err != nil {
		t.Fatal(err)
	}
	return string(b)
}

// The code does what the README says of it.
func TestREADMECodeWorks(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	db, err := throwaway.StartPostgres(ctx, throwaway.PostgresConfig{})
	if err != nil {
		t.Fatal(err)
	}
	defer db.Close()
	server, err := throwaway.StartNATS(ctx, throwaway.NATSConfig{})
	if err != nil {
		t.Fatal(err)
	}
	defer server.Close()
	pool, err := pgxpool.New(ctx, db.URL)
	if err != nil {
		t.Fatal(err)
	}
	defer pool.Close()
	if _, err := migrations.Up(ctx, pool, migrations.Config{}); err != nil {
		t.Fatal(err)
	}
	_, err = pool.Exec(ctx, `
		CREATE TABLE orders (id text PRIMARY KEY, total int);
		CREATE TABLE invoices (order_id text)`)
	if err != nil {
		t.Fatal(err)
	}
	makeStream(t, server.URL)
	bus, err := nats.Open(ctx, server.URL, nats.Config{})
	if err != nil {
		t.Fatal(err)
	}
	defer bus.Close()
	ended := make(chan error, 2)
	go func() { ended <- dispatch(ctx, pool, bus) }()
	go func() { ended <- consume(ctx, pool, bus) }()
	if err := placeOrder(ctx, pool, "o1", 42); err != nil {
		t.Fatal(err)
	}
	deadline := time.After(20 * time.Second)
	for billed := 0; billed != 1; {
		if err := pool.QueryRow(ctx, `SELECT count(*) FROM invoices WHERE order_id = 'o1'`).Scan(&billed); err != nil {
			t.Fatal(err)
		}
		select {
		case err := <-ended:
			t.Fatal(err)
		case <-deadline:
			t.Fatalf("%d invoices", billed)
		case <-time.After(5 * time.Millisecond):
		}
	}
	cancel()
	if err := errors.Join(<-ended, <-ended); err != nil {
		t.Error(err)
	}
}

func makeStream(t *testing.T, url string) {
	t.Helper()
	nc, err := natsgo.Connect(url)
	if err != nil {
		t.Fatal(err)
	}
	defer nc.Close()
	js, err := jetstream.New(nc)
	if err != nil {
		t.Fatal(err)
	}
	_, err = js.CreateStream(t.Context(), jetstream.StreamConfig{Name: "orders", Subjects: []string{"orders"}})
	if err != nil {
		t.Fatal(err)
	}
}
