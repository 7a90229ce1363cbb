// Package reserved lets Postroom's own packages write headers whose names
// callers may not use.
package reserved

import "context"

type key struct{}

// Allow returns a context under which the outbox takes reserved header names.
func Allow(ctx context.Context) context.Context {
	return context.WithValue(ctx, key{}, true)
}

// Allowed reports whether ctx came from [Allow].
func Allowed(ctx context.Context) bool {
	ok, _ := ctx.Value(key{}).(bool)
	return ok
}
