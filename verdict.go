package postroom

import (
	"errors"
	"time"
)

// Permanent marks err as one that no retry can cure: a subscriber sets the
// message aside as a dead letter at once. It returns nil for a nil err.
func Permanent(err error) error {
	if err == nil {
		return nil
	}
	return &verdictError{err: err, permanent: true}
}

// IsPermanent reports whether err was marked by [Permanent].
func IsPermanent(err error) bool {
	v, ok := errors.AsType[*verdictError](err)
	return ok && v.permanent
}

// RetryAfter asks that the message be handled again after d instead of the
// usual backoff. The attempt counts. A d below zero means at once. It returns
// nil for a nil err.
func RetryAfter(err error, d time.Duration) error {
	if err == nil {
		return nil
	}
	return &verdictError{err: err, delay: max(d, 0)}
}

// RetryDelay returns the delay that [RetryAfter] put on err, and whether it
// did.
func RetryDelay(err error) (time.Duration, bool) {
	v, ok := errors.AsType[*verdictError](err)
	if !ok || v.permanent {
		return 0, false
	}
	return v.delay, true
}

type verdictError struct {
	err       error
	permanent bool
	delay     time.Duration
}

func (e *verdictError) Error() string { return e.err.Error() }
func (e *verdictError) Unwrap() error { return e.err }
