package dispatcher

import (
	"context"
	"errors"
	"sync"
	"time"
)

// RunAll runs the dispatchers of several databases, shards or tenants say, side by side
// until ctx ends, and returns their errors, joined, when all have drained. Trouble with
// one of them leaves the others alone: a database that is away is waited for, and one
// that is not set up ([*SetupError]) is tried again after pauses of up to a minute. Both
// show in the Health of its dispatcher. A publisher may be shared, as far as it is safe for
// concurrent use; give each dispatcher a Config.Name.
//
// Each needs a pool of its own, and Run or RunAll is called for it once.
func RunAll(ctx context.Context, ds ...*Dispatcher) error {
	errs := make([]error, len(ds))
	var wg sync.WaitGroup
	for i, d := range ds {
		wg.Go(func() { errs[i] = d.runUntilSetUp(ctx) })
	}
	wg.Wait()
	return errors.Join(errs...)
}

// runUntilSetUp is Run, which is over at once where the database is not set up, until
// that has been done.
func (d *Dispatcher) runUntilSetUp(ctx context.Context) error {
	retry := newBackoff(time.Second, time.Minute)
	for {
		err := d.Run(ctx)
		setup, ok := errors.AsType[*SetupError](err)
		if !ok {
			return err
		}
		if ctx.Err() != nil {
			return nil
		}
		d.trouble.set("setup", setup)
		wait(ctx, retry.NextBackOff())
		d.trouble.clear("setup")
	}
}
