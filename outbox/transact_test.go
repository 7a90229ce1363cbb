package outbox_test

import (
	"errors"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"

	"github.com/postroom/postroom"
	"github.com/postroom/postroom/internal/pgtest"
	"github.com/postroom/postroom/outbox"
)

func TestTransact(t *testing.T) {
	pool := pgtest.New(t)
	woken := 0
	box := outbox.Outbox{Wake: func() {
		if len(stored(t, pool)) == 0 {
			t.Error("woken before the commit")
		}
		woken++
	}}
	fault := errors.New("fault")
	send := func(end error, ids ...string) error {
		return box.Transact(t.Context(), pool, func(tx pgx.Tx, send func(...postroom.Message)) error {
			for _, id := range ids {
				send(postroom.Message{ID: id, Topic: "orders"})
			}
			if n := len(stored(t, pool)); n > 0 && end == nil && len(ids) > 2 {
				t.Errorf("%d messages are visible before the commit", n)
			}
			return end
		})
	}
	if err := send(nil, "a", "b", "c"); err != nil {
		t.Fatal(err)
	}
	if err := send(fault, "d"); !errors.Is(err, fault) {
		t.Errorf("Transact returned %v", err)
	}
	if err := send(nil, "e", "e"); err == nil {
		t.Error("an id twice was taken")
	}
	if err := send(nil); err != nil {
		t.Fatal(err)
	}
	if got := strings.Join(stored(t, pool), ","); got != "a,b,c" || woken != 1 {
		t.Errorf("stored %s, woken %d times", got, woken)
	}
}
