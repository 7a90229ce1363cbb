package main

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
)

// commandVariable has the test program be the command.
const commandVariable = "THROWAWAY_TEST_COMMAND"

func TestMain(m *testing.M) {
	if os.Getenv(commandVariable) != "" {
		main()
		os.Exit(0)
	}
	os.Exit(m.Run())
}

func TestServerLivesUntilToldToEnd(t *testing.T) {
	tests := []struct {
		name string
		args []string
		keys []string
		dir  string // the key of a directory that goes at the end; may be missing
		end  func(*exec.Cmd, io.Closer) error
	}{
		{
			"postgres, end of input",
			[]string{"postgres", "-set", "work_mem=5MB"},
			[]string{"url", "version", "source", "data_dir", "bin_dir"},
			"data_dir",
			func(_ *exec.Cmd, stdin io.Closer) error { return stdin.Close() },
		},
		{
			"postgres, SIGTERM",
			[]string{"postgres"},
			[]string{"url"},
			"data_dir",
			func(cmd *exec.Cmd, _ io.Closer) error { return cmd.Process.Signal(syscall.SIGTERM) },
		},
		{
			"nats, end of input",
			[]string{"nats"},
			[]string{"url", "store_dir"},
			"store_dir",
			func(_ *exec.Cmd, stdin io.Closer) error { return stdin.Close() },
		},
		{
			"nats, SIGINT",
			[]string{"nats"},
			[]string{"url"},
			"store_dir",
			func(cmd *exec.Cmd, _ io.Closer) error { return cmd.Process.Signal(syscall.SIGINT) },
		},
		{
			"kafka, end of input",
			[]string{"kafka", "-require-real", "-set", "num.io.threads=4"},
			[]string{"brokers", "version", "source"},
			"",
			func(_ *exec.Cmd, stdin io.Closer) error { return stdin.Close() },
		},
		{
			"kfake, SIGTERM",
			[]string{"kafka", "-fake", "-version", "3.9"},
			[]string{"brokers", "version", "source"},
			"",
			func(cmd *exec.Cmd, _ io.Closer) error { return cmd.Process.Signal(syscall.SIGTERM) },
		},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			cmd := exec.Command(os.Args[0], tt.args...)
			cmd.Env = append(os.Environ(), commandVariable+"=1")
			cmd.Stderr = t.Output()
			stdin, stdinErr := cmd.StdinPipe()
			stdout, stdoutErr := cmd.StdoutPipe()
			if err := errors.Join(stdinErr, stdoutErr, cmd.Start()); err != nil {
				t.Fatal(err)
			}
			defer func() { _ = cmd.Process.Kill() }() // where the test failed before
			line, err := bufio.NewReader(stdout).ReadBytes('\n')
			if err != nil {
				t.Fatal(err)
			}
			var told map[string]string
			if err := json.Unmarshal(line, &told); err != nil {
				t.Fatal(err)
			}
			for _, key := range tt.keys {
				if told[key] == "" {
					t.Errorf("%s lacks %q", line, key)
				}
			}
			if tt.dir != "" {
				if _, err := os.Stat(told[tt.dir]); err != nil {
					t.Error(err)
				}
			}
			if err := tt.end(cmd, stdin); err != nil {
				t.Fatal(err)
			}
			if err := cmd.Wait(); err != nil {
				t.Errorf("the command ended with %v", err)
			}
			if tt.dir == "" {
				return
			}
			if _, err := os.Stat(filepath.Dir(told[tt.dir])); !errors.Is(err, os.ErrNotExist) {
				t.Errorf("the directory is still there: %v", err)
			}
		})
	}
}

func TestUsageErrors(t *testing.T) {
	tests := []struct {
		args []string
		want string
	}{
		{nil, "usage:"},
		{[]string{"mysql"}, `unknown server "mysql"`},
		{[]string{"postgres", "15"}, `unexpected argument "15"`},
		{[]string{"postgres", "-set", "work_mem"}, "want name=value"},
		{[]string{"postgres", "-version", "9"}, "PostgresConfig.Version"},
		{[]string{"nats", "-port", "-2"}, "NATSConfig.Port"},
		{[]string{"kafka", "-version", "0.8"}, "KafkaConfig.Version"},
		{[]string{"kafka", "-fake", "-require-real"}, "KafkaConfig.Fake"},
	}
	for _, tt := range tests {
		err := run(context.Background(), tt.args, io.Discard, io.Discard)
		if err == nil || !strings.Contains(err.Error(), tt.want) {
			t.Errorf("throwaway %q: %v, want an error that says %q", tt.args, err, tt.want)
		}
	}
}
