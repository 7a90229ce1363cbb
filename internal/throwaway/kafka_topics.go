package throwaway

import (
	"context"
	"errors"
	"fmt"

	"github.com/twmb/franz-go/pkg/kadm"
	"github.com/twmb/franz-go/pkg/kgo"
)

// CreateTopic creates a topic with one replica per partition and the given
// settings, which may be nil, and returns when every partition has a leader.
func (k *Kafka) CreateTopic(ctx context.Context, name string, partitions int, settings map[string]string) error {
	configs := make(map[string]*string, len(settings))
	for name, value := range settings {
		configs[name] = &value
	}
	return k.administer(ctx, "create topic "+name, func(client *kadm.Client) error {
		if _, err := client.CreateTopic(ctx, int32(partitions), 1, configs, name); err != nil {
			return err
		}
		return leaders(ctx, client, name, partitions)
	})
}

// AddPartitions adds partitions to a topic and returns when every partition has
// a leader.
func (k *Kafka) AddPartitions(ctx context.Context, name string, add int) error {
	return k.administer(ctx, "add partitions to "+name, func(client *kadm.Client) error {
		before, err := client.ListTopics(ctx, name)
		if err != nil {
			return err
		}
		want := len(before[name].Partitions) + add
		responses, err := client.UpdatePartitions(ctx, want, name)
		if err = errors.Join(err, responses.Error()); err != nil {
			return err
		}
		return leaders(ctx, client, name, want)
	})
}

// DeleteTopic deletes a topic and returns when the brokers do not list it any
// more.
func (k *Kafka) DeleteTopic(ctx context.Context, name string) error {
	return k.administer(ctx, "delete topic "+name, func(client *kadm.Client) error {
		if _, err := client.DeleteTopic(ctx, name); err != nil {
			return err
		}
		return poll(ctx, "the topic to go", func() (bool, error) {
			topics, err := client.ListTopics(ctx)
			return err == nil && !topics.Has(name), err
		})
	})
}

// leaders waits until the topic has the partitions, and each of them a leader.
func leaders(ctx context.Context, client *kadm.Client, name string, partitions int) error {
	return poll(ctx, "leaders of the partitions", func() (bool, error) {
		topics, err := client.ListTopics(ctx, name)
		if err != nil {
			return false, err
		}
		led := 0
		for _, p := range topics[name].Partitions {
			if p.Err == nil && p.Leader >= 0 {
				led++
			}
		}
		return led == partitions, nil
	})
}

func (k *Kafka) administer(ctx context.Context, what string, do func(*kadm.Client) error) error {
	client, err := k.adminClient()
	if err == nil {
		err = do(kadm.NewClient(client))
	}
	if err != nil {
		return fmt.Errorf("throwaway: %s: %w", what, err)
	}
	return nil
}

func (k *Kafka) adminClient() (*kgo.Client, error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.closed {
		return nil, errors.New("the Kafka was closed")
	}
	if k.admin == nil {
		// The helpers wait for what they just made, so nothing may be cached.
		client, err := kgo.NewClient(kgo.SeedBrokers(k.Brokers...), kgo.MetadataMinAge(pollInterval))
		if err != nil {
			return nil, err
		}
		k.admin = client
	}
	return k.admin, nil
}
