package throwaway_test

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/postroom/postroom/internal/throwaway"
)

func startKafka(t *testing.T, cfg throwaway.KafkaConfig) *throwaway.Kafka {
	t.Helper()
	k, err := throwaway.StartKafka(t.Context(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := k.Close(); err != nil {
			t.Error(err)
		}
	})
	t.Log(k.Source)
	return k
}

func kafkaClient(t *testing.T, brokers []string, opts ...kgo.Opt) *kgo.Client {
	t.Helper()
	client, err := kgo.NewClient(append(opts, kgo.SeedBrokers(brokers...))...)
	must(t, err)
	t.Cleanup(client.Close)
	return client
}

func produce(t *testing.T, brokers []string, topic string, values ...string) {
	t.Helper()
	client := kafkaClient(t, brokers, kgo.DefaultProduceTopic(topic))
	for _, v := range values {
		must(t, client.ProduceSync(t.Context(), kgo.StringRecord(v)).FirstErr())
	}
}

// consume returns the first n records.
func consume(t *testing.T, brokers []string, topic string, n int, opts ...kgo.Opt) []*kgo.Record {
	t.Helper()
	client := kafkaClient(t, brokers, append(opts, kgo.ConsumeTopics(topic),
		kgo.ConsumeResetOffset(kgo.NewOffset().AtStart()))...)
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	var all []*kgo.Record
	for len(all) < n {
		fetches := client.PollFetches(ctx)
		must(t, fetches.Err())
		all = append(all, fetches.Records()...)
	}
	return all
}

func wantValues(t *testing.T, brokers []string, topic string, want ...string) {
	t.Helper()
	var got []string
	for _, r := range consume(t, brokers, topic, len(want)) {
		got = append(got, string(r.Value))
	}
	if strings.Join(got, " ") != strings.Join(want, " ") {
		t.Errorf("%s holds %q, want %q", topic, got, want)
	}
}

func ping(t *testing.T, client *kgo.Client, limit time.Duration) error {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), limit)
	defer cancel()
	return client.Ping(ctx)
}

// One server for the tests of what can be done to it, in order.
func TestRealKafka(t *testing.T) {
	k := startKafka(t, throwaway.KafkaConfig{RequireReal: true})
	if !k.Real || k.Version != "4.4.0" || !strings.HasPrefix(k.Source, "Apache Kafka 4.4.0 ") || k.Cluster() != nil {
		t.Errorf("started %+v", k)
	}
	brokers := k.Brokers
	must(t, k.CreateTopic(t.Context(), "kept", 1, map[string]string{"max.message.bytes": "1000"}))
	produce(t, brokers, "kept", "a", "b")

	t.Run("settings of a topic", func(t *testing.T) {
		client := kafkaClient(t, brokers, kgo.DefaultProduceTopic("kept"), kgo.ProducerBatchCompression(kgo.NoCompression()))
		err := client.ProduceSync(t.Context(), kgo.StringRecord(strings.Repeat("x", 2000))).FirstErr()
		if err == nil {
			t.Error("a record over the topic's max.message.bytes is taken")
		}
	})
	t.Run("topics come, grow and go", func(t *testing.T) {
		must(t, k.CreateTopic(t.Context(), "passing", 2, nil))
		if err := k.CreateTopic(t.Context(), "passing", 2, nil); err == nil {
			t.Error("a topic is created twice")
		}
		must(t, k.AddPartitions(t.Context(), "passing", 3))
		client := kafkaClient(t, brokers, kgo.RecordPartitioner(kgo.ManualPartitioner()))
		must(t, client.ProduceSync(t.Context(), &kgo.Record{Topic: "passing", Partition: 4}).FirstErr())
		must(t, k.DeleteTopic(t.Context(), "passing"))
		if err := k.DeleteTopic(t.Context(), "passing"); err == nil {
			t.Error("a topic that is gone is deleted")
		}
	})
	t.Run("pause and resume", func(t *testing.T) {
		client := kafkaClient(t, brokers)
		must(t, ping(t, client, time.Minute))
		must(t, k.Pause())
		if err := ping(t, client, 300*time.Millisecond); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("a paused server: %v, want no answer", err)
		}
		must(t, k.Resume())
		must(t, ping(t, client, time.Minute))
	})
	t.Run("restarts keep data and address", func(t *testing.T) {
		must(t, k.Restart(t.Context()))
		wantValues(t, brokers, "kept", "a", "b")
		if err := k.Start(t.Context()); err == nil {
			t.Error("Start of a running server succeeded")
		}
		must(t, k.Pause())
		must(t, k.Stop(t.Context())) // of a paused server
		must(t, k.Stop(t.Context()))
		if conn, err := net.Dial("tcp", brokers[0]); err == nil {
			_ = conn.Close()
			t.Error("a stopped server takes connections")
		}
		if err := k.Pause(); err == nil {
			t.Error("Pause of a stopped server succeeded")
		}
		must(t, k.Start(t.Context()))
		must(t, k.Kill(t.Context()))
		must(t, k.Start(t.Context()))
		wantValues(t, brokers, "kept", "a", "b")
	})
	t.Run("as given", func(t *testing.T) {
		given := startKafka(t, throwaway.KafkaConfig{Brokers: brokers, RequireReal: true})
		if !given.Real || given.Version != "4.4" {
			t.Errorf("a given server: %+v", given)
		}
		must(t, given.CreateTopic(t.Context(), "given", 1, nil))
		if err := given.Stop(t.Context()); err == nil {
			t.Error("Stop of a given server succeeded")
		}
		must(t, given.Close())
		wantValues(t, brokers, "kept", "a", "b")
	})
	must(t, k.Close())
	must(t, k.Close())
	if err := errors.Join(k.Start(t.Context()), k.CreateTopic(t.Context(), "late", 1, nil)); err == nil {
		t.Error("a closed server can be used")
	}
}

func TestKafkaOlderLine(t *testing.T) {
	k := startKafka(t, throwaway.KafkaConfig{Version: "3.9", RequireReal: true})
	if !strings.HasPrefix(k.Version, "3.9.") {
		t.Errorf("version %s, want 3.9", k.Version)
	}
	must(t, k.CreateTopic(t.Context(), "old", 1, nil))
	produce(t, k.Brokers, "old", "a")
	must(t, k.Restart(t.Context()))
	wantValues(t, k.Brokers, "old", "a")
}

func TestKafkaFakeWhereJavaIsHidden(t *testing.T) {
	hideJava(t)
	k := startKafka(t, throwaway.KafkaConfig{Settings: map[string]string{"group.min.session.timeout.ms": "100"}})
	if k.Real || !strings.HasPrefix(k.Source, "kfake ") || !strings.Contains(k.Source, "install a JDK") || k.Cluster() == nil {
		t.Errorf("without Java this was started: %q", k.Source)
	}
	must(t, k.CreateTopic(t.Context(), "kept", 1, nil))
	produce(t, k.Brokers, "kept", "a")
	must(t, k.AddPartitions(t.Context(), "kept", 2))
	must(t, k.Restart(t.Context()))
	wantValues(t, k.Brokers, "kept", "a")
	for _, err := range []error{k.Kill(t.Context()), k.Pause(), k.Resume()} {
		if err == nil || !strings.Contains(err.Error(), "real Kafka") {
			t.Errorf("kfake cannot do this: %v", err)
		}
	}
	must(t, k.DeleteTopic(t.Context(), "kept"))
	must(t, k.Close())
	if k.Cluster() != nil {
		t.Error("after Close there is a cluster")
	}
}

func TestKafkaRequireRealSaysWhatToDo(t *testing.T) {
	hideJava(t)
	for _, cfg := range []throwaway.KafkaConfig{
		{RequireReal: true},
		{SASLUsers: map[string]string{"u": "p"}},
		{Version: "3.9", TLS: &throwaway.KafkaTLS{Certificate: []byte("c"), Key: []byte("k")}},
	} {
		k, err := throwaway.StartKafka(t.Context(), cfg)
		if err == nil {
			_ = k.Close()
			t.Errorf("%+v: %s", cfg, k.Source)
			continue
		}
		for _, want := range []string{"real Kafka is required", "install a JDK, version 1", "and Maven", "or give the brokers"} {
			if !strings.Contains(err.Error(), want) {
				t.Errorf("the error %q lacks %q", err, want)
			}
		}
	}
}

// hideJava leaves on PATH what the guard needs.
func hideJava(t *testing.T) {
	t.Helper()
	dir := t.TempDir()
	for _, name := range []string{"rm", "sleep"} {
		path, err := exec.LookPath(name)
		must(t, err)
		must(t, os.Symlink(path, filepath.Join(dir, name)))
	}
	t.Setenv("PATH", dir)
	t.Setenv("JAVA_HOME", "")
}

func TestKafkaConfigErrors(t *testing.T) {
	tests := []struct {
		cfg  throwaway.KafkaConfig
		want string
	}{
		{throwaway.KafkaConfig{Version: "2.8"}, `KafkaConfig.Version is "2.8", want one of 3.9, 4.4`},
		{throwaway.KafkaConfig{Fake: true, RequireReal: true}, "KafkaConfig.Fake excludes"},
		{throwaway.KafkaConfig{Brokers: []string{"127.0.0.1:1"}, Version: "4.4"}, "KafkaConfig.Brokers excludes"},
		{throwaway.KafkaConfig{SASLUsers: map[string]string{"a b": "p"}}, `KafkaConfig.SASLUsers: "a b"`},
		{throwaway.KafkaConfig{TLS: &throwaway.KafkaTLS{}}, "KafkaConfig.TLS lacks"},
		{throwaway.KafkaConfig{Settings: map[string]string{"log.dirs": ""}, RequireReal: true}, "log.dirs"},
		{throwaway.KafkaConfig{Settings: map[string]string{"group.min.session.timeout.ms": "x"}, Fake: true}, "group.min.session.timeout.ms"},
		{throwaway.KafkaConfig{Settings: map[string]string{"num.io.threads": "0"}, RequireReal: true}, "num.io.threads"},
	}
	for _, tt := range tests {
		k, err := throwaway.StartKafka(t.Context(), tt.cfg)
		if err == nil {
			_ = k.Close()
		}
		if err == nil || !strings.Contains(err.Error(), tt.want) {
			t.Errorf("%+v: %v, want an error that says %q", tt.cfg, err, tt.want)
		}
	}
}

func TestKafkaEndsWithTheProgram(t *testing.T) {
	cmd := exec.Command(os.Args[0])
	cmd.Env = append(os.Environ(), childVariable+"=kafka")
	cmd.Stderr = t.Output()
	stdout, err := cmd.StdoutPipe()
	must(t, err)
	must(t, cmd.Start())
	defer func() { _ = cmd.Process.Kill() }() // where the test failed before
	line, err := bufio.NewReader(stdout).ReadBytes('\n')
	must(t, err)
	var told started
	must(t, json.Unmarshal(line, &told))
	must(t, ping(t, kafkaClient(t, []string{told.URL}), time.Minute))
	if !alive(told.Pid) {
		t.Fatalf("process %d does not run", told.Pid)
	}
	must(t, cmd.Process.Signal(syscall.SIGKILL))
	_ = cmd.Wait() // it was killed
	eventually(t, "Kafka has ended", func() bool { return !alive(told.Pid) })
	eventually(t, "its files are removed", func() bool {
		_, err := os.Stat(told.Dirs[0])
		return errors.Is(err, os.ErrNotExist)
	})
}

func TestOnceFillsOnce(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "made")
	if err := throwaway.Once(t.Context(), dir, func(string) error { return os.ErrInvalid }); !errors.Is(err, os.ErrInvalid) {
		t.Fatalf("a failure: %v", err)
	}
	if _, err := os.Stat(dir); !errors.Is(err, os.ErrNotExist) {
		t.Fatalf("after a failure the directory is there: %v", err)
	}
	var filled int // under the lock
	var group sync.WaitGroup
	for range 8 {
		group.Go(func() {
			err := throwaway.Once(t.Context(), dir, func(part string) error {
				filled++
				return os.WriteFile(filepath.Join(part, "f"), nil, 0o600)
			})
			if err != nil {
				t.Error(err)
			}
			if info, err := os.Stat(filepath.Join(dir, "f")); err != nil || info.Mode().Perm() != 0o644 {
				t.Errorf("the file: %v, %v", info, err)
			}
		})
	}
	group.Wait()
	if filled != 1 {
		t.Errorf("filled %d times", filled)
	}
}
