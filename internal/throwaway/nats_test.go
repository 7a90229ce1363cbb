package throwaway_test

import (
	"os"
	"testing"

	"github.com/nats-io/nats-server/v2/server"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/postroom/postroom/internal/throwaway"
)

func startNATS(t *testing.T, cfg throwaway.NATSConfig) *throwaway.NATS {
	t.Helper()
	n, err := throwaway.StartNATS(t.Context(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := n.Close(); err != nil {
			t.Error(err)
		}
	})
	return n
}

// stream returns how many messages the server's stream S holds.
func stream(t *testing.T, n *throwaway.NATS, use func(jetstream.JetStream) error) uint64 {
	t.Helper()
	conn, err := nats.Connect(n.URL)
	must(t, err)
	defer conn.Close()
	js, err := jetstream.New(conn)
	must(t, err)
	if use != nil {
		must(t, use(js))
	}
	s, err := js.Stream(t.Context(), "S")
	must(t, err)
	return s.CachedInfo().State.Msgs
}

func TestNATSKeepsItsStoreOverRestarts(t *testing.T) {
	n := startNATS(t, throwaway.NATSConfig{})
	url := n.URL
	got := stream(t, n, func(js jetstream.JetStream) error {
		if _, err := js.CreateStream(t.Context(), jetstream.StreamConfig{Name: "S", Subjects: []string{"s.>"}}); err != nil {
			return err
		}
		_, err := js.Publish(t.Context(), "s.a", nil)
		return err
	})
	if got != 1 {
		t.Fatalf("stream holds %d messages, want 1", got)
	}
	n.Stop()
	if conn, err := nats.Connect(n.URL); err == nil {
		conn.Close()
		t.Error("a stopped server takes connections")
	}
	must(t, n.Start(t.Context()))
	must(t, n.Restart(t.Context()))
	if err := n.Start(t.Context()); err == nil {
		t.Error("Start of a running server succeeded")
	}
	if got := stream(t, n, nil); got != 1 || n.URL != url {
		t.Errorf("after restarts the stream holds %d messages at %s, want 1 at %s", got, n.URL, url)
	}
	must(t, n.Close())
	if _, err := os.Stat(n.StoreDir); !os.IsNotExist(err) {
		t.Errorf("after Close the store is there: %v", err)
	}
}

func TestNATSGivenStorePortAndOptions(t *testing.T) {
	first := startNATS(t, throwaway.NATSConfig{})
	first.Stop() // its port is free now
	dir := t.TempDir()
	n := startNATS(t, throwaway.NATSConfig{
		StoreDir: dir,
		Port:     first.Port,
		Options:  func(o *server.Options) { o.Username, o.Password = "u", "p" },
	})
	if n.URL != first.URL {
		t.Errorf("URL %s, want %s", n.URL, first.URL)
	}
	if conn, err := nats.Connect(n.URL); err == nil {
		conn.Close()
		t.Error("Options was not heeded: a connection without user is taken")
	}
	conn, err := nats.Connect(n.URL, nats.UserInfo("u", "p"))
	must(t, err)
	conn.Close()
	if err := first.Start(t.Context()); err == nil {
		t.Error("a second server started on a taken port")
	}
	must(t, n.Close())
	if _, err := os.Stat(dir); err != nil {
		t.Errorf("Close removed a store that was given: %v", err)
	}
}

func TestNATSPortOutOfRange(t *testing.T) {
	if n, err := throwaway.StartNATS(t.Context(), throwaway.NATSConfig{Port: 70_000}); err == nil {
		_ = n.Close()
		t.Error("port 70000 was accepted")
	}
}
