package kafka

import (
	"bytes"
	"encoding/binary"
	"hash/crc32"
	"math/bits"
	"slices"
	"time"

	kafkago "github.com/segmentio/kafka-go"

	"github.com/postroom/postroom"
)

const (
	headerID        = "postroom-id"
	headerTime      = "postroom-time"
	headerOperation = "postroom-operation"

	timeLayout = "2006-01-02T15:04:05.000000Z07:00"

	// What stands before the records of a batch, the length in front of the batch
	// and the batch's own included.
	lengthSize    = 4
	batchOverhead = 61
	// The most bytes of a record's length and of its place in the batch.
	recordOverhead = 10
)

// size is at least the size of the message's record in a batch.
func size(m *postroom.Message) int {
	return recordOverhead + bodySize(m, len(timeLayout))
}

// bodySize is the size of a record without its length and its place in the batch.
func bodySize(m *postroom.Message, timeSize int) int {
	n := 2 + sized(len(m.Key)) + sized(len(m.Payload)) + varintSize(headers(m)) // 2: attributes, and no time of its own
	n += sized(len(headerID)) + sized(len(m.ID))
	if !m.Time.IsZero() {
		n += sized(len(headerTime)) + sized(timeSize)
	}
	if m.Operation != "" {
		n += sized(len(headerOperation)) + sized(len(m.Operation))
	}
	for i := range m.Headers {
		n += sized(len(m.Headers[i].Name)) + sized(len(m.Headers[i].Value))
	}
	return n
}

// headers is how many headers the record has, ours included.
func headers(m *postroom.Message) int {
	n := 1 + len(m.Headers)
	if !m.Time.IsZero() {
		n++
	}
	if m.Operation != "" {
		n++
	}
	return n
}

func sized(n int) int { return varintSize(n) + n }

// varintSize is the size of a zigzag number.
func varintSize(n int) int { return (bits.Len64(uint64(n)<<1|1) + 6) / 7 }

// A writer forms record batches, of version 2. The transport could, from records;
// it takes twice as long, and does it in a goroutine that goes on with the
// messages after the call has ended.
type writer struct {
	buf  []byte
	time []byte // of the record that is written
}

// batch appends a batch of the messages at the indexes, with its length before it.
func (w *writer) batch(msgs []postroom.Message, indexes []int, at time.Time, compression kafkago.Compression) error {
	start := len(w.buf)
	w.buf = append(w.buf, make([]byte, lengthSize+batchOverhead)...)
	records := len(w.buf)
	for place, i := range indexes {
		w.record(&msgs[i], place)
	}
	if compression != 0 {
		var small bytes.Buffer
		c := compression.Codec().NewWriter(&small)
		if _, err := c.Write(w.buf[records:]); err != nil {
			return err
		}
		if err := c.Close(); err != nil {
			return err
		}
		w.buf = append(w.buf[:records], small.Bytes()...)
	}
	b := w.buf[start+lengthSize:]
	put := binary.BigEndian
	put.PutUint32(w.buf[start:], uint32(len(b)))
	// The base offset (8 bytes) is the broker's to set.
	put.PutUint32(b[8:], uint32(len(b)-12)) // what follows
	put.PutUint32(b[12:], ^uint32(0))       // the leader's epoch is not known
	b[16] = 2
	put.PutUint16(b[21:], uint16(compression))
	put.PutUint32(b[23:], uint32(len(indexes)-1))
	put.PutUint64(b[27:], uint64(at.UnixMilli())) // of the first record
	put.PutUint64(b[35:], uint64(at.UnixMilli())) // of the latest
	for i := 43; i < 57; i++ {
		b[i] = 0xff // no producer's id, epoch and sequence
	}
	put.PutUint32(b[57:], uint32(len(indexes)))
	put.PutUint32(b[17:], crc32.Checksum(b[21:], castagnoli))
	return nil
}

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

func (w *writer) record(m *postroom.Message, place int) {
	w.time = w.time[:0]
	if !m.Time.IsZero() {
		w.time = m.Time.UTC().AppendFormat(w.time, timeLayout)
	}
	n := bodySize(m, len(w.time)) + varintSize(place)
	w.buf = slices.Grow(w.buf, n+recordOverhead)
	w.number(n)
	w.buf = append(w.buf, 0, 0) // attributes, and the time since the first record
	w.number(place)
	field(w, m.Key, !m.HasKey())
	field(w, m.Payload, m.Payload == nil)
	w.number(headers(m))
	header(w, headerID, m.ID, false)
	if !m.Time.IsZero() {
		header(w, headerTime, w.time, false)
	}
	if m.Operation != "" {
		header(w, headerOperation, m.Operation, false)
	}
	for i := range m.Headers {
		h := &m.Headers[i]
		header(w, h.Name, h.Value, h.Value == nil)
	}
}

func (w *writer) number(n int) { w.buf = binary.AppendVarint(w.buf, int64(n)) }

func field[T string | []byte](w *writer, text T, null bool) {
	if null {
		w.number(-1)
		return
	}
	w.number(len(text))
	w.buf = append(w.buf, text...)
}

func header[T string | []byte](w *writer, name string, value T, null bool) {
	field(w, name, false)
	field(w, value, null)
}

// key returns the record's key, nil where there is none.
func key(m *postroom.Message) []byte {
	if !m.HasKey() {
		return nil
	}
	return []byte(m.Key)
}
