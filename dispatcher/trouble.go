package dispatcher

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/postroom/postroom/internal/pg"
)

const (
	levelWarn  = slog.LevelWarn
	levelError = slog.LevelError
)

func (l *lane) attr() slog.Attr     { return slog.Int("lane", int(l.number)) }
func errorAttr(err error) slog.Attr { return slog.Any("error", err) }
func topicAttr(t string) slog.Attr  { return slog.String("topic", t) }
func attemptAttr(n int) slog.Attr   { return slog.Int("attempt", n) }
func idAttr(id string) slog.Attr    { return slog.String("message_id", id) }
func countAttr(n int) slog.Attr     { return slog.Int("count", n) }

// troubles holds what is wrong at present, by place. It logs a trouble when it
// begins and once a minute while it lasts, whatever the number of failures,
// and its end. What comes back within the minute is the same trouble: it is
// logged with the next line that is due.
type troubles struct {
	name string // of the outbox, or ""
	log  *slog.Logger
	mu   sync.Mutex
	at   map[string]*trouble
}

type trouble struct {
	err           error // nil: it is over for now
	since, logged time.Time
	count         int  // failures since the last line that said it was over
	told          bool // the last line said that it lasts
}

const logEvery = time.Minute

func (t *troubles) set(place string, err error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	now := time.Now()
	tr := t.at[place]
	if tr == nil {
		t.forget(now)
		tr = &trouble{}
		t.at[place] = tr
	}
	if tr.err == nil {
		tr.since = now
	}
	tr.err = err
	tr.count++
	if now.Sub(tr.logged) < logEvery {
		return
	}
	t.log.LogAttrs(context.Background(), levelWarn, "trouble, trying again",
		slog.String("place", place), slog.Int("count", tr.count), errorAttr(err))
	tr.logged, tr.told = now, true
}

func (t *troubles) clear(place string) {
	t.mu.Lock()
	defer t.mu.Unlock()
	tr := t.at[place]
	if tr == nil || tr.err == nil {
		return
	}
	tr.err = nil
	if !tr.told {
		return
	}
	t.log.LogAttrs(context.Background(), slog.LevelInfo, "trouble is over",
		slog.String("place", place), slog.Int("count", tr.count), slog.Duration("duration", time.Since(tr.since)))
	tr.count, tr.told = 0, false
}

// forget drops what has been over for so long that it would be logged anew.
func (t *troubles) forget(now time.Time) {
	maps.DeleteFunc(t.at, func(_ string, tr *trouble) bool {
		return tr.err == nil && now.Sub(tr.logged) >= logEvery
	})
}

// err joins what is wrong at present, or returns nil.
func (t *troubles) err() error {
	t.mu.Lock()
	defer t.mu.Unlock()
	who := "dispatcher"
	if t.name != "" {
		who = fmt.Sprintf("dispatcher of %q", t.name)
	}
	var errs []error
	for place, tr := range t.at {
		if tr.err == nil {
			continue
		}
		errs = append(errs, fmt.Errorf("%s: %s, for %v: %w", who, place, time.Since(tr.since).Round(time.Millisecond), tr.err))
	}
	slices.SortFunc(errs, func(a, b error) int { return cmpText(a, b) })
	return errors.Join(errs...)
}

const (
	mostTroubles = 20
	mostTrouble  = 300 // characters
)

// texts returns what is wrong at present, in a form that is kept. It changes only when
// something else is wrong.
func (t *troubles) texts() []string {
	t.mu.Lock()
	defer t.mu.Unlock()
	all := []string{}
	for place, tr := range t.at {
		if tr.err != nil {
			all = append(all, pg.CleanText(place+": "+tr.err.Error(), mostTrouble))
		}
	}
	slices.Sort(all)
	return all[:min(len(all), mostTroubles)]
}

func cmpText(a, b error) int {
	switch x, y := a.Error(), b.Error(); {
	case x < y:
		return -1
	case x > y:
		return 1
	}
	return 0
}
