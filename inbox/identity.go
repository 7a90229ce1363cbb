package inbox

import (
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"mime"
	"strings"

	"github.com/postroom/postroom"
	"github.com/postroom/postroom/broker"
)

// IDFromHeader returns a function for [Config].MessageID that takes the first
// header of that name, compared without regard to case, and the message's own ID
// where there is none.
func IDFromHeader(name string) func(postroom.Message) string {
	return func(m postroom.Message) string {
		if value, ok := m.Header(name); ok {
			return string(value)
		}
		return m.ID
	}
}

// IDFromCloudEvent is for [Config].MessageID where messages are CloudEvents: it
// forms the id from the attributes source and id, which together identify an
// event. It finds them in the headers (binary mode: ce_id and ce_source, or ce-id
// and ce-source) or, where the header content-type is application/cloudevents+json,
// in the payload (structured mode). A message that is no CloudEvent keeps its own
// ID; one that lacks an attribute has none.
func IDFromCloudEvent(m postroom.Message) string {
	source, id, ok := cloudEvent(&m)
	switch {
	case !ok:
		return m.ID
	case source == "" || id == "" || strings.Contains(source, " "): // no URI has a space
		return ""
	}
	joined := source + " " + id
	if len(joined) > postroom.MaxIDLen {
		sum := sha256.Sum256([]byte(joined))
		return "cloudevent:" + hex.EncodeToString(sum[:])
	}
	return joined
}

// cloudEvent returns the attributes of m that identify it, and whether m is a
// CloudEvent.
func cloudEvent(m *postroom.Message) (source, id string, ok bool) {
	contentType, _ := m.Header("content-type")
	if kind, _, _ := mime.ParseMediaType(string(contentType)); kind == "application/cloudevents+json" {
		var event struct {
			Source string `json:"source"`
			ID     string `json:"id"`
		}
		if json.Unmarshal(m.Payload, &event) != nil {
			return "", "", true
		}
		return event.Source, event.ID, true
	}
	attribute := func(name string) string {
		for _, prefix := range []string{"ce_", "ce-"} {
			if value, found := m.Header(prefix + name); found {
				ok = true
				return string(value)
			}
		}
		return ""
	}
	source, id = attribute("source"), attribute("id")
	return source, id, ok
}

// identify gives t's message the id under which it is handled.
func (c *Consumer) identify(t *task, p broker.Position) {
	if t.redriven = restore(&t.m, c.box.subscriber); !t.redriven && c.box.cfg.MessageID != nil {
		t.m.ID = c.messageID(t.m)
	}
	problem := postroom.CheckID(t.m.ID)
	if problem == "" {
		return
	}
	t.m.ID = positionID(p)
	if c.box.cfg.MissingID == DeadLetterWithoutID {
		t.dead = &deadLetter{reason: "the message's id " + problem}
	}
}

// messageID calls the user's function. A panic there is no id.
func (c *Consumer) messageID(m postroom.Message) (id string) {
	defer func() {
		if recover() != nil {
			id = ""
		}
	}()
	return c.box.cfg.MessageID(m)
}
