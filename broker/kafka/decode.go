package kafka

import (
	"cmp"
	"errors"
	"io"
	"slices"
	"strings"
	"time"

	"github.com/segmentio/kafka-go/protocol"
	"github.com/segmentio/kafka-go/protocol/fetch"

	"github.com/postroom/postroom"
)

// entrySize is added to the bytes of a message for what keeping it costs.
const entrySize = 200

// decode returns the records of an answer that are for readers, from an offset on
// and until room is filled, and the offset to go on at.
//
// Records of aborted transactions are left out where only committed ones are
// wanted. A broker names the producers whose transactions were aborted and the
// offset of the first record of each; the transaction ends with its abort marker.
func (f *feed) decode(a *fetch.ResponsePartition, from int64, room int) (records []*entry, next int64, err error) {
	stream, _ := a.RecordSet.Records.(*protocol.RecordStream)
	if stream == nil {
		return nil, from, nil
	}
	var filter abortFilter
	if !f.b.cfg.ReadUncommitted {
		filter.coming = slices.Clone(a.AbortedTransactions)
		slices.SortFunc(filter.coming, func(a, b fetch.ResponseTransaction) int { return cmp.Compare(a.FirstOffset, b.FirstOffset) })
	}
	next = from
	var maker maker
	for _, batch := range stream.Records {
		if marker, ok := batch.(*protocol.ControlBatch); ok {
			next = max(next, filter.end(marker))
			continue
		}
		hidden := filter.hides(batch)
		for {
			rec, err := batch.ReadRecord()
			if errors.Is(err, io.EOF) {
				break
			}
			if err != nil {
				return nil, 0, err
			}
			if rec.Offset < from || hidden {
				drop(rec)
				next = max(next, rec.Offset+1)
				continue
			}
			if room <= 0 && len(records) > 0 {
				drop(rec)
				return records, next, nil
			}
			r, err := maker.entry(f.s.Topic, rec)
			if err != nil {
				return nil, 0, err
			}
			records = append(records, r)
			room -= r.size
			next = rec.Offset + 1
		}
	}
	if next == from && len(stream.Records) > 0 {
		// A batch that held the offset, before the log was compacted.
		next++
	}
	return records, next, nil
}

func drop(rec *protocol.Record) {
	if rec.Key != nil {
		_ = rec.Key.Close()
	}
	if rec.Value != nil {
		_ = rec.Value.Close()
	}
}

// An abortFilter knows whose batches are hidden, along one answer.
type abortFilter struct {
	coming  []fetch.ResponseTransaction // by first offset
	aborted map[int64]bool              // producers
}

// hides reports whether a batch is not for readers. Batches are given in order,
// those with markers to end.
func (a *abortFilter) hides(batch protocol.RecordReader) bool {
	b, ok := batch.(*protocol.RecordBatch)
	if !ok {
		return false // of a time before transactions
	}
	a.reach(b.BaseOffset)
	return b.Attributes.Transactional() && a.aborted[b.ProducerID]
}

// reach takes note of the transactions that begin at or before an offset.
func (a *abortFilter) reach(offset int64) {
	for len(a.coming) > 0 && a.coming[0].FirstOffset <= offset {
		if a.aborted == nil {
			a.aborted = make(map[int64]bool)
		}
		a.aborted[a.coming[0].ProducerID] = true
		a.coming = a.coming[1:]
	}
}

// abortMarker is the type of a control record that ends an aborted transaction.
const abortMarker = 0

// end takes note of a transaction's end, and returns the offset after its marker.
func (a *abortFilter) end(b *protocol.ControlBatch) (next int64) {
	a.reach(b.BaseOffset)
	for {
		rec, err := b.Records.ReadRecord()
		if err != nil {
			return next
		}
		next = rec.Offset + 1
		if c, err := protocol.ReadControlRecord(rec); err == nil && c.Type == abortMarker {
			delete(a.aborted, b.ProducerID)
		}
	}
}

// A maker makes the entries of one answer, several at a time in memory.
type maker struct {
	free []entry
	key  []byte
}

func (k *maker) entry(topic string, rec *protocol.Record) (*entry, error) {
	defer drop(rec)
	if len(k.free) == 0 {
		k.free = make([]entry, 32)
	}
	e := &k.free[0]
	k.free = k.free[1:]
	e.offset = rec.Offset
	e.message.Topic = topic
	if rec.Key != nil {
		k.key = slices.Grow(k.key[:0], rec.Key.Len())[:rec.Key.Len()]
		if _, err := io.ReadFull(rec.Key, k.key); err != nil {
			return nil, err
		}
		e.message.Key, e.message.EmptyKey = string(k.key), len(k.key) == 0
	}
	payload, err := protocol.ReadAll(rec.Value)
	if err != nil {
		return nil, err
	}
	e.message.Payload = payload
	e.size = entrySize + len(e.message.Key) + len(payload)
	for i := range rec.Headers {
		e.size += len(rec.Headers[i].Key) + len(rec.Headers[i].Value)
	}
	takeHeaders(&e.message, rec.Headers)
	return e, nil
}

// takeHeaders takes what headers of ours say, and all others as they are. Ours are
// found in any case; of several, the exact spelling wins, else the first.
func takeHeaders(m *postroom.Message, headers []protocol.Header) {
	id, at, operation := find(headers, headerID), find(headers, headerTime), find(headers, headerOperation)
	if n := len(headers); n > 0 {
		m.Headers = make([]postroom.Header, 0, n)
	}
	for i, h := range headers {
		switch i {
		case id:
			m.ID = string(h.Value)
		case operation:
			m.Operation = string(h.Value)
		case at:
			t, err := time.Parse(time.RFC3339Nano, string(h.Value))
			if err == nil {
				m.Time = t.UTC().Truncate(time.Microsecond)
			}
		default:
			m.Headers = append(m.Headers, postroom.Header{Name: h.Key, Value: h.Value})
		}
	}
	if len(m.Headers) == 0 {
		m.Headers = nil
	}
}

// find returns the index of a header, or -1.
func find(headers []protocol.Header, name string) int {
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
