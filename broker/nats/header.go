package nats

import (
	"encoding/base64"
	"errors"
	"slices"
	"strings"
	"time"
	"unicode/utf8"

	natsgo "github.com/nats-io/nats.go"

	"github.com/postroom/postroom"
)

// Header names on the wire, in their one exact spelling. The package comment
// tells what they mean.
const (
	headerID        = "postroom-id"
	headerKey       = "postroom-key"
	headerNull      = "postroom-null"
	headerTime      = "postroom-time"
	headerOperation = "postroom-operation"
	headerEncoded   = "postroom-encoded"
	headerExtra     = "postroom-header"
	headerMsgID     = "Nats-Msg-Id"
)

// Values that NATS cannot carry are written as an RFC 2047 "B" word with a
// charset of our own, in a message that holds postroom-encoded.
const (
	wordStart = "=?"
	wordBytes = "=?binary?B?"
	wordNil   = "=?nil?B?"
	wordEnd   = "?="
)

const timeLayout = "2006-01-02T15:04:05.000000Z07:00"

// An encoder writes messages as NATS headers. It reuses its memory: the headers
// of one message are gone when the next one is encoded.
type encoder struct {
	header natsgo.Header
	values []string
	size   int  // bytes of the header on the wire
	marked bool // postroom-encoded is needed
}

// encode returns the headers of m for the given subject.
func (e *encoder) encode(m *postroom.Message, subject string) natsgo.Header {
	if e.header == nil {
		e.header = make(natsgo.Header)
	}
	clear(e.header)
	e.values, e.marked = e.values[:0], false
	e.size = len("NATS/1.0\r\n\r\n")
	if m.ID != "" {
		e.set(headerMsgID, msgID(m.ID, subject))
		e.add(headerID, m.ID)
	}
	if m.HasKey() {
		e.add(headerKey, m.Key)
	}
	if m.Payload == nil {
		e.set(headerNull, "1")
	}
	if !m.Time.IsZero() {
		e.set(headerTime, m.Time.UTC().Format(timeLayout))
	}
	if m.Operation != "" {
		e.add(headerOperation, m.Operation)
	}
	for i := range m.Headers {
		h := &m.Headers[i]
		switch {
		case !plainName(h.Name) || ambiguous(m.Headers, i):
			e.marked = true
			e.set(headerExtra, base64.StdEncoding.EncodeToString([]byte(h.Name))+" "+extraValue(h.Value))
		case h.Value == nil:
			e.marked = true
			e.set(h.Name, wordNil+wordEnd)
		default:
			e.add(h.Name, string(h.Value))
		}
	}
	if e.marked {
		e.set(headerEncoded, "1")
	}
	return e.header
}

// add adds a value in whatever form NATS can carry.
func (e *encoder) add(name, value string) {
	if !plainValue(value) {
		e.marked = true
		value = wordBytes + base64.StdEncoding.EncodeToString([]byte(value)) + wordEnd
	}
	e.set(name, value)
}

func (e *encoder) set(name, value string) {
	e.size += len(name) + len(": ") + len(value) + len("\r\n")
	if old, ok := e.header[name]; ok {
		e.header[name] = append(old, value)
		return
	}
	n := len(e.values)
	e.values = append(e.values, value)
	e.header[name] = e.values[n : n+1 : n+1]
}

func extraValue(v []byte) string {
	if v == nil {
		return wordNil + wordEnd
	}
	return wordBytes + base64.StdEncoding.EncodeToString(v) + wordEnd
}

// msgID forms what the stream removes duplicates by. It holds the subject,
// since a stream compares ids across all of its subjects. A subject holds no
// space, so the last one parts the two.
func msgID(id, subject string) string {
	if !plainValue(id) {
		id = base64.StdEncoding.EncodeToString([]byte(id))
	}
	return id + " " + subject
}

// plainName reports whether a header can travel under its own name: a token of
// RFC 9110, and none that a client, the server or we give a meaning to.
func plainName(name string) bool {
	if name == "" {
		return false
	}
	for i := range len(name) {
		if c := name[i]; !('a' <= c && c <= 'z' || 'A' <= c && c <= 'Z' || '0' <= c && c <= '9' ||
			strings.IndexByte("!#$%&'*+-.^_`|~", c) >= 0) {
			return false
		}
	}
	switch name[0] {
	case 'N', 'n':
		return !hasPrefixFold(name, "nats-")
	case 'S', 's':
		return !strings.EqualFold(name, "Status")
	case 'D', 'd':
		return !strings.EqualFold(name, "Description")
	case 'P', 'p':
		return !ownName(name)
	}
	return true
}

// ownName reports whether the name is one that decoding takes away.
func ownName(name string) bool {
	if !hasPrefixFold(name, "postroom-") {
		return false
	}
	for _, own := range []string{headerID, headerKey, headerNull, headerTime, headerOperation, headerEncoded, headerExtra} {
		if strings.EqualFold(name, own) {
			return true
		}
	}
	return false
}

func hasPrefixFold(s, prefix string) bool {
	return len(s) >= len(prefix) && strings.EqualFold(s[:len(prefix)], prefix)
}

// ambiguous reports whether another header has the same name in other case:
// NATS would lose which of the two came first, and so which one a lookup finds.
func ambiguous(hs []postroom.Header, i int) bool {
	for j := range hs {
		if len(hs[j].Name) == len(hs[i].Name) && hs[j].Name != hs[i].Name && strings.EqualFold(hs[j].Name, hs[i].Name) {
			return true
		}
	}
	return false
}

// plainValue reports whether NATS carries a value as it is. Valid UTF-8 passes
// through nats.go; control characters, white space at the ends and what looks
// like a word of ours do not.
func plainValue(v string) bool {
	if v == "" {
		return true
	}
	if v[0] == ' ' || v[0] == '\t' || v[len(v)-1] == ' ' || v[len(v)-1] == '\t' || strings.HasPrefix(v, wordStart) {
		return false
	}
	ascii := true
	for i := range len(v) {
		c := v[i]
		if c < ' ' && c != '\t' || c == 0x7f {
			return false
		}
		ascii = ascii && c < utf8.RuneSelf
	}
	return ascii || utf8.ValidString(v)
}

var errEncoding = errors.New("malformed postroom encoding")

// decode fills m from a NATS message. Names of ours are found in any case; of
// several, the exact spelling wins, else the first in byte order. Where a value
// does not have the form that its mark announces, it is left as it came and an
// error is returned beside the message.
func decode(m *postroom.Message, h natsgo.Header, data []byte, subject string) error {
	m.Payload = data
	if data == nil {
		m.Payload = []byte{}
	}
	if len(h) == 0 {
		return nil
	}
	d := decoder{header: h, names: make([]string, 0, len(h))}
	for name := range h {
		d.names = append(d.names, name)
	}
	slices.Sort(d.names)
	_, d.marked = d.own(headerEncoded)

	m.ID, _ = d.own(headerID)
	if key, ok := d.own(headerKey); ok {
		m.Key, m.EmptyKey = key, key == ""
	}
	if v, ok := d.own(headerNull); ok && v == "1" && len(data) == 0 {
		m.Payload = nil
	}
	if v, ok := d.own(headerTime); ok {
		if t, err := time.Parse(time.RFC3339Nano, v); err == nil {
			m.Time = t.UTC().Truncate(time.Microsecond)
		}
	}
	m.Operation, _ = d.own(headerOperation)
	d.extras(m)
	d.others(m, subject)
	return d.err
}

type decoder struct {
	header natsgo.Header
	names  []string // sorted; "" where it was taken
	marked bool
	err    error
}

// own takes a header of ours and returns its first value.
func (d *decoder) own(name string) (string, bool) {
	i := slices.Index(d.names, name)
	if i < 0 {
		i = slices.IndexFunc(d.names, func(n string) bool { return strings.EqualFold(n, name) })
	}
	if i < 0 {
		return "", false
	}
	values := d.header[d.names[i]]
	d.names[i] = ""
	if len(values) == 0 {
		return "", false
	}
	return string(d.value(values[0])), true
}

// value undoes the encoding of one value.
func (d *decoder) value(v string) []byte {
	if !d.marked || !strings.HasPrefix(v, wordStart) {
		return []byte(v)
	}
	if v == wordNil+wordEnd {
		return nil
	}
	text, ok := strings.CutPrefix(v, wordBytes)
	text, ok2 := strings.CutSuffix(text, wordEnd)
	raw, err := base64.StdEncoding.DecodeString(text)
	if !ok || !ok2 || err != nil {
		d.err = errEncoding
		return []byte(v)
	}
	return raw
}

// extras appends the headers whose names could not travel.
func (d *decoder) extras(m *postroom.Message) {
	if !d.marked {
		return
	}
	i := slices.Index(d.names, headerExtra)
	if i < 0 {
		return
	}
	var odd []string
	for _, v := range d.header[headerExtra] {
		name, value, ok := strings.Cut(v, " ")
		raw, err := base64.StdEncoding.DecodeString(name)
		if !ok || err != nil {
			d.err = errEncoding
			odd = append(odd, v)
			continue
		}
		m.Headers = append(m.Headers, postroom.Header{Name: string(raw), Value: d.value(value)})
	}
	d.names[i] = ""
	for _, v := range odd {
		m.Headers = append(m.Headers, postroom.Header{Name: headerExtra, Value: []byte(v)})
	}
}

// others appends all further headers, sorted by name, each name's values in
// their order. The id that encode made for the stream is left out.
func (d *decoder) others(m *postroom.Message, subject string) {
	for _, name := range d.names {
		if name == "" {
			continue
		}
		values := d.header[name]
		if name == headerMsgID && len(values) == 1 && m.ID != "" && values[0] == msgID(m.ID, subject) {
			continue
		}
		for _, v := range values {
			m.Headers = append(m.Headers, postroom.Header{Name: name, Value: d.value(v)})
		}
	}
}
