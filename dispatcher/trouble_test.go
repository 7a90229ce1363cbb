package dispatcher

import (
	"bytes"
	"errors"
	"log/slog"
	"strings"
	"testing"
	"testing/synctest"
	"time"
)

// A trouble that comes and goes is logged at most twice a minute, and the lines
// account for all of it.
func TestFlappingTroubleIsLoggedOnceAMinute(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var b bytes.Buffer
		tr := &troubles{log: slog.New(slog.NewTextHandler(&b, nil)), at: map[string]*trouble{}}
		lines := func() (n int) {
			n = strings.Count(b.String(), "\n")
			b.Reset()
			return n
		}
		for range 100 { // 50 s
			tr.set("broker", errors.New("away"))
			tr.clear("broker")
			time.Sleep(500 * time.Millisecond)
		}
		if n := lines(); n != 2 {
			t.Errorf("%d lines for a minute of blips, want its begin and its end", n)
		}
		if err := tr.err(); err != nil {
			t.Errorf("what is over is reported: %v", err)
		}
		tr.set("broker", errors.New("away"))
		if err := tr.err(); err == nil {
			t.Error("what has come back is not reported")
		}
		if n := lines(); n != 0 {
			t.Errorf("%d lines within the minute", n)
		}
		time.Sleep(15 * time.Second)
		tr.set("broker", errors.New("away"))
		if text := b.String(); !strings.Contains(text, "count=101") {
			t.Errorf("after a minute: %q, want a line that counts 101 failures", text)
		}
		lines()
		for range 100 {
			tr.set("broker", errors.New("away"))
		}
		tr.clear("broker")
		if text := b.String(); lines() != 1 || !strings.Contains(text, "count=201") || !strings.Contains(text, "duration=15s") {
			t.Errorf("at the end: %q", text)
		}
		time.Sleep(2 * time.Minute)
		tr.set("other", errors.New("x"))
		if len(tr.at) != 1 {
			t.Errorf("%d places are kept", len(tr.at))
		}
	})
}
