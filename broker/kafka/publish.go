package kafka

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"sync"
	"time"

	kafkago "github.com/segmentio/kafka-go"
	"github.com/segmentio/kafka-go/protocol/metadata"

	"github.com/postroom/postroom"
	"github.com/postroom/postroom/broker"
)

// Publish implements [broker.Publisher]. See the package's comment for what a
// failed batch means for its messages.
func (b *Bus) Publish(ctx context.Context, msgs []postroom.Message) []broker.Result {
	c := &call{b: b, msgs: msgs, results: make([]broker.Result, len(msgs)), failed: make(map[topicKey]int)}
	if len(msgs) == 0 {
		return c.results
	}
	if !b.begin() {
		c.failAll(broker.Unreachable, fmt.Errorf("kafka: publish: %w", broker.ErrClosed))
		return c.results
	}
	defer b.calls.Done()
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	closing := make(chan struct{})
	defer close(closing)
	go func() {
		select {
		case <-b.link.done:
			cancel(broker.ErrClosed)
		case <-closing:
		}
	}()
	c.run(ctx)
	return c.results
}

type topicKey struct{ topic, key string }

// A call is one Publish call. The results of a message are written by whoever
// holds its lane.
type call struct {
	b       *Bus
	msgs    []postroom.Message
	results []broker.Result

	mu     sync.Mutex
	failed map[topicKey]int // index of the first message that failed
}

// A lane is what a call holds for one partition.
type lane struct {
	topic     string
	partition int
	leader    int32 // -1: none
	batches   [][]int
	resent    int // how often the first batch was sent anew
}

func (c *call) run(ctx context.Context) {
	byTopic := make(map[string][]int)
	for i := range c.msgs {
		topic := c.msgs[i].Topic
		if !validTopic(topic) {
			c.fail(i, broker.Refused, "", fmt.Errorf("kafka: message %d: the topic's name is not valid: %w", i, kafkago.InvalidTopic))
			continue
		}
		byTopic[topic] = append(byTopic[topic], i)
	}
	topics := slices.Sorted(maps.Keys(byTopic))
	if len(topics) == 0 {
		return
	}
	layout, err := c.layout(ctx, topics, false)
	if err != nil {
		c.failAll(broker.Unreachable, fmt.Errorf("kafka: ask for the cluster's layout: %w", cause(ctx, err)))
		return
	}
	limits := c.b.limits.get(ctx, c.b, known(layout))
	var lanes []*lane
	for _, topic := range topics {
		lanes = append(lanes, c.plan(topic, byTopic[topic], layout[topic], limits[topic])...)
	}
	for {
		// A batch is sent anew maxResent times at most, so this ends.
		lanes = c.sendAll(ctx, lanes)
		if len(lanes) == 0 {
			return
		}
		pause(ctx, lanes)
		layout, err = c.layout(ctx, topics, true)
		for _, l := range lanes {
			l.resent, l.leader = l.resent+1, -1
			if err == nil {
				l.leader = leader(layout[l.topic], l.partition)
			}
		}
		if err != nil {
			for _, l := range lanes {
				c.failLane(l, "", fmt.Errorf("kafka: ask for the cluster's layout: %w", cause(ctx, err)))
			}
			return
		}
	}
}

const (
	// maxResent is how often a batch is sent anew after a broker said that it is
	// not the leader. A new topic's brokers say so for a moment.
	maxResent = 3
	// firstPause stands before the second time; it doubles.
	firstPause = 50 * time.Millisecond
)

// pause waits until the lanes may be sent anew: the first time at once.
func pause(ctx context.Context, lanes []*lane) {
	most := 0
	for _, l := range lanes {
		most = max(most, l.resent)
	}
	if most == 0 {
		return
	}
	timer := time.NewTimer(firstPause << (most - 1))
	defer timer.Stop()
	select {
	case <-timer.C:
	case <-ctx.Done():
	}
}

// layout returns what is known of each topic. It is read anew where a topic or
// a leader is missing.
func (c *call) layout(ctx context.Context, topics []string, anew bool) (map[string]metadata.ResponseTopic, error) {
	ctx, cancel := context.WithTimeout(ctx, c.b.cfg.PublishTimeout)
	defer cancel()
	for {
		if anew {
			c.b.link.refresh(ctx)
		}
		m, err := c.b.link.metadata(ctx, topics)
		if err != nil {
			return nil, err
		}
		all := make(map[string]metadata.ResponseTopic, len(topics))
		whole := true
		for _, t := range m.Topics {
			all[t.Name] = t
			whole = whole && t.ErrorCode == 0 && !slices.ContainsFunc(t.Partitions, func(p metadata.ResponsePartition) bool {
				return p.LeaderID < 0
			})
		}
		if whole || anew {
			return all, nil
		}
		anew = true
	}
}

func known(layout map[string]metadata.ResponseTopic) (topics []string) {
	for name, t := range layout {
		if t.ErrorCode == 0 {
			topics = append(topics, name)
		}
	}
	return topics
}

func leader(t metadata.ResponseTopic, partition int) int32 {
	for _, p := range t.Partitions {
		if int(p.PartitionIndex) == partition {
			return p.LeaderID
		}
	}
	return -1
}

// plan gives the messages of a topic to its partitions, in batches.
func (c *call) plan(topic string, indexes []int, t metadata.ResponseTopic, limit int) []*lane {
	if t.ErrorCode != 0 || len(t.Partitions) == 0 {
		code := kafkago.UnknownTopicOrPartition
		if t.ErrorCode != 0 {
			code = kafkago.Error(t.ErrorCode)
		}
		for _, i := range indexes {
			c.fail(i, broker.Unreachable, topic, fmt.Errorf("kafka: topic %q: %w", topic, code))
		}
		return nil
	}
	partitions := make([]int, len(t.Partitions))
	for i, p := range t.Partitions {
		partitions[i] = int(p.PartitionIndex)
	}
	slices.Sort(partitions)
	lanes := make(map[int]*packer)
	for _, i := range indexes {
		m := &c.msgs[i]
		if c.behindFailed(i) {
			continue
		}
		n := size(m)
		if n+batchOverhead > limit && (c.b.cfg.Compression == 0 || n > c.b.cfg.RequestBytes) {
			c.fail(i, broker.Refused, "", fmt.Errorf("kafka: topic %q: the record takes up to %d bytes, at most %d are taken: %w",
				topic, n+batchOverhead, limit, kafkago.MessageSizeTooLarge))
			continue
		}
		p := c.b.partition(m, partitions)
		if _, ok := slices.BinarySearch(partitions, p); !ok {
			c.fail(i, broker.Unreachable, topic, fmt.Errorf("kafka: topic %q has no partition %d, which the balancer chose", topic, p))
			continue
		}
		if lanes[p] == nil {
			lanes[p] = &packer{lane: &lane{topic: topic, partition: p, leader: leader(t, p)}, most: min(limit, c.b.cfg.BatchBytes)}
		}
		lanes[p].add(i, n)
	}
	all := make([]*lane, 0, len(lanes))
	for _, p := range slices.Sorted(maps.Keys(lanes)) {
		all = append(all, lanes[p].lane)
	}
	return all
}

// A packer fills the batches of a lane.
type packer struct {
	*lane
	most  int
	bytes int // of the last batch
}

func (p *packer) add(i, n int) {
	if len(p.batches) == 0 || p.bytes+n > p.most {
		p.batches = append(p.batches, nil)
		p.bytes = batchOverhead
	}
	last := len(p.batches) - 1
	p.batches[last] = append(p.batches[last], i)
	p.bytes += n
}

// sendAll sends what the lanes hold, to all leaders at a time. It returns those
// lanes whose first batch should be sent once more.
func (c *call) sendAll(ctx context.Context, lanes []*lane) (again []*lane) {
	var (
		wg      sync.WaitGroup
		mu      sync.Mutex
		leaders = make(map[int32][]*lane)
	)
	for _, l := range lanes {
		if l.leader < 0 {
			c.failLane(l, l.scope(), fmt.Errorf("kafka: %s: %w", l.scope(), kafkago.LeaderNotAvailable))
			continue
		}
		leaders[l.leader] = append(leaders[l.leader], l)
	}
	send := func(lanes []*lane) {
		left := c.sendTo(ctx, lanes)
		mu.Lock()
		defer mu.Unlock()
		again = append(again, left...)
	}
	one := len(leaders) == 1
	for _, lanes := range leaders {
		if one {
			send(lanes)
			continue
		}
		wg.Go(func() { send(lanes) })
	}
	wg.Wait()
	return again
}

// sendTo sends to one leader until its lanes are empty.
func (c *call) sendTo(ctx context.Context, lanes []*lane) (again []*lane) {
	for len(lanes) > 0 {
		now := c.fit(lanes)
		later := lanes[len(now):]
		var left []*lane
		for l, verdict := range c.request(ctx, now) {
			if verdict == sendAnew {
				again = append(again, l)
			} else if len(l.batches) > 0 {
				left = append(left, l)
			}
		}
		// In turns, so that a long lane does not starve the others.
		lanes = append(slices.Clone(later), left...)
	}
	return again
}

// fit returns as many of the first lanes as one request may hold.
func (c *call) fit(lanes []*lane) []*lane {
	total := 0
	for n, l := range lanes {
		for _, i := range l.batches[0] {
			total += size(&c.msgs[i])
		}
		if n > 0 && total > c.b.cfg.RequestBytes {
			return lanes[:n]
		}
	}
	return lanes
}

func (l *lane) scope() string { return fmt.Sprintf("%s/%d", l.topic, l.partition) }

// timeout is how long the broker waits for its replicas: less than this side
// waits for the broker.
func timeout(ctx context.Context) int32 {
	deadline, _ := ctx.Deadline()
	return int32(max(time.Until(deadline)*9/10, time.Millisecond) / time.Millisecond)
}
