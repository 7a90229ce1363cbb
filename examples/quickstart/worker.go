package main

import (
	"bufio"
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/signal"
	"strconv"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/postroom/postroom"
	"github.com/postroom/postroom/dispatcher"
	"github.com/postroom/postroom/inbox"
)

// The roles of a worker process, the first argument it is started with.
const (
	roleDispatcher = "dispatcher"
	roleConsumer   = "consumer"
)

// subscribers each handle every message once.
var subscribers = []string{"notifications", "search"}

// work is the whole life of a worker process, and returns its exit code.
func work(role string, stdin io.Reader, stdout, stderr io.Writer) int {
	signal.Ignore(os.Interrupt) // Ctrl-C reaches every process of the terminal; the main program decides
	ctx, stop := context.WithCancel(context.Background())
	defer stop()
	lines := bufio.NewReader(stdin)
	line, err := lines.ReadBytes('\n')
	if err != nil {
		fmt.Fprintf(stderr, "a %s is started by the quick start itself\n", role)
		return 2
	}
	var told assignment
	if err := json.NewDecoder(bytes.NewReader(line)).Decode(&told); err != nil {
		fmt.Fprintln(stderr, err)
		return 2
	}
	p := newProbe(stdout, told.Seed, told.Break)
	go func() {
		for {
			switch order, err := lines.ReadString('\n'); {
			case err != nil:
				os.Exit(1) // the main program is gone
			case strings.TrimSpace(order) == orderStop:
				stop()
			case strings.TrimSpace(order) == orderDie:
				p.condemned.Store(true)
			}
		}
	}()
	logger := slog.New(slog.NewTextHandler(stderr, &slog.HandlerOptions{Level: slog.LevelWarn}))
	if err := serve(ctx, role, told, p, logger); err != nil {
		fmt.Fprintln(stderr, err)
		return 1
	}
	return 0
}

// serve connects and does the role's work until ctx ends.
func serve(ctx context.Context, role string, told assignment, p *probe, logger *slog.Logger) error {
	pool, err := openPool(ctx, told.DatabaseURL, 10)
	if err != nil {
		return err
	}
	defer pool.Close()
	bus, err := told.Route.open(ctx, logger)
	if err != nil {
		return err
	}
	defer bus.Close()

	if role == roleDispatcher {
		d, err := dispatcher.New(pool, publisherProbe{bus, p}, dispatcher.Config{
			PublishTimeout: 500 * time.Millisecond,  // short, so that the other
			Lease:          1200 * time.Millisecond, // takes over soon after a kill
			Logger:         logger,
		})
		if err != nil {
			return err
		}
		return d.Run(ctx)
	}
	s := &subscriber{name: told.Subscriber, probe: p}
	if p.breaks == breakDedupe {
		return s.withoutInbox(ctx, pool, subscriberProbe{bus, p})
	}
	c, err := inbox.New(pool, subscriberProbe{bus, p}, s.name, topic, s.handle, inbox.Config{
		LockTimeout: time.Second, // no longer than the broker waits for a dead consumer
		Logger:      logger,
	})
	if err != nil {
		return err
	}
	return c.Run(ctx)
}

// A subscriber writes one row for each message it handles.
type subscriber struct {
	name  string
	probe *probe
}

const insertEffect = `
INSERT INTO quickstart.effects (subscriber, message_id, key, n, sum) VALUES ($1, $2, $3, $4, $5)`

var errOnPurpose = errors.New("failed on purpose, after the effect was written")

func (s *subscriber) handle(ctx context.Context, tx pgx.Tx, m postroom.Message) error {
	value, _ := m.Header(sequenceHeader)
	n, err := strconv.ParseInt(string(value), 10, 64)
	if err != nil {
		return postroom.Permanent(fmt.Errorf("header %s: %w", sequenceHeader, err))
	}
	sum := sha256.Sum256(m.Payload)
	if _, err := tx.Exec(ctx, insertEffect, s.name, m.ID, m.Key, n, sum[:]); err != nil {
		return err
	}
	if s.probe.chance(failuresPerMille) {
		s.probe.say(saySpoiled, 1)
		return errOnPurpose
	}
	s.probe.ran(m.ID)
	return nil
}

const (
	failuresPerMille = 10 // handlers that fail, and are tried again
	ackLossPerMille  = 20 // acknowledgements that are dropped: the broker delivers again
)
