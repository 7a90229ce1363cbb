package throwaway

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"net"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"

	"github.com/jackc/pgx/v5"
)

// PgBouncerConfig says what stands behind the PgBouncer of [StartPgBouncer].
type PgBouncerConfig struct {
	// URL of the PostgreSQL server. Required. Every database of the server can
	// be reached under its name, always as this URL's user.
	URL string

	// PoolSize is the most server connections per database. Default 20.
	PoolSize int

	// Settings are added to, and win over, those of a PgBouncer in transaction
	// mode: pool_mode, server_lifetime and so on.
	Settings map[string]string

	// Log receives what PgBouncer prints. Default: nowhere.
	Log io.Writer
}

// A PgBouncer is a running pooler. A client needs a mode without prepared
// statements that outlive a transaction, such as pgx's QueryExecModeExec. Its
// methods may be called from several goroutines.
type PgBouncer struct {
	URL    string // of the database in PgBouncerConfig.URL
	Port   int
	Source string // the program's path

	cfg   PgBouncerConfig
	owner owner
	guard *guard

	mu     sync.Mutex
	server *child // nil while stopped
}

// StartPgBouncer starts a pooler and returns when it takes connections. Where
// PgBouncer is missing and this program runs as root on Debian or a relative, it
// is installed. ctx bounds the start only.
func StartPgBouncer(ctx context.Context, cfg PgBouncerConfig) (*PgBouncer, error) {
	b, err := startPgBouncer(ctx, cfg)
	if err != nil {
		return nil, fmt.Errorf("throwaway: start PgBouncer: %w", err)
	}
	return b, nil
}

func startPgBouncer(ctx context.Context, cfg PgBouncerConfig) (*PgBouncer, error) {
	target, err := pgx.ParseConfig(cfg.URL)
	if err != nil || cfg.URL == "" {
		return nil, fmt.Errorf("PgBouncerConfig.URL is not the URL of a PostgreSQL server: %w", err)
	}
	if cfg.PoolSize < 0 {
		return nil, fmt.Errorf("PgBouncerConfig.PoolSize is %d, want 1 or more, or 0 for 20", cfg.PoolSize)
	}
	program, err := findPgBouncer(ctx, cfg.Log)
	if err != nil {
		return nil, err
	}
	o, err := serverOwner()
	if err != nil {
		return nil, err
	}
	g, err := newGuard("pgbouncer", o)
	if err != nil {
		return nil, err
	}
	b := &PgBouncer{Source: program, cfg: cfg, owner: o, guard: g}
	for try := 1; ; try++ {
		if b.Port, err = freePort(); err == nil {
			b.URL = fmt.Sprintf("postgres://%s@%s/%s?sslmode=disable",
				url.UserPassword(target.User, target.Password), address(b.Port), url.PathEscape(target.Database))
			err = b.configure(target)
		}
		if err == nil {
			err = b.Start(ctx)
		}
		switch {
		case err == nil:
			return b, nil
		case try == 5 || !strings.Contains(err.Error(), "in use"):
			return nil, errors.Join(err, g.Close())
		}
	}
}

// findPgBouncer returns the program's path, and installs it where that is
// possible.
func findPgBouncer(ctx context.Context, log io.Writer) (string, error) {
	find := func() string {
		for _, name := range []string{"pgbouncer", "/usr/sbin/pgbouncer", "/usr/local/sbin/pgbouncer"} {
			if path, err := exec.LookPath(name); err == nil {
				return path
			}
		}
		return ""
	}
	if path := find(); path != "" {
		return path, nil
	}
	if _, err := exec.LookPath("apt-get"); err != nil || os.Geteuid() != 0 {
		return "", errors.New("pgbouncer is neither on PATH nor in /usr/sbin: install the package pgbouncer")
	}
	cache, err := cacheDir()
	if err != nil {
		return "", err
	}
	unlock, err := lock(ctx, filepath.Join(cache, "lock"))
	if err != nil {
		return "", err
	}
	defer unlock()
	if path := find(); path != "" { // another process was quicker
		return path, nil
	}
	if err := install(ctx, log); err != nil {
		return "", fmt.Errorf("install pgbouncer: %w", err)
	}
	if path := find(); path != "" {
		return path, nil
	}
	return "", errors.New("the package pgbouncer was installed, yet there is no such program")
}

// install has apt install the package and stops the service that comes with it.
func install(ctx context.Context, log io.Writer) error {
	steps := [][]string{
		{"apt-get", "-q", "update"},
		{"apt-get", "-q", "-o", "DPkg::Lock::Timeout=120", "install", "-y", "--no-install-recommends", "pgbouncer"},
	}
	if _, err := os.Stat("/run/systemd/system"); err == nil {
		steps = append(steps, []string{"systemctl", "disable", "--now", "pgbouncer"})
	} else {
		steps = append(steps, []string{"/etc/init.d/pgbouncer", "stop"})
	}
	for _, step := range steps {
		out := &tail{next: log}
		cmd := exec.CommandContext(ctx, step[0], step[1:]...)
		cmd.Env = append(os.Environ(), "DEBIAN_FRONTEND=noninteractive")
		cmd.Stdout, cmd.Stderr = out, out
		if err := cmd.Run(); err != nil {
			return fmt.Errorf("%s: %w: %s", strings.Join(step, " "), err, out)
		}
	}
	return nil
}

// configure writes pgbouncer.ini.
func (b *PgBouncer) configure(target *pgx.ConnConfig) error {
	all := map[string]string{
		"listen_addr":               "127.0.0.1",
		"listen_port":               strconv.Itoa(b.Port),
		"unix_socket_dir":           "",
		"auth_type":                 "any",
		"pool_mode":                 "transaction",
		"default_pool_size":         strconv.Itoa(cmp.Or(b.cfg.PoolSize, 20)),
		"max_client_conn":           "500",
		"ignore_startup_parameters": "extra_float_digits",
	}
	maps.Copy(all, b.cfg.Settings)
	var ini strings.Builder
	fmt.Fprintf(&ini, "[databases]\n* = host=%s port=%d user=%s", quoteIni(target.Host), target.Port, quoteIni(target.User))
	if target.Password != "" {
		fmt.Fprintf(&ini, " password=%s", quoteIni(target.Password))
	}
	ini.WriteString("\n[pgbouncer]\n")
	for _, name := range slices.Sorted(maps.Keys(all)) {
		fmt.Fprintf(&ini, "%s = %s\n", name, all[name])
	}
	path := b.guard.path("pgbouncer.ini")
	return errors.Join(os.WriteFile(path, []byte(ini.String()), 0o600), b.owner.own(path))
}

func quoteIni(s string) string {
	return "'" + strings.ReplaceAll(s, "'", "''") + "'"
}

// Start starts a stopped pooler on the same port.
func (b *PgBouncer) Start(ctx context.Context) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.server != nil && b.server.alive() {
		return errors.New("throwaway: PgBouncer is running already")
	}
	server, err := b.guard.start(b.owner, b.cfg.Log, nil, b.Source, b.guard.path("pgbouncer.ini"))
	if err != nil {
		return err
	}
	err = poll(ctx, "PgBouncer to take connections", func() (bool, error) {
		if !server.alive() {
			return false, fmt.Errorf("PgBouncer ended: %w: %s", server.err, server.log)
		}
		conn, err := net.Dial("tcp", address(b.Port))
		if err != nil {
			return false, nil
		}
		return true, conn.Close()
	})
	if err != nil {
		_ = syscall.Kill(server.cmd.Process.Pid, syscall.SIGKILL) // it may have ended
		<-server.done
		return err
	}
	b.server = server
	return nil
}

// Stop ends the pooler at once and cuts every connection. The port stays for
// Start.
func (b *PgBouncer) Stop(ctx context.Context) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.server == nil {
		return nil
	}
	if err := b.server.end(ctx, syscall.SIGTERM); err != nil {
		return fmt.Errorf("throwaway: end PgBouncer: %w", err)
	}
	b.server = nil
	return nil
}

// Close ends the pooler and removes its files.
func (b *PgBouncer) Close() error {
	if err := b.guard.Close(); err != nil {
		return fmt.Errorf("throwaway: close PgBouncer: %w", err)
	}
	return nil
}
