package inbox_test

import (
	"slices"
	"strings"
	"testing"

	"github.com/postroom/postroom"
	"github.com/postroom/postroom/inbox"
	"github.com/postroom/postroom/internal/pgtest"
)

func headers(pairs ...string) (all []postroom.Header) {
	for i := 0; i < len(pairs); i += 2 {
		all = append(all, postroom.Header{Name: pairs[i], Value: []byte(pairs[i+1])})
	}
	return all
}

func TestIDFrom(t *testing.T) {
	const structured = "Application/CloudEvents+JSON; charset=utf-8"
	long := strings.Repeat("x", 300)
	cases := []struct {
		name    string
		id      func(postroom.Message) string
		headers []postroom.Header
		payload string
		want    string
	}{
		{"header", inbox.IDFromHeader("X-Request-ID"), headers("x-request-id", "r1", "X-Request-Id", "r2"), "", "r1"},
		{"empty header", inbox.IDFromHeader("X-Request-ID"), headers("x-request-id", ""), "", ""},
		{"no header", inbox.IDFromHeader("X-Request-ID"), nil, "", "own"},
		{"binary on Kafka", inbox.IDFromCloudEvent, headers("ce_source", "/shop", "ce_id", "7"), "", "/shop 7"},
		{"binary on NATS", inbox.IDFromCloudEvent, headers("CE-Source", "/shop", "CE-Id", "7"), "", "/shop 7"},
		{"binary with JSON data", inbox.IDFromCloudEvent, headers("ce_source", "/shop", "ce_id", "7", "content-type", "application/json"), `{"id":"8"}`, "/shop 7"},
		{"binary without source", inbox.IDFromCloudEvent, headers("ce_id", "7"), "", ""},
		{"binary without id", inbox.IDFromCloudEvent, headers("ce_source", "/shop"), "", ""},
		{"source with a space", inbox.IDFromCloudEvent, headers("ce_source", "a b", "ce_id", "7"), "", ""},
		{"structured", inbox.IDFromCloudEvent, headers("Content-Type", structured), `{"id":"7","source":"/shop","data":{"id":"8"}}`, "/shop 7"},
		{"structured without id", inbox.IDFromCloudEvent, headers("Content-Type", structured), `{"source":"/shop"}`, ""},
		{"structured, not JSON", inbox.IDFromCloudEvent, headers("Content-Type", structured), `{`, ""},
		{"no CloudEvent", inbox.IDFromCloudEvent, headers("content-type", "application/json"), `{"id":"7","source":"/shop"}`, "own"},
	}
	for _, c := range cases {
		m := postroom.Message{ID: "own", Topic: "orders", Headers: c.headers, Payload: []byte(c.payload)}
		if got := c.id(m); got != c.want {
			t.Errorf("%s: id = %q, want %q", c.name, got, c.want)
		}
	}
	one := inbox.IDFromCloudEvent(postroom.Message{Headers: headers("ce_source", "/a", "ce_id", long)})
	two := inbox.IDFromCloudEvent(postroom.Message{Headers: headers("ce_source", "/b", "ce_id", long)})
	if one == two || postroom.CheckID(one) != "" {
		t.Errorf("ids of long attributes = %q and %q, want two that are usable", one, two)
	}
}

// The id that the function finds is the one under which repeats are found; where
// it finds none, or panics, MissingID decides.
func TestMessageID(t *testing.T) {
	pool := newPool(t, pgtest.First(t))
	bus, rec := newBus()
	event := func(own, id string) postroom.Message {
		m := message(own)
		m.Headers = headers("ce_source", "/shop", "ce_id", id)
		return m
	}
	redriven := event("m6", "9") // its dead letter's id holds
	redriven.Headers = append(redriven.Headers, headers("postroom-dead-id", "old", "postroom-dead-subscriber", "billing")...)
	publish(t, bus, event("m1", "7"), event("m2", "7"), event("m3", "8"), event("m4", ""), event("m5", "boom"), redriven)
	start(t, pool, rec, effect, inbox.Config{
		MissingID: inbox.DeadLetterWithoutID,
		MessageID: func(m postroom.Message) string {
			if id, _ := m.Header("ce_id"); string(id) == "boom" {
				panic("boom")
			}
			return inbox.IDFromCloudEvent(m)
		},
	})
	eventually(t, "six acks", func() bool { return rec.count("ack") == 6 })
	got := effects(t, pool)
	slices.Sort(got)
	wantStrings(t, "effects", got, "/shop 7", "/shop 8", "old")
	wantStrings(t, "letters", query(t, pool, `SELECT message_id || '|' || reason FROM postroom.inbox_dead_letters ORDER BY message_id`),
		"position:orders/3|the message's id is empty", "position:orders/4|the message's id is empty")
}
