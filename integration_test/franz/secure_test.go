package franz_test

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"runtime"
	"sync/atomic"
	"testing"

	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/sasl/plain"

	"github.com/postroom/postroom/broker"
	"github.com/postroom/postroom/broker/franz"
	"github.com/postroom/postroom/internal/throwaway"
)

// Over TLS with certificates on both sides and a password: what is wrong with
// them fails Open, shows in results and in Trouble, refuses no message, and is
// over when new credentials are right. B59: publishers of that kind
// leave neither goroutines nor connections.
func TestSecureApacheKafka(t *testing.T) {
	ca, err := throwaway.NewCA()
	if err != nil {
		t.Fatal(err)
	}
	certificate, key, err := ca.Issue("broker")
	if err != nil {
		t.Fatal(err)
	}
	k, err := throwaway.StartKafka(t.Context(), throwaway.KafkaConfig{
		SASLUsers: map[string]string{"alice": "s3cret"},
		TLS:       &throwaway.KafkaTLS{Certificate: certificate, Key: key, ClientCAs: ca.PEM},
		Settings:  map[string]string{"group.min.session.timeout.ms": "1000"},
	})
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = k.Close() }()
	if err := k.CreateTopic(t.Context(), "t", 1, nil); err != nil {
		t.Fatal(err)
	}
	var password atomic.Value
	password.Store("s3cret")
	secure := func(c *franz.Config) {
		c.TLS = clientTLS(t, ca)
		c.SASL = plain.Plain(func(context.Context) (plain.Auth, error) {
			return plain.Auth{User: "alice", Pass: password.Load().(string)}, nil
		})
	}
	r := &rig{t: t, brokers: k.SASLTLSBrokers, admin: newClient(t, k.Brokers), real: k}
	gate := newGate(t)
	b := r.open(secure, func(c *franz.Config) { c.Dial = gate.dial })
	c := r.consume(1, secure)
	store(t, b, messages("t", "k", 0, 0)...)
	c.take(1)

	password.Store("wrong")
	wrong := config()
	secure(&wrong)
	if _, err := franz.Open(t.Context(), r.brokers, wrong); !errors.Is(err, kerr.SaslAuthenticationFailed) {
		t.Errorf("Open = %v, want the broker's verdict", err)
	}
	gate.cut()
	c.gate.cut()
	until(t, "the result is the broker's verdict", func() bool {
		results := b.Publish(t.Context(), messages("t", "k", 1, 2))
		wantOutcomes(t, results, broker.Unreachable, broker.NotTried)
		return errors.Is(results[0].Err, kerr.SaslAuthenticationFailed)
	})
	until(t, "Trouble is told of the password", func() bool {
		select {
		case err := <-c.trouble:
			return errors.Is(err, kerr.SaslAuthenticationFailed)
		default:
			return false
		}
	})
	password.Store("s3cret")
	store(t, b, messages("t", "k", 1, 2)...)
	c.take(2)
	c.stopped()

	before := runtime.NumGoroutine()
	for i := range 40 {
		cfg := config()
		secure(&cfg)
		cfg.Dial = gate.dial
		p, err := franz.Open(t.Context(), r.brokers, cfg)
		if err != nil {
			t.Fatal(err)
		}
		store(t, p, messages("t", fmt.Sprint(i), 0, 0)...)
		if err := p.Close(); err != nil {
			t.Fatal(err)
		}
	}
	if err := b.Close(); err != nil {
		t.Fatal(err)
	}
	until(t, "connections closed", func() bool { return gate.open() == 0 })
	until(t, "goroutines ended", func() bool { return runtime.NumGoroutine() <= before })
}

func clientTLS(t *testing.T, ca *throwaway.CA) *tls.Config {
	t.Helper()
	certificate, key, err := ca.Issue("client")
	if err != nil {
		t.Fatal(err)
	}
	pair, err := tls.X509KeyPair(certificate, key)
	if err != nil {
		t.Fatal(err)
	}
	pool := x509.NewCertPool()
	pool.AppendCertsFromPEM(ca.PEM)
	return &tls.Config{
		RootCAs:              pool,
		GetClientCertificate: func(*tls.CertificateRequestInfo) (*tls.Certificate, error) { return &pair, nil },
	}
}
