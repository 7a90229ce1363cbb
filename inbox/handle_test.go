package inbox_test

import (
	"testing"

	"github.com/postroom/postroom/inbox"
	"github.com/postroom/postroom/internal/pgtest"
)

func TestHandleOnce(t *testing.T) {
	pgtest.Each(t, func(t *testing.T, s *pgtest.Server) {
		pool := newPool(t, s)
		mustHandle(t, pool, "m1", effect, inbox.Handled)
		mustHandle(t, pool, "m1", effect, inbox.Duplicate)
		mustHandle(t, pool, "m2", effect, inbox.Handled)
		wantStrings(t, "effects", effects(t, pool), "m1", "m2")
		wantStrings(t, "processed", outcomes(t, pool), "billing m1 handled", "billing m2 handled")
		if n := pool.Stat().AcquiredConns(); n != 0 {
			t.Errorf("%d connections are still acquired", n)
		}
	})
}

func TestConsumerHandlesAndAcks(t *testing.T) {
	pool := newPool(t, pgtest.First(t))
	bus, rec := newBus()
	publish(t, bus, message("m1"), message("m2"), message("m1"))
	start(t, pool, rec, effect, inbox.Config{})
	eventually(t, "three acks", func() bool { return rec.count("ack") == 3 })
	if got := effects(t, pool); len(got) != 2 {
		t.Errorf("effects = %q, want two", got)
	}
}
