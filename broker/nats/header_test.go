package nats

import (
	"bufio"
	"bytes"
	"errors"
	"io"
	"net/textproto"
	"slices"
	"strings"
	"testing"
	"time"
	"unicode/utf8"

	natsgo "github.com/nats-io/nats.go"

	"github.com/postroom/postroom"
)

// overTheWire writes headers and reads them as nats.go does, which trims
// values and knows lines only.
func overTheWire(t *testing.T, h natsgo.Header) natsgo.Header {
	t.Helper()
	var b bytes.Buffer
	for name, values := range h {
		for _, v := range values {
			if strings.ContainsAny(name+v, "\r\n") {
				t.Fatalf("header %q: %q would break the line", name, v)
			}
			_, _ = b.WriteString(name + ": " + v + "\r\n")
		}
	}
	_, _ = b.WriteString("\r\n")
	read := make(natsgo.Header)
	r := textproto.NewReader(bufio.NewReader(&b))
	for {
		line, err := r.ReadLine()
		if errors.Is(err, io.EOF) || line == "" {
			return read
		}
		name, value, ok := strings.Cut(line, ":")
		if !ok {
			t.Fatalf("line %q has no colon", line)
		}
		read[name] = append(read[name], strings.TrimSpace(value))
	}
}

// roundTrip encodes and decodes a message.
func roundTrip(t *testing.T, m postroom.Message) postroom.Message {
	t.Helper()
	var e encoder
	h := overTheWire(t, e.encode(&m, m.Topic))
	got := postroom.Message{Topic: m.Topic}
	if err := decode(&got, h, append([]byte{}, m.Payload...), m.Topic); err != nil {
		t.Fatal(err)
	}
	return got
}

// sorted puts headers into the order in which NATS delivers names.
func sorted(hs []postroom.Header) []postroom.Header {
	hs = slices.Clone(hs)
	slices.SortStableFunc(hs, func(a, b postroom.Header) int { return strings.Compare(a.Name, b.Name) })
	return hs
}

func compareHeaders(t *testing.T, got, want []postroom.Header) {
	t.Helper()
	got, want = sorted(got), sorted(want)
	if len(got) != len(want) {
		t.Fatalf("%d headers came back, want %d: %q, want %q", len(got), len(want), got, want)
	}
	for i := range want {
		g, w := got[i], want[i]
		if g.Name != w.Name || !bytes.Equal(g.Value, w.Value) || (g.Value == nil) != (w.Value == nil) {
			t.Errorf("%q came back as %q", w, g)
		}
	}
}

func TestHeadersSurvive(t *testing.T) {
	at := time.Date(2026, 12, 1, 2, 3, 4, 5000, time.UTC)
	m := postroom.Message{
		ID: "id with space", Topic: "orders", Key: "line\nbreak\x00", Time: at, Operation: "op",
		Headers: []postroom.Header{
			{Name: "plain", Value: []byte("value")},
			{Name: "plain", Value: []byte("again")},
			{Name: "Plain", Value: []byte("other case")},
			{Name: "Status", Value: []byte("503")},
			{Name: "description", Value: []byte("x")},
			{Name: "nil"},
			{Name: "empty", Value: []byte{}},
			{Name: "spaces", Value: []byte(" a ")},
			{Name: "binary", Value: []byte{0, 0xff, '\r', '\n'}},
			{Name: "looks encoded", Value: []byte("=?binary?B?AA==?=")},
			{Name: "looks-encoded", Value: []byte("=?nil?B??=")},
			{Name: "with:colon ", Value: []byte("v")},
			{Name: "ünïcode", Value: []byte("ü")},
		},
	}
	got := roundTrip(t, m)
	if got.ID != m.ID || got.Key != m.Key || !got.Time.Equal(at) || got.Operation != "op" || got.Payload != nil {
		t.Errorf("got %+v", got)
	}
	compareHeaders(t, got.Headers, m.Headers)
}

func FuzzHeaders(f *testing.F) {
	f.Add("id", "key", "name", []byte("value"), "Name", []byte("\r\n"))
	f.Add("a b", "\x00", "postroom", []byte(" "), "x y:", []byte("=?nil?B??="))
	f.Add("1", "", "Status", []byte(nil), "status", []byte{0xff})
	f.Fuzz(func(t *testing.T, id, key, name1 string, value1 []byte, name2 string, value2 []byte) {
		m := postroom.Message{
			ID: id, Topic: "orders", Key: key,
			Headers: []postroom.Header{{Name: name1, Value: value1}, {Name: name2, Value: value2}, {Name: name1, Value: value2}},
		}
		if id == "" || m.Validate(0) != nil || !utf8.ValidString(name1+name2) {
			return // the outbox refuses it
		}
		got := roundTrip(t, m)
		if got.ID != id || got.Key != key {
			t.Errorf("id %q key %q came back as %q, %q", id, key, got.ID, got.Key)
		}
		compareHeaders(t, got.Headers, m.Headers)
	})
}

// What a stranger sends is never an error that loses the message.
func FuzzDecode(f *testing.F) {
	f.Add("postroom-encoded", "1", "postroom-header", "bmFtZQ== =?binary?B?%%%?=", []byte("x"))
	f.Add("postroom-time", "yesterday", "POSTROOM-ID", "", []byte(nil))
	f.Fuzz(func(_ *testing.T, n1, v1, n2, v2 string, data []byte) {
		var m postroom.Message
		_ = decode(&m, natsgo.Header{n1: {v1}, n2: {v2}}, data, "orders") // must not panic
	})
}

func TestVerdictTakesOnlyRealAcks(t *testing.T) {
	for reply, stored := range map[string]bool{
		`{"stream":"s","seq":1}`:                               true,
		`{"stream":"s", "seq":12,"duplicate":true}`:            true,
		`{"stream":"s","domain":"d","seq":3}`:                  true,
		`{"stream":"s","seq":0}`:                               false,
		`{"stream":"s","seq":01}`:                              false,
		`{"stream":"s","seq":0,"duplicate":true}`:              false,
		`{"stream":"t","seq":1}`:                               false,
		`{"stream":"st","seq":1}`:                              false,
		`{"seq":1}`:                                            false,
		`{"stream":"s","seq":1,"error":{"code":503}}`:          false,
		`{"error":{"code":400,"err_code":10071},"stream":"s"}`: false,
		``:                        false,
		`ok`:                      false,
		`{"stream":"s","seq":}`:   false,
		`{"stream":"s","seq":-1}`: false,
	} {
		err, _ := verdict(&natsgo.Msg{Data: []byte(reply)}, "s")
		if (err == nil) != stored {
			t.Errorf("%s: %v, want stored %v", reply, err, stored)
		}
	}
}
