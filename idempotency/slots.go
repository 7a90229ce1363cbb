package idempotency

import (
	"context"
	"sync"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
)

// slots counts the connections of each pool that requests hold for the time of
// their handlers. One connection less than the pool has is given to them, so that
// repeats are answered while slow handlers have all others.
type slots struct {
	mu    sync.Mutex
	pools map[*pgxpool.Pool]*poolSlots
}

type poolSlots struct {
	taken chan struct{} // holds a token for each slot that is taken
	users int           // that have one or wait for one
}

// running serves all middlewares of the process, since they may share a pool.
var running = slots{pools: make(map[*pgxpool.Pool]*poolSlots)}

func (s *slots) join(pool *pgxpool.Pool) *poolSlots {
	s.mu.Lock()
	defer s.mu.Unlock()
	p := s.pools[pool]
	if p == nil {
		p = &poolSlots{taken: make(chan struct{}, max(1, pool.Stat().MaxConns()-1))}
		s.pools[pool] = p
	}
	p.users++
	return p
}

func (s *slots) leave(pool *pgxpool.Pool, p *poolSlots) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if p.users--; p.users == 0 {
		delete(s.pools, pool)
	}
}

// try takes a slot where one is free, and returns the function that gives it
// back, else nil.
func (s *slots) try(pool *pgxpool.Pool) (free func()) {
	p := s.join(pool)
	select {
	case p.taken <- struct{}{}:
		return s.freeing(pool, p)
	default:
		s.leave(pool, p)
		return nil
	}
}

// wait is try that waits for d. It returns an error where ctx ends before.
func (s *slots) wait(ctx context.Context, pool *pgxpool.Pool, d time.Duration) (free func(), err error) {
	p := s.join(pool)
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case p.taken <- struct{}{}:
		return s.freeing(pool, p), nil
	case <-timer.C:
	case <-ctx.Done():
		err = ctx.Err()
	}
	s.leave(pool, p)
	return nil, err
}

func (s *slots) freeing(pool *pgxpool.Pool, p *poolSlots) func() {
	return sync.OnceFunc(func() {
		<-p.taken
		s.leave(pool, p)
	})
}
