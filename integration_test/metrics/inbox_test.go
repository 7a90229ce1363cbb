package metrics_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/postroom/postroom"
	"github.com/postroom/postroom/broker"
	"github.com/postroom/postroom/broker/memory"
	"github.com/postroom/postroom/inbox"
	"github.com/postroom/postroom/internal/pgtest"
)

// What a consumer does is counted by what became of its messages.
func TestConsumer(t *testing.T) {
	t.Parallel()
	pool := pgtest.New(t)
	m := newMeter(t)
	bus := memory.New()
	defer bus.Close()
	clash := true
	h := func(_ context.Context, _ pgx.Tx, msg postroom.Message) error {
		switch {
		case msg.ID == "bad":
			return errors.New("no")
		case msg.ID == "clash" && clash:
			clash = false
			return &pgconn.PgError{Code: "40001"}
		}
		return nil
	}
	c, err := inbox.New(pool, bus, "billing", "orders", h, inbox.Config{
		MeterProvider: m.provider, MaxAttempts: 2, RetryDelay: time.Millisecond, Logger: slog.New(slog.DiscardHandler),
	})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	done := make(chan error, 1)
	go func() { done <- c.Run(ctx) }()
	var msgs []postroom.Message
	for _, id := range []string{"a", "b", "a", "bad", "clash"} {
		msgs = append(msgs, postroom.Message{ID: id, Topic: "orders", Key: "k", Time: time.Now().Add(-time.Second)})
	}
	for _, r := range bus.Publish(t.Context(), msgs) {
		if r.Outcome != broker.Stored {
			t.Fatal(r.Err)
		}
	}
	const of = "messaging.consumer.group.name=billing,messaging.destination.name=orders,messaging.operation.name=process"
	want := map[string]float64{
		"messaging.client.consumed.messages{" + of + ",postroom.outcome=handled}":     3,
		"messaging.client.consumed.messages{" + of + ",postroom.outcome=duplicate}":   1,
		"messaging.client.consumed.messages{" + of + ",postroom.outcome=dead letter}": 1,
		"postroom.inbox.failed_attempts{error.type=handler," + of + "}":               2,
		"postroom.inbox.failed_attempts{error.type=database," + of + "}":              1,
		"postroom.inbox.delay{" + of + "}":                                            3,
	}
	deadline := time.After(time.Minute)
	for missing := "all"; missing != ""; {
		got := m.collect()
		missing = ""
		for name, value := range want {
			if got[name] != value {
				missing = fmt.Sprintf("%s is %v, want %v", name, got[name], value)
			}
		}
		if got["messaging.process.duration{"+of+"}"] < 8 {
			missing = "attempts are not measured"
		}
		select {
		case <-deadline:
			t.Fatalf("%s in %v", missing, got)
		case <-time.After(20 * time.Millisecond):
		}
	}
	cancel()
	if err := <-done; err != nil {
		t.Fatal(err)
	}
}
