package franz

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/postroom/postroom"
	"github.com/postroom/postroom/broker"
)

var errSettled = errors.New("franz: delivery was settled before")

// A delivery is one message at one member.
type delivery struct {
	m       *member
	p       *partition
	seq     int64 // its place in the partition's window
	record  *kgo.Record
	message postroom.Message
	settled bool // guarded by the member's mutex
}

func (d *delivery) Message() postroom.Message { return d.message }
func (d *delivery) Lost() <-chan struct{}     { return d.p.lost }

// Deliveries returns 0: Kafka does not count.
func (d *delivery) Deliveries() int { return 0 }

func (d *delivery) Position() broker.Position {
	return broker.Position{Topic: d.record.Topic, Partition: d.record.Partition, Offset: uint64(d.record.Offset)}
}

// Ack returns before the offset is committed, which happens soon.
func (d *delivery) Ack(ctx context.Context) error {
	return d.settle(ctx, func() { d.p.done(d.seq) })
}

func (d *delivery) Retry(ctx context.Context, delay time.Duration) error {
	return d.settle(ctx, func() { d.p.giveBack(d.seq, d.record, time.Now().Add(max(delay, 0))) })
}

func (d *delivery) settle(ctx context.Context, how func()) error {
	if ctx.Err() != nil {
		return fmt.Errorf("franz: %w", context.Cause(ctx))
	}
	d.m.mu.Lock()
	defer d.m.mu.Unlock()
	switch {
	case d.settled:
		return errSettled
	case d.p.isLost:
		return fmt.Errorf("franz: %w", broker.ErrLost)
	}
	d.settled = true
	d.m.out--
	how()
	d.p.settled()
	d.m.wake()
	return nil
}
