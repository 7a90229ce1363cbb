package brokertest

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/postroom/postroom"
)

// roundTrip publishes messages of one topic and compares what arrives.
func roundTrip(ctx context.Context, e *env, make func(topic string) []postroom.Message) error {
	topic, p, err := e.topicAndPublisher(ctx)
	if err != nil {
		return err
	}
	want := make(topic)
	if err := store(ctx, p, clones(want)...); err != nil {
		return err
	}
	m, err := e.subscribe(ctx, topic, "group", len(want))
	if err != nil {
		return err
	}
	got, err := m.all(ctx, len(want))
	if err != nil {
		return err
	}
	byID := map[string]postroom.Message{}
	for _, g := range got {
		byID[g.ID] = g
	}
	var errs []error
	for _, w := range want {
		g, ok := byID[w.ID]
		if !ok {
			errs = append(errs, fmt.Errorf("message %q did not arrive under its id", w.ID))
			continue
		}
		errs = append(errs, wrap(fmt.Sprintf("message %q", w.ID), e.compare(g, w)))
	}
	return errors.Join(errs...)
}

// compare reports every field in which a delivered message differs.
func (e *env) compare(got, want postroom.Message) error {
	var errs []error
	differ := func(field string, got, want any) {
		errs = append(errs, fmt.Errorf("%s is %#v, want %#v", field, got, want))
	}
	if got.ID != want.ID {
		differ("ID", got.ID, want.ID)
	}
	if got.Topic != want.Topic {
		differ("Topic", got.Topic, want.Topic)
	}
	if got.Key != want.Key || got.HasKey() != want.HasKey() {
		differ("Key, EmptyKey", []any{got.Key, got.EmptyKey}, []any{want.Key, want.EmptyKey})
	}
	if !sameBytes(got.Payload, want.Payload) {
		differ("Payload", got.Payload, want.Payload)
	}
	if wantTime := want.Time.Truncate(time.Microsecond); !got.Time.Equal(wantTime) || got.Time.IsZero() != wantTime.IsZero() {
		differ("Time", got.Time.String(), wantTime.String())
	}
	if got.Operation != want.Operation {
		differ("Operation", got.Operation, want.Operation)
	}
	if got.Step != "" || !got.DeliverAt.IsZero() {
		differ("Step, DeliverAt (not sent)", []any{got.Step, got.DeliverAt}, []any{"", time.Time{}})
	}
	gotHeaders, wantHeaders := slices.Clone(got.Headers), slices.Clone(want.Headers)
	if !e.h.HeaderOrder {
		byName := func(a, b postroom.Header) int { return strings.Compare(a.Name, b.Name) }
		slices.SortStableFunc(gotHeaders, byName)
		slices.SortStableFunc(wantHeaders, byName)
	}
	same := func(a, b postroom.Header) bool { return a.Name == b.Name && sameBytes(a.Value, b.Value) }
	if !slices.EqualFunc(gotHeaders, wantHeaders, same) {
		differ("Headers", gotHeaders, wantHeaders)
	}
	return errors.Join(errs...)
}

// sameBytes tells nil from empty.
func sameBytes(a, b []byte) bool { return bytes.Equal(a, b) && (a == nil) == (b == nil) }

func clones(msgs []postroom.Message) []postroom.Message {
	all := slices.Clone(msgs)
	for i := range all {
		all[i].Payload = slices.Clone(all[i].Payload)
		all[i].Headers = slices.Clone(all[i].Headers)
		for j := range all[i].Headers {
			all[i].Headers[j].Value = slices.Clone(all[i].Headers[j].Value)
		}
	}
	return all
}

func fieldsSurvive(ctx context.Context, e *env) error {
	return roundTrip(ctx, e, func(topic string) []postroom.Message {
		at := time.Date(2026, 2, 28, 23, 59, 59, 123456000, time.UTC)
		all := []postroom.Message{
			{Payload: []byte(`{"total": 1.0}`), Key: "order-1", Time: at, Operation: e.unique("operation")},
			{Payload: nil, Key: "order-1", Time: at.Add(time.Microsecond)},
			{Payload: []byte{}, Key: "order-1"},
			{Payload: []byte{0, 1, 0x80, 0xff, 0xfe, '\r', '\n', 0}, Key: "kéy with spaces, \"quotes\" and\ta tab"},
			{Payload: []byte("no key")},
			{Payload: nil},
			{Payload: []byte("empty key"), EmptyKey: true},
			{Payload: []byte("time with nanoseconds"), Time: time.Unix(1_700_000_000, 123_456_789).In(time.FixedZone("x", 3600))},
			{Payload: []byte("not sent"), Key: "k", Step: "step", DeliverAt: at},
			{Payload: bytes.Repeat([]byte("0123456789abcdef"), 1024)},
			{Payload: []byte("longest id"), ID: strings.Repeat("x", postroom.MaxIDLen)},
			{Payload: []byte("id with spaces"), ID: e.unique("an id, with ünicode =?x?=")},
		}
		for i := range all {
			all[i].Topic = topic
			if all[i].ID == "" {
				all[i].ID = postroom.NewID()
			}
		}
		return all
	})
}

func headersSurvive(ctx context.Context, e *env) error {
	return roundTrip(ctx, e, func(topic string) []postroom.Message {
		h := func(pairs ...string) (hs []postroom.Header) {
			for i := 0; i < len(pairs); i += 2 {
				hs = append(hs, postroom.Header{Name: pairs[i], Value: []byte(pairs[i+1])})
			}
			return hs
		}
		return []postroom.Message{
			{ID: postroom.NewID(), Topic: topic, Headers: h("a", "1", "b", "2", "a", "3", "c", "4", "b", "5", "a", "1")},
			{ID: postroom.NewID(), Topic: topic, Headers: h("traceparent", "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01", "tracestate", "a=b,c=d")},
			{ID: postroom.NewID(), Topic: topic, Headers: h("z", "last letter first", "Content-Type", "application/json; charset=\"utf-8\"", "x-grüße", "ä")},
			{ID: postroom.NewID(), Topic: topic, Payload: []byte("none")},
			{ID: postroom.NewID(), Topic: topic, Headers: h(manyHeaders(100)...)},
		}
	})
}

func manyHeaders(n int) (pairs []string) {
	for i := range n {
		pairs = append(pairs, fmt.Sprintf("header-%d", i%17), fmt.Sprintf("value %d", i))
	}
	return pairs
}

func oddHeadersSurvive(ctx context.Context, e *env) error {
	return roundTrip(ctx, e, func(topic string) []postroom.Message {
		values := [][]byte{
			nil,
			{},
			{0},
			{0xff, 0xfe, 0x80},
			[]byte("two\r\nlines"), []byte("\n"), []byte(" space before"), []byte("space after "),
			[]byte("\ttab\t"), []byte("   "), []byte("a: b"), []byte("=?binary?B?eA==?="), []byte("=?nil?B??="), []byte("=?"),
			[]byte("NATS/1.0 503"), []byte("\x7f"), []byte("grüße"), bytes.Repeat([]byte{'x', 0}, 500),
		}
		names := []string{"plain", "with space", " leading", "co:lon", ":", "Status", "status", "STATUS", "Description", "x\r\ny", "tab\t", "ünïcode", "=?x?="}
		var all []postroom.Message
		for _, v := range values {
			all = append(all, postroom.Message{Headers: []postroom.Header{{Name: "before", Value: []byte("1")}, {Name: "value", Value: v}, {Name: "value", Value: []byte("plain")}, {Name: "value", Value: v}}})
		}
		for _, n := range names {
			all = append(all, postroom.Message{Headers: []postroom.Header{{Name: n, Value: []byte("1")}, {Name: "plain2", Value: []byte("2")}, {Name: n, Value: nil}, {Name: n, Value: []byte("200")}}})
		}
		status := []postroom.Header{{Name: "Status", Value: []byte("100")}}
		all = append(all, postroom.Message{Headers: status}, postroom.Message{Headers: status, Payload: []byte{}},
			postroom.Message{Headers: []postroom.Header{{Name: "Status", Value: []byte("409")}, {Name: "Description", Value: []byte("Consumer Deleted")}}})
		for i := range all {
			all[i].ID, all[i].Topic = postroom.NewID(), topic
		}
		return all
	})
}

func headerLookup(ctx context.Context, e *env) error {
	topic, p, err := e.topicAndPublisher(ctx)
	if err != nil {
		return err
	}
	msg := messages(topic, "", 1)[0]
	msg.Headers = []postroom.Header{{Name: "X-Mixed-Case", Value: []byte("first")}, {Name: "x-mixed-case", Value: []byte("second")}}
	if err := store(ctx, p, msg); err != nil {
		return err
	}
	m, err := e.subscribe(ctx, topic, "group", 1)
	if err != nil {
		return err
	}
	got, err := m.all(ctx, 1)
	if err != nil {
		return err
	}
	for _, name := range []string{"X-Mixed-Case", "x-mixed-case", "X-MIXED-CASE"} {
		if v, ok := got[0].Header(name); !ok || string(v) != "first" {
			return fmt.Errorf("Header(%q) = %q, %v, want the first, %q", name, v, ok, "first")
		}
	}
	return e.compare(got[0], msg)
}

func argumentsUntouched(ctx context.Context, e *env) error {
	topic, p, err := e.topicAndPublisher(ctx)
	if err != nil {
		return err
	}
	msgs := messages(topic, "key", 20)
	for i := range msgs {
		msgs[i].Headers = make([]postroom.Header, 2, 10) // room that an append would write to
		msgs[i].Headers[0] = postroom.Header{Name: "a", Value: append(make([]byte, 0, 10), 1, 2)}
		msgs[i].Headers[1] = postroom.Header{Name: "b", Value: []byte(" x ")}
		msgs[i].Time = time.Unix(1, 999).In(time.FixedZone("x", 60))
		msgs[i].Step = "step"
	}
	want := clones(msgs)
	if err := store(ctx, p, msgs...); err != nil {
		return err
	}
	for i := range msgs {
		if msgs[i].Step != "step" || !msgs[i].Time.Equal(time.Unix(1, 999)) || msgs[i].Topic != topic || msgs[i].ID != want[i].ID {
			return fmt.Errorf("message %d was changed", i)
		}
		if !bytes.Equal(msgs[i].Payload, want[i].Payload) || len(msgs[i].Headers) != 2 {
			return fmt.Errorf("payload or headers of message %d were changed", i)
		}
		if extra := msgs[i].Headers[:3][2]; extra.Name != "" || extra.Value != nil {
			return fmt.Errorf("something was written behind the headers of message %d", i)
		}
		if v := msgs[i].Headers[0].Value[:10]; !bytes.Equal(v, []byte{1, 2, 0, 0, 0, 0, 0, 0, 0, 0}) {
			return fmt.Errorf("something was written behind a header value of message %d", i)
		}
		// What was published is the caller's again.
		copy(msgs[i].Payload, "XXXX")
		msgs[i].Headers[0].Value[0] = 99
	}
	// One group's receiver writes to what it got; another must not see it.
	for _, group := range []string{"one", "two"} {
		m, err := e.subscribe(ctx, topic, group, len(want))
		if err != nil {
			return err
		}
		got, err := m.all(ctx, len(want))
		if err != nil {
			return err
		}
		for i := range got {
			want[i].Step = ""
			if err := e.compare(got[i], want[i]); err != nil {
				return fmt.Errorf("message %d at group %s: %w", i, group, err)
			}
			copy(got[i].Payload, "YYYY")
			got[i].Headers[0].Value[0] = 98
			got[i].Headers[0].Name = "changed"
		}
	}
	return nil
}
