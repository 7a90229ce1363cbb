package kafka

import (
	"maps"
	"sync"
)

// Places of trouble. That of a partition is its index.
const (
	troubleGroup  = -1
	troubleTopic  = -2
	troubleCommit = -3
	troubleLayout = -4
)

// firstBroker is the place of broker 0; those of others are below.
const firstBroker = -5

func brokerPlace(id int32) int32 { return firstBroker - id }

// troubles tells a subscription's Trouble why messages have stopped coming. Each
// place has its own reason; it is over when none is left.
type troubles struct {
	tell func(error) // may be nil

	mu   sync.Mutex
	errs map[int32]error
	told error
}

func (t *troubles) set(place int32, err error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.errs == nil {
		t.errs = make(map[int32]error)
	}
	t.errs[place] = err
	t.say(err)
}

func (t *troubles) clear(place int32) {
	t.clearWhere(func(p int32) bool { return p == place })
}

// clearWhere clears the places of which over says so.
func (t *troubles) clearWhere(over func(place int32) bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	before := len(t.errs)
	maps.DeleteFunc(t.errs, func(place int32, _ error) bool { return over(place) })
	if len(t.errs) == before {
		return
	}
	for _, err := range t.errs {
		t.say(err) // another one that is left
		return
	}
	t.say(nil)
}

// say tells what differs from what was told. t.mu is held, for the order.
func (t *troubles) say(err error) {
	same := err == nil && t.told == nil || err != nil && t.told != nil && err.Error() == t.told.Error()
	if t.told = err; !same && t.tell != nil {
		t.tell(err)
	}
}
