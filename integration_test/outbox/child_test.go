package outbox_test

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"os"
	osexec "os/exec"
	"os/signal"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/postroom/postroom/dispatcher"
)

// childVariable, in the environment of this test binary, makes it a dispatcher
// in a process of its own, as its value says.
const childVariable = "POSTROOM_TEST_CHILD"

// childConfig tells a child what to do.
type childConfig struct {
	URL, Journal, Name string
	PageSize           int
	PublishTimeout     time.Duration
	Lease              time.Duration
	Fail               int
	Delay              time.Duration
	Faults             string // a file that holds faults, see there
	MaxAttempts        int
	Exit               string // the id of a message that ends the process
	Away               bool   // the broker takes nothing
}

func childMain() int {
	if err := runChild(); err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	return 0
}

func runChild() error {
	var c childConfig
	if err := json.Unmarshal([]byte(os.Getenv(childVariable)), &c); err != nil {
		return err
	}
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM)
	defer stop()
	go func() { // the parent's end is the child's
		_, _ = io.Copy(io.Discard, os.Stdin)
		os.Exit(2)
	}()
	j, err := openJournal(c.Journal, c.Name)
	if err != nil {
		return err
	}
	j.fail, j.delay, j.faults, j.exit, j.away = c.Fail, c.Delay, c.Faults, c.Exit, c.Away
	pool, err := pgxpool.New(ctx, c.URL)
	if err != nil {
		return err
	}
	defer pool.Close()
	d, err := dispatcher.New(pool, j, dispatcher.Config{
		PageSize: c.PageSize, PublishTimeout: c.PublishTimeout, Lease: c.Lease, MaxAttempts: c.MaxAttempts,
		Logger: slog.New(slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{Level: slog.LevelError + 1})),
	})
	if err != nil {
		return err
	}
	err = d.Run(ctx)
	fmt.Fprintf(os.Stderr, "lost=%d\n", d.Lanes().Lost)
	return err
}

// child is a dispatcher in another process.
type child struct {
	name string
	cmd  *osexec.Cmd
	done chan error

	mu    sync.Mutex
	lines []string // what it has written to its standard error
}

// said reports whether the process has written a line.
func (p *child) said(line string) bool { return p.count(line) > 0 }

func startChild(t testing.TB, c childConfig) *child {
	t.Helper()
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	text, err := json.Marshal(c)
	if err != nil {
		t.Fatal(err)
	}
	cmd := osexec.Command(self)
	cmd.Env = append(os.Environ(), childVariable+"="+string(text))
	stderr, err := cmd.StderrPipe()
	if err != nil {
		t.Fatal(err)
	}
	if _, err := cmd.StdinPipe(); err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	p := &child{name: c.Name, cmd: cmd, done: make(chan error, 1)}
	go func() {
		lines := bufio.NewScanner(stderr)
		for lines.Scan() {
			p.mu.Lock()
			p.lines = append(p.lines, lines.Text())
			p.mu.Unlock()
			if testing.Verbose() {
				fmt.Fprintf(os.Stderr, "%s: %s\n", c.Name, lines.Text())
			}
		}
		p.done <- cmd.Wait()
	}()
	t.Cleanup(func() { p.kill() })
	return p
}

// count returns how often the process has written a line.
func (p *child) count(line string) (n int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, l := range p.lines {
		if l == line {
			n++
		}
	}
	return n
}

// ended reports whether the process has ended.
func (p *child) ended() bool {
	select {
	case err := <-p.done:
		p.done <- err
		return true
	default:
		return false
	}
}

// kill ends the process as a power cut does.
func (p *child) kill() {
	p.signal(syscall.SIGKILL)
	p.done <- <-p.done
}

// stop asks the process to settle and end.
func (p *child) stop(t testing.TB) {
	t.Helper()
	p.signal(syscall.SIGTERM)
	select {
	case err := <-p.done:
		p.done <- err
		if err != nil {
			t.Errorf("a dispatcher that was stopped: %v", err)
		}
	case <-time.After(time.Minute):
		t.Errorf("a dispatcher has not stopped 20s after SIGTERM")
		p.kill()
	}
}

func (p *child) signal(sig os.Signal) { _ = p.cmd.Process.Signal(sig) } // it may have ended
