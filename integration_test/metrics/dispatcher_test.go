// Package metrics_test collects what packages measure, by OpenTelemetry's SDK.
package metrics_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/sdk/metric"
	"go.opentelemetry.io/otel/sdk/metric/metricdata"

	"github.com/postroom/postroom"
	"github.com/postroom/postroom/broker"
	"github.com/postroom/postroom/dispatcher"
	"github.com/postroom/postroom/internal/pgtest"
	"github.com/postroom/postroom/outbox"
)

// A meter collects on demand.
type meter struct {
	t        *testing.T
	reader   *metric.ManualReader
	provider *metric.MeterProvider
}

func newMeter(t *testing.T) *meter {
	reader := metric.NewManualReader()
	return &meter{t, reader, metric.NewMeterProvider(metric.WithReader(reader))}
}

// collect returns all values, by name and attributes: "name{a=1,b=2}". Histograms
// have their count.
func (m *meter) collect() map[string]float64 {
	m.t.Helper()
	var all metricdata.ResourceMetrics
	if err := m.reader.Collect(m.t.Context(), &all); err != nil {
		m.t.Fatal(err)
	}
	values := make(map[string]float64)
	for _, scope := range all.ScopeMetrics {
		for _, i := range scope.Metrics {
			if i.Description == "" || i.Unit == "" {
				m.t.Errorf("%s has no description or unit", i.Name)
			}
			switch data := i.Data.(type) {
			case metricdata.Sum[int64]:
				for _, p := range data.DataPoints {
					values[i.Name+set(p.Attributes)] = float64(p.Value)
				}
			case metricdata.Gauge[int64]:
				for _, p := range data.DataPoints {
					values[i.Name+set(p.Attributes)] = float64(p.Value)
				}
			case metricdata.Gauge[float64]:
				for _, p := range data.DataPoints {
					values[i.Name+set(p.Attributes)] = p.Value
				}
			case metricdata.Histogram[float64]:
				for _, p := range data.DataPoints {
					values[i.Name+set(p.Attributes)] = float64(p.Count)
				}
			default:
				m.t.Errorf("%s is of type %T", i.Name, data)
			}
		}
	}
	return values
}

func set(s attribute.Set) string {
	var parts []string
	for _, a := range s.ToSlice() {
		parts = append(parts, string(a.Key)+"="+a.Value.String())
	}
	return "{" + strings.Join(parts, ",") + "}"
}

// publisher refuses one topic and is away for another.
type publisher struct{ away atomic.Bool }

func (*publisher) Close() error { return nil }

func (p *publisher) Publish(_ context.Context, msgs []postroom.Message) []broker.Result {
	results := make([]broker.Result, len(msgs))
	for i, m := range msgs {
		switch {
		case m.Topic == "bad":
			results[i] = broker.Result{Outcome: broker.Refused, Err: errors.New("too large")}
		case m.Topic == "away" && p.away.Load():
			results[i] = broker.Result{Outcome: broker.Unreachable, Scope: "away", Err: errors.New("no leader")}
		default:
			results[i].Outcome = broker.Stored
		}
	}
	return results
}

// What a dispatcher publishes is counted by topic and outcome, and the state of the
// outbox is there to be collected, by whoever looks.
func TestDispatcher(t *testing.T) {
	t.Parallel()
	pool := pgtest.New(t)
	m := newMeter(t)
	observed, err := dispatcher.ObserveStatus(m.provider, pool, "", "shop")
	if err != nil {
		t.Fatal(err)
	}
	var box outbox.Outbox
	write := func(topic string, n int, later time.Time) {
		t.Helper()
		err := pgx.BeginFunc(t.Context(), pool, func(tx pgx.Tx) error {
			for i := range n {
				if err := box.Write(t.Context(), tx, postroom.Message{Topic: topic, Key: fmt.Sprint(topic, i), DeliverAt: later}); err != nil {
					return err
				}
			}
			return nil
		})
		if err != nil {
			t.Fatal(err)
		}
	}
	write("orders", 10, time.Time{})
	write("bad", 1, time.Time{})
	write("away", 1, time.Time{})
	write("orders", 2, time.Now().Add(time.Hour))
	if got := sum(m.collect(), "postroom.outbox.unpublished{"); got != 12 {
		t.Errorf("%v messages are unpublished, want 12", got)
	}

	p := &publisher{}
	p.away.Store(true)
	d, err := dispatcher.New(pool, p, dispatcher.Config{
		Name: "shop", MeterProvider: m.provider, Logger: slog.New(slog.DiscardHandler), MaxAttempts: 1,
	})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	done := make(chan error, 1)
	go func() { done <- d.Run(ctx) }()

	const sent = "messaging.client.sent.messages"
	want := map[string]float64{
		sent + "{messaging.destination.name=orders,messaging.operation.name=publish,postroom.outbox=shop}":                 10,
		sent + "{error.type=refused,messaging.destination.name=bad,messaging.operation.name=publish,postroom.outbox=shop}": 1,
		"postroom.dispatcher.lanes{postroom.outbox=shop}":                                                                  4,
		"postroom.dispatcher.lanes.lost{postroom.outbox=shop}":                                                             0,
		"postroom.outbox.set_aside{postroom.outbox=shop,postroom.state=refused}":                                           1,
		"postroom.outbox.set_aside{postroom.outbox=shop,postroom.state=scheduled}":                                         2,
	}
	var got map[string]float64
	deadline := time.After(time.Minute)
	for missing := "all"; missing != ""; {
		got, missing = m.collect(), ""
		for name, value := range want {
			if v, ok := got[name]; !ok || v != value {
				missing = fmt.Sprintf("%s is %v, want %v", name, v, value)
			}
		}
		unreachable := sent + "{error.type=unreachable,messaging.destination.name=away,messaging.operation.name=publish,postroom.outbox=shop}"
		if got[unreachable] == 0 {
			missing = unreachable + " is 0"
		}
		select {
		case <-deadline:
			t.Fatalf("%s in %v", missing, got)
		case <-time.After(20 * time.Millisecond):
		}
	}
	if got["messaging.client.operation.duration{messaging.operation.name=publish,postroom.outbox=shop}"] == 0 {
		t.Errorf("no duration in %v", got)
	}
	p.away.Store(false)
	for sum(m.collect(), sent+"{messaging.destination.name=away") == 0 {
		select {
		case <-deadline:
			t.Fatal("the topic that was away is not published")
		case <-time.After(20 * time.Millisecond):
		}
	}
	cancel()
	if err := <-done; err != nil {
		t.Fatal(err)
	}
	if _, ok := m.collect()["postroom.dispatcher.lanes{postroom.outbox=shop}"]; ok {
		t.Error("a dispatcher that has ended still tells of its lanes")
	}
	if err := observed.Unregister(); err != nil {
		t.Error(err)
	}
	if n := sum(m.collect(), "postroom.outbox.unpublished{"); n != 0 {
		t.Errorf("%v messages are still told of", n)
	}
}

// sum adds what begins so.
func sum(values map[string]float64, prefix string) (n float64) {
	for name, v := range values {
		if strings.HasPrefix(name, prefix) {
			n += v
		}
	}
	return n
}
