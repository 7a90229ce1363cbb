package kafka

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	kafkago "github.com/segmentio/kafka-go"
	"github.com/segmentio/kafka-go/protocol"
	"github.com/segmentio/kafka-go/protocol/produce"
	"github.com/segmentio/kafka-go/protocol/rawproduce"

	"github.com/postroom/postroom/broker"
)

type verdict uint8

const (
	goOn     verdict = iota // the first batch is settled, or was divided
	sendAnew                // the first batch goes out again, to the leader of then
)

// writers holds buffers that are as large as requests are.
var writers = sync.Pool{New: func() any { return new(writer) }}

// request sends the first batch of each lane and settles it.
func (c *call) request(ctx context.Context, lanes []*lane) map[*lane]verdict {
	ctx, cancel := context.WithTimeout(ctx, c.b.cfg.PublishTimeout)
	defer cancel()
	w := writers.Get().(*writer)
	m, err := c.send(ctx, w, lanes)
	if err == nil {
		// Without an answer the transport may still read the buffer.
		w.buf = w.buf[:0]
		writers.Put(w)
	}
	verdicts := make(map[*lane]verdict, len(lanes))
	if err != nil {
		// The connection is gone, or as good as that; so may be the idle ones.
		if !errors.Is(err, context.Canceled) {
			c.b.link.reset()
		}
		err = cause(ctx, err)
		for _, l := range lanes {
			verdicts[l] = c.lostAnswer(ctx, l, err)
		}
		return verdicts
	}
	answers := make(map[string]*produce.ResponsePartition)
	res := m.(*produce.Response)
	for i := range res.Topics {
		for j := range res.Topics[i].Partitions {
			p := &res.Topics[i].Partitions[j]
			answers[fmt.Sprintf("%s/%d", res.Topics[i].Topic, p.Partition)] = p
		}
	}
	for _, l := range lanes {
		if p := answers[l.scope()]; p != nil {
			verdicts[l] = c.answered(l, p)
		} else {
			c.failLane(l, l.scope(), fmt.Errorf("kafka: %s: the broker's answer does not mention it", l.scope()))
			verdicts[l] = goOn
		}
	}
	return verdicts
}

// send sends the first batch of each lane in one request, which is made for one
// attempt: the transport may still read it afterwards.
func (c *call) send(ctx context.Context, w *writer, lanes []*lane) (protocol.Message, error) {
	at := time.Now()
	ends := make([]int, len(lanes))
	for i, l := range lanes {
		if err := w.batch(c.msgs, l.batches[0], at, c.b.cfg.Compression); err != nil {
			return nil, err
		}
		ends[i] = len(w.buf)
	}
	req := &rawproduce.Request{Acks: -1, Timeout: timeout(ctx)}
	topics := make(map[string]int)
	start := 0
	for i, l := range lanes {
		t, ok := topics[l.topic]
		if !ok {
			t = len(req.Topics)
			topics[l.topic] = t
			req.Topics = append(req.Topics, rawproduce.RequestTopic{Topic: l.topic})
		}
		req.Topics[t].Partitions = append(req.Topics[t].Partitions, rawproduce.RequestPartition{
			Partition: int32(l.partition),
			RecordSet: protocol.RawRecordSet{Reader: bytes.NewReader(w.buf[start:ends[i]])},
		})
		start = ends[i]
	}
	return c.b.link.send(ctx, req)
}

// lostAnswer settles a batch whose answer did not come.
func (c *call) lostAnswer(ctx context.Context, l *lane, err error) verdict {
	if l.resent == 0 && ctx.Err() == nil {
		return sendAnew
	}
	c.failLane(l, l.scope(), fmt.Errorf("kafka: %s: %w", l.scope(), err))
	return goOn
}

// answered settles a batch by the broker's answer.
func (c *call) answered(l *lane, p *produce.ResponsePartition) verdict {
	batch := l.batches[0]
	err := error(kafkago.Error(p.ErrorCode))
	switch kafkago.Error(p.ErrorCode) {
	case 0:
		for _, i := range batch {
			c.results[i] = broker.Result{Outcome: broker.Stored}
		}
		l.batches, l.resent = l.batches[1:], 0
		return goOn
	case kafkago.MessageSizeTooLarge, kafkago.RecordListTooLarge:
		// The limit was lowered, or the broker's is below the topic's.
		c.b.limits.forget(l.topic)
		c.divide(l, err)
		return goOn
	case kafkago.InvalidRecord:
		c.removeInvalid(l, p, err)
		return goOn
	case kafkago.UnknownTopicOrPartition, kafkago.LeaderNotAvailable, kafkago.NotLeaderForPartition,
		kafkago.NetworkException, kafkago.KafkaStorageError, kafkago.FencedLeaderEpoch, kafkago.UnknownLeaderEpoch:
		if l.resent < maxResent {
			return sendAnew
		}
	}
	c.failLane(l, l.scope(), fmt.Errorf("kafka: %s: %w", l.scope(), err))
	return goOn
}

// divide cuts a batch in two of which the broker says that something in it will
// never be stored. Of a single message that is the verdict.
func (c *call) divide(l *lane, err error) {
	batch := l.batches[0]
	if len(batch) == 1 {
		l.batches = l.batches[1:]
		c.refuse(l, batch[0], err)
		return
	}
	half := len(batch) / 2
	l.batches = append([][]int{batch[:half:half], batch[half:]}, l.batches[1:]...)
}

// refuse settles a message that the broker will never take. What waits behind it
// with its key leaves the lane.
func (c *call) refuse(l *lane, i int, err error) {
	c.fail(i, broker.Refused, "", fmt.Errorf("kafka: %s: the broker does not take the message: %w", l.scope(), err))
	if !c.msgs[i].HasKey() {
		return
	}
	kept := l.batches[:0:0]
	for _, batch := range l.batches {
		if batch = c.without(batch); len(batch) > 0 {
			kept = append(kept, batch)
		}
	}
	l.batches = kept
}

// without returns the messages of a batch that do not stand behind a failed one.
func (c *call) without(batch []int) []int {
	kept := make([]int, 0, len(batch))
	for _, i := range batch {
		if !c.behindFailed(i) {
			kept = append(kept, i)
		}
	}
	return kept
}

// removeInvalid takes those messages out that the broker named, and tries the
// rest; where it named none, it is found by dividing.
func (c *call) removeInvalid(l *lane, p *produce.ResponsePartition, err error) {
	batch := l.batches[0]
	named := make(map[int]bool, len(p.RecordErrors))
	for _, e := range p.RecordErrors {
		if n := int(e.BatchIndex); n >= 0 && n < len(batch) {
			named[n] = true
		}
	}
	if len(named) == 0 {
		c.divide(l, err)
		return
	}
	var kept []int
	for n, i := range batch {
		switch {
		case c.behindFailed(i):
		case named[n]:
			c.refuse(&lane{topic: l.topic, partition: l.partition}, i, err)
		default:
			kept = append(kept, i)
		}
	}
	rest := l.batches[1:]
	l.batches = nil
	for _, batch := range append([][]int{kept}, rest...) {
		if batch = c.without(batch); len(batch) > 0 {
			l.batches = append(l.batches, batch)
		}
	}
}

// failLane settles the first batch of a lane as failed; what is behind it stays
// not tried.
func (c *call) failLane(l *lane, scope string, err error) {
	if len(l.batches) > 0 {
		for _, i := range l.batches[0] {
			c.fail(i, broker.Unreachable, scope, err)
		}
	}
	l.batches = nil
}

// fail settles one message, unless an earlier one of its key failed: it then
// stays not tried. A later one that was settled as failed before becomes that.
func (c *call) fail(i int, o broker.Outcome, scope string, err error) {
	if c.behindFailed(i) {
		return
	}
	if m := &c.msgs[i]; m.HasKey() {
		k := topicKey{m.Topic, m.Key}
		c.mu.Lock()
		if later, ok := c.failed[k]; ok {
			c.results[later] = broker.Result{}
		}
		c.failed[k] = i
		c.mu.Unlock()
	}
	c.results[i] = broker.Result{Outcome: o, Err: err, Scope: scope}
}

func (c *call) failAll(o broker.Outcome, err error) {
	for i := range c.msgs {
		if c.results[i].Outcome == broker.NotTried {
			c.fail(i, o, "", err)
		}
	}
}

// behindFailed reports whether an earlier message of the same topic and key
// failed in this call.
func (c *call) behindFailed(i int) bool {
	m := &c.msgs[i]
	if !m.HasKey() {
		return false
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	first, ok := c.failed[topicKey{m.Topic, m.Key}]
	return ok && first < i
}

// cause puts the reason for which ctx ended in the place of the error that the
// transport made of it.
func cause(ctx context.Context, err error) error {
	if ctx.Err() == nil {
		return err
	}
	if why := context.Cause(ctx); errors.Is(err, why) {
		return err
	} else if why != nil {
		return fmt.Errorf("%w (%v)", why, err)
	}
	return err
}
