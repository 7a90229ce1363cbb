package kafka

import (
	"testing"

	"github.com/segmentio/kafka-go/protocol"
	"github.com/segmentio/kafka-go/protocol/fetch"
)

// A batch is what a log has kept of one.
type batch struct {
	base    int64
	offsets []int64
}

func answer(batches ...batch) *fetch.ResponsePartition {
	a := &fetch.ResponsePartition{}
	if batches == nil {
		return a
	}
	stream := &protocol.RecordStream{}
	for _, b := range batches {
		var recs []protocol.Record
		for _, o := range b.offsets {
			recs = append(recs, protocol.Record{Offset: o})
		}
		stream.Records = append(stream.Records, &protocol.RecordBatch{BaseOffset: b.base, Records: protocol.NewRecordReader(recs...)})
	}
	a.RecordSet.Records = stream
	return a
}

// Compaction leaves gaps, and batches without records.
func TestDecodeOfCompactedLog(t *testing.T) {
	t.Parallel()
	f := &feed{b: &Bus{}}
	for _, c := range []struct {
		name       string
		from, want int64
		batches    []batch
		ids        int
	}{
		{"nothing", 5, 5, nil, 0},
		{"all before the offset", 5, 6, []batch{{3, []int64{3, 4}}}, 0},
		{"emptied", 5, 6, []batch{{3, nil}}, 0},
		{"a gap inside", 5, 10, []batch{{3, []int64{4, 7, 9}}}, 2},
		{"a gap between", 5, 21, []batch{{3, []int64{4}}, {20, []int64{20}}}, 1},
	} {
		es, next, err := f.decode(answer(c.batches...), c.from, 1<<20)
		if err != nil || next != c.want || len(es) != c.ids {
			t.Errorf("%s: %d records, goes on at %d (%v), want %d, %d", c.name, len(es), next, err, c.ids, c.want)
		}
	}
	es, next, err := f.decode(answer(batch{0, []int64{0, 1, 2, 3}}), 0, entrySize+1)
	if err != nil || len(es) != 2 || next != 2 {
		t.Errorf("with little room: %d records, goes on at %d (%v), want 2, 2", len(es), next, err)
	}
}
