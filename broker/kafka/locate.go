package kafka

import (
	"context"
	"fmt"

	kafkago "github.com/segmentio/kafka-go"
	"github.com/segmentio/kafka-go/protocol/listoffsets"
	"github.com/segmentio/kafka-go/protocol/offsetfetch"
)

// locate finds where the partitions of a poll begin: at the group's offset, else
// at the first one that the broker holds.
func (f *feed) locate(ctx context.Context, q *poll) {
	var ask, first []place
	f.mu.Lock()
	for _, at := range q.places {
		if at.p.first {
			first = append(first, at)
		} else {
			ask = append(ask, at)
		}
	}
	f.mu.Unlock()
	if len(ask) > 0 {
		offsets, err := f.committed(ctx, ask)
		for _, at := range ask {
			switch o, ok := offsets[at.p.index]; {
			case err != nil:
				f.failed(at, fmt.Errorf("ask for the group's offset: %w", err))
			case ok && o >= 0:
				f.begin(at, o, o)
			default:
				first = append(first, at)
			}
		}
	}
	if len(first) == 0 {
		return
	}
	offsets, err := f.firstOffsets(ctx, first)
	for _, at := range first {
		switch o, ok := offsets[at.p.index]; {
		case err != nil:
			f.failed(at, fmt.Errorf("ask for the first offset: %w", err))
		case !ok:
			f.failed(at, fmt.Errorf("ask for the first offset: %w", kafkago.LeaderNotAvailable))
		default:
			f.begin(at, o, unknown)
		}
	}
}

// begin lets a partition begin at an offset.
func (f *feed) begin(at place, offset, committed int64) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if !at.stands() {
		return
	}
	p := at.p
	p.fetchAt, p.committed, p.fetching, p.alone = offset, committed, false, false
	if offset > committed {
		kick(f.dirty)
	}
}

// committed returns the group's offsets of the partitions that have one.
func (f *feed) committed(ctx context.Context, places []place) (map[int32]int64, error) {
	req := &offsetfetch.Request{GroupID: f.s.Group, Topics: []offsetfetch.RequestTopic{{Name: f.s.Topic}}}
	for _, at := range places {
		req.Topics[0].PartitionIndexes = append(req.Topics[0].PartitionIndexes, at.p.index)
	}
	m, err := f.send(ctx, req)
	if err != nil {
		f.b.link.reset()
		return nil, err
	}
	res := m.(*offsetfetch.Response)
	if res.ErrorCode != 0 {
		return nil, kafkago.Error(res.ErrorCode)
	}
	offsets := make(map[int32]int64, len(places))
	for _, t := range res.Topics {
		for _, p := range t.Partitions {
			if p.ErrorCode != 0 {
				return nil, kafkago.Error(p.ErrorCode)
			}
			offsets[p.PartitionIndex] = p.CommittedOffset
		}
	}
	return offsets, nil
}

// earliest asks for the first offset.
const earliest = -2

// firstOffsets returns the first offset of each partition that says one.
func (f *feed) firstOffsets(ctx context.Context, places []place) (map[int32]int64, error) {
	req := &listoffsets.Request{ReplicaID: -1, Topics: []listoffsets.RequestTopic{{Topic: f.s.Topic}}}
	for _, at := range places {
		req.Topics[0].Partitions = append(req.Topics[0].Partitions, listoffsets.RequestPartition{
			Partition: at.p.index, CurrentLeaderEpoch: noEpoch, Timestamp: earliest,
		})
	}
	m, err := f.send(ctx, req)
	if err != nil {
		f.b.link.reset()
		return nil, err
	}
	offsets := make(map[int32]int64, len(places))
	stale := false
	for _, t := range m.(*listoffsets.Response).Topics {
		for _, p := range t.Partitions {
			if p.ErrorCode == 0 && p.Offset >= 0 {
				offsets[p.Partition] = p.Offset
			} else {
				stale = true
			}
		}
	}
	if stale {
		f.refresh(ctx)
	}
	return offsets, nil
}
