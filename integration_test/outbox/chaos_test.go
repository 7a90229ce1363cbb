package outbox_test

import (
	"context"
	"math/rand/v2"
	"path/filepath"
	"strconv"
	"sync"
	"syscall"
	"testing"
	"time"
)

// TestStressWithCrashes: the server itself is killed and shut down while writers
// commit asynchronously and dispatchers are mistreated. Whatever survives is
// published in order, and nothing else is.
func TestStressWithCrashes(t *testing.T) {
	each(t, func(t *testing.T, s *server) {
		st := newStress(t, s)
		st.crashes = true
		u := s.database(t)
		st.pool = connect(t, u, asynchronous)
		st.counters(t)
		journal := &journalReader{path: filepath.Join(t.TempDir(), "journal")}
		chaos := newChaos(t, st.seed, childConfig{
			URL: u, Journal: journal.path, PageSize: stressPage,
			PublishTimeout: stressLease / 3, Lease: stressLease, Fail: 101,
		})
		writing, cancel := context.WithTimeout(t.Context(), *stressFlag)
		defer cancel()
		var wg sync.WaitGroup
		for w := range stressWriters / 2 {
			wg.Go(func() { st.writer(t, writing, w) })
		}
		wg.Go(func() { chaos.run(t, writing) })
		rng := rand.New(rand.NewPCG(st.seed, 3000))
		for n := 0; writing.Err() == nil; n++ {
			pause(writing, time.Duration(300+rng.IntN(1200))*time.Millisecond)
			if n%2 == 0 {
				s.killBackend(t)
			} else {
				s.crash(t)
			}
		}
		wg.Wait()
		reconnected(t, st.pool)
		eventually(t, 40*time.Second, func() string { return st.missing(t, journal, nil) })
		chaos.stop(t)
		st.check(t, journal)
	})
}

// chaos runs three dispatchers and mistreats them.
type chaos struct {
	rng    *rand.Rand
	config childConfig
	slots  [3]*child
	named  int
	counts map[string]int
}

func newChaos(t *testing.T, seed uint64, c childConfig) *chaos {
	ch := &chaos{rng: rand.New(rand.NewPCG(seed, 2000)), config: c, counts: map[string]int{}}
	for i := range ch.slots {
		ch.start(t, i)
	}
	return ch
}

func (c *chaos) start(t *testing.T, i int) {
	c.named++
	cfg := c.config
	cfg.Name = "d" + strconv.Itoa(c.named)
	c.slots[i] = startChild(t, cfg)
}

func (c *chaos) run(t *testing.T, ctx context.Context) {
	for n := 0; ctx.Err() == nil; n++ {
		pause(ctx, time.Duration(100+c.rng.IntN(900))*time.Millisecond)
		i := c.rng.IntN(len(c.slots))
		action := c.rng.IntN(4)
		if n < 3 {
			action = 3 - n // each at least once
		}
		switch action {
		case 0, 1:
			c.counts["killed"]++
			c.slots[i].kill()
			c.start(t, i)
		case 2:
			c.counts["stopped"]++
			c.slots[i].stop(t)
			pause(ctx, time.Duration(c.rng.IntN(1000))*time.Millisecond)
			c.start(t, i)
		case 3:
			c.counts["paused"]++
			c.slots[i].signal(syscall.SIGSTOP)
			pause(ctx, stressLease+time.Duration(c.rng.IntN(600))*time.Millisecond)
			c.slots[i].signal(syscall.SIGCONT)
		}
	}
	t.Log("dispatchers were", c.counts)
}

func (c *chaos) kill(t *testing.T) {
	for i := range c.slots {
		c.slots[i].kill()
		c.start(t, i)
	}
}

func (c *chaos) stop(t *testing.T) {
	for _, s := range c.slots {
		s.stop(t)
	}
}
