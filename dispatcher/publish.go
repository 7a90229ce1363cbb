package dispatcher

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/postroom/postroom"
	"github.com/postroom/postroom/broker"
	"github.com/postroom/postroom/internal/pg"
)

// topicKey is what has an order.
type topicKey struct{ topic, key string }

// publishPage returns nil when every message of the page is settled: stored by
// the broker, or set aside. What is unreachable is tried again, with backoff,
// for as long as it takes; ctx ends the wait.
func (l *lane) publishPage(ctx, work context.Context, page []entry) error {
	pending := page
	if l.parked {
		var err error
		if pending, err = l.parkBehind(work, pending); err != nil {
			return err
		}
	}
	retry := newBackoff(20*time.Millisecond, 5*time.Second)
	for len(pending) > 0 {
		if ctx.Err() != nil {
			return errStopped
		}
		results, err := l.call(work, pending)
		if err != nil {
			return err
		}
		before := len(pending)
		rest, refused, trouble := sortOut(pending, results)
		if len(refused) > 0 {
			if rest, err = l.parkRefused(work, refused, rest); err != nil {
				return err
			}
		}
		pending = rest
		if len(pending) == 0 {
			break
		}
		if i := slices.IndexFunc(page, func(e entry) bool { return e.id == pending[0].id }); i > 0 {
			l.done = page[i-1].id
		}
		l.d.trouble.set(l.broker(), trouble)
		if len(pending) < before {
			retry.Reset() // something moves
		}
		wait(ctx, retry.NextBackOff())
	}
	l.d.trouble.clear(l.broker())
	return nil
}

func (l *lane) broker() string { return fmt.Sprintf("broker of lane %d", l.number) }

// refusal is a message and why the broker will not take it.
type refusal struct {
	entry
	err error
}

// sortOut drops what is stored and returns the rest, in order, apart from what
// was refused, and why it was not taken.
func sortOut(sent []entry, results []broker.Result) (rest []entry, refused []refusal, trouble error) {
	for i, e := range sent {
		r := results[i]
		switch r.Outcome {
		case broker.Stored:
			continue
		case broker.Refused:
			refused = append(refused, refusal{e, r.Err})
			continue
		case broker.Unreachable:
			if trouble == nil {
				trouble = fmt.Errorf("topic %q: %w", e.msg.Topic, cmpErr(r.Err, errNoReason))
			}
		}
		rest = append(rest, e)
	}
	if trouble == nil {
		trouble = errNoReason
	}
	return rest, refused, trouble
}

var errNoReason = errors.New("the publisher gave no reason")

func cmpErr(err, otherwise error) error {
	if err != nil {
		return err
	}
	return otherwise
}

// call publishes once, within the lane's lease. A publisher that does not
// return by its deadline loses the lane: another dispatcher may go on with it,
// this one must not, since messages of the same keys are outstanding.
func (l *lane) call(work context.Context, page []entry) ([]broker.Result, error) {
	leave := l.enter()
	defer leave()
	timeout := min(l.d.cfg.PublishTimeout, l.left())
	if timeout <= 0 || l.stuck.Load() {
		return nil, errLostLane
	}
	msgs := make([]postroom.Message, len(page))
	for i := range page {
		msgs[i] = page[i].msg
	}
	ctx, cancel := context.WithTimeout(work, timeout)
	defer cancel()
	returned := make(chan []broker.Result, 1)
	go func() { returned <- l.d.pub.Publish(ctx, msgs) }()
	grace := time.NewTimer(timeout + l.d.cfg.PublishTimeout/2)
	defer grace.Stop()
	var results []broker.Result
	select {
	case results = <-returned:
		if err := l.returned(work); err != nil {
			return nil, err
		}
	case <-grace.C:
		l.stuck.Store(true)
		_ = l.returned(work) // it hangs, and the process lives; at worst this is not known
		leave()
		l.d.trouble.set(l.broker(), fmt.Errorf("the publisher has not returned %v after its deadline; the lane is given up", l.d.cfg.PublishTimeout/2))
		select {
		case <-returned:
		case <-work.Done():
		}
		return nil, errLostLane
	}
	if len(results) != len(msgs) {
		l.d.trouble.set(l.broker(), fmt.Errorf("the publisher returned %d results for %d messages", len(results), len(msgs)))
		return make([]broker.Result, len(msgs)), nil // nothing was tried
	}
	return results, nil
}

// keysBehind returns the keys of a page that have parked messages. It probes
// index outbox_parked_key.
const keysBehind = `
SELECT k.topic, k.key
  FROM unnest($2::text[], $3::text[]) AS k(topic, key)
 WHERE EXISTS (SELECT FROM "postroom".outbox_parked p
                WHERE p.lane = $1::int4 AND p.topic = k.topic AND p.key = k.key)`

// parkMessages moves messages aside and appends a cursor row in the same
// statement, which makes the move conditional on the lane's fence and order.
const parkMessages = `
WITH setting AS MATERIALIZED (
    SELECT set_config('synchronous_commit', 'on', true)
), ` + newestCursor + `, appended AS (
    INSERT INTO "postroom".outbox_cursors (lane, origin, number, fence, owner, prev, until, last_id)
    SELECT $1, $2, c.number + 1, l.fence, l.owner, c.prev, c.until, $11::int8
      FROM setting, newest c, "postroom".outbox_lanes l
     WHERE ` + sameCursor + `
       AND "postroom".origin() = $12::int8
    RETURNING number
), aside AS (
    SELECT * FROM unnest($13::int8[], $14::text[]) AS a(id, error)
), moved AS (
    DELETE FROM "postroom".outbox_messages m
     WHERE m.lane = $1 AND m.origin = $2 AND m.id = ANY ($13)
       AND EXISTS (SELECT FROM appended)
    RETURNING m.id, m.created_at, m.hash, m.message_id, m.topic, m.key, m.payload,
              m.header_names, m.header_values, m.operation
), parked AS (
    INSERT INTO "postroom".outbox_parked (lane, origin, id, state, attempts, error, created_at, hash,
           message_id, topic, key, payload, header_names, header_values, operation)
    SELECT $1, $2, m.id, CASE WHEN a.error IS NULL THEN 'waiting' ELSE 'refused' END,
           CASE WHEN a.error IS NULL THEN 0 ELSE 1 END, a.error, m.created_at, m.hash,
           m.message_id, m.topic, m.key, m.payload, m.header_names, m.header_values, m.operation
      FROM moved m JOIN aside a USING (id)
)
SELECT number FROM appended`

// parkRefused sets refused messages aside, and behind them those of rest that
// have their keys. It returns the others.
func (l *lane) parkRefused(work context.Context, refused []refusal, rest []entry) ([]entry, error) {
	heads := make(map[topicKey]bool, len(refused))
	ids, texts := make([]int64, 0, len(refused)), make([]*string, 0, len(refused))
	for _, r := range refused {
		if r.msg.HasKey() {
			heads[topicKey{r.msg.Topic, r.msg.Key}] = true
		}
		text := pg.CleanText(cmpErr(r.err, errNoReason).Error(), 1000)
		ids, texts = append(ids, r.id), append(texts, &text)
		l.d.cfg.Logger.LogAttrs(work, levelError, "message refused by the broker and set aside",
			l.attr(), topicAttr(r.msg.Topic), idAttr(r.msg.ID), errorAttr(r.err))
	}
	return l.parkWith(work, ids, texts, rest, heads)
}

// parkBehind sets those messages aside whose keys have parked messages, and
// returns the others.
func (l *lane) parkBehind(work context.Context, page []entry) ([]entry, error) {
	seen := make(map[topicKey]bool)
	topics, keys := []string{}, []string{}
	for _, e := range page {
		k := topicKey{e.msg.Topic, e.msg.Key}
		if e.msg.HasKey() && !seen[k] {
			seen[k] = true
			topics, keys = append(topics, k.topic), append(keys, k.key)
		}
	}
	rows, err := l.d.pool.Query(work, l.d.sql.behind, l.number, topics, keys)
	if err != nil {
		return nil, err
	}
	heads := make(map[topicKey]bool)
	for rows.Next() {
		var k topicKey
		if err := rows.Scan(&k.topic, &k.key); err != nil {
			rows.Close()
			return nil, err
		}
		heads[k] = true
	}
	if err := rows.Err(); err != nil {
		return nil, err
	}
	if len(heads) == 0 {
		return page, nil
	}
	return l.parkWith(work, nil, nil, page, heads)
}

// parkWith parks the given ids, and of rest what has one of the keys as
// waiting. It returns what remains.
func (l *lane) parkWith(work context.Context, ids []int64, texts []*string, rest []entry, heads map[topicKey]bool) ([]entry, error) {
	var others []entry
	for _, e := range rest {
		if e.msg.HasKey() && heads[topicKey{e.msg.Topic, e.msg.Key}] {
			ids, texts = append(ids, e.id), append(texts, nil)
		} else {
			others = append(others, e)
		}
	}
	if len(ids) == 0 {
		return others, nil
	}
	lastID := max(l.done, l.cur.lastID)
	var number int64
	err := l.d.pool.QueryRow(work, l.d.sql.park, append(l.identity(), lastID, l.home, ids, texts)...).Scan(&number)
	if err != nil {
		return nil, reloadOn(err)
	}
	l.cur = l.next(l.cur.prev, l.cur.until, lastID)
	l.parked = true
	return others, nil
}
