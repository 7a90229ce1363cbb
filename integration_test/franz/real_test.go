package franz_test

import (
	"testing"

	"github.com/postroom/postroom/internal/throwaway"
)

// realRig is Apache Kafka.
func realRig(t testing.TB) *rig {
	t.Helper()
	k, err := throwaway.StartKafka(t.Context(), throwaway.KafkaConfig{
		RequireReal: true,
		Settings:    map[string]string{"message.max.bytes": "100000", "group.min.session.timeout.ms": "1000"},
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := k.Close(); err != nil {
			t.Error(err)
		}
	})
	t.Log(k.Source)
	return &rig{t: t, brokers: k.Brokers, admin: newClient(t, k.Brokers), real: k}
}

func TestConformanceApacheKafka(t *testing.T) {
	t.Parallel()
	conformance(t, realRig(t))
}
