package kafka_test

import (
	"errors"
	"strings"
	"testing"

	"github.com/segmentio/kafka-go/sasl/scram"
	"github.com/twmb/franz-go/pkg/kadm"

	"github.com/postroom/postroom/broker"
	"github.com/postroom/postroom/broker/kafka"
)

// B49: of a call over three topics, of which one may not be written and one is
// not there, the messages of the third are stored once. What may not be written
// is no message's fault, and is stored when it may.
func TestB49WithoutPermission(t *testing.T) {
	t.Parallel()
	s := newSecured(t)
	grant := func(acls *kadm.ACLBuilder) {
		t.Helper()
		res, err := kadm.NewClient(s.admin).CreateACLs(t.Context(), acls)
		for _, r := range res {
			err = errors.Join(err, r.Err)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	allow := func(who, topic string, operations ...kadm.ACLOperation) {
		t.Helper()
		grant(kadm.NewACLs().Topics(topic).Operations(operations...).Allow("User:" + who).AllowHosts("*").ResourcePatternType(kadm.ACLPatternLiteral))
	}
	// What is granted to one on the cluster is denied to the others.
	grant(kadm.NewACLs().Clusters().Operations(kadm.OpCreate).Allow("User:nobody").AllowHosts("*").ResourcePatternType(kadm.ACLPatternLiteral))
	for _, topic := range []string{"good", "seen", "hidden"} {
		s.topic(topic, 3)
	}
	allow("alice", "good", kadm.OpWrite, kadm.OpDescribe)
	allow("alice", "seen", kadm.OpDescribe)
	allow("bob", "hidden", kadm.OpAll)
	c := config()
	c.SASL = scrambled(scram.SHA512, password)
	b, err := kafka.Open(t.Context(), s.kafka.SASLBrokers, c)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = b.Close() }()
	until(t, "the permissions are known to the broker", func() bool {
		return b.Publish(t.Context(), messages("good", "", 0, 0))[0].Outcome == broker.Stored
	})

	// Nobody allowed alice to read the topic's limit, so this is the broker's to decide.
	large := messages("good", "large", 0, 1)
	large[0].Payload, large[1].Payload = make([]byte, 2_000_000), make([]byte, 4_000_000)
	wantOutcomes(t, b.Publish(t.Context(), large), broker.Stored, broker.Refused)

	msgs := append(append(messages("good", "k", 0, 1), messages("seen", "k", 0, 1)...), messages("hidden", "k", 0, 1)...)
	results := b.Publish(t.Context(), msgs)
	wantOutcomes(t, results, broker.Stored, broker.Stored, broker.Unreachable, broker.NotTried, broker.Unreachable, broker.NotTried)
	if r := results[2]; !strings.HasPrefix(r.Scope, "seen/") || !strings.Contains(r.Err.Error(), "[29]") {
		t.Errorf("scope %q, error %v, want the partition and code 29", r.Scope, r.Err)
	}
	if r := results[4]; r.Scope != "hidden" || r.Err == nil {
		t.Errorf("scope %q, error %v, want the topic", r.Scope, r.Err)
	}
	allow("alice", "seen", kadm.OpWrite)
	allow("alice", "hidden", kadm.OpWrite, kadm.OpDescribe)
	until(t, "what is permitted now is stored", func() bool {
		for _, r := range b.Publish(t.Context(), msgs[2:]) {
			if r.Outcome != broker.Stored {
				return false
			}
		}
		return true
	})
	stored := 0
	for _, id := range recordIDs(s.read("good", 4)) {
		if strings.HasPrefix(id, "k-") {
			stored++
		}
	}
	if stored != 2 {
		t.Errorf("topic good holds %d of the call's two messages", stored)
	}
}
