package main

import (
	"bytes"
	"os"
	"regexp"
	"strings"
	"testing"
)

func TestOrders(t *testing.T) {
	var out bytes.Buffer
	if err := run(t.Context(), &out); err != nil {
		t.Fatal(err)
	}
	if want := "1 order placed, 1 invoice written\n"; out.String() != want {
		t.Errorf("it prints %q, want %q", out.String(), want)
	}
}

// What a user must write is the first thing that a reader judges.
func TestServiceIsShort(t *testing.T) {
	text, err := os.ReadFile("service.go")
	if err != nil {
		t.Fatal(err)
	}
	lines := 0
	blank := regexp.MustCompile(`^\s*(//.*)?$`)
	for line := range strings.Lines(string(text)) {
		if !blank.MatchString(strings.TrimRight(line, "\n")) {
			lines++
		}
	}
	if lines >= 60 {
		t.Errorf("service.go has %d lines of code, want fewer than 60", lines)
	}
}
