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
	since map[string]time.Duration // scope → when the first call began that did not reach it
}

// lasting picks those messages out of what a call has left that are to be set
// aside, and returns the others.
//
// None is when a message names no scope: the whole broker may be away. A topic
// that is missing or forbidden is the answer of a broker that works. Where a part
// of a topic is away, that the rest works is shown by what was stored since.
func (w *awayWatch) lasting(s sorted, began time.Duration) (away []failure, rest []entry) {
	since := make(map[string]time.Duration)
	whole := false
	for _, f := range s.rest {
		if f.outcome != broker.Unreachable {
			continue
		}
		whole = whole || f.scope == ""
		since[f.scope] = began
		if first, ok := w.since[f.scope]; ok {
			since[f.scope] = first
		}
	}
	if whole {
		clear(since)
	}
	w.since = since
	for _, f := range s.rest {
		if f.outcome == broker.Unreachable && !whole && w.lasts(f) {
			away = append(away, f)
		} else {
			rest = append(rest, f.entry)
		}
	}
	return away, rest
}

func (w *awayWatch) lasts(f failure) bool {
	if w.l.parking.waitedFor(f.scope) {
		return true
	}
	first := w.since[f.scope]
	works := f.scope == f.msg.Topic || time.Duration(w.l.d.lastStored.Load()) > first
	return works && w.l.d.clock()-first >= awayAfter
}
