package dispatcher

import (
	"context"
	"fmt"
	"sync"
)

// A message may kill the process that publishes it, and the next one, and so on:
// the publisher ends the process, or runs it out of memory. Such a message is found without
// a write while all is well. An owner that does not release its lane is counted
// by its successor, in the lane's row, until a call of the publisher has
// returned. So:
//
//   - an owner that succeeds one of those records its progress after every page:
//     its first call is then of the messages that the former died of, or it
//     makes headway;
//   - from narrowFrom on it publishes that page's messages one by one, each alone
//     in the process. Only those that die in such a call are counted then, so
//     that the lanes of a process do not answer for one another;
//   - at parkFrom two in a row have died of the message that comes first, alone.
//     It is set aside as refused.
//
// An outage is not a death: the calls return. A message is blamed in error
// only where the process was killed from outside four times in a row during its
// first call, twice of them with this message alone.
const (
	narrowFrom = 2 // claimLanes knows it
	parkFrom   = 4
)

// suspectMessage records the lane's count, and whether a message is published
// alone. Losing it makes the search longer and no more.
const suspectMessage = `
WITH setting AS MATERIALIZED (
    SELECT set_config('synchronous_commit', 'off', true)
)
UPDATE "postroom".outbox_lanes l
   SET starts = $4::int2, suspect = $5::bool
  FROM setting
 WHERE l.lane = $1::int4 AND l.fence = $2::int8 AND l.owner = $3::text`

func (l *lane) suspect(ctx context.Context, starts int, alone bool) error {
	tag, err := l.d.pool.Exec(ctx, l.d.sql.suspect, l.number, l.fence, l.d.owner, starts, alone)
	if err != nil {
		return err
	}
	if tag.RowsAffected() != 1 {
		return errLostLane
	}
	l.starts = starts
	return nil
}

// clear lowers the count, where it is higher.
func (l *lane) clear(ctx context.Context, starts int) error {
	if l.starts <= starts && !l.alone {
		return nil
	}
	return l.suspect(ctx, starts, false)
}

// enter returns when a call of the publisher may begin: not while a suspect is
// published, unless it is this lane's. The call ends with leave, of which the
// first counts.
func (l *lane) enter() (leave func()) {
	if l.alone { // publishSingly has entered
		return sync.OnceFunc(l.leave)
	}
	l.d.publishing.RLock()
	return sync.OnceFunc(l.d.publishing.RUnlock)
}

func (l *lane) leave() {
	l.alone = false
	l.d.publishing.Unlock()
}

// returned records that a call of the publisher has returned: nobody dies of
// its messages.
func (l *lane) returned(work context.Context) error {
	if l.starts >= narrowFrom {
		return l.clear(work, narrowFrom)
	}
	return l.clear(work, 0)
}

// publishSingly publishes the first messages of the lane's difference one by
// one: as many as a page holds, which is what the former owners died of.
func (l *lane) publishSingly(ctx, work context.Context) error {
	l.done = l.cur.lastID
	r, err := l.newReader(work)
	if err != nil {
		return err
	}
	l.d.cfg.Logger.LogAttrs(work, levelWarn, "owners of the lane have died while they were publishing: its messages go one by one",
		l.attr(), countAttr(l.starts))
	for range l.d.cfg.PageSize {
		if ctx.Err() != nil {
			return errStopped
		}
		if !l.held() {
			return errLostLane
		}
		more, err := l.publishSingle(ctx, work, r)
		if err != nil {
			return err
		}
		if !more {
			l.published = true
			break
		}
	}
	return l.clear(work, 0)
}

// publishSingle publishes the next message alone, read and published under
// suspicion, or sets it aside where it is guilty.
func (l *lane) publishSingle(ctx, work context.Context, r *reader) (more bool, err error) {
	l.d.publishing.Lock()
	l.alone = true
	defer func() {
		if l.alone {
			l.leave()
		}
	}()
	deaths := l.starts
	step, cancel := context.WithTimeout(work, l.d.cfg.PublishTimeout) // others wait
	defer cancel()
	if err := l.suspect(step, deaths, true); err != nil {
		return false, err
	}
	r.size = 1
	page, err := r.page(step)
	if err != nil || len(page) == 0 {
		return false, err
	}
	id := page[0].id
	if deaths >= parkFrom {
		if page, err = l.parkGuilty(step, page, deaths); err != nil {
			return false, err
		}
	}
	if err := l.publishPage(ctx, work, page); err != nil {
		return false, err
	}
	l.done = id
	return true, l.advance(work, id)
}

// parkGuilty sets the page's message aside as refused, and returns what is left
// of the page. One that waits behind its key has killed nobody. It is not tried
// again by itself.
func (l *lane) parkGuilty(step context.Context, page []entry, deaths int) ([]entry, error) {
	page, err := l.setAside(step, page)
	if err != nil || len(page) == 0 {
		return page, err
	}
	// The count goes down first: a death in between only prolongs the search.
	if err := l.suspect(step, narrowFrom, false); err != nil {
		return nil, err
	}
	guilty := page[0]
	reason := fmt.Errorf("%d processes in a row have died while this message was being published", deaths)
	l.d.cfg.Logger.LogAttrs(step, levelError, "message set aside as refused",
		l.attr(), topicAttr(guilty.msg.Topic), idAttr(guilty.msg.ID), errorAttr(reason))
	var a aside
	a.refuse(guilty, reason.Error(), nil)
	l.parking.mu.Lock()
	defer l.parking.mu.Unlock()
	return nil, l.park(step, a)
}
