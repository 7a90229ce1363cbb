package nats

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/postroom/postroom/broker"
)

// A consumer is a durable pull consumer as it was found or made.
type consumer struct {
	stream, name  string
	streamCreated time.Time
	created       time.Time
	ackWait       time.Duration
	maxBatch      int           // of one request; 0: no bound
	maxExpires    time.Duration // of one request; 0: no bound
}

// Keys of a consumer's metadata, which tell a person what it is for.
const (
	metaGroup = "postroom-group"
	metaTopic = "postroom-topic"
)

// consumer finds the consumer of a group and topic and checks it, or makes it.
func (b *Bus) consumer(ctx context.Context, s *broker.Subscription) (*consumer, error) {
	subjects := b.subjects(s.Topic)
	stream, err := b.findStream(ctx, subjects[0])
	if err != nil {
		return nil, err
	}
	if err := b.checkStream(stream); err != nil {
		return nil, err
	}
	want := jetstream.ConsumerConfig{
		Durable:       consumerName(s.Group, s.Topic),
		Description:   "Postroom: group and topic stand in the metadata",
		DeliverPolicy: jetstream.DeliverAllPolicy,
		AckPolicy:     jetstream.AckExplicitPolicy,
		AckWait:       b.cfg.AckWait,
		MaxDeliver:    -1,
		MaxAckPending: b.cfg.MaxAckPending,
		Metadata:      map[string]string{metaGroup: s.Group, metaTopic: s.Topic},
	}
	if len(subjects) == 1 {
		want.FilterSubject = subjects[0]
	} else {
		want.FilterSubjects = subjects
	}
	info, err := ask(ctx, b, "look up the consumer", func(ctx context.Context) (*jetstream.ConsumerInfo, error) {
		c, err := b.js.Consumer(ctx, stream.Config.Name, want.Durable)
		if err != nil {
			return nil, err
		}
		return c.CachedInfo(), nil
	})
	switch {
	case errors.Is(err, jetstream.ErrConsumerNotFound):
		info, err = b.writeConsumer(ctx, "make the consumer", stream.Config.Name, want, b.js.CreateConsumer)
	case errors.Is(err, jetstream.ErrNotPullConsumer):
		err = unsafeError{fmt.Errorf("consumer %q of stream %q pushes; delete it, and a pull consumer is made", want.Durable, stream.Config.Name)}
	case err == nil && !sameSubjects(&info.Config, subjects) && info.Config.Metadata[metaTopic] == s.Topic:
		// The number of partitions has changed.
		want = info.Config
		want.FilterSubject, want.FilterSubjects = "", subjects
		info, err = b.writeConsumer(ctx, "change the subjects of the consumer", stream.Config.Name, want, b.js.UpdateConsumer)
	}
	if err != nil {
		return nil, err
	}
	if err := checkConsumer(info, s, subjects); err != nil {
		return nil, unsafeError{err}
	}
	return &consumer{
		stream: info.Stream, name: info.Name, streamCreated: stream.Created, created: info.Created,
		ackWait: info.Config.AckWait, maxBatch: info.Config.MaxRequestBatch, maxExpires: info.Config.MaxRequestExpires,
	}, nil
}

type consumerWriter func(context.Context, string, jetstream.ConsumerConfig) (jetstream.Consumer, error)

func (b *Bus) writeConsumer(ctx context.Context, what, stream string, want jetstream.ConsumerConfig, write consumerWriter) (*jetstream.ConsumerInfo, error) {
	return ask(ctx, b, what, func(ctx context.Context) (*jetstream.ConsumerInfo, error) {
		c, err := write(ctx, stream, want)
		if err != nil {
			return nil, err
		}
		return c.CachedInfo(), nil
	})
}

func sameSubjects(c *jetstream.ConsumerConfig, subjects []string) bool {
	have := c.FilterSubjects
	if c.FilterSubject != "" {
		have = []string{c.FilterSubject}
	}
	return slices.Equal(slices.Sorted(slices.Values(have)), slices.Sorted(slices.Values(subjects)))
}

// checkConsumer reports every setting under which messages would be lost, or
// would stop coming.
func checkConsumer(info *jetstream.ConsumerInfo, s *broker.Subscription, subjects []string) error {
	c := &info.Config
	var errs []error
	bad := func(format string, args ...any) { errs = append(errs, fmt.Errorf(format, args...)) }
	if c.AckPolicy != jetstream.AckExplicitPolicy {
		bad("its ack policy is %v, want explicit", c.AckPolicy)
	}
	if c.MaxDeliver > 0 {
		bad("max_deliver is %d, after which a message is dropped without a word; want -1", c.MaxDeliver)
	}
	if len(c.BackOff) > 0 {
		bad("it has a backoff, which takes the place of ack_wait; want none")
	}
	if c.AckWait < 100*time.Millisecond {
		bad("ack_wait is %v, want at least 100ms", c.AckWait)
	}
	if n := c.MaxAckPending; n > 0 && n < s.MaxInFlight {
		bad("max_ack_pending is %d, less than the %d messages in flight that are wanted", n, s.MaxInFlight)
	}
	if c.HeadersOnly {
		bad("it delivers headers only")
	}
	if !sameSubjects(c, subjects) {
		bad("it is not for the subjects of topic %q", s.Topic)
	}
	if c.PriorityPolicy != jetstream.PriorityPolicyNone {
		bad("it has a priority policy, want none")
	}
	if c.InactiveThreshold > 0 {
		bad("it vanishes, and with it what was acknowledged, after %v without a member; want no inactive_threshold", c.InactiveThreshold)
	}
	if len(errs) == 0 {
		return nil
	}
	return fmt.Errorf("consumer %q of stream %q is unsafe; change it, or delete it and a safe one is made, which starts at the first message: %w",
		info.Name, info.Stream, errors.Join(errs...))
}

// consumerName returns a name that only this group and topic have. Letters,
// digits and hyphens stand for themselves, a plus for a dot.
func consumerName(group, topic string) string {
	name := escapeName(group) + "_" + escapeName(topic)
	if len(name) <= 200 { // servers name files after it
		return name
	}
	sum := sha256.Sum256([]byte(name))
	return name[:150] + "_" + hex.EncodeToString(sum[:16])
}

func escapeName(s string) string {
	var b strings.Builder
	for i := range len(s) {
		switch c := s[i]; {
		case 'a' <= c && c <= 'z' || 'A' <= c && c <= 'Z' || '0' <= c && c <= '9' || c == '-':
			b.WriteByte(c)
		case c == '.':
			b.WriteByte('+')
		default:
			b.WriteByte('=')
			b.WriteString(strings.ToUpper(hex.EncodeToString([]byte{c})))
		}
	}
	return b.String()
}

// partition returns the partition in a subject of the topic, or -1.
func partition(topic, subject string) int32 {
	rest, ok := strings.CutPrefix(subject, topic+".")
	if !ok {
		return -1
	}
	n, err := strconv.ParseInt(rest, 10, 32)
	if err != nil {
		return -1
	}
	return int32(n)
}
