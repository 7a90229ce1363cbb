package nats

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"strconv"
	"sync"
	"time"

	natsgo "github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
)

var errDisconnected = errors.New("not connected")

// flights holds the messages that wait for an acknowledgement. Each has a reply
// subject of its own that is never used again, so a late answer finds nobody.
type flights struct {
	prefix string        // of reply subjects
	slots  chan struct{} // holds an element for each message in flight

	mu    sync.Mutex
	last  uint64             // the last token given out
	wait  map[uint64]*flight // token → message
	heard time.Time          // when the last answer came
}

// A flight is one message on its way. Who takes it out of flights.wait decides
// what becomes of it.
type flight struct {
	call    *call
	index   int // in the call
	token   uint64
	subject string
	sent    time.Time
}

// An answer is what became of a flight: a reply, or an error.
type answer struct {
	f     *flight
	reply *natsgo.Msg
	err   error
}

func (fs *flights) open(b *Bus) error {
	fs.prefix = b.nc.NewInbox() + "."
	fs.slots = make(chan struct{}, b.cfg.MaxPending)
	fs.wait = make(map[uint64]*flight)
	sub, err := b.nc.Subscribe(fs.prefix+"*", fs.onReply)
	if err != nil {
		return err
	}
	return sub.SetPendingLimits(-1, -1) // at most MaxPending small replies
}

// add makes f wait for its answer and returns its reply subject. The caller has
// put an element into fs.slots.
func (fs *flights) add(f *flight) string {
	fs.mu.Lock()
	fs.last++
	f.token = fs.last
	fs.wait[f.token] = f
	fs.mu.Unlock()
	return fs.prefix + strconv.FormatUint(f.token, 36)
}

// take ends the waiting of a flight and frees its slot, unless another has done
// so before.
func (fs *flights) take(token uint64) *flight {
	fs.mu.Lock()
	f := fs.wait[token]
	delete(fs.wait, token)
	fs.mu.Unlock()
	if f != nil {
		<-fs.slots
	}
	return f
}

func (fs *flights) onReply(m *natsgo.Msg) {
	if len(m.Subject) <= len(fs.prefix) {
		return
	}
	token, err := strconv.ParseUint(m.Subject[len(fs.prefix):], 36, 64)
	if err != nil {
		return
	}
	fs.mu.Lock()
	f := fs.wait[token]
	delete(fs.wait, token)
	fs.heard = time.Now()
	fs.mu.Unlock()
	if f == nil {
		return
	}
	<-fs.slots
	f.call.answer(answer{f: f, reply: m})
}

// lastHeard returns when the last answer came to any message.
func (fs *flights) lastHeard() time.Time {
	fs.mu.Lock()
	defer fs.mu.Unlock()
	return fs.heard
}

func (fs *flights) failAll(err error) { fs.fail(err, func(*flight) bool { return true }) }

func (fs *flights) failSubject(subject string, err error) {
	fs.fail(err, func(f *flight) bool { return f.subject == subject })
}

func (fs *flights) fail(err error, which func(*flight) bool) {
	fs.mu.Lock()
	var failed []*flight
	for _, f := range fs.wait {
		if which(f) {
			failed = append(failed, f)
		}
	}
	fs.mu.Unlock()
	for _, f := range failed {
		if fs.take(f.token) != nil {
			f.call.answer(answer{f: f, err: err})
		}
	}
}

// A pubAck is a stream's answer.
type pubAck struct {
	Stream    string              `json:"stream"`
	Sequence  uint64              `json:"seq"`
	Duplicate bool                `json:"duplicate"`
	Error     *jetstream.APIError `json:"error"`
}

// Codes by which a stream refuses a message for what it is.
const (
	codeTooLarge       jetstream.ErrorCode = 10054
	codeHeaderTooLarge jetstream.ErrorCode = 10097
)

var (
	errNoResponders = errors.New("no stream answers for this subject")
	errInvalidAck   = errors.New("the answer is no acknowledgement of a stream")
)

// verdict reads a reply: nil means that the given stream has stored the
// message. refused says that it never will.
func verdict(reply *natsgo.Msg, stream string) (err error, refused bool) {
	if plainAck(reply.Data, stream) {
		return nil, false
	}
	if len(reply.Data) == 0 && reply.Header.Get("Status") == "503" {
		return errNoResponders, false
	}
	var ack pubAck
	if err := json.Unmarshal(reply.Data, &ack); err != nil {
		return errInvalidAck, false // its text could hold anything
	}
	switch {
	case ack.Error != nil:
		code := ack.Error.ErrorCode
		return fmt.Errorf("stream %q: %w", stream, ack.Error), code == codeTooLarge || code == codeHeaderTooLarge
	case ack.Stream == "":
		return errInvalidAck, false
	case ack.Stream != stream:
		return fmt.Errorf("stream %q acknowledged in the place of %q", ack.Stream, stream), false
	case ack.Sequence == 0 && ack.Duplicate:
		return errors.New("the stream remembers the id of the message but holds no such message"), false
	case ack.Sequence == 0:
		return errInvalidAck, false
	}
	return nil, false
}

// plainAck recognises the usual acknowledgement without parsing JSON:
// {"stream":"NAME", "seq":7}.
func plainAck(data []byte, stream string) bool {
	rest, ok := bytes.CutPrefix(data, []byte(`{"stream":"`))
	if !ok || len(rest) < len(stream) || string(rest[:len(stream)]) != stream {
		return false
	}
	rest, ok = bytes.CutPrefix(rest[len(stream):], []byte(`",`))
	if !ok {
		return false
	}
	rest = bytes.TrimLeft(rest, " ")
	if rest, ok = bytes.CutPrefix(rest, []byte(`"seq":`)); !ok {
		return false
	}
	if rest, ok = bytes.CutSuffix(rest, []byte(`}`)); !ok || len(rest) == 0 || rest[0] == '0' {
		return false
	}
	for _, c := range rest {
		if c < '0' || c > '9' {
			return false
		}
	}
	return true
}
