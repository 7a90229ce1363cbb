package dispatcher

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/postroom/postroom/internal/pgtest"
)

// A statement that was cut off gets longer until it ends, and the usual time again
// when that is enough; others keep theirs.
func TestSlowStatementsGetTheirTime(t *testing.T) {
	db := newDatabase(pgtest.New(t), 150*time.Millisecond)
	const slow = `SELECT pg_sleep($1)`
	cut := 0
	for {
		_, err := db.Exec(t.Context(), slow, 0.5)
		if err == nil {
			break
		}
		if cut++; !errors.Is(err, context.DeadlineExceeded) || cut > 4 {
			t.Fatalf("attempt %d: %v", cut, err)
		}
	}
	if cut != 2 && cut != 3 { // 150, 300 and perhaps 600 ms
		t.Errorf("it was cut off %d times", cut)
	}
	if rows, err := db.Query(t.Context(), `SELECT pg_sleep(2)`); err == nil {
		for rows.Next() {
		}
		if rows.Err() == nil {
			t.Error("another statement was not cut off")
		}
	}
	if _, err := db.Exec(t.Context(), slow, 0); err != nil {
		t.Fatal(err)
	}
	if _, err := db.Exec(t.Context(), slow, 0.5); err == nil {
		t.Error("it keeps the longer time although it was fast again")
	}
	ctx, cancel := context.WithTimeout(t.Context(), time.Millisecond)
	defer cancel()
	var one int
	if err := db.QueryRow(ctx, `SELECT 1 FROM pg_sleep(1)`).Scan(&one); err == nil {
		t.Error("the caller's deadline does not count")
	}
	if len(db.times) != 2 {
		t.Errorf("times of %d statements are kept: %v", len(db.times), db.times)
	}
}
