package nats_test

import (
	"context"
	"fmt"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	natsgo "github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/postroom/postroom"
	"github.com/postroom/postroom/broker"
	"github.com/postroom/postroom/broker/nats"
)

// isAck holds for the answer of a stream to a publish.
func (f *frame) isAck() bool {
	return f.fromServer && f.op() == "MSG" && strings.Contains(string(f.body), `"seq":`) &&
		strings.HasPrefix(string(f.body), `{"stream":`)
}

// answer replaces the body of a message.
func (f *frame) answer(body string) {
	f.body = []byte(body + "\r\n")
	f.fields[len(f.fields)-1] = strconv.Itoa(len(body))
}

// B64: "duplicate" without a real sequence is not stored.
func TestCase_B64_DuplicateWithoutSequence(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	r.stream("orders")
	b := r.open()
	for name, body := range map[string]string{
		"sequence 0":     `{"stream":"orders","seq":0,"duplicate":true}`,
		"no sequence":    `{"stream":"orders","duplicate":true}`,
		"in progress":    `{"error":{"code":400,"err_code":10201,"description":"duplicate message id is in process"}}`,
		"another stream": `{"stream":"other","seq":7}`,
		"ok":             `+OK`,
		"empty":          ``,
	} {
		swallow, done := once(func(f *frame) bool {
			if f.isAck() {
				f.answer(body)
				return true
			}
			return false
		})
		r.proxy.filtered(func(f *frame) bool { swallow(f); return true })
		msg := postroom.Message{ID: name, Topic: "orders"}
		if res := b.Publish(t.Context(), []postroom.Message{msg})[0]; res.Outcome != broker.Unreachable || !done() {
			t.Errorf("%s: %v (%v)", name, res.Outcome, res.Err)
		}
		r.proxy.filtered(nil)
		r.store(b, msg) // now the answer is: duplicate, with a real sequence
	}
	if got := r.stored("orders"); len(got) != 6 {
		t.Errorf("the stream holds %q", got)
	}
}

// B69: answers that get lost leave nothing behind that could stall the next.
func TestCase_B69_LostAnswers(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	r.stream("orders")
	b := r.open(func(c *nats.Config) { c.PublishTimeout = 3 * time.Second })
	r.store(b, messages("orders", "", 1, 1)...)
	r.proxy.filtered(func(f *frame) bool { return !f.isAck() })
	began := time.Now()
	for i, res := range b.Publish(t.Context(), messages("orders", "", 2, 501)) {
		if res.Outcome != broker.Unreachable {
			t.Fatalf("message %d is %v", i, res.Outcome)
		}
	}
	if d := time.Since(began); d > 30*time.Second {
		t.Errorf("it took %v to give up", d)
	}
	r.proxy.filtered(nil)
	r.store(b, messages("orders", "", 2, 10_000)...)
	if got := len(r.stored("orders")); got != 10_000 {
		t.Errorf("the stream holds %d messages, want 10000 without repeats", got)
	}
	r.proxy.filtered(func(f *frame) bool { return !f.isAck() })
	go func() {
		until(t, "a publish waits", func() bool { return true })
		_ = b.Close()
	}()
	b.Publish(t.Context(), messages("orders", "", 20_001, 20_100)) // returns
}

// B70: without a stream nothing is ever stored, whoever answers.
func TestCase_B70_NoStream(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	b := r.open(func(c *nats.Config) { c.PublishTimeout = 500 * time.Millisecond })
	try := func(who string) {
		t.Helper()
		began := time.Now()
		res := b.Publish(t.Context(), messages("orders", "", 1, 1))[0]
		if res.Outcome != broker.Unreachable || res.Scope != "orders" || res.Err == nil {
			t.Errorf("%s: %v, scope %q, %v", who, res.Outcome, res.Scope, res.Err)
		}
		if d := time.Since(began); d > 5*time.Second {
			t.Errorf("%s: it took %v", who, d)
		}
	}
	try("nobody")
	silent, err := r.nc.Subscribe("orders", func(*natsgo.Msg) {})
	if err != nil {
		t.Fatal(err)
	}
	try("a plain subscriber")
	_ = silent.Unsubscribe()
	for _, reply := range []string{"ok", `{"ok":true}`, `{"stream":"orders","seq":1}`} {
		sub, err := r.nc.Subscribe("orders", func(m *natsgo.Msg) { _ = m.Respond([]byte(reply)) })
		if err != nil || r.nc.Flush() != nil {
			t.Fatal(err)
		}
		try("a responder that says " + reply)
		_ = sub.Unsubscribe()
	}
	r.stream("orders")
	until(t, "publishing goes on by itself", func() bool {
		return b.Publish(t.Context(), messages("orders", "", 1, 1))[0].Outcome == broker.Stored
	})
}

// B73: nothing is stored by a client's buffer.
func TestCase_B73_NothingIsBuffered(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	r.stream("orders")
	b := r.open(func(c *nats.Config) { c.PublishTimeout = 500 * time.Millisecond })
	r.store(b, messages("orders", "", 1, 1)...)
	r.server.Stop()
	for i, res := range b.Publish(t.Context(), messages("orders", "", 2, 101)) {
		if res.Outcome == broker.Stored {
			t.Fatalf("message %d is stored, without a server", i)
		}
	}
	if err := r.server.Start(context.Background()); err != nil {
		t.Fatal(err)
	}
	until(t, "the server has the last message", func() bool {
		return b.Publish(t.Context(), messages("orders", "", 102, 102))[0].Outcome == broker.Stored
	})
	if got := r.stored("orders"); len(got) != 2 || got[1] != "orders-102" {
		t.Errorf("the stream holds %q: something was sent later", got)
	}
}

// B78: limits that drop unread messages are refused at start; a full stream is
// nobody's fault.
func TestCase_B78_StreamLimits(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	r.stream("old", func(c *jetstream.StreamConfig) { c.MaxMsgs, c.Discard = 100, jetstream.DiscardOld })
	c := config()
	c.Topics = []string{"old"}
	_, err := nats.Open(t.Context(), r.proxy.url(), c)
	if err == nil || !strings.Contains(err.Error(), "AllowDiscard") {
		t.Errorf("Open: %v, want a refusal that names AllowDiscard", err)
	}
	c.AllowDiscard = true
	if b, err := nats.Open(t.Context(), r.proxy.url(), c); err != nil {
		t.Error(err)
	} else {
		_ = b.Close()
	}

	r.stream("new", func(c *jetstream.StreamConfig) { c.MaxMsgs, c.Discard = 100, jetstream.DiscardNew })
	b := r.open(func(c *nats.Config) { c.Topics = []string{"new"} })
	results := b.Publish(t.Context(), messages("new", "", 1, 150))
	for i, res := range results {
		if res.Outcome != broker.Stored && (res.Outcome != broker.Unreachable || res.Scope != "new") {
			t.Fatalf("message %d of a full stream is %v, scope %q: %v", i, res.Outcome, res.Scope, res.Err)
		}
	}
	if got := len(r.stored("new")); got != 100 {
		t.Errorf("the stream holds %d", got)
	}
	s, err := r.js.Stream(t.Context(), "new")
	if err != nil || s.Purge(t.Context()) != nil {
		t.Fatal(err)
	}
	until(t, "there is room again", func() bool {
		return b.Publish(t.Context(), messages("new", "", 200, 200))[0].Outcome == broker.Stored
	})
}

// B97: first arrivals keep each key's order when a publish, or its answer, is
// swallowed amid thousands.
func TestCase_B97_OrderAroundAFailure(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	b := r.open(func(c *nats.Config) { c.PublishTimeout = 300 * time.Millisecond })
	for name, match := range map[string]func(topic string, n *int) func(*frame) bool{
		"publish": func(topic string, _ *int) func(*frame) bool {
			return func(f *frame) bool { return f.op() == "HPUB" && f.id() == topic+"-k5-50" }
		},
		"answer": func(topic string, n *int) func(*frame) bool {
			return func(f *frame) bool {
				if !f.isAck() {
					return false
				}
				*n++
				return *n == 500
			}
		},
	} {
		t.Run(name, func(t *testing.T) {
			r.stream(name)
			var n int
			filter, done := once(match(name, &n))
			r.proxy.filtered(filter)
			defer r.proxy.filtered(nil)
			var msgs []postroom.Message
			for i := 1; i <= 100; i++ {
				for k := range 10 {
					msgs = append(msgs, messages(name, fmt.Sprint("k", k), i, i)...)
				}
			}
			for left := msgs; len(left) > 0; { // as the dispatcher does
				var next []postroom.Message
				failed := map[string]bool{}
				for i, res := range b.Publish(t.Context(), left) {
					if res.Outcome == broker.Refused {
						t.Fatalf("refused: %v", res.Err)
					}
					if res.Outcome == broker.Stored && failed[left[i].Key] {
						t.Errorf("%s is stored although an earlier one of its key is not", left[i].ID)
					}
					if res.Outcome != broker.Stored {
						failed[left[i].Key] = true
						next = append(next, left[i])
					}
				}
				if len(failed) > 1 {
					t.Errorf("%d keys were delayed by one failure", len(failed))
				}
				left = next
			}
			if !done() {
				t.Fatal("nothing was swallowed")
			}
			last := map[string]int{}
			seen := map[string]bool{}
			for _, id := range r.stored(name) {
				if seen[id] {
					continue
				}
				seen[id] = true
				parts := strings.Split(id, "-")
				i, _ := strconv.Atoi(parts[2])
				if i != last[parts[1]]+1 {
					t.Fatalf("key %s: %d follows %d", parts[1], i, last[parts[1]])
				}
				last[parts[1]] = i
			}
			if len(seen) != 1000 {
				t.Errorf("%d of 1000 messages are stored", len(seen))
			}
		})
	}
}

// A topic with partitions is spread over their subjects, one for a key.
func TestPartitions(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	r.stream("orders", func(c *jetstream.StreamConfig) { c.Subjects = []string{"orders.*"} })
	b := r.open(func(c *nats.Config) { c.Partitions = map[string]int{"orders": 3} })
	var msgs []postroom.Message
	for k := range 30 {
		msgs = append(msgs, messages("orders", fmt.Sprint("k", k), 1, 3)...)
	}
	r.store(b, msgs...)
	m := r.subscribe(b, "orders", "g", 10)
	ofKey := map[string]int32{}
	used := map[int32]bool{}
	var mu sync.Mutex
	for range msgs {
		d := m.next()
		m.ack(d)
		mu.Lock()
		key, p := d.Message().Key, d.Position().Partition
		if before, ok := ofKey[key]; ok && before != p {
			t.Errorf("key %s is in partitions %d and %d", key, before, p)
		}
		ofKey[key], used[p] = p, true
		mu.Unlock()
		if d.Message().Topic != "orders" || p < 0 || p > 2 {
			t.Errorf("topic %q, partition %d", d.Message().Topic, p)
		}
	}
	if len(used) != 3 {
		t.Errorf("partitions used: %v", used)
	}
	m.stop()
}
