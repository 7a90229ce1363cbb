package inbox

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"
)

// errNoAnswer is the cause of a context that deadlines has ended.
var errNoAnswer = errors.New("the database did not answer in time")

// deadlines ends contexts that have lasted too long, to about a second. One timer
// serves them all: a timer of its own for each of a message's statements wakes
// the runtime's poller each time, which takes 6 % of the throughput of one worker.
type deadlines struct {
	mu      sync.Mutex
	pending map[*deadline]struct{}
	armed   bool // the timer is set
	used    bool // since it was
}

type deadline struct {
	at     time.Time
	cancel context.CancelCauseFunc
}

// bounds serves the inbox's own statements and acknowledgements.
var bounds deadlines

const deadlineTick = time.Second

// with returns a context that ends after d. stop must be called.
func (ds *deadlines) with(ctx context.Context, d time.Duration) (_ context.Context, stop func()) {
	ctx, cancel := context.WithCancelCause(ctx)
	dl := &deadline{time.Now().Add(d), cancel}
	ds.mu.Lock()
	defer ds.mu.Unlock()
	if ds.pending == nil {
		ds.pending = make(map[*deadline]struct{})
	}
	ds.pending[dl] = struct{}{}
	ds.used = true
	if !ds.armed {
		ds.armed = true
		time.AfterFunc(deadlineTick, ds.tick)
	}
	return ctx, func() {
		ds.mu.Lock()
		delete(ds.pending, dl)
		ds.mu.Unlock()
		cancel(nil)
	}
}

func (ds *deadlines) tick() {
	ds.mu.Lock()
	defer ds.mu.Unlock()
	now := time.Now()
	for dl := range ds.pending {
		if now.After(dl.at) {
			dl.cancel(errNoAnswer)
			delete(ds.pending, dl)
		}
	}
	ds.armed = ds.used || len(ds.pending) > 0
	ds.used = false
	if ds.armed {
		time.AfterFunc(deadlineTick, ds.tick)
	}
}

// noAnswer adds to err that it was deadlines that ended ctx, if so.
func noAnswer(ctx context.Context, err error) error {
	if err != nil && errors.Is(context.Cause(ctx), errNoAnswer) {
		return fmt.Errorf("%w: %w", errNoAnswer, err)
	}
	return err
}
