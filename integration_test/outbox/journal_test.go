package outbox_test

import (
	"bytes"
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"strconv"
	"sync"
	"testing"
	"time"

	"github.com/postroom/postroom"
	"github.com/postroom/postroom/broker"
)

// line is a message that a publisher has stored.
type line struct {
	By      string // which publisher stored it
	Call    int
	Message postroom.Message
}

// journal is a publisher whose messages outlive its process: each is a line of
// a file before its result says stored. Several processes may share the file.
type journal struct {
	by    string
	file  *os.File
	fail  int           // every n-th message is unreachable; 0: none
	delay time.Duration // per call
	exit  string        // a message with this id ends the process
	away  bool          // nothing is stored

	faults string // the name of a file that holds faults; empty: none

	mu    sync.Mutex
	calls int
	count int
}

func openJournal(path, by string) (*journal, error) {
	f, err := os.OpenFile(path, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	return &journal{by: by, file: f}, err
}

var errAway = errors.New("away")

func (j *journal) Publish(ctx context.Context, msgs []postroom.Message) []broker.Result {
	if j.delay > 0 {
		t := time.NewTimer(j.delay)
		defer t.Stop()
		select {
		case <-t.C:
		case <-ctx.Done():
		}
	}
	if j.away {
		fmt.Fprintln(os.Stderr, "away")
	}
	j.mu.Lock()
	j.calls++
	call := j.calls
	j.mu.Unlock()
	results := make([]broker.Result, len(msgs))
	failed := map[[2]string]bool{}
	f := readFaults(j.faults)
	for i, m := range msgs {
		key := [2]string{m.Topic, m.Key}
		if m.HasKey() && failed[key] {
			continue
		}
		if r, ok := f.result(m); ok {
			failed[key] = true
			results[i] = r
			continue
		}
		if m.ID == j.exit {
			os.Exit(3)
		}
		if err := j.store(ctx, line{j.by, call, m}); err != nil {
			failed[key] = true
			results[i] = broker.Result{Outcome: broker.Unreachable, Err: err}
			continue
		}
		results[i].Outcome = broker.Stored
	}
	return results
}

func (j *journal) store(ctx context.Context, l line) error {
	if ctx.Err() != nil || j.away {
		return cmp.Or(ctx.Err(), errAway)
	}
	text, err := json.Marshal(l)
	if err != nil {
		return err
	}
	j.mu.Lock()
	j.count++
	n := j.count
	j.mu.Unlock()
	lost := j.fail > 0 && n%j.fail == 0
	if lost && n%(2*j.fail) == 0 {
		return errAway
	}
	_, err = j.file.Write(append(text, '\n')) // one call: nothing comes between
	if lost {
		return errAway // stored, and nobody knows
	}
	return err
}

func (j *journal) Close() error { return j.file.Close() }

// journalReader reads what processes append to a journal.
type journalReader struct {
	path   string
	offset int64
	lines  []line
}

// read returns all lines, but for one that a killed process did not end.
func (r *journalReader) read(t testing.TB) []line {
	t.Helper()
	f, err := os.Open(r.path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	text, err := io.ReadAll(io.NewSectionReader(f, r.offset, 1<<40))
	if err != nil {
		t.Fatal(err)
	}
	for l := range bytes.Lines(text) {
		if l[len(l)-1] != '\n' {
			break
		}
		var v line
		if err := json.Unmarshal(l, &v); err != nil {
			t.Fatalf("journal: %v: %.200s", err, l)
		}
		r.offset += int64(len(l))
		r.lines = append(r.lines, v)
	}
	return r.lines
}

func (r *journalReader) messages(t testing.TB) []postroom.Message {
	t.Helper()
	var msgs []postroom.Message
	for _, l := range r.read(t) {
		msgs = append(msgs, l.Message)
	}
	return msgs
}

// recorder is a publisher that remembers what it stored, in order.
type recorder struct {
	// before, where set, runs before each call stores anything.
	before func(ctx context.Context, msgs []postroom.Message)

	// refuse, where set, says which messages to refuse.
	refuse func(m postroom.Message) bool

	mu     sync.Mutex
	stored []postroom.Message
	calls  int
}

func (r *recorder) Publish(ctx context.Context, msgs []postroom.Message) []broker.Result {
	if r.before != nil {
		r.before(ctx, msgs)
	}
	results := make([]broker.Result, len(msgs))
	failed := map[[2]string]bool{}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.calls++
	for i, m := range msgs {
		key := [2]string{m.Topic, m.Key}
		switch {
		case m.HasKey() && failed[key]:
		case r.refuse != nil && r.refuse(m):
			failed[key] = true
			results[i] = broker.Result{Outcome: broker.Refused, Err: errors.New("never")}
		case ctx.Err() != nil:
			failed[key] = true
			results[i] = broker.Result{Outcome: broker.Unreachable, Err: ctx.Err()}
		default:
			r.stored = append(r.stored, m)
			results[i].Outcome = broker.Stored
		}
	}
	return results
}

func (r *recorder) Close() error { return nil }

func (r *recorder) messages() []postroom.Message {
	r.mu.Lock()
	defer r.mu.Unlock()
	return append([]postroom.Message(nil), r.stored...)
}

// firsts returns the messages in the order of their first arrival, and a
// problem where a repeat differs.
func firsts(msgs []postroom.Message) (first []postroom.Message, problem string) {
	seen := map[string][32]byte{}
	for _, m := range msgs {
		sum := sha256.Sum256(fmt.Appendf(nil, "%#v", m))
		if old, ok := seen[m.ID]; !ok {
			seen[m.ID] = sum
			first = append(first, m)
		} else if old != sum {
			problem = fmt.Sprintf("message %s was repeated with other content: %#v", m.ID, m)
		}
	}
	return first, problem
}

// numbered returns n messages m<from>, … whose keys, k0 to k<keys-1>, take turns
// and whose payloads are their numbers.
func numbered(keys, from, n int) []postroom.Message {
	var msgs []postroom.Message
	for i := from; i < from+n; i++ {
		msgs = append(msgs, postroom.Message{
			ID: "m" + strconv.Itoa(i), Topic: "orders", Key: "k" + strconv.Itoa(i%keys), Payload: []byte(strconv.Itoa(i)),
		})
	}
	return msgs
}

// wantNumbers checks that exactly the messages numbered from to to-1 arrived,
// those of each key in ascending order.
func wantNumbers(msgs []postroom.Message, from, to int) string {
	first, problem := firsts(msgs)
	if problem != "" {
		return problem
	}
	last := map[string]int{}
	got := map[int]bool{}
	for _, m := range first {
		n, err := strconv.Atoi(string(m.Payload))
		if err != nil || n < from || n >= to {
			return fmt.Sprintf("message %s arrived, want only %d to %d", m.ID, from, to-1)
		}
		if prev, ok := last[m.Key]; ok && n < prev {
			return fmt.Sprintf("key %s: %d came after %d", m.Key, n, prev)
		}
		last[m.Key], got[n] = n, true
	}
	for n := from; n < to; n++ {
		if !got[n] {
			return fmt.Sprintf("%d of %d messages arrived, %d is the first that did not", len(got), to-from, n)
		}
	}
	return ""
}
