package postroom

import (
	"errors"
	"fmt"
	"strings"
	"unicode"
	"unicode/utf8"
)

// Limits of a message. The size of the payload is bounded by the outbox.
const (
	MaxIDLen    = 255  // bytes of Message.ID
	maxTopicLen = 249  // bytes of Message.Topic: Kafka's own limit
	maxKeyLen   = 1024 // bytes of Message.Key: it must fit an index
	maxNameLen  = 255  // bytes of a Header.Name
	maxStepLen  = 255  // bytes of Message.Step
)

// ErrInvalid is matched by every [InvalidError].
var ErrInvalid = errors.New("postroom: invalid message")

// An InvalidError says what is wrong with a message. It never contains the
// payload, a key or a header's value.
type InvalidError struct {
	Index   int    // position of the message in the call, from 0
	Field   string // "ID", "Topic", "Key", "Payload", "Headers[2].Name", …
	Problem string // what was found and what is wanted
}

func (e *InvalidError) Error() string {
	return fmt.Sprintf("postroom: message %d: %s %s", e.Index, e.Field, e.Problem)
}

// Is makes errors.Is(err, ErrInvalid) true.
func (e *InvalidError) Is(target error) bool { return target == ErrInvalid }

// Validate reports every problem of a message that is to be published, each an
// [*InvalidError] with the given index, joined by [errors.Join]. An empty ID is
// no problem: the outbox fills it.
func (m *Message) Validate(index int) error {
	var errs []error
	bad := func(field, format string, args ...any) {
		errs = append(errs, &InvalidError{index, field, fmt.Sprintf(format, args...)})
	}
	if m.ID != "" {
		if p := CheckID(m.ID); p != "" {
			bad("ID", "%s", p)
		}
	}
	switch {
	case m.Topic == "":
		bad("Topic", "is empty")
	case len(m.Topic) > maxTopicLen:
		bad("Topic", "has %d bytes, want at most %d", len(m.Topic), maxTopicLen)
	case !utf8.ValidString(m.Topic):
		bad("Topic", "is not valid UTF-8")
	case strings.ContainsFunc(m.Topic, func(r rune) bool { return unicode.IsSpace(r) || !unicode.IsPrint(r) }):
		bad("Topic", "contains white space or a character that is not printable")
	}
	switch {
	case len(m.Key) > maxKeyLen:
		bad("Key", "has %d bytes, want at most %d", len(m.Key), maxKeyLen)
	case !storable(m.Key):
		bad("Key", "is not valid UTF-8, or contains a zero byte; encode binary keys as text")
	}
	for i, h := range m.Headers {
		field := fmt.Sprintf("Headers[%d].Name", i)
		switch {
		case h.Name == "":
			bad(field, "is empty")
		case len(h.Name) > maxNameLen:
			bad(field, "has %d bytes, want at most %d", len(h.Name), maxNameLen)
		case !storable(h.Name):
			bad(field, "is not valid UTF-8, or contains a zero byte")
		case Reserved(h.Name):
			bad(field, "%q is reserved: names that begin with postroom- or Nats- are set by Postroom alone", h.Name)
		}
	}
	if len(m.Step) > maxStepLen {
		bad("Step", "has %d bytes, want at most %d", len(m.Step), maxStepLen)
	}
	if t := m.DeliverAt; !t.IsZero() && (t.Year() < 1970 || t.Year() > 9999) {
		bad("DeliverAt", "is in the year %d, want 1970 to 9999", t.Year())
	}
	return errors.Join(errs...)
}

// CheckID returns what makes id unusable as the ID of a message, or "".
func CheckID(id string) string {
	switch {
	case id == "":
		return "is empty"
	case len(id) > MaxIDLen:
		return fmt.Sprintf("has %d bytes, want at most %d", len(id), MaxIDLen)
	case !utf8.ValidString(id):
		return "is not valid UTF-8"
	case strings.TrimSpace(id) != id:
		return "begins or ends with white space"
	case strings.ContainsFunc(id, func(r rune) bool { return !unicode.IsPrint(r) }):
		return "contains a character that is not printable"
	}
	return ""
}

// Reserved reports whether callers may not use a header of that name.
func Reserved(name string) bool {
	lower := strings.ToLower(name)
	return strings.HasPrefix(lower, "postroom-") || strings.HasPrefix(lower, "nats-")
}

// storable reports whether PostgreSQL's text can hold s.
func storable(s string) bool {
	return utf8.ValidString(s) && !strings.ContainsRune(s, 0)
}
