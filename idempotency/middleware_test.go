package idempotency_test

import (
	"bufio"
	"context"
	"fmt"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/postroom/postroom"
	"github.com/postroom/postroom/idempotency"
	"github.com/postroom/postroom/internal/pgtest"
	"github.com/postroom/postroom/outbox"
)

func TestRepeatGetsTheStoredAnswer(t *testing.T) {
	pgtest.Each(t, func(t *testing.T, s *pgtest.Server) {
		pool := s.New(t)
		mustExec(t, pool, `CREATE TABLE payments (n serial PRIMARY KEY, note text)`)
		a := serve(t, pool, idempotency.Config{}, pay)
		first := a.post("k1", "10 EUR")
		first.want(t, 201, "")
		if first.replayed() {
			t.Error("the first answer says that it is a repeat")
		}
		again := a.post("k1", "10 EUR")
		if again.status != first.status || again.body != first.body || !again.replayed() {
			t.Errorf("repeat = %+v, first = %+v", again, first)
		}
		for _, name := range []string{"Location", "Content-Type", "Content-Length"} {
			if got, want := again.header.Get(name), first.header.Get(name); got != want || got == "" {
				t.Errorf("%s = %q, first %q", name, got, want)
			}
		}
		if got := again.header.Get("Idempotent-Replayed"); got != "true" {
			t.Errorf("Idempotent-Replayed = %q", got)
		}
		a.wantRuns(1)
		wantStrings(t, "payments", payments(t, pool), "10 EUR")
		wantStrings(t, "keys", states(t, pool), "k1 completed")
	})
}

// Each way in which pgx can run statements does, poolers' ways included.
func TestExecModes(t *testing.T) {
	base := newPool(t)
	for _, mode := range []pgx.QueryExecMode{
		pgx.QueryExecModeCacheStatement, pgx.QueryExecModeCacheDescribe, pgx.QueryExecModeDescribeExec,
		pgx.QueryExecModeExec, pgx.QueryExecModeSimpleProtocol,
	} {
		t.Run(mode.String(), func(t *testing.T) {
			pool := withPool(t, base, func(c *pgxpool.Config) { c.ConnConfig.DefaultQueryExecMode = mode })
			fail := true
			a := serve(t, pool, idempotency.Config{}, func(w http.ResponseWriter, r *http.Request) {
				if fail {
					w.WriteHeader(500)
					return
				}
				pay(w, r)
			})
			key := "k " + mode.String()
			a.post(`"`+key+`"`, "x").want(t, 500, "")
			fail = false
			a.post(`"`+key+`"`, "x").want(t, 201, "")
			if got := a.post(`"`+key+`"`, "x"); got.status != 201 || !got.replayed() {
				t.Errorf("repeat = %+v", got)
			}
			a.wantRuns(2)
			if log := a.log.String(); log != "" {
				t.Errorf("log: %s", log)
			}
		})
	}
}

func TestAnotherSchema(t *testing.T) {
	base := newPool(t)
	mustExec(t, base, `ALTER SCHEMA postroom RENAME TO "o'dd ""schema"`)
	a := serve(t, base, idempotency.Config{Schema: `o'dd "schema`}, pay)
	a.post("k1", "x").want(t, 201, "")
	if got := a.post("k1", "x"); !got.replayed() {
		t.Errorf("repeat = %+v", got)
	}
}

// The middleware's statements do not depend on the database's defaults.
func TestDefaultIsolation(t *testing.T) {
	for _, level := range []string{"repeatable read", "serializable"} {
		base := newPool(t)
		pool := withPool(t, base, func(c *pgxpool.Config) {
			c.ConnConfig.RuntimeParams["default_transaction_isolation"] = level
		})
		a := serve(t, pool, idempotency.Config{}, pay)
		a.post("k1", "x").want(t, 201, "")
		if got := a.post("k1", "x"); !got.replayed() {
			t.Errorf("%s: repeat = %+v", level, got)
		}
	}
}

func TestMissingKey(t *testing.T) {
	a := serve(t, newPool(t), idempotency.Config{}, pay)
	got := a.post("", "x")
	got.want(t, 400, "idempotency-key-missing")
	if link := got.header.Get("Link"); !strings.Contains(link, `rel="describedby"`) {
		t.Errorf("Link = %q", link)
	}
	if ct := got.header.Get("Content-Type"); ct != "application/problem+json" {
		t.Errorf("Content-Type = %q", ct)
	}
	if cc := got.header.Get("Cache-Control"); cc != "no-store" {
		t.Errorf("Cache-Control = %q", cc)
	}
	if ra := got.header.Get("Retry-After"); ra != "" {
		t.Errorf("Retry-After = %q", ra)
	}
	a.wantRuns(0)
}

func TestOptionalKey(t *testing.T) {
	pool := newPool(t)
	status := 201
	a := serve(t, pool, idempotency.Config{Optional: true}, func(w http.ResponseWriter, r *http.Request) {
		if _, ok := postroom.OperationFrom(r.Context()); ok {
			t.Error("there is an operation without a key")
		}
		note(r.Context(), fmt.Sprint(status))
		w.WriteHeader(status)
	})
	for _, status = range []int{201, 201, 422, 500} {
		got := a.post("", "x")
		got.want(t, status, "")
		if got.replayed() {
			t.Error("an answer without a key says that it is a repeat")
		}
	}
	a.wantRuns(4)
	wantStrings(t, "payments", payments(t, pool), "201", "201")
	wantStrings(t, "keys", states(t, pool))
	a.do(ask{key: " \t", body: "x", header: http.Header{"Idempotency-Key": {""}}}).want(t, 400, "idempotency-key-invalid")
}

// Row 4: keys mean nothing on other methods.
func TestOtherMethodsPass(t *testing.T) {
	pool := newPool(t)
	a := serve(t, pool, idempotency.Config{}, func(w http.ResponseWriter, r *http.Request) {
		if idempotency.Tx(r.Context()) != nil {
			t.Errorf("%s has a transaction", r.Method)
		}
		w.(http.Flusher).Flush() // the server's own writer
	})
	for _, method := range []string{"GET", "HEAD", "OPTIONS", "PUT", "DELETE"} {
		for range 2 {
			a.do(ask{method: method, path: "/any", key: "k1"}).want(t, 200, "")
		}
	}
	a.wantRuns(10)
	wantStrings(t, "keys", states(t, pool))
}

func TestOtherMethodsProtected(t *testing.T) {
	pool := newPool(t)
	a := serve(t, pool, idempotency.Config{Methods: []string{"PUT", "HEAD"}}, pay)
	for range 2 {
		a.do(ask{method: "PUT", path: "/any", key: "k1"}).want(t, 201, "")
		if got := a.do(ask{method: "HEAD", path: "/any", key: "k2"}); got.status != 201 || got.body != "" ||
			got.header.Get("Content-Length") != "9" {
			t.Errorf("HEAD: %+v", got)
		}
	}
	a.wantRuns(2)
}

// The keys H1 to H6: what net/http does with unusual lines, and what comes of it.
func TestMalformedKeys(t *testing.T) {
	pool := newPool(t)
	a := serve(t, pool, idempotency.Config{}, pay)
	const invalid = "idempotency-key-invalid"
	for name, lines := range map[string][]string{
		"H2 tab inside":           {"a\tb"},
		"H2 not ASCII":            {"schlüssel"},
		"H2 invalid UTF-8":        {"a\xff\xfe"},
		"H4 empty":                {""},
		"H4 empty string":         {`""`},
		"H5 two lines":            {"a", "a"},
		"H6 joined":               {"a, b"},
		"H6 joined without space": {"a,b"},
		"H6 two strings":          {`"a", "b"`},
		"too long":                {strings.Repeat("k", 256)},
		"too long in quotes":      {`"` + strings.Repeat("k", 256) + `"`},
		"space":                   {"a b"},
		"spaces at the ends":      {`" a"`},
		"no end":                  {`"a`},
		"escape":                  {`"a\b"`},
		"behind it":               {`"a"b`},
		"not ASCII in quotes":     {`"ü"`},
	} {
		got := a.do(ask{body: "x", header: http.Header{"Idempotency-Key": lines}})
		if got.status != 400 || !strings.Contains(got.body, invalid) {
			t.Errorf("%s: %d %s", name, got.status, got.body)
		}
		if len(lines[0]) > 3 && strings.Contains(got.body, lines[0]) {
			t.Errorf("%s: the answer holds the key", name)
		}
	}
	a.wantRuns(0)
	wantStrings(t, "keys", states(t, pool))
	if log := a.log.String(); strings.Contains(log, "kkk") {
		t.Errorf("the log holds a key: %s", log)
	}
}

// H1: characters that net/http refuses itself.
func TestControlCharactersInAKey(t *testing.T) {
	a := serve(t, newPool(t), idempotency.Config{}, pay)
	for _, key := range []string{"a\x00b", "a\x01b", "a\x7fb"} {
		conn, err := net.Dial("tcp", strings.TrimPrefix(a.url, "http://"))
		if err != nil {
			t.Fatal(err)
		}
		fmt.Fprintf(conn, "POST /payments HTTP/1.1\r\nHost: x\r\nConnection: close\r\nIdempotency-Key: %s\r\nContent-Length: 0\r\n\r\n", key)
		line, err := bufio.NewReader(conn).ReadString('\n')
		if err != nil || !strings.Contains(line, " 400 ") {
			t.Errorf("%q: %q, %v", key, line, err)
		}
		_ = conn.Close()
	}
	a.wantRuns(0)
}

// H3, H6 and case 1: the forms of one key.
func TestFormsOfAKey(t *testing.T) {
	pool := newPool(t)
	a := serve(t, pool, idempotency.Config{}, pay)
	for _, line := range []string{"abc", `"abc"`, `"abc";p=1`, `"abc"; q="x;y" ;r;s=?1`, "  abc ", `"ab\c"`} {
		got := a.do(ask{body: "x", header: http.Header{"Idempotency-Key": {line}}})
		if line == `"ab\c"` || strings.Contains(line, `" ;`) {
			got.want(t, 400, "")
			continue
		}
		got.want(t, 201, "")
	}
	for _, line := range []string{strings.Repeat("k", 255), `"a \"quoted\\ one"`, `abc"`, "ABC"} {
		a.do(ask{body: "x", header: http.Header{"Idempotency-Key": {line}}})
	}
	a.wantRuns(4)
	wantStrings(t, "keys", states(t, pool),
		"ABC completed", `a "quoted\ one completed`, "abc completed", strings.Repeat("k", 255)+" completed")
}

func TestCase_B90_KeyReusedForAnotherRequest(t *testing.T) {
	pool := newPool(t)
	a := serve(t, pool, idempotency.Config{}, pay)
	for _, q := range []ask{
		{body: "x"},
		{body: "x", tenant: "other"},
		{body: "x", path: "/refunds"},
	} {
		q.key = "k1"
		a.do(q).want(t, 201, "")
	}
	a.wantRuns(3)
	for name, q := range map[string]ask{
		"body":         {body: "y"},
		"white space":  {body: "x "},
		"no body":      {},
		"query":        {body: "x", path: "/payments?a=1"},
		"media type":   {body: "x", header: http.Header{"Content-Type": {"application/json"}}},
		"coding":       {body: "x", header: http.Header{"Content-Encoding": {"gzip"}}},
		"1 MiB":        {body: strings.Repeat("x", 1<<20)},
		"NUL":          {body: "x\x00"},
		"not UTF-8":    {body: "x\xff"},
		"other tenant": {body: "y", tenant: "other"},
	} {
		q.key = "k1"
		got := a.do(q)
		if got.status != 422 || !strings.Contains(got.body, "#idempotency-key-reused") {
			t.Errorf("%s: %d %s", name, got.status, got.body)
		}
	}
	a.wantRuns(3)
	// Path values are part of the request, not of the operation.
	a.do(ask{method: "PATCH", path: "/payments/1", key: "k1"}).want(t, 201, "")
	a.do(ask{method: "PATCH", path: "/payments/2", key: "k1"}).want(t, 422, "idempotency-key-reused")
	a.do(ask{body: strings.Repeat("x", 1<<20+1), key: "k2"}).want(t, 413, "")
	a.do(ask{path: "/payments?b=2&a=1", key: "k3"}).want(t, 201, "")
	if got := a.do(ask{path: "/payments?a=1&b=2", key: "k3"}); !got.replayed() {
		t.Errorf("the order of parameters: %+v", got)
	}
}

func TestSharedKeys(t *testing.T) {
	pool := newPool(t)
	a := serve(t, pool, idempotency.Config{SharedKeys: true}, pay)
	a.do(ask{key: "k1", body: "x"}).want(t, 201, "")
	a.do(ask{key: "k1", body: "x", path: "/refunds"}).want(t, 422, "idempotency-key-reused")
	a.do(ask{key: "k1", body: "x", path: "/refunds", tenant: "other"}).want(t, 201, "")
	a.wantRuns(2)
}

// A changed request fails loudly in each state of its key.
func TestPayloadChange(t *testing.T) {
	pool := newPool(t)
	entered, leave := make(chan int), make(chan int)
	a := serve(t, pool, idempotency.Config{}, func(w http.ResponseWriter, _ *http.Request) {
		entered <- 0
		w.WriteHeader(<-leave)
	})
	run := func() <-chan reply {
		done := a.start(ask{key: "k1", body: "x"})
		receive(t, "the handler", entered)
		return done
	}
	done := run()
	a.post("k1", "y").want(t, 422, "idempotency-key-reused") // in flight
	inFlight := a.post("k1", "x")
	inFlight.want(t, 409, "idempotency-in-flight")
	if s := inFlight.header.Get("Retry-After"); s != "5" && s != "4" {
		t.Errorf("Retry-After = %q", s)
	}
	leave <- 503
	receive(t, "the answer", done).want(t, 503, "")
	wantStrings(t, "keys", states(t, pool), "k1 released")
	a.post("k1", "y").want(t, 422, "idempotency-key-reused") // released
	done = run()
	leave <- 200
	receive(t, "the answer", done).want(t, 200, "")
	a.post("k1", "y").want(t, 422, "idempotency-key-reused") // completed
	mustExec(t, pool, `UPDATE postroom.idempotency_keys SET expires_at = clock_timestamp()`)
	a.post("k1", "y").want(t, 422, "idempotency-key-reused") // expired
	a.wantRuns(2)
}

func TestTenantIsRequired(t *testing.T) {
	a := serve(t, newPool(t), idempotency.Config{}, pay)
	a.do(ask{tenant: "-", key: "k1"}).want(t, 500, "")
	a.do(ask{tenant: strings.Repeat("t", 256), key: "k1"}).want(t, 500, "")
	a.do(ask{tenant: "a\xff", key: "k1"}).want(t, 500, "")
	a.wantRuns(0)
	if !strings.Contains(a.log.String(), "level=ERROR") {
		t.Error("nothing was logged")
	}
	for name, err := range map[string]error{
		"no tenant": func() error { _, err := idempotency.Middleware(newPool(t), nil, idempotency.Config{}); return err }(),
		"no pool":   func() error { _, err := idempotency.Middleware(nil, tenantOf, idempotency.Config{}); return err }(),
	} {
		if err == nil {
			t.Errorf("%s: no error", name)
		}
	}
}

func TestKeyFromTheBody(t *testing.T) {
	pool := newPool(t)
	a := serve(t, pool, idempotency.Config{
		Key: func(_ *http.Request, body []byte) (string, error) {
			key, rest, _ := strings.Cut(string(body), " ")
			if rest == "bad" {
				return "", fmt.Errorf("no")
			}
			return key, nil
		},
		CheckKey: func(key string) bool { return len(key) > 1 },
	}, pay)
	a.post("", "k1 x").want(t, 201, "")
	if got := a.post("", "k1 x"); !got.replayed() {
		t.Errorf("repeat = %+v", got)
	}
	a.post("", "k1 y").want(t, 422, "idempotency-key-reused")
	a.post("", " y").want(t, 400, "idempotency-key-missing")
	a.post("", "k2 bad").want(t, 400, "idempotency-key-invalid")
	a.post("", "k x").want(t, 400, "idempotency-key-invalid")
	a.post("", "\xff x").want(t, 400, "idempotency-key-invalid")
	a.wantRuns(1)
	wantStrings(t, "payments", payments(t, pool), "k1 x")
}

// Messages written under a key have the same ids in each attempt.
func TestOperationIdentity(t *testing.T) {
	pool := newPool(t)
	var ids, calls []string
	fail := true
	a := serve(t, pool, idempotency.Config{}, func(w http.ResponseWriter, r *http.Request) {
		o, ok := postroom.OperationFrom(r.Context())
		if want := (postroom.Operation{Kind: "http", Scope: "4:acme POST /payments", Key: "k1"}); !ok || o != want {
			t.Errorf("operation %+v, want %+v", o, want)
		}
		key, err := postroom.OperationKey(r.Context(), "bank")
		if err != nil {
			t.Error(err)
		}
		calls = append(calls, key)
		m := postroom.Message{Topic: "payments"}
		m.Identify(postroom.WithOperation(r.Context(), o))
		ids = append(ids, m.ID)
		var box outbox.Outbox
		if err := box.Write(r.Context(), idempotency.Tx(r.Context()), postroom.Message{Topic: "payments"}); err != nil {
			t.Error(err)
		}
		if fail {
			w.WriteHeader(500)
		}
	})
	a.post("k1", "x").want(t, 500, "")
	wantStrings(t, "messages", query(t, pool, `SELECT message_id FROM postroom.outbox_messages`))
	fail = false
	a.post("k1", "x").want(t, 200, "")
	if len(ids) != 2 || ids[0] != ids[1] || calls[0] != calls[1] {
		t.Errorf("ids %q, keys of calls %q", ids, calls)
	}
	wantStrings(t, "messages", query(t, pool, `SELECT message_id FROM postroom.outbox_messages`), ids[0])
}

func TestConfigIsChecked(t *testing.T) {
	pool := newPool(t)
	_, err := idempotency.Middleware(pool, tenantOf, idempotency.Config{
		Schema: strings.Repeat("s", 64), IsoLevel: "chaos", Timeout: -1, Lease: 1, Retention: 1, Wait: -1, QueueTimeout: 1,
		MaxRequest: -1, MaxResponse: -1, Methods: []string{"post", "OPTIONS"}, NotStored: []int{200},
		IgnoreFields: []string{"", "/a", "b"}, ReplayHeaders: []string{"set-cookie", "connection"},
		Reconcile: func(context.Context, postroom.Operation) (int, error) { return 0, nil },
	})
	if err == nil {
		t.Fatal("no error")
	}
	for _, want := range []string{
		"Schema", "IsoLevel", "Timeout", "Lease", "Retention", "Wait", "QueueTimeout", "MaxRequest", "MaxResponse",
		`"post"`, "OPTIONS", "NotStored", "empty name", "CanonicalJSON", "CanonicalMultipart", "Set-Cookie", "Connection", "Reconcile",
	} {
		if !strings.Contains(err.Error(), want) {
			t.Errorf("the error does not speak of %s:\n%v", want, err)
		}
	}
}

// The example does what it says.
func TestExample(t *testing.T) {
	pool := newPool(t)
	h, err := newPayments(pool)
	if err != nil {
		t.Fatal(err)
	}
	var replies []*httptest.ResponseRecorder
	for range 2 {
		r := httptest.NewRequestWithContext(t.Context(), "POST", "/payments?note=10+EUR", nil)
		r.SetBasicAuth("acme", "")
		r.Header.Set("Idempotency-Key", "k1")
		w := httptest.NewRecorder()
		h.ServeHTTP(w, r)
		replies = append(replies, w)
	}
	first, again := replies[0], replies[1]
	if first.Code != 201 || again.Code != 201 || again.Header().Get("Idempotent-Replayed") != "true" ||
		again.Header().Get("Location") != "/payments/1" {
		t.Errorf("first %v, repeat %v", first, again)
	}
	wantStrings(t, "payments", payments(t, pool), "10 EUR")
	wantStrings(t, "messages", query(t, pool, `SELECT key FROM postroom.outbox_messages`), "1")
}

// trips counts the round trips to the database.
type trips struct{ n atomic.Int32 }

func (c *trips) TraceQueryStart(ctx context.Context, _ *pgx.Conn, _ pgx.TraceQueryStartData) context.Context {
	c.n.Add(1)
	return ctx
}
func (c *trips) TraceQueryEnd(context.Context, *pgx.Conn, pgx.TraceQueryEndData) {}
func (c *trips) TraceBatchStart(ctx context.Context, _ *pgx.Conn, _ pgx.TraceBatchStartData) context.Context {
	c.n.Add(1)
	return ctx
}
func (c *trips) TraceBatchQuery(context.Context, *pgx.Conn, pgx.TraceBatchQueryData) {}
func (c *trips) TraceBatchEnd(context.Context, *pgx.Conn, pgx.TraceBatchEndData)     {}

// A first run costs three round trips besides those of its handler, a repeat one.
func TestRoundTrips(t *testing.T) {
	c := &trips{}
	pool := withPool(t, newPool(t), func(cfg *pgxpool.Config) {
		cfg.ConnConfig.Tracer = c
		cfg.MaxConns = 2
	})
	status := 201
	a := serve(t, pool, idempotency.Config{}, func(w http.ResponseWriter, r *http.Request) {
		note(r.Context(), "x")
		w.WriteHeader(status)
	})
	for _, test := range []struct {
		key    string
		status int
		want   int32
	}{{"k1", 201, 4}, {"k1", 201, 1}, {"k2", 404, 4}, {"k2", 404, 1}, {"k3", 500, 5}} {
		c.n.Store(0)
		status = test.status
		a.post(test.key, "x").want(t, test.status, "")
		if got := c.n.Load(); got != test.want {
			t.Errorf("%s, %d: %d round trips, want %d", test.key, test.status, got, test.want)
		}
	}
}
