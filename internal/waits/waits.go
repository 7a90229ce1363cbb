// Package waits holds how packages wait.
package waits

import (
	"context"
	"time"

	"github.com/cenkalti/backoff/v4"
)

// Growing returns delays that double, drawn from the whole range between zero and
// first, twice first, and so on up to longest. It never ends by itself.
func Growing(first, longest time.Duration) *backoff.ExponentialBackOff {
	return backoff.NewExponentialBackOff(
		backoff.WithInitialInterval(first/2), // the library draws up to twice the interval
		backoff.WithMaxInterval(longest/2),
		backoff.WithMultiplier(2),
		backoff.WithRandomizationFactor(1),
		backoff.WithMaxElapsedTime(0),
	)
}

// For returns after d, or earlier with ctx's error when ctx ends.
func For(ctx context.Context, d time.Duration) error {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}
