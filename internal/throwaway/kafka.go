package throwaway

import (
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"regexp"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/twmb/franz-go/pkg/kmsg"
	"github.com/twmb/franz-go/pkg/kversion"
)

// KafkaConfig says which Kafka [StartKafka] starts. The zero value is the newest
// Apache Kafka that is known here, or a stand-in where that cannot be had.
type KafkaConfig struct {
	// Brokers are the addresses of a running Kafka, which is then used and left
	// alone. Default: start one.
	Brokers []string

	// Version is the line to start, "4.4" or "3.9". Default: the newest.
	Version string

	// Fake has kfake started, which runs in this process, answers at once, and
	// can be told to fail; see [Kafka.Cluster]. Default: only where Apache Kafka
	// cannot be had, which needs Java and, until it was fetched once, Maven.
	Fake bool

	// RequireReal makes it an error that Apache Kafka cannot be had. Default:
	// kfake is started in its place.
	RequireReal bool

	// Settings are added to, and win over, those of server.properties. kfake
	// heeds those few that it knows.
	Settings map[string]string

	// SASLUsers maps names to passwords of a listener that wants one of them, by
	// PLAIN, SCRAM-SHA-256 or SCRAM-SHA-512. It implies RequireReal. Default: no
	// such listener.
	SASLUsers map[string]string

	// TLS describes a listener with TLS. It implies RequireReal. Default: no such
	// listener.
	TLS *KafkaTLS

	// Log receives what the server and Maven print, the server's notes included.
	// Default: nowhere, and warnings only; the end of it is in the error of a
	// server that does not come up.
	Log io.Writer
}

// KafkaTLS describes a listener with TLS. All texts are PEM.
type KafkaTLS struct {
	Certificate []byte // the server's, and those between it and the root
	Key         []byte // of the certificate, as PKCS #8
	ClientCAs   []byte // of the certificates that clients must show; default: they need none
}

// A Kafka is a running cluster: one node of Apache Kafka, or three of kfake. Its
// methods may be called from several goroutines.
type Kafka struct {
	Brokers        []string // of the listener that takes everyone
	SASLBrokers    []string // where KafkaConfig.SASLUsers is given
	TLSBrokers     []string // where KafkaConfig.TLS is given
	SASLTLSBrokers []string // where both are

	Version string // "4.4.0"; a guess where the brokers were given
	Source  string // what was chosen, and why where it is a stand-in
	Real    bool   // not kfake

	server kafkaServer // nil where the brokers were given

	mu      sync.Mutex
	running bool
	closed  bool
	admin   *kgo.Client
}

// A kafkaServer is what a Kafka of ours runs on.
type kafkaServer interface {
	start(ctx context.Context) error
	stop(ctx context.Context) error // in order
	kill(ctx context.Context) error // at once
	pause() error
	resume() error
	close() error
}

// StartKafka starts a Kafka, or finds one, and returns when it answers. ctx
// bounds the start only.
func StartKafka(ctx context.Context, cfg KafkaConfig) (*Kafka, error) {
	k, err := startKafka(ctx, cfg)
	if err != nil {
		return nil, fmt.Errorf("throwaway: start Kafka: %w", err)
	}
	return k, nil
}

func startKafka(ctx context.Context, cfg KafkaConfig) (*Kafka, error) {
	release, err := cfg.check()
	if err != nil {
		return nil, err
	}
	if len(cfg.Brokers) > 0 {
		return givenKafka(ctx, cfg.Brokers)
	}
	if cfg.Fake {
		return startFakeKafka(ctx, cfg, release, "as asked")
	}
	files, err := findKafka(ctx, release, cfg.Log)
	switch {
	case err == nil:
		return startRealKafka(ctx, cfg, files)
	case ctx.Err() != nil:
		return nil, err
	case cfg.RequireReal || cfg.SASLUsers != nil || cfg.TLS != nil:
		return nil, fmt.Errorf("a real Kafka is required: %w: or give the brokers of a running one", err)
	default:
		return startFakeKafka(ctx, cfg, release, err.Error())
	}
}

// What stands unquoted in the settings of SCRAM and PLAIN.
var (
	saslName     = regexp.MustCompile(`^[A-Za-z0-9_-]+$`)
	saslPassword = regexp.MustCompile(`^[A-Za-z0-9_.~!@#$%^&*+:;/?-]+$`)
)

// check reports all that is wrong at once.
func (cfg KafkaConfig) check() (kafkaRelease, error) {
	release, ok := kafkaReleases[cfg.Version]
	var errs []error
	if !ok {
		known := slices.DeleteFunc(slices.Sorted(maps.Keys(kafkaReleases)), func(s string) bool { return s == "" })
		errs = append(errs, fmt.Errorf("KafkaConfig.Version is %q, want one of %s, or nothing for the newest",
			cfg.Version, strings.Join(known, ", ")))
	}
	secure := cfg.SASLUsers != nil || cfg.TLS != nil
	if cfg.Fake && (cfg.RequireReal || secure) {
		errs = append(errs, errors.New("KafkaConfig.Fake excludes RequireReal, SASLUsers and TLS"))
	}
	if len(cfg.Brokers) > 0 && (cfg.Fake || secure || cfg.Version != "" || cfg.Settings != nil) {
		errs = append(errs, errors.New("KafkaConfig.Brokers excludes Version, Fake, Settings, SASLUsers and TLS"))
	}
	for name, password := range cfg.SASLUsers {
		if !saslName.MatchString(name) || !saslPassword.MatchString(password) {
			errs = append(errs, fmt.Errorf("KafkaConfig.SASLUsers: %q does not match %v, or its password %v", name, saslName, saslPassword))
		}
	}
	if cfg.TLS != nil && (len(cfg.TLS.Certificate) == 0 || len(cfg.TLS.Key) == 0) {
		errs = append(errs, errors.New("KafkaConfig.TLS lacks Certificate or Key"))
	}
	return release, errors.Join(errs...)
}

// givenKafka gives up after ten seconds: nobody is starting those brokers.
func givenKafka(ctx context.Context, brokers []string) (*Kafka, error) {
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	version, err := kafkaAnswers(ctx, brokers, func() error { return nil })
	if err != nil {
		return nil, fmt.Errorf("KafkaConfig.Brokers %s: %w", strings.Join(brokers, ","), err)
	}
	return &Kafka{
		Brokers: slices.Clone(brokers),
		Version: version,
		Source:  fmt.Sprintf("Kafka %s as given, at %s", version, strings.Join(brokers, ",")),
		Real:    true,
		running: true,
	}, nil
}

// kafkaAnswers waits until the brokers tell their versions and every partition
// has a leader. It returns a guess at the version, and ends with the error of
// alive.
func kafkaAnswers(ctx context.Context, brokers []string, alive func() error) (version string, err error) {
	client, err := kgo.NewClient(kgo.SeedBrokers(brokers...))
	if err != nil {
		return "", err
	}
	defer client.Close()
	var last error
	err = poll(ctx, "Kafka to answer", func() (bool, error) {
		if err := alive(); err != nil {
			return false, err
		}
		version, last = askKafka(ctx, client)
		return last == nil, nil
	})
	if err != nil && last != nil {
		return "", fmt.Errorf("%w: %w", err, last)
	}
	return version, err
}

// askKafka makes one attempt.
func askKafka(ctx context.Context, client *kgo.Client) (version string, err error) {
	ctx, cancel := context.WithTimeout(ctx, 2*time.Second)
	defer cancel()
	broker := client.SeedBrokers()[0]
	ask := kmsg.NewPtrApiVersionsRequest()
	ask.ClientSoftwareName, ask.ClientSoftwareVersion = "throwaway", "1" // without these it is refused
	versions, err := ask.RequestWith(ctx, broker)
	if err == nil {
		err = kerr.ErrorForCode(versions.ErrorCode)
	}
	if err != nil {
		return "", err
	}
	everything := kmsg.NewPtrMetadataRequest()
	everything.Topics = nil
	metadata, err := everything.RequestWith(ctx, broker)
	if err != nil {
		return "", err
	}
	if len(metadata.Brokers) == 0 {
		return "", errors.New("no broker has joined the cluster")
	}
	for _, topic := range metadata.Topics {
		for _, p := range topic.Partitions {
			if p.Leader < 0 && topic.Topic != nil {
				return "", fmt.Errorf("partition %d of %s has no leader", p.Partition, *topic.Topic)
			}
		}
	}
	return strings.TrimPrefix(kversion.FromApiVersionsResponse(versions).VersionGuess(), "v"), nil
}

// Start starts a stopped or killed cluster at the same addresses, with its data.
func (k *Kafka) Start(ctx context.Context) error {
	return k.change("start", func() error {
		if k.running {
			return errors.New("it is running already")
		}
		err := k.server.start(ctx)
		k.running = err == nil
		return err
	})
}

// Stop shuts the cluster down in order. Addresses and data stay for Start. A
// stopped one stays as it is.
func (k *Kafka) Stop(ctx context.Context) error {
	return k.end(ctx, "stop", k.stop)
}

func (k *Kafka) stop(ctx context.Context) error { return k.server.stop(ctx) }

// Kill ends the cluster by SIGKILL. Addresses and data stay for Start. kfake,
// which runs in this process, cannot be killed.
func (k *Kafka) Kill(ctx context.Context) error {
	return k.end(ctx, "kill", k.kill)
}

func (k *Kafka) kill(ctx context.Context) error { return k.server.kill(ctx) }

func (k *Kafka) end(ctx context.Context, verb string, how func(context.Context) error) error {
	return k.change(verb, func() error {
		if !k.running {
			return nil
		}
		err := how(ctx)
		k.running = err != nil
		return err
	})
}

// Restart is Stop and Start.
func (k *Kafka) Restart(ctx context.Context) error {
	if err := k.Stop(ctx); err != nil {
		return err
	}
	return k.Start(ctx)
}

// Pause stops the server's process, so that it keeps its connections and
// answers nobody until Resume. kfake cannot be paused.
func (k *Kafka) Pause() error {
	return k.change("pause", func() error { return k.server.pause() })
}

// Resume ends a Pause.
func (k *Kafka) Resume() error {
	return k.change("resume", func() error { return k.server.resume() })
}

// change runs f alone, on a server of ours.
func (k *Kafka) change(verb string, f func() error) error {
	k.mu.Lock()
	defer k.mu.Unlock()
	var err error
	switch {
	case k.closed:
		err = errors.New("it was closed")
	case k.server == nil:
		err = errors.New("its brokers were given")
	default:
		err = f()
	}
	if err != nil {
		return fmt.Errorf("throwaway: %s Kafka: %w", verb, err)
	}
	return nil
}

// Close ends the cluster and removes its data; brokers that were given go on. A
// second call does nothing.
func (k *Kafka) Close() error {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.closed {
		return nil
	}
	k.closed, k.running = true, false
	if k.admin != nil {
		k.admin.Close()
	}
	if k.server == nil {
		return nil
	}
	if err := k.server.close(); err != nil {
		return fmt.Errorf("throwaway: close Kafka: %w", err)
	}
	return nil
}
