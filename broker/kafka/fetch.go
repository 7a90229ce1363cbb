package kafka

import (
	"context"
	"fmt"
	"log/slog"
	"slices"
	"sync"
	"time"

	kafkago "github.com/segmentio/kafka-go"
	"github.com/segmentio/kafka-go/protocol"
	"github.com/segmentio/kafka-go/protocol/fetch"
	"github.com/segmentio/kafka-go/protocol/metadata"
)

const (
	// pollWait is how long a broker waits for the first byte. While it does, the
	// partitions of that request are not fetched otherwise.
	pollWait = 250 * time.Millisecond

	// maxPolls is how many requests to one leader may be under way: one may wait
	// for partitions that are idle while another one serves those that are not.
	maxPolls = 2

	// layoutWait stands between two looks at the layout where a leader is missing.
	layoutWait = 200 * time.Millisecond
)

// A poll is one request: to a leader for records, or to the group's coordinator
// for offsets.
type poll struct {
	leader int32
	wait   time.Duration // for the first byte
	places []place
}

// A place is a partition as it was when a poll began.
type place struct {
	p     *partition
	from  int64
	room  int
	visit int
}

// fetch fills the partitions until ctx ends.
func (f *feed) fetch(ctx context.Context) {
	var wg sync.WaitGroup
	defer wg.Wait()
	timer := time.NewTimer(0)
	defer timer.Stop()
	for {
		var layout *metadata.ResponseTopic
		if f.wants() {
			layout = f.layout(ctx)
		}
		polls, soon := f.plan(layout, time.Now())
		for _, p := range polls {
			wg.Go(func() {
				f.do(ctx, p)
				f.mu.Lock()
				f.polls[p.leader]--
				f.mu.Unlock()
				kick(f.room)
			})
		}
		var alarm <-chan time.Time
		if !soon.IsZero() {
			timer.Reset(time.Until(soon))
			alarm = timer.C
		}
		select {
		case <-f.room:
		case <-alarm:
		case <-ctx.Done():
			return
		}
	}
}

// layout returns the topic's partitions and their leaders. Where they are not
// known, there are none.
func (f *feed) layout(ctx context.Context) *metadata.ResponseTopic {
	t, err := f.topic(ctx)
	f.mu.Lock()
	defer f.mu.Unlock()
	if err == nil {
		f.trouble.clear(troubleLayout)
	} else if len(f.parts) > 0 {
		f.trouble.set(troubleLayout, err)
	}
	return &t
}

// wants reports whether a partition should be fetched now.
func (f *feed) wants() bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	now := time.Now()
	return !f.draining && slices.ContainsFunc(f.parts, func(p *partition) bool {
		return f.hungry(p) && !p.notUntil.After(now)
	})
}

// share is how many bytes each partition may hold.
func (f *feed) share() int { return max(f.b.cfg.PrefetchBytes/max(len(f.parts), 1), 1) }

// hungry reports whether a partition should be fetched. f.mu is held.
func (f *feed) hungry(p *partition) bool {
	return !p.fetching && (len(p.queue) == 0 || p.bytes < f.share()/2)
}

// plan makes the requests that are due, and returns when there may be another. The
// layout is nil where it was not asked for.
func (f *feed) plan(layout *metadata.ResponseTopic, now time.Time) (polls []*poll, soon time.Time) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.draining || len(f.parts) == 0 {
		return nil, time.Time{}
	}
	later := func(t time.Time) {
		if soon.IsZero() || t.Before(soon) {
			soon = t
		}
	}
	// Partitions that are not idle are spread over two requests, of which one is on
	// its way while the other one's answer is decoded.
	type slot struct {
		leader int32
		second bool
	}
	open := make(map[slot]*poll)
	add := func(leader int32, p *partition) {
		s := slot{leader, p.busy && p.index%2 == 1}
		q := open[s]
		if q == nil || p.alone {
			if f.polls[leader] >= maxPolls {
				return
			}
			q = &poll{leader: leader, wait: pollWait}
			if p.alone {
				q.wait = 0 // others queue for the request's place
			}
			f.polls[leader]++
			polls = append(polls, q)
			if !p.alone {
				open[s] = q
			}
		}
		p.fetching = true
		q.places = append(q.places, place{p, p.fetchAt, f.share() - p.bytes, p.visit})
	}
	if layout != nil && len(layout.Partitions) > 0 {
		f.forget(layout)
	}
	// A broker gives a record that exceeds all limits only to the first.
	f.first++
	for i := range f.parts {
		p := f.parts[(f.first+i)%len(f.parts)]
		switch {
		case !f.hungry(p):
		case p.notUntil.After(now):
			later(p.notUntil)
		case p.fetchAt == unknown:
			add(coordinator, p)
		case layout == nil: // it wants something since a moment ago
			kick(f.room)
		case leader(*layout, int(p.index)) < 0:
			f.trouble.set(p.index, fmt.Errorf("%s/%d: %w", f.s.Topic, p.index, kafkago.LeaderNotAvailable))
			later(now.Add(layoutWait))
		default:
			add(leader(*layout, int(p.index)), p)
		}
	}
	return polls, soon
}

// forget clears the trouble with brokers that lead none of the partitions any more.
// f.mu is held.
func (f *feed) forget(layout *metadata.ResponseTopic) {
	f.trouble.clearWhere(func(place int32) bool {
		return place <= firstBroker && !slices.ContainsFunc(f.parts, func(p *partition) bool {
			return brokerPlace(int32(leader(*layout, int(p.index)))) == place
		})
	})
}

// coordinator stands in the place of a leader for requests that ask where to begin.
const coordinator = -1

// do sends a poll and gives its partitions what came. It returns when it is
// answered.
func (f *feed) do(ctx context.Context, q *poll) {
	if q.leader == coordinator {
		f.locate(ctx, q)
		return
	}
	res, err := f.request(ctx, q)
	if err != nil {
		f.brokerFailed(q, err)
		f.b.link.reset()
		f.refresh(ctx)
	} else {
		f.trouble.clear(brokerPlace(q.leader))
	}
	answers := make(map[int32]*fetch.ResponsePartition, len(q.places))
	if err == nil {
		for i := range res.Topics {
			for j := range res.Topics[i].Partitions {
				a := &res.Topics[i].Partitions[j]
				answers[a.Partition] = a
			}
		}
	}
	moved := false
	for _, at := range q.places {
		a := answers[at.p.index]
		switch {
		case err != nil:
			f.failed(at, nil) // the broker's trouble is told
		case a == nil:
			f.failed(at, fmt.Errorf("the broker's answer does not mention it"))
		case kafkago.Error(a.ErrorCode) == kafkago.OffsetOutOfRange:
			f.outOfRange(ctx, at, a)
		case a.ErrorCode != 0:
			moved = true
			f.failed(at, kafkago.Error(a.ErrorCode))
		default:
			f.came(at, a)
		}
	}
	if moved {
		f.refresh(ctx)
	}
}

// brokerFailed tells that a poll failed, unless nobody waits for its partitions.
func (f *feed) brokerFailed(q *poll, err error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if slices.ContainsFunc(q.places, func(at place) bool { return at.stands() }) {
		f.trouble.set(brokerPlace(q.leader), fmt.Errorf("fetch from broker %d: %w", q.leader, err))
	}
}

const noEpoch = -1

func (f *feed) request(ctx context.Context, q *poll) (*fetch.Response, error) {
	req := &fetch.Request{
		ReplicaID: -1, MinBytes: 1, MaxWaitTime: int32(q.wait.Milliseconds()),
		SessionEpoch: -1, // no session: what a broker remembers, it forgets when it restarts
		Topics:       []fetch.RequestTopic{{Topic: f.s.Topic}},
	}
	if !f.b.cfg.ReadUncommitted {
		req.IsolationLevel = 1
	}
	for _, at := range q.places {
		// Limits count compressed bytes; what exceeds the room is not kept.
		most := min(at.room, maxFetchBytes)
		req.MaxBytes = min(req.MaxBytes+int32(most), maxPollBytes)
		req.Topics[0].Partitions = append(req.Topics[0].Partitions, fetch.RequestPartition{
			Partition: at.p.index, FetchOffset: at.from, PartitionMaxBytes: int32(most),
			CurrentLeaderEpoch: noEpoch, LogStartOffset: -1,
		})
	}
	m, err := f.send(ctx, req)
	if err != nil {
		return nil, err
	}
	res := m.(*fetch.Response)
	if res.ErrorCode != 0 {
		return nil, kafkago.Error(res.ErrorCode)
	}
	return res, nil
}

// send sends a request whose answer takes no longer than that of a poll.
func (f *feed) send(ctx context.Context, req protocol.Message) (protocol.Message, error) {
	ctx, cancel := context.WithTimeout(ctx, pollWait+f.b.cfg.SessionTimeout/2)
	defer cancel()
	m, err := f.b.link.send(ctx, req)
	if err != nil {
		return nil, cause(ctx, err)
	}
	return m, nil
}

// Bounds of what an answer holds of a partition, and in all, before decompression.
const (
	maxFetchBytes = 1 << 20
	maxPollBytes  = 4 << 20
)

// stands reports whether a poll's answer is still of use. f.mu is held.
func (at *place) stands() bool { return !at.p.gone && at.p.visit == at.visit }

// failed puts a partition off, and tells why unless err is nil.
func (f *feed) failed(at place, err error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if !at.stands() {
		return
	}
	at.p.alone = true
	at.p.failed(time.Now())
	if err != nil {
		f.trouble.set(at.p.index, fmt.Errorf("fetch %s/%d: %w", f.s.Topic, at.p.index, err))
	}
}

// came takes the records of an answer.
func (f *feed) came(at place, a *fetch.ResponsePartition) {
	records, next, err := f.decode(a, at.from, at.room)
	if err != nil {
		f.failed(at, err)
		return
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	if !at.stands() {
		return
	}
	p := at.p
	p.fetching, p.alone, p.busy = false, false, len(records) > 0
	p.pause.Reset()
	p.take(records, next)
	f.trouble.clear(p.index)
	if len(records) > 0 {
		kick(f.hand)
	} else if p.position() > p.committed {
		kick(f.dirty) // past records that are not for readers
	}
}

// outOfRange goes on at the first offset that the broker holds: messages may then
// come again, and none is passed over that is still there.
func (f *feed) outOfRange(ctx context.Context, at place, a *fetch.ResponsePartition) {
	f.b.cfg.Logger.LogAttrs(ctx, slog.LevelWarn, "kafka: the broker does not hold the group's offset, its first one is taken",
		slog.String("topic", f.s.Topic), slog.String("group", f.s.Group), slog.Int("partition", int(at.p.index)),
		slog.Int64("offset", at.from), slog.Int64("log_start", a.LogStartOffset), slog.Int64("high_watermark", a.HighWatermark))
	f.mu.Lock()
	defer f.mu.Unlock()
	if at.stands() {
		f.restart(at.p)
		f.trouble.set(at.p.index, fmt.Errorf("fetch %s/%d at offset %d: %w", f.s.Topic, at.p.index, at.from, kafkago.OffsetOutOfRange))
	}
}
