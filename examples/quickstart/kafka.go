package main

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/twmb/franz-go/pkg/kadm"
	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/postroom/postroom/internal/throwaway"
)

// A kafkaTopic is the quick start's own sight of Kafka, by another client than
// Postroom's.
type kafkaTopic struct {
	server *throwaway.Kafka
	client *kgo.Client // for everything but reading
	admin  *kadm.Client
}

const (
	partitions = 6

	// A killed consumer is noticed when its session ends. Brokers that were given
	// allow no less than 6s, unless they are set otherwise.
	ownSession   = time.Second
	givenSession = 6 * time.Second
)

// setKafka starts Kafka or connects to the given brokers, and makes the topic.
func (st *stage) setKafka(ctx context.Context, given string) (is string, err error) {
	st.route.SessionTimeout = ownSession
	cfg := throwaway.KafkaConfig{Settings: map[string]string{
		"group.min.session.timeout.ms": strconv.FormatInt(ownSession.Milliseconds(), 10),
	}}
	if given != "" {
		st.route.SessionTimeout = givenSession
		cfg = throwaway.KafkaConfig{Brokers: strings.Split(given, ",")}
	}
	server, err := throwaway.StartKafka(ctx, cfg)
	if err != nil {
		return "", err
	}
	st.closers = append(st.closers, server.Close)
	st.route.URL = strings.Join(server.Brokers, ",")
	client, err := kgo.NewClient(
		kgo.SeedBrokers(server.Brokers...),
		kgo.RecordPartitioner(kgo.ManualPartitioner()), // a copy goes where the record is
		kgo.ProducerLinger(0),
	)
	if err != nil {
		return "", err
	}
	st.closers = append(st.closers, func() error { client.Close(); return nil })
	k := &kafkaTopic{server: server, client: client, admin: kadm.NewClient(client)}
	if err := k.makeTopic(ctx); err != nil {
		return "", err
	}
	st.sight = k
	if given != "" { // else it goes with the server
		st.closers = append(st.closers, k.remove)
	}
	return server.Source, nil
}

// makeTopic makes the topic, which Postroom never does by itself. Kafka has no
// room for a mark that says whose a topic or group is, so there must be none.
func (k *kafkaTopic) makeTopic(ctx context.Context) error {
	groups, err := k.admin.ListGroups(ctx)
	if err != nil {
		return fmt.Errorf("look at the groups: %w", err)
	}
	for _, s := range subscribers {
		if _, ok := groups[s]; ok {
			return fmt.Errorf("there is a group %s already: delete it if a killed quick start left it, or use another Kafka", s)
		}
	}
	topics, err := k.admin.ListTopics(ctx)
	if err != nil {
		return fmt.Errorf("look at the topics: %w", err)
	}
	if topics.Has(topic) {
		return fmt.Errorf("there is a topic %s already: delete it if a killed quick start left it, or use another Kafka", topic)
	}
	return k.server.CreateTopic(ctx, topic, partitions, nil)
}

func (k *kafkaTopic) read(ctx context.Context, f func(record) bool) error {
	reader, err := kgo.NewClient(
		kgo.SeedBrokers(k.server.Brokers...),
		kgo.ConsumeTopics(topic),
		kgo.ConsumeResetOffset(kgo.NewOffset().AtStart()),
	)
	if err != nil {
		return fmt.Errorf("read the topic: %w", err)
	}
	defer reader.Close()
	for {
		fetches := reader.PollFetches(ctx)
		if ctx.Err() != nil {
			return nil
		}
		if err := fetches.Err(); err != nil {
			return fmt.Errorf("read the topic: %w", err)
		}
		for records := fetches.RecordIter(); !records.Done(); {
			if !f(k.record(records.Next())) {
				return nil
			}
		}
	}
}

func (k *kafkaTopic) record(r *kgo.Record) record {
	header := func(name string) string {
		for _, h := range r.Headers {
			if h.Key == name {
				return string(h.Value)
			}
		}
		return ""
	}
	n, _ := strconv.ParseInt(header(sequenceHeader), 10, 64) // 0, a wrong number, if it is missing
	return record{
		id:    header("postroom-id"),
		entry: entry{key: string(r.Key), n: n, sum: sha256.Sum256(r.Value)},
		repeat: func(ctx context.Context) error {
			again := &kgo.Record{Topic: r.Topic, Partition: r.Partition, Key: r.Key, Value: r.Value, Headers: r.Headers}
			if err := k.client.ProduceSync(ctx, again).FirstErr(); err != nil {
				return fmt.Errorf("repeat a message: %w", err)
			}
			return nil
		},
	}
}

// ends returns the offset at which each partition ends, which is how many
// records it holds: nothing is removed from the topic, and no transaction writes
// to it.
func (k *kafkaTopic) ends(ctx context.Context) (kadm.Offsets, error) {
	ends, err := k.admin.ListEndOffsets(ctx, topic)
	if err = errors.Join(err, ends.Error()); err != nil {
		return nil, fmt.Errorf("look at the topic: %w", err)
	}
	return ends.Offsets(), nil
}

func (k *kafkaTopic) length(ctx context.Context) (n int, err error) {
	ends, err := k.ends(ctx)
	ends.Each(func(o kadm.Offset) { n += int(o.At) })
	return n, err
}

// settled compares what the groups have committed with the ends.
func (k *kafkaTopic) settled(ctx context.Context) (bool, error) {
	ends, err := k.ends(ctx)
	if err != nil {
		return false, err
	}
	behind := false
	for _, s := range subscribers {
		committed, err := k.admin.FetchOffsets(ctx, s)
		if err = errors.Join(err, committed.Error()); err != nil {
			return false, fmt.Errorf("look at group %s: %w", s, err)
		}
		ends.Each(func(end kadm.Offset) {
			at, _ := committed.Lookup(topic, end.Partition) // 0 where there is none yet
			behind = behind || at.At < end.At
		})
	}
	return !behind, nil
}

// remove deletes the topic and the groups, which members that were killed leave
// when their session ends.
func (k *kafkaTopic) remove() error {
	ctx, cancel := context.WithTimeout(context.Background(), 2*givenSession)
	defer cancel()
	err := k.server.DeleteTopic(ctx, topic)
	for _, s := range subscribers {
		var last error
		until(ctx, func() bool {
			_, last = k.admin.DeleteGroup(ctx, s)
			return !errors.Is(last, kerr.NonEmptyGroup)
		})
		if !errors.Is(last, kerr.GroupIDNotFound) {
			err = errors.Join(err, last)
		}
	}
	return err
}
