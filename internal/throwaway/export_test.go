package throwaway

import "context"

// FetchInto fetches a release into another cache than the user's, and returns
// where its programs are.
func FetchInto(ctx context.Context, cache string, major int) (dir string, err error) {
	b, err := fetch(ctx, cache, major)
	return b.dir, err
}
