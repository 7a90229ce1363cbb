package main

import (
	"bytes"
	"strings"
	"testing"

	"github.com/postroom/postroom/internal/throwaway"
)

// startKafka starts a Kafka that the quick start is given.
func startKafka(t *testing.T, cfg throwaway.KafkaConfig) *throwaway.Kafka {
	t.Helper()
	kafka, err := throwaway.StartKafka(t.Context(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := kafka.Close(); err != nil {
			t.Error(err)
		}
	})
	return kafka
}

func TestTopicOfOthersIsLeftAlone(t *testing.T) {
	kafka := startKafka(t, throwaway.KafkaConfig{Fake: true})
	if err := kafka.CreateTopic(t.Context(), topic, 1, nil); err != nil {
		t.Fatal(err)
	}
	var out, errout bytes.Buffer
	code := run([]string{"-broker", "kafka", "-kafka-brokers", strings.Join(kafka.Brokers, ",")}, nil, &out, &errout)
	if want := "there is a topic quickstart.github already"; code != exitFailed || !strings.Contains(errout.String(), want) {
		t.Errorf("exit code %d, %q; want %d, %q", code, &errout, exitFailed, want)
	}
	// A topic that is not there cannot be deleted.
	if err := kafka.DeleteTopic(t.Context(), topic); err != nil {
		t.Errorf("the topic is gone: %v", err)
	}
}
