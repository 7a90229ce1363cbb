package main

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"strconv"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/postroom/postroom/internal/throwaway"
)

// A jetStream is the quick start's own sight of NATS JetStream.
type jetStream struct {
	conn   *nats.Conn
	js     jetstream.JetStream
	stream jetstream.Stream
}

const streamName = "QUICKSTART"

// setNATS starts NATS or connects to the given one, and makes the stream.
func (st *stage) setNATS(ctx context.Context, given string) (is string, err error) {
	st.route.URL = given
	origin := "given"
	if given == "" {
		server, err := throwaway.StartNATS(ctx, throwaway.NATSConfig{})
		if err != nil {
			return "", err
		}
		st.closers = append(st.closers, server.Close)
		st.route.URL = server.URL
		origin = "embedded"
	}
	j, err := openJetStream(ctx, st.route.URL)
	if err != nil {
		return "", err
	}
	st.closers = append(st.closers, j.Close)
	st.sight = j
	return fmt.Sprintf("NATS %s with JetStream, %s", j.conn.ConnectedServerVersion(), origin), nil
}

// openJetStream connects and makes the stream, which Postroom never does by
// itself.
func openJetStream(ctx context.Context, url string) (*jetStream, error) {
	conn, err := nats.Connect(url, nats.Name("quickstart"))
	if err != nil {
		return nil, fmt.Errorf("connect to NATS: %w", err)
	}
	j := &jetStream{conn: conn}
	if err := j.makeStream(ctx); err != nil {
		conn.Close()
		return nil, fmt.Errorf("make stream %s: %w", streamName, err)
	}
	return j, nil
}

func (j *jetStream) makeStream(ctx context.Context) (err error) {
	if j.js, err = jetstream.New(j.conn); err != nil {
		return err
	}
	old, err := j.js.Stream(ctx, streamName)
	switch {
	case errors.Is(err, jetstream.ErrStreamNotFound):
	case err != nil:
		return err
	case old.CachedInfo().Config.Description != madeHere:
		return errors.New("there is one already, and the quick start did not make it")
	default: // left by a quick start that was killed, unless it is still being read
		for info := range old.ListConsumers(ctx).Info() {
			if info.NumWaiting > 0 {
				return errors.New("another quick start runs on this server")
			}
		}
		if err := j.js.DeleteStream(ctx, streamName); err != nil {
			return err
		}
	}
	j.stream, err = j.js.CreateStream(ctx, jetstream.StreamConfig{
		Name:        streamName,
		Description: madeHere,
		Subjects:    []string{topic},
		Storage:     jetstream.FileStorage,
		Retention:   jetstream.LimitsPolicy,
		Discard:     jetstream.DiscardNew,
		Duplicates:  2 * time.Minute,
	})
	return err
}

func (j *jetStream) read(ctx context.Context, f func(record) bool) error {
	consumer, err := j.stream.OrderedConsumer(ctx, jetstream.OrderedConsumerConfig{})
	if err != nil {
		return fmt.Errorf("read the stream: %w", err)
	}
	messages, err := consumer.Messages()
	if err != nil {
		return fmt.Errorf("read the stream: %w", err)
	}
	defer messages.Stop()
	defer context.AfterFunc(ctx, messages.Stop)()
	for {
		m, err := messages.Next()
		if ctx.Err() != nil {
			return nil
		}
		if err != nil {
			return fmt.Errorf("read the stream: %w", err)
		}
		n, _ := strconv.ParseInt(m.Headers().Get(sequenceHeader), 10, 64) // 0, a wrong number, if it is missing
		r := record{
			id:     m.Headers().Get("postroom-id"),
			entry:  entry{key: m.Headers().Get("postroom-key"), n: n, sum: sha256.Sum256(m.Data())},
			repeat: func(ctx context.Context) error { return j.repeat(ctx, m) },
		}
		if !f(r) {
			return nil
		}
	}
}

// repeat stores a copy of a message. Without Nats-Msg-Id the broker's own
// deduplication, which ends with its window, does not see that it is one.
func (j *jetStream) repeat(ctx context.Context, m jetstream.Msg) error {
	again := &nats.Msg{Subject: m.Subject(), Data: m.Data(), Header: nats.Header{}}
	for name, values := range m.Headers() {
		if name != jetstream.MsgIDHeader {
			again.Header[name] = values
		}
	}
	if _, err := j.js.PublishMsg(ctx, again); err != nil {
		return fmt.Errorf("repeat a message: %w", err)
	}
	return nil
}

func (j *jetStream) length(ctx context.Context) (int, error) {
	info, err := j.stream.Info(ctx)
	if err != nil {
		return 0, fmt.Errorf("look at the stream: %w", err)
	}
	return int(info.State.Msgs), nil
}

func (j *jetStream) settled(ctx context.Context) (bool, error) {
	consumers := j.stream.ListConsumers(ctx)
	n := 0
	idle := true
	for info := range consumers.Info() {
		if info.Config.AckPolicy == jetstream.AckNonePolicy {
			continue // a plain reader
		}
		n++
		idle = idle && info.NumPending == 0 && info.NumAckPending == 0
	}
	if err := consumers.Err(); err != nil {
		return false, fmt.Errorf("look at the consumers: %w", err)
	}
	return idle && n == len(subscribers), nil
}

// Close removes the stream.
func (j *jetStream) Close() error {
	defer j.conn.Close()
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	return j.js.DeleteStream(ctx, streamName)
}
