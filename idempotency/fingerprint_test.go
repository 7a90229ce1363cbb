package idempotency

import (
	"bytes"
	"encoding/json"
	"fmt"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"
	"unicode/utf8"
)

func testRules(t *testing.T) rules {
	cfg, err := Config{
		CanonicalJSON: true, CanonicalMultipart: true,
		IgnoreFields: []string{"/meta/sent~1at", "nonce"}, IgnoreQuery: []string{"trace"},
	}.withDefaults()
	if err != nil {
		t.Fatal(err)
	}
	return cfg.rules
}

func form(boundary string, parts ...string) []byte {
	var b bytes.Buffer
	for _, p := range parts {
		name, value, _ := strings.Cut(p, "=")
		fmt.Fprintf(&b, "--%s\r\nContent-Disposition: form-data; name=%q\r\n\r\n%s\r\n", boundary, name, value)
	}
	fmt.Fprintf(&b, "--%s--\r\n", boundary)
	return b.Bytes()
}

// Which contents are the same request.
func TestFingerprints(t *testing.T) {
	r := testRules(t)
	base := content{operation: "POST /p", method: "POST", path: "/p"}
	with := func(media string, body []byte, query string) content {
		c := base
		c.mediaType, c.body, c.query = media, body, query
		return c
	}
	js := func(s string) content { return with("application/json", []byte(s), "") }
	long := strings.Repeat("[", 200) + strings.Repeat("]", 200)
	for _, test := range []struct {
		name string
		a, b content
		same bool
	}{
		{"equal", with("text/plain", []byte("x"), ""), with("text/plain", []byte("x"), ""), true},
		{"body", with("text/plain", []byte("x"), ""), with("text/plain", []byte("y"), ""), false},
		{"media type", with("text/plain", nil, ""), with("text/html", nil, ""), false},
		{"charset's case", with("text/plain; charset=UTF-8", nil, ""), with("TEXT/plain;charset=utf-8", nil, ""), true},
		{"parameters of the media type", with("text/plain; a=1; b=2", nil, ""), with("text/plain; b=2; a=1", nil, ""), true},
		{"media type that is none", with("//", nil, ""), with("///", nil, ""), false},
		{"query's order", with("", nil, "a=1&b=2"), with("", nil, "b=2&a=1"), true},
		{"query's values", with("", nil, "a=1&a=2"), with("", nil, "a=2&a=1"), false},
		{"ignored parameter", with("", nil, "a=1&trace=2"), with("", nil, "a=1&trace=3"), true},
		{"query that is none", with("", nil, "a=%zz"), with("", nil, "a=%zy"), false},
		{"members' order", js(`{"a":1,"b":[2,"x"]}`), js("{ \"b\" : [2, \"\\u0078\"],\n\"a\":1.0e0}"), true},
		{"elements' order", js(`[1,2]`), js(`[2,1]`), false},
		{"number's form", js(`[100, 0.5, -0, 1e-2]`), js(`[1e2, 5e-1, 0.0, 0.010]`), true},
		{"numbers beyond 53 bits", js(`9007199254740993`), js(`9007199254740992`), false},
		{"huge exponents", js(`1e99999999999`), js(`1e99999999998`), false},
		{"string and number", js(`"1"`), js(`1`), false},
		{"null and absent", js(`{"a":null}`), js(`{}`), false},
		{"true and false", js(`[true]`), js(`[false]`), false},
		{"nesting", js(`[[1],[2]]`), js(`[[1,2]]`), false},
		{"name twice", js(`{"a":1,"a":2}`), js(`{"a":2}`), false},
		{"name twice, spaced", js(`{"a":1,"a":2}`), js(`{"a":1, "a":2}`), false},
		{"ignored field", js(`{"meta":{"sent/at":1,"b":2}}`), js(`{"meta":{"b":2,"sent/at":{"x":[3]}}}`), true},
		{"ignored field absent", js(`{"meta":{"sent/at":1}}`), js(`{"meta":{}}`), true},
		{"field of that name elsewhere", js(`{"sent/at":1}`), js(`{"sent/at":2}`), false},
		{"lone surrogates", js(`"\ud800"`), js(`"\ud801"`), false},
		{"trailing", js(`1`), js(`1 2`), false},
		{"not JSON", js(`{`), js(`{ `), false},
		{"deep", js(long), js(long + " "), false},
		{"deep, equal", js(long), js(long), true},
		{"+json", with("application/vnd.x+json", []byte(`{"a":1,"b":2}`), ""), with("application/vnd.x+json", []byte(`{"b":2,"a":1}`), ""), true},
		{"JSON by another name", with("text/plain", []byte(`[1]`), ""), with("text/plain", []byte(`[ 1]`), ""), false},
		{
			"boundary and order of parts", with("multipart/form-data; boundary=one", form("one", "a=1", "b=2"), ""),
			with("multipart/form-data; boundary=two", form("two", "b=2", "a=1"), ""), true,
		},
		{
			"order of parts with one name", with("multipart/form-data; boundary=one", form("one", "a=1", "a=2"), ""),
			with("multipart/form-data; boundary=two", form("two", "a=2", "a=1"), ""), false,
		},
		{
			"part", with("multipart/form-data; boundary=one", form("one", "a=1"), ""),
			with("multipart/form-data; boundary=one", form("one", "a=2"), ""), false,
		},
		{
			"ignored part", with("multipart/form-data; boundary=one", form("one", "a=1", "nonce=1"), ""),
			with("multipart/form-data; boundary=one", form("one", "a=1", "nonce=2"), ""), true,
		},
		{
			"parts that end early", with("multipart/form-data; boundary=one", form("one", "a=1")[:30], ""),
			with("multipart/form-data; boundary=one", form("one", "b=1")[:30], ""), true, // the same 30 bytes
		},
	} {
		v := r.version(test.a)
		a, b := r.fingerprint(v, test.a), r.fingerprint(v, test.b)
		if bytes.Equal(a, b) != test.same {
			t.Errorf("%s: equal is %v, want %v", test.name, !test.same, test.same)
		}
	}
	// What is compressed is compared by its bytes.
	c := js(`{}`)
	c.coding = "gzip"
	if v := r.version(c); v != versionRaw {
		t.Errorf("version of a compressed body: %d", v)
	}
}

// A fingerprint must not change between releases: keys are stored with it.
func TestFingerprintsAreStable(t *testing.T) {
	c := content{operation: "POST /p", method: "POST", path: "/p", query: "b=2&a=1", mediaType: "application/json", body: []byte(`{"b":1.50,"a":["x",null,true]}`)}
	r := testRules(t)
	m := c
	m.mediaType, m.body = "multipart/form-data; boundary=one", form("one", "a=1", "b=2")
	got := []string{
		fmt.Sprintf("%x", r.fingerprint(versionRaw, c)[:8]),
		fmt.Sprintf("%x", r.fingerprint(versionJSON, c)[:8]),
		fmt.Sprintf("%x", r.fingerprint(versionMultipart, m)[:8]),
		fmt.Sprintf("%x", inputPrint([]byte("input"))[:8]),
	}
	want := []string{"b80c3d335b9edd6f", "6e18b40c31329371", "658c35bdfde90578", "cb3bb20d503b29f3"}
	if !slices.Equal(got, want) {
		t.Errorf("fingerprints %q, want %q", got, want)
	}
}

// A hostile body costs little.
func TestFingerprintsAreBounded(t *testing.T) {
	r := testRules(t)
	const size = 1 << 20
	begin := time.Now()
	for _, body := range []string{
		strings.Repeat("[", size),
		strings.Repeat(`{"a":`, size/5),
		`{"` + strings.Repeat("a", size/2) + `":[` + strings.Repeat("1,", size/4) + "1]}",
		strings.Repeat(`{"a":`, 99) + `"` + strings.Repeat("x", size-1000) + `"` + strings.Repeat("}", 99),
	} {
		r.fingerprint(versionJSON, content{mediaType: "application/json", body: []byte(body)})
	}
	r.fingerprint(versionMultipart, content{
		mediaType: "multipart/form-data; boundary=b", body: []byte(strings.Repeat("--b\r\n\r\n\r\n", size/10)),
	})
	if d := time.Since(begin); d > time.Minute {
		t.Errorf("took %v", d)
	} else {
		t.Logf("took %v", d)
	}
}

// Two JSON texts have the same form exactly if they have the same value.
func FuzzCanonicalJSON(f *testing.F) {
	for _, s := range []string{
		`{"a":1,"b":[2,"x",null,true]}`, `1.50e+3`, `{"a":1,"a":2}`, `"\ud800"`, `[[],{}]`, "1 2", `{"":{"~":0}}`, "-0", "1e400", "\xff",
	} {
		f.Add([]byte(s), []byte(s+" "))
	}
	f.Add([]byte(`{"a":1,"b":2}`), []byte(`{"b":2,"a":1}`))
	f.Add([]byte(`[1,"2"]`), []byte(`[1,2]`))
	f.Fuzz(func(t *testing.T, a, b []byte) {
		x, xok := canonicalJSON(a, nil)
		y, yok := canonicalJSON(b, nil)
		if xok && (!json.Valid(a) || !utf8.Valid(a)) {
			t.Fatalf("%q has a form", a)
		}
		if !xok || !yok {
			return
		}
		if v, w := value(t, a), value(t, b); reflect.DeepEqual(v, w) && !bytes.Equal(x, y) {
			t.Fatalf("%q and %q are equal, their forms %q and %q are not", a, b, x, y)
		} else if !reflect.DeepEqual(v, w) && bytes.Equal(x, y) {
			t.Fatalf("%q and %q are not equal, their forms are %q", a, b, x)
		}
	})
}

// value decodes a JSON text with numbers in canonical form.
func value(t *testing.T, b []byte) any {
	d := json.NewDecoder(bytes.NewReader(b))
	d.UseNumber()
	var v any
	if err := d.Decode(&v); err != nil {
		t.Fatal(err)
	}
	var walk func(any) any
	walk = func(v any) any {
		switch v := v.(type) {
		case json.Number:
			n, err := canonicalNumber(v.String())
			if err != nil {
				t.Fatal(err)
			}
			return "number " + n
		case []any:
			for i := range v {
				v[i] = walk(v[i])
			}
		case map[string]any:
			for k := range v {
				v[k] = walk(v[k])
			}
		case string:
			return "string " + v
		}
		return v
	}
	return walk(v)
}

func FuzzParts(f *testing.F) {
	f.Add("multipart/form-data; boundary=b", form("b", "a=1", "c=2"))
	f.Add("multipart/form-data; boundary=b", []byte("--b\r\n\r\n"))
	f.Add("multipart/form-data", []byte(""))
	f.Add(`multipart/form-data; boundary="b`, []byte("--b--"))
	f.Fuzz(func(t *testing.T, media string, body []byte) {
		c := content{mediaType: media, body: body}
		one := rules{}.fingerprint(versionMultipart, c)
		if !bytes.Equal(one, rules{}.fingerprint(versionMultipart, c)) {
			t.Fatal("two fingerprints of one body")
		}
	})
}
