package kafka_test

import (
	"context"
	"errors"
	"slices"
	"strings"
	"sync"
	"testing"

	kafkago "github.com/segmentio/kafka-go"

	"github.com/postroom/postroom/broker"
	"github.com/postroom/postroom/internal/throwaway"
)

// needReal lists what runs on Apache Kafka, by the reason: nobody else starts it.
var needReal = map[string]string{
	"TestConformanceApacheKafka":            "the promises, on the newest line",
	"TestConformanceOlderKafka":             "the promises, on the oldest line that we try",
	"TestInvalidRecordsApacheKafka":         "which records the broker names",
	"TestB53ApacheKafkaGoesAway":            "kills, restarts and pauses of a process",
	"TestB55NoCommitBeyondTheSettledPrefix": "offsets of a group as the broker keeps them",
	"TestB56ReadingCommitsNothing":          "the same",
	"TestB58SubscribeEnds":                  "the same",
	"TestB60NoMessageIsPassedOver":          "partitions that are added, logs that are cut",
	"TestB62B96ReadsWhatIsThere":            "records as the broker keeps them",
	"TestB95OnlyCommittedIsRead":            "transactions",
	"TestGroupUnderLoad":                    "a group as the broker keeps it",
	"TestTakeover":                          "the same",
	"TestTopicMadeAnew":                     "the same, and topics that go",
	"TestInteroperability":                  "Java's client",
	"TestSecureListeners":                   "TLS and SASL as the broker speaks them",
	"TestStalledHandshake":                  "the same",
	"TestB63PasswordRotates":                "the same",
	"TestB63SessionsEnd":                    "the same",
	"TestB63CertificateRenewed":             "the same",
	"TestB63HealthShowsAuthentication":      "the same, and PostgreSQL",
	"TestB49WithoutPermission":              "permissions",
	"TestDocumentedCodeWorks":               "what docs/kafka.md shows",
	"TestB59NothingLeftSecured":             "TLS and SASL as the broker speaks them",
	"BenchmarkSubscribe":                    "figures",
	"BenchmarkPublish":                      "figures",
}

// mustBeListed fails a test that starts Apache Kafka and is not listed.
func mustBeListed(t testing.TB) {
	t.Helper()
	name, _, _ := strings.Cut(t.Name(), "/")
	if needReal[name] == "" {
		t.Fatalf("%s runs on Apache Kafka: name it in needReal", name)
	}
}

// startReal starts Apache Kafka, or fails.
func startReal(t testing.TB, cfg throwaway.KafkaConfig) *throwaway.Kafka {
	t.Helper()
	mustBeListed(t)
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
	return realRigOf(t, "")
}

// realRigOf is realRig on one of Kafka's lines; "" is the newest.
func realRigOf(t testing.TB, line string) *rig {
	t.Helper()
	k := startReal(t, throwaway.KafkaConfig{Version: line, Settings: map[string]string{"message.max.bytes": "100000"}})
	return &rig{t: t, brokers: k.Brokers, admin: newClient(t, k.Brokers)}
}

// shared is an Apache Kafka for tests that only use topics of their own.
var shared struct {
	once  sync.Once
	kafka *throwaway.Kafka
	err   error
}

func sharedRig(t testing.TB) *rig {
	t.Helper()
	mustBeListed(t)
	shared.once.Do(func() {
		shared.kafka, shared.err = throwaway.StartKafka(context.Background(), throwaway.KafkaConfig{
			RequireReal: true, Settings: map[string]string{"group.min.session.timeout.ms": "1000"},
		})
		if shared.err == nil {
			atEnd = append(atEnd, shared.kafka.Close)
		}
	})
	if shared.err != nil {
		t.Fatal(shared.err)
	}
	return &rig{t: t, brokers: shared.kafka.Brokers, admin: newClient(t, shared.kafka.Brokers)}
}

func TestConformanceApacheKafka(t *testing.T) {
	conformance(t, realRig(t))
}

func TestConformanceOlderKafka(t *testing.T) {
	conformance(t, realRigOf(t, "3.9"))
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
