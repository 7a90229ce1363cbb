package pgtest

import (
	"os"
	"os/exec"
	"slices"
	"strings"
	"testing"
)

func TestParseChoices(t *testing.T) {
	tests := []struct {
		value string
		want  []string // nil for an error
	}{
		{"", []string{""}},
		{" ", []string{""}},
		{"15", []string{"15"}},
		{"14, 15,18", []string{"14", "15", "18"}},
		{"postgres://u@h/d?a=1,2", []string{"postgres://u@h/d?a=1,2"}},
		{"13", nil},
		{"14,", nil},
		{"15.2", nil},
		{"newest", nil},
	}
	for _, tt := range tests {
		got, err := parseChoices(tt.value)
		if !slices.Equal(got, tt.want) || (err == nil) != (tt.want != nil) {
			t.Errorf("parseChoices(%q) = %q, %v, want %q", tt.value, got, err, tt.want)
		}
		if err != nil && !strings.Contains(err.Error(), variable) {
			t.Errorf("parseChoices(%q): error %q does not name %s", tt.value, err, variable)
		}
	}
}

// A missing server fails a test and says what to do.
func TestMissingServerFails(t *testing.T) {
	for _, value := range []string{"99", "postgres://u:secret@127.0.0.1:1/d", "nonsense"} {
		cmd := exec.Command(os.Args[0], "-test.run=^TestURLLeadsToThePoolsDatabase$", "-test.v")
		cmd.Env = append(os.Environ(), variable+"="+value)
		out, err := cmd.CombinedOutput()
		if err == nil || !strings.Contains(string(out), "--- FAIL") {
			t.Errorf("with %s=%s: %v, want a failed test:\n%s", variable, value, err, out)
		}
		if !strings.Contains(string(out), variable) || strings.Contains(string(out), "secret") {
			t.Errorf("with %s=%s the test does not say what to do, or tells a password:\n%s", variable, value, out)
		}
	}
}
