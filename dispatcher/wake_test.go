package dispatcher_test

import (
	"context"
	"fmt"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/postroom/postroom/dispatcher"
	"github.com/postroom/postroom/internal/pgtest"
)

// An outbox that has long been idle is polled at once when it is woken.
func TestWake(t *testing.T) {
	pool := pgtest.New(t)
	watch, err := pgx.Connect(t.Context(), pgtest.First(t).URL(pool))
	if err != nil {
		t.Fatal(err)
	}
	defer watch.Close(context.Background())
	r := &recorder{}
	d, err := dispatcher.New(pool, r, dispatcher.Config{MaxPollInterval: time.Minute})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- d.Run(ctx) }()
	defer func() {
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
	}()
	write(t, pool, numbered("orders", 1, 0, 1)...)
	waitStored(t, r, 1)
	idle := time.Now()
	eventually(t, time.Minute, func() string {
		if time.Since(idle) < 10*time.Second { // a poll every half second by then
			return "it has not been idle for long"
		}
		var polled bool // just now, so that the next poll is far
		err := watch.QueryRow(t.Context(), `SELECT EXISTS (SELECT FROM pg_stat_activity
			WHERE datname = current_database() AND pid <> pg_backend_pid() AND query LIKE '%AS l(lane, until)%'
			  AND clock_timestamp() - query_start < interval '50 ms')`).Scan(&polled)
		if err != nil || !polled {
			return fmt.Sprint("no poll was seen: ", err)
		}
		return ""
	})
	write(t, pool, numbered("orders", 1, 1, 1)...)
	began := time.Now()
	d.Wake()
	waitStored(t, r, 2)
	took := time.Since(began)
	t.Logf("published %v after the wake-up", took)
	if took > 100*time.Millisecond { // 20ms on a machine that does nothing else
		t.Errorf("published %v after the wake-up", took)
	}
}
