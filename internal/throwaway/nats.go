package throwaway

import (
	"context"
	"errors"
	"fmt"
	"os"
	"sync"
	"time"

	"github.com/nats-io/nats-server/v2/server"
)

// NATSConfig says which server [StartNATS] starts. The zero value is a server
// with JetStream in a directory of its own.
type NATSConfig struct {
	// StoreDir holds the streams. Default: a new directory, which is removed
	// at Close. A directory that is given stays.
	StoreDir string

	// Port of 127.0.0.1. Default: a free one.
	Port int

	// Options may change the server's options before each start: limits, users,
	// TLS. Default: nothing.
	Options func(*server.Options)
}

// A NATS is a server with JetStream inside this process. Its methods may be
// called from several goroutines.
type NATS struct {
	URL      string
	Port     int
	StoreDir string

	cfg   NATSConfig
	guard *guard // nil where StoreDir was given

	mu     sync.Mutex
	server *server.Server // nil while stopped
}

// StartNATS starts a server and returns when it takes connections. ctx bounds
// the start only.
func StartNATS(ctx context.Context, cfg NATSConfig) (*NATS, error) {
	n, err := startNATS(ctx, cfg)
	if err != nil {
		return nil, fmt.Errorf("throwaway: start NATS: %w", err)
	}
	return n, nil
}

func startNATS(ctx context.Context, cfg NATSConfig) (*NATS, error) {
	if cfg.Port < 0 || cfg.Port > 65_535 {
		return nil, fmt.Errorf("NATSConfig.Port is %d, want 0 for a free one, or 1 to 65535", cfg.Port)
	}
	n := &NATS{Port: cfg.Port, StoreDir: cfg.StoreDir, cfg: cfg}
	if n.StoreDir == "" {
		g, err := newGuard("nats", owner{})
		if err != nil {
			return nil, err
		}
		n.guard, n.StoreDir = g, g.path("store")
	}
	err := os.MkdirAll(n.StoreDir, 0o700)
	for try := 1; err == nil; try++ {
		if cfg.Port == 0 {
			if n.Port, err = freePort(); err != nil {
				break
			}
		}
		n.URL = "nats://" + address(n.Port)
		startErr := n.Start(ctx)
		if startErr == nil {
			return n, nil
		}
		if cfg.Port != 0 || try == 5 || ctx.Err() != nil {
			err = startErr
		}
	}
	return nil, errors.Join(err, n.Close())
}

// Start starts a stopped server on the same port and store.
func (n *NATS) Start(ctx context.Context) error {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.server != nil {
		return errors.New("throwaway: the server is running already")
	}
	opts := &server.Options{
		ServerName: "throwaway",
		Host:       "127.0.0.1",
		Port:       n.Port,
		JetStream:  true,
		StoreDir:   n.StoreDir,
		NoSigs:     true,
		NoLog:      true,
	}
	if n.cfg.Options != nil {
		n.cfg.Options(opts)
	}
	s, err := server.NewServer(opts)
	if err != nil {
		return err
	}
	failed := &firstError{}
	s.SetLoggerV2(failed, false, false, false)
	go s.Start()
	err = poll(ctx, "NATS to take connections", func() (bool, error) {
		if s.ReadyForConnections(time.Millisecond) {
			return true, nil
		}
		return false, failed.get()
	})
	if err != nil {
		s.Shutdown()
		s.WaitForShutdown()
		return err
	}
	n.server = s
	return nil
}

// Stop ends the server and every connection to it. Port and store stay for
// Start.
func (n *NATS) Stop() {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.server != nil {
		n.server.Shutdown()
		n.server.WaitForShutdown()
		n.server = nil
	}
}

// Restart is Stop and Start.
func (n *NATS) Restart(ctx context.Context) error {
	n.Stop()
	return n.Start(ctx)
}

// Server returns the running server, for what a client cannot see or do; nil
// while stopped.
func (n *NATS) Server() *server.Server {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.server
}

// Close ends the server and removes the store unless that was given.
func (n *NATS) Close() error {
	n.Stop()
	if n.guard == nil {
		return nil
	}
	if err := n.guard.Close(); err != nil {
		return fmt.Errorf("throwaway: close NATS: %w", err)
	}
	return nil
}

// firstError keeps a server that cannot start from ending this process, which
// is what its own logger does on a fatal error, and tells why it could not.
type firstError struct {
	mu  sync.Mutex
	err error
}

func (f *firstError) get() error {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.err
}

func (f *firstError) Fatalf(format string, v ...any) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.err == nil {
		f.err = fmt.Errorf(format, v...)
	}
}

func (*firstError) Errorf(string, ...any)  {}
func (*firstError) Warnf(string, ...any)   {}
func (*firstError) Noticef(string, ...any) {}
func (*firstError) Debugf(string, ...any)  {}
func (*firstError) Tracef(string, ...any)  {}
