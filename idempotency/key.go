package idempotency

import (
	"errors"
	"fmt"
	"strings"
)

// headerName is the request header that carries a key.
const headerName = "Idempotency-Key"

const maxKeyLen = 255 // bytes, decoded

var (
	errNoKey  = errors.New("the request has no key")
	errBadKey = errors.New("the key is not valid")
)

// badKey says what is wrong with a key, without the key.
func badKey(format string, args ...any) error {
	return fmt.Errorf("%w: "+format, append([]any{errBadKey}, args...)...)
}

// parseKey returns the key in the lines of a request's header. A value that
// begins with a quote is a string of structured fields (RFC 9651, section 3.3.3)
// whose parameters are ignored; any other is the key itself, so "abc" and abc are
// the same key. It returns errNoKey where there is no line, else an errBadKey.
func parseKey(lines []string) (string, error) {
	switch len(lines) {
	case 0:
		return "", errNoKey
	case 1:
	default:
		return "", badKey("the header is there %d times", len(lines))
	}
	line := strings.Trim(lines[0], " \t")
	if !strings.HasPrefix(line, `"`) {
		if i := strings.IndexAny(line, `",`); i >= 0 {
			return "", badKey("a quote or a comma in a key without quotes, at byte %d", i)
		}
		if strings.Contains(line, " ") {
			return "", badKey("a space in a key without quotes")
		}
		return line, checkKey(line)
	}
	key, rest, err := quoted(line)
	if err != nil {
		return "", err
	}
	if err := skipParameters(rest); err != nil {
		return "", err
	}
	return key, checkKey(key)
}

// checkKey reports a key that cannot be one: it has 1 to 255 printable ASCII
// characters, and spaces only between others.
func checkKey(key string) error {
	switch {
	case key == "":
		return badKey("it is empty")
	case len(key) > maxKeyLen:
		return badKey("it has %d bytes, want at most %d", len(key), maxKeyLen)
	case key[0] == ' ' || key[len(key)-1] == ' ':
		return badKey("a space at its begin or end")
	}
	for i := range len(key) {
		if key[i] < 0x20 || key[i] > 0x7e {
			return badKey("byte %d is not printable ASCII", i)
		}
	}
	return nil
}

// quoted reads a string that begins with a quote, and returns what follows it.
func quoted(s string) (value, rest string, err error) {
	var b strings.Builder
	for i := 1; i < len(s); i++ {
		switch c := s[i]; {
		case c == '"':
			return b.String(), s[i+1:], nil
		case c == '\\':
			i++
			if i == len(s) || s[i] != '"' && s[i] != '\\' {
				return "", "", badKey("a backslash before neither a quote nor a backslash")
			}
			b.WriteByte(s[i])
		case c < 0x20 || c > 0x7e:
			return "", "", badKey("a character that is not printable ASCII")
		default:
			b.WriteByte(c)
		}
	}
	return "", "", badKey("the closing quote is missing")
}

const (
	digits      = "0123456789"
	lowerLetter = "abcdefghijklmnopqrstuvwxyz"
	upperLetter = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"

	// parameterName and bareItem hold the characters of parameters' names and of
	// values that are not quoted: tokens, numbers, dates, bytes, booleans.
	parameterName = lowerLetter + digits + "_-.*"
	bareItem      = lowerLetter + upperLetter + digits + "!#$%&'*+-.^_`|~:/=?@"
)

// skipParameters checks the form of what stands behind a quoted key.
func skipParameters(s string) error {
	for s != "" {
		if s[0] != ';' {
			return badKey("something other than parameters behind it")
		}
		s = strings.TrimLeft(s[1:], " ")
		n := span(s, parameterName)
		if n == 0 || strings.IndexByte(lowerLetter+"*", s[0]) < 0 {
			return badKey("a parameter without a name")
		}
		s = s[n:]
		if !strings.HasPrefix(s, "=") {
			continue
		}
		s = s[1:]
		if strings.HasPrefix(s, `"`) {
			_, rest, err := quoted(s)
			if err != nil {
				return err
			}
			s = rest
			continue
		}
		if n = span(s, bareItem); n == 0 {
			return badKey("a parameter without a value")
		}
		s = s[n:]
	}
	return nil
}

// span returns how many bytes at the begin of s are in set.
func span(s, set string) int {
	for i := range len(s) {
		if strings.IndexByte(set, s[i]) < 0 {
			return i
		}
	}
	return len(s)
}
