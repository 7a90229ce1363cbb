package franz_test

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kfake"
	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/twmb/franz-go/pkg/kmsg"
	"github.com/twmb/franz-go/pkg/kversion"

	"github.com/postroom/postroom"
	"github.com/postroom/postroom/broker"
	"github.com/postroom/postroom/broker/franz"
)

// B55: only the settled messages before the first unsettled one are committed. A
// message that is given back comes again, and after a crash it and what is behind
// it do.
func TestB55OnlyThePrefixIsCommitted(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	r.topic("t", 1)
	store(t, r.open(), messages("t", "k", 0, 4)...)
	c := r.consume(5)
	var ds []broker.Delivery
	for range 5 {
		ds = append(ds, c.next())
	}
	c.ack(ds[4], ds[3], ds[0])
	r.wantCommitted(0, 1)
	c.ack(ds[1])
	r.wantCommitted(0, 2)
	third := ds[2]
	for range 2 { // the handler fails twice
		if err := third.Retry(t.Context(), 10*time.Millisecond); err != nil {
			t.Fatal(err)
		}
		if third = c.next(); third.Message().ID != "k-2" {
			t.Fatalf("message %s came again, want k-2", third.Message().ID)
		}
	}
	c.crash()
	r.wantCommitted(0, 2)
	c = r.consume(5)
	if got := c.take(3); !slices.Equal(got, []string{"k-2", "k-3", "k-4"}) {
		t.Errorf("after the crash came %q", got)
	}
	r.wantCommitted(0, 5)
	c.stopped()
}

// B55: what was given back and waits for a long time keeps its offset while
// messages behind it are delivered.
func TestRetryDoesNotStopThePartition(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	r.topic("t", 1)
	store(t, r.open(), messages("t", "k", 0, 99)...)
	c := r.consume(3)
	if err := c.next().Retry(t.Context(), time.Hour); err != nil {
		t.Fatal(err)
	}
	c.take(99)
	c.stopped()
	if got := r.committed(0); got > 0 {
		t.Errorf("offset %d is committed", got)
	}
	c = r.consume(100)
	if got := c.take(100); got[0] != "k-0" {
		t.Errorf("%s comes first", got[0])
	}
	c.stopped()
}

// B56: members that crash at random lose nothing.
func TestB56CrashesLoseNothing(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	r.topic("t", 3)
	b := r.open()
	want := map[string]bool{}
	for i := range 100 {
		msgs := messages("t", fmt.Sprint("k", i%7), 20*i, 20*i+19)
		store(t, b, msgs...)
		for _, m := range msgs {
			want[m.ID] = true
		}
	}
	progress := func() (sum int64) {
		for p := range int32(3) {
			sum += max(r.committed(p), 0)
		}
		return sum
	}
	random := rand.New(rand.NewPCG(1, 2))
	for len(want) > 0 {
		before := progress()
		c := r.consume(16)
		for range 100 + random.IntN(900) {
			if len(want) == 0 {
				break
			}
			d := c.next()
			delete(want, d.Message().ID) // the effect, then the ack
			c.ack(d)
		}
		if random.IntN(3) > 0 { // else all that is repeated
			until(t, "something is committed", func() bool { return progress() > before })
		}
		c.crash()
	}
}

// B58: a subscription ends soon, whatever it is doing.
func TestB58SubscribeEnds(t *testing.T) {
	t.Parallel()
	t.Run("idle", func(t *testing.T) {
		t.Parallel()
		r := newRig(t)
		r.topic("t", 3)
		store(t, r.open(), messages("t", "k", 0, 0)...)
		c := r.consume(1)
		c.take(1)
		c.stopped()
	})
	t.Run("brokers away", func(t *testing.T) {
		t.Parallel()
		r := newRig(t)
		r.topic("t", 3)
		store(t, r.open(), messages("t", "k", 0, 0)...)
		c := r.consume(1)
		c.take(1)
		c.gate.refuse.Store(true)
		c.gate.cut()
		c.stop()
		if err := c.end(10 * time.Second); err != nil {
			t.Error(err)
		}
	})
	t.Run("brokers silent", func(t *testing.T) {
		t.Parallel()
		r := newRig(t)
		r.topic("t", 3)
		store(t, r.open(), messages("t", "k", 0, 0)...)
		c := r.consume(1)
		c.take(1)
		c.gate.shut(true)
		c.stop()
		if err := c.end(15 * time.Second); err != nil {
			t.Error(err)
		}
	})
	t.Run("before it has begun", func(t *testing.T) {
		t.Parallel()
		r := newRig(t)
		r.topic("t", 3)
		for range 20 {
			r.consume(1).stopped()
		}
	})
	t.Run("in a rebalance", func(t *testing.T) {
		t.Parallel()
		r := newRig(t)
		r.topic("t", 3)
		store(t, r.open(), messages("t", "k", 0, 0)...)
		c := r.consume(1)
		c.take(1)
		other := r.consume(1)
		c.stopped()
		other.stopped()
	})
	t.Run("handler blocked", func(t *testing.T) {
		t.Parallel()
		r := newRig(t)
		r.topic("t", 3)
		store(t, r.open(), messages("t", "k", 0, 0)...)
		c := r.consume(1)
		d := c.next()
		c.stop()
		select {
		case err := <-c.ended:
			t.Fatalf("Subscribe = %v with a delivery that is not settled", err)
		case <-time.After(200 * time.Millisecond):
		}
		if err := c.bus.Close(); err != nil {
			t.Fatal(err)
		}
		if err := c.end(time.Second); err != nil {
			t.Error(err)
		}
		if err := d.Ack(t.Context()); !errors.Is(err, broker.ErrLost) {
			t.Errorf("Ack = %v, want ErrLost", err)
		}
	})
}

// B60: partitions that are added are read from their start, and so is one that
// got its first message while nobody subscribed.
func TestB60NewPartitions(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	r.topic("t", 1)
	soon := func(c *franz.Config) { c.Options = []kgo.Opt{kgo.MetadataMaxAge(100 * time.Millisecond)} }
	store(t, r.open(), messages("t", "", 0, 0)...)
	c := r.consume(10, soon)
	c.take(1)
	r.addPartitions(3)
	store(t, r.open(), messages("t", "", 1, 30)...)
	if got := c.take(30); len(got) != 30 {
		t.Errorf("%d messages", len(got))
	}
	c.stopped()
	r.addPartitions(6)
	store(t, r.open(), messages("t", "", 31, 60)...)
	c = r.consume(10, soon)
	got := c.take(30)
	slices.Sort(got)
	if len(slices.Compact(got)) != 30 {
		t.Errorf("%d different messages, want 30", len(slices.Compact(got)))
	}
	c.stopped()
}

// B62, B96: what others wrote arrives as it is: repeated headers, nil and empty
// ones, our own headers in another case, no id at all.
func TestB62ForeignRecords(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	r.topic("t", 1)
	at := time.Date(2026, 1, 2, 3, 4, 5, 6000, time.UTC)
	if err := r.admin.ProduceSync(t.Context(), foreign("t")...).FirstErr(); err != nil {
		t.Fatal(err)
	}
	want := []postroom.Message{
		{Topic: "t", Headers: []postroom.Header{{Name: "a", Value: []byte("1")}, {Name: "B"}, {Name: "a", Value: []byte{}}, {Name: "", Value: []byte{0, 0xff}}}},
		{ID: "2", Topic: "t", EmptyKey: true, Payload: []byte{}, Headers: []postroom.Header{{Name: "Postroom-ID", Value: []byte("1")}, {Name: "x", Value: []byte("y")}}, Time: at, Operation: "op"},
		{Topic: "t", Key: "\xff\x00", Payload: []byte("v")},
	}
	c := r.consume(3)
	for i := range want {
		d := c.next()
		if got := fmt.Sprintf("%#v", d.Message()); got != fmt.Sprintf("%#v", want[i]) {
			t.Errorf("record %d came as %s, want %#v", i, got, want[i])
		}
		c.ack(d)
	}
	c.stopped()
}

// foreign returns records as others may write them.
func foreign(topic string) []*kgo.Record {
	return []*kgo.Record{
		{Topic: topic, Headers: []kgo.RecordHeader{
			{Key: "a", Value: []byte("1")}, {Key: "B", Value: nil}, {Key: "a", Value: []byte{}}, {Key: "", Value: []byte{0, 0xff}},
		}},
		{Topic: topic, Key: []byte{}, Value: []byte{}, Headers: []kgo.RecordHeader{
			{Key: "Postroom-ID", Value: []byte("1")},
			{Key: "postroom-id", Value: []byte("2")},
			{Key: "x", Value: []byte("y")},
			{Key: "POSTROOM-TIME", Value: []byte("2026-01-02T03:04:05.000006Z")},
			{Key: "postroom-operation", Value: []byte("op")},
		}},
		{Topic: topic, Key: []byte("\xff\x00"), Value: []byte("v"), Headers: []kgo.RecordHeader{{Key: "postroom-time", Value: []byte("noon")}}},
	}
}

// A partition whose messages are slow does not keep others' from coming.
func TestSlowPartition(t *testing.T) {
	t.Parallel()
	r := newRig(t, kfake.NumBrokers(1))
	r.topic("t", 2)
	b := r.open(func(c *franz.Config) {
		c.Options = []kgo.Opt{kgo.RecordPartitioner(kgo.BasicConsistentPartitioner(
			func(string) func(*kgo.Record, int) int {
				return func(r *kgo.Record, _ int) int { return len(r.Key) - 1 }
			}))}
	})
	store(t, b, messages("t", "s", 0, 4999)...)
	c := r.consume(4)
	held := []broker.Delivery{c.next(), c.next(), c.next(), c.next()}
	store(t, b, messages("t", "ff", 0, 9)...)
	fast, tick := 0, time.NewTicker(10*time.Millisecond)
	defer tick.Stop()
	for n := 0; fast < 10; n++ {
		if n > 100 {
			t.Fatalf("%d of 10 messages of the other partition came among %d", fast, n)
		}
		<-tick.C
		c.ack(held[0])
		d := c.next()
		if held = append(held[1:], d); d.Message().Key == "ff" {
			fast++
		}
	}
	c.ack(held...)
	c.take(4999 + 1 - 4 - 100) // and it is resumed
	c.stop()
}

// What is fetched and not delivered is bounded while deliveries are slow.
func TestHeldMessagesAreBounded(t *testing.T) {
	t.Parallel()
	r := newRig(t, kfake.NumBrokers(1))
	r.topic("t", 2, "max.message.bytes", "16384") // a batch is fetched whole
	msgs := messages("t", "", 0, 19_999)
	for i := range msgs {
		msgs[i].Payload = make([]byte, 1000)
	}
	store(t, r.open(), msgs...)
	c := r.consume(1, func(c *franz.Config) { c.FetchBytes = 64 << 10 })
	d := c.next()
	<-time.After(2 * time.Second)
	if read := c.gate.read.Load(); read > 1<<20 {
		t.Errorf("%d bytes were fetched with a delivery that is not settled", read)
	}
	c.ack(d)
	c.take(len(msgs) - 1)
	c.stopped()
}

// A partition that another member is to have is given away when what is out is
// settled, else when the session could be over.
func TestPartitionIsGivenAway(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	r.topic("t", 3)
	b := r.open()
	msgs := messages("t", "", 0, 2)
	store(t, b, msgs...) // in turns
	c := r.consume(3)
	ds := []broker.Delivery{c.next(), c.next(), c.next()}
	other := r.consume(3)
	wait := time.NewTimer(500 * time.Millisecond)
	select {
	case <-other.arrived:
		t.Fatal("another member was given what is not settled")
	case <-ds[0].Lost():
		t.Fatal("lost")
	case <-ds[1].Lost():
		t.Fatal("lost")
	case <-ds[2].Lost():
		t.Fatal("lost")
	case <-wait.C:
	}
	c.ack(ds...)
	from := 3
	until(t, "the other member has a partition", func() bool {
		store(t, b, messages("t", "", from, from+2)...)
		from += 3
		for {
			select {
			case d := <-c.arrived:
				c.ack(d)
			case d := <-other.arrived:
				other.ack(d)
				return true
			case <-time.After(100 * time.Millisecond):
				return false
			}
		}
	})
	other.ackAll()
	c.ackAll()

	store(t, b, messages("t", "", 1000, 1002)...)
	c = r.consume(10)
	held := []broker.Delivery{c.next(), c.next(), c.next()}
	other = r.consume(10)
	d := other.next()
	lost := slices.ContainsFunc(held, func(h broker.Delivery) bool {
		return h.Position() == d.Position() && errors.Is(h.Ack(t.Context()), broker.ErrLost)
	})
	if !lost {
		t.Error("the other member was given a delivery that is not lost")
	}
	other.ack(d)
	other.crash()
	c.crash()
}

// What retention has removed is reported; delivery goes on at the first message
// there is, not at the end.
func TestRemovedMessagesAreReported(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	r.topic("t", 1)
	b := r.open()
	store(t, b, messages("t", "k", 0, 99)...)
	c := r.consume(1)
	c.take(10)
	c.stopped()
	r.wantCommitted(0, 10)
	r.deleteRecords(0, 50)
	c = r.consume(100)
	if got := c.take(50); got[0] != "k-50" {
		t.Errorf("%s comes first, want k-50", got[0])
	}
	if err := <-c.trouble; err == nil || !strings.Contains(err.Error(), "10 to 49") {
		t.Errorf("Trouble was told %v, want the offsets 10 to 49", err)
	}
	if err := <-c.trouble; err != nil {
		t.Errorf("Trouble was told %v, want nil", err)
	}
	c.stopped()
}

// A topic that is deleted and made anew is read from its start, whatever the
// group had committed.
func TestTopicMadeAnew(t *testing.T) {
	t.Parallel()
	// Newer brokers refuse to commit for the topic that is gone: it has an id.
	for _, version := range []*kversion.Versions{kversion.Stable(), kversion.V3_9_0()} {
		topicMadeAnew(t, newRig(t, kfake.MaxVersions(version)))
	}
}

func topicMadeAnew(t *testing.T, r *rig) {
	r.topic("t", 1)
	soon := func(c *franz.Config) { c.Options = []kgo.Opt{kgo.MetadataMaxAge(500 * time.Millisecond)} }
	store(t, r.open(), messages("t", "old", 0, 4)...)
	c := r.consume(10, soon)
	old := []broker.Delivery{c.next(), c.next(), c.next(), c.next(), c.next()}
	for range 2 {
		r.deleteTopic("t")
		r.topic("t", 1)
		store(t, r.open(), messages("t", "new", 0, 9)...)
		for _, d := range old { // which commits for the new one
			_ = d.Ack(t.Context())
		}
		old = nil
		for _, want := range messages("t", "new", 0, 9) {
			if got := c.take(1)[0]; got != want.ID {
				t.Fatalf("%s came, want %s", got, want.ID)
			}
		}
	}
	c.stopped()
}

// A member that is cut off learns that its deliveries are lost when its session
// is over, and goes on when the brokers are back.
func TestCutOffMemberLosesItsDeliveries(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	r.topic("t", 1)
	store(t, r.open(), messages("t", "k", 0, 1)...)
	c := r.consume(2)
	ds := []broker.Delivery{c.next(), c.next()}
	c.gate.refuse.Store(true)
	c.gate.cut()
	select {
	case <-ds[0].Lost():
	case <-time.After(time.Minute):
		t.Fatal("the delivery is not lost")
	}
	if err := ds[0].Ack(t.Context()); !errors.Is(err, broker.ErrLost) {
		t.Errorf("Ack = %v, want ErrLost", err)
	}
	select {
	case err := <-c.trouble:
		if err == nil {
			t.Error("Trouble was told nil")
		}
	case <-time.After(time.Minute):
		t.Error("Trouble was told nothing")
	}
	c.gate.refuse.Store(false)
	if got := c.take(2); !slices.Equal(got, []string{"k-0", "k-1"}) {
		t.Errorf("%q came", got)
	}
	c.stopped()
}

// Subscribe returns what a person must mend.
func TestAccessRefused(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	r.topic("t", 1)
	r.cluster.ControlKey(int16(kmsg.JoinGroup), func(req kmsg.Request) (kmsg.Response, error, bool) {
		r.cluster.KeepControl()
		res := req.ResponseKind().(*kmsg.JoinGroupResponse)
		res.ErrorCode = kerr.GroupAuthorizationFailed.Code
		return res, nil, true
	})
	if err := r.consume(1).end(10 * time.Second); !errors.Is(err, kerr.GroupAuthorizationFailed) {
		t.Errorf("Subscribe = %v", err)
	}
}

func TestSubscriptionListsEveryProblem(t *testing.T) {
	t.Parallel()
	b := newRig(t).open()
	err := b.Subscribe(t.Context(), broker.Subscription{}, nil)
	for _, want := range []string{"Group", "Topic", "MaxInFlight"} {
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%v, want it to mention %s", err, want)
		}
	}
}

// Members of one group may subscribe to different topics.
func TestOneGroupOfTwoTopics(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	r.topic("t", 2)
	r.topic("other", 2)
	b := r.open()
	c := r.consume(10)
	ctx, cancel := context.WithCancel(t.Context())
	arrived, ended := make(chan broker.Delivery, 10), make(chan error, 1)
	go func() {
		ended <- b.Subscribe(ctx, broker.Subscription{Group: "g", Topic: "other", MaxInFlight: 10}, func(d broker.Delivery) { arrived <- d })
	}()
	store(t, b, slices.Concat(messages("t", "k", 0, 4), messages("other", "k", 5, 9))...)
	if got := c.take(5); !slices.Equal(got, []string{"k-0", "k-1", "k-2", "k-3", "k-4"}) {
		t.Errorf("of t came %q", got)
	}
	for i := range 5 {
		d := <-arrived
		if got, want := d.Message().ID, fmt.Sprintf("k-%d", 5+i); got != want {
			t.Errorf("of other came %s, want %s", got, want)
		}
		c.ack(d)
	}
	c.stopped()
	cancel()
	if err := <-ended; err != nil {
		t.Error(err)
	}
}
