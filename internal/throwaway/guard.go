package throwaway

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"sync"
	"syscall"
	"time"
)

// A guard is a small shell process that outlives this one. It reads a pipe that
// only this process holds open. When the pipe ends, because of Close or because
// this process ended in whatever way, it ends the processes that were announced
// on the pipe and removes the directory.
type guard struct {
	dir string
	cmd *exec.Cmd

	mu     sync.Mutex
	pipe   *os.File // nil once closed
	err    error    // of the shell
	waited chan struct{}
}

// guardScript gets the directory as $1, and as $2 the signal that ends what it
// guards. A process that has ended may stay as a
// zombie where nobody collects it, so its state is looked at too.
const guardScript = `
trap '' INT TERM HUP
pids=
while read -r word pid; do
	case $word in
	add) pids="$pids $pid" ;;
	del) left=; for p in $pids; do [ "$p" = "$pid" ] || left="$left $p"; done; pids=$left ;;
	esac
done
alive() {
	kill -0 "$1" 2>/dev/null || return 1
	if [ -r "/proc/$1/stat" ]; then
		read -r stat 2>/dev/null <"/proc/$1/stat" || return 1
		case $stat in *') Z '*) return 1 ;; esac
	fi
}
for p in $pids; do kill "-$2" "$p" 2>/dev/null; done
for p in $pids; do
	n=0
	while alive "$p" && [ $n -lt 200 ]; do sleep 0.05; n=$((n + 1)); done
	kill -KILL "$p" "-$p" 2>/dev/null
done
n=0
until rm -rf "$1" 2>/dev/null; do
	n=$((n + 1)); [ $n -lt 100 ] || exit 1
	sleep 0.05
done
`

// announce has a process tell its guard of itself before it becomes what it is
// to be, so that there is no moment at which the guard does not know of it.
const announce = `echo "add $$" >&3 && exec "$@" 3>&-`

// newGuard makes a new directory for u and guards it.
func newGuard(name string, u owner) (*guard, error) {
	return newGuardWith(name, u, "QUIT")
}

// newGuardWith is for what SIGQUIT does not end, such as Java.
func newGuardWith(name string, u owner, signal string) (*guard, error) {
	dir, err := u.tempDir(name)
	if err != nil {
		return nil, err
	}
	r, w, err := os.Pipe()
	if err != nil {
		return nil, errors.Join(err, os.RemoveAll(dir))
	}
	defer r.Close()
	g := &guard{dir: dir, pipe: w, waited: make(chan struct{})}
	g.cmd = exec.Command("/bin/sh", "-c", guardScript, "throwaway-guard", dir, signal)
	g.cmd.Dir = "/"
	g.cmd.Stdin = r
	g.cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	if err := g.cmd.Start(); err != nil {
		return nil, errors.Join(fmt.Errorf("start guard: %w", err), w.Close(), os.RemoveAll(dir))
	}
	go func() {
		g.err = g.cmd.Wait()
		close(g.waited)
	}()
	return g, nil
}

// path returns a path inside the guarded directory.
func (g *guard) path(elem string) string {
	return filepath.Join(g.dir, elem)
}

// Close ends what is guarded and removes the directory. A second call does
// nothing.
func (g *guard) Close() error {
	g.mu.Lock()
	if g.pipe != nil {
		_ = g.pipe.Close() // the only way to fail is to be closed
		g.pipe = nil
	}
	g.mu.Unlock()
	<-g.waited
	if g.err != nil {
		return fmt.Errorf("remove %s: %w", g.dir, g.err)
	}
	return nil
}

// A child is a guarded process.
type child struct {
	cmd  *exec.Cmd
	log  *tail
	done chan struct{} // closed when the process and all that shared its output ended
	err  error         // how it ended; read it after done
}

// start runs a program as u, in a process group of its own, so that Ctrl-C in a
// terminal reaches only the caller. Its output goes to log and env is added to
// its environment.
func (g *guard) start(u owner, log io.Writer, env []string, program string, args ...string) (*child, error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.pipe == nil {
		return nil, errors.New("the server was closed")
	}
	out := &tail{next: log}
	cmd := exec.Command("/bin/sh", append([]string{"-c", announce, "sh", program}, args...)...)
	cmd.Dir = g.dir
	cmd.Env = append(os.Environ(), env...)
	cmd.Stdout, cmd.Stderr = out, out
	cmd.ExtraFiles = []*os.File{g.pipe}
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Credential: u.credential}
	cmd.WaitDelay = 10 * time.Second
	if err := cmd.Start(); err != nil {
		return nil, fmt.Errorf("start %s: %w", filepath.Base(program), err)
	}
	c := &child{cmd: cmd, log: out, done: make(chan struct{})}
	go func() {
		c.err = cmd.Wait()
		g.forget(cmd.Process.Pid)
		close(c.done)
	}()
	return c, nil
}

func (g *guard) forget(pid int) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.pipe != nil {
		_, _ = fmt.Fprintf(g.pipe, "del %d\n", pid) // a guard that was killed has nothing to forget
	}
}

// run starts a program and waits for its end.
func (g *guard) run(ctx context.Context, u owner, log io.Writer, program string, args ...string) error {
	c, err := g.start(u, log, nil, program, args...)
	if err != nil {
		return err
	}
	select {
	case <-c.done:
	case <-ctx.Done():
		_ = syscall.Kill(-c.cmd.Process.Pid, syscall.SIGKILL) // it may have just ended
		<-c.done
		return fmt.Errorf("%s: %w", filepath.Base(program), context.Cause(ctx))
	}
	if c.err != nil {
		return fmt.Errorf("%s: %w: %s", filepath.Base(program), c.err, c.log)
	}
	return nil
}

// end sends a signal and waits for the process's end.
func (c *child) end(ctx context.Context, sig syscall.Signal) error {
	if err := c.cmd.Process.Signal(sig); err != nil && !errors.Is(err, os.ErrProcessDone) {
		return err
	}
	select {
	case <-c.done:
		return nil
	case <-ctx.Done():
		return fmt.Errorf("wait for the end of process %d after %v: %w", c.cmd.Process.Pid, sig, context.Cause(ctx))
	}
}

// alive reports whether the process has not been seen to end.
func (c *child) alive() bool {
	select {
	case <-c.done:
		return false
	default:
		return true
	}
}

// A tail keeps the end of what is written to it, for error texts, and passes
// everything on.
type tail struct {
	next io.Writer // may be nil

	mu   sync.Mutex
	kept []byte
}

func (t *tail) Write(p []byte) (int, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.kept = append(t.kept, p...)
	if n := len(t.kept) - 4096; n > 0 {
		t.kept = t.kept[n:]
	}
	if t.next != nil {
		return t.next.Write(p)
	}
	return len(p), nil
}

func (t *tail) String() string {
	t.mu.Lock()
	defer t.mu.Unlock()
	return string(bytes.TrimSpace(t.kept))
}
