package kafka

import (
	"context"
	"errors"
	"fmt"
	"time"

	kafkago "github.com/segmentio/kafka-go"
	"github.com/segmentio/kafka-go/protocol"
	"github.com/segmentio/kafka-go/protocol/leavegroup"
	"github.com/segmentio/kafka-go/protocol/metadata"
	"github.com/segmentio/kafka-go/protocol/offsetcommit"
)

const (
	// beats is how many heartbeats are sent in a session timeout.
	beats = 10

	// commitWait is how long a settled message waits for others to be committed
	// with it.
	commitWait = 100 * time.Millisecond

	// topicMissing is at how many heartbeats in a row the topic must be unknown
	// before it counts as deleted.
	topicMissing = 3
)

// errRejoin ends a generation: the group's members divide the partitions anew.
var errRejoin = errors.New("the group divides its partitions anew")

// A member is a feed's membership of its group. One goroutine has it.
//
// When the group is divided anew, handlers go on. What a member keeps stays as it
// is; what it is not given again is lost when it learns that.
type member struct {
	f          *feed
	client     kafkago.Client
	id         string // "" before the coordinator has given one
	generation int
	leads      map[string]int // partitions of the topics, as this member divided them as the group's leader
	missing    int            // at how many looks in a row there was no topic
}

func newMember(f *feed) *member {
	return &member{f: f, client: kafkago.Client{Addr: f.b.link.addr, Transport: f.b.link.transport}}
}

// run keeps the membership until the feed is over, and then leaves the group.
func (m *member) run(ctx context.Context) error {
	life, cancel := context.WithCancel(ctx)
	defer cancel()
	go func() {
		select {
		case <-m.f.over:
			cancel() // nothing that is being asked matters any more
		case <-life.Done():
		}
	}()
	pause := newPause()
	for {
		err := m.join(life)
		if err == nil {
			pause.Reset()
			err = m.hold(life)
		}
		switch {
		case ctx.Err() != nil:
			return context.Cause(ctx)
		case m.f.ended():
			m.leave(ctx)
			return nil
		case permanent(err):
			m.leave(ctx)
			return err
		case errors.Is(err, errRejoin):
			continue
		}
		m.f.trouble.set(troubleGroup, err)
		m.f.wait(ctx, pause.NextBackOff())
	}
}

// permanent reports whether a person must mend what is wrong.
func permanent(err error) bool {
	for _, code := range []kafkago.Error{
		kafkago.GroupAuthorizationFailed, kafkago.TopicAuthorizationFailed, kafkago.InvalidGroupId,
		kafkago.InconsistentGroupProtocol, kafkago.InvalidSessionTimeout, kafkago.GroupMaxSizeReached,
	} {
		if errors.Is(err, code) {
			return true
		}
	}
	return false
}

// hold keeps a generation until it ends, which is always an error or the feed's
// end.
func (m *member) hold(ctx context.Context) error {
	beat := time.NewTicker(m.f.b.cfg.SessionTimeout / beats)
	defer beat.Stop()
	var commit <-chan time.Time
	for {
		var err error
		place := int32(troubleGroup)
		select {
		case <-ctx.Done():
			return context.Cause(ctx)
		case <-m.f.dirty:
			if commit == nil {
				commit = time.After(commitWait)
			}
			continue
		case <-commit:
			commit, place = nil, troubleCommit
			err = m.commit(ctx)
		case <-beat.C:
			err = m.beat(ctx)
		}
		switch {
		case err == nil:
			m.f.trouble.clear(place)
		case errors.Is(err, errRejoin):
			_ = m.commit(ctx) // what is settled need not be repeated by others
			return err
		case m.disowned(err):
			return errRejoin
		case permanent(err):
			return err
		case !m.f.holds():
			return err
		default:
			m.f.trouble.set(place, err)
			if place == troubleCommit {
				kick(m.f.dirty)
			}
		}
	}
}

// disowned takes note that the coordinator does not count this member, or not
// under this generation.
func (m *member) disowned(err error) bool {
	switch {
	case errors.Is(err, kafkago.UnknownMemberId):
		m.id = ""
	case !errors.Is(err, kafkago.IllegalGeneration):
		return false
	}
	m.f.assign(nil)
	return true
}

// beat says that the member lives, and looks whether the topics are as they were.
func (m *member) beat(ctx context.Context) error {
	begun := time.Now()
	res, err := m.send(ctx, &heartbeat{
		group: m.f.s.Group, member: m.id, generation: int32(m.generation), client: m.f.b.cfg.ClientID,
	})
	if err != nil {
		return fmt.Errorf("heartbeat: %w", err)
	}
	if code := kafkago.Error(res.(heartbeatAnswer)); code == kafkago.RebalanceInProgress {
		return errRejoin
	} else if code != 0 {
		return fmt.Errorf("heartbeat: %w", code)
	}
	if !m.f.renew(begun) {
		return errRejoin
	}
	return m.watch(ctx)
}

// send sends a request to the coordinator. Its deadline leaves time for several
// tries in a session.
func (m *member) send(ctx context.Context, req protocol.Message) (protocol.Message, error) {
	ctx, cancel := context.WithTimeout(ctx, m.f.b.cfg.SessionTimeout/4)
	defer cancel()
	res, err := m.f.b.link.send(ctx, req)
	if err != nil {
		m.f.b.link.reset()
		return nil, cause(ctx, err)
	}
	return res, nil
}

// watch ends the generation when a partition was added to a topic, or this
// member's topic is gone. Of several members, the leader looks for partitions.
func (m *member) watch(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, m.f.b.cfg.SessionTimeout/4) // heartbeats wait meanwhile
	defer cancel()
	layout, err := m.f.metadata(ctx, nil)
	if err != nil {
		return err
	}
	counts := partitionCounts(layout)
	if counts[m.f.s.Topic] == 0 {
		m.f.refresh(ctx)
		if m.missing++; m.missing != topicMissing {
			return nil
		}
		// The coordinator forgets the offsets of a deleted topic; one of the same
		// name is another one. The group's leader takes note that there is none, and
		// divides anew when there is one.
		m.f.assign(nil)
		m.f.trouble.set(troubleTopic, fmt.Errorf("topic %q was deleted: %w", m.f.s.Topic, kafkago.UnknownTopicOrPartition))
		return errRejoin
	}
	m.missing = 0
	m.f.trouble.clear(troubleTopic)
	for topic, n := range m.leads {
		if counts[topic] != n && counts[topic] > 0 {
			return errRejoin
		}
	}
	return nil
}

// partitionCounts returns how many partitions each topic has.
func partitionCounts(layout *metadata.Response) map[string]int {
	counts := make(map[string]int, len(layout.Topics))
	for _, t := range layout.Topics {
		if t.ErrorCode == 0 {
			counts[t.Name] = len(t.Partitions)
		}
	}
	return counts
}

// commit commits what is settled and was not committed.
func (m *member) commit(ctx context.Context) error {
	sent := make(map[int32]*partition)
	req := &offsetcommit.Request{
		GroupID: m.f.s.Group, GenerationID: int32(m.generation), MemberID: m.id, RetentionTimeMs: -1,
		Topics: []offsetcommit.RequestTopic{{Name: m.f.s.Topic}},
	}
	to := make(map[int32]int64)
	m.f.mu.Lock()
	for _, p := range m.f.parts {
		if o := p.position(); o > p.committed {
			sent[p.index], to[p.index] = p, o
			req.Topics[0].Partitions = append(req.Topics[0].Partitions, offsetcommit.RequestPartition{
				PartitionIndex: p.index, CommittedOffset: o, CommittedLeaderEpoch: noEpoch,
			})
		}
	}
	m.f.mu.Unlock()
	if len(sent) == 0 {
		return nil
	}
	answer, err := m.send(ctx, req)
	if err != nil {
		return fmt.Errorf("commit offsets: %w", err)
	}
	m.f.mu.Lock()
	defer m.f.mu.Unlock()
	for _, t := range answer.(*offsetcommit.Response).Topics {
		for _, res := range t.Partitions {
			p := sent[res.PartitionIndex]
			switch code := kafkago.Error(res.ErrorCode); {
			case p == nil:
			case code == 0:
				p.committed = to[res.PartitionIndex]
			case code == kafkago.RebalanceInProgress:
				err = errRejoin
			default:
				err = fmt.Errorf("commit the offset of %s/%d: %w", m.f.s.Topic, res.PartitionIndex, code)
			}
		}
	}
	return err
}

// leave commits what is settled and tells the group that this member is gone. Where
// that cannot be said at once, the group notices by itself.
func (m *member) leave(ctx context.Context) {
	if m.id == "" {
		return
	}
	ctx, cancel := context.WithTimeout(ctx, m.f.b.cfg.SessionTimeout/4)
	defer cancel()
	_ = m.commit(ctx)
	_, _ = m.send(ctx, &leavegroup.Request{
		GroupID: m.f.s.Group, Members: []leavegroup.RequestMember{{MemberID: m.id}},
	})
}
