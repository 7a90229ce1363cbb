package inbox

import (
	"context"
	"fmt"
	"log/slog"
	"runtime/debug"

	"go.opentelemetry.io/otel/propagation"
	"go.opentelemetry.io/otel/trace"

	"github.com/postroom/postroom"
)

// call runs h and turns a panic into an error.
func (b *box) call(ctx context.Context, t *txn, m postroom.Message, h Handler) (err error) {
	ctx = withTrace(ctx, &m)
	ctx = postroom.WithOperation(ctx, postroom.Operation{Kind: "message", Scope: b.subscriber, Key: m.ID})
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	defer func() {
		if v := recover(); v != nil {
			err = asError(v)
			stack := debug.Stack()
			b.cfg.Logger.LogAttrs(ctx, slog.LevelError, "handler panicked", slog.String("subscriber", b.subscriber),
				slog.String("message_id", m.ID), slog.String("stack", string(stack[:min(len(stack), maxStack)])))
		}
	}()
	return h(ctx, t.handler, m)
}

const maxStack = 4096 // bytes

func asError(v any) error {
	if err, ok := v.(error); ok {
		return fmt.Errorf("the handler panicked: %w", err)
	}
	return fmt.Errorf("the handler panicked: %v", v)
}

// withTrace puts the producer's trace into ctx, unless a span of it is there.
func withTrace(ctx context.Context, m *postroom.Message) context.Context {
	parent, ok := m.Header("traceparent")
	if !ok {
		return ctx
	}
	state, _ := m.Header("tracestate")
	carrier := propagation.MapCarrier{"traceparent": string(parent), "tracestate": string(state)}
	with := propagation.TraceContext{}.Extract(ctx, carrier)
	if trace.SpanContextFromContext(with).TraceID() == trace.SpanContextFromContext(ctx).TraceID() {
		return ctx
	}
	return with
}
