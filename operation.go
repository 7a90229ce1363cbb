package postroom

import (
	"context"
	"errors"
	"strconv"
	"sync"
)

// ErrNoOperation is returned by [OperationKey] where the context carries no
// operation.
var ErrNoOperation = errors.New("postroom: the context carries no operation")

// An Operation is the identity that a request, a webhook delivery or a message
// hands to everything it causes. Each repeat of the same cause is the same
// operation: it holds no attempt number, time or host.
type Operation struct {
	Kind  string // "message", "http" or "receipt"; a caller may add its own
	Scope string // subscriber, tenant and route, or webhook endpoint
	Key   string // message id, idempotency key, or delivery id
}

// ID returns the operation's own id, a UUID derived from its fields. It is what
// other services see in the header postroom-operation.
func (o Operation) ID() string {
	return derive(o.Key, "operation", o.Kind, o.Scope, o.Key)
}

// WithOperation returns a context in which messages without an ID and outgoing
// calls derive their identity from o, so that a repeated run gives them the
// same one. Every run, and so every attempt, needs a context of its own: the
// ordinals of derived message ids are counted in it.
func WithOperation(ctx context.Context, o Operation) context.Context {
	return context.WithValue(ctx, operationKey{}, &operationState{
		Operation: o,
		ordinals:  make(map[[2]string]int),
	})
}

// OperationFrom returns the operation that ctx carries, and whether it does.
func OperationFrom(ctx context.Context) (Operation, bool) {
	s, ok := ctx.Value(operationKey{}).(*operationState)
	if !ok {
		return Operation{}, false
	}
	return s.Operation, true
}

// OperationKey returns the idempotency key for an outgoing call that the
// operation in ctx makes at the given step: a UUID that is the same in every
// repeat, and another for every step. It returns [ErrNoOperation] where there
// is no operation.
func OperationKey(ctx context.Context, step string) (string, error) {
	o, ok := OperationFrom(ctx)
	if !ok {
		return "", ErrNoOperation
	}
	return derive(o.Key, "call", o.Kind, o.Scope, o.Key, step), nil
}

// Identify fills what m takes from ctx: Operation always, and ID where it is
// empty. The outbox calls it for each message it writes. Under an operation the
// ID is derived from it, the topic, the key and Step, or else the ordinal of
// the message among those without a Step for that topic and key.
func (m *Message) Identify(ctx context.Context) {
	s, ok := ctx.Value(operationKey{}).(*operationState)
	if !ok {
		m.Operation = ""
		if m.ID == "" {
			m.ID = NewID()
		}
		return
	}
	m.Operation = s.ID()
	if m.ID != "" {
		return
	}
	kind, step := "step", m.Step
	if step == "" {
		kind, step = "ordinal", strconv.Itoa(s.next(m.Topic, m.Key))
	}
	m.ID = derive(s.Key, "message", s.Kind, s.Scope, s.Key, m.Topic, m.Key, kind, step)
}

type operationKey struct{}

type operationState struct {
	Operation
	mu       sync.Mutex
	ordinals map[[2]string]int // topic and key → messages derived so far
}

func (s *operationState) next(topic, key string) int {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.ordinals[[2]string{topic, key}]++
	return s.ordinals[[2]string{topic, key}]
}
