package throwaway_test

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"testing"
	"time"

	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/twmb/franz-go/pkg/sasl"
	"github.com/twmb/franz-go/pkg/sasl/plain"
	"github.com/twmb/franz-go/pkg/sasl/scram"

	"github.com/postroom/postroom/internal/throwaway"
)

var mechanisms = map[string]func(user, password string) sasl.Mechanism{
	"PLAIN": func(user, password string) sasl.Mechanism {
		return plain.Auth{User: user, Pass: password}.AsMechanism()
	},
	"SCRAM-SHA-256": func(user, password string) sasl.Mechanism {
		return scram.Auth{User: user, Pass: password}.AsSha256Mechanism()
	},
	"SCRAM-SHA-512": func(user, password string) sasl.Mechanism {
		return scram.Auth{User: user, Pass: password}.AsSha512Mechanism()
	},
}

func TestKafkaSecureListeners(t *testing.T) {
	ca, err := throwaway.NewCA()
	must(t, err)
	stranger, err := throwaway.NewCA()
	must(t, err)
	certificate, key, err := ca.Issue("broker")
	must(t, err)
	k := startKafka(t, throwaway.KafkaConfig{
		SASLUsers: map[string]string{"alice": "s3cret/+$", "bob": "other"},
		TLS:       &throwaway.KafkaTLS{Certificate: certificate, Key: key, ClientCAs: ca.PEM},
	})
	must(t, k.CreateTopic(t.Context(), "t", 1, nil))

	check := func(name string, want bool, brokers []string, opts ...kgo.Opt) {
		t.Helper()
		client := kafkaClient(t, brokers, opts...)
		limit := time.Minute
		if !want {
			limit = 5 * time.Second // franz-go tries again and again
		}
		err := ping(t, client, limit)
		if (err == nil) != want || errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("%s: %v, want taken %v", name, err, want)
		}
	}
	mutual := kgo.DialTLSConfig(tlsConfig(t, ca, ca))
	for name, mechanism := range mechanisms {
		check(name, true, k.SASLBrokers, kgo.SASL(mechanism("alice", "s3cret/+$")))
		check(name+" of bob", true, k.SASLBrokers, kgo.SASL(mechanism("bob", "other")))
		check(name+", wrong password", false, k.SASLBrokers, kgo.SASL(mechanism("alice", "other")), kgo.RequestRetries(0))
		check(name+" over TLS", true, k.SASLTLSBrokers, mutual, kgo.SASL(mechanism("alice", "s3cret/+$")))
		check(name+" over TLS, wrong user", false, k.SASLTLSBrokers, mutual, kgo.SASL(mechanism("eve", "other")), kgo.RequestRetries(0))
	}
	check("SASL, no credentials", false, k.SASLBrokers, kgo.RequestRetries(0))
	check("TLS", true, k.TLSBrokers, mutual)
	check("TLS, no client certificate", false, k.TLSBrokers, kgo.DialTLSConfig(tlsConfig(t, ca, nil)), kgo.RequestRetries(0))
	check("TLS, a stranger's client certificate", false, k.TLSBrokers, kgo.DialTLSConfig(tlsConfig(t, ca, stranger)), kgo.RequestRetries(0))
	check("TLS, another root", false, k.TLSBrokers, kgo.DialTLSConfig(tlsConfig(t, stranger, ca)), kgo.RequestRetries(0))
	check("TLS, plain", false, k.TLSBrokers, kgo.RequestRetries(0))

	client := kafkaClient(t, k.TLSBrokers, mutual, kgo.DefaultProduceTopic("t"))
	must(t, client.ProduceSync(t.Context(), kgo.StringRecord("a")).FirstErr())
	wantValues(t, k.Brokers, "t", "a")
	must(t, k.Restart(t.Context()))
	check("SCRAM after a restart", true, k.SASLBrokers, kgo.SASL(mechanisms["SCRAM-SHA-256"]("alice", "s3cret/+$")))
}

// tlsConfig trusts root and shows a certificate of client, if that is given.
func tlsConfig(t *testing.T, root, client *throwaway.CA) *tls.Config {
	t.Helper()
	pool := x509.NewCertPool()
	pool.AppendCertsFromPEM(root.PEM)
	cfg := &tls.Config{RootCAs: pool}
	if client != nil {
		certificate, key, err := client.Issue("client")
		must(t, err)
		pair, err := tls.X509KeyPair(certificate, key)
		must(t, err)
		// Not Certificates: of those the client shows none that the server
		// did not ask for.
		cfg.GetClientCertificate = func(*tls.CertificateRequestInfo) (*tls.Certificate, error) { return &pair, nil }
	}
	return cfg
}
