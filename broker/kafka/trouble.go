package kafka

import "sync"

// troubleGroup is the place of trouble with the group; that of a partition is its
// index.
const troubleGroup = -1

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

func (t *troubles) clear(places ...int32) {
	t.mu.Lock()
	defer t.mu.Unlock()
	before := len(t.errs)
	for _, p := range places {
		delete(t.errs, p)
	}
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
