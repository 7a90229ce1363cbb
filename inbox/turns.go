package inbox

import (
	"context"
	"errors"
	"sync"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
)

// errCopyRuns is the trouble of a copy that has waited for its turn for too long.
var errCopyRuns = errors.New("another copy of the message is being handled in this process")

// turns lets copies of a message that meet in one process wait for one another
// before they take a connection, which they would only hold while they wait for
// the first one's row. It is not what makes the effect happen once.
type turns struct {
	mu   sync.Mutex
	held map[turnKey]*turn
}

type turnKey struct {
	pool           *pgxpool.Pool
	subscriber, id string
}

type turn struct {
	free  chan struct{} // holds a token while nobody has the turn
	users int           // that have it or wait for it
}

// copies serves all inboxes of the process, since they may share a pool.
var copies = turns{held: make(map[turnKey]*turn)}

// take waits for the turn of a message for at most d. It returns errCopyRuns, or
// the error of ctx, or else the function that ends the turn.
func (ts *turns) take(ctx context.Context, k turnKey, d time.Duration) (end func(), err error) {
	ts.mu.Lock()
	t := ts.held[k]
	first := t == nil
	if first {
		t = &turn{free: make(chan struct{}, 1)}
		ts.held[k] = t
	}
	t.users++
	ts.mu.Unlock()
	if !first {
		timer := time.NewTimer(d)
		defer timer.Stop()
		select {
		case <-t.free:
		case <-timer.C:
			err = errCopyRuns
		case <-ctx.Done():
			err = ctx.Err()
		}
		if err != nil {
			ts.leave(k, t)
			return nil, err
		}
	}
	return func() {
		t.free <- struct{}{}
		ts.leave(k, t)
	}, nil
}

func (ts *turns) leave(k turnKey, t *turn) {
	ts.mu.Lock()
	defer ts.mu.Unlock()
	if t.users--; t.users == 0 {
		delete(ts.held, k)
	}
}
