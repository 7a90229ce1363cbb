package main

import (
	"crypto/sha256"
	"sync"
)

// An entry is what the producers remember of a message whose transaction
// committed.
type entry struct {
	key string
	n   int64 // place in the order of its key, from 1
	sum [sha256.Size]byte
}

// A ledger holds every committed message, in this program's memory: what is
// compared with it never came through PostgreSQL, Postroom or the broker.
type ledger struct {
	mu      sync.Mutex
	entries map[string]entry // by message id
}

func newLedger() *ledger { return &ledger{entries: map[string]entry{}} }

func (l *ledger) add(id string, e entry) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.entries[id] = e
}

// An audit compares what arrived somewhere, in its order, with the ledger.
// Begin one when the ledger is complete.
type audit struct {
	ledger map[string]entry
	seen   map[string]bool
	newest map[string]int64 // key → highest n so far

	Total      int // all that arrived
	Distinct   int // first arrivals of messages in the ledger
	Unknown    int // first arrivals of messages that nobody committed
	Repeats    int // all further arrivals
	Altered    int // arrivals with another key, number or payload than was written
	Disordered int // first arrivals behind a later message of their key
}

func newAudit(l *ledger) *audit {
	return &audit{ledger: l.entries, seen: map[string]bool{}, newest: map[string]int64{}}
}

// add takes the next arrival.
func (a *audit) add(id string, got entry) {
	a.Total++
	want, known := a.ledger[id]
	if known && got != want {
		a.Altered++
	}
	if a.seen[id] {
		a.Repeats++
		return
	}
	a.seen[id] = true
	if !known {
		a.Unknown++
		return
	}
	a.Distinct++
	if want.n < a.newest[want.key] {
		a.Disordered++
	}
	a.newest[want.key] = max(a.newest[want.key], want.n)
}

// missing returns how many committed messages did not arrive.
func (a *audit) missing() int { return len(a.ledger) - a.Distinct }
