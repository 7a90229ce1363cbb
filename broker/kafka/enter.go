package kafka

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"strconv"
	"syscall"
	"time"

	kafkago "github.com/segmentio/kafka-go"
	"github.com/segmentio/kafka-go/protocol"
	"github.com/segmentio/kafka-go/protocol/apiversions"
	"github.com/segmentio/kafka-go/protocol/saslauthenticate"
	"github.com/segmentio/kafka-go/protocol/saslhandshake"
	"github.com/segmentio/kafka-go/sasl"
)

// ClientCertificate shows a client certificate that is renewed on disk: it reads
// both PEM files for every connection. Set it as GetClientCertificate of
// [Config.TLS].
func ClientCertificate(certFile, keyFile string) func(*tls.CertificateRequestInfo) (*tls.Certificate, error) {
	return func(*tls.CertificateRequestInfo) (*tls.Certificate, error) {
		pair, err := tls.LoadX509KeyPair(certFile, keyFile)
		if err != nil {
			return nil, fmt.Errorf("read the client certificate: %w", err)
		}
		return &pair, nil
	}
}

// enter makes a connection one that the broker takes requests on: it speaks TLS
// and SASL, by ctx's deadline, and has the broker answer once. The transport could
// do all that, but authenticates with no deadline, by one mechanism for all
// connections, and with errors that do not say what they are; and of several
// brokers it would stay with one that is silent.
func (cfg *Config) enter(ctx context.Context, c net.Conn, address string) (net.Conn, error) {
	stop := context.AfterFunc(ctx, func() { _ = c.SetDeadline(time.Unix(1, 0)) })
	entered, err := cfg.authenticate(ctx, c, address)
	if !stop() {
		err = context.Cause(ctx)
	}
	if err != nil {
		what := "connect to"
		if cfg.TLS != nil || cfg.SASL != nil {
			what = "authentication at"
		}
		return nil, fmt.Errorf("%s %s: %w", what, address, err)
	}
	return entered, nil
}

func (cfg *Config) authenticate(ctx context.Context, c net.Conn, address string) (net.Conn, error) {
	host, portText, err := net.SplitHostPort(address)
	if err != nil {
		return nil, err
	}
	port, err := strconv.Atoi(portText)
	if err != nil {
		return nil, err
	}
	if cfg.TLS == nil {
		err = cfg.ask(c)
	} else if c, err = cfg.handshake(ctx, c, host); err != nil {
		err = fmt.Errorf("TLS: %w", err)
	}
	if err != nil {
		return nil, err
	}
	if cfg.SASL != nil {
		ctx = sasl.WithMetadata(ctx, &sasl.Metadata{Host: host, Port: port})
		if err := cfg.authenticateSASL(ctx, c); err != nil {
			return nil, fmt.Errorf("SASL: %w", err)
		}
	}
	return c, nil
}

// handshake speaks TLS. A broker that does not like the client's certificate says
// so only after the handshake, when it is asked for something.
func (cfg *Config) handshake(ctx context.Context, c net.Conn, host string) (net.Conn, error) {
	settings := cfg.TLS
	if settings.ServerName == "" {
		settings = settings.Clone()
		settings.ServerName = host
	}
	secure := tls.Client(c, settings)
	if err := secure.HandshakeContext(ctx); err != nil {
		return nil, err
	}
	err := cfg.ask(secure)
	if hungUp(err) {
		err = fmt.Errorf("%w: the broker hung up, as it does on a client certificate that is missing or not to its liking", err)
	}
	return secure, err
}

// ask asks for what every broker tells everybody.
func (cfg *Config) ask(c net.Conn) error {
	_, err := protocol.NewConn(c, cfg.ClientID).RoundTrip(new(apiversions.Request))
	return err
}

func (cfg *Config) authenticateSASL(ctx context.Context, c net.Conn) error {
	mechanism, err := cfg.SASL(ctx)
	if err != nil {
		return fmt.Errorf("ask for credentials: %w", err)
	}
	pc := protocol.NewConn(c, cfg.ClientID)
	pc.SetVersions(map[protocol.ApiKey]int16{protocol.SaslHandshake: 1, protocol.SaslAuthenticate: 0})
	m, err := pc.RoundTrip(&saslhandshake.Request{Mechanism: mechanism.Name()})
	if err != nil {
		return err
	}
	if res := m.(*saslhandshake.Response); res.ErrorCode != 0 {
		return fmt.Errorf("%s, the broker knows %q: %w", mechanism.Name(), res.Mechanisms, kafkago.Error(res.ErrorCode))
	}
	session, token, err := mechanism.Start(ctx)
	for done := false; err == nil && !done; {
		if m, err = pc.RoundTrip(&saslauthenticate.Request{AuthBytes: token}); err != nil {
			break
		}
		res := m.(*saslauthenticate.Response)
		if res.ErrorCode != 0 {
			err = kafkago.Error(res.ErrorCode)
			break
		}
		done, token, err = session.Next(ctx, res.AuthBytes)
	}
	if err != nil {
		return fmt.Errorf("%s: %w", mechanism.Name(), err)
	}
	return nil
}

// hungUp reports whether the other side ended the connection.
func hungUp(err error) bool {
	return errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) ||
		errors.Is(err, syscall.ECONNRESET) || errors.Is(err, syscall.EPIPE)
}
