package inbox

import (
	"context"
	"errors"
	"time"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/metric"
)

// metrics counts what a consumer does, by OpenTelemetry's conventions for messaging
// where there is one. What is passed with each measurement is made once.
type metrics struct {
	consumed metric.Int64Counter
	failed   metric.Int64Counter
	duration metric.Float64Histogram
	delay    metric.Float64Histogram

	handled, duplicate, dead, byHandler, byDatabase, plain metric.MeasurementOption
}

func newMetrics(provider metric.MeterProvider, subscriber, topic string) (*metrics, error) {
	meter := provider.Meter("github.com/postroom/postroom/inbox")
	with := func(attrs ...attribute.KeyValue) metric.MeasurementOption {
		return metric.WithAttributeSet(attribute.NewSet(append(attrs,
			attribute.String("messaging.operation.name", "process"),
			attribute.String("messaging.destination.name", topic),
			attribute.String("messaging.consumer.group.name", subscriber))...))
	}
	m := &metrics{
		handled:    with(attribute.String("postroom.outcome", "handled")),
		duplicate:  with(attribute.String("postroom.outcome", "duplicate")),
		dead:       with(attribute.String("postroom.outcome", "dead letter")),
		byHandler:  with(attribute.String("error.type", "handler")),
		byDatabase: with(attribute.String("error.type", "database")),
		plain:      with(),
	}
	errs := make([]error, 4)
	m.consumed, errs[0] = meter.Int64Counter("messaging.client.consumed.messages", metric.WithUnit("{message}"),
		metric.WithDescription("Messages that were acknowledged: handled, known to be handled before, or set aside."))
	m.failed, errs[1] = meter.Int64Counter("postroom.inbox.failed_attempts", metric.WithUnit("{attempt}"),
		metric.WithDescription("Attempts that failed, by whose fault it was; those by the database's are made again without end."))
	m.duration, errs[2] = meter.Float64Histogram("messaging.process.duration", metric.WithUnit("s"),
		metric.WithDescription("How long attempts take, their transaction included."))
	m.delay, errs[3] = meter.Float64Histogram("postroom.inbox.delay", metric.WithUnit("s"),
		metric.WithDescription("From the writing of a message to the commit of its effect, by two machines' clocks."))
	return m, errors.Join(errs...)
}

func (m *metrics) attempted(ctx context.Context, began time.Time) {
	m.duration.Record(ctx, time.Since(began).Seconds(), m.plain)
}

func (m *metrics) done(ctx context.Context, t *task, result Result) {
	switch {
	case result == Duplicate:
		m.consumed.Add(ctx, 1, m.duplicate)
	case t.dead != nil:
		m.consumed.Add(ctx, 1, m.dead)
	default:
		m.consumed.Add(ctx, 1, m.handled)
		if !t.m.Time.IsZero() {
			m.delay.Record(ctx, max(time.Since(t.m.Time), 0).Seconds(), m.plain)
		}
	}
}
