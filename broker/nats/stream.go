package nats

import (
	"context"
	"errors"
	"fmt"
	"hash/fnv"
	"log/slog"
	"strconv"
	"strings"
	"sync"
	"time"
	"unicode"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/postroom/postroom"
)

// What is known of a stream is asked for again when it is older than this and a
// message is too large for it.
const streamFresh = 10 * time.Second

// A streamInfo is what publishing and subscribing need to know of a stream.
type streamInfo struct {
	name    string
	maxSize int // bytes of header and body; 0: no bound of its own
	created time.Time
	at      time.Time // when it was asked for
}

// streams remembers which stream holds a subject.
type streams struct {
	mu       sync.Mutex
	known    map[string]*streamInfo // subject →
	doubtful map[string]bool        // subjects for which known may be outdated
	warned   map[string]bool        // stream names whose risks were logged
}

func (s *streams) init() {
	s.known = make(map[string]*streamInfo)
	s.doubtful = make(map[string]bool)
	s.warned = make(map[string]bool)
}

// cached returns what is known of the stream that holds a subject, or nil.
func (s *streams) cached(subject string) *streamInfo {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.doubtful[subject] {
		return nil
	}
	return s.known[subject]
}

// doubt makes the next message for a subject ask again. What is known serves as
// long as the API does not answer: streams may work while it is away.
func (s *streams) doubt(subject string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.known[subject] != nil {
		s.doubtful[subject] = true
	}
}

// stream asks the server which stream holds a subject, checks it and remembers
// it.
func (b *Bus) stream(ctx context.Context, subject string) (*streamInfo, error) {
	s := &b.streams
	info, err := b.findStream(ctx, subject)
	if err != nil {
		s.mu.Lock()
		defer s.mu.Unlock()
		if known := s.known[subject]; known != nil && errors.Is(err, context.DeadlineExceeded) {
			return known, nil
		}
		return nil, err
	}
	if err := b.checkStream(info); err != nil {
		return nil, err
	}
	si := &streamInfo{name: info.Config.Name, maxSize: max(0, int(info.Config.MaxMsgSize)), created: info.Created, at: time.Now()}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.known[subject] = si
	delete(s.doubtful, subject)
	return si, nil
}

// errNoStream says that no stream holds a subject.
var errNoStream = errors.New("no stream has this subject; make one, Postroom never does")

func (b *Bus) findStream(ctx context.Context, subject string) (*jetstream.StreamInfo, error) {
	return ask(ctx, b, "look up the stream", func(ctx context.Context) (*jetstream.StreamInfo, error) {
		name, err := b.js.StreamNameBySubject(ctx, subject)
		if errors.Is(err, jetstream.ErrStreamNotFound) {
			return nil, errNoStream
		}
		if err != nil {
			return nil, err
		}
		stream, err := b.js.Stream(ctx, name)
		if err != nil {
			return nil, err
		}
		return stream.CachedInfo(), nil
	})
}

// ask sends a request to JetStream's API, with a time of its own beside ctx. A
// refused permission, which the server does not answer, is told apart from a
// server that is away.
func ask[T any](ctx context.Context, b *Bus, what string, f func(context.Context) (T, error)) (T, error) {
	start := time.Now()
	ctx, cancel := context.WithTimeout(ctx, b.cfg.PublishTimeout)
	defer cancel()
	v, err := await(ctx, func() (T, error) { return f(ctx) })
	if err == nil {
		return v, nil
	}
	isAPI := func(subject string) bool { return strings.HasPrefix(subject, "$JS.") }
	if denied := b.link.deniedSince(start, isAPI); denied != nil {
		err = accessError{denied}
	}
	return v, fmt.Errorf("%s: %w", what, err)
}

// accessError marks a refusal that only a person can lift.
type accessError struct{ error }

func (e accessError) Unwrap() error { return e.error }

// unsafeError marks settings that a person must mend.
type unsafeError struct{ error }

func (e unsafeError) Unwrap() error { return e.error }

// checkStream refuses settings that lose messages and warns, once for each
// stream, of those that may.
func (b *Bus) checkStream(info *jetstream.StreamInfo) error {
	c := &info.Config
	refuse := func(format string, args ...any) error {
		return unsafeError{fmt.Errorf("stream %q "+format, append([]any{c.Name}, args...)...)}
	}
	limited := c.MaxMsgs > 0 || c.MaxBytes > 0 || c.MaxMsgsPerSubject > 0
	switch {
	case c.NoAck:
		return refuse("acknowledges nothing; set no_ack to false")
	case c.Sealed:
		return refuse("is sealed and takes no messages")
	case b.cfg.AllowDiscard:
	case limited && c.Discard == jetstream.DiscardOld:
		return refuse("drops its oldest messages, read or not, when it is full; set discard to \"new\", or Config.AllowDiscard")
	case limited && c.MaxMsgsPerSubject > 0 && !c.DiscardNewPerSubject:
		return refuse("drops the oldest messages of a full subject, read or not; set discard_new_per_subject, or Config.AllowDiscard")
	case c.Retention == jetstream.InterestPolicy:
		return refuse("drops what no consumer wants at that moment; set retention to \"limits\" or \"workqueue\", or Config.AllowDiscard")
	}
	b.warn(c)
	return nil
}

func (b *Bus) warn(c *jetstream.StreamConfig) {
	b.streams.mu.Lock()
	warned := b.streams.warned[c.Name]
	b.streams.warned[c.Name] = true
	b.streams.mu.Unlock()
	if warned {
		return
	}
	log := func(risk string) {
		b.cfg.Logger.LogAttrs(b.link.ctx, slog.LevelWarn, "stream may lose messages",
			slog.String("stream", c.Name), slog.String("risk", risk))
	}
	if c.Storage == jetstream.MemoryStorage {
		log("it is kept in memory and gone when its servers stop")
	}
	if c.Replicas <= 1 {
		log("it has one replica, which one machine's failure can destroy")
	}
	if c.PersistMode == jetstream.AsyncPersistMode {
		log("it acknowledges messages before they are written")
	}
	if c.MaxAge > 0 {
		log("it drops messages after " + c.MaxAge.String() + ", read or not")
	}
	if c.Duplicates < 2*b.cfg.PublishTimeout {
		log("its duplicate window of " + c.Duplicates.String() + " is too short to remove repeats")
	}
	if c.Discard == jetstream.DiscardOld && (c.MaxMsgs > 0 || c.MaxBytes > 0 || c.MaxMsgsPerSubject > 0) {
		log("it drops its oldest messages, read or not, when it is full")
	}
	if c.Retention == jetstream.InterestPolicy {
		log("it drops what no consumer wants at that moment")
	}
}

// checkSubject reports why a topic can be no subject of a stream. The text
// holds what [postroom.Message.Validate] says where that finds something.
func checkSubject(topic string, index int) error {
	if err := (&postroom.Message{Topic: topic}).Validate(index); err != nil {
		return err
	}
	bad := func(problem string) error {
		return &postroom.InvalidError{Index: index, Field: "Topic", Problem: problem}
	}
	switch {
	case topic[0] == '$':
		return bad("begins with $, where the server's own subjects begin")
	case strings.HasPrefix(topic, "_INBOX."):
		return bad("begins with _INBOX, where replies go")
	case strings.ContainsFunc(topic, unicode.IsControl):
		return bad("contains a control character")
	}
	for token := range strings.SplitSeq(topic, ".") {
		switch token {
		case "":
			return bad("has an empty part between dots")
		case "*", ">":
			return bad("contains a wildcard")
		}
	}
	return nil
}

// subjects returns the subjects of a topic.
func (b *Bus) subjects(topic string) []string {
	n := b.cfg.Partitions[topic]
	if n == 0 {
		return []string{topic}
	}
	all := make([]string, n)
	for i := range all {
		all[i] = topic + "." + strconv.Itoa(i)
	}
	return all
}

// subject returns the subject of a message.
func (b *Bus) subject(m *postroom.Message) string {
	n := b.cfg.Partitions[m.Topic]
	if n == 0 {
		return m.Topic
	}
	by := m.Key
	if !m.HasKey() {
		by = m.ID
	}
	h := fnv.New32a()
	_, _ = h.Write([]byte(by))
	return m.Topic + "." + strconv.Itoa(int(h.Sum32()%uint32(n)))
}
