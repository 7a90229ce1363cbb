package throwaway_test

import (
	"bufio"
	"encoding/json"
	"errors"
	"io"
	"io/fs"
	"net"
	"os"
	"os/exec"
	"os/user"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"github.com/jackc/pgx/v5"
)

// However a program ends, its servers and their directories go.
func TestServersEndWithTheProgram(t *testing.T) {
	for _, end := range []string{"SIGKILL", "SIGINT", "SIGTERM", "SIGHUP", "panic", "exit", "close"} {
		t.Run(end, func(t *testing.T) {
			t.Parallel()
			cmd := exec.Command(os.Args[0])
			endAndLook(t, cmd, end)
		})
	}
}

// What root does with another user's help, an ordinary user does alone. Where
// the tests run as an ordinary user the other tests show it.
func TestAsOrdinaryUser(t *testing.T) {
	if os.Geteuid() != 0 {
		return
	}
	u, err := user.Lookup("nobody")
	if err != nil {
		t.Fatal(err)
	}
	uid, uidErr := strconv.ParseUint(u.Uid, 10, 32)
	gid, gidErr := strconv.ParseUint(u.Gid, 10, 32)
	if err := errors.Join(uidErr, gidErr); err != nil {
		t.Fatal(err)
	}
	home, err := os.MkdirTemp("/tmp", "throwaway-home-") //nolint:usetesting // t.TempDir is closed to others
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(home) })
	if err := os.Chown(home, int(uid), int(gid)); err != nil {
		t.Fatal(err)
	}
	program := filepath.Join(home, "program")
	text, err := os.ReadFile(os.Args[0])
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(program, text, 0o755); err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(program)
	cmd.Dir = home
	cmd.Env = []string{"HOME=" + home, "PATH=" + os.Getenv("PATH")}
	cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: uint32(uid), Gid: uint32(gid)}}
	told := endAndLook(t, cmd, "SIGKILL")
	if !strings.HasPrefix(told.Source, "PostgreSQL ") {
		t.Errorf("source %q", told.Source)
	}
}

// endAndLook runs the child, uses its server, ends it, and waits until nothing
// is left.
func endAndLook(t *testing.T, cmd *exec.Cmd, end string) started {
	t.Helper()
	if cmd.Env == nil {
		cmd.Env = os.Environ()
	}
	cmd.Env = append(cmd.Env, childVariable+"="+end)
	var stderr strings.Builder
	cmd.Stderr = &stderr
	stdin, stdinErr := cmd.StdinPipe()
	stdout, stdoutErr := cmd.StdoutPipe()
	if err := errors.Join(stdinErr, stdoutErr, cmd.Start()); err != nil {
		t.Fatal(err)
	}
	defer func() { _ = cmd.Process.Kill() }() // where the test failed before
	line, err := bufio.NewReader(stdout).ReadBytes('\n')
	if err != nil {
		t.Fatalf("child: %v: %v: %s", err, cmd.Wait(), stderr.String())
	}
	var told started
	if err := json.Unmarshal(line, &told); err != nil {
		t.Fatal(err)
	}
	pid := postmaster(t, told.Dirs[0])
	// A session in use must not keep the server.
	conn, err := pgx.Connect(t.Context(), told.URL)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close(t.Context())

	if sig, ok := map[string]os.Signal{
		"SIGKILL": syscall.SIGKILL, "SIGINT": syscall.SIGINT, "SIGTERM": syscall.SIGTERM, "SIGHUP": syscall.SIGHUP,
	}[end]; ok {
		err = cmd.Process.Signal(sig)
	} else {
		_, err = io.WriteString(stdin, "\n")
	}
	if err != nil {
		t.Fatal(err)
	}
	_ = cmd.Wait() // however it ended
	eventually(t, "PostgreSQL has ended", func() bool { return !alive(pid) })
	for _, dir := range told.Dirs {
		eventually(t, dir+" is removed", func() bool {
			_, err := os.Stat(dir)
			return errors.Is(err, fs.ErrNotExist)
		})
	}
	for _, port := range told.Ports {
		if conn, err := net.Dial("tcp", net.JoinHostPort("127.0.0.1", strconv.Itoa(port))); err == nil {
			_ = conn.Close()
			t.Errorf("port %d still answers", port)
		}
	}
	return told
}

func postmaster(t *testing.T, dir string) int {
	t.Helper()
	text, err := os.ReadFile(filepath.Join(dir, "data", "postmaster.pid"))
	if err != nil {
		t.Fatal(err)
	}
	first, _, _ := strings.Cut(string(text), "\n")
	pid, err := strconv.Atoi(first)
	if err != nil {
		t.Fatal(err)
	}
	if !alive(pid) {
		t.Fatalf("process %d of postmaster.pid does not run", pid)
	}
	return pid
}

// alive looks at the state too: a process that nobody collects stays a zombie.
func alive(pid int) bool {
	if errors.Is(syscall.Kill(pid, 0), syscall.ESRCH) {
		return false
	}
	stat, err := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/stat")
	return err != nil || !strings.Contains(string(stat), ") Z ")
}
