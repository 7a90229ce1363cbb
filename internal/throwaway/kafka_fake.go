package throwaway

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/twmb/franz-go/pkg/kfake"
	"github.com/twmb/franz-go/pkg/kversion"
)

const fakeNodes = 3

// A fakeKafka is a cluster in this process. Its data stand in a directory, so
// that they outlive a stop.
type fakeKafka struct {
	guard   *guard
	options []kfake.Opt

	mu      sync.Mutex
	cluster *kfake.Cluster // nil while stopped
}

func startFakeKafka(ctx context.Context, cfg KafkaConfig, release kafkaRelease, why string) (*Kafka, error) {
	sessions, err := sessionLimits(cfg.Settings)
	if err != nil {
		return nil, err
	}
	g, err := newGuard("kfake", owner{})
	if err != nil {
		return nil, err
	}
	for try := 1; ; try++ {
		ports := make([]int, fakeNodes)
		k := &Kafka{
			Brokers: make([]string, fakeNodes),
			Version: release.version,
			Source:  fmt.Sprintf("kfake in this process, in place of Kafka %s: %s", release.version, why),
		}
		for i := range ports {
			if ports[i], err = freePort(); err != nil {
				return nil, errors.Join(err, g.Close())
			}
			k.Brokers[i] = address(ports[i])
		}
		f := &fakeKafka{guard: g, options: append(slices.Clone(sessions),
			kfake.NumBrokers(fakeNodes),
			kfake.Ports(ports...),
			kfake.DataDir(g.path("data")),
			kfake.MaxVersions(kversion.FromString("v"+release.line)),
			kfake.BrokerConfigs(maps.Clone(cfg.Settings)),
		)}
		if cfg.Log != nil {
			f.options = append(f.options, kfake.WithLogger(kfake.BasicLogger(cfg.Log, kfake.LogLevelInfo)))
		}
		k.server = f
		err := k.Start(ctx)
		switch {
		case err == nil:
			return k, nil
		case try == 5 || !strings.Contains(err.Error(), "in use"):
			return nil, errors.Join(err, g.Close())
		}
	}
}

// sessionLimits translates the settings that kfake wants as options.
func sessionLimits(settings map[string]string) ([]kfake.Opt, error) {
	var options []kfake.Opt
	for name, option := range map[string]func(time.Duration) kfake.Opt{
		"group.min.session.timeout.ms": kfake.GroupMinSessionTimeout,
		"group.max.session.timeout.ms": kfake.GroupMaxSessionTimeout,
	} {
		if value, ok := settings[name]; ok {
			ms, err := strconv.Atoi(value)
			if err != nil {
				return nil, fmt.Errorf("KafkaConfig.Settings: %s: %w", name, err)
			}
			options = append(options, option(time.Duration(ms)*time.Millisecond))
		}
	}
	return options, nil
}

func (f *fakeKafka) start(context.Context) error {
	cluster, err := kfake.NewCluster(f.options...)
	if err != nil {
		return err
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	f.cluster = cluster
	return nil
}

func (f *fakeKafka) stop(context.Context) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.cluster != nil {
		f.cluster.Close()
		f.cluster = nil
	}
	return nil
}

var errFake = errors.New("kfake runs in this process: it takes a real Kafka")

func (*fakeKafka) kill(context.Context) error { return errFake }
func (*fakeKafka) pause() error               { return errFake }
func (*fakeKafka) resume() error              { return errFake }

func (f *fakeKafka) close() error {
	return errors.Join(f.stop(context.Background()), f.guard.Close())
}

// Cluster returns kfake's own handle, for faults and for what a client cannot
// see; nil while stopped and where the Kafka is real.
func (k *Kafka) Cluster() *kfake.Cluster {
	f, ok := k.server.(*fakeKafka)
	if !ok {
		return nil
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.cluster
}
