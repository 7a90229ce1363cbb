package dispatcher

import (
	"time"

	"github.com/postroom/postroom/broker"
)

// awayAfter is how long a topic, or a part of it, must have been unreachable
// before its messages are set aside. Until then the lane waits for it.
const awayAfter = time.Second

// An awayWatch notices, while a page is being published, what stays away while
// the broker does not.
type awayWatch struct {
	l     *lane
	since map[string]time.Duration // scope → when it first failed
}

// lasting picks those messages out of what a call has left that are to be set
// aside, and returns the others.
//
// When one message found the whole broker unreachable, or it is not known how much
// is, none is. A missing or forbidden topic is the answer of a broker that works; of a part of a topic
// that is proven by something else that was stored meanwhile.
func (w *awayWatch) lasting(s sorted) (away []failure, rest []entry) {
	now := w.l.d.clock()
	since := make(map[string]time.Duration)
	whole := false
	for _, f := range s.rest {
		if f.outcome != broker.Unreachable {
			continue
		}
		whole = whole || f.scope == ""
		since[f.scope] = now
		if first, ok := w.since[f.scope]; ok {
			since[f.scope] = first
		}
	}
	if whole {
		clear(since)
	}
	w.since = since
	for _, f := range s.rest {
		if f.outcome == broker.Unreachable && !whole && w.lasts(f, now) {
			away = append(away, f)
		} else {
			rest = append(rest, f.entry)
		}
	}
	return away, rest
}

func (w *awayWatch) lasts(f failure, now time.Duration) bool {
	if w.l.parking.waitedFor(f.scope) {
		return true
	}
	first := w.since[f.scope]
	works := f.scope == f.msg.Topic || time.Duration(w.l.d.lastStored.Load()) > first
	return works && now-first >= awayAfter
}
