package kafka_test

import (
	"errors"
	"slices"
	"strings"
	"testing"

	kafkago "github.com/segmentio/kafka-go"

	"github.com/postroom/postroom/broker"
	"github.com/postroom/postroom/internal/throwaway"
)

// startReal starts Apache Kafka, or fails.
func startReal(t testing.TB, cfg throwaway.KafkaConfig) *throwaway.Kafka {
	t.Helper()
	cfg.RequireReal = true
	k, err := throwaway.StartKafka(t.Context(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := k.Close(); err != nil {
			t.Error(err)
		}
	})
	t.Log(k.Source)
	return k
}

// realRig is Apache Kafka whose messages are small.
func realRig(t testing.TB) *rig {
	t.Helper()
	k := startReal(t, throwaway.KafkaConfig{Settings: map[string]string{"message.max.bytes": "100000"}})
	return &rig{t: t, brokers: k.Brokers, admin: newClient(t, k.Brokers)}
}

func TestConformanceApacheKafka(t *testing.T) {
	t.Parallel()
	conformance(t, realRig(t))
}

// A compacted topic takes no message without a key. Apache Kafka names those of a
// batch; they are refused, and the others and another topic's are stored.
func TestInvalidRecordsApacheKafka(t *testing.T) {
	t.Parallel()
	r := realRig(t)
	r.topic("compacted", 1, "cleanup.policy", "compact")
	r.topic("plain", 1)
	b := r.open()
	msgs := slices.Concat(messages("compacted", "a", 0, 0), messages("compacted", "", 1, 2), messages("compacted", "b", 0, 0),
		messages("plain", "", 1, 1))
	results := b.Publish(t.Context(), msgs)
	wantOutcomes(t, results, broker.Stored, broker.Refused, broker.Refused, broker.Stored, broker.Stored)
	if err := results[1].Err; !errors.Is(err, kafkago.InvalidRecord) || !strings.Contains(err.Error(), "[87]") {
		t.Errorf("the error is %v, want the broker's code 87", err)
	}
	if got := recordIDs(r.read("compacted", 2)); !slices.Equal(got, []string{"a-0", "b-0"}) {
		t.Errorf("the compacted topic holds %q", got)
	}
}
