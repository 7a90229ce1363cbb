package dispatcher

import (
	"context"
	"errors"
	"time"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/metric"

	"github.com/postroom/postroom"
	"github.com/postroom/postroom/broker"
)

const meterName = "github.com/postroom/postroom/dispatcher"

// Attributes, by OpenTelemetry's conventions for messaging where there is one.
const (
	attrOperation   = "messaging.operation.name"
	attrDestination = "messaging.destination.name"
	attrError       = "error.type"
	attrOutbox      = "postroom.outbox"
	attrLane        = "postroom.lane"
	attrState       = "postroom.state"
)

// metrics counts what a dispatcher publishes, once for each call and topic.
type metrics struct {
	own      []attribute.KeyValue
	meter    metric.Meter
	sent     metric.Int64Counter
	duration metric.Float64Histogram
	lanes    metric.Int64ObservableGauge
	lost     metric.Int64ObservableCounter
}

func newMetrics(provider metric.MeterProvider, name string) (*metrics, error) {
	m := &metrics{meter: provider.Meter(meterName), own: named(name)}
	errs := make([]error, 4)
	m.sent, errs[0] = m.meter.Int64Counter("messaging.client.sent.messages", metric.WithUnit("{message}"),
		metric.WithDescription("Messages that the publisher was given and has tried."))
	m.duration, errs[1] = m.meter.Float64Histogram("messaging.client.operation.duration", metric.WithUnit("s"),
		metric.WithDescription("How long calls of the publisher take, of many messages each."))
	m.lanes, errs[2] = m.meter.Int64ObservableGauge("postroom.dispatcher.lanes", metric.WithUnit("{lane}"),
		metric.WithDescription("Lanes that the dispatcher owns."))
	m.lost, errs[3] = m.meter.Int64ObservableCounter("postroom.dispatcher.lanes.lost", metric.WithUnit("{lane}"),
		metric.WithDescription("Lanes that were lost, or might have been, while they were being published."))
	return m, errors.Join(errs...)
}

func named(outbox string) []attribute.KeyValue {
	if outbox == "" {
		return nil
	}
	return []attribute.KeyValue{attribute.String(attrOutbox, outbox)}
}

// called counts one call of the publisher.
func (m *metrics) called(ctx context.Context, msgs []postroom.Message, results []broker.Result, took time.Duration) {
	m.duration.Record(ctx, took.Seconds(), metric.WithAttributes(m.with(attribute.String(attrOperation, "publish"))...))
	type kind struct {
		topic   string
		outcome broker.Outcome
	}
	counts := make(map[kind]int64, 1)
	for i, r := range results {
		if r.Outcome != broker.NotTried {
			counts[kind{msgs[i].Topic, r.Outcome}]++
		}
	}
	for k, n := range counts {
		attrs := m.with(attribute.String(attrOperation, "publish"), attribute.String(attrDestination, k.topic))
		if k.outcome != broker.Stored {
			attrs = append(attrs, attribute.String(attrError, k.outcome.String()))
		}
		m.sent.Add(ctx, n, metric.WithAttributes(attrs...))
	}
}

func (m *metrics) with(attrs ...attribute.KeyValue) []attribute.KeyValue {
	return append(attrs, m.own...)
}

// observe reports the dispatcher's share while it runs.
func (m *metrics) observe(d *Dispatcher) (metric.Registration, error) {
	return m.meter.RegisterCallback(func(_ context.Context, o metric.Observer) error {
		l := d.Lanes()
		o.ObserveInt64(m.lanes, int64(len(l.Held)), metric.WithAttributes(m.own...))
		o.ObserveInt64(m.lost, l.Lost, metric.WithAttributes(m.own...))
		return nil
	}, m.lanes, m.lost)
}

// ObserveStatus has provider ask for what [ReadStatus] reads, each time that it
// collects, until Unregister is called on what is returned. One program is enough for
// an outbox, and it needs no dispatcher. name tells outboxes apart; it may be empty. db
// must be safe for concurrent use, as a pool is.
//
// Ages are in seconds, and 0 where there is nothing that could have one; counts end at
// 100,000.
func ObserveStatus(provider metric.MeterProvider, db Queryer, schema, name string) (metric.Registration, error) {
	meter := provider.Meter(meterName)
	var errs []error
	count := func(name, unit, description string) metric.Int64ObservableGauge {
		g, err := meter.Int64ObservableGauge(name, metric.WithUnit(unit), metric.WithDescription(description))
		errs = append(errs, err)
		return g
	}
	age := func(name, description string) metric.Float64ObservableGauge {
		g, err := meter.Float64ObservableGauge(name, metric.WithUnit("s"), metric.WithDescription(description))
		errs = append(errs, err)
		return g
	}
	unpublished := count("postroom.outbox.unpublished", "{message}", "Messages of a lane that are committed and not settled.")
	aside := count("postroom.outbox.set_aside", "{message}", "Messages that are refused, waiting or scheduled.")
	dead := count("postroom.outbox.dead_rows", "{row}", "Deleted messages that wait to be vacuumed, as PostgreSQL estimates.")
	oldest := age("postroom.outbox.unpublished.age", "Since when the oldest unpublished message of a lane stands there.")
	retained := age("postroom.outbox.retained.age", "Since when the oldest message of a lane stands there, published ones included.")
	open := age("postroom.outbox.transaction.age", "Since when the oldest transaction of the database has been open.")
	if err := errors.Join(errs...); err != nil {
		return nil, err
	}
	own := named(name)
	return meter.RegisterCallback(func(ctx context.Context, o metric.Observer) error {
		s, err := ReadStatus(ctx, db, schema)
		if err != nil {
			return err
		}
		for _, l := range s.Lanes {
			lane := metric.WithAttributes(append([]attribute.KeyValue{attribute.Int(attrLane, int(l.Lane))}, own...)...)
			o.ObserveInt64(unpublished, l.Unpublished.Rows, lane)
			o.ObserveFloat64(oldest, l.Oldest.Seconds(), lane)
			o.ObserveFloat64(retained, l.Retained.Seconds(), lane)
		}
		for state, c := range map[string]Count{"refused": s.Refused, "waiting": s.Waiting, "scheduled": s.Scheduled} {
			o.ObserveInt64(aside, c.Rows, metric.WithAttributes(append([]attribute.KeyValue{attribute.String(attrState, state)}, own...)...))
		}
		o.ObserveInt64(dead, s.DeadRows, metric.WithAttributes(own...))
		var began time.Duration
		if s.OldestTransaction != nil {
			began = s.OldestTransaction.Age
		}
		o.ObserveFloat64(open, began.Seconds(), metric.WithAttributes(own...))
		return nil
	}, unpublished, aside, dead, oldest, retained, open)
}
