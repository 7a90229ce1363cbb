package idempotency_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/postroom/postroom"
	"github.com/postroom/postroom/idempotency"
)

// A service answers attempts by a list, the last one for ever, and keeps what came.
type service struct {
	t       *testing.T
	url     string
	base    *http.Transport
	answers []http.HandlerFunc

	mu       sync.Mutex
	attempts []attempt
}

type attempt struct{ key, body string }

func newService(t *testing.T, answers ...http.HandlerFunc) *service {
	s := &service{t: t, answers: answers, base: &http.Transport{}}
	server := httptest.NewServer(s)
	s.url = server.URL
	t.Cleanup(server.Close)
	t.Cleanup(s.base.CloseIdleConnections)
	return s
}

func (s *service) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	body, err := io.ReadAll(r.Body)
	if err != nil {
		s.t.Errorf("a body broke off: %v", err)
	}
	s.mu.Lock()
	s.attempts = append(s.attempts, attempt{r.Header.Get("Idempotency-Key"), string(body)})
	n := len(s.attempts)
	s.mu.Unlock()
	s.answers[min(n, len(s.answers))-1](w, r)
}

// came returns what came so far, and checks that all of it is one call.
func (s *service) came() []attempt {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, a := range s.attempts {
		if a.key == "" || a != s.attempts[0] {
			s.t.Errorf("attempts differ: %v", s.attempts)
		}
	}
	return slices.Clone(s.attempts)
}

func (s *service) client(change ...func(*idempotency.Transport)) *http.Client {
	tr := &idempotency.Transport{Base: s.base, Profile: idempotency.Vendors.Stripe}
	for _, f := range change {
		f(tr)
	}
	return &http.Client{Transport: tr}
}

func post(ctx context.Context, t *testing.T, c *http.Client, url string, body io.Reader) (*http.Response, error) {
	t.Helper()
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, url, body)
	if err != nil {
		t.Fatal(err)
	}
	res, err := c.Do(req)
	if err == nil {
		t.Cleanup(func() { _ = res.Body.Close() })
	}
	return res, err
}

func status(code int, headers ...string) http.HandlerFunc {
	return func(w http.ResponseWriter, _ *http.Request) {
		for i := 0; i < len(headers); i += 2 {
			w.Header().Set(headers[i], headers[i+1])
		}
		w.WriteHeader(code)
		_, _ = io.WriteString(w, http.StatusText(code))
	}
}

func problem(kind string) http.HandlerFunc {
	return func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "application/problem+json; charset=utf-8")
		w.WriteHeader(http.StatusConflict)
		fmt.Fprintf(w, `{"type":"https://example.com/problems/%s","title":"x"}`, kind)
	}
}

// inUse is how Stripe says that the first attempt is still running.
func inUse(w http.ResponseWriter, _ *http.Request) {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(http.StatusConflict)
	_, _ = io.WriteString(w, `{"error":{"code":"idempotency_key_in_use","type":"idempotency_error"}}`)
}

// hangUp ends the connection without an answer.
func hangUp(http.ResponseWriter, *http.Request) { panic(http.ErrAbortHandler) }

// half breaks an answer off.
func half(w http.ResponseWriter, _ *http.Request) {
	w.Header().Set("Content-Length", "100")
	_, _ = io.WriteString(w, "half of")
	w.(http.Flusher).Flush()
	panic(http.ErrAbortHandler)
}

var done = status(http.StatusCreated)

// What is repeated, and what is not.
func TestTransportRepeats(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		name    string
		answers []http.HandlerFunc
		want    int // status
		count   int // of attempts
	}{
		{"success", []http.HandlerFunc{done}, 201, 1},
		{"the connection is cut", []http.HandlerFunc{hangUp, done}, 201, 2},
		{"the answer breaks off", []http.HandlerFunc{half, done}, 201, 2},
		{"503", []http.HandlerFunc{status(503), done}, 201, 2},
		{"408 425 429", []http.HandlerFunc{status(408), status(425), status(429, "Retry-After", "0"), done}, 201, 4},
		{"500 502 504", []http.HandlerFunc{status(500), status(502), status(504), done}, 201, 4},
		{"always 500", []http.HandlerFunc{status(500)}, 500, 4},
		{"400", []http.HandlerFunc{status(400), done}, 400, 1},
		{"410", []http.HandlerFunc{status(410), done}, 410, 1},
		{"422", []http.HandlerFunc{status(422, "Retry-After", "0"), done}, 422, 1},
		{"a conflict of the domain", []http.HandlerFunc{status(409), done}, 409, 1},
		{"another problem", []http.HandlerFunc{problem("out-of-stock"), done}, 409, 1},
		{"in flight by its problem", []http.HandlerFunc{problem("idempotency-in-flight"), done}, 201, 2},
		{"in flight by its code", []http.HandlerFunc{inUse, done}, 201, 2},
		{"in flight by Retry-After", []http.HandlerFunc{status(409, "Retry-After", "0"), done}, 201, 2},
		{"a stored failure", []http.HandlerFunc{status(500, "Idempotent-Replayed", "true"), done}, 500, 1},
		{"the service says no", []http.HandlerFunc{status(503, "Stripe-Should-Retry", "false"), done}, 503, 1},
		{"the service says yes", []http.HandlerFunc{status(409, "Stripe-Should-Retry", "true"), done}, 201, 2},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			s := newService(t, c.answers...)
			res, err := post(t.Context(), t, s.client(), s.url, strings.NewReader("pay"))
			if err != nil {
				t.Fatal(err)
			}
			came := s.came()
			if res.StatusCode != c.want || len(came) != c.count {
				t.Errorf("status %d after %d attempts, want %d after %d", res.StatusCode, len(came), c.want, c.count)
			}
			sent, ok := idempotency.SentBy(res)
			if !ok || sent.Attempts != c.count || sent.Key != came[0].key || sent.Replayed != strings.Contains(c.name, "stored") {
				t.Errorf("SentBy = %+v, %v", sent, ok)
			}
			if b, err := io.ReadAll(res.Body); err != nil || len(b) == 0 {
				t.Errorf("body %q, %v", b, err)
			}
		})
	}
}

// A body without GetBody is kept up to a limit; a longer one is sent once, whole.
func TestTransportBodies(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		body  io.Reader
		count int
	}{
		"none":         {nil, 2},
		"with GetBody": {bytes.NewReader(make([]byte, 300)), 2},
		"short stream": {io.MultiReader(strings.NewReader(strings.Repeat("a", 100))), 2},
		"long stream":  {io.MultiReader(strings.NewReader(strings.Repeat("a", 101))), 1},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := newService(t, status(503), done)
			_, err := post(t.Context(), t, s.client(func(t *idempotency.Transport) { t.MaxBody = 100 }), s.url, c.body)
			if err != nil {
				t.Fatal(err)
			}
			came := s.came()
			if len(came) != c.count || name == "long stream" && len(came[0].body) != 101 {
				t.Errorf("%d attempts, want %d; a body of %d bytes", len(came), c.count, len(came[0].body))
			}
		})
	}
	t.Run("an answer longer than what is kept", func(t *testing.T) {
		t.Parallel()
		s := newService(t, func(w http.ResponseWriter, _ *http.Request) { _, _ = w.Write(make([]byte, 1<<20)) })
		res, err := post(t.Context(), t, s.client(func(t *idempotency.Transport) { t.MaxBody = 1000 }), s.url, nil)
		if err != nil {
			t.Fatal(err)
		}
		if b, err := io.ReadAll(res.Body); err != nil || len(b) != 1<<20 {
			t.Errorf("%d bytes, %v", len(b), err)
		}
	})
}

// Where the key comes from.
func TestTransportKeys(t *testing.T) {
	t.Parallel()
	key := func(t *testing.T, ctx context.Context, change func(*idempotency.Transport), header ...string) (string, error) {
		t.Helper()
		s := newService(t, done)
		req, err := http.NewRequestWithContext(ctx, http.MethodPost, s.url, nil)
		if err != nil {
			t.Fatal(err)
		}
		for _, h := range header {
			req.Header.Add("Idempotency-Key", h)
		}
		before := req.Header.Clone()
		res, err := s.client(change).Do(req)
		if fmt.Sprint(req.Header) != fmt.Sprint(before) {
			t.Error("the caller's request was changed")
		}
		if err != nil {
			return "", err
		}
		_ = res.Body.Close()
		return s.came()[0].key, nil
	}
	plain := func(*idempotency.Transport) {}
	operation := func() context.Context {
		return postroom.WithOperation(t.Context(), postroom.Operation{Kind: "message", Scope: "billing", Key: "m1"})
	}
	if k, err := key(t, operation(), plain, "given"); err != nil || k != "given" {
		t.Errorf("a key that is given: %q, %v", k, err)
	}
	derived, err := idempotency.Vendors.Stripe.Key(operation(), "charge")
	if err != nil {
		t.Fatal(err)
	}
	for range 2 {
		if k, err := key(t, idempotency.WithStep(operation(), "charge"), plain); err != nil || k != derived {
			t.Errorf("a key that is derived: %q, %v, want %q", k, err, derived)
		}
	}
	one, err1 := key(t, operation(), plain)
	two, err2 := key(t, operation(), plain)
	if err1 != nil || err2 != nil || one == two {
		t.Errorf("keys that are drawn: %q, %q, %v, %v", one, two, err1, err2)
	}
	quoted := func(t *idempotency.Transport) { t.Profile.Quoted = true }
	if k, err := key(t, t.Context(), quoted, `"a\"b"`); err != nil || k != `"a\"b"` {
		t.Errorf("a key in quotes: %q, %v", k, err)
	}
	for _, wrong := range [][]string{{"a", "b"}, {""}, {"ü"}, {strings.Repeat("k", 256)}} {
		if _, err := key(t, t.Context(), plain, wrong...); err == nil {
			t.Errorf("%q is sent", wrong)
		} else if wrong[0] != "" && strings.Contains(err.Error(), `"`+wrong[0]+`"`) {
			t.Errorf("the key stands in %v", err)
		}
	}
	if _, err := key(t, idempotency.WithStep(t.Context(), "charge"), plain); !errors.Is(err, postroom.ErrNoOperation) {
		t.Errorf("a step without an operation: %v", err)
	}
}

// D: derived keys fit what services take, and are apart for each of them, for each
// operation and step.
func TestDerivedKeys(t *testing.T) {
	t.Parallel()
	v := idempotency.Vendors
	seen := make(map[string]string)
	for _, o := range []postroom.Operation{
		{Kind: "http", Scope: "tenant a/POST /orders", Key: strings.Repeat("ü", 300)},
		{Kind: "http", Scope: "tenant b/POST /orders", Key: strings.Repeat("ü", 300)},
		idempotency.RunScoped("run-1", "charge"), idempotency.RunScoped("run-2", "charge"), idempotency.BusinessScoped("order-1", "charge"),
	} {
		for _, p := range []idempotency.Profile{v.Stripe, v.PayPal, v.Adyen, v.AmazonPay, v.Worldline, v.CheckoutCom} {
			for _, step := range []string{"", "charge", "refund"} {
				for range 2 {
					k, err := p.Key(postroom.WithOperation(t.Context(), o), step)
					if err != nil {
						t.Fatal(err)
					}
					most := map[string]int{"amazon-pay": 32, "worldline": 40}[p.Name]
					if most == 0 {
						most = 36
					}
					if len(k) > most || strings.Trim(k, "0123456789abcdef-") != "" {
						t.Errorf("%s: key %q", p.Name, k)
					}
					what := fmt.Sprint(o, p.Name, step)
					if was, ok := seen[k]; ok && was != what {
						t.Errorf("%s and %s have the key %q", was, what, k)
					}
					seen[k] = what
				}
			}
		}
	}
	if len(seen) != 5*6*3 {
		t.Errorf("%d keys, want %d", len(seen), 5*6*3)
	}
	if _, err := (idempotency.Profile{}).Key(postroom.WithOperation(t.Context(), postroom.Operation{Kind: "x"}), "s"); err == nil {
		t.Error("a profile without a name derives keys")
	}
	if _, err := (idempotency.Profile{Name: "x", MaxKey: 31}).Key(t.Context(), "s"); err == nil || !strings.Contains(err.Error(), "MaxKey is 31") {
		t.Errorf("MaxKey of 31: %v", err)
	}
}

// Methods that honour no keys are sent as they are, and redirects keep or drop the key.
func TestTransportPassesBy(t *testing.T) {
	t.Parallel()
	ctx := idempotency.WithStep(postroom.WithOperation(t.Context(), postroom.Operation{Kind: "message", Scope: "billing", Key: "m1"}), "charge")
	derived, err := idempotency.Vendors.Stripe.Key(ctx, "charge")
	if err != nil {
		t.Fatal(err)
	}
	other := newService(t, func(w http.ResponseWriter, r *http.Request) {
		if k := r.Header.Get("Idempotency-Key"); k == "given" || k == derived {
			t.Error("the key went to another origin")
		}
	})
	var first string
	mux := http.NewServeMux()
	mux.HandleFunc("/other", func(w http.ResponseWriter, r *http.Request) {
		http.Redirect(w, r, other.url, http.StatusTemporaryRedirect)
	})
	mux.HandleFunc("/same", func(w http.ResponseWriter, r *http.Request) {
		first = r.Header.Get("Idempotency-Key")
		http.Redirect(w, r, "/there", http.StatusPermanentRedirect)
	})
	mux.HandleFunc("/there", func(_ http.ResponseWriter, r *http.Request) {
		if k := r.Header.Get("Idempotency-Key"); k == "" || k != first {
			t.Errorf("the key %q became %q", first, k)
		}
	})
	mux.HandleFunc("/see", func(w http.ResponseWriter, r *http.Request) { http.Redirect(w, r, "/get", http.StatusSeeOther) })
	gets := 0
	mux.HandleFunc("/get", func(w http.ResponseWriter, r *http.Request) {
		gets++
		if r.Header.Get("Idempotency-Key") != "" {
			t.Error("a GET after a redirect has a key")
		}
		w.WriteHeader(http.StatusServiceUnavailable)
	})
	server := httptest.NewServer(mux)
	defer server.Close()
	c := other.client()
	for _, path := range []string{"/other", "/other?by=step", "/same", "/see"} {
		ctx := ctx
		if path != "/other?by=step" {
			ctx = t.Context()
		}
		req, err := http.NewRequestWithContext(ctx, http.MethodPost, server.URL+path, strings.NewReader("x"))
		if err != nil {
			t.Fatal(err)
		}
		if path != "/same" && path != "/other?by=step" {
			req.Header.Set("Idempotency-Key", "given")
		}
		res, err := c.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		_ = res.Body.Close()
	}
	if gets != 1 {
		t.Errorf("a GET is sent %d times", gets)
	}
}

// Nothing is repeated past the context, the budget, or at a shut door.
func TestTransportEnds(t *testing.T) {
	t.Parallel()
	t.Run("the context's deadline", func(t *testing.T) {
		t.Parallel()
		s := newService(t, status(503, "Retry-After", "3600"))
		ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
		defer cancel()
		begun := time.Now()
		res, err := post(ctx, t, s.client(), s.url, nil)
		if err != nil || res.StatusCode != 503 || len(s.came()) != 1 || time.Since(begun) > 4*time.Second {
			t.Errorf("%v, %v after %v", res, err, time.Since(begun))
		}
	})
	t.Run("cancelled while it waits", func(t *testing.T) {
		t.Parallel()
		ctx, cancel := context.WithCancel(t.Context())
		s := newService(t, func(w http.ResponseWriter, r *http.Request) {
			time.AfterFunc(50*time.Millisecond, cancel)
			status(503, "Retry-After", "10")(w, r)
		})
		if _, err := post(ctx, t, s.client(), s.url, nil); !errors.Is(err, context.Canceled) || len(s.came()) != 1 {
			t.Errorf("error %v", err)
		}
	})
	t.Run("the budget", func(t *testing.T) {
		t.Parallel()
		s := newService(t, status(503, "Retry-After", time.Now().Add(time.Hour).UTC().Format(http.TimeFormat)))
		res, err := post(t.Context(), t, s.client(func(t *idempotency.Transport) { t.MaxElapsed = time.Second }), s.url, nil)
		if err != nil || res.StatusCode != 503 || len(s.came()) != 1 {
			t.Errorf("%v, %v", res, err)
		}
	})
	t.Run("a service that is silent", func(t *testing.T) {
		t.Parallel()
		hang := make(chan struct{})
		defer close(hang)
		s := newService(t, func(http.ResponseWriter, *http.Request) { <-hang }, done)
		res, err := post(t.Context(), t, s.client(func(t *idempotency.Transport) { t.AttemptTimeout = 200 * time.Millisecond }), s.url, nil)
		if err != nil || res.StatusCode != 201 || len(s.came()) != 2 {
			t.Errorf("%v, %v", res, err)
		}
	})
	t.Run("nobody listens", func(t *testing.T) {
		t.Parallel()
		s := newService(t, done)
		s.base.DisableKeepAlives = true
		res, err := post(t.Context(), t, s.client(func(t *idempotency.Transport) { t.MaxAttempts = 2 }), "http://127.0.0.1:1", nil)
		if err == nil {
			t.Errorf("answer %v", res)
		}
	})
	t.Run("wrong settings", func(t *testing.T) {
		t.Parallel()
		s := newService(t, done)
		_, err := post(t.Context(), t, s.client(func(t *idempotency.Transport) {
			t.Profile = idempotency.Profile{MaxKey: 1, Retention: time.Minute}
			t.Calls = &idempotency.Calls{}
			t.MaxAttempts, t.MaxElapsed, t.MaxRetryAfter, t.MaxBody, t.AttemptTimeout = -1, time.Hour, -1, -1, -1
		}), s.url, strings.NewReader("x"))
		for _, want := range []string{"MaxKey is 1", "MaxAttempts is -1", "MaxElapsed is 1h", "MaxRetryAfter", "MaxBody", "AttemptTimeout", "Profile.Name is empty"} {
			if err == nil || !strings.Contains(err.Error(), want) {
				t.Errorf("%q is not in %v", want, err)
			}
		}
	})
}

// Calls that are remembered are not sent with another body, nor when the service may
// have forgotten them, in whichever process.
func TestTransportCalls(t *testing.T) {
	t.Parallel()
	pool := newPool(t)
	s := newService(t, done)
	remembering := func(tr *idempotency.Transport) { tr.Calls = &idempotency.Calls{Pool: pool} }
	send := func(body io.Reader) error {
		ctx := postroom.WithOperation(t.Context(), postroom.Operation{Kind: "message", Scope: "billing", Key: "m1"})
		_, err := post(idempotency.WithStep(ctx, "charge"), t, s.client(remembering), s.url, body)
		return err
	}
	var wg sync.WaitGroup
	for range 10 { // at once
		wg.Go(func() {
			if err := send(strings.NewReader("10 EUR")); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	if err := send(io.MultiReader(strings.NewReader("10 EUR"))); err != nil {
		t.Error(err)
	}
	for _, body := range []io.Reader{strings.NewReader("11 EUR"), io.MultiReader(strings.NewReader("11 EUR")), nil} {
		if err := send(body); !errors.Is(err, idempotency.ErrBodyChanged) {
			t.Errorf("another body: %v", err)
		}
	}
	age := func(interval string) {
		if _, err := pool.Exec(t.Context(), `UPDATE postroom.idempotency_calls SET first_sent = clock_timestamp() - $1::text::interval`, interval); err != nil {
			t.Fatal(err)
		}
	}
	age("21 hours")
	if err := send(strings.NewReader("10 EUR")); err != nil {
		t.Errorf("after 21 of 24 hours: %v", err)
	}
	age("22 hours")
	if err := send(strings.NewReader("10 EUR")); !errors.Is(err, idempotency.ErrHorizon) {
		t.Errorf("after 22 of 24 hours: %v", err)
	}
	if n := len(s.came()); n != 12 {
		t.Errorf("%d attempts came, want 12", n)
	}
	// What is drawn for one call is not remembered.
	if _, err := post(t.Context(), t, s.client(remembering), s.url, nil); err != nil {
		t.Error(err)
	}
	var rows int
	if err := pool.QueryRow(t.Context(), `SELECT count(*) FROM postroom.idempotency_calls`).Scan(&rows); err != nil || rows != 1 {
		t.Errorf("%d calls are remembered, %v", rows, err)
	}
	age("91 days")
	if _, _, n, err := (idempotency.Cleaner{Pool: pool}).Clean(t.Context()); n != 1 || err != nil {
		t.Errorf("%d calls are forgotten, %v, want 1", n, err)
	}
	if _, _, _, err := (idempotency.Cleaner{Pool: pool, CallRetention: time.Minute}).Clean(t.Context()); err == nil {
		t.Error("a CallRetention of a minute is taken")
	}
	pool.Close()
	if err := send(strings.NewReader("10 EUR")); err == nil {
		t.Error("a call is sent while nothing can be remembered")
	}
}

// Many calls at once are apart.
func TestTransportConcurrently(t *testing.T) {
	t.Parallel()
	var mu sync.Mutex
	seen := make(map[string][]string) // by key: bodies
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		body, _ := io.ReadAll(r.Body)
		mu.Lock()
		k := r.Header.Get("Idempotency-Key")
		seen[k] = append(seen[k], string(body))
		n := len(seen[k])
		mu.Unlock()
		if n == 1 {
			w.WriteHeader(http.StatusServiceUnavailable)
		}
	}))
	defer server.Close()
	base := &http.Transport{}
	defer base.CloseIdleConnections()
	c := &http.Client{Transport: &idempotency.Transport{Base: base}}
	var wg sync.WaitGroup
	for i := range 50 {
		wg.Go(func() {
			if res, err := post(t.Context(), t, c, server.URL, strings.NewReader(fmt.Sprint(i))); err != nil || res.StatusCode != http.StatusOK {
				t.Errorf("call %d: %v, %v", i, res, err)
			}
		})
	}
	wg.Wait()
	if len(seen) != 50 {
		t.Errorf("%d keys came, want 50", len(seen))
	}
	for k, bodies := range seen {
		if len(bodies) != 2 || bodies[0] != bodies[1] {
			t.Errorf("key %q: bodies %q", k, bodies)
		}
	}
}

// Derived keys stay what they are: another derivation would repeat calls that were made
// before it. These were computed elsewhere.
func TestDerivedKeysAreFrozen(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		profile   idempotency.Profile
		operation postroom.Operation
		want      string
	}{
		{
			idempotency.Vendors.Stripe,
			postroom.Operation{Kind: "message", Scope: "billing", Key: "0190a1b2-c3d4-7e5f-8a9b-0c1d2e3f4a5b"},
			"0190a1b2-c3d4-877a-91c6-87836a71beb3",
		},
		{
			idempotency.Vendors.AmazonPay,
			postroom.Operation{Kind: "http", Scope: "acme POST /orders", Key: "8e03978e"},
			"47da26a430d78964905a6775c7482bec",
		},
	} {
		if k, err := c.profile.Key(postroom.WithOperation(t.Context(), c.operation), "charge"); err != nil || k != c.want {
			t.Errorf("%s: key %q, %v, want %q", c.profile.Name, k, err, c.want)
		}
	}
}
