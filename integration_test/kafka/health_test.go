package kafka_test

import (
	"context"
	"log/slog"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/segmentio/kafka-go/sasl"
	"github.com/segmentio/kafka-go/sasl/plain"

	"github.com/postroom/postroom"
	"github.com/postroom/postroom/broker/kafka"
	"github.com/postroom/postroom/dispatcher"
	"github.com/postroom/postroom/internal/throwaway"
	"github.com/postroom/postroom/migrations"
	"github.com/postroom/postroom/outbox"
)

// B63, B08: a dispatcher whose credentials are no longer taken shows that in its
// health, sets no message aside, and goes on when they are.
func TestB63HealthShowsAuthentication(t *testing.T) {
	t.Parallel()
	s := newSecured(t)
	s.topic("health", 3)
	pool := newDatabase(t)
	var current atomic.Value
	current.Store(password)
	gate := newGate(t)
	c := config()
	c.Dial = gate.dial
	c.SASL = func(context.Context) (sasl.Mechanism, error) {
		return plain.Mechanism{Username: "alice", Password: current.Load().(string)}, nil
	}
	bus, err := kafka.Open(t.Context(), s.kafka.SASLBrokers, c)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = bus.Close() }()
	d, err := dispatcher.New(pool, bus, dispatcher.Config{PublishTimeout: 3 * time.Second, Logger: slog.New(slog.DiscardHandler)})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- d.Run(ctx) }()
	write := func(msgs []postroom.Message) {
		t.Helper()
		err := pgx.BeginFunc(t.Context(), pool, func(tx pgx.Tx) error { return new(outbox.Outbox).Write(t.Context(), tx, msgs...) })
		if err != nil {
			t.Fatal(err)
		}
	}
	write(messages("health", "k", 0, 9))
	s.read("health", 10)

	current.Store(wrong)
	gate.cut()
	write(messages("health", "k", 10, 19))
	until(t, "Health shows what is wrong", func() bool {
		err := d.Health()
		return err != nil && strings.Contains(err.Error(), "SASL: PLAIN: [58]") && !strings.Contains(err.Error(), wrong)
	})
	var parked int
	if err := pool.QueryRow(t.Context(), "SELECT count(*) FROM postroom.outbox_parked WHERE state = 'refused'").Scan(&parked); err != nil || parked != 0 {
		t.Errorf("%d messages are refused (%v)", parked, err)
	}
	current.Store(password)
	if got := s.readFirst("health", 20); len(got) != 20 || got[19] != "k-19" {
		t.Errorf("first arrivals are %q", got)
	}
	until(t, "Health is well again", func() bool { return d.Health() == nil })
	cancel()
	if err := <-done; err != nil {
		t.Error(err)
	}
}

// newDatabase is an empty outbox.
func newDatabase(t testing.TB) *pgxpool.Pool {
	t.Helper()
	p, err := throwaway.StartPostgres(t.Context(), throwaway.PostgresConfig{})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := p.Close(); err != nil {
			t.Error(err)
		}
	})
	pool, err := pgxpool.New(t.Context(), p.URL)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(pool.Close)
	if _, err := migrations.Up(t.Context(), pool, migrations.Config{}); err != nil {
		t.Fatal(err)
	}
	return pool
}
