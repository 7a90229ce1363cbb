package memory_test

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"testing/synctest"
	"time"

	"github.com/postroom/postroom"
	"github.com/postroom/postroom/broker"
	"github.com/postroom/postroom/broker/memory"
)

// subscribe starts a subscription whose deliveries arrive on the channel. The
// test's end ends it.
func subscribe(t *testing.T, b *memory.Broker, group string, max int) (<-chan broker.Delivery, <-chan error) {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	t.Cleanup(cancel)
	out, ended := make(chan broker.Delivery, max), make(chan error, 1)
	s := broker.Subscription{Group: group, Topic: "orders", MaxInFlight: max}
	go func() { ended <- b.Subscribe(ctx, s, func(d broker.Delivery) { out <- d }) }()
	return out, ended
}

func publish(t *testing.T, b *memory.Broker, msgs ...postroom.Message) {
	t.Helper()
	for i, r := range b.Publish(t.Context(), msgs) {
		if r.Outcome != broker.Stored {
			t.Fatalf("message %d: %v, %v", i, r.Outcome, r.Err)
		}
	}
}

func receive(t *testing.T, ds <-chan broker.Delivery, want string) broker.Delivery {
	t.Helper()
	d := <-ds
	if got := d.Message().ID; got != want {
		t.Fatalf("delivered %q, want %q", got, want)
	}
	return d
}

func keyed(key string, ids ...string) (msgs []postroom.Message) {
	for _, id := range ids {
		msgs = append(msgs, postroom.Message{ID: id, Topic: "orders", Key: key})
	}
	return msgs
}

func ack(t *testing.T, d broker.Delivery) {
	t.Helper()
	if err := d.Ack(t.Context()); err != nil {
		t.Fatal(err)
	}
}

// What follows a message that was given back waits behind it; other keys and
// messages without one do not.
func TestRetryKeepsTheOrderOfAKey(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := memory.New()
		ds, _ := subscribe(t, b, "g", 1)
		publish(t, b, keyed("a", "a1", "a2")...)
		publish(t, b, keyed("b", "b1")...)
		publish(t, b, keyed("", "n1", "n2")...)
		start := time.Now()
		if err := receive(t, ds, "a1").Retry(t.Context(), time.Minute); err != nil {
			t.Fatal(err)
		}
		ack(t, receive(t, ds, "b1"))
		if err := receive(t, ds, "n1").Retry(t.Context(), 2*time.Minute); err != nil {
			t.Fatal(err)
		}
		ack(t, receive(t, ds, "n2"))
		a1 := receive(t, ds, "a1")
		if got := time.Since(start); got != time.Minute {
			t.Errorf("a1 came again after %v, want %v", got, time.Minute)
		}
		if a1.Deliveries() != 2 {
			t.Errorf("a1 was delivered %d times, want 2", a1.Deliveries())
		}
		ack(t, a1)
		ack(t, receive(t, ds, "a2"))
		ack(t, receive(t, ds, "n1"))
		if got := time.Since(start); got != 2*time.Minute {
			t.Errorf("n1 came again after %v, want %v", got, 2*time.Minute)
		}
	})
}

// Each of several messages of a key that were given back keeps its own delay.
func TestRetryDelaysEachMessage(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := memory.New()
		ds, _ := subscribe(t, b, "g", 2)
		publish(t, b, keyed("a", "a1", "a2")...)
		a1, a2 := receive(t, ds, "a1"), receive(t, ds, "a2")
		start := time.Now()
		_ = a1.Retry(t.Context(), time.Minute)
		_ = a2.Retry(t.Context(), time.Hour)
		ack(t, receive(t, ds, "a1"))
		ack(t, receive(t, ds, "a2"))
		if got := time.Since(start); got != time.Hour {
			t.Errorf("a2 came again after %v, want %v", got, time.Hour)
		}
	})
}

// While a message of a key is out at one member, its successors go there too.
func TestMembersKeepTheOrderOfAKey(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := memory.New()
		one, _ := subscribe(t, b, "g", 1)
		synctest.Wait()
		publish(t, b, keyed("a", "a1", "a2")...)
		a1 := receive(t, one, "a1")
		two, _ := subscribe(t, b, "g", 5)
		publish(t, b, keyed("b", "b1")...)
		ack(t, receive(t, two, "b1"))
		synctest.Wait()
		if len(two) > 0 {
			t.Fatalf("a member was given %q while a1 was out at another", (<-two).Message().ID)
		}
		ack(t, a1)
		select {
		case d := <-one:
			ack(t, d)
		case d := <-two:
			ack(t, d)
		}
	})
}

func TestCloseGivesDeliveriesToOthers(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := memory.New("orders")
		crashing := b.Connect()
		one, ended := subscribe(t, crashing, "g", 10)
		publish(t, b, keyed("a", "a1", "a2")...)
		a1, a2 := receive(t, one, "a1"), receive(t, one, "a2")
		ack(t, a1)
		if err := crashing.Close(); err != nil {
			t.Fatal(err)
		}
		<-a2.Lost()
		if err := <-ended; !errors.Is(err, broker.ErrClosed) {
			t.Errorf("Subscribe = %v, want ErrClosed", err)
		}
		if err := a2.Ack(t.Context()); !errors.Is(err, broker.ErrLost) {
			t.Errorf("Ack after the loss = %v, want ErrLost", err)
		}
		two, _ := subscribe(t, b, "g", 10)
		ack(t, receive(t, two, "a2"))
	})
}

func TestLimit(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := memory.New("orders")
		b.SetLimit(3)
		publish(t, b, keyed("a", "1", "2", "3")...)
		full := func(id string) {
			t.Helper()
			r := b.Publish(t.Context(), keyed("a", id))[0]
			if r.Outcome != broker.Unreachable || r.Scope != "orders" {
				t.Errorf("publishing to a full topic: %v in scope %q", r.Outcome, r.Scope)
			}
		}
		full("4")
		ds, _ := subscribe(t, b, "g", 10)
		d1, d2, d3 := receive(t, ds, "1"), receive(t, ds, "2"), receive(t, ds, "3")
		ack(t, d2)
		full("4")
		ack(t, d1)
		publish(t, b, keyed("a", "4", "5")...)
		full("6")
		ack(t, d3)
		ack(t, receive(t, ds, "4"))
		ack(t, receive(t, ds, "5"))
		late, _ := subscribe(t, b, "late", 10)
		for i := 3; i <= 5; i++ {
			ack(t, receive(t, late, fmt.Sprint(i)))
		}
	})
}
