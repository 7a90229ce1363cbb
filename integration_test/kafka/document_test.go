package kafka_test

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/segmentio/kafka-go/sasl"
	"github.com/segmentio/kafka-go/sasl/scram"

	"github.com/postroom/postroom/broker/kafka"
)

// What docs/kafka.md shows stands here, so that it compiles and is run.

func openWithCertificate(ctx context.Context, brokers []string, rootFile, certFile, keyFile string) (*kafka.Bus, error) {
	root, err := os.ReadFile(rootFile)
	if err != nil {
		return nil, err
	}
	roots := x509.NewCertPool()
	if !roots.AppendCertsFromPEM(root) {
		return nil, fmt.Errorf("%s holds no certificate", rootFile)
	}
	return kafka.Open(ctx, brokers, kafka.Config{TLS: &tls.Config{
		RootCAs:              roots, // leave it out for the system's
		GetClientCertificate: kafka.ClientCertificate(certFile, keyFile),
	}})
}

func openWithPassword(ctx context.Context, brokers []string, trust *tls.Config, user, passwordFile string) (*kafka.Bus, error) {
	return kafka.Open(ctx, brokers, kafka.Config{
		TLS: trust,
		SASL: func(context.Context) (sasl.Mechanism, error) {
			password, err := os.ReadFile(passwordFile)
			if err != nil {
				return nil, err
			}
			return scram.Mechanism(scram.SHA512, user, strings.TrimSpace(string(password)))
		},
	})
}

func TestDocumentShowsThisCode(t *testing.T) {
	t.Parallel()
	document, err := os.ReadFile("../../docs/kafka.md")
	if err != nil {
		t.Fatal(err)
	}
	code, err := os.ReadFile("document_test.go")
	if err != nil {
		t.Fatal(err)
	}
	blocks := regexp.MustCompile("(?s)```go\n(.*?)```").FindAllStringSubmatch(string(document), -1)
	if len(blocks) != 2 {
		t.Errorf("the document has %d Go blocks, want 2", len(blocks))
	}
	for _, b := range blocks {
		if !strings.Contains(string(code), b[1]) {
			t.Errorf("not in document_test.go:\n%s", b[1])
		}
	}
}

func TestDocumentedCodeWorks(t *testing.T) {
	t.Parallel()
	s := newSecured(t)
	s.topic("documented", 1)
	dir := t.TempDir()
	issue(t, s.ca, dir)
	path := func(name, content string) string {
		p := filepath.Join(dir, name)
		if err := os.WriteFile(p, []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
		return p
	}
	b, err := openWithCertificate(t.Context(), s.kafka.TLSBrokers, path("ca.crt", string(s.ca.PEM)),
		filepath.Join(dir, "tls.crt"), filepath.Join(dir, "tls.key"))
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = b.Close() }()
	store(t, b, messages("documented", "", 1, 1)...)
	c, err := openWithPassword(t.Context(), s.kafka.SASLTLSBrokers, s.tls(t, s.ca, s.ca), "alice", path("password", password+"\n"))
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = c.Close() }()
	store(t, c, messages("documented", "", 2, 2)...)
}
