package kafka

import (
	"sync/atomic"

	kafkago "github.com/segmentio/kafka-go"

	"github.com/postroom/postroom"
)

// turns gives messages without a key to the partitions in turns.
type turns struct{ n atomic.Uint32 }

func (t *turns) next(partitions []int) int {
	return partitions[int(t.n.Add(1)%uint32(len(partitions)))]
}

var murmur2 = kafkago.Murmur2Balancer{Consistent: true}

// partition chooses the partition of a message.
func (b *Bus) partition(m *postroom.Message, partitions []int) int {
	switch {
	case b.cfg.Balancer != nil:
		return b.cfg.Balancer.Balance(kafkago.Message{Topic: m.Topic, Key: key(m)}, partitions...)
	case m.HasKey():
		return murmur2.Balance(kafkago.Message{Key: key(m)}, partitions...)
	default:
		return b.turn.next(partitions)
	}
}

// validTopic reports whether Kafka takes the name.
func validTopic(name string) bool {
	if name == "" || name == "." || name == ".." || len(name) > 249 {
		return false
	}
	for i := range len(name) {
		c := name[i]
		switch {
		case 'a' <= c && c <= 'z', 'A' <= c && c <= 'Z', '0' <= c && c <= '9', c == '.', c == '_', c == '-':
		default:
			return false
		}
	}
	return true
}
