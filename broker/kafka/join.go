package kafka

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"time"

	kafkago "github.com/segmentio/kafka-go"
)

const (
	protocolType = "consumer"

	// protocolName names the way in which partitions are divided. Members that
	// divide otherwise are not let into the group, nor is this one into theirs.
	protocolName = "postroom-sticky"
)

// join becomes a member of the group's next generation and takes over the
// partitions that are given to it.
func (m *member) join(ctx context.Context) error {
	group, err := m.ask(ctx)
	if err != nil {
		return fmt.Errorf("join the group: %w", err)
	}
	m.id, m.generation, m.leads = group.MemberID, group.GenerationID, nil
	mine, err := m.partitions(ctx, group)
	if err != nil {
		m.f.assign(nil) // others may have had them in this generation
		return err
	}
	m.f.assign(mine)
	m.f.trouble.clear(troubleGroup)
	m.f.trouble.clear(troubleCommit)
	kick(m.f.dirty) // what the former generation did not take
	return nil
}

// partitions returns what this member is given in a generation, after having
// divided all where it is the group's leader.
func (m *member) partitions(ctx context.Context, group *kafkago.JoinGroupResponse) (mine []int32, err error) {
	var division []kafkago.SyncGroupRequestAssignment
	if group.LeaderID == m.id {
		if division, err = m.divide(ctx, group.Members); err != nil {
			return nil, err
		}
	}
	begun := time.Now()
	sctx, done := context.WithTimeout(ctx, m.patience())
	defer done()
	res, err := m.client.SyncGroup(sctx, &kafkago.SyncGroupRequest{
		GroupID: m.f.s.Group, GenerationID: m.generation, MemberID: m.id,
		ProtocolType: protocolType, ProtocolName: protocolName, Assignments: division,
	})
	switch {
	case err != nil:
		m.f.b.link.reset()
		return nil, fmt.Errorf("ask the group for partitions: %w", cause(sctx, err))
	case errors.Is(res.Error, kafkago.RebalanceInProgress), m.disowned(res.Error):
		return nil, errRejoin
	case res.Error != nil:
		return nil, fmt.Errorf("ask the group for partitions: %w", res.Error)
	}
	m.f.renew(begun)
	for _, p := range res.Assignment.AssignedPartitions[m.f.s.Topic] {
		mine = append(mine, int32(p))
	}
	slices.Sort(mine)
	return mine, nil
}

// patience is how long an answer may take for which the coordinator waits for
// other members.
func (m *member) patience() time.Duration { return m.f.b.cfg.SessionTimeout * 3 / 2 }

// ask joins. The first time, the coordinator only gives an id to do it with.
func (m *member) ask(ctx context.Context) (*kafkago.JoinGroupResponse, error) {
	for {
		begun := time.Now()
		res, err := m.joinAs(ctx)
		switch {
		case err != nil:
			return nil, err
		case errors.Is(res.Error, kafkago.MemberIDRequired) && m.id == "":
			m.id = res.MemberID
		case res.Error == nil:
			m.f.renew(begun)
			return res, nil
		case m.id != "" && m.disowned(res.Error):
			// Once more, as a new member.
		default:
			return nil, res.Error
		}
	}
}

func (m *member) joinAs(ctx context.Context) (*kafkago.JoinGroupResponse, error) {
	ctx, cancel := context.WithTimeout(ctx, m.patience())
	defer cancel()
	owned := make(map[string][]int)
	m.f.mu.Lock()
	for _, p := range m.f.parts {
		owned[m.f.s.Topic] = append(owned[m.f.s.Topic], int(p.index))
	}
	m.f.mu.Unlock()
	res, err := m.client.JoinGroup(ctx, &kafkago.JoinGroupRequest{
		GroupID: m.f.s.Group, MemberID: m.id, ProtocolType: protocolType,
		SessionTimeout: m.f.b.cfg.SessionTimeout, RebalanceTimeout: m.f.b.cfg.SessionTimeout,
		Protocols: []kafkago.GroupProtocol{{
			Name: protocolName,
			Metadata: kafkago.GroupProtocolSubscription{
				Topics: []string{m.f.s.Topic}, OwnedPartitions: owned,
			},
		}},
	})
	if err != nil {
		m.f.assign(nil) // it may have joined, and missed what was given to whom
		m.f.b.link.reset()
		return nil, cause(ctx, err)
	}
	return res, nil
}

// divide gives the partitions of all topics to the members, as the group's leader.
func (m *member) divide(ctx context.Context, members []kafkago.JoinGroupResponseMember) ([]kafkago.SyncGroupRequestAssignment, error) {
	ctx, cancel := context.WithTimeout(ctx, m.f.b.cfg.SessionTimeout/2) // all wait meanwhile
	defer cancel()
	m.f.refresh(ctx) // to see partitions that are new
	layout, err := m.f.metadata(ctx, nil)
	if err != nil {
		return nil, err
	}
	counts := partitionCounts(layout)
	shares := make(map[string]map[string][]int, len(members))
	byTopic := make(map[string][]kafkago.JoinGroupResponseMember)
	for _, member := range members {
		shares[member.ID] = make(map[string][]int)
		for _, topic := range member.Metadata.Topics {
			byTopic[topic] = append(byTopic[topic], member)
		}
	}
	m.leads = make(map[string]int, len(byTopic))
	for topic, members := range byTopic {
		m.leads[topic] = counts[topic]
		owned := make(map[string][]int, len(members))
		for _, member := range members {
			owned[member.ID] = member.Metadata.OwnedPartitions[topic]
		}
		for id, partitions := range share(counts[topic], owned) {
			shares[id][topic] = partitions
		}
	}
	division := make([]kafkago.SyncGroupRequestAssignment, 0, len(members))
	for id, topics := range shares {
		division = append(division, kafkago.SyncGroupRequestAssignment{
			MemberID: id, Assignment: kafkago.GroupProtocolAssignment{AssignedPartitions: topics},
		})
	}
	return division, nil
}

// share divides n partitions evenly among members, who keep what they own where
// that is possible. What two claim to own, neither keeps.
func share(n int, owned map[string][]int) map[string][]int {
	claims := make(map[int]int)
	for _, partitions := range owned {
		for _, p := range partitions {
			claims[p]++
		}
	}
	kept := make(map[string][]int, len(owned))
	for id, partitions := range owned {
		kept[id] = nil
		for _, p := range partitions {
			if p >= 0 && p < n && claims[p] == 1 {
				kept[id] = append(kept[id], p)
			}
		}
	}
	// Those who keep most may have one more than the others, where it does not
	// come out even.
	ids := slices.SortedFunc(maps.Keys(owned), func(a, b string) int {
		return cmp.Or(cmp.Compare(len(kept[b]), len(kept[a])), cmp.Compare(a, b))
	})
	free := make([]bool, n)
	for p := range free {
		free[p] = true
	}
	quota := make(map[string]int, len(ids))
	for i, id := range ids {
		quota[id] = n / len(ids)
		if i < n%len(ids) {
			quota[id]++
		}
		slices.Sort(kept[id])
		kept[id] = kept[id][:min(len(kept[id]), quota[id])]
		for _, p := range kept[id] {
			free[p] = false
		}
	}
	next := 0
	for _, id := range ids {
		for len(kept[id]) < quota[id] {
			for !free[next] {
				next++
			}
			free[next] = false
			kept[id] = append(kept[id], next)
		}
		slices.Sort(kept[id])
	}
	return kept
}
