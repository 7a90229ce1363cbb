package idempotency

import (
	"errors"
	"strings"
	"testing"
)

func TestParseKey(t *testing.T) {
	for _, test := range []struct {
		lines []string
		want  string
		err   error
	}{
		{nil, "", errNoKey},
		{[]string{"8e03978e-40d5-43e8-bc93-6894a57f9324"}, "8e03978e-40d5-43e8-bc93-6894a57f9324", nil},
		{[]string{`"8e03978e-40d5-43e8-bc93-6894a57f9324"`}, "8e03978e-40d5-43e8-bc93-6894a57f9324", nil},
		{[]string{`"a b"`}, "a b", nil},
		{[]string{`"\"\\"`}, `"\`, nil},
		{[]string{`"a";x;y=1;z="q;\"";t=*tok/en:%;b=:YQ==:;d=@1;n=-1.5;s=?0`}, "a", nil},
		{[]string{"a;b=1"}, "a;b=1", nil},
		{[]string{`\`}, `\`, nil},
		{[]string{strings.Repeat("~", 255)}, strings.Repeat("~", 255), nil},
		{[]string{strings.Repeat("~", 256)}, "", errBadKey},
		{[]string{`"` + strings.Repeat(`\\`, 255) + `"`}, strings.Repeat(`\`, 255), nil},
		{[]string{"a", "b"}, "", errBadKey},
		{[]string{""}, "", errBadKey},
		{[]string{`"`}, "", errBadKey},
		{[]string{`"a\`}, "", errBadKey},
		{[]string{`"a\n"`}, "", errBadKey},
		{[]string{"\"a\tb\""}, "", errBadKey},
		{[]string{`"a" ;b`}, "", errBadKey},
		{[]string{`"a";`}, "", errBadKey},
		{[]string{`"a";B`}, "", errBadKey},
		{[]string{`"a";1`}, "", errBadKey},
		{[]string{`"a";b=`}, "", errBadKey},
		{[]string{`"a";b="c`}, "", errBadKey},
		{[]string{`"a", "b"`}, "", errBadKey},
		{[]string{`a"b"`}, "", errBadKey},
		{[]string{"a,b"}, "", errBadKey},
		{[]string{"a\x7f"}, "", errBadKey},
		{[]string{"ä"}, "", errBadKey},
	} {
		got, err := parseKey(test.lines)
		if !errors.Is(err, test.err) || err == nil && got != test.want {
			t.Errorf("parseKey(%.40q) = %.40q, %v, want %.40q, %v", test.lines, got, err, test.want, test.err)
		}
		for _, line := range test.lines {
			if err != nil && len(line) > 3 && strings.Contains(err.Error(), line) {
				t.Errorf("parseKey(%.40q): the error holds the key", test.lines)
			}
		}
	}
}

func FuzzParseKey(f *testing.F) {
	for _, line := range []string{"abc", `"abc"`, `"a\"b\\";p=1;q="x"`, "a, b", "", `"`, `"a";b=:YQ==:`, "a\xff", " x "} {
		f.Add(line)
	}
	f.Fuzz(func(t *testing.T, line string) {
		key, err := parseKey([]string{line})
		if err != nil {
			return
		}
		if err := checkKey(key); err != nil {
			t.Fatalf("parseKey(%q) = %q: %v", line, key, err)
		}
		// The quoted form of the key is the same key.
		again, err := parseKey([]string{`"` + strings.NewReplacer(`\`, `\\`, `"`, `\"`).Replace(key) + `";p=1`})
		if err != nil || again != key {
			t.Fatalf("%q in quotes = %q, %v", key, again, err)
		}
	})
}
