package franz

import (
	"cmp"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"slices"
	"time"

	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/twmb/franz-go/pkg/sasl"
)

// Config adjusts a [Bus]. The zero value of each field selects the default that
// its comment names.
type Config struct {
	// TLS is used for every connection; it is cloned. Client certificates that
	// are renewed on disk go through its GetClientCertificate, which is asked
	// for each connection. Default: no TLS.
	TLS *tls.Config

	// SASL authenticates every connection. Its Authenticate is called for each,
	// so an implementation may hand out new credentials. Default: none.
	SASL sasl.Mechanism

	// Dial opens connections, without TLS. Default: a [net.Dialer].
	Dial func(ctx context.Context, network, address string) (net.Conn, error)

	// DialTimeout bounds opening a connection, TLS included, and each step of
	// authentication. Default 5s, at least 10ms.
	DialTimeout time.Duration

	// ClientID names this program in the brokers' logs and quotas. Default
	// "postroom".
	ClientID string

	// Compression of batches. Default none.
	Compression kgo.CompressionCodec

	// PublishTimeout bounds a Publish call, all its attempts included. Default
	// 10s, at least 10ms.
	PublishTimeout time.Duration

	// SessionTimeout is how long a member of a group may be silent before its
	// partitions are given to others. The brokers bound it, to 6s and 30m by
	// default. Default 10s, at least 100ms.
	SessionTimeout time.Duration

	// FetchBytes is the most bytes that a broker returns at a time, compressed,
	// and twice what it returns of one partition; one batch is always returned.
	// A subscription holds about as much for each of its partitions. Default
	// 4 MiB, at least 1 KiB.
	FetchBytes int

	// ReadUncommitted has messages delivered whose transaction is open or was
	// aborted.
	ReadUncommitted bool

	// Options are added to those of every client: a RecordPartitioner, hooks,
	// a logger, timeouts. What this package sets for its promises wins over
	// them. RequiredAcks other than all, DisableIdempotentWrite,
	// AllowAutoTopicCreation, TransactionalID and whatever chooses topics,
	// partitions or groups to consume are refused. A RecordPartitioner must
	// always give the same partition for the same key and number of partitions,
	// else the key has no order.
	//
	// Default: keys by murmur2 as Kafka's Java client does, messages without a
	// key in turns.
	Options []kgo.Opt

	// Logger receives warnings about limits that could not be read and messages
	// that were removed before they were delivered. Default slog.Default().
	Logger *slog.Logger
}

func (c Config) withDefaults(brokers []string) (Config, error) {
	c.DialTimeout = cmp.Or(c.DialTimeout, 5*time.Second)
	c.ClientID = cmp.Or(c.ClientID, "postroom")
	c.PublishTimeout = cmp.Or(c.PublishTimeout, 10*time.Second)
	c.SessionTimeout = cmp.Or(c.SessionTimeout, 10*time.Second)
	c.FetchBytes = cmp.Or(c.FetchBytes, 4<<20)
	c.Logger = cmp.Or(c.Logger, slog.Default())
	c.Options = slices.Clone(c.Options)
	if c.TLS != nil {
		c.TLS = c.TLS.Clone()
	}
	if c.Dial == nil {
		c.Dial = new(net.Dialer).DialContext
	}

	var errs []error
	bad := func(format string, args ...any) {
		errs = append(errs, fmt.Errorf("franz: "+format, args...))
	}
	if len(brokers) == 0 {
		bad("no broker is given")
	}
	if slices.Contains(brokers, "") {
		bad("a broker's address is empty")
	}
	for _, d := range []struct {
		name        string
		value, want time.Duration
	}{
		{"DialTimeout", c.DialTimeout, 10 * time.Millisecond},
		{"PublishTimeout", c.PublishTimeout, 10 * time.Millisecond},
		{"SessionTimeout", c.SessionTimeout, 100 * time.Millisecond},
	} {
		if d.value < d.want {
			bad("Config.%s is %v, want at least %v", d.name, d.value, d.want)
		}
	}
	if n := c.FetchBytes; n < 1<<10 || n > 1<<30 {
		bad("Config.FetchBytes is %d, want 1024 to %d", n, 1<<30)
	}
	for _, name := range c.unsafeOptions() {
		bad("Config.Options holds %s, which would break a promise", name)
	}
	return c, errors.Join(errs...)
}

// unsafeOptions names those of the options that would break a promise.
func (c Config) unsafeOptions() (names []string) {
	// What is refused is read back from a client, which connects to nothing.
	probe, err := kgo.NewClient(append(c.options(), kgo.SeedBrokers("127.0.0.1:9"))...)
	if err != nil {
		return []string{fmt.Sprintf("what does not fit together (%v)", err)}
	}
	defer probe.Close()
	for _, o := range []struct {
		name   string
		option any
		unsafe func(any) bool
	}{
		{"RequiredAcks", kgo.RequiredAcks, func(v any) bool { return v != kgo.AllISRAcks() }},
		{"DisableIdempotentWrite", kgo.DisableIdempotentWrite, isTrue},
		{"AllowIdempotentProduceCancellation", kgo.AllowIdempotentProduceCancellation, isTrue},
		{"AllowAutoTopicCreation", kgo.AllowAutoTopicCreation, isTrue},
		{"TransactionalID", kgo.TransactionalID, isGiven},
		{"ConsumerGroup", kgo.ConsumerGroup, isGiven},
		{"ConsumeTopics", kgo.ConsumeTopics, isGiven},
		{"ConsumePartitions", kgo.ConsumePartitions, isGiven},
		{"ConsumeRegex", kgo.ConsumeRegex, isTrue},
	} {
		if o.unsafe(probe.OptValue(o.option)) {
			names = append(names, o.name)
		}
	}
	return names
}

func isTrue(v any) bool { return v == true }

// isGiven tells a value from the zero one, whatever its type.
func isGiven(v any) bool {
	switch s := fmt.Sprint(v); s {
	case "", "<nil>", "[]", "map[]":
		return false
	}
	return true
}

// options returns what others may win over.
func (c Config) options() []kgo.Opt {
	return append([]kgo.Opt{
		kgo.MetadataMaxAge(metadataAge),
		kgo.MetadataMinAge(firstPause),
		kgo.RetryBackoffFn(pause),
		kgo.RequestRetries(maxTries),
		kgo.RequestTimeoutOverhead(max(c.DialTimeout, 100*time.Millisecond)),
		kgo.RecordPartitioner(partitioner{}),
		kgo.DisableClientMetrics(),
	}, c.Options...)
}

// client makes a client. The given options win over all others.
func (b *Bus) client(opts ...kgo.Opt) (*kgo.Client, error) {
	all := append(b.cfg.options(), kgo.SeedBrokers(b.brokers...), kgo.ClientID(b.cfg.ClientID), kgo.Dialer(b.dial))
	if b.cfg.SASL != nil {
		all = append(all, kgo.SASL(b.cfg.SASL))
	}
	return kgo.NewClient(append(all, opts...)...)
}

const (
	// metadataAge is how old the cluster's layout grows where nothing fails: how
	// long it takes to notice new partitions.
	metadataAge = 15 * time.Second

	firstPause = 50 * time.Millisecond
	lastPause  = time.Second

	// maxTries is how often a request is made, and a batch sent, until it has
	// failed: for about three seconds, unless the call's time is up before.
	maxTries = 8
)

// pause is how long to wait before the next attempt after some that failed. The
// clock's last digits spread those of many clients.
func pause(failed int) time.Duration {
	d := lastPause
	if failed < 6 {
		d = min(lastPause, firstPause<<max(failed-1, 0))
	}
	return d/2 + time.Duration(time.Now().UnixNano())%(d/2)
}

func (b *Bus) dial(ctx context.Context, network, address string) (net.Conn, error) {
	ctx, cancel := context.WithTimeout(ctx, b.cfg.DialTimeout)
	defer cancel()
	c, err := b.cfg.Dial(ctx, network, address)
	if err != nil || b.cfg.TLS == nil {
		return c, err
	}
	cfg := b.cfg.TLS
	if cfg.ServerName == "" {
		cfg = cfg.Clone()
		if cfg.ServerName, _, err = net.SplitHostPort(address); err != nil {
			_ = c.Close()
			return nil, err
		}
	}
	t := tls.Client(c, cfg)
	if err := t.HandshakeContext(ctx); err != nil {
		_ = c.Close()
		return nil, err
	}
	return t, nil
}
