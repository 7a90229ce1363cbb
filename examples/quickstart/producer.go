package main

import (
	"context"
	"crypto/sha256"
	"errors"
	"math/rand/v2"
	"strconv"
	"sync/atomic"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"golang.org/x/sync/errgroup"

	"github.com/postroom/postroom"
	"github.com/postroom/postroom/broker"
	"github.com/postroom/postroom/outbox"
)

const (
	topic          = "quickstart.github"
	sequenceHeader = "sequence" // the message's place in the order of its key
	eventHeader    = "event"

	producerCount = 8
	maxAhead      = 1000 // messages that producers may be ahead of the dispatchers
)

// businessTables belong to the application. No constraint on effects could hide
// a message that is handled twice.
const businessTables = `
CREATE TABLE quickstart.entities (key text PRIMARY KEY, events bigint NOT NULL);
CREATE TABLE quickstart.events (message_id text NOT NULL, key text NOT NULL, n bigint NOT NULL, event text NOT NULL);
CREATE TABLE quickstart.effects (
    seq        bigint GENERATED ALWAYS AS IDENTITY,
    subscriber text   NOT NULL,
    message_id text   NOT NULL,
    key        text   NOT NULL,
    n          bigint NOT NULL,
    sum        bytea  NOT NULL
)`

// Producers receive webhooks: each becomes a business row and a message in one
// transaction.
type producers struct {
	pool   *pgxpool.Pool
	box    outbox.Outbox
	hooks  []webhook
	ledger *ledger
	tally  *tally
	bypass broker.Publisher // used in place of the outbox by -break outbox
}

// run commits the given number of messages, and rolls a few more back. It
// waits when the dispatchers fall behind, so that all of the run has all of the
// parts at work.
func (p *producers) run(ctx context.Context, messages int, seed uint64) error {
	var begun atomic.Int64
	g, ctx := errgroup.WithContext(ctx)
	for i := range producerCount {
		g.Go(func() error {
			rng := rand.New(rand.NewPCG(seed, uint64(i)))
			for begun.Add(1) <= int64(messages) {
				if !until(ctx, func() bool { return p.tally.committed.Load()-p.tally.arrived.Load() < maxAhead }) {
					return ctx.Err()
				}
				for {
					committed, err := p.receive(ctx, p.hooks[rng.IntN(len(p.hooks))], rng.IntN(100))
					if err != nil {
						return err
					}
					if committed {
						break
					}
				}
			}
			return nil
		})
	}
	return g.Wait()
}

var errChangedMind = errors.New("rolled back on purpose")

// receive handles one webhook. Of a hundred fates, eight end in a rollback and
// eight write a second message inside a savepoint that is rolled back.
func (p *producers) receive(ctx context.Context, hook webhook, fate int) (committed bool, err error) {
	var id string
	var e entry
	err = pgx.BeginFunc(ctx, p.pool, func(tx pgx.Tx) error {
		var err error
		if id, e, err = p.store(ctx, tx, hook); err != nil {
			return err
		}
		switch {
		case fate < 8:
			return errChangedMind
		case fate < 16:
			err := pgx.BeginFunc(ctx, tx, func(savepoint pgx.Tx) error {
				if _, _, err := p.store(ctx, savepoint, hook); err != nil {
					return err
				}
				return errChangedMind
			})
			if !errors.Is(err, errChangedMind) {
				return err
			}
			p.tally.savepoints.Add(1)
		}
		return nil
	})
	if errors.Is(err, errChangedMind) {
		p.tally.rolledBack.Add(1)
		return false, nil
	}
	if err != nil {
		return false, err
	}
	p.ledger.add(id, e)
	p.tally.committed.Add(1)
	return true, nil
}

const (
	// nextNumber locks the entity's row until the transaction ends, which is
	// what puts the writers of one key in an order.
	nextNumber = `
INSERT INTO quickstart.entities AS e (key, events) VALUES ($1, 1)
ON CONFLICT (key) DO UPDATE SET events = e.events + 1
RETURNING events`
	insertEvent = `INSERT INTO quickstart.events (message_id, key, n, event) VALUES ($1, $2, $3, $4)`
)

// store writes the business rows and the message.
func (p *producers) store(ctx context.Context, tx pgx.Tx, hook webhook) (id string, e entry, err error) {
	e = entry{key: hook.Key, sum: sha256.Sum256(hook.Payload)}
	if err := tx.QueryRow(ctx, nextNumber, hook.Key).Scan(&e.n); err != nil {
		return "", e, err
	}
	id = postroom.NewID()
	if _, err := tx.Exec(ctx, insertEvent, id, hook.Key, e.n, hook.Event); err != nil {
		return "", e, err
	}
	m := postroom.Message{
		ID:      id,
		Topic:   topic,
		Key:     hook.Key,
		Payload: hook.Payload,
		Headers: []postroom.Header{
			{Name: eventHeader, Value: []byte(hook.Event)},
			{Name: sequenceHeader, Value: strconv.AppendInt(nil, e.n, 10)},
		},
	}
	if p.bypass != nil {
		return id, e, p.bypass.Publish(ctx, []postroom.Message{m})[0].Err
	}
	return id, e, p.box.Write(ctx, tx, m)
}
