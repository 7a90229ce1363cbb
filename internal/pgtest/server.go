package pgtest

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"testing"

	"github.com/jackc/pgx/v5"
)

// variable chooses the servers, see the package comment.
const variable = "POSTROOM_TEST_POSTGRES"

const wayOut = "set " + variable + " to the URL of a PostgreSQL (14 or later) whose user may create databases, or install PostgreSQL"

const oldest = 14

func isURL(choice string) bool {
	return strings.Contains(choice, "://")
}

// parseChoices splits the variable's value: one choice per server, "" for any.
func parseChoices(value string) ([]string, error) {
	value = strings.TrimSpace(value)
	if isURL(value) {
		return []string{value}, nil
	}
	var all []string
	for v := range strings.SplitSeq(value, ",") {
		v = strings.TrimSpace(v)
		if n, err := strconv.Atoi(v); value != "" && (err != nil || n < oldest) {
			return nil, fmt.Errorf(`%s is %q, want major versions from 14 such as "14,15,18", or one URL`, variable, value)
		}
		all = append(all, v)
	}
	return all, nil
}

func choices(t testing.TB) []string {
	t.Helper()
	all, err := parseChoices(os.Getenv(variable))
	if err != nil {
		t.Fatalf("pgtest: %v", err)
	}
	return all
}

var servers = struct {
	mu    sync.Mutex
	start map[string]func() (*Server, error)
	stdin []io.Closer // kept, lest the collector close them and end the servers
}{start: make(map[string]func() (*Server, error))}

// get returns the process's server for a choice, and starts it at the first call.
func get(t testing.TB, choice string) *Server {
	t.Helper()
	servers.mu.Lock()
	start, ok := servers.start[choice]
	if !ok {
		start = sync.OnceValues(func() (*Server, error) {
			if isURL(choice) {
				return givenServer(choice)
			}
			return startServer(choice)
		})
		servers.start[choice] = start
	}
	servers.mu.Unlock()
	s, err := start()
	if err != nil {
		t.Fatalf("pgtest: no PostgreSQL: %v\n%s", err, wayOut)
	}
	return s
}

// givenServer describes a running server.
func givenServer(url string) (*Server, error) {
	ctx, cancel := context.WithTimeout(context.Background(), cleanupTime)
	defer cancel()
	conn, err := pgx.Connect(ctx, url)
	if err != nil {
		return nil, err
	}
	defer conn.Close(ctx)
	s := &Server{url: url}
	err = conn.QueryRow(ctx, `SELECT current_setting('server_version_num')::int / 10000,
		format('PostgreSQL %s, given', current_setting('server_version'))`).Scan(&s.Version, &s.Source)
	if err == nil && s.Version < oldest {
		err = fmt.Errorf("%s, want %d or later", s.Source, oldest)
	}
	return s, err
}

// startServer runs the command throwaway, which lives in a module of its own so
// that Postroom's go.mod need not know of servers. The pipe to its standard input
// is held open by this process alone: when the process ends, in whatever way, the
// server does.
func startServer(version string) (*Server, error) {
	ctx, cancel := context.WithTimeout(context.Background(), startTime)
	defer cancel()
	root, err := repository(ctx)
	if err != nil {
		return nil, err
	}
	var stderr bytes.Buffer // read after the command has ended
	cmd := exec.Command("go", "run", "./cmd/throwaway", "postgres", "-version", version)
	cmd.Dir = filepath.Join(root, "internal", "throwaway")
	cmd.Stderr = &stderr
	stdout, stdoutErr := cmd.StdoutPipe()
	stdin, stdinErr := cmd.StdinPipe()
	if err := errors.Join(stdoutErr, stdinErr, cmd.Start()); err != nil {
		return nil, err
	}
	end := func() error {
		_ = stdin.Close()      // ends the server
		_ = cmd.Process.Kill() // ends go, should it still be building
		return cmd.Wait()
	}
	stopEnd := context.AfterFunc(ctx, func() { _, _ = stdin.Close(), cmd.Process.Kill() })
	line, err := bufio.NewReader(stdout).ReadBytes('\n')
	if err != nil {
		return nil, fmt.Errorf("%s: %w: %s", cmd, errors.Join(ctx.Err(), cmd.Wait()), stderr.Bytes())
	}
	if !stopEnd() {
		return nil, fmt.Errorf("%s: %w", cmd, errors.Join(ctx.Err(), cmd.Wait()))
	}
	var told struct{ URL, Version, Source string }
	if err := json.Unmarshal(line, &told); err != nil {
		return nil, errors.Join(fmt.Errorf("%s: %w", cmd, err), end())
	}
	major, _, _ := strings.Cut(told.Version, ".")
	number, err := strconv.Atoi(major)
	if err != nil {
		return nil, errors.Join(fmt.Errorf("%s: version %q: %w", cmd, told.Version, err), end())
	}
	servers.mu.Lock()
	servers.stdin = append(servers.stdin, stdin)
	servers.mu.Unlock()
	return &Server{Version: number, Source: told.Source, url: told.URL, own: true}, nil
}

// repository returns the directory of Postroom's source.
func repository(ctx context.Context) (string, error) {
	const module = "github.com/postroom/postroom"
	out, err := exec.CommandContext(ctx, "go", "list", "-m", "-f", "{{.Dir}}", module).Output()
	dir := strings.TrimSpace(string(out))
	if err != nil || dir == "" {
		return "", fmt.Errorf("go list -m %s: %w", module, err)
	}
	return dir, nil
}
