package franz

import (
	"context"
	"errors"
	"math"
	"net"
	"sync"
	"time"

	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/twmb/franz-go/pkg/kmsg"
)

// idleTime is how long a sender is kept that no call needs. It is far below the
// time after which brokers forget a producer (producer.id.expiration.ms), and
// take any sequence number from it.
const idleTime = time.Minute

// A sender is a client that publishes for one call at a time. It sends nothing
// until it is flushed.
type sender struct {
	client *kgo.Client
	close  func()    // of the client; a second call does nothing
	used   time.Time // when it was given back

	mu      sync.Mutex
	limits  map[string]int32 // most bytes of a batch, of the topics it knows
	waiting int              // records that have no place in a partition yet
	ready   chan struct{}    // receives when there are none, or one has failed
	failure error            // why the last connection could not be opened
}

func (b *Bus) newSender() (*sender, error) {
	s := &sender{limits: make(map[string]int32), ready: make(chan struct{}, 1)}
	var err error
	s.client, err = b.client(
		kgo.WithHooks(s),
		kgo.ManualFlushing(),
		kgo.RequiredAcks(kgo.AllISRAcks()),
		kgo.MaxBufferedRecords(math.MaxInt32),
		kgo.ProducerBatchMaxBytesFn(s.batchBytes),
		kgo.ProducerBatchCompression(b.cfg.Compression),
		kgo.ProduceRequestTimeout(b.cfg.PublishTimeout),
		kgo.RecordRetries(maxTries),
		kgo.UnknownTopicRetries(3),
	)
	if err != nil {
		return nil, err
	}
	s.close = sync.OnceFunc(s.client.Close)
	return s, nil
}

// batchBytes returns the most bytes of a batch as franz-go counts them: with four
// that the broker does not.
func (s *sender) batchBytes(topic string) int32 {
	s.mu.Lock()
	defer s.mu.Unlock()
	n, ok := s.limits[topic]
	if !ok {
		n = defaultLimit
	}
	return min(max(n, 512), 1<<30-4) + 4
}

// learn asks which of the topics exist that the sender does not know. It returns
// what is wrong with those that cannot be published to.
func (s *sender) learn(ctx context.Context, topics []string) (map[string]error, error) {
	req := kmsg.NewPtrMetadataRequest()
	for _, topic := range topics {
		if _, ok := s.limits[topic]; !ok {
			t := kmsg.NewMetadataRequestTopic()
			t.Topic = kmsg.StringPtr(topic)
			req.Topics = append(req.Topics, t)
		}
	}
	if len(req.Topics) == 0 {
		return nil, nil
	}
	res, err := req.RequestWith(ctx, s.client)
	if err != nil {
		return nil, err
	}
	wrong := make(map[string]error)
	for _, t := range res.Topics {
		// One that was just made has no leader for a moment: that is waited for.
		if err := kerr.ErrorForCode(t.ErrorCode); err != nil && !errors.Is(err, kerr.LeaderNotAvailable) && t.Topic != nil {
			wrong[*t.Topic] = err
		}
	}
	return wrong, nil
}

// use sets the limits of topics. It returns false where a client was made under
// others, which it keeps.
func (s *sender) use(limits map[string]int32) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	for topic, n := range limits {
		if old, ok := s.limits[topic]; ok && old != n {
			return false
		}
		s.limits[topic] = n
	}
	return true
}

// expect says how many records are about to be buffered.
func (s *sender) expect(n int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.waiting = n
	select {
	case <-s.ready:
	default:
	}
}

// OnProduceRecordPartitioned implements [kgo.HookProduceRecordPartitioned].
func (s *sender) OnProduceRecordPartitioned(*kgo.Record, int32) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.waiting--; s.waiting == 0 {
		s.wake()
	}
}

func (s *sender) wake() {
	select {
	case s.ready <- struct{}{}:
	default:
	}
}

// OnBrokerConnect implements [kgo.HookBrokerConnect].
func (s *sender) OnBrokerConnect(_ kgo.BrokerMetadata, _ time.Duration, _ net.Conn, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.failure = err
}

func (s *sender) lastFailure() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.failure
}

// senders are those that no call has. The zero value is usable.
type senders struct {
	mu   sync.Mutex
	idle []*sender // the one that was used last is the last
}

// take returns a sender for one call.
func (b *Bus) take() (s *sender, err error) {
	b.senders.mu.Lock()
	var old []*sender
	idle := b.senders.idle
	for len(idle) > 0 && time.Since(idle[0].used) > idleTime {
		old, idle = append(old, idle[0]), idle[1:]
	}
	if n := len(idle); n > 0 {
		s, idle = idle[n-1], idle[:n-1]
	}
	b.senders.idle = idle
	b.senders.mu.Unlock()
	for _, s := range old {
		s.close()
	}
	if s != nil {
		return s, nil
	}
	return b.newSender()
}

// give takes a sender back, with which nothing is undecided.
func (b *Bus) give(s *sender) {
	s.used = time.Now()
	b.senders.mu.Lock()
	defer b.senders.mu.Unlock()
	b.senders.idle = append(b.senders.idle, s)
}

func (ss *senders) close() {
	ss.mu.Lock()
	defer ss.mu.Unlock()
	for _, s := range ss.idle {
		s.close()
	}
	ss.idle = nil
}
