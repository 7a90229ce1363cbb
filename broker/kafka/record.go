package kafka

import (
	"errors"
	"io"
	"math/bits"
	"sync"
	"sync/atomic"
	"time"

	"github.com/segmentio/kafka-go/protocol"

	"github.com/postroom/postroom"
)

const (
	headerID        = "postroom-id"
	headerTime      = "postroom-time"
	headerOperation = "postroom-operation"

	timeLayout = "2006-01-02T15:04:05.000000Z07:00"

	batchOverhead = 61 // header of a batch, the length in front of it included
	// What stands before a record's key: its length (5 at most), attributes, and
	// the two deltas (10 and 5 at most).
	recordOverhead = 21
)

func ownHeaders(m *postroom.Message) []protocol.Header {
	hs := make([]protocol.Header, 0, 3+len(m.Headers))
	hs = append(hs, protocol.Header{Key: headerID, Value: []byte(m.ID)})
	if !m.Time.IsZero() {
		hs = append(hs, protocol.Header{Key: headerTime, Value: m.Time.UTC().AppendFormat(nil, timeLayout)})
	}
	if m.Operation != "" {
		hs = append(hs, protocol.Header{Key: headerOperation, Value: []byte(m.Operation)})
	}
	return hs
}

// record forms the record of a message, and refers to its bytes.
func record(m *postroom.Message, at time.Time) protocol.Record {
	r := protocol.Record{Time: at, Key: protocol.NewBytes(key(m)), Value: protocol.NewBytes(m.Payload), Headers: ownHeaders(m)}
	for _, h := range m.Headers {
		r.Headers = append(r.Headers, protocol.Header{Key: h.Name, Value: h.Value})
	}
	return r
}

// key returns the record's key, nil where there is none.
func key(m *postroom.Message) []byte {
	if !m.HasKey() {
		return nil
	}
	return []byte(m.Key)
}

// size is at least the size of the message's record in a batch.
func size(m *postroom.Message) int {
	n := recordOverhead + sized(len(m.Key)) + sized(len(m.Payload)) + varint(3+len(m.Headers))
	n += sized(len(headerID)) + sized(len(m.ID))
	if !m.Time.IsZero() {
		n += sized(len(headerTime)) + sized(len(timeLayout))
	}
	if m.Operation != "" {
		n += sized(len(headerOperation)) + sized(len(m.Operation))
	}
	for i := range m.Headers {
		n += sized(len(m.Headers[i].Name)) + sized(len(m.Headers[i].Value))
	}
	return n
}

func sized(n int) int { return varint(n) + n }

// varint is the size of a zigzag number.
func varint(n int) int { return (bits.Len64(uint64(n)<<1|1) + 6) / 7 }

var errStopped = errors.New("the call has ended")

// records hands a batch to the transport, which encodes it in a goroutine of its
// own and goes on with that after the context has ended. stop waits until it no
// longer looks at the messages, and makes a batch that has not been encoded fail.
type records struct {
	msgs  []postroom.Message
	batch []int
	at    time.Time

	next    int
	current protocol.Record
	stopped atomic.Bool
	reading sync.Mutex // held from the first ReadRecord to the end
	locked  bool       // by the reader
}

func (r *records) ReadRecord() (*protocol.Record, error) {
	if !r.locked {
		r.reading.Lock()
		r.locked = true
	}
	err := io.EOF
	switch {
	case r.stopped.Load():
		err = errStopped
	case r.next < len(r.batch):
		r.current = record(&r.msgs[r.batch[r.next]], r.at)
		r.next++
		return &r.current, nil
	}
	r.locked = false
	r.reading.Unlock()
	return nil, err
}

func (r *records) stop() {
	r.stopped.Store(true)
	r.reading.Lock()
	defer r.reading.Unlock()
	r.msgs = nil
}
