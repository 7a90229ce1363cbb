package outbox_test

import (
	"strings"
	"testing"
	"time"

	"github.com/postroom/postroom"
)

// TestParkedKeyHoldsAfterRestart: a dispatcher ends between the page that holds a
// refused message and the page that holds its successor.
func TestParkedKeyHoldsAfterRestart(t *testing.T) {
	each(t, func(t *testing.T, s *server) {
		u := s.database(t)
		writer := connect(t, u)
		cfg := quick()
		cfg.PageSize = 1
		refuse := func(m postroom.Message) bool { return string(m.Payload) == "0" }

		// It cannot ask which keys wait, so that it never gets past the first page.
		h := &hook{before: func(sql string) bool { return !strings.Contains(sql, behindPart) }}
		first := &recorder{refuse: refuse}
		stop := start(t, connect(t, u, h.watch), first, cfg)
		write(t, writer, numbered(1, 0, 3)...)
		eventually(t, time.Minute, func() string {
			if h.ended(behindPart) == 0 {
				return "the dispatcher has not come to the second page"
			}
			return ""
		})
		stop()
		second := &recorder{refuse: refuse}
		start(t, connect(t, u), second, cfg)
		eventually(t, time.Minute, func() string {
			if n := scan[int](t, writer, `SELECT count(*) FROM "postroom".outbox_parked`); n != 3 {
				return "not all three messages of the key are set aside"
			}
			return ""
		})
		for _, m := range append(first.messages(), second.messages()...) {
			t.Errorf("%s was published although the first message of its key was refused", m.ID)
		}
	})
}

// TestCursorsAreThinnedUnderTraffic: cursors do not pile up while no lane ever
// comes to rest for long.
func TestCursorsAreThinnedUnderTraffic(t *testing.T) {
	each(t, func(t *testing.T, s *server) {
		u := s.database(t)
		writer := connect(t, u)
		exec(t, writer, appendCursors, 2000)
		r := &recorder{}
		start(t, connect(t, u), r, quick())
		n := 0
		eventually(t, time.Minute, func() string {
			write(t, writer, numbered(50, n, 50)...) // for all lanes, again and again
			n += 50
			pause(t.Context(), 20*time.Millisecond)
			if left := scan[int](t, writer, `SELECT count(*) FROM "postroom".outbox_cursors WHERE number < 2000`); left > 100 {
				return "thousands of cursors are left"
			}
			return ""
		})
		waitNumbers(t, r, 0, n)
	})
}

// appendCursors gives each lane $1 settled cursors.
const appendCursors = `
INSERT INTO "postroom".outbox_cursors (lane, origin, number, fence, owner, prev, until, last_id)
SELECT l.lane, "postroom".origin(), n, 1, 'former', '1:1:', '1:1:', 9223372036854775807
  FROM "postroom".outbox_lanes l, generate_series(1, $1::int) n`
