package inbox

import (
	"context"
	"errors"
	"fmt"
	"io"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/postroom/postroom"
)

// ownError is what a program's own database layer may return.
type ownError struct{ cause error }

func (e *ownError) Error() string { return "Datenbankfehler" } // says nothing of the cause
func (e *ownError) Unwrap() error { return e.cause }

func TestCase_B36_Classification(t *testing.T) {
	code := func(code string) error { return &pgconn.PgError{Code: code, Message: "irgendein Text"} }
	tests := []struct {
		err  error
		want bool
	}{
		{nil, false},
		{errors.New("SQLSTATE 40001"), false}, // text says nothing
		{code("40001"), true},
		{code("40P01"), true},
		{code("40003"), true},
		{code("40002"), false},
		{code("55P03"), true},
		{code("57P01"), true},
		{code("57P02"), true},
		{code("57P03"), true},
		{code("57014"), false}, // a statement timeout
		{code("08006"), true},
		{code("08P01"), true},
		{code("53100"), true},
		{code("53200"), true},
		{code("53300"), true},
		{code("58030"), true},
		{code("25006"), true},
		{code("25P02"), false},
		{code("25P03"), false},
		{code("26000"), true},
		{code("0A000"), false},
		{&pgconn.PgError{Code: "0A000", Routine: "RevalidateCachedQuery"}, true},
		{code("23505"), false},
		{code("22P02"), false},
		{code("42P01"), false},
		{code(""), false},
		{code("4"), false},
		{fmt.Errorf("insert invoice: %w", code("40001")), true},
		{&ownError{fmt.Errorf("tx: %w", code("40P01"))}, true},
		{errors.Join(errors.New("first"), &ownError{code("57P01")}), true},
		{postroom.RetryAfter(code("40001"), 1), true},
		{postroom.Permanent(code("40001")), true}, // the database knows better
		{&pgconn.ConnectError{}, true},
		{&ownError{&pgconn.ConnectError{}}, true},
		{fmt.Errorf("query: %w", pgconn.ErrConnClosed), true},
		{io.ErrUnexpectedEOF, false}, // may come from anywhere: the connection's state decides
		{context.DeadlineExceeded, false},
		{pgx.ErrNoRows, false},
		{pgx.ErrTxClosed, false},
	}
	for _, test := range tests {
		if got := databaseTrouble(test.err); got != test.want {
			t.Errorf("databaseTrouble(%v) = %v, want %v", test.err, got, test.want)
		}
	}
}

func TestClean(t *testing.T) {
	long := ""
	for range 600 {
		long += "é€"
	}
	tests := []struct{ in, want string }{
		{"plain", "plain"},
		{"a\x00b\nc\td", "a b c d"},
		{"bad \xff\xfe end", "bad \uFFFD end"},
		{"  trimmed\n", "trimmed"},
		{"\x00", ""},
		{long, string([]rune(long)[:1000])},
		{"x" + long, string([]rune("x" + long)[:1000])},
	}
	for _, test := range tests {
		if got := clean(test.in, 1000); got != test.want {
			t.Errorf("clean(%.20q) = %.20q, want %.20q", test.in, got, test.want)
		}
	}
	if got := reasonOf(errors.New("\x00")); got == "" {
		t.Error("an error without a printable text has no reason")
	}
}
