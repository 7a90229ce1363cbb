package throwaway

import (
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"

	"github.com/jackc/pgx/v5"
)

// PostgresConfig says which server [StartPostgres] starts. The zero value is the
// newest one installed, or else one that is fetched.
type PostgresConfig struct {
	// URL names a running server to use instead of starting one. It cannot be
	// stopped or crashed, and stays when the program ends.
	URL string

	// Version is a major version, "14" or later. An installed server is
	// preferred; 14 to 18 can be fetched. Default: any from 14.
	Version string

	// Settings are added to, and win over, the server settings that suit
	// tests: 200 connections, 10 prepared transactions. What PostgreSQL
	// writes is safe against a crash unless they switch that off.
	Settings map[string]string

	// Log receives what the server prints. Default: nowhere; the end of it
	// stands in the error where the server does not start.
	Log io.Writer
}

// settings are the defaults below PostgresConfig.Settings.
var settings = map[string]string{
	"listen_addresses":          "127.0.0.1",
	"unix_socket_directories":   "",
	"max_connections":           "200",
	"max_prepared_transactions": "10",
	"shared_buffers":            "128MB",
	"logging_collector":         "off",
}

// A Postgres is a running server, with the superuser "postgres" where this
// package started it. Its methods may be called from several goroutines.
type Postgres struct {
	URL     string // of the database "postgres", or the one given
	Version string // "15.18"
	Major   int    // 15
	Source  string // "PostgreSQL 15.18 from /usr/lib/postgresql/15/bin"

	// Empty and 0 for a server that was given by URL.
	DataDir string
	BinDir  string
	Port    int

	cfg   PostgresConfig
	owner owner
	guard *guard // nil for a server that was given by URL

	mu     sync.Mutex
	server *child // nil while stopped
}

// errGiven is returned where the server is not ours to end.
var errGiven = errors.New("throwaway: the server was given by PostgresConfig.URL: give a Version instead, or nothing, to have one that can be stopped")

// StartPostgres starts a server and returns when it takes connections. ctx
// bounds the start only; the server runs until Close or the end of the program.
func StartPostgres(ctx context.Context, cfg PostgresConfig) (*Postgres, error) {
	p, err := startPostgres(ctx, cfg)
	if err != nil {
		return nil, fmt.Errorf("throwaway: start PostgreSQL: %w", err)
	}
	return p, nil
}

func startPostgres(ctx context.Context, cfg PostgresConfig) (*Postgres, error) {
	major, err := parseMajor(cfg.Version)
	if err != nil {
		return nil, err
	}
	if cfg.URL != "" {
		return givenPostgres(ctx, cfg, major)
	}
	o, err := serverOwner()
	if err != nil {
		return nil, err
	}
	bin, err := findBinaries(ctx, o, major)
	if err != nil {
		return nil, err
	}
	p, err := newPostgres(bin, o, cfg)
	if err != nil {
		return nil, err
	}
	err = p.guard.run(ctx, o, cfg.Log, filepath.Join(bin.dir, "initdb"), "--pgdata", p.DataDir,
		"--username", "postgres", "--auth", "trust", "--encoding", "UTF8", "--locale", "C",
		"--no-sync", "--no-instructions")
	if err == nil {
		err = p.startOnFreePort(ctx)
	}
	if err != nil {
		return nil, errors.Join(err, p.guard.Close())
	}
	return p, nil
}

func parseMajor(version string) (int, error) {
	if version == "" {
		return 0, nil
	}
	major, err := strconv.Atoi(version)
	if err != nil || major < oldestMajor {
		return 0, fmt.Errorf("PostgresConfig.Version is %q, want a major version from %d", version, oldestMajor)
	}
	return major, nil
}

// givenPostgres describes the server at cfg.URL.
func givenPostgres(ctx context.Context, cfg PostgresConfig, major int) (*Postgres, error) {
	conn, err := pgx.Connect(ctx, cfg.URL)
	if err != nil {
		return nil, fmt.Errorf("PostgresConfig.URL: %w", err)
	}
	defer conn.Close(context.WithoutCancel(ctx))
	p := &Postgres{URL: cfg.URL, cfg: cfg}
	err = conn.QueryRow(ctx, `SELECT split_part(current_setting('server_version'), ' ', 1),
		current_setting('server_version_num')::int / 10000`).Scan(&p.Version, &p.Major)
	if err != nil {
		return nil, fmt.Errorf("ask for the version: %w", err)
	}
	if p.Major < oldestMajor || major != 0 && p.Major != major {
		return nil, fmt.Errorf("the server at PostgresConfig.URL is %s, want %s", p.Version, wanted(major))
	}
	p.Source = fmt.Sprintf("PostgreSQL %s, given", p.Version)
	return p, nil
}

// newPostgres makes a guarded place for a server that is not yet there.
func newPostgres(bin binaries, o owner, cfg PostgresConfig) (*Postgres, error) {
	g, err := newGuard("postgres", o)
	if err != nil {
		return nil, err
	}
	return &Postgres{
		Version: bin.version,
		Major:   bin.major,
		Source:  bin.source,
		DataDir: g.path("data"),
		BinDir:  bin.dir,
		cfg:     cfg,
		owner:   o,
		guard:   g,
	}, nil
}

// startOnFreePort starts the server for the first time. The port may be taken
// between the moment it was found free and the server's start.
func (p *Postgres) startOnFreePort(ctx context.Context) error {
	for try := 1; ; try++ {
		port, err := freePort()
		if err != nil {
			return err
		}
		p.Port = port
		p.URL = fmt.Sprintf("postgres://postgres@%s/postgres?sslmode=disable", address(port))
		err = p.Start(ctx)
		if err == nil || try == 5 || !strings.Contains(err.Error(), "Address already in use") {
			return err
		}
	}
}

// Start starts a stopped or crashed server on the same data and port, and
// returns when it takes connections.
func (p *Postgres) Start(ctx context.Context) error {
	if p.guard == nil {
		return errGiven
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.server != nil && p.server.alive() {
		return errors.New("throwaway: the server is running already")
	}
	all := maps.Clone(settings)
	maps.Copy(all, p.cfg.Settings)
	all["port"] = strconv.Itoa(p.Port)
	args := []string{"-D", p.DataDir}
	for _, name := range slices.Sorted(maps.Keys(all)) {
		args = append(args, "-c", name+"="+all[name])
	}
	server, err := p.guard.start(p.owner, p.cfg.Log, []string{"LC_ALL=C"}, filepath.Join(p.BinDir, "postgres"), args...)
	if err != nil {
		return err
	}
	err = poll(ctx, "PostgreSQL to take connections", func() (bool, error) {
		if !server.alive() {
			return false, fmt.Errorf("PostgreSQL ended: %w: %s", server.err, server.log)
		}
		return p.ready(server.cmd.Process.Pid), nil
	})
	if err != nil {
		_ = syscall.Kill(server.cmd.Process.Pid, syscall.SIGQUIT) // it may have ended
		<-server.done
		return err
	}
	p.server = server
	return nil
}

// ready reads the state that the server writes into its pid file, which costs
// no refused connections in its log.
func (p *Postgres) ready(pid int) bool {
	text, err := os.ReadFile(filepath.Join(p.DataDir, "postmaster.pid"))
	if err != nil {
		return false
	}
	lines := strings.Split(string(text), "\n")
	return len(lines) >= 8 && lines[0] == strconv.Itoa(pid) && strings.TrimSpace(lines[7]) == "ready"
}

// Stop ends the server in good order: transactions are rolled back, clients
// disconnected, a checkpoint written. Data and port stay for Start. A stopped
// server is left alone.
func (p *Postgres) Stop(ctx context.Context) error {
	return p.end(ctx, syscall.SIGINT)
}

// Crash ends the server at once and without a checkpoint, as a power cut ends
// it: what was not yet flushed, asynchronous commits for instance, is lost. Data
// and port stay for Start.
func (p *Postgres) Crash(ctx context.Context) error {
	return p.end(ctx, syscall.SIGQUIT)
}

func (p *Postgres) end(ctx context.Context, sig syscall.Signal) error {
	if p.guard == nil {
		return errGiven
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.server == nil {
		return nil
	}
	if err := p.server.end(ctx, sig); err != nil {
		return fmt.Errorf("throwaway: end PostgreSQL: %w", err)
	}
	p.server = nil
	return nil
}

// Restart is Stop and Start.
func (p *Postgres) Restart(ctx context.Context) error {
	if err := p.Stop(ctx); err != nil {
		return err
	}
	return p.Start(ctx)
}

// Close ends the server and removes its files. It does nothing to a server that
// was given by URL.
func (p *Postgres) Close() error {
	if p.guard == nil {
		return nil
	}
	if err := p.guard.Close(); err != nil {
		return fmt.Errorf("throwaway: close PostgreSQL: %w", err)
	}
	return nil
}

// running reports whether the server has been started and not been seen to end.
func (p *Postgres) running() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.server != nil && p.server.alive()
}

// CreateDatabase makes an empty database and returns its URL.
func (p *Postgres) CreateDatabase(ctx context.Context, name string) (string, error) {
	u, err := url.Parse(p.URL)
	if err != nil {
		return "", fmt.Errorf("throwaway: create database: %w", err)
	}
	if err := p.exec(ctx, "CREATE DATABASE "+pgx.Identifier{name}.Sanitize()); err != nil {
		return "", fmt.Errorf("throwaway: create database: %w", err)
	}
	u.Path = "/" + name
	return u.String(), nil
}

// exec runs one statement on a connection of its own.
func (p *Postgres) exec(ctx context.Context, sql string, args ...any) error {
	return p.connected(ctx, func(conn *pgx.Conn) error {
		_, err := conn.Exec(ctx, sql, args...)
		return err
	})
}

// connected calls f with a connection of its own.
func (p *Postgres) connected(ctx context.Context, f func(*pgx.Conn) error) error {
	conn, err := pgx.Connect(ctx, p.URL)
	if err != nil {
		return err
	}
	defer conn.Close(context.WithoutCancel(ctx))
	return f(conn)
}
