package nats

import (
	"context"
	"time"
)

type orderKind uint8

const (
	orderAck    orderKind = iota
	orderNak              // useless after until
	orderExtend           // useless once the connection was lost
	orderPull             // useless in a later epoch
)

// An order is something to send for a feed.
type order struct {
	kind    orderKind
	subject string
	reply   string
	data    []byte
	until   time.Time
	epoch   int
}

// orders is what waits to be sent: at most an ack or a refusal for each delivery,
// and a few requests. It outlives a lost connection.
type orders struct {
	queue  []order
	asked  uint64 // orders ever written to queue
	sent   uint64 // orders that were sent or dropped
	notify chan struct{}
	idle   chan struct{} // closed when sent reaches asked; nil: nobody waits
}

// write queues an order. f.mu is held.
func (f *feed) write(o order) {
	f.orders.queue = append(f.orders.queue, o)
	f.orders.asked++
	select {
	case f.orders.notify <- struct{}{}:
	default:
	}
}

// written waits until everything queued so far was handed to the connection.
func (f *feed) written(ctx context.Context) error {
	f.mu.Lock()
	if f.orders.sent == f.orders.asked {
		f.mu.Unlock()
		return nil
	}
	if f.orders.idle == nil {
		f.orders.idle = make(chan struct{})
	}
	idle := f.orders.idle
	f.mu.Unlock()
	select {
	case <-idle:
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// writer sends what is queued, in order, until ctx ends.
func (f *feed) writer(ctx context.Context) {
	for {
		f.mu.Lock()
		batch := f.orders.queue
		f.orders.queue = nil
		f.mu.Unlock()
		for i := range batch {
			if !f.send(ctx, &batch[i]) {
				return
			}
		}
		f.mu.Lock()
		f.orders.sent += uint64(len(batch))
		if f.orders.sent == f.orders.asked && f.orders.idle != nil {
			close(f.orders.idle)
			f.orders.idle = nil
		}
		f.mu.Unlock()
		select {
		case <-f.orders.notify:
		case <-ctx.Done():
			return
		}
	}
}

// send sends one order, as soon as there is a connection. It returns false when
// ctx has ended.
func (f *feed) send(ctx context.Context, o *order) bool {
	for ctx.Err() == nil {
		changed := f.b.link.changes()
		if !f.useful(o) {
			return true
		}
		if f.b.link.up.Load() && f.put(o) == nil {
			return true
		}
		if o.kind == orderExtend || o.kind == orderPull {
			return true
		}
		timer := time.NewTimer(time.Second) // an error that no change follows
		select {
		case <-changed:
		case <-timer.C:
		case <-ctx.Done():
		}
		timer.Stop()
	}
	return false
}

func (f *feed) useful(o *order) bool {
	switch o.kind {
	case orderNak:
		return time.Now().Before(o.until)
	case orderPull:
		f.mu.Lock()
		defer f.mu.Unlock()
		return o.epoch == f.pulls.epoch && !f.draining
	}
	return true
}

// put hands an order to the connection. PublishRequest refuses an empty reply.
func (f *feed) put(o *order) error {
	if o.reply == "" {
		return f.b.nc.Publish(o.subject, o.data)
	}
	return f.b.nc.PublishRequest(o.subject, o.reply, o.data)
}
