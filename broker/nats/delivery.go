package nats

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"time"

	natsgo "github.com/nats-io/nats.go"

	"github.com/postroom/postroom"
	"github.com/postroom/postroom/broker"
)

var errSettled = errors.New("nats: delivery was settled before")

type deliveryState uint8

const (
	stateHeld    deliveryState = iota // received, not handed over
	stateOut                          // handed over
	stateLost                         // its deadline may have passed
	stateSettled                      // acked or given back
)

// A delivery is one message that was received. Its mutable fields are guarded
// by f.mu.
type delivery struct {
	f       *feed
	message postroom.Message
	reply   string
	pos     broker.Position
	count   int
	lost    chan struct{}

	state    deliveryState
	void     bool      // the stream it came from is gone: settling would hit another message
	deadline time.Time // before it, the server gives the message to nobody else
	extended time.Time // when the last extension was sent
}

func (f *feed) newDelivery(m *natsgo.Msg, deadline time.Time) (*delivery, error) {
	meta, err := m.Metadata()
	if err != nil {
		return nil, err
	}
	d := &delivery{
		f: f, reply: m.Reply, count: int(meta.NumDelivered), lost: make(chan struct{}), deadline: deadline,
		pos: broker.Position{Topic: f.s.Topic, Partition: -1, Offset: meta.Sequence.Stream},
	}
	if m.Subject != f.s.Topic {
		d.pos.Partition = partition(f.s.Topic, m.Subject)
	}
	d.message.Topic = f.s.Topic
	if err := decode(&d.message, m.Header, m.Data, m.Subject); err != nil {
		f.malformed(d, err)
	}
	return d, nil
}

func (d *delivery) Message() postroom.Message { return d.message }
func (d *delivery) Position() broker.Position { return d.pos }
func (d *delivery) Deliveries() int           { return d.count }
func (d *delivery) Lost() <-chan struct{}     { return d.lost }

// Ack implements [broker.Delivery]. It does not wait for the server.
func (d *delivery) Ack(ctx context.Context) error {
	if ctx.Err() != nil {
		return fmt.Errorf("nats: %w", context.Cause(ctx))
	}
	d.f.mu.Lock()
	defer d.f.mu.Unlock()
	was, err := d.settle()
	if err == nil && !d.void {
		// A lost one is acked too: if no other has it yet, none needs to.
		d.f.write(order{kind: orderAck, subject: d.reply, data: ackBody})
	}
	if was == stateLost {
		return fmt.Errorf("nats: %w", broker.ErrLost)
	}
	return err
}

// Retry implements [broker.Delivery].
func (d *delivery) Retry(ctx context.Context, delay time.Duration) error {
	if ctx.Err() != nil {
		return fmt.Errorf("nats: %w", context.Cause(ctx))
	}
	d.f.mu.Lock()
	defer d.f.mu.Unlock()
	was, err := d.settle()
	if was == stateLost {
		return fmt.Errorf("nats: %w", broker.ErrLost)
	}
	if err == nil {
		d.f.giveBack(d, max(delay, time.Millisecond))
	}
	return err
}

// settle ends the delivery. f.mu is held.
func (d *delivery) settle() (was deliveryState, err error) {
	was = d.state
	if was == stateSettled {
		return was, errSettled
	}
	d.state = stateSettled
	delete(d.f.out, d)
	d.f.kick()
	return was, nil
}

// lose marks a delivery that another member may have been given. f.mu is held.
func (d *delivery) lose() {
	if d.state == stateSettled || d.state == stateLost {
		return
	}
	d.state = stateLost
	delete(d.f.out, d)
	close(d.lost)
	d.f.kick()
}

var (
	ackBody    = []byte("+ACK")
	extendBody = []byte("+WPI")
)

// nakBody asks for the message again after delay; at once where it is 0.
func nakBody(delay time.Duration) []byte {
	if delay <= 0 {
		return []byte("-NAK")
	}
	return []byte(`-NAK {"delay":` + strconv.FormatInt(int64(delay), 10) + `}`)
}
