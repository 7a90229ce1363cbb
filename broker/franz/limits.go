package franz

import (
	"context"
	"log/slog"
	"strconv"
	"sync"
	"time"

	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kmsg"
)

const (
	// limitTTL is how long a topic's limit is believed.
	limitTTL = time.Minute

	// defaultLimit is Kafka's own max.message.bytes.
	defaultLimit = 1048588
)

// limits are the topics' max.message.bytes, as last read.
type limits struct {
	mu    sync.Mutex
	known map[string]limit
}

type limit struct {
	bytes int32
	until time.Time
}

// get returns the limit of each topic. The topic's setting already holds what it
// takes over from the broker.
func (ls *limits) get(ctx context.Context, b *Bus, topics []string) map[string]int32 {
	all := make(map[string]int32, len(topics))
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
		b.cfg.Logger.WarnContext(ctx, "franz: max.message.bytes cannot be read, the default is taken", slog.Any("error", err))
	}
	ls.mu.Lock()
	defer ls.mu.Unlock()
	if ls.known == nil {
		ls.known = make(map[string]limit)
	}
	for _, topic := range unknown {
		n := read[topic]
		if n <= 0 {
			n = defaultLimit
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
func describe(ctx context.Context, b *Bus, topics []string) (map[string]int32, error) {
	req := kmsg.NewPtrDescribeConfigsRequest()
	for _, topic := range topics {
		r := kmsg.NewDescribeConfigsRequestResource()
		r.ResourceType, r.ResourceName, r.ConfigNames = kmsg.ConfigResourceTypeTopic, topic, []string{"max.message.bytes"}
		req.Resources = append(req.Resources, r)
	}
	res, err := req.RequestWith(ctx, b.control)
	if err != nil {
		return nil, err
	}
	read := make(map[string]int32, len(topics))
	for _, r := range res.Resources {
		if r.ErrorCode != 0 {
			err = kerr.ErrorForCode(r.ErrorCode)
			continue
		}
		for _, c := range r.Configs {
			if c.Name != "max.message.bytes" || c.Value == nil {
				continue
			}
			if n, bad := strconv.ParseInt(*c.Value, 10, 32); bad == nil {
				read[r.ResourceName] = int32(n)
			}
		}
	}
	return read, err
}
