package main

import (
	"bytes"
	"io"
	"os"
	"os/exec"
	"regexp"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/postroom/postroom/internal/throwaway"
)

// TestMain lets the test binary be the program, which starts itself again for
// its worker processes.
func TestMain(m *testing.M) {
	if len(os.Args) > 1 && (os.Args[1] == roleDispatcher || os.Args[1] == roleConsumer) {
		os.Exit(run(os.Args[1:], os.Stdin, os.Stdout, os.Stderr))
	}
	if os.Getenv("QUICKSTART_TEST_MAIN") != "" {
		main()
	}
	os.Exit(m.Run())
}

// figures reads the table: label → number.
func figures(t *testing.T, out string) map[string]string {
	t.Helper()
	rows := regexp.MustCompile(`(?m)^  (\w[^\n]*?) {2,}([\d,-]+)(?:   .*)?$`).FindAllStringSubmatch(out, -1)
	got := map[string]string{}
	for _, r := range rows {
		got[r[1]] = r[2]
	}
	if len(got) < 10 {
		t.Fatalf("no table in:\n%s", out)
	}
	return got
}

func TestQuickstart(t *testing.T) {
	for _, broker := range []string{brokerNATS, brokerKafka} {
		t.Run(broker, func(t *testing.T) { testQuickstart(t, broker) })
	}
}

func testQuickstart(t *testing.T, broker string) {
	var out, errout bytes.Buffer
	code := run([]string{"-broker", broker, "-messages", "500", "-kills", "3", "-seed", "7"}, nil, &out, &errout)
	t.Logf("%s%s", &out, &errout)
	if code != exitOK {
		t.Errorf("exit code %d, want %d", code, exitOK)
	}
	got := figures(t, out.String())
	want := map[string]string{
		"transactions committed":     "500",
		"messages published":         "500",
		"effects":                    "1,000",
		"lost":                       "0",
		"doubled":                    "0",
		"rolled back, yet published": "0",
		"altered on the way":         "0",
		"out of order at the broker": "0",
	}
	if broker == brokerKafka {
		want["out of order in effect"] = "0"
	}
	for label, n := range want {
		if got[label] != n {
			t.Errorf("%s: %q, want %q", label, got[label], n)
		}
	}
	for _, label := range []string{"transactions rolled back", "repeats published", "duplicates caught", "deliveries"} {
		if n := got[label]; n == "" || n == "0" {
			t.Errorf("%s: %q, want some", label, n)
		}
	}
	// A quick run is over before the last one.
	if n := strings.Count(out.String(), "s  killed "); n == 0 || n > 3 {
		t.Errorf("%d kills reported, want 1 to 3", n)
	}
}

// The check at the end is worth something only if it notices.
func TestBrokenPromisesAreNoticed(t *testing.T) {
	kafka := startKafka(t, throwaway.KafkaConfig{})
	onNATS := []string{"-broker", brokerNATS}
	onKafka := []string{"-broker", brokerKafka, "-kafka-brokers", strings.Join(kafka.Brokers, ",")}
	tests := []struct {
		broker      []string
		breaks, row string
	}{
		{onNATS, breakDedupe, "doubled"},
		{onNATS, breakOutbox, "rolled back, yet published"},
		{onNATS, breakOrder, "out of order at the broker"},
		{onNATS, breakPublish, "lost"},
		{onKafka, breakDedupe, "doubled"},
		{onKafka, breakOutbox, "rolled back, yet published"},
		{onKafka, breakOrder, "out of order at the broker"},
		{onKafka, breakPublish, "lost"},
		{onKafka, breakDelivery, "out of order in effect"},
	}
	for _, tt := range tests {
		t.Run(tt.broker[1]+" "+tt.breaks, func(t *testing.T) {
			var out, errout bytes.Buffer
			patience := "3s"
			if tt.broker[1] == brokerKafka {
				patience = "12s" // a busy machine takes seconds to form a group
			}
			args := []string{"-messages", "300", "-kills", "0", "-seed", "7", "-timeout", patience, "-break", tt.breaks}
			code := run(append(args, tt.broker...), nil, &out, &errout)
			if code != exitFailed {
				t.Errorf("exit code %d, want %d", code, exitFailed)
			}
			if n := figures(t, out.String())[tt.row]; n == "" || n == "0" {
				t.Errorf("%s: %q, want some", tt.row, n)
			}
			if !strings.Contains(out.String(), "FAILED: ") {
				t.Error("it does not say that it failed")
			}
			if t.Failed() {
				t.Logf("%s%s", &out, &errout)
			}
		})
	}
}

// Ctrl-C and a killed main program leave no process behind: all of them hold
// the same pipe, which ends with the last of them.
func TestNothingIsLeftBehind(t *testing.T) {
	tests := []struct {
		broker string
		sig    syscall.Signal
	}{
		{brokerNATS, syscall.SIGINT},
		{brokerNATS, syscall.SIGKILL},
		{brokerKafka, syscall.SIGINT},
		{brokerKafka, syscall.SIGKILL},
	}
	for _, tt := range tests {
		t.Run(tt.broker+" "+tt.sig.String(), func(t *testing.T) {
			cmd := exec.CommandContext(t.Context(), os.Args[0], "-broker", tt.broker, "-messages", "1000000")
			cmd.Env = append(os.Environ(), "QUICKSTART_TEST_MAIN=1")
			r, w, err := os.Pipe()
			if err != nil {
				t.Fatal(err)
			}
			defer r.Close()
			cmd.Stdout = w
			cmd.Stderr = w
			cmd.ExtraFiles = []*os.File{w}
			if err := cmd.Start(); err != nil {
				t.Fatal(err)
			}
			w.Close()
			var out bytes.Buffer
			running := regexp.MustCompile(`effects [1-9]`)
			buf := make([]byte, 4096)
			for !running.Match(out.Bytes()) {
				n, err := r.Read(buf)
				if err != nil {
					t.Fatalf("%v, after:\n%s", err, &out)
				}
				out.Write(buf[:n])
			}
			if err := cmd.Process.Signal(tt.sig); err != nil {
				t.Fatal(err)
			}
			if err := r.SetReadDeadline(time.Now().Add(30 * time.Second)); err != nil {
				t.Fatal(err)
			}
			if _, err := io.Copy(&out, r); err != nil {
				t.Errorf("a process is still there: %v, after:\n%s", err, &out)
			}
			if err := cmd.Wait(); err == nil {
				t.Error("it exits with 0, although it was ended")
			}
		})
	}
}

func TestUsage(t *testing.T) {
	tests := []struct {
		args []string
		want string
		code int
	}{
		{[]string{"-broker", "pigeon"}, `-broker is "pigeon", want nats or kafka`, exitUsage},
		{[]string{"-messages", "0", "-kills", "-1"}, "-kills is -1, want 0 to 1000", exitUsage},
		{[]string{"-break", "everything"}, `-break is "everything", want one of dedupe`, exitUsage},
		{[]string{"-break", "delivery"}, "-break delivery needs -broker kafka", exitUsage},
		{[]string{"-nats-url", "nats://127.0.0.1:1", "-broker", "kafka"}, "-nats-url is given, but -broker is not nats", exitUsage},
		{[]string{"-kafka-brokers", "127.0.0.1:1"}, "-kafka-brokers is given, but -broker is not kafka", exitUsage},
		{[]string{"more"}, `unexpected argument "more"`, exitUsage},
		{[]string{"-h"}, "-database-url", exitOK},
		{[]string{roleConsumer}, "is started by the quick start itself", exitUsage},
		{[]string{"-database-url", "postgres://nobody@127.0.0.1:1/none"}, "quickstart: ", exitFailed},
	}
	for _, tt := range tests {
		var out, errout bytes.Buffer
		code := run(tt.args, strings.NewReader(""), &out, &errout)
		if code != tt.code || !strings.Contains(errout.String(), tt.want) {
			t.Errorf("%q: exit code %d, %q; want %d, %q", tt.args, code, &errout, tt.code, tt.want)
		}
	}
}
