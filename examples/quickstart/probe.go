package main

import (
	"bytes"
	"context"
	"io"
	"math/rand/v2"
	"os"
	"sync"
	"sync/atomic"

	"github.com/postroom/postroom"
	"github.com/postroom/postroom/broker"
)

// What a worker process tells the main program, one byte each, written to a
// pipe as it happens: what is in the pipe survives the worker's SIGKILL.
const (
	sayPublished = 'p' // the broker acknowledged a message
	sayDelivered = 'd' // the broker delivered a message
	sayEffect    = 'e' // a delivery had its effect
	sayDuplicate = 'c' // a delivery was a duplicate, and was caught
	saySpoiled   = 's' // a handler failed on purpose
	sayAckLost   = 'l' // an acknowledgement was dropped on purpose
)

// A probe stands in a worker process between Postroom and the broker. It
// counts, drops acknowledgements, and ends the process in the moments that
// matter: when the broker has stored messages and no cursor says so yet, and
// when an effect is committed and not yet acknowledged.
type probe struct {
	out       io.Writer
	condemned atomic.Bool // the process is to end in its next such moment
	breaks    string      // what -break asks for

	mu      sync.Mutex
	rng     *rand.Rand
	handled map[string]bool // ids whose handler has run, until they are settled
}

func newProbe(out io.Writer, seed uint64, breaks string) *probe {
	return &probe{
		out:     out,
		breaks:  breaks,
		rng:     rand.New(rand.NewPCG(seed, uint64(os.Getpid()))),
		handled: map[string]bool{},
	}
}

func (p *probe) say(what byte, times int) {
	if _, err := p.out.Write(bytes.Repeat([]byte{what}, times)); err != nil {
		os.Exit(1) // the main program is gone
	}
}

// dieIfCondemned ends this process as SIGKILL does: nothing is flushed, closed
// or deferred.
func (p *probe) dieIfCondemned() {
	if !p.condemned.Load() {
		return
	}
	if self, err := os.FindProcess(os.Getpid()); err == nil {
		_ = self.Kill()
	}
	select {}
}

// chance is true in about the given number of a thousand calls.
func (p *probe) chance(perMille int) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.rng.IntN(1000) < perMille
}

// ran remembers that the handler has handled a message.
func (p *probe) ran(id string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.handled[id] = true
}

// takeRan reports whether the handler has handled it since the last call.
func (p *probe) takeRan(id string) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	ran := p.handled[id]
	delete(p.handled, id)
	return ran
}

// A publisherProbe watches what the dispatcher publishes.
type publisherProbe struct {
	broker.Publisher
	*probe
}

func (p publisherProbe) Publish(ctx context.Context, msgs []postroom.Message) []broker.Result {
	var results []broker.Result
	switch p.breaks {
	case breakOrder:
		results = publishShuffled(ctx, p.Publisher, msgs)
	case breakPublish:
		results = publishSome(ctx, p.Publisher, msgs)
	default:
		results = p.Publisher.Publish(ctx, msgs)
	}
	stored := 0
	for _, r := range results {
		if r.Outcome == broker.Stored {
			stored++
		}
	}
	if stored > 0 {
		p.say(sayPublished, stored)
		p.dieIfCondemned()
	}
	return results
}

// A subscriberProbe watches what is delivered to the inbox.
type subscriberProbe struct {
	broker.Subscriber
	*probe
}

func (p subscriberProbe) Subscribe(ctx context.Context, s broker.Subscription, deliver func(broker.Delivery)) error {
	if p.breaks == breakDelivery {
		var end func()
		deliver, end = shuffled(deliver)
		defer end()
	}
	return p.Subscriber.Subscribe(ctx, s, func(d broker.Delivery) {
		p.say(sayDelivered, 1)
		deliver(deliveryProbe{d, p.probe})
	})
}

type deliveryProbe struct {
	broker.Delivery
	*probe
}

// Ack is called when the effect is committed, or was found to be.
func (d deliveryProbe) Ack(ctx context.Context) error {
	what := byte(sayDuplicate)
	if d.takeRan(d.Message().ID) {
		d.dieIfCondemned()
		what = sayEffect
		if d.chance(ackLossPerMille) {
			d.say(sayAckLost, 1)
			d.say(sayEffect, 1)
			return d.Retry(ctx, 0) // the broker delivers it once more
		}
	}
	if err := d.Delivery.Ack(ctx); err != nil {
		return err
	}
	d.say(what, 1)
	return nil
}
