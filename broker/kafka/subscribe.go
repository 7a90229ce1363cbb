package kafka

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/cenkalti/backoff/v4"
	kafkago "github.com/segmentio/kafka-go"
	"github.com/segmentio/kafka-go/protocol/metadata"

	"github.com/postroom/postroom/broker"
)

var _ broker.Subscriber = (*Bus)(nil)

// Subscribe implements [broker.Subscriber]. See the package's comment for what is
// committed when. It ends with [broker.ErrClosed] when the bus is closed, and then
// leaves its group to notice that by the session timeout.
func (b *Bus) Subscribe(ctx context.Context, s broker.Subscription, deliver func(broker.Delivery)) error {
	if err := checkSubscription(&s); err != nil {
		return err
	}
	if !b.begin() {
		return fmt.Errorf("kafka: subscribe: %w", broker.ErrClosed)
	}
	defer b.calls.Done()
	if err := newFeed(b, s).run(ctx, deliver); err != nil {
		return fmt.Errorf("kafka: subscribe to topic %q for group %q: %w", s.Topic, s.Group, err)
	}
	return nil
}

func checkSubscription(s *broker.Subscription) error {
	var errs []error
	bad := func(format string, args ...any) {
		errs = append(errs, fmt.Errorf("kafka: Subscription."+format, args...))
	}
	if s.Group == "" {
		bad("Group is empty")
	}
	if !validTopic(s.Topic) {
		bad("Topic is %q, which Kafka does not take: want 1 to 249 letters, digits, dots, underscores and hyphens", s.Topic)
	}
	if s.MaxInFlight < 1 {
		bad("MaxInFlight is %d, want at least 1", s.MaxInFlight)
	}
	return errors.Join(errs...)
}

// A feed is one running Subscribe call. Three goroutines share it: member keeps
// the membership of the group and commits, fetch fills the partitions, and
// handOver calls deliver. They tell each other by channels that there is something
// to look at; what there is stands under mu.
type feed struct {
	b       *Bus
	s       broker.Subscription
	trouble troubles

	hand  chan struct{} // handOver should look
	room  chan struct{} // fetch should look
	dirty chan struct{} // member has something to commit
	over  chan struct{} // closed when nothing is left to be waited for

	mu       sync.Mutex
	parts    []*partition // by index
	turn     int          // whose turn it is to be handed over
	first    int          // who comes first in the next fetch
	polls    map[int32]int
	out      int         // unsettled deliveries of parts
	until    time.Time   // when parts are given up, unless the coordinator answers
	lapse    *time.Timer // calls lapsed then
	draining bool
	isOver   bool
}

func newFeed(b *Bus, s broker.Subscription) *feed {
	return &feed{
		b: b, s: s, trouble: troubles{tell: s.Trouble}, polls: make(map[int32]int),
		hand: make(chan struct{}, 1), room: make(chan struct{}, 1), dirty: make(chan struct{}, 1),
		over: make(chan struct{}),
	}
}

// kick tells the reader of c to look; it does not wait.
func kick(c chan<- struct{}) {
	select {
	case c <- struct{}{}:
	default:
	}
}

func (f *feed) run(ctx context.Context, deliver func(broker.Delivery)) error {
	work, end := context.WithCancelCause(context.WithoutCancel(ctx))
	defer end(nil)
	defer context.AfterFunc(ctx, f.drain)()
	f.lapse = time.AfterFunc(f.b.cfg.SessionTimeout, f.lapsed)
	defer f.lapse.Stop()
	stopped := make(chan struct{})
	defer close(stopped)
	go func() {
		select {
		case <-f.b.link.done:
			end(broker.ErrClosed)
		case <-stopped:
		}
	}()
	if err := f.topicAtStart(work); err != nil || f.ended() {
		return err
	}
	var wg sync.WaitGroup
	wg.Go(func() { f.fetch(work) })
	wg.Go(func() { f.handOver(work, deliver) })
	err := newMember(f).run(work)
	f.assign(nil)
	end(err)
	wg.Wait()
	return err
}

// drain begins the end: nothing more is fetched or handed over.
func (f *feed) drain() {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.draining = true
	f.check()
}

// check notices that nothing is left to be waited for. f.mu is held.
func (f *feed) check() {
	if f.draining && f.out == 0 && !f.isOver {
		f.isOver = true
		close(f.over)
	}
}

func (f *feed) ended() bool {
	select {
	case <-f.over:
		return true
	default:
		return false
	}
}

// wait waits for d, and for less where the feed is over or ctx ends.
func (f *feed) wait(ctx context.Context, d time.Duration) {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
	case <-f.over:
	case <-ctx.Done():
	}
}

func newPause() *backoff.ExponentialBackOff {
	p := backoff.NewExponentialBackOff()
	p.InitialInterval, p.MaxInterval, p.MaxElapsedTime = 50*time.Millisecond, 2*time.Second, 0
	return p
}

// topicTries is how often an unknown topic is asked for before it counts as
// missing: brokers know of a new one only after a moment.
const topicTries = 4

// topicAtStart returns nil when the topic exists, or the feed is over before that
// is known.
func (f *feed) topicAtStart(ctx context.Context) error {
	pause := newPause()
	for missing := 0; ; {
		t, err := f.topic(ctx)
		switch {
		case f.ended():
			return nil
		case ctx.Err() != nil:
			return context.Cause(ctx)
		case err == nil && t.ErrorCode == 0:
			f.trouble.clear(troubleGroup)
			return nil
		case err == nil:
			missing++
			err = kafkago.Error(t.ErrorCode)
			if missing == topicTries {
				return fmt.Errorf("there is no such topic, or none that this program may see, and it is not made: %w", err)
			}
			f.refresh(ctx)
		}
		f.trouble.set(troubleGroup, err)
		f.wait(ctx, pause.NextBackOff())
	}
}

// topic returns what is known of the topic.
func (f *feed) topic(ctx context.Context) (metadata.ResponseTopic, error) {
	m, err := f.metadata(ctx, []string{f.s.Topic})
	if err != nil {
		return metadata.ResponseTopic{}, err
	}
	return m.Topics[0], nil
}

// metadata returns what is known of the topics; nil asks for all.
func (f *feed) metadata(ctx context.Context, topics []string) (*metadata.Response, error) {
	ctx, cancel := context.WithTimeout(ctx, f.b.cfg.DialTimeout)
	defer cancel()
	m, err := f.b.link.metadata(ctx, topics)
	if err != nil {
		return nil, fmt.Errorf("ask for the cluster's layout: %w", cause(ctx, err))
	}
	return m, nil
}

// refresh has the cluster's layout read anew.
func (f *feed) refresh(ctx context.Context) {
	ctx, cancel := context.WithTimeout(ctx, f.b.cfg.DialTimeout)
	defer cancel()
	f.b.link.refresh(ctx)
}
