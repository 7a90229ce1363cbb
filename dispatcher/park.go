package dispatcher

import (
	"context"
	"errors"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/postroom/postroom/internal/pg"
)

// keysBehind returns the keys of a page that have parked messages, and what
// these wait for. It probes index outbox_parked_key.
const keysBehind = `
SELECT k.topic, k.key, coalesce(p.away, '')
  FROM unnest($2::text[], $3::text[]) AS k(topic, key) CROSS JOIN LATERAL (
       SELECT away FROM "postroom".outbox_parked
        WHERE lane = $1::int4 AND topic = k.topic AND key = k.key
        ORDER BY number LIMIT 1) p`

// parkMessages moves messages aside and appends a cursor row in the same
// statement, which makes the move conditional on the lane's fence and order. The
// lock makes a takeover wait for it, so that the next owner sees all of it. Losing
// it repeats what followed and no more, so it may be asynchronous.
const parkMessages = `
WITH setting AS MATERIALIZED (
    SELECT set_config('synchronous_commit', 'off', true)
), ` + newestCursor + `, appended AS (
    INSERT INTO "postroom".outbox_cursors (lane, origin, number, fence, owner, prev, until, last_id)
    SELECT $1, $2, c.number + 1, l.fence, l.owner, c.prev, c.until, $11::int8
      FROM setting, newest c, "postroom".outbox_lanes l
     WHERE ` + sameCursor + `
       AND "postroom".origin() = $12::int8
       FOR SHARE OF l
    RETURNING number
), aside AS (
    SELECT * FROM unnest($13::int8[], $14::text[], $15::interval[], $16::text[]) AS a(id, error, pause, away)
), moved AS (
    DELETE FROM "postroom".outbox_messages m USING aside a
     WHERE m.lane = $1 AND m.origin = $2 AND m.id = a.id
       AND EXISTS (SELECT FROM appended)
    RETURNING m.id, m.created_at, m.hash, m.message_id, m.topic, m.key, m.payload,
              m.header_names, m.header_values, m.operation, a.error, a.pause, a.away
), parked AS (
    INSERT INTO "postroom".outbox_parked (lane, origin, id, state, away, due_at, attempts, error, tried_at, created_at,
           hash, message_id, topic, key, payload, header_names, header_values, operation)
    SELECT $1, $2, id, CASE WHEN error IS NULL THEN 'waiting' ELSE 'refused' END, away, clock_timestamp() + pause,
           CASE WHEN error IS NULL THEN 0 ELSE 1 END, error, CASE WHEN error IS NOT NULL THEN clock_timestamp() END,
           created_at, hash, message_id, topic, key, payload, header_names, header_values, operation
      FROM moved ORDER BY id
)
SELECT number FROM appended`

// aside collects messages of a page that are to be parked, in parallel arrays.
type aside struct {
	ids    []int64
	errors []*string        // of the refused ones
	pauses []*time.Duration // until a refused one is tried again; nil: an operator decides
	aways  []*string        // what the waiting ones wait for, if not for one of their key

	heads  map[topicKey]string // keys that now wait, and for what
	scopes map[string]string   // what is waited for → a topic of it
}

func (a *aside) wait(e entry, away string) {
	a.add(e, nil, nil, away)
}

func (a *aside) refuse(e entry, text string, pause *time.Duration) {
	a.add(e, &text, pause, "")
}

func (a *aside) add(e entry, text *string, pause *time.Duration, away string) {
	a.ids, a.errors, a.pauses = append(a.ids, e.id), append(a.errors, text), append(a.pauses, pause)
	var scope *string
	if away != "" {
		scope = &away
		if a.scopes == nil {
			a.scopes = make(map[string]string)
		}
		a.scopes[away] = e.msg.Topic
	}
	a.aways = append(a.aways, scope)
	if e.msg.HasKey() {
		if a.heads == nil {
			a.heads = make(map[topicKey]string)
		}
		a.heads[topicKey{e.msg.Topic, e.msg.Key}] = away
	}
}

// behind moves what stands in rest behind a parked message of its key to a,
// and returns the others.
func (a *aside) behind(rest []entry) (others []entry) {
	for _, e := range rest {
		if away, ok := a.heads[topicKey{e.msg.Topic, e.msg.Key}]; ok && e.msg.HasKey() {
			a.wait(e, away)
		} else {
			others = append(others, e)
		}
	}
	return others
}

// anyParked says whether a lane has parked messages.
const anyParked = `
SELECT (SELECT true FROM "postroom".outbox_parked WHERE lane = $1::int4 ORDER BY topic LIMIT 1) IS NOT NULL`

// askEvery is how often a lane that has had parked messages asks whether it has
// any left. It is not asked for every page: where many have left, the answer is
// slow until their table is vacuumed.
const askEvery = time.Second

// hasParked reports whether the lane may have parked messages. Only its own run
// adds any, so that it asks for their end alone. l.parking.mu is held.
func (l *lane) hasParked(work context.Context) (bool, error) {
	if !l.parked || time.Since(l.askedParked) < askEvery {
		return l.parked, nil
	}
	l.askedParked = time.Now()
	err := l.d.pool.QueryRow(work, l.d.sql.anyParked, l.number).Scan(&l.parked)
	return l.parked, err
}

// setAside parks those messages of a page that have to wait, for an earlier one
// of their key or for their topic, and returns the others.
func (l *lane) setAside(work context.Context, page []entry) ([]entry, error) {
	if !l.parked {
		return page, nil
	}
	l.parking.mu.Lock()
	defer l.parking.mu.Unlock()
	if has, err := l.hasParked(work); !has || err != nil {
		return page, err
	}
	heads, err := l.keysBehind(work, page)
	if err != nil {
		return nil, err
	}
	a := aside{heads: heads}
	var others []entry
	for _, e := range page {
		if away, ok := heads[topicKey{e.msg.Topic, e.msg.Key}]; ok && e.msg.HasKey() {
			a.wait(e, away)
		} else if l.parking.away(e.msg.Topic) {
			a.wait(e, e.msg.Topic)
		} else {
			others = append(others, e)
		}
	}
	return others, l.park(work, a)
}

// keysBehind returns the keys of a page that have parked messages, each with
// what these wait for.
func (l *lane) keysBehind(work context.Context, page []entry) (map[topicKey]string, error) {
	seen := make(map[topicKey]bool)
	topics, keys := []string{}, []string{}
	for _, e := range page {
		k := topicKey{e.msg.Topic, e.msg.Key}
		if e.msg.HasKey() && !seen[k] {
			seen[k] = true
			topics, keys = append(topics, k.topic), append(keys, k.key)
		}
	}
	heads := make(map[topicKey]string)
	if len(keys) == 0 {
		return heads, nil
	}
	rows, err := l.d.pool.Query(work, l.d.sql.behind, l.number, topics, keys)
	if err != nil {
		return nil, err
	}
	var k topicKey
	var away string
	_, err = pgx.ForEachRow(rows, []any{&k.topic, &k.key, &away}, func() error {
		heads[k] = away
		return nil
	})
	return heads, err
}

// parkFailed parks what a call of the publisher has shown to be refused or away, and
// what of rest stands behind it. It returns the others.
func (l *lane) parkFailed(work context.Context, refused []failure, away []failure, rest []entry) ([]entry, error) {
	if len(refused)+len(away) == 0 {
		return rest, nil
	}
	var a aside
	for _, f := range refused {
		text, pause := l.refusal(work, f, 1)
		a.refuse(f.entry, text, pause)
	}
	for _, f := range away {
		a.wait(f.entry, f.scope)
	}
	others := a.behind(rest)
	l.parking.mu.Lock()
	defer l.parking.mu.Unlock()
	return others, l.park(work, a)
}

// refusal logs that a message was refused for the n-th time. It returns the
// reason, fit for its column, and when to try again, nil where that is for an
// operator to say.
func (l *lane) refusal(ctx context.Context, f failure, n int) (text string, pause *time.Duration) {
	level := levelError
	if pause = l.pauseAfter(n); pause != nil {
		level = levelWarn
	}
	l.d.cfg.Logger.LogAttrs(ctx, level, "message refused by the broker and set aside",
		l.attr(), topicAttr(f.msg.Topic), idAttr(f.msg.ID), attemptAttr(n), errorAttr(f.err))
	return pg.CleanText(f.err.Error(), maxError), pause
}

// pauseAfter returns how long to wait after the n-th attempt, or nil after the
// last.
func (l *lane) pauseAfter(n int) *time.Duration {
	if n >= l.d.cfg.MaxAttempts {
		return nil
	}
	d := retryPause(n)
	return &d
}

// maxError is the most characters of an error's text that are kept.
const maxError = 1000

// park moves messages aside. l.parking.mu is held, so that nothing that a key
// waits for leaves in between.
func (l *lane) park(work context.Context, a aside) error {
	if len(a.ids) == 0 {
		return nil
	}
	lastID := max(l.done, l.cur.lastID)
	var number int64
	err := l.d.pool.QueryRow(work, l.d.sql.park,
		append(l.identity(), lastID, l.home, a.ids, a.errors, a.pauses, a.aways)...).Scan(&number)
	if errors.Is(err, pgx.ErrNoRows) {
		return errReload
	}
	if err != nil {
		return reloadOn(err)
	}
	l.cur = l.next(l.cur.prev, l.cur.until, lastID)
	l.parked, l.askedParked = true, time.Now()
	for scope, topic := range a.scopes {
		l.parking.open(scope, topic)
	}
	return nil
}
