package franz_test

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/postroom/postroom/broker/franz"
)

// B95: of interleaved transactions exactly what was committed is delivered, in
// order and whatever the size of a fetch; no marker is ever seen; offsets move
// past what is hidden, also where a whole fetch is.
func TestB95Transactions(t *testing.T) {
	t.Parallel()
	t.Run("kfake", func(t *testing.T) {
		t.Parallel()
		transactions(t, newRig(t))
	})
	t.Run("Apache Kafka", func(t *testing.T) {
		t.Parallel()
		r := realRig(t)
		transactions(t, r)
		java(t, r)
	})
}

func transactions(t *testing.T, r *rig) {
	r.t = t
	r.topic("tx", 1)
	plain := newClient(t, r.brokers)
	a := newClient(t, r.brokers, kgo.TransactionalID("a"))
	b := newClient(t, r.brokers, kgo.TransactionalID("b"))
	begin := func(cl *kgo.Client) {
		t.Helper()
		if err := cl.BeginTransaction(); err != nil {
			t.Fatal(err)
		}
	}
	end := func(cl *kgo.Client, how kgo.TransactionEndTry) {
		t.Helper()
		if err := cl.EndTransaction(t.Context(), how); err != nil {
			t.Fatal(err)
		}
	}
	var want []string
	produce := func(cl *kgo.Client, n int, wanted bool) {
		t.Helper()
		for range n {
			id := fmt.Sprint(len(want), "-", time.Now().UnixNano())
			rec := &kgo.Record{Topic: "tx", Value: []byte(strings.Repeat("x", 200)), Headers: []kgo.RecordHeader{{Key: "postroom-id", Value: []byte(id)}}}
			if err := cl.ProduceSync(t.Context(), rec).FirstErr(); err != nil {
				t.Fatal(err)
			}
			if wanted {
				want = append(want, id)
			}
		}
	}
	for range 3 {
		begin(a)
		produce(a, 3, true)
		end(a, kgo.TryCommit)
		begin(a)
		produce(a, 3, false)
		produce(plain, 2, true)
		begin(b)
		produce(b, 3, true)
		end(a, kgo.TryAbort)
		produce(plain, 1, true)
		end(b, kgo.TryCommit)
	}
	begin(a)
	produce(a, 50, false) // whole fetches of it
	end(a, kgo.TryAbort)
	last := r.end("tx")
	for _, size := range []int{1024, 1500, 4096, 10_000, 1 << 20} {
		group := fmt.Sprint("size ", size)
		c := r.consumeAs(group, "tx", 7, func(c *franz.Config) { c.FetchBytes = size })
		if got := c.take(len(want)); !slices.Equal(got, want) {
			t.Fatalf("with fetches of %d bytes came %q, want %q", size, got, want)
		}
		// The last marker may have been written after the end was read.
		until(t, "offsets move past what is hidden", func() bool { return r.committedAs(group, "tx", 0) >= last })
		c.stopped()
	}
	c := r.consumeAs("dirty", "tx", 7, func(c *franz.Config) { c.ReadUncommitted = true })
	c.take(len(want) + 3*3 + 50)
	c.stopped()

	// An open transaction delays what lies behind it, and a restart changes nothing.
	begin(b)
	was := len(want)
	produce(b, 2, true)
	produce(plain, 2, true)
	for range 2 {
		c = r.consumeAs("size 1024", "tx", 7)
		select {
		case d := <-c.arrived:
			t.Fatalf("message %s came from an open transaction, or from behind it", d.Message().ID)
		case <-time.After(300 * time.Millisecond):
		}
		c.stopped()
	}
	end(b, kgo.TryCommit)
	c = r.consumeAs("size 1024", "tx", 7)
	if got := c.take(4); !slices.Equal(got, want[was:]) {
		t.Errorf("%q came, want %q", got, want[was:])
	}
	c.stopped()
}
