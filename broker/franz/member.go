package franz

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/twmb/franz-go/pkg/kmsg"

	"github.com/postroom/postroom/broker"
)

const (
	// commitPause stands between two commits.
	commitPause = 100 * time.Millisecond

	// commitTimeout bounds one, and so how long a partition that is taken away
	// waits for it.
	commitTimeout = 5 * time.Second

	// leaveTimeout bounds saying goodbye.
	leaveTimeout = 2 * time.Second
)

// A member is one stay in a group.
type member struct {
	b         *Bus
	s         broker.Subscription
	deliver   func(broker.Delivery)
	trouble   *trouble
	client    *kgo.Client
	fromStart bool // the topic was made anew: offsets that are committed are the old one's

	news   chan struct{} // receives when there may be something to deliver
	room   chan struct{} // receives when fetched messages became fewer
	settle chan struct{} // receives when there may be something to commit

	committing sync.Mutex // held from looking what to commit until it is

	polling   sync.Mutex // held from before a fetch is taken until it is received
	interrupt func()     // ends waiting for a fetch; guarded by mu
	assigning int        // calls of assigned that wait for polling; guarded by mu

	mu         sync.Mutex
	partitions map[int32]*partition
	restarted  map[int32]bool // partitions that were read from the start for fromStart
	out        int            // deliveries that are not settled
}

func (b *Bus) member(s broker.Subscription, deliver func(broker.Delivery), t *trouble) *member {
	return &member{
		b: b, s: s, deliver: deliver, trouble: t,
		interrupt: func() {}, partitions: make(map[int32]*partition), restarted: make(map[int32]bool),
		news: make(chan struct{}, 1), room: make(chan struct{}, 1), settle: make(chan struct{}, 1),
	}
}

// run stays in the group until ctx ends and every delivery is settled or lost, or
// something is wrong that a new stay may cure.
func (m *member) run(ctx context.Context) (err error) {
	life, kill := context.WithCancel(context.WithoutCancel(ctx))
	defer kill()
	if m.client, err = m.b.client(append(m.options(), kgo.WithContext(life))...); err != nil {
		return err
	}
	work, end := context.WithCancelCause(context.WithoutCancel(ctx))
	polling, stop := context.WithCancel(ctx)
	var poller, committer sync.WaitGroup
	poller.Go(func() {
		if err := m.poll(polling); err != nil {
			end(err)
		}
	})
	committer.Go(func() { m.commitAll(work) })
	m.deliverAll(ctx, work)
	stop()
	poller.Wait()
	m.drain(work)
	err = context.Cause(work)
	end(nil)
	committer.Wait()
	m.leave(err == nil, kill)
	return err
}

func (m *member) options() []kgo.Opt {
	isolation := kgo.ReadCommitted()
	if m.b.cfg.ReadUncommitted {
		isolation = kgo.ReadUncommitted()
	}
	bytes := int32(m.b.cfg.FetchBytes)
	return []kgo.Opt{
		kgo.WithHooks(m.trouble),
		kgo.ConsumerGroup(m.s.Group),
		kgo.ConsumeTopics(m.s.Topic),
		kgo.Balancers(kgo.CooperativeStickyBalancer()),
		kgo.SessionTimeout(m.b.cfg.SessionTimeout),
		kgo.HeartbeatInterval(min(3*time.Second, m.b.cfg.SessionTimeout/4)),
		kgo.DisableAutoCommit(),
		kgo.ConsumeStartOffset(kgo.NewOffset().AtStart()),
		kgo.ConsumeResetOffset(kgo.NewOffset().AtStart()),
		kgo.AdjustFetchOffsetsFn(m.begin),
		kgo.FetchIsolationLevel(isolation),
		kgo.KeepControlRecords(), // so that offsets move past what they hide
		kgo.FetchMaxBytes(bytes),
		kgo.FetchMaxPartitionBytes(bytes / 2),
		kgo.FetchMaxWait(fetchWait),
		kgo.RebalanceTimeout(m.b.cfg.SessionTimeout + 2*commitTimeout),
		kgo.OnPartitionsAssigned(m.assigned),
		kgo.OnPartitionsRevoked(m.revoked),
		kgo.OnPartitionsLost(m.lost),
	}
}

// assigned is called before the partitions are fetched. What was fetched of them
// in an earlier stay and is still on its way must not be taken for theirs.
func (m *member) assigned(_ context.Context, _ *kgo.Client, added map[string][]int32) {
	m.mu.Lock()
	m.assigning++
	m.interrupt()
	m.mu.Unlock()
	m.polling.Lock()
	defer m.polling.Unlock()
	m.mu.Lock()
	defer m.mu.Unlock()
	m.assigning--
	for _, id := range added[m.s.Topic] {
		m.partitions[id] = newPartition(id)
	}
}

// begin is told where the group stands, before anything is fetched.
func (m *member) begin(_ context.Context, offsets map[string]map[int32]kgo.Offset) (map[string]map[int32]kgo.Offset, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	for id, offset := range offsets[m.s.Topic] {
		if m.fromStart && !m.restarted[id] {
			m.restarted[id] = true
			offsets[m.s.Topic][id] = kgo.NewOffset().AtStart()
		} else if p := m.partitions[id]; p != nil {
			p.next = offset.EpochOffset().Offset // below zero where nothing is committed
		}
	}
	return offsets, nil
}

// revoked is called before others may have the partitions. What is out may be
// settled first, while the member's session lasts without it.
func (m *member) revoked(ctx context.Context, _ *kgo.Client, gone map[string][]int32) {
	timer := time.NewTimer(m.b.cfg.SessionTimeout)
	defer timer.Stop()
	for _, idle := range m.retire(gone[m.s.Topic]) {
		select {
		case <-idle:
		case <-timer.C:
			timer.Reset(0) // for the others too
		case <-m.b.closing:
		}
	}
	lost := m.lose(gone[m.s.Topic])
	m.committing.Lock()
	defer m.committing.Unlock()
	if err := m.commit(ctx, lost); err != nil {
		m.trouble.report(err)
	}
}

// retire delivers no more of the partitions. What it returns is closed when
// nothing of them is out.
func (m *member) retire(ids []int32) (idle []<-chan struct{}) {
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, id := range ids {
		if p := m.partitions[id]; p != nil {
			p.retire()
			idle = append(idle, p.idle)
		}
	}
	return idle
}

// lost is called when others may have the partitions already.
func (m *member) lost(_ context.Context, _ *kgo.Client, gone map[string][]int32) {
	m.lose(gone[m.s.Topic])
	// What is being committed must not reach the broker in a later generation.
	m.committing.Lock()
	defer m.committing.Unlock()
}

// lose takes partitions away from the member.
func (m *member) lose(ids []int32) (lost []*partition) {
	m.mu.Lock()
	var paused []int32
	for _, id := range ids {
		p := m.partitions[id]
		if p == nil {
			continue
		}
		if p.paused {
			paused = append(paused, id)
		}
		m.out -= p.out
		p.lose()
		delete(m.partitions, id)
		lost = append(lost, p)
	}
	m.mu.Unlock()
	m.resume(paused...)
	m.wake()
	return lost
}

// leave ends the stay. What is settled is committed where that is still wanted.
// kill ends what the client would still try.
func (m *member) leave(commit bool, kill func()) {
	ctx, cancel := context.WithTimeout(context.Background(), leaveTimeout)
	defer cancel()
	m.mu.Lock()
	ids := make([]int32, 0, len(m.partitions))
	for id := range m.partitions {
		ids = append(ids, id)
	}
	m.mu.Unlock()
	if lost := m.lose(ids); commit {
		m.committing.Lock()
		_ = m.commit(ctx, lost) // what is not committed comes again
		m.committing.Unlock()
	}
	_ = m.client.LeaveGroupContext(ctx) // the brokers notice without it
	kill()
	m.client.Close()
}

// wake has deliveries, commits and whoever waits for an end look again.
func (m *member) wake() {
	for _, c := range []chan struct{}{m.news, m.settle} {
		signal(c)
	}
}

func signal(c chan struct{}) {
	select {
	case c <- struct{}{}:
	default:
	}
}

// commitAll commits what is settled, until work ends.
func (m *member) commitAll(work context.Context) {
	for {
		select {
		case <-m.settle:
		case <-work.Done():
			return
		}
		m.committing.Lock()
		err := m.commit(work, m.held())
		m.committing.Unlock()
		if err != nil && work.Err() == nil {
			m.trouble.report(err)
			signal(m.settle)
		}
		rest(work, commitPause)
	}
}

func (m *member) held() []*partition {
	m.mu.Lock()
	defer m.mu.Unlock()
	return slices.Collect(maps.Values(m.partitions))
}

// commit commits what is settled of the partitions. committing is held.
func (m *member) commit(ctx context.Context, ps []*partition) error {
	offsets := make(map[int32]kgo.EpochOffset)
	m.mu.Lock()
	for _, p := range ps {
		if p.dirty {
			offsets[p.id], p.dirty = p.commit, false
		}
	}
	m.mu.Unlock()
	if len(offsets) == 0 {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, commitTimeout)
	defer cancel()
	var failed error
	m.client.CommitOffsetsSync(ctx, map[string]map[int32]kgo.EpochOffset{m.s.Topic: offsets},
		func(_ *kgo.Client, _ *kmsg.OffsetCommitRequest, res *kmsg.OffsetCommitResponse, err error) {
			failed = err
			for i := 0; failed == nil && i < len(res.Topics); i++ {
				for _, p := range res.Topics[i].Partitions {
					failed = cmp.Or(failed, kerr.ErrorForCode(p.ErrorCode))
				}
			}
		})
	if failed == nil {
		return nil
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, p := range ps {
		if _, ok := offsets[p.id]; ok {
			p.dirty = true
		}
	}
	return fmt.Errorf("franz: commit offsets: %w", failed)
}
