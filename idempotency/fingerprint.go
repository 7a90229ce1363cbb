package idempotency

import (
	"bytes"
	"crypto/sha256"
	"encoding/binary"
	"encoding/json"
	"errors"
	"hash"
	"io"
	"maps"
	"mime"
	"mime/multipart"
	"net/http"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"unicode/utf8"
)

// A version names how a fingerprint was made. It is stored beside it, so that
// keys outlive a change of the algorithm or of its configuration: what was made
// in one way is compared in that way. Numbers are never used for another way.
type version int16

const (
	versionRaw       version = 1 // the body's bytes
	versionJSON      version = 2 // the body's JSON value
	versionMultipart version = 3 // the body's parts
	versionInput     version = 4 // what Do was given
)

// known reports whether this release can make fingerprints of the version.
func (v version) known() bool { return v >= versionRaw && v <= versionInput }

// content is what a fingerprint is made of.
type content struct {
	operation string
	method    string
	path      string
	query     string // as sent
	mediaType string // the Content-Type as sent
	coding    string // the Content-Encoding as sent
	body      []byte
}

func contentOf(r *http.Request, operation string, body []byte) content {
	return content{
		operation: operation,
		method:    r.Method,
		path:      r.URL.EscapedPath(),
		query:     r.URL.RawQuery,
		mediaType: strings.Join(r.Header.Values("Content-Type"), ","),
		coding:    strings.Join(r.Header.Values("Content-Encoding"), ","),
		body:      body,
	}
}

// rules is what fingerprints leave out.
type rules struct {
	json, multipart bool
	fields          *fields         // of JSON
	parts           map[string]bool // of multipart bodies
	parameters      map[string]bool // of the query
}

// version chooses how to make a fingerprint of c.
func (r rules) version(c content) version {
	base, _, _ := mime.ParseMediaType(c.mediaType)
	switch {
	case strings.TrimSpace(c.coding) != "":
	case r.json && (base == "application/json" || strings.HasSuffix(base, "+json")):
		return versionJSON
	case r.multipart && base == "multipart/form-data":
		return versionMultipart
	}
	return versionRaw
}

// fingerprint returns a hash that two requests share if, as far as v looks, they
// ask for the same. A body that has not the form which v takes for granted is
// compared by its bytes.
func (r rules) fingerprint(v version, c content) []byte {
	w := writer{sha256.New()}
	w.text("postroom idempotency", strconv.Itoa(int(v)), c.operation, c.method, c.path)
	w.query(c.query, r.parameters)
	w.mediaType(v, c.mediaType)
	w.text(strings.ToLower(strings.Join(strings.Fields(c.coding), "")))
	var form []byte
	var ok bool
	switch v {
	case versionJSON:
		form, ok = canonicalJSON(c.body, r.fields)
	case versionMultipart:
		form, ok = canonicalParts(c.mediaType, c.body, r.parts)
	}
	if ok {
		w.text("canonical")
		w.bytes(form)
	} else {
		w.text("raw")
		w.bytes(c.body)
	}
	return w.Sum(nil)
}

// writer hashes parts with their lengths, so that no two lists of parts give the
// same input.
type writer struct{ hash.Hash }

func (w writer) bytes(b []byte) {
	var n [8]byte
	binary.BigEndian.PutUint64(n[:], uint64(len(b)))
	w.Write(n[:])
	w.Write(b)
}

func (w writer) text(parts ...string) {
	for _, p := range parts {
		w.bytes([]byte(p))
	}
}

// inputPrint is the fingerprint of a call that is no request.
func inputPrint(input []byte) []byte {
	w := writer{sha256.New()}
	w.text("postroom idempotency", strconv.Itoa(int(versionInput)))
	w.bytes(input)
	return w.Sum(nil)
}

// query hashes the parameters in the order of their names. Values of one name
// keep their order. A query that is not well formed counts as it is.
func (w writer) query(raw string, without map[string]bool) {
	values, err := url.ParseQuery(raw)
	if err != nil {
		w.text("query as sent", raw)
		return
	}
	maps.DeleteFunc(values, func(name string, _ []string) bool { return without[name] })
	w.text("query", strconv.Itoa(len(values)))
	for _, name := range slices.Sorted(maps.Keys(values)) {
		w.text(name, strconv.Itoa(len(values[name])))
		w.text(values[name]...)
	}
}

// mediaType hashes a content type without regard to case and to the order of its
// parameters.
func (w writer) mediaType(v version, s string) {
	base, parameters, err := mime.ParseMediaType(s)
	if err != nil {
		w.text("media type as sent", s)
		return
	}
	if v == versionMultipart {
		delete(parameters, "boundary")
	}
	w.text("media type", base, strconv.Itoa(len(parameters)))
	for _, name := range slices.Sorted(maps.Keys(parameters)) {
		value := parameters[name]
		if name == "charset" {
			value = strings.ToLower(value)
		}
		w.text(name, value)
	}
}

// canonicalParts returns a form of a multipart body that depends on neither the
// boundary nor the order of parts with different names.
func canonicalParts(mediaType string, body []byte, without map[string]bool) ([]byte, bool) {
	_, parameters, err := mime.ParseMediaType(mediaType)
	if err != nil || parameters["boundary"] == "" {
		return nil, false
	}
	type part struct {
		name string
		sum  []byte
	}
	var parts []part
	for reader := multipart.NewReader(bytes.NewReader(body), parameters["boundary"]); ; {
		p, err := reader.NextRawPart()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return nil, false
		}
		b, err := io.ReadAll(p)
		if err != nil {
			return nil, false
		}
		if without[p.FormName()] {
			continue
		}
		w := writer{sha256.New()}
		w.text(p.FormName(), p.FileName())
		w.mediaType(versionRaw, p.Header.Get("Content-Type"))
		w.text(p.Header.Get("Content-Transfer-Encoding"))
		w.bytes(b)
		parts = append(parts, part{p.FormName(), w.Sum(nil)})
	}
	slices.SortStableFunc(parts, func(a, b part) int { return strings.Compare(a.name, b.name) })
	var form []byte
	for _, p := range parts {
		form = append(form, p.sum...)
	}
	return form, true
}

// fields are members of JSON values to leave out, by their names from the top.
type fields struct {
	all  bool // the value itself, with all in it
	next map[string]*fields
}

// add takes a pointer (RFC 6901) that begins with a slash.
func (f *fields) add(pointer string) {
	for name := range strings.SplitSeq(pointer[1:], "/") {
		name = unescapePointer.Replace(name)
		if f.next == nil {
			f.next = make(map[string]*fields)
		}
		if f.next[name] == nil {
			f.next[name] = new(fields)
		}
		f = f.next[name]
	}
	f.all = true
}

func (f *fields) at(name string) *fields {
	if f == nil {
		return nil
	}
	return f.next[name]
}

var unescapePointer = strings.NewReplacer("~1", "/", "~0", "~")

// canonicalJSON returns a form of a JSON text that depends only on its value: not
// on white space, escapes, the order of members, or how a number is written. It
// reports false for what is no JSON text, for deep ones, and where readers may
// disagree on the value: a name that is there twice, a character that is not
// valid.
func canonicalJSON(body []byte, without *fields) (form []byte, ok bool) {
	if !utf8.Valid(body) {
		return nil, false
	}
	d := json.NewDecoder(bytes.NewReader(body))
	d.UseNumber()
	form, err := appendJSON(nil, d, without, maxDepth)
	if err != nil {
		return nil, false
	}
	if _, err := d.Token(); !errors.Is(err, io.EOF) {
		return nil, false
	}
	return form, true
}

// maxDepth bounds what a hostile body can cost: each level is copied once.
const maxDepth = 100

var errNotCanonical = errors.New("no canonical form")

// appendJSON appends the next value of d.
func appendJSON(form []byte, d *json.Decoder, without *fields, depth int) ([]byte, error) {
	token, err := d.Token()
	if err != nil {
		return nil, err
	}
	switch v := token.(type) {
	case json.Delim:
		if depth == 0 {
			return nil, errNotCanonical
		}
		if v == '{' {
			return appendObject(form, d, without, depth-1)
		}
		form = append(form, '[')
		for i := 0; d.More(); i++ {
			var inner *fields
			if without != nil {
				inner = without.at(strconv.Itoa(i))
			}
			if form, err = appendJSON(form, d, inner, depth-1); err != nil {
				return nil, err
			}
		}
		_, err = d.Token()
		return append(form, ']'), err
	case json.Number:
		n, err := canonicalNumber(v.String())
		return append(append(form, 'n'), n...), err
	case string:
		return appendString(form, v)
	case bool:
		return append(strconv.AppendBool(form, v), ';'), nil
	}
	return append(form, "null;"...), nil
}

func appendObject(form []byte, d *json.Decoder, without *fields, depth int) ([]byte, error) {
	members := make(map[string][]byte)
	for d.More() {
		token, err := d.Token()
		if err != nil {
			return nil, err
		}
		name, ok := token.(string)
		if _, twice := members[name]; twice || !ok {
			return nil, errNotCanonical
		}
		inner := without.at(name)
		value, err := appendJSON(nil, d, inner, depth)
		if err != nil {
			return nil, err
		}
		if inner != nil && inner.all {
			value = nil
		}
		members[name] = value
	}
	if _, err := d.Token(); err != nil {
		return nil, err
	}
	form = append(form, '{')
	for _, name := range slices.Sorted(maps.Keys(members)) {
		if members[name] == nil {
			continue
		}
		var err error
		if form, err = appendString(form, name); err != nil {
			return nil, err
		}
		form = append(form, members[name]...)
	}
	return append(form, '}'), nil
}

// appendString refuses the character that the decoder puts in the place of those
// it cannot read.
func appendString(form []byte, s string) ([]byte, error) {
	if strings.ContainsRune(s, utf8.RuneError) {
		return nil, errNotCanonical
	}
	form = strconv.AppendInt(append(form, 's'), int64(len(s)), 10)
	return append(append(form, ':'), s...), nil
}

// canonicalNumber writes a JSON number as its digits, without zeros at either
// end, and a power of ten. Unlike the form of RFC 8785 it rounds nothing.
func canonicalNumber(s string) (string, error) {
	sign := ""
	if strings.HasPrefix(s, "-") {
		sign, s = "-", s[1:]
	}
	mantissa, power := s, int64(0)
	if i := strings.IndexAny(s, "eE"); i >= 0 {
		var err error
		if power, err = strconv.ParseInt(strings.TrimPrefix(s[i+1:], "+"), 10, 32); err != nil {
			return "", errNotCanonical
		}
		mantissa = s[:i]
	}
	whole, fraction, _ := strings.Cut(mantissa, ".")
	power -= int64(len(fraction))
	digits := strings.TrimLeft(whole+fraction, "0")
	trimmed := strings.TrimRight(digits, "0")
	power += int64(len(digits) - len(trimmed))
	if trimmed == "" {
		return "0;", nil // -0 is 0
	}
	return sign + trimmed + "e" + strconv.FormatInt(power, 10) + ";", nil
}
