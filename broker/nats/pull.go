package nats

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strconv"
	"strings"
	"time"

	"github.com/cenkalti/backoff/v4"
	natsgo "github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/postroom/postroom/broker"
)

// pulls is what was asked for at the consumer. An epoch ends when its requests
// can no longer be trusted to be answered.
type pulls struct {
	epoch int
	asked int       // messages that may still come
	heard time.Time // when anything last came
	err   error     // why the epoch must end
}

var (
	errReconnected = errors.New("the connection was lost and is back")
	errSilent      = errors.New("the consumer sends no heartbeats")
	errRecheck     = errors.New("check again")
)

// control keeps asking for messages, and repairs what stops them, until ctx
// ends. It returns an error only for what a person must mend.
func (f *feed) control(ctx context.Context) error {
	wait := backoff.NewExponentialBackOff(
		backoff.WithInitialInterval(50*time.Millisecond), backoff.WithMaxInterval(10*time.Second), backoff.WithMaxElapsedTime(0))
	started, troubled := false, false
	for {
		changed := f.b.link.changes()
		err := errDisconnected
		if f.b.link.up.Load() {
			err = f.attach(ctx)
		}
		if err == nil {
			started = true
			if troubled {
				troubled = false
				f.tell(nil)
			}
			err = f.pump(ctx, wait)
		}
		switch {
		case ctx.Err() != nil:
			return nil
		case f.b.isClosed.Load():
			return broker.ErrClosed
		case mustMend(err), !started && errors.Is(err, errNoStream):
			return err
		case errors.Is(err, errRecheck):
			continue
		case errors.Is(err, errReconnected):
			wait.Reset()
			continue
		}
		troubled = true
		f.tell(err)
		timer := time.NewTimer(wait.NextBackOff())
		select {
		case <-timer.C:
		case <-changed:
		case <-ctx.Done():
		}
		timer.Stop()
	}
}

// mustMend reports whether only a person can lift what err says.
func mustMend(err error) bool {
	if _, ok := errors.AsType[accessError](err); ok {
		return true
	}
	if _, ok := errors.AsType[unsafeError](err); ok {
		return true
	}
	api, ok := errors.AsType[*jetstream.APIError](err)
	return ok && api.Code == 400
}

func (f *feed) tell(err error) {
	if err != nil {
		f.b.cfg.Logger.LogAttrs(f.b.link.ctx, slog.LevelWarn, "messages have stopped coming",
			slog.String("topic", f.s.Topic), slog.String("group", f.s.Group), slog.Any("error", err))
		err = fmt.Errorf("nats: topic %q, group %q: %w", f.s.Topic, f.s.Group, err)
	}
	if f.s.Trouble != nil {
		f.s.Trouble(err)
	}
}

// attach finds or makes the consumer and begins an epoch.
func (f *feed) attach(ctx context.Context) error {
	c, err := f.b.consumer(ctx, &f.s)
	if err != nil {
		return err
	}
	f.mu.Lock()
	old := f.c
	f.c = c
	f.pulls = pulls{epoch: f.pulls.epoch + 1, heard: time.Now()}
	f.mu.Unlock()
	if old != nil && (old.stream != c.stream || !old.streamCreated.Equal(c.streamCreated)) {
		f.loseAll(true)
	} else if old != nil && !old.created.Equal(c.created) {
		f.loseAll(false)
	}
	return nil
}

// heartbeat is how often an idle consumer must be heard.
func (c *consumer) heartbeat() time.Duration {
	return min(5*time.Second, max(50*time.Millisecond, c.ackWait/6))
}

// pump asks for messages until something is wrong.
func (f *feed) pump(ctx context.Context, wait *backoff.ExponentialBackOff) error {
	begun := time.Now()
	f.mu.Lock()
	c := f.c
	f.mu.Unlock()
	beat := c.heartbeat()
	tick := time.NewTicker(beat)
	defer tick.Stop()
	for {
		changed := f.b.link.changes()
		if !f.b.link.up.Load() {
			return errDisconnected
		}
		if err := f.ask(c, beat, begun); err != nil {
			return err
		}
		select {
		case <-f.room:
		case <-tick.C:
			f.mu.Lock()
			alive := f.pulls.heard.After(begun)
			f.mu.Unlock()
			if alive {
				wait.Reset()
			}
		case <-changed:
			if f.b.link.up.Load() {
				return errReconnected
			}
		case <-ctx.Done():
			return nil
		}
	}
}

// ask requests as many messages as there is room for, a good share at a time.
func (f *feed) ask(c *consumer, beat time.Duration, begun time.Time) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	p, now := &f.pulls, time.Now()
	if p.err != nil {
		return p.err
	}
	if p.asked > 0 && now.Sub(p.heard) > 2*beat+beat/2 {
		return errSilent
	}
	if p.asked == 0 && now.Sub(begun) > 3*beat && now.Sub(p.heard) > 3*beat {
		return errRecheck // nothing would tell that the consumer is gone
	}
	n := f.s.MaxInFlight - len(f.out) - len(f.held) - p.asked
	if n <= 0 || p.asked > 0 && n < (f.s.MaxInFlight+3)/4 {
		return nil
	}
	if c.maxBatch > 0 {
		n = min(n, c.maxBatch)
	}
	expires := 6 * beat
	if c.maxExpires > 0 {
		expires = min(expires, c.maxExpires)
	}
	beat = min(beat, expires/2)
	if p.asked == 0 {
		f.confirm(now)
		p.heard = now
	}
	p.asked += n
	f.write(order{
		kind: orderPull, epoch: p.epoch,
		subject: "$JS.API.CONSUMER.MSG.NEXT." + c.stream + "." + c.name,
		reply:   f.inbox + "." + strconv.Itoa(p.epoch),
		data:    fmt.Appendf(nil, `{"batch":%d,"expires":%d,"idle_heartbeat":%d}`, n, expires, beat),
	})
	return nil
}

// onMessage receives what the server sends: messages, and words about requests.
func (f *feed) onMessage(m *natsgo.Msg) {
	f.mu.Lock()
	defer f.mu.Unlock()
	now := time.Now()
	f.fresh.received()
	f.pulls.heard = now
	if !strings.HasPrefix(m.Reply, "$JS.ACK.") {
		f.onStatus(m)
		return
	}
	if f.pulls.asked > 0 {
		f.pulls.asked--
	}
	if f.c == nil {
		return
	}
	d, err := f.newDelivery(m, f.fresh.at.Add(f.c.ackWait))
	switch {
	case err != nil:
		f.pulls.err = err
	case f.draining:
		d.state = stateSettled
		f.giveBack(d, 0)
	case !now.Before(d.deadline):
		d.lose() // it lay on the way so long that another may have it
	default:
		f.held = append(f.held, d)
	}
	f.kick()
}

// onStatus takes note of how a request ended. f.mu is held.
func (f *feed) onStatus(m *natsgo.Msg) {
	p := &f.pulls
	if m.Subject != f.inbox+"."+strconv.Itoa(p.epoch) {
		return // about a request of an earlier epoch
	}
	text := m.Header.Get("Description")
	switch status := m.Header.Get("Status"); status {
	case "100": // heartbeat
		return
	case "404", "408":
		f.unask(m)
	case "409":
		if strings.EqualFold(text, "Batch Completed") || strings.EqualFold(text, "Message Size Exceeds MaxBytes") {
			f.unask(m)
			break
		}
		p.err = fmt.Errorf("the consumer ended a request: %s", text)
	case "503":
		p.err = errNoResponders
	default:
		p.err = fmt.Errorf("the consumer answered %s %s", status, text)
	}
	f.kick()
}

// unask takes off what an ended request leaves undelivered.
func (f *feed) unask(m *natsgo.Msg) {
	p := &f.pulls
	left, err := strconv.Atoi(m.Header.Get("Nats-Pending-Messages"))
	if err != nil {
		left = p.asked
	}
	p.asked = max(0, p.asked-left)
}
