package main

import (
	"fmt"
	"io"
	"os"
	"strconv"
	"sync"
	"time"
)

// A screen prints lines that stay and, below them, the progress: redrawn in
// place on a terminal, a line a second elsewhere.
type screen struct {
	out   io.Writer
	live  bool
	begun time.Time

	mu       sync.Mutex
	progress string // what stands below the lines, on a terminal
}

func newScreen(out io.Writer) *screen {
	s := &screen{out: out, begun: time.Now()}
	if f, ok := out.(*os.File); ok && os.Getenv("TERM") != "dumb" {
		info, err := f.Stat()
		s.live = err == nil && info.Mode()&os.ModeCharDevice != 0
	}
	return s
}

// pace is the time between two looks at the progress.
func (s *screen) pace() time.Duration {
	if s.live {
		return 100 * time.Millisecond
	}
	return time.Second
}

// line prints a line that stays.
func (s *screen) line(format string, args ...any) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.erase()
	fmt.Fprintf(s.out, format+"\n", args...)
	if s.progress != "" {
		fmt.Fprint(s.out, s.progress)
	}
}

// event prints a line that stays, with the time.
func (s *screen) event(format string, args ...any) {
	s.line(s.clock()+format, args...)
}

// update shows the progress.
func (s *screen) update(format string, args ...any) {
	text := s.clock() + fmt.Sprintf(format, args...)
	if !s.live {
		s.line("%s", text)
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.erase()
	s.progress = text
	fmt.Fprint(s.out, text)
}

// end turns the progress into a line that stays.
func (s *screen) end() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.progress != "" {
		fmt.Fprintln(s.out)
		s.progress = ""
	}
}

func (s *screen) erase() {
	if s.progress != "" {
		fmt.Fprint(s.out, "\r\x1b[K")
	}
}

func (s *screen) clock() string {
	return fmt.Sprintf("%5.1fs  ", time.Since(s.begun).Seconds())
}

// grouped writes n with a comma between thousands.
func grouped[N int | int64](n N) string {
	digits := strconv.FormatInt(int64(n), 10)
	for i := len(digits) - 3; i > 0 && digits[i-1] != '-'; i -= 3 {
		digits = digits[:i] + "," + digits[i:]
	}
	return digits
}
