package franz

import (
	"bytes"
	"strings"
	"sync/atomic"
	"time"

	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/postroom/postroom"
)

const (
	headerID        = "postroom-id"
	headerTime      = "postroom-time"
	headerOperation = "postroom-operation"

	timeLayout = "2006-01-02T15:04:05.000000Z07:00"
)

// fill forms the record of a message, and refers to its bytes.
func fill(r *kgo.Record, m *postroom.Message) {
	r.Topic, r.Value = m.Topic, m.Payload
	if m.HasKey() {
		r.Key = []byte(m.Key)
	}
	r.Headers = append(make([]kgo.RecordHeader, 0, 3+len(m.Headers)), kgo.RecordHeader{Key: headerID, Value: []byte(m.ID)})
	if !m.Time.IsZero() {
		r.Headers = append(r.Headers, kgo.RecordHeader{Key: headerTime, Value: m.Time.UTC().AppendFormat(nil, timeLayout)})
	}
	if m.Operation != "" {
		r.Headers = append(r.Headers, kgo.RecordHeader{Key: headerOperation, Value: []byte(m.Operation)})
	}
	for _, h := range m.Headers {
		r.Headers = append(r.Headers, kgo.RecordHeader{Key: h.Name, Value: h.Value})
	}
}

// message reads a record, of whoever wrote it. The message shares nothing with
// it. Our own headers are found in any case; of several, the exact spelling wins,
// else the first. The others stay as they are.
func message(r *kgo.Record) postroom.Message {
	m := postroom.Message{
		Topic: r.Topic, Key: string(r.Key), EmptyKey: r.Key != nil && len(r.Key) == 0,
		Payload: bytes.Clone(r.Value),
	}
	id, at, operation := find(r.Headers, headerID), find(r.Headers, headerTime), find(r.Headers, headerOperation)
	for i, h := range r.Headers {
		switch i {
		case id:
			m.ID = string(h.Value)
		case operation:
			m.Operation = string(h.Value)
		case at:
			if t, err := time.Parse(time.RFC3339Nano, string(h.Value)); err == nil {
				m.Time = t.UTC().Truncate(time.Microsecond)
			}
		default:
			m.Headers = append(m.Headers, postroom.Header{Name: h.Key, Value: bytes.Clone(h.Value)})
		}
	}
	return m
}

// find returns the index of a header, or -1.
func find(headers []kgo.RecordHeader, name string) int {
	like := -1
	for i := range headers {
		switch h := headers[i].Key; {
		case h == name:
			return i
		case like < 0 && strings.EqualFold(h, name):
			like = i
		}
	}
	return like
}

// validTopic reports whether Kafka takes the name.
func validTopic(name string) bool {
	if name == "" || name == "." || name == ".." || len(name) > 249 {
		return false
	}
	for i := range len(name) {
		c := name[i]
		switch {
		case 'a' <= c && c <= 'z', 'A' <= c && c <= 'Z', '0' <= c && c <= '9', c == '.', c == '_', c == '-':
		default:
			return false
		}
	}
	return true
}

// A partitioner gives keys to partitions as Kafka's Java client does, and
// messages without a key to those that have a leader, in turns.
type partitioner struct{}

func (partitioner) ForTopic(topic string) kgo.TopicPartitioner {
	return &turns{TopicPartitioner: kgo.StickyKeyPartitioner(nil).ForTopic(topic)}
}

// turns is a partitioner of one topic.
type turns struct {
	kgo.TopicPartitioner // of keys, all of which need consistency
}

// next is shared by the clients, so that many calls of one message are spread.
var next atomic.Uint32

func (t *turns) Partition(r *kgo.Record, n int) int {
	if r.Key != nil {
		return t.TopicPartitioner.Partition(r, n)
	}
	return int(next.Add(1) % uint32(n))
}
