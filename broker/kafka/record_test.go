package kafka

import (
	"bytes"
	"encoding/binary"
	"errors"
	"io"
	"slices"
	"testing"
	"time"

	kafkago "github.com/segmentio/kafka-go"
	"github.com/segmentio/kafka-go/protocol"

	"github.com/postroom/postroom"
)

// readBatch reads what was written, by kafka-go.
func readBatch(t testing.TB, b []byte) []protocol.Record {
	t.Helper()
	var set protocol.RecordSet
	if n, err := set.ReadFrom(bytes.NewReader(b)); err != nil || n != int64(len(b)) {
		t.Fatalf("%d of %d bytes are read (%v)", n, len(b), err)
	}
	var all []protocol.Record
	for {
		r, err := set.Records.ReadRecord()
		if errors.Is(err, io.EOF) {
			return all
		}
		if err != nil {
			t.Fatal(err)
		}
		all = append(all, *r)
	}
}

func wantBytes(t testing.TB, what string, got protocol.Bytes, want []byte) {
	t.Helper()
	b, err := protocol.ReadAll(got)
	if err != nil {
		t.Fatal(err)
	}
	if (got == nil) != (want == nil) || !bytes.Equal(b, want) {
		t.Errorf("%s is %q (null: %v), want %q (null: %v)", what, b, got == nil, want, want == nil)
	}
}

// wantRecord compares a record with the message it was made of.
func wantRecord(t testing.TB, r protocol.Record, m *postroom.Message, place int, at time.Time) {
	t.Helper()
	if r.Offset != int64(place) || !r.Time.Equal(at.Truncate(time.Millisecond)) {
		t.Errorf("offset %d, time %v, want %d, %v", r.Offset, r.Time, place, at)
	}
	wantBytes(t, "key", r.Key, key(m))
	wantBytes(t, "value", r.Value, m.Payload)
	want := []protocol.Header{{Key: "postroom-id", Value: []byte(m.ID)}}
	if !m.Time.IsZero() {
		want = append(want, protocol.Header{Key: "postroom-time", Value: []byte(m.Time.UTC().Format("2006-01-02T15:04:05.000000Z07:00"))})
	}
	if m.Operation != "" {
		want = append(want, protocol.Header{Key: "postroom-operation", Value: []byte(m.Operation)})
	}
	for _, h := range m.Headers {
		want = append(want, protocol.Header{Key: h.Name, Value: h.Value})
	}
	if !slices.EqualFunc(r.Headers, want, func(a, b protocol.Header) bool {
		return a.Key == b.Key && bytes.Equal(a.Value, b.Value) && (a.Value == nil) == (b.Value == nil)
	}) {
		t.Errorf("headers %q, want %q", r.Headers, want)
	}
}

func TestBatch(t *testing.T) {
	at := time.Date(2026, 2, 3, 4, 5, 6, 789_000_000, time.UTC)
	msgs := []postroom.Message{
		{ID: "0", Key: "k", Payload: []byte("v")},
		{ID: "not in the batch"},
		{ID: "2", EmptyKey: true, Payload: []byte{}, Operation: "op"},
		{ID: "3", Time: at, Headers: []postroom.Header{{Name: "n"}, {Name: "n", Value: []byte{}}, {Name: "\xff", Value: []byte{0, 0xff}}}},
		{ID: "4", Time: time.Date(12345, 1, 1, 0, 0, 0, 0, time.FixedZone("", 3600)), Payload: make([]byte, 70_000)},
	}
	for i := range 200 { // places of two bytes
		msgs = append(msgs, postroom.Message{ID: string(rune('A' + i))})
	}
	indexes := []int{0}
	for i := 2; i < len(msgs); i++ {
		indexes = append(indexes, i)
	}
	for _, k := range []kafkago.Compression{0, kafkago.Gzip, kafkago.Snappy, kafkago.Lz4, kafkago.Zstd} {
		w := &writer{buf: []byte("before")}
		if err := w.batch(msgs, indexes, at, k); err != nil {
			t.Fatal(err)
		}
		b := w.buf[len("before"):]
		if n := binary.BigEndian.Uint32(b); int(n) != len(b)-4 {
			t.Errorf("the length before the batch is %d, want %d", n, len(b)-4)
		}
		records := readBatch(t, b)
		if len(records) != len(indexes) {
			t.Fatalf("%d records, want %d", len(records), len(indexes))
		}
		for place, i := range indexes {
			wantRecord(t, records[place], &msgs[i], place, at)
		}
	}
}

// size never says less than what a record takes, and not much more.
func FuzzSize(f *testing.F) {
	f.Add("id", "key", []byte("payload"), "op", "name", []byte("value"), int64(1_700_000_000), uint16(3))
	f.Add("", "", []byte{}, "", "", []byte{}, int64(0), uint16(300))
	f.Add("id", "k", make([]byte, 64), "", "n", make([]byte, 8192), int64(1<<40), uint16(0))
	f.Fuzz(func(t *testing.T, id, key string, payload []byte, operation, name string, value []byte, unix int64, place uint16) {
		m := postroom.Message{
			ID: id, Key: key, Payload: payload, Operation: operation,
			Headers: []postroom.Header{{Name: name, Value: value}, {Name: name}},
		}
		if unix %= 1 << 35; unix != 0 {
			m.Time = time.Unix(unix, 0)
		}
		w := new(writer)
		w.record(&m, int(place))
		n, prefix := binary.Varint(w.buf)
		if int(n) != len(w.buf)-prefix {
			t.Errorf("a record of %d bytes says that it has %d", len(w.buf)-prefix, n)
		}
		if s := size(&m); s < len(w.buf) || s > len(w.buf)+20 {
			t.Errorf("size is %d, the record takes %d bytes", s, len(w.buf))
		}
		w.buf = nil
		at := time.UnixMilli(unix)
		if err := w.batch([]postroom.Message{m}, []int{0}, at, 0); err != nil {
			t.Fatal(err)
		}
		if s := size(&m) + batchOverhead; s < len(w.buf)-lengthSize {
			t.Errorf("size is %d, the batch takes %d bytes", s, len(w.buf)-lengthSize)
		}
		wantRecord(t, readBatch(t, w.buf)[0], &m, 0, at)
	})
}
