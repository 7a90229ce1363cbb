package outbox

import (
	"context"

	"github.com/jackc/pgx/v5"

	"github.com/postroom/postroom"
)

// A Beginner starts transactions: a pool or a connection of pgx.
type Beginner interface {
	Begin(ctx context.Context) (pgx.Tx, error)
}

// Transact runs f in a transaction of its own, writes what f has sent as one
// batch just before the commit, and then calls o.Wake. It returns nil if the
// transaction has committed. An error or a panic of f rolls it back.
//
// What f sends is checked and written when f has returned: until then it must
// not change, and f's own statements do not see it. send is to be called from
// one goroutine.
func (o *Outbox) Transact(ctx context.Context, db Beginner, f func(tx pgx.Tx, send func(...postroom.Message)) error) error {
	var sent []postroom.Message
	err := pgx.BeginFunc(ctx, db, func(tx pgx.Tx) error {
		if err := f(tx, func(msgs ...postroom.Message) { sent = append(sent, msgs...) }); err != nil {
			return err
		}
		return o.Write(ctx, tx, sent...)
	})
	if err == nil && len(sent) > 0 && o.Wake != nil {
		o.Wake()
	}
	return err
}
