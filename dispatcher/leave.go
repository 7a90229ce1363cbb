package dispatcher

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/postroom/postroom/broker"
)

const (
	// probeSize is how many messages are risked on what is away.
	probeSize = 10

	// dueHeads is how many keys behind refused messages leave together.
	dueHeads = 100

	// handOver bounds a call of the publisher for which the lane's run may wait.
	handOver = time.Second
)

// readAway reads the next messages that wait for a scope, from index
// outbox_parked_away.
const readAway = `
SELECT number, state = 'discarded', state = 'refused', attempts,
       id, message_id, topic, key, payload, header_names, header_values, operation, created_at
  FROM "postroom".outbox_parked
 WHERE lane = $1::int4 AND away = $2::text AND number > $3::int8
 ORDER BY number LIMIT $4::int4`

// readDue reads the keys whose first parked message is due, each from there on
// and about as much of each, and due messages without a key. One that an operator
// is changing is left for later.
const readDue = `
WITH heads AS MATERIALIZED (
    SELECT number, topic, key
      FROM "postroom".outbox_parked
     WHERE lane = $1::int4 AND due_at <= clock_timestamp()
     ORDER BY due_at LIMIT $2::int4
       FOR KEY SHARE SKIP LOCKED
)
SELECT p.number, p.state = 'discarded', p.state = 'refused', p.attempts,
       p.id, p.message_id, p.topic, p.key, p.payload, p.header_names, p.header_values, p.operation, p.created_at
  FROM heads h CROSS JOIN LATERAL (
       (SELECT * FROM "postroom".outbox_parked
         WHERE lane = $1 AND topic = h.topic AND key = h.key AND number >= h.number
         ORDER BY number LIMIT greatest(1, $3::int4 / (SELECT count(*) FROM heads)))
       UNION ALL
       (SELECT * FROM "postroom".outbox_parked WHERE number = h.number AND h.key IS NULL)) p
 ORDER BY p.number`

// A leaver is a parked message on its way out.
type leaver struct {
	entry
	number    int64
	discarded bool // an empty place
	refused   bool
	attempts  int
}

// readParked reads the next messages of a queue. more says that there may be
// others behind them.
func (l *lane) readParked(work context.Context, q *queue) (page []leaver, more bool, err error) {
	size := q.fit
	if q.ill != nil {
		size = min(size, probeSize)
	}
	var rows pgx.Rows
	short := size // a page with fewer messages is the last
	if q.scope == "" {
		short = min(size, dueHeads)
		rows, err = l.d.pool.Query(work, l.d.sql.readDue, l.number, short, size)
	} else {
		rows, err = l.d.pool.Query(work, l.d.sql.readAway, l.number, q.scope, q.after, size)
	}
	if err != nil {
		return nil, false, err
	}
	defer rows.Close()
	full, bytes := false, 0
	for rows.Next() {
		if full {
			continue
		}
		var e scanned
		var v leaver
		if err := rows.Scan(append([]any{&v.number, &v.discarded, &v.refused, &v.attempts}, e.fields()...)...); err != nil {
			return nil, false, err
		}
		bytes += e.bytes()
		if full = len(page) > 0 && bytes > l.d.cfg.PageBytes; !full {
			v.entry = e.entry()
			page = append(page, v)
		}
	}
	more = full || len(page) >= short
	if q.ill == nil {
		q.fit = l.d.fit(size, len(page), full)
	}
	return page, more, rows.Err()
}

// leavePage publishes the next messages of a queue and takes those out that have
// arrived. again says that there is more to do at once.
//
// While it does, newer messages join the queue. So that it ends, the last few
// leave while the lane's run is kept from adding to them: only after a call that
// went well and quickly, and with a short deadline.
func (l *lane) leavePage(work context.Context, q *queue) (again bool, err error) {
	p := l.parking
	l.d.publishing.RLock() // before p.mu: a suspect's call has it alone, and takes p.mu then
	done := sync.OnceFunc(l.d.publishing.RUnlock)
	defer done()
	held := q.last
	if held {
		p.mu.Lock()
		defer p.mu.Unlock()
	}
	q.last = false
	page, more, err := l.readParked(work, q)
	if err != nil {
		return false, err
	}
	if len(page) == 0 {
		return l.leftAll(q, held), nil
	}
	if err := l.countAttempts(work, page); err != nil {
		return false, err
	}
	timeout := l.d.cfg.PublishTimeout
	if held {
		timeout = min(timeout, handOver)
	}
	began := time.Now()
	results, err := l.publishParked(work, page, timeout, done)
	done()
	if err != nil {
		return false, err
	}
	quick := time.Since(began) < handOver/2
	if !held {
		p.mu.Lock()
		defer p.mu.Unlock()
	}
	o := l.sortLeavers(work, q, page, results)
	if err := l.settleParked(work, o); err != nil {
		return false, err
	}
	for scope, topic := range o.scopes {
		p.open(scope, topic)
		p.queues[scope].joined = true
	}
	q.ill, q.after = nil, o.after
	if o.moved() {
		q.retry.Reset()
	} else {
		q.ill = o.why
	}
	if q.joined {
		q.joined, q.after = false, 0
	}
	q.last = o.all && !more && quick && (q.scope == "" || p.alone(q))
	return q.ill == nil, nil
}

// leftAll says whether to look again at a queue in which nothing was found.
// Unless that was found while nothing could come, it is not the end.
func (l *lane) leftAll(q *queue, held bool) (again bool) {
	switch {
	case q.scope == "":
		return false
	case !held || q.after > 0:
		q.last, q.after = true, 0
		return true
	}
	delete(l.parking.queues, q.scope)
	return false
}

// tryParked counts an attempt before it is made, so that one that ends the process
// is not made without end.
const tryParked = `
WITH setting AS MATERIALIZED (
    SELECT set_config('lock_timeout', '1s', true)
), held AS MATERIALIZED (
    SELECT l.lane FROM setting, "postroom".outbox_lanes l
     WHERE l.lane = $1::int4 AND l.fence = $2::int8 AND l.owner = $3::text
       FOR SHARE OF l
), tried AS (
    UPDATE "postroom".outbox_parked
       SET attempts = attempts + 1, tried_at = clock_timestamp(),
           due_at = clock_timestamp() + ($5::interval[])[array_position($4::int8[], number)]
     WHERE number = ANY ($4::int8[]) AND state = 'refused' AND EXISTS (SELECT FROM held)
)
SELECT lane FROM held`

// countAttempts counts an attempt at each refused message of a page.
func (l *lane) countAttempts(work context.Context, page []leaver) error {
	var numbers []int64
	var pauses []*time.Duration
	for _, v := range page {
		if v.refused {
			numbers, pauses = append(numbers, v.number), append(pauses, l.pauseAfter(v.attempts+1))
		}
	}
	if len(numbers) == 0 {
		return nil
	}
	var lane int32
	err := l.d.pool.QueryRow(work, l.d.sql.try, l.number, l.fence, l.d.owner, numbers, pauses).Scan(&lane)
	if errors.Is(err, pgx.ErrNoRows) {
		return errLostLane
	}
	return err
}

// publishParked publishes what is not an empty place.
func (l *lane) publishParked(work context.Context, page []leaver, timeout time.Duration, hangs func()) ([]broker.Result, error) {
	results := make([]broker.Result, len(page))
	var sent []entry
	var places []int
	for i, v := range page {
		if v.discarded {
			results[i].Outcome = broker.Stored
		} else {
			sent, places = append(sent, v.entry), append(places, i)
		}
	}
	if len(sent) == 0 {
		return results, nil
	}
	got, err := l.callWithin(work, sent, timeout, hangs)
	if err != nil {
		return nil, err
	}
	for n, i := range places {
		results[i] = got[n]
	}
	return results, nil
}

// leaveParked takes out what has left, in one statement that only the lane's
// owner can run: the lock makes a takeover wait for its end. An operator who
// holds a row for long is not waited for. What one has discarded meanwhile is
// due at once where it is the first of its key.
const leaveParked = `
WITH setting AS MATERIALIZED (
    SELECT set_config('synchronous_commit', 'on', true), set_config('lock_timeout', '1s', true)
), held AS MATERIALIZED (
    SELECT l.lane FROM setting, "postroom".outbox_lanes l
     WHERE l.lane = $1::int4 AND l.fence = $2::int8 AND l.owner = $3::text
       FOR SHARE OF l
), gone AS (
    DELETE FROM "postroom".outbox_parked WHERE number = ANY ($4::int8[]) AND EXISTS (SELECT FROM held)
), refused AS (
    UPDATE "postroom".outbox_parked
       SET state = CASE state WHEN 'discarded' THEN state ELSE 'refused' END, away = NULL,
           attempts = ($19::int4[])[array_position($5::int8[], number)], tried_at = clock_timestamp(),
           error = ($6::text[])[array_position($5::int8[], number)],
           due_at = clock_timestamp() + CASE state WHEN 'discarded' THEN interval '0'
                                        ELSE ($7::interval[])[array_position($5::int8[], number)] END
     WHERE number = ANY ($5::int8[]) AND EXISTS (SELECT FROM held)
), later AS (
    UPDATE "postroom".outbox_parked
       SET due_at = clock_timestamp() + ($9::interval[])[array_position($8::int8[], number)],
           attempts = ($20::int4[])[array_position($8::int8[], number)]
     WHERE number = ANY ($8::int8[]) AND EXISTS (SELECT FROM held)
), next AS (
    UPDATE "postroom".outbox_parked
       SET due_at = clock_timestamp()
     WHERE EXISTS (SELECT FROM held)
       AND number = ANY (ARRAY(
           SELECT f.number FROM unnest($10::text[], $11::text[], $12::int8[]) AS k(topic, key, after) CROSS JOIN LATERAL (
                  SELECT number FROM "postroom".outbox_parked
                   WHERE lane = $1 AND topic = k.topic AND key = k.key AND number > k.after
                   ORDER BY number LIMIT 1) f))
), joined AS (
    UPDATE "postroom".outbox_parked p
       SET away = k.away
      FROM unnest($13::text[], $14::text[], $15::int8[], $16::text[]) AS k(topic, key, after, away)
     WHERE p.lane = $1 AND p.topic = k.topic AND p.key = k.key AND p.number > k.after
       AND EXISTS (SELECT FROM held)
), alone AS (
    UPDATE "postroom".outbox_parked
       SET away = ($18::text[])[array_position($17::int8[], number)]
     WHERE number = ANY ($17::int8[]) AND EXISTS (SELECT FROM held)
)
SELECT lane FROM held`

// outcome is what became of a page of leavers, in parallel arrays as
// leaveParked takes them.
type outcome struct {
	gone []int64

	refused []int64
	texts   []string
	pauses  []*time.Duration
	counts  []int // their attempts

	later   []int64 // to be tried again
	delays  []time.Duration
	formers []int // their attempts, of which this is none

	next   keys // their next message is due now
	joined keys // their messages from there on wait for something else
	aways  []*string

	alone      []int64 // messages without a key that wait for something else
	aloneAways []string

	scopes map[string]string // what else is waited for → its topic
	after  int64             // the queue holds no rows up to here any more
	stays  bool              // it holds the next
	all    bool              // everything has gone
	why    error             // of what was unreachable
}

// keys are places in the order of keys: behind the row of that number.
type keys struct {
	topics, keys []string
	after        []int64
}

func (k *keys) add(key topicKey, after int64) {
	k.topics, k.keys, k.after = append(k.topics, key.topic), append(k.keys, key.key), append(k.after, after)
}

// moved reports whether the queue is shorter now.
func (o *outcome) moved() bool {
	return len(o.gone)+len(o.refused)+len(o.aways)+len(o.alone) > 0
}

// stay notes that a row remains in the queue.
func (o *outcome) stay(number int64) {
	if !o.stays {
		o.stays, o.after = true, number-1
	}
}

// join has the messages of v's key, or v alone, wait for scope, or with "" for
// the first of the key.
func (o *outcome) join(v leaver, after int64, scope string) {
	var away *string
	if scope != "" {
		away = &scope
		if o.scopes == nil {
			o.scopes = make(map[string]string)
		}
		o.scopes[scope] = v.msg.Topic
	}
	if v.msg.HasKey() {
		o.joined.add(topicKey{v.msg.Topic, v.msg.Key}, after)
		o.aways = append(o.aways, away)
	} else if scope != "" {
		o.alone, o.aloneAways = append(o.alone, v.number), append(o.aloneAways, scope)
	}
}

// sortLeavers decides what becomes of each message of a page.
func (l *lane) sortLeavers(work context.Context, q *queue, page []leaver, results []broker.Result) *outcome {
	o := &outcome{all: true, after: page[len(page)-1].number, why: errNoReason}
	last := make(map[topicKey]int64)   // of a key that has gone so far
	stopped := make(map[topicKey]bool) // a key that goes no further; whether it stays in the queue
	for i, v := range page {
		k, keyed := topicKey{v.msg.Topic, v.msg.Key}, v.msg.HasKey()
		if stays, ok := stopped[k]; ok && keyed {
			if stays {
				o.stay(v.number)
			}
			continue
		}
		if results[i].Outcome == broker.Stored {
			o.gone = append(o.gone, v.number)
			delete(q.tries, v.number)
			if keyed {
				last[k] = v.number
			}
			continue
		}
		stays := l.failed(work, o, q, v, results[i])
		o.all = false
		if stays {
			o.stay(v.number)
		}
		if keyed {
			stopped[k] = stays
			delete(last, k)
		}
	}
	if q.scope == "" {
		for k, number := range last {
			o.next.add(k, number)
		}
	}
	return o
}

// failed decides what becomes of a message that was not stored, the first of
// its key, and says whether it stays in its queue.
func (l *lane) failed(work context.Context, o *outcome, q *queue, v leaver, r broker.Result) (stays bool) {
	if r.Outcome == broker.Unreachable && errors.Is(o.why, errNoReason) {
		o.why = fmt.Errorf("topic %q: %w", v.msg.Topic, cmpErr(r.Err, errNoReason))
	}
	switch {
	case r.Outcome == broker.Refused:
		text, pause := l.refusal(work, failure{entry: v.entry, err: cmpErr(r.Err, errNoReason)}, v.attempts+1)
		o.refused, o.texts, o.pauses = append(o.refused, v.number), append(o.texts, text), append(o.pauses, pause)
		o.counts = append(o.counts, v.attempts+1)
		if q.scope != "" {
			o.join(v, v.number, "")
		}
		return false
	case q.scope == "" && r.Outcome == broker.Unreachable:
		o.later, o.delays = append(o.later, v.number), append(o.delays, q.delay(v.number))
		o.formers = append(o.formers, v.attempts)
	case q.scope == "" && v.msg.HasKey():
		o.next.add(topicKey{v.msg.Topic, v.msg.Key}, v.number-1)
	case r.Outcome == broker.Unreachable && q.scope == q.topic && r.Scope != "" && r.Scope != q.scope:
		o.join(v, v.number-1, r.Scope) // a part of the topic
		return false
	}
	return true
}

// settleParked records what became of a page. l.parking.mu is held.
func (l *lane) settleParked(work context.Context, o *outcome) error {
	var lane int32
	err := l.d.pool.QueryRow(work, l.d.sql.settle, l.number, l.fence, l.d.owner,
		o.gone, o.refused, o.texts, o.pauses, o.later, o.delays,
		o.next.topics, o.next.keys, o.next.after,
		o.joined.topics, o.joined.keys, o.joined.after, o.aways, o.alone, o.aloneAways, o.counts, o.formers).Scan(&lane)
	if errors.Is(err, pgx.ErrNoRows) {
		return errLostLane
	}
	return err
}
