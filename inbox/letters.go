package inbox

import (
	"context"
	"log/slog"
	"slices"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/postroom/postroom"
	"github.com/postroom/postroom/broker"
	"github.com/postroom/postroom/internal/pg"
)

// maxLetters bounds the dead letters that a Consumer holds besides the messages
// of the broker.
const maxLetters = 64

// letter is where a task comes from that the broker has not delivered.
type letter struct {
	source   string
	requeues int
}

// selectDue finds the dead letters that may be handled, in the order of their
// keys. Where order is asked for, nothing passes a letter that is still dead.
const selectDue = `
SELECT message_id, source, requeues, key, payload, header_names, header_values, coalesce(operation, ''), written_at
  FROM "postroom".inbox_dead_letters d
 WHERE subscriber_id = $1::text AND topic = $2::text AND state <> 'dead' AND NOT message_id = ANY ($3::text[])
   AND NOT ($4::boolean AND key IS NOT NULL AND EXISTS (
       SELECT FROM "postroom".inbox_dead_letters e
        WHERE e.subscriber_id = d.subscriber_id AND e.topic = d.topic
          AND sha256(e.key) = sha256(d.key) AND e.number < d.number AND e.state = 'dead'))
 ORDER BY number
 LIMIT $5::int`

// takeLetters brings dead letters that are due among the tasks, until r.ctx ends.
func (r *run) takeLetters() {
	ticker := time.NewTicker(r.c.box.cfg.RequeueInterval)
	defer ticker.Stop()
	for {
		tasks, err := r.dueLetters()
		if err != nil && r.ctx.Err() == nil {
			r.c.box.cfg.Logger.LogAttrs(r.ctx, slog.LevelDebug, "look for requeued dead letters",
				slog.String("subscriber", r.c.box.subscriber), slog.Any("error", err))
		}
		r.addLetters(tasks)
		select {
		case <-ticker.C:
		case <-r.drawn:
		case <-r.ctx.Done():
			return
		}
	}
}

func (r *run) dueLetters() ([]*task, error) {
	r.mu.Lock()
	held := make([]string, 0, len(r.letters))
	for id := range r.letters {
		held = append(held, id)
	}
	r.mu.Unlock()
	ctx, stop := bounds.with(r.ctx, ownTime)
	defer stop()
	cfg := &r.c.box.cfg
	rows, err := r.c.box.pool.Query(ctx, pg.InSchema(selectDue, cfg.Schema), r.c.box.subscriber, r.c.topic,
		held, cfg.OnDeadLetter == DeadLetterWait, maxLetters-len(held))
	if err != nil {
		return nil, noAnswer(ctx, err)
	}
	tasks, err := pgx.CollectRows(rows, r.scanLetter)
	return tasks, noAnswer(ctx, err)
}

func (r *run) scanLetter(row pgx.CollectableRow) (*task, error) {
	t := &task{m: postroom.Message{Topic: r.c.topic}, letter: &letter{}}
	var stored storedMessage
	err := row.Scan(&t.m.ID, &t.letter.source, &t.letter.requeues, &stored.key, &t.m.Payload,
		&stored.names, &stored.values, &t.m.Operation, &stored.written)
	stored.into(&t.m)
	t.d = letterDelivery{t.m}
	return t, err
}

// storedMessage is what a dead letter holds in another form than a message.
type storedMessage struct {
	key           []byte
	names, values [][]byte
	written       *time.Time
}

func (s *storedMessage) into(m *postroom.Message) {
	m.Key, m.EmptyKey = string(s.key), s.key != nil && len(s.key) == 0
	for i, name := range s.names {
		m.Headers = append(m.Headers, postroom.Header{Name: string(name), Value: s.values[i]})
	}
	if s.written != nil {
		m.Time = *s.written
	}
}

func (r *run) addLetters(tasks []*task) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.stopping || r.ctx.Err() != nil || len(tasks) == 0 {
		return
	}
	for _, t := range tasks {
		r.letters[t.m.ID] = true
		r.s.add(t)
	}
	now := time.Now()
	r.start(now)
	r.tell(now)
}

// forget lets a dead letter be found again, if it is still there. Where another
// consumer has it that is no reason to look at once.
func (r *run) forget(t *task, result Result) {
	if t.letter == nil {
		return
	}
	delete(r.letters, t.m.ID)
	if len(r.letters) == 0 && result == Handled {
		select {
		case r.drawn <- struct{}{}:
		default:
		}
	}
}

// letterDelivery stands for the broker, which has nothing to do with the message
// any more.
type letterDelivery struct{ m postroom.Message }

func (d letterDelivery) Message() postroom.Message                  { return d.m }
func (d letterDelivery) Position() broker.Position                  { return broker.Position{} }
func (d letterDelivery) Deliveries() int                            { return 0 }
func (d letterDelivery) Lost() <-chan struct{}                      { return nil }
func (d letterDelivery) Ack(context.Context) error                  { return nil }
func (d letterDelivery) Retry(context.Context, time.Duration) error { return nil }

// restore gives a message that a foreign tool has copied back from a dead-letter
// topic the id and headers that it had, and reports whether it is one of this
// subscriber's.
func restore(m *postroom.Message, subscriber string) bool {
	of, _ := m.Header("postroom-dead-subscriber")
	id, _ := m.Header("postroom-dead-id")
	if string(of) != subscriber || postroom.CheckID(string(id)) != "" {
		return false
	}
	m.ID = string(id)
	m.Headers = slices.DeleteFunc(slices.Clone(m.Headers), func(h postroom.Header) bool {
		return strings.HasPrefix(strings.ToLower(h.Name), "postroom-dead-")
	})
	return true
}
