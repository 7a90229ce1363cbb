package kafka_test

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/segmentio/kafka-go/sasl"
	"github.com/segmentio/kafka-go/sasl/plain"
	"github.com/segmentio/kafka-go/sasl/scram"
	"github.com/twmb/franz-go/pkg/kadm"

	"github.com/postroom/postroom/broker"
	"github.com/postroom/postroom/broker/kafka"
	"github.com/postroom/postroom/internal/throwaway"
)

// The passwords stand here, so that errors can be searched for them.
const (
	password = "s3cret/Zw1ngli"
	renewed  = "renewed/Zw1ngli"
	wrong    = "wr0ng/Zw1ngli"
)

// A secured is Apache Kafka with listeners that want TLS, SASL or both. Clients
// must show a certificate where TLS is spoken. Its tests share it: each has topics
// of its own.
type secured struct {
	*rig
	kafka        *throwaway.Kafka
	ca, stranger *throwaway.CA
}

// sharedSecured starts the server once for this process: it takes its time.
var sharedSecured = sync.OnceValues(func() (*secured, error) {
	s := &secured{}
	var err error
	if s.ca, err = throwaway.NewCA(); err != nil {
		return nil, err
	}
	if s.stranger, err = throwaway.NewCA(); err != nil {
		return nil, err
	}
	certificate, key, err := s.ca.Issue("broker")
	if err != nil {
		return nil, err
	}
	s.kafka, err = throwaway.StartKafka(context.Background(), throwaway.KafkaConfig{
		RequireReal: true,
		SASLUsers:   map[string]string{"alice": password, "bob": password},
		TLS:         &throwaway.KafkaTLS{Certificate: certificate, Key: key, ClientCAs: s.ca.PEM},
		Settings: map[string]string{
			// Topics with permissions of their own ask for them.
			"authorizer.class.name":          "org.apache.kafka.metadata.authorizer.StandardAuthorizer",
			"super.users":                    "User:ANONYMOUS",
			"allow.everyone.if.no.acl.found": "true",
			"message.max.bytes":              "3000000",
			"listener.name.both.scram-sha-256.connections.max.reauth.ms": fmt.Sprint(session.Milliseconds()),
		},
	})
	if err != nil {
		return nil, err
	}
	atEnd = append(atEnd, s.kafka.Close)
	return s, nil
})

// session is how long one lasts that is begun by SCRAM-SHA-256 over TLS.
const session = 700 * time.Millisecond

func newSecured(t testing.TB) *secured {
	t.Helper()
	mustBeListed(t)
	s, err := sharedSecured()
	if err != nil {
		t.Fatal(err)
	}
	t.Log(s.kafka.Source)
	mine := *s
	mine.rig = &rig{t: t, brokers: s.kafka.Brokers, admin: newClient(t, s.kafka.Brokers)}
	return &mine
}

// tls trusts the brokers' root, and shows a certificate of ca unless that is nil.
func (s *secured) tls(t testing.TB, root, ca *throwaway.CA) *tls.Config {
	t.Helper()
	cfg := &tls.Config{RootCAs: x509.NewCertPool()}
	cfg.RootCAs.AppendCertsFromPEM(root.PEM)
	if ca != nil {
		dir := t.TempDir()
		issue(t, ca, dir)
		cfg.GetClientCertificate = kafka.ClientCertificate(filepath.Join(dir, "tls.crt"), filepath.Join(dir, "tls.key"))
	}
	return cfg
}

// issue puts a new client certificate into a directory.
func issue(t testing.TB, ca *throwaway.CA, dir string) {
	t.Helper()
	certificate, key, err := ca.Issue("client")
	if err == nil {
		err = errors.Join(os.WriteFile(filepath.Join(dir, "tls.crt"), certificate, 0o600),
			os.WriteFile(filepath.Join(dir, "tls.key"), key, 0o600))
	}
	if err != nil {
		t.Fatal(err)
	}
}

// setPassword changes bob's password for SCRAM.
func (s *secured) setPassword(t testing.TB, to string) {
	t.Helper()
	for _, m := range []kadm.ScramMechanism{kadm.ScramSha256, kadm.ScramSha512} {
		user := []kadm.UpsertSCRAM{{User: "bob", Mechanism: m, Iterations: 4096, Password: to}}
		res, err := kadm.NewClient(s.admin).AlterUserSCRAMs(t.Context(), nil, user)
		if err = errors.Join(err, res.Error()); err != nil {
			t.Fatal(err)
		}
	}
}

type credentials = func(context.Context) (sasl.Mechanism, error)

func plainText(pass string) credentials {
	return func(context.Context) (sasl.Mechanism, error) {
		return plain.Mechanism{Username: "alice", Password: pass}, nil
	}
}

func scrambled(algo scram.Algorithm, pass string) credentials {
	return func(context.Context) (sasl.Mechanism, error) { return scram.Mechanism(algo, "alice", pass) }
}

// Who has what a listener wants gets in and publishes, and who has not is told
// so by Open, in a time that DialTimeout bounds, with no secret in the text.
func TestSecureListeners(t *testing.T) {
	t.Parallel()
	s := newSecured(t)
	s.topic("listeners", 1)
	k := s.kafka
	mutual := func(t testing.TB) *tls.Config { return s.tls(t, s.ca, s.ca) }
	for _, tt := range []struct {
		name    string
		brokers []string
		tls     func(testing.TB) *tls.Config
		sasl    credentials
		want    string // of the error; empty: gets in
	}{
		{"TLS", k.TLSBrokers, mutual, nil, ""},
		{"PLAIN", k.SASLBrokers, nil, plainText(password), ""},
		{"SCRAM-SHA-256", k.SASLBrokers, nil, scrambled(scram.SHA256, password), ""},
		{"SCRAM-SHA-512", k.SASLBrokers, nil, scrambled(scram.SHA512, password), ""},
		{"PLAIN over TLS", k.SASLTLSBrokers, mutual, plainText(password), ""},
		{"SCRAM-SHA-256 over TLS", k.SASLTLSBrokers, mutual, scrambled(scram.SHA256, password), ""},
		{"SCRAM-SHA-512 over TLS", k.SASLTLSBrokers, mutual, scrambled(scram.SHA512, password), ""},

		{"PLAIN, wrong password", k.SASLBrokers, nil, plainText(wrong), "SASL: PLAIN: [58]"},
		{"SCRAM-SHA-256, wrong password", k.SASLBrokers, nil, scrambled(scram.SHA256, wrong), "SASL: SCRAM-SHA-256: [58]"},
		{"SCRAM-SHA-512 over TLS, wrong password", k.SASLTLSBrokers, mutual, scrambled(scram.SHA512, wrong), "SASL: SCRAM-SHA-512: [58]"},
		{"unknown mechanism", k.SASLBrokers, nil, func(context.Context) (sasl.Mechanism, error) { return unknown{}, nil }, "SASL: UNKNOWN, the broker knows"},
		{"no credentials to be had", k.SASLBrokers, nil, func(context.Context) (sasl.Mechanism, error) { return nil, errVault }, errVault.Error()},
		{"unknown root", k.TLSBrokers, func(t testing.TB) *tls.Config { return s.tls(t, s.stranger, s.ca) }, nil, "TLS: tls: failed to verify certificate"},
		{"no client certificate", k.TLSBrokers, func(t testing.TB) *tls.Config { return s.tls(t, s.ca, nil) }, nil, "TLS: "},
		{"a stranger's client certificate", k.TLSBrokers, func(t testing.TB) *tls.Config { return s.tls(t, s.ca, s.stranger) }, nil, "TLS: "},
		{"no client certificate, with SASL", k.SASLTLSBrokers, func(t testing.TB) *tls.Config { return s.tls(t, s.ca, nil) }, plainText(password), "TLS: "},
		{"no SASL", k.SASLBrokers, nil, nil, "expects TLS or SASL"},
		{"no TLS", k.TLSBrokers, nil, nil, "expects TLS or SASL"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			c := config()
			c.SASL = tt.sasl
			if tt.tls != nil {
				c.TLS = tt.tls(t)
			}
			begun := time.Now()
			b, err := kafka.Open(t.Context(), tt.brokers, c)
			if err == nil {
				defer func() { _ = b.Close() }()
			}
			if tt.want == "" {
				if err != nil {
					t.Fatal(err)
				}
				store(t, b, messages("listeners", "", 1, 1)...)
				return
			}
			wantAuthError(t, err, tt.want)
			if took := time.Since(begun); took > 2*c.DialTimeout+time.Second {
				t.Errorf("Open took %v", took)
			}
		})
	}
}

var errVault = errors.New("the vault is sealed")

type unknown struct{ plain.Mechanism }

func (unknown) Name() string { return "UNKNOWN" }

// wantAuthError wants an error that says what is wrong with the credentials, and
// neither blames a topic nor holds a password.
func wantAuthError(t testing.TB, err error, want string) {
	t.Helper()
	if err == nil || !strings.Contains(err.Error(), want) {
		t.Fatalf("error %v, want it to say %q", err, want)
	}
	if strings.Contains(err.Error(), "Zw1ngli") || strings.Contains(strings.ToLower(err.Error()), "topic") {
		t.Errorf("error %q holds a password or speaks of a topic", err)
	}
}

// wantLockedOut publishes, from several goroutines, by a bus that is not let in,
// and checks that no message is blamed for it.
func wantLockedOut(t testing.TB, b *kafka.Bus, topic, want string) {
	t.Helper()
	var wg sync.WaitGroup
	all := make([][]broker.Result, 12)
	for i := range 4 {
		wg.Go(func() {
			for j := range 3 {
				all[3*i+j] = b.Publish(t.Context(), messages(topic, fmt.Sprint("locked out", i), 0, 1))
			}
		})
	}
	wg.Wait()
	for _, results := range all {
		wantOutcomes(t, results, broker.Unreachable, broker.NotTried)
		wantAuthError(t, results[0].Err, want)
	}
}

// B63: a password that is changed on the brokers while we publish is asked for
// again on the next connection. In between results say what is wrong, and blame
// no message.
func TestB63PasswordRotates(t *testing.T) {
	t.Parallel()
	s := newSecured(t)
	s.topic("rotates", 3)
	for _, algo := range []scram.Algorithm{scram.SHA256, scram.SHA512} {
		t.Run(algo.Name(), func(t *testing.T) {
			s.setPassword(t, password)
			var current atomic.Value
			current.Store(password)
			gate := newGate(t)
			c := config()
			c.Dial = gate.dial
			c.SASL = func(context.Context) (sasl.Mechanism, error) {
				return scram.Mechanism(algo, "bob", current.Load().(string))
			}
			until(t, "the password is known to the brokers", func() bool {
				b, err := kafka.Open(t.Context(), s.kafka.SASLBrokers, c)
				if err == nil {
					err = b.Close()
				}
				return err == nil
			})
			b, err := kafka.Open(t.Context(), s.kafka.SASLBrokers, c)
			if err != nil {
				t.Fatal(err)
			}
			defer func() { _ = b.Close() }()
			store(t, b, messages("rotates", "k", 0, 10)...)

			s.setPassword(t, renewed)
			until(t, "the old password does not work", func() bool {
				gate.cut()
				return b.Publish(t.Context(), messages("rotates", "k", 1000, 1000))[0].Outcome != broker.Stored
			})
			wantLockedOut(t, b, "rotates", "SASL: "+algo.Name()+": [58]")
			current.Store(renewed)
			store(t, b, messages("rotates", "k", 21, 30)...)
			gate.cut()
			store(t, b, messages("rotates", "k", 31, 40)...)
		})
	}
}

// B63: connections that a broker ends because their session is over cost no
// message; the new ones ask for credentials again.
func TestB63SessionsEnd(t *testing.T) {
	t.Parallel()
	s := newSecured(t)
	s.topic("sessions", 3)
	var asked atomic.Int32
	c := config()
	c.TLS = s.tls(t, s.ca, s.ca)
	c.SASL = func(context.Context) (sasl.Mechanism, error) {
		asked.Add(1)
		return scram.Mechanism(scram.SHA256, "alice", password)
	}
	b, err := kafka.Open(t.Context(), s.kafka.SASLTLSBrokers, c)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = b.Close() }()
	until(t, "sessions have ended", func() bool {
		store(t, b, messages("sessions", "k", 0, 0)...)
		return asked.Load() >= 8
	})
}

// B63: a client certificate that is renewed on disk is used by the next
// connection.
func TestB63CertificateRenewed(t *testing.T) {
	t.Parallel()
	s := newSecured(t)
	s.topic("renewed", 3)
	dir := t.TempDir()
	issue(t, s.ca, dir)
	gate := newGate(t)
	c := config()
	c.Dial = gate.dial
	c.TLS = s.tls(t, s.ca, nil)
	c.TLS.GetClientCertificate = kafka.ClientCertificate(filepath.Join(dir, "tls.crt"), filepath.Join(dir, "tls.key"))
	b, err := kafka.Open(t.Context(), s.kafka.TLSBrokers, c)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = b.Close() }()
	store(t, b, messages("renewed", "k", 0, 10)...)

	issue(t, s.stranger, dir)
	gate.cut()
	wantLockedOut(t, b, "renewed", "TLS: ")
	if err := os.Remove(filepath.Join(dir, "tls.key")); err != nil {
		t.Fatal(err)
	}
	wantLockedOut(t, b, "renewed", "TLS: read the client certificate: ")
	issue(t, s.ca, dir)
	store(t, b, messages("renewed", "k", 21, 30)...)
}

// A broker that falls silent in the middle of a handshake is given up after
// DialTimeout, at Open and while running, and is found again.
func TestStalledHandshake(t *testing.T) {
	t.Parallel()
	s := newSecured(t)
	s.topic("stalled", 3)
	for _, tt := range []struct {
		name    string
		brokers []string
		tls     *tls.Config
		sasl    credentials
	}{
		{"SASL", s.kafka.SASLBrokers, nil, scrambled(scram.SHA512, password)},
		{"TLS", s.kafka.TLSBrokers, s.tls(t, s.ca, s.ca), nil},
		{"both", s.kafka.SASLTLSBrokers, s.tls(t, s.ca, s.ca), plainText(password)},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			gate := newGate(t)
			c := config()
			c.Dial, c.TLS, c.SASL, c.DialTimeout = gate.dial, tt.tls, tt.sasl, 300*time.Millisecond
			gate.shut(true)
			begun := time.Now()
			_, err := kafka.Open(t.Context(), tt.brokers, c)
			wantAuthError(t, err, "authentication at "+tt.brokers[0])
			if took := time.Since(begun); took > 3*time.Second {
				t.Errorf("Open took %v", took)
			}
			gate.shut(false)
			c.DialTimeout = 2 * time.Second
			b, err := kafka.Open(t.Context(), tt.brokers, c)
			if err != nil {
				t.Fatal(err)
			}
			defer func() { _ = b.Close() }()
			store(t, b, messages("stalled", tt.name, 0, 10)...)
			gate.shut(true)
			gate.cut()
			begun = time.Now()
			results := b.Publish(t.Context(), messages("stalled", tt.name, 11, 12))
			wantOutcomes(t, results, broker.Unreachable, broker.NotTried)
			if took := time.Since(begun); took > c.PublishTimeout+2*c.DialTimeout {
				t.Errorf("Publish took %v", took)
			}
			gate.shut(false)
			until(t, "the brokers are found again", func() bool {
				return b.Publish(t.Context(), messages("stalled", tt.name, 11, 20))[9].Outcome == broker.Stored
			})
			until(t, "the connections that stalled are closed", func() bool { return gate.open() <= 6 })
		})
	}
}

// B59: two hundred publishers over TLS and SASL, and as many that are not let in,
// leave neither connections nor, as TestMain sees, goroutines.
func TestB59NothingLeftSecured(t *testing.T) {
	t.Parallel()
	s := newSecured(t)
	s.topic("left", 1)
	gate := newGate(t)
	c := config()
	c.Dial, c.TLS = gate.dial, s.tls(t, s.ca, s.ca)
	for i := range 200 {
		c.SASL = plainText(password)
		b, err := kafka.Open(t.Context(), s.kafka.SASLTLSBrokers, c)
		if err != nil {
			t.Fatal(err)
		}
		if i%20 == 0 {
			store(t, b, messages("left", "", i+1, i+1)...)
		}
		if err := b.Close(); err != nil {
			t.Fatal(err)
		}
		// A broker that says no takes its time for that, so the credentials fail here.
		c.SASL = func(context.Context) (sasl.Mechanism, error) { return nil, errVault }
		if _, err := kafka.Open(t.Context(), s.kafka.SASLTLSBrokers, c); !errors.Is(err, errVault) {
			t.Fatal(err)
		}
	}
	until(t, "connections closed", func() bool { return gate.open() == 0 })
}
