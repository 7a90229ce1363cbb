package outbox

import (
	"context"
	"encoding/hex"
	"strings"
	"time"

	"go.opentelemetry.io/otel/propagation"

	"github.com/postroom/postroom"
)

// row is a message as its table takes it.
type row struct {
	hash      int32
	id        string
	topic     string
	key       *string
	payload   []byte
	names     []string
	values    [][]byte
	operation *string
	deliverAt time.Time // of scheduled messages only
}

// encode turns valid messages into rows: those for now and those for later.
func encode(ctx context.Context, msgs []postroom.Message) (now, later []row) {
	trace := propagation.MapCarrier{}
	propagation.TraceContext{}.Inject(ctx, trace)
	now = make([]row, 0, len(msgs))
	for _, m := range msgs { // a copy: Identify changes it
		m.Identify(ctx)
		r := row{
			id:        m.ID,
			topic:     m.Topic,
			payload:   m.Payload,
			names:     make([]string, 0, len(m.Headers)+len(trace)),
			values:    make([][]byte, 0, len(m.Headers)+len(trace)),
			deliverAt: m.DeliverAt,
		}
		if m.HasKey() {
			r.key = &m.Key
			r.hash = laneHash(m.Topic, m.Key)
		} else {
			r.hash = laneHash(m.ID, "")
		}
		if m.Operation != "" {
			r.operation = &m.Operation
		}
		for _, h := range m.Headers {
			r.names = append(r.names, h.Name)
			r.values = append(r.values, h.Value)
		}
		if _, given := m.Header("traceparent"); !given {
			for _, name := range []string{"traceparent", "tracestate"} {
				if v := trace[name]; v != "" {
					r.names = append(r.names, name)
					r.values = append(r.values, []byte(v))
				}
			}
		}
		if r.deliverAt.IsZero() {
			now = append(now, r)
		} else {
			later = append(later, r)
		}
	}
	return now, later
}

// laneHash is the number from which a message's lane follows: FNV-1a over topic,
// a zero byte and key, without its highest bit. Messages without a key are
// spread by laneHash(id, ""). It must never change: rows of one key belong into
// one lane.
func laneHash(topic, key string) int32 {
	h := uint32(2166136261)
	add := func(s string) {
		for i := range len(s) {
			h = (h ^ uint32(s[i])) * 16777619
		}
	}
	add(topic)
	add("\x00")
	add(key)
	// FNV mixes its low bits badly, and lanes are taken from those.
	h ^= h >> 16
	h *= 0x45d9f3b
	h ^= h >> 16
	return int32(h &^ (1 << 31))
}

var escapeElement = strings.NewReplacer(`\`, `\\`, `"`, `\"`)

// textArray writes names as the text form of a text[], so that an array of
// arrays of different lengths can travel as one parameter.
func textArray(names []string) string {
	if len(names) == 0 {
		return "{}"
	}
	var b strings.Builder
	b.WriteByte('{')
	for i, n := range names {
		if i > 0 {
			b.WriteByte(',')
		}
		b.WriteByte('"')
		_, _ = escapeElement.WriteString(&b, n)
		b.WriteByte('"')
	}
	b.WriteByte('}')
	return b.String()
}

// byteaArray writes values as the text form of a bytea[].
func byteaArray(values [][]byte) string {
	if len(values) == 0 {
		return "{}"
	}
	b := []byte{'{'}
	for i, v := range values {
		if i > 0 {
			b = append(b, ',')
		}
		if v == nil {
			b = append(b, "NULL"...)
			continue
		}
		b = append(b, `"\\x`...)
		b = hex.AppendEncode(b, v)
		b = append(b, '"')
	}
	return string(append(b, '}'))
}

// arrays holds rows column by column.
type arrays struct {
	hashes        []int32
	ids, topics   []string
	keys          []*string
	payloads      [][]byte
	names, values []string
	operations    []*string
	deliverAts    []time.Time
}

func arraysOf(rows []row) arrays {
	n := len(rows)
	a := arrays{
		make([]int32, n), make([]string, n), make([]string, n), make([]*string, n), make([][]byte, n),
		make([]string, n), make([]string, n), make([]*string, n), make([]time.Time, n),
	}
	for i, r := range rows {
		a.hashes[i], a.ids[i], a.topics[i], a.keys[i], a.payloads[i] = r.hash, r.id, r.topic, r.key, r.payload
		a.names[i], a.values[i] = textArray(r.names), byteaArray(r.values)
		a.operations[i], a.deliverAts[i] = r.operation, r.deliverAt
	}
	return a
}
