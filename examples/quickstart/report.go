package main

import (
	"context"
	"crypto/sha256"
	"fmt"
	"strings"
	"time"
)

// A report is what was counted at the end.
type report struct {
	messages                                    int // that were to be committed
	committed, rolledBack, savepoints, repeated int64
	deliveries, duplicates, spoiled, ackLost    int64
	kills                                       int64
	events                                      int    // business rows of producers
	broker                                      *audit // of what it holds, from the first record on
	effects                                     []*audit
	ordered                                     bool // order in effect is promised
	stalled                                     bool
	took                                        time.Duration
}

// count compares what the broker holds and the business tables with the ledger.
func (g *game) count(ctx context.Context) (*report, error) {
	r := &report{
		messages:   g.messages,
		committed:  g.tally.committed.Load(),
		rolledBack: g.tally.rolledBack.Load(),
		savepoints: g.tally.savepoints.Load(),
		repeated:   g.tally.repeated.Load(),
		kills:      g.tally.kills.Load(),
		deliveries: g.crew.said(sayDelivered),
		duplicates: g.crew.said(sayDuplicate),
		spoiled:    g.crew.said(saySpoiled),
		ackLost:    g.crew.said(sayAckLost),
		broker:     newAudit(g.producers.ledger),
		ordered:    g.broker == brokerKafka,
	}
	err := g.stage.pool.QueryRow(ctx, `SELECT count(*) FROM quickstart.events`).Scan(&r.events)
	if err != nil {
		return nil, fmt.Errorf("count events: %w", err)
	}
	for _, s := range subscribers {
		a, err := g.auditEffects(ctx, s)
		if err != nil {
			return nil, fmt.Errorf("count effects: %w", err)
		}
		r.effects = append(r.effects, a)
	}
	length, err := g.stage.sight.length(ctx)
	if err != nil || length == 0 {
		return r, err
	}
	err = g.stage.sight.read(ctx, func(m record) bool {
		r.broker.add(m.id, m.entry)
		return r.broker.Total < length
	})
	return r, err
}

const selectEffects = `
SELECT message_id, key, n, sum FROM quickstart.effects WHERE subscriber = $1 ORDER BY seq`

func (g *game) auditEffects(ctx context.Context, subscriber string) (*audit, error) {
	a := newAudit(g.producers.ledger)
	rows, err := g.stage.pool.Query(ctx, selectEffects, subscriber)
	if err != nil {
		return nil, err
	}
	defer rows.Close()
	for rows.Next() {
		var id string
		var e entry
		var sum []byte
		if err := rows.Scan(&id, &e.key, &e.n, &sum); err != nil {
			return nil, err
		}
		e.sum = [sha256.Size]byte(sum)
		a.add(id, e)
	}
	return a, rows.Err()
}

// sum adds up a figure of all subscribers.
func (r *report) sum(of func(*audit) int) (n int) {
	for _, a := range r.effects {
		n += of(a)
	}
	return n
}

func (r *report) lost() int    { return r.sum((*audit).missing) }
func (r *report) doubled() int { return r.sum(func(a *audit) int { return a.Repeats }) }
func (r *report) unknown() int {
	return r.broker.Unknown + r.sum(func(a *audit) int { return a.Unknown })
}

func (r *report) altered() int {
	return r.broker.Altered + r.sum(func(a *audit) int { return a.Altered })
}

func (r *report) disordered() int { return r.sum(func(a *audit) int { return a.Disordered }) }

// problems lists the promises that were broken.
func (r *report) problems() (problems []string) {
	bad := func(n int, what string) {
		if n > 0 {
			problems = append(problems, grouped(n)+" "+what)
		}
	}
	if r.stalled {
		problems = append(problems, errStalled.Error())
	}
	if r.committed != int64(r.messages) || r.events != r.messages || len(r.broker.ledger) != r.messages {
		problems = append(problems, fmt.Sprintf("%d business rows and %d committed transactions, want %d", r.events, r.committed, r.messages))
	}
	bad(r.lost(), "lost")
	bad(r.doubled(), "doubled")
	bad(r.unknown(), "although rolled back")
	bad(r.altered(), "altered")
	bad(r.broker.Disordered, "out of order at the broker")
	if r.ordered {
		bad(r.disordered(), "out of order in effect")
	}
	return problems
}

// String returns the table and the verdict.
func (r *report) String() string {
	total := r.sum(func(a *audit) int { return a.Total })
	want := r.messages * len(r.effects)
	order, inOrder := "not promised on JetStream", ""
	if r.ordered {
		order, inOrder = "", ", those of each key in order"
	}
	rows := []row{
		{"transactions committed", int(r.committed), grouped(r.savepoints) + " with a savepoint rolled back"},
		{"transactions rolled back", int(r.rolledBack), ""},
		{"messages published", r.broker.Distinct + r.broker.Unknown, ""},
		{"repeats published", r.broker.Repeats, fmt.Sprintf("%s on purpose, %s by dispatchers",
			grouped(r.repeated), grouped(int64(r.broker.Repeats)-r.repeated))},
		{"deliveries", int(r.deliveries), fmt.Sprintf("%s handlers failed, %s acks dropped", grouped(r.spoiled), grouped(r.ackLost))},
		{"duplicates caught", int(r.duplicates), ""},
		{"effects", total, fmt.Sprintf("of %s: %d subscribers", grouped(want), len(r.effects))},
		{"lost", r.lost(), ""},
		{"doubled", r.doubled(), ""},
		{"rolled back, yet published", r.unknown(), ""},
		{"altered on the way", r.altered(), ""},
		{"out of order at the broker", r.broker.Disordered, ""},
		{"out of order in effect", r.disordered(), order},
	}
	var b strings.Builder
	for _, row := range rows {
		b.WriteString(row.String())
	}
	seconds := r.took.Seconds()
	fmt.Fprintf(&b, "\n%s messages and %s effects in %.1f s: %s and %s a second.\n",
		grouped(r.messages), grouped(total), seconds, grouped(int(float64(r.messages)/seconds)), grouped(int(float64(total)/seconds)))
	if problems := r.problems(); len(problems) > 0 {
		fmt.Fprintf(&b, "FAILED: %s.", strings.Join(problems, ", "))
	} else {
		fmt.Fprintf(&b, "Processes killed: %d. Each message had each of its effects exactly once%s.", r.kills, inOrder)
	}
	return b.String()
}

// A row is one line of the table.
type row struct {
	what string
	n    int
	note string
}

func (r row) String() string {
	return strings.TrimRight(fmt.Sprintf("  %-28s %9s   %s", r.what, grouped(r.n), r.note), " ") + "\n"
}
