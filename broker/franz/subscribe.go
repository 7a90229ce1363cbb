package franz

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kmsg"

	"github.com/postroom/postroom/broker"
)

// Subscribe implements [broker.Subscriber]. It ends with [broker.ErrClosed] when
// the bus is closed.
func (b *Bus) Subscribe(ctx context.Context, s broker.Subscription, deliver func(broker.Delivery)) error {
	if err := check(s); err != nil {
		return err
	}
	ctx, done, ok := b.begin(ctx)
	if !ok {
		return errClosed
	}
	defer done()
	t := &trouble{tell: s.Trouble}
	var was [16]byte // the topic's id in the last stay
	for failed := 1; ; failed++ {
		id, err := b.lookUp(ctx, s.Topic)
		switch {
		case err == nil:
			m := b.member(s, deliver, t)
			m.fromStart = was != [16]byte{} && id != was
			failed, was = 1, id
			err = m.run(ctx)
		case errors.Is(err, kerr.UnknownTopicOrPartition) && was == [16]byte{}:
			return fmt.Errorf("franz: subscribe to topic %q: %w", s.Topic, err)
		}
		switch {
		case ctx.Err() != nil && errors.Is(context.Cause(ctx), broker.ErrClosed):
			return errClosed
		case ctx.Err() != nil:
			return nil
		case denied(err):
			return fmt.Errorf("franz: subscribe to topic %q as group %q: %w", s.Topic, s.Group, err)
		}
		t.report(fmt.Errorf("franz: topic %q: %w", s.Topic, err))
		rest(ctx, pause(failed))
	}
}

// check reports all that is wrong at once.
func check(s broker.Subscription) error {
	var errs []error
	if s.Group == "" {
		errs = append(errs, errors.New("franz: Subscription.Group is empty"))
	}
	if !validTopic(s.Topic) {
		errs = append(errs, errors.New("franz: Subscription.Topic is not a valid name"))
	}
	if s.MaxInFlight < 1 {
		errs = append(errs, fmt.Errorf("franz: Subscription.MaxInFlight is %d, want at least 1", s.MaxInFlight))
	}
	return errors.Join(errs...)
}

// lookUp returns the id of a topic, which it does not make where there is none.
func (b *Bus) lookUp(ctx context.Context, topic string) (id [16]byte, err error) {
	req := kmsg.NewPtrMetadataRequest()
	t := kmsg.NewMetadataRequestTopic()
	t.Topic = &topic
	req.Topics = append(req.Topics, t)
	res, err := req.RequestWith(ctx, b.control)
	switch {
	case err != nil:
		return id, err
	case len(res.Topics) != 1:
		return id, errors.New("the broker's answer does not mention it")
	default:
		return res.Topics[0].TopicID, kerr.ErrorForCode(res.Topics[0].ErrorCode)
	}
}

// denied reports whether a person must mend what is wrong.
func denied(err error) bool {
	for _, code := range []error{kerr.TopicAuthorizationFailed, kerr.GroupAuthorizationFailed, kerr.InvalidSessionTimeout, kerr.InconsistentGroupProtocol} {
		if errors.Is(err, code) {
			return true
		}
	}
	return false
}

// rest waits, unless ctx ends.
func rest(ctx context.Context, d time.Duration) {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
	case <-ctx.Done():
	}
}
