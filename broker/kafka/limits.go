package kafka

import (
	"context"
	"log/slog"
	"strconv"
	"sync"
	"time"

	kafkago "github.com/segmentio/kafka-go"
	"github.com/segmentio/kafka-go/protocol/describeconfigs"
)

const (
	// limitTTL is how long a topic's limit is believed.
	limitTTL = time.Minute

	// defaultLimit is Kafka's own max.message.bytes.
	defaultLimit = 1048588

	resourceTopic = 2
)

// limits are the topics' max.message.bytes, as last read.
type limits struct {
	mu    sync.Mutex
	known map[string]limit
}

type limit struct {
	bytes int
	until time.Time
}

// get returns the limit of each topic. The topic's setting already holds what it
// takes over from the broker. Where it cannot be read, the broker shall decide
// about everything that a request may hold.
func (ls *limits) get(ctx context.Context, b *Bus, topics []string) map[string]int {
	all := make(map[string]int, len(topics))
	var unknown []string
	now := time.Now()
	ls.mu.Lock()
	for _, topic := range topics {
		if l, ok := ls.known[topic]; ok && now.Before(l.until) {
			all[topic] = l.bytes
		} else {
			unknown = append(unknown, topic)
		}
	}
	ls.mu.Unlock()
	if len(unknown) == 0 {
		return all
	}
	read, err := describe(ctx, b, unknown)
	if err != nil && ctx.Err() == nil {
		b.cfg.Logger.WarnContext(ctx, "kafka: max.message.bytes cannot be read, the broker decides", slog.Any("error", err))
	}
	ls.mu.Lock()
	defer ls.mu.Unlock()
	if ls.known == nil {
		ls.known = make(map[string]limit)
	}
	for _, topic := range unknown {
		n := read[topic]
		if n <= 0 {
			n = max(defaultLimit, b.cfg.RequestBytes)
		}
		all[topic] = n
		if ctx.Err() == nil {
			ls.known[topic] = limit{bytes: n, until: now.Add(limitTTL)}
		}
	}
	return all
}

// forget drops a limit that the broker contradicted.
func (ls *limits) forget(topic string) {
	ls.mu.Lock()
	defer ls.mu.Unlock()
	delete(ls.known, topic)
}

// describe reads the limits that it is allowed to.
func describe(ctx context.Context, b *Bus, topics []string) (map[string]int, error) {
	ctx, cancel := context.WithTimeout(ctx, b.cfg.PublishTimeout)
	defer cancel()
	req := &describeconfigs.Request{}
	for _, topic := range topics {
		req.Resources = append(req.Resources, describeconfigs.RequestResource{
			ResourceType: resourceTopic, ResourceName: topic, ConfigNames: []string{"max.message.bytes"},
		})
	}
	m, err := b.link.send(ctx, req)
	if err != nil {
		return nil, err
	}
	read := make(map[string]int, len(topics))
	for _, r := range m.(*describeconfigs.Response).Resources {
		if r.ErrorCode != 0 {
			err = kafkago.Error(r.ErrorCode)
			continue
		}
		for _, e := range r.ConfigEntries {
			if n, bad := strconv.Atoi(e.ConfigValue); bad == nil && e.ConfigName == "max.message.bytes" {
				read[r.ResourceName] = n
			}
		}
	}
	return read, err
}
