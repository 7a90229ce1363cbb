package dispatcher

import (
	"errors"
	"fmt"
	"log/slog"
	"time"

	"go.opentelemetry.io/otel"
	"go.opentelemetry.io/otel/metric"

	"github.com/postroom/postroom/internal/pg"
)

// Config adjusts a [Dispatcher]. The zero value selects the defaults.
type Config struct {
	// Schema holds Postroom's tables. Default "postroom".
	Schema string

	// Name tells the outbox apart from others in log lines and in Health, for
	// programs that serve several databases, see [RunAll]. Default: none.
	Name string

	// PageSize is the most messages of one lane that are published together,
	// 1 to 10,000. Default 1000.
	PageSize int

	// PageBytes ends a page early once its payloads and headers have this many
	// bytes; a page holds at least one message. A lane keeps up to three pages
	// in memory, and another for each of up to nine topics whose messages were
	// set aside and are leaving. Default 8 MiB.
	PageBytes int

	// PublishTimeout bounds one call of the publisher. What has no answer by
	// then counts as unreachable and is published again. Default 10s.
	PublishTimeout time.Duration

	// Lease is how long a dispatcher that has died keeps its lanes, at the
	// longest. It must exceed twice PublishTimeout. Default 30s, or three times
	// PublishTimeout where that is more.
	Lease time.Duration

	// StatementTimeout bounds each statement of the dispatcher, the wait for a
	// connection of the pool included. One that was cut off gets twice as
	// long when it is run again, up to sixteen times, so that a database that
	// is slow and alive is not given up. Default a third of Lease, at
	// least a second.
	StatementTimeout time.Duration

	// MaxPollInterval is the longest pause between two polls of an idle
	// outbox; under traffic it is 2ms. Default 200ms, at least 2ms.
	MaxPollInterval time.Duration

	// MaxAttempts is how often a message that the broker refuses is tried in
	// all, after pauses that grow from seconds to half an hour, before it
	// waits for an operator. At least 1, which means once. Default 20, over
	// some three hours.
	MaxAttempts int

	// Retention is how long a published message stays in the outbox, counted
	// from its publishing. Default 24h; negative keeps messages for ever, a
	// nanosecond deletes them at once. What is not published, or set aside,
	// stays in any case. Dispatchers of one outbox should agree on it: the
	// owner of a lane decides for the lane.
	Retention time.Duration

	// DrainTimeout bounds how long Run waits, once its context has ended, for
	// what is being published. Default 30s; negative waits without limit.
	DrainTimeout time.Duration

	// Logger receives what Run cannot return. Default slog.Default().
	Logger *slog.Logger

	// MeterProvider makes the instruments that count what is published, see
	// docs/operating.md. Default OpenTelemetry's global one, which counts nothing
	// unless the program has set another.
	MeterProvider metric.MeterProvider
}

const minPollInterval = 2 * time.Millisecond

func (c Config) withDefaults() (Config, error) {
	var errs []error
	bad := func(format string, args ...any) {
		errs = append(errs, fmt.Errorf("dispatcher: Config."+format, args...))
	}
	schema, err := pg.Schema(c.Schema)
	if err != nil {
		bad("%w", err)
	}
	c.Schema = schema
	if c.PageSize == 0 {
		c.PageSize = 1000
	}
	if c.PageSize < 1 || c.PageSize > 10_000 {
		bad("PageSize is %d, want 1 to 10000", c.PageSize)
	}
	if c.PageBytes == 0 {
		c.PageBytes = 8 << 20
	}
	if c.PageBytes < 1 {
		bad("PageBytes is %d, want more than 0", c.PageBytes)
	}
	if c.PublishTimeout == 0 {
		c.PublishTimeout = 10 * time.Second
	}
	if c.PublishTimeout < 0 {
		bad("PublishTimeout is %v, want more than 0", c.PublishTimeout)
	}
	if c.Lease == 0 {
		c.Lease = max(30*time.Second, 3*c.PublishTimeout)
	}
	if c.Lease <= 2*c.PublishTimeout {
		bad("Lease is %v, want more than twice PublishTimeout, which is %v", c.Lease, c.PublishTimeout)
	}
	if c.StatementTimeout == 0 {
		c.StatementTimeout = max(c.Lease/3, time.Second)
	}
	if c.StatementTimeout < 0 {
		bad("StatementTimeout is %v, want more than 0", c.StatementTimeout)
	}
	if c.MaxPollInterval == 0 {
		c.MaxPollInterval = 200 * time.Millisecond
	}
	if c.MaxPollInterval < minPollInterval {
		bad("MaxPollInterval is %v, want at least %v", c.MaxPollInterval, minPollInterval)
	}
	if c.MaxAttempts == 0 {
		c.MaxAttempts = 20
	}
	if c.MaxAttempts < 1 {
		bad("MaxAttempts is %d, want at least 1", c.MaxAttempts)
	}
	if c.Retention == 0 {
		c.Retention = defaultRetention
	}
	if c.DrainTimeout == 0 {
		c.DrainTimeout = 30 * time.Second
	}
	if c.Logger == nil {
		c.Logger = slog.Default()
	}
	if c.MeterProvider == nil {
		c.MeterProvider = otel.GetMeterProvider()
	}
	if c.Name != "" {
		c.Logger = c.Logger.With(slog.String("outbox", c.Name))
	}
	return c, errors.Join(errs...)
}
