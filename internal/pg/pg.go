// Package pg holds what the packages that speak to PostgreSQL share.
package pg

import (
	"fmt"
	"strings"
	"unicode"
	"unicode/utf8"

	"github.com/jackc/pgx/v5"
)

// DefaultSchema holds Postroom's tables unless another one is configured.
const DefaultSchema = "postroom"

// Schema returns name, or the default where it is empty. It reports a name that
// PostgreSQL cannot take, or would cut.
func Schema(name string) (string, error) {
	switch {
	case name == "":
		return DefaultSchema, nil
	case len(name) > 63:
		return name, fmt.Errorf("Schema %q has %d bytes, want at most 63", name, len(name))
	case !utf8.ValidString(name) || strings.ContainsRune(name, 0):
		return name, fmt.Errorf("Schema %q is not valid UTF-8, or contains a zero byte", name)
	}
	return name, nil
}

// InSchema puts the quoted schema in the place of "postroom", double quotes
// included, in a statement. Where a string literal begins with it, as in
// nextval('"postroom".x'), single quotes in the name are doubled too.
func InSchema(sql, schema string) string {
	if schema == DefaultSchema {
		return sql
	}
	quoted := pgx.Identifier{schema}.Sanitize()
	// In one pass, since the name may contain what is replaced.
	return strings.NewReplacer(
		`'"postroom"`, `'`+strings.ReplaceAll(quoted, `'`, `''`),
		`"postroom"`, quoted,
	).Replace(sql)
}

// CleanText makes an error's text fit for a column of most characters: valid,
// printable, on one line.
func CleanText(s string, most int) string {
	s = strings.Map(func(r rune) rune {
		if r == utf8.RuneError || !unicode.IsPrint(r) {
			return ' '
		}
		return r
	}, s)
	if runes := []rune(s); len(runes) > most {
		s = string(runes[:most-1]) + "…"
	}
	return s
}
