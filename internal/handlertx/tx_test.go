package handlertx

import (
	"testing"

	"github.com/jackc/pgx/v5"
)

func TestSuspected(t *testing.T) {
	for sql, want := range map[string]bool{
		"COMMIT AND CHAIN": true, "commit; Begin": true, "rollback;START transaction": true,
		"INSERT INTO orders VALUES ($1)": false, "SELECT 1": false, "COMMIT": false, "": false, "star": false,
	} {
		if got := suspected(sql, nil); got != want {
			t.Errorf("suspected(%q) = %v, want %v", sql, got, want)
		}
	}
	if suspected("SELECT 1", []any{pgx.NamedArgs{}}) {
		t.Error("named arguments are suspected")
	}
}
