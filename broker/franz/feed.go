package franz

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"time"

	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kgo"
)

const (
	// stallTime is how long fetched messages may wait before the partitions that
	// have some are set aside, so that others are fetched.
	stallTime = 100 * time.Millisecond

	// fetchWait is how long a broker waits for new messages.
	fetchWait = 500 * time.Millisecond
)

// poll fetches until ctx ends, or something is wrong that a new stay may cure.
func (m *member) poll(ctx context.Context) error {
	for ctx.Err() == nil {
		m.waitForRoom(ctx)
		if err := m.pollOnce(ctx); err != nil {
			return err
		}
	}
	return nil
}

func (m *member) pollOnce(ctx context.Context) error {
	m.polling.Lock()
	defer m.polling.Unlock()
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	m.mu.Lock()
	m.interrupt = cancel
	if m.assigning > 0 {
		cancel()
	}
	m.mu.Unlock()
	return m.receive(ctx, m.client.PollFetches(ctx))
}

// waitForRoom waits until few fetched messages are left. Those of partitions that
// are slow are set aside, so that the others go on.
func (m *member) waitForRoom(ctx context.Context) {
	timer := time.NewTimer(stallTime)
	defer timer.Stop()
	for m.queued() > m.s.MaxInFlight {
		select {
		case <-m.room:
		case <-timer.C:
			m.pause()
			return
		case <-ctx.Done():
			return
		}
	}
}

func (m *member) queued() (n int) {
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, p := range m.partitions {
		if !p.paused {
			n += len(p.queue)
		}
	}
	return n
}

// pause stops fetching from partitions that have messages left.
func (m *member) pause() {
	m.mu.Lock()
	var ids []int32
	for id, p := range m.partitions {
		if !p.paused && len(p.queue) > 0 {
			p.paused = true
			ids = append(ids, id)
		}
	}
	m.mu.Unlock()
	if len(ids) > 0 {
		m.client.PauseFetchPartitions(map[string][]int32{m.s.Topic: ids})
	}
}

// resume goes on fetching.
func (m *member) resume(ids ...int32) {
	if len(ids) > 0 {
		m.client.ResumeFetchPartitions(map[string][]int32{m.s.Topic: ids})
	}
}

// receive gives what was fetched to its partitions.
func (m *member) receive(ctx context.Context, fetches kgo.Fetches) (err error) {
	fetches.EachError(func(_ string, _ int32, e error) {
		switch {
		case errors.Is(e, context.Canceled) && ctx.Err() != nil:
		case errors.Is(e, kerr.UnknownTopicID), errors.Is(e, kerr.UnknownTopicOrPartition), denied(e):
			err = e
		default:
			m.trouble.report(fmt.Errorf("franz: topic %q: %w", m.s.Topic, e))
		}
	})
	if err != nil {
		return err
	}
	var removed []error
	m.mu.Lock()
	some := false
	fetches.EachPartition(func(f kgo.FetchTopicPartition) {
		p := m.partitions[f.Partition]
		if p == nil || p.idle != nil || len(f.Records) == 0 {
			return
		}
		if first := f.Records[0].Offset; p.next >= 0 && p.next < f.LogStartOffset && p.next < first {
			removed = append(removed, fmt.Errorf("franz: %s/%d: offsets %d to %d were removed before they were delivered",
				m.s.Topic, p.id, p.next, f.LogStartOffset-1))
		}
		p.queue = append(p.queue, f.Records...)
		p.next = f.Records[len(f.Records)-1].Offset + 1
		some = true
	})
	m.mu.Unlock()
	for _, e := range removed {
		m.b.cfg.Logger.WarnContext(ctx, "franz: messages were removed before they were delivered", slog.Any("error", e))
		m.trouble.report(e)
	}
	if some {
		m.trouble.report(nil)
		signal(m.news)
	}
	return nil
}

// deliverAll delivers until ctx or work ends.
func (m *member) deliverAll(ctx, work context.Context) {
	timer := time.NewTimer(0)
	defer timer.Stop()
	for ctx.Err() == nil && work.Err() == nil {
		d, wait := m.pick()
		if d != nil {
			d.message = message(d.record)
			m.deliver(d)
			continue
		}
		var due <-chan time.Time
		if wait >= 0 {
			timer.Reset(wait)
			due = timer.C
		}
		select {
		case <-m.news:
		case <-due:
		case <-ctx.Done():
		case <-work.Done():
		}
	}
}

// pick takes the next delivery: what was given back and is due, else the oldest
// of the partition that has the fewest out. Where there is none it returns the
// time until something is due, or -1.
func (m *member) pick() (*delivery, time.Duration) {
	m.mu.Lock()
	var back, fresh *partition
	var resume []int32
	waiting, moved := 0, false
	for _, p := range m.partitions {
		if len(p.retries) > 0 && (back == nil || p.retries[0].due.Before(back.retries[0].due)) {
			back = p
		}
		waiting += len(p.retries)
		if p.ready() && (fresh == nil || p.out < fresh.out) {
			fresh = p
		}
		moved = moved || p.dirty
		if p.paused && len(p.queue) == 0 {
			p.paused = false
			resume = append(resume, p.id)
		}
	}
	if moved {
		signal(m.settle)
	}
	d, wait := &delivery{m: m}, time.Duration(-1)
	if back != nil {
		wait = max(time.Until(back.retries[0].due), 0)
	}
	switch {
	case m.out >= m.s.MaxInFlight:
		d, wait = nil, -1
	case wait == 0:
		d.p = back
		d.seq, d.record = back.takeBack()
	case fresh != nil && waiting < m.s.MaxInFlight: // what waits takes memory too
		d.p = fresh
		d.seq, d.record = fresh.take()
		signal(m.room)
	default:
		d = nil
	}
	if d != nil {
		m.out++
	}
	m.mu.Unlock()
	m.resume(resume...)
	return d, wait
}

// drain waits until nothing is out, or the stay or the bus has ended.
func (m *member) drain(work context.Context) {
	for {
		m.mu.Lock()
		left := m.out
		m.mu.Unlock()
		if left == 0 {
			return
		}
		select {
		case <-m.news:
		case <-work.Done():
			return
		case <-m.b.closing:
			return
		}
	}
}
