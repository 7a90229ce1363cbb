package throwaway

import "context"

// FetchInto fetches a release into another cache than the user's, and returns
// where its programs are.
func FetchInto(ctx context.Context, cache string, major int) (dir string, err error) {
	b, err := fetch(ctx, cache, major)
	return b.dir, err
}

// Once makes a directory of the cache.
func Once(ctx context.Context, dir string, fill func(dir string) error) error {
	return once(ctx, dir, fill)
}

// Process returns where the files of a real Kafka are, and its process.
func (k *Kafka) Process() (dir string, pid int) {
	r := k.server.(*realKafka)
	return r.guard.dir, r.process.cmd.Process.Pid
}
