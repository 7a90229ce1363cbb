package nats_test

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"math/big"
	"net"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats-server/v2/server"
	natsgo "github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
	"github.com/nats-io/nkeys"

	"github.com/postroom/postroom/broker"
	"github.com/postroom/postroom/broker/nats"
)

// An authority signs the certificates of one test.
type authority struct {
	t    *testing.T
	cert *x509.Certificate
	key  *ecdsa.PrivateKey
}

func newAuthority(t *testing.T) *authority {
	t.Helper()
	a := &authority{t: t}
	made := a.sign(&x509.Certificate{
		Subject: pkix.Name{CommonName: "root"}, IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign,
	})
	cert, err := x509.ParseCertificate(made.Certificate[0])
	if err != nil {
		t.Fatal(err)
	}
	a.cert, a.key = cert, made.PrivateKey.(*ecdsa.PrivateKey)
	return a
}

// sign makes a certificate, the first one of itself.
func (a *authority) sign(c *x509.Certificate) tls.Certificate {
	a.t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		a.t.Fatal(err)
	}
	c.SerialNumber, c.NotBefore, c.NotAfter = big.NewInt(time.Now().UnixNano()), time.Now().Add(-time.Hour), time.Now().Add(time.Hour)
	parent, signer := a.cert, a.key
	if parent == nil {
		parent, signer = c, key
	}
	der, err := x509.CreateCertificate(rand.Reader, c, parent, &key.PublicKey, signer)
	if err != nil {
		a.t.Fatal(err)
	}
	return tls.Certificate{Certificate: [][]byte{der}, PrivateKey: key}
}

func (a *authority) pool() *x509.CertPool {
	p := x509.NewCertPool()
	p.AddCert(a.cert)
	return p
}

// TLS with a client's certificate, and an nkey, go through nats.go's own options;
// whoever is not let in learns it from Open.
func TestSecure(t *testing.T) {
	t.Parallel()
	ca := newAuthority(t)
	user, err := nkeys.CreateUser()
	if err != nil {
		t.Fatal(err)
	}
	public, err := user.PublicKey()
	if err != nil {
		t.Fatal(err)
	}
	s, err := server.NewServer(&server.Options{
		Host: "127.0.0.1", Port: server.RANDOM_PORT, JetStream: true, StoreDir: t.TempDir(), NoSigs: true, NoLog: true,
		Nkeys: []*server.NkeyUser{{Nkey: public}},
		TLS:   true, TLSVerify: true, TLSTimeout: 10, AuthTimeout: 20,
		TLSConfig: &tls.Config{
			MinVersion: tls.VersionTLS12, ClientAuth: tls.RequireAndVerifyClientCert, ClientCAs: ca.pool(),
			Certificates: []tls.Certificate{ca.sign(&x509.Certificate{IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)}})},
		},
	})
	if err != nil {
		t.Fatal(err)
	}
	go s.Start()
	defer func() {
		s.Shutdown()
		s.WaitForShutdown()
	}()
	if !s.ReadyForConnections(time.Minute) {
		t.Fatal("the server does not start")
	}
	client := ca.sign(&x509.Certificate{
		Subject: pkix.Name{CommonName: "service"}, ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth},
	})
	secure := func(roots *x509.CertPool, certs []tls.Certificate, key string, pair nkeys.KeyPair) []natsgo.Option {
		return []natsgo.Option{
			natsgo.Timeout(20 * time.Second),
			natsgo.Secure(&tls.Config{MinVersion: tls.VersionTLS12, RootCAs: roots, Certificates: certs}),
			natsgo.Nkey(key, pair.Sign),
		}
	}
	with := []tls.Certificate{client}
	other, err := nkeys.CreateUser()
	if err != nil {
		t.Fatal(err)
	}
	otherPublic, err := other.PublicKey()
	if err != nil {
		t.Fatal(err)
	}
	for _, wrong := range []struct {
		name, want string
		options    []natsgo.Option
	}{
		{"an unknown root", "certificate", secure(newAuthority(t).pool(), with, public, user)},
		{"no client certificate", "certificate", secure(ca.pool(), nil, public, user)},
		{"another key", "Authorization", secure(ca.pool(), with, otherPublic, other)},
	} {
		c := config()
		c.Options = append(c.Options, wrong.options...)
		b, err := nats.Open(t.Context(), s.ClientURL(), c)
		if err == nil {
			_ = b.Close()
			t.Errorf("%s: Open lets it in", wrong.name)
		} else if !strings.Contains(strings.ToLower(err.Error()), strings.ToLower(wrong.want)) {
			t.Errorf("%s: Open = %v", wrong.name, err)
		}
	}

	options := secure(ca.pool(), with, public, user)
	nc, err := natsgo.Connect(s.ClientURL(), options...)
	if err != nil {
		t.Fatal(err)
	}
	defer nc.Close()
	js, err := jetstream.New(nc)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := js.CreateStream(t.Context(), jetstream.StreamConfig{Name: "orders", Subjects: []string{"orders"}}); err != nil {
		t.Fatal(err)
	}
	c := config()
	c.Options = append(c.Options, options...)
	b, err := nats.Open(t.Context(), s.ClientURL(), c)
	if err != nil {
		t.Fatal(err)
	}
	defer b.Close()
	for i, res := range b.Publish(t.Context(), messages("orders", "k", 1, 10)) {
		if res.Outcome != broker.Stored {
			t.Fatalf("message %d is %v: %v", i, res.Outcome, res.Err)
		}
	}
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	arrived := make(chan broker.Delivery, 10)
	ended := make(chan error, 1)
	go func() {
		ended <- b.Subscribe(ctx, broker.Subscription{Group: "billing", Topic: "orders", MaxInFlight: 10}, func(d broker.Delivery) { arrived <- d })
	}()
	var ids []string
	for range 10 {
		select {
		case d := <-arrived:
			ids = append(ids, d.Message().ID)
			if err := d.Ack(t.Context()); err != nil {
				t.Fatal(err)
			}
		case err := <-ended:
			t.Fatalf("Subscribe = %v", err)
		case <-time.After(time.Minute):
			t.Fatalf("only %q came", ids)
		}
	}
	if slices.Sort(ids); len(slices.Compact(ids)) != 10 {
		t.Errorf("messages %q", ids)
	}
	cancel()
	if err := <-ended; err != nil {
		t.Errorf("Subscribe = %v", err)
	}
}
