// Package brokertest checks that an implementation of package broker keeps every
// promise of its contracts.
//
//	func TestConformance(t *testing.T) {
//		brokertest.Run(t, brokertest.Harness{ … })
//	}
//
// Nothing in the suite tries twice: what fails once has failed.
package brokertest

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/postroom/postroom"
	"github.com/postroom/postroom/broker"
)

// A Harness connects the suite to one broker. Functions whose comments do not
// say otherwise are required.
type Harness struct {
	// Publisher opens a publisher on a connection of its own. The suite closes it.
	Publisher func(ctx context.Context) (broker.Publisher, error)

	// Subscriber opens a subscriber on a connection of its own. kill drops the
	// connection as a crash of the process would: what is not settled stays so.
	// It may be called while Subscribe runs, and twice; the suite always calls
	// it in the end. Subscribe may then return any error.
	Subscriber func(ctx context.Context) (s broker.Subscriber, kill func(), err error)

	// CreateTopic makes a topic.
	CreateTopic func(ctx context.Context, name string) error

	// TopicExists reports whether there is such a topic, without making it.
	TopicExists func(ctx context.Context, name string) (bool, error)

	// InvalidTopic is a name that the broker never takes.
	InvalidTopic string

	// TooLarge is the size of a payload that the broker never takes. 0: it
	// takes any, and Skip must say so for OversizeIsRefused.
	TooLarge int

	// HeaderOrder says that the broker keeps the order of headers with
	// different names. Else they are compared name by name.
	HeaderOrder bool

	// FailOnce arms a fault: the next attempt to store the message with that id
	// fails for a moment, while others go through. nil: cannot be forced, and
	// Skip must name the cases that need it.
	FailOnce func(topic, id string) error

	// Outage takes the broker away from everybody until restore is called. nil:
	// cannot be done, and Skip must name the cases that need it.
	Outage func(ctx context.Context) (restore func() error, err error)

	// ServerPackages are import paths of a broker that runs in this process. Its
	// goroutines are not counted as left behind.
	ServerPackages []string

	// Patience is how long the suite waits for what must come, a killed
	// subscriber's messages included. Default 20s.
	Patience time.Duration

	// Quiet is how long the suite watches that nothing comes. It should exceed
	// the broker's time for redelivery. Default 300ms.
	Quiet time.Duration

	// Skip maps the name of a case that the broker cannot satisfy to the reason.
	Skip map[string]string
}

// A testCase checks one promise.
type testCase struct {
	name    string
	promise string // printed when it is broken
	run     func(context.Context, *env) error
	alone   bool // it disturbs, or is disturbed by, others
}

// Run runs every case that h does not skip as a subtest. A name in Skip that no
// case has fails the test.
func Run(t *testing.T, h Harness) {
	t.Helper()
	h = h.withDefaults()
	for name := range h.Skip {
		if !slices.ContainsFunc(cases, func(c testCase) bool { return c.name == name }) {
			t.Errorf("Harness.Skip names %q, and there is no such case", name)
		}
	}
	for _, alone := range []bool{true, false} {
		for _, c := range cases {
			if c.alone != alone {
				continue
			}
			t.Run(c.name, func(t *testing.T) {
				if reason, ok := h.Skip[c.name]; ok {
					t.Skip(reason)
				}
				if !alone {
					t.Parallel()
				}
				if err := check(t.Context(), h, c); err != nil {
					t.Errorf("%s\n%v", c.promise, err)
				}
			})
		}
	}
}

func (h Harness) withDefaults() Harness {
	if h.Patience == 0 {
		h.Patience = 20 * time.Second
	}
	if h.Quiet == 0 {
		h.Quiet = 300 * time.Millisecond
	}
	return h
}

// check runs one case.
func check(ctx context.Context, h Harness, c testCase) error {
	ctx, cancel := context.WithTimeout(ctx, 3*h.Patience+20*time.Second)
	defer cancel()
	e := &env{h: h}
	err := c.run(ctx, e)
	return errors.Join(err, e.cleanUp())
}

// An env is what one case works with.
type env struct {
	h    Harness
	undo []func() error
}

// cleanUp closes what the case opened, the last first.
func (e *env) cleanUp() error {
	var errs []error
	for _, f := range slices.Backward(e.undo) {
		errs = append(errs, f())
	}
	return errors.Join(errs...)
}

// unique returns a word that no other case uses.
func (e *env) unique(word string) string { return word + "-" + postroom.NewID() }

// topic makes a topic.
func (e *env) topic(ctx context.Context) (string, error) {
	name := e.unique("topic")
	return name, wrap("create a topic", e.h.CreateTopic(ctx, name))
}

// publisher opens a publisher.
func (e *env) publisher(ctx context.Context) (broker.Publisher, error) {
	p, err := e.h.Publisher(ctx)
	if err != nil {
		return nil, wrap("open a publisher", err)
	}
	e.undo = append(e.undo, func() error { return wrap("close the publisher", p.Close()) })
	return p, nil
}

// topicAndPublisher is how most cases begin.
func (e *env) topicAndPublisher(ctx context.Context) (string, broker.Publisher, error) {
	topic, err := e.topic(ctx)
	if err != nil {
		return "", nil, err
	}
	p, err := e.publisher(ctx)
	return topic, p, err
}

// store publishes messages that must be stored.
func store(ctx context.Context, p broker.Publisher, msgs ...postroom.Message) error {
	results := p.Publish(ctx, msgs)
	if len(results) != len(msgs) {
		return fmt.Errorf("%d results for %d messages", len(results), len(msgs))
	}
	for i, r := range results {
		if r.Outcome != broker.Stored || r.Err != nil {
			return fmt.Errorf("message %d of %d is %v (%v), want stored", i, len(msgs), r.Outcome, r.Err)
		}
	}
	return nil
}

// messages returns n messages of a topic and key with unique ids.
func messages(topic, key string, n int) []postroom.Message {
	msgs := make([]postroom.Message, n)
	for i := range msgs {
		msgs[i] = postroom.Message{ID: postroom.NewID(), Topic: topic, Key: key, Payload: fmt.Append(nil, i)}
	}
	return msgs
}

func ids(msgs []postroom.Message) []string {
	s := make([]string, len(msgs))
	for i := range msgs {
		s[i] = msgs[i].ID
	}
	return s
}

func wrap(what string, err error) error {
	if err == nil {
		return nil
	}
	return fmt.Errorf("%s: %w", what, err)
}
