package franz

import (
	"net"
	"sync"
	"time"

	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/twmb/franz-go/pkg/kmsg"
)

// trouble tells a subscription's Trouble what keeps messages from coming, and
// when that is over. As hooks of its client it hears of connections.
type trouble struct {
	tell func(error) // may be nil

	mu   sync.Mutex
	last error
}

func (t *trouble) report(err error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.tell == nil || err == nil && t.last == nil {
		return
	}
	t.last = err
	t.tell(err)
}

// OnBrokerConnect implements [kgo.HookBrokerConnect].
func (t *trouble) OnBrokerConnect(_ kgo.BrokerMetadata, _ time.Duration, _ net.Conn, err error) {
	if err != nil {
		t.report(err)
	}
}

// OnBrokerRead implements [kgo.HookBrokerRead].
func (t *trouble) OnBrokerRead(_ kgo.BrokerMetadata, key int16, _ int, _, _ time.Duration, err error) {
	if k := kmsg.Key(key); k == kmsg.Fetch || k == kmsg.Heartbeat {
		t.report(err)
	}
}

// OnGroupManageError implements [kgo.HookGroupManageError].
func (t *trouble) OnGroupManageError(err error) { t.report(err) }
