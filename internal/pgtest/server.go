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
	"time"
)

// variable chooses the servers, see the package comment.
const variable = "POSTROOM_TEST_POSTGRES"

const wayOut = "set " + variable + " to the URL of a PostgreSQL (14 or later) whose user may create databases, or install PostgreSQL"

// parseChoices splits the variable's value: one choice per server, "" for any.
func parseChoices(value string) ([]string, error) {
	value = strings.TrimSpace(value)
	if strings.Contains(value, "://") {
		return []string{value}, nil
	}
	var all []string
	for v := range strings.SplitSeq(value, ",") {
		v = strings.TrimSpace(v)
		if n, err := strconv.Atoi(v); value != "" && (err != nil || n < 14) {
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
		start = sync.OnceValues(func() (*Server, error) { return startServer(choice) })
		servers.start[choice] = start
	}
	servers.mu.Unlock()
	s, err := start()
	if err != nil {
		t.Fatalf("pgtest: start PostgreSQL %s: %v\n%s", choice, err, wayOut)
	}
	return s
}

// startServer runs the command throwaway, which lives in a module of its own so
// that Postroom's go.mod need not know of servers. The pipe to its standard input
// is held open by this process alone: when the process ends, in whatever way, the
// server does.
func startServer(choice string) (*Server, error) {
	ctx, cancel := context.WithTimeout(context.Background(), startTime)
	defer cancel()
	root, err := repository(ctx)
	if err != nil {
		return nil, err
	}
	given := strings.Contains(choice, "://")
	args := []string{"run", "./cmd/throwaway", "postgres"}
	switch {
	case given:
		args = append(args, "-url", choice)
	case choice != "":
		args = append(args, "-version", choice)
	}
	var stderr bytes.Buffer // read after the command has ended
	cmd := exec.Command("go", args...)
	cmd.Dir = filepath.Join(root, "internal", "throwaway")
	cmd.Stderr = &stderr
	stdout, err := cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	stdin, err := cmd.StdinPipe()
	if err != nil {
		return nil, err
	}
	if err := cmd.Start(); err != nil {
		return nil, err
	}
	defer time.AfterFunc(startTime, func() { _ = stdin.Close() }).Stop()
	line, err := bufio.NewReader(stdout).ReadBytes('\n')
	if err != nil {
		return nil, fmt.Errorf("go %s: %w: %s", strings.Join(args, " "), errors.Join(ctx.Err(), cmd.Wait()), stderr.Bytes())
	}
	var told struct{ URL, Version, Source string }
	if err := json.Unmarshal(line, &told); err != nil {
		return nil, errors.Join(fmt.Errorf("go %s: %w", strings.Join(args, " "), err), stdin.Close(), cmd.Wait())
	}
	major, _, _ := strings.Cut(told.Version, ".")
	version, err := strconv.Atoi(major)
	if err != nil {
		return nil, errors.Join(fmt.Errorf("version %q: %w", told.Version, err), stdin.Close(), cmd.Wait())
	}
	servers.mu.Lock()
	servers.stdin = append(servers.stdin, stdin)
	servers.mu.Unlock()
	return &Server{Version: version, Source: told.Source, url: told.URL, own: !given}, nil
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
