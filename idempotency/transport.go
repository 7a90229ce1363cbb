package idempotency

import (
	"bytes"
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"mime"
	"net/http"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/cenkalti/backoff/v4"

	"github.com/postroom/postroom"
	"github.com/postroom/postroom/internal/waits"
)

// A Transport is an [http.RoundTripper] that gives each call to another service a key,
// and repeats a call whose outcome is open under the same key and with the same body.
//
//	client := &http.Client{Transport: &idempotency.Transport{Profile: idempotency.Vendors.Stripe}}
//	req = req.WithContext(idempotency.WithStep(ctx, "charge card"))
//
// The key is that of the request's header, else derived from the operation in the
// request's context and the step of [WithStep], so that a repeated run, also of another
// process, makes the same call; else it is drawn for the call and protects only the
// attempts within it. A handler that calls without a step, and is run again, calls twice.
//
// A call is repeated after a connection that failed or an answer that broke off, after 408, 425,
// 429, 500, 502, 503 and 504, and after a 409 that says that the first attempt is
// still running: with Retry-After, a problem of type idempotency-in-flight, or Stripe's
// code idempotency_key_in_use. Never
// after another answer, nor where the service says that a failure is stored
// (Idempotent-Replayed: true) or not worth repeating (Stripe-Should-Retry: false).
// What the last attempt brought is returned. Methods for which the service honours
// no keys are sent as they are.
//
// The transport below may send a request twice by itself where a connection that was idle
// turns out to be dead: it takes a request with a key for safe to repeat.
//
// Set the fields before the first use; then it is safe for concurrent use.
type Transport struct {
	// Base sends single attempts. Default [http.DefaultTransport].
	Base http.RoundTripper

	// Profile says what the service makes of keys.
	Profile Profile

	// Calls, where set, remembers calls whose key is given or derived: one whose first
	// attempt is older than nine tenths of the Profile's Retention is [ErrHorizon],
	// one whose body differs from that of the first attempt [ErrBodyChanged]; neither
	// is sent, nor is anything while the database is away.
	Calls *Calls

	// MaxAttempts bounds the attempts of one call. Default 4; 1 repeats nothing.
	MaxAttempts int

	// MaxElapsed bounds the time in which attempts begin. Default 30s, at most nine
	// tenths of the Profile's Retention.
	MaxElapsed time.Duration

	// AttemptTimeout bounds one attempt, its answer included as far as it is kept.
	// Default 10s.
	AttemptTimeout time.Duration

	// MaxRetryAfter is the longest wait that a Retry-After can ask for. Default 10s.
	MaxRetryAfter time.Duration

	// MaxBody is how much is kept of a request's body that has no GetBody, to send it
	// again, and of an answer's, to see that it is whole. A request with a longer one
	// is sent once; a longer answer is returned while it comes. Default 1 MiB.
	MaxBody int64
}

var _ http.RoundTripper = (*Transport)(nil)

func (t *Transport) withDefaults() (Transport, error) {
	c := *t
	var err error
	c.Profile, err = t.Profile.withDefaults()
	errs := []error{err}
	bad := func(format string, args ...any) {
		errs = append(errs, fmt.Errorf("idempotency: Transport."+format, args...))
	}
	if c.Base == nil {
		c.Base = http.DefaultTransport
	}
	if c.Calls != nil && c.Profile.Name == "" {
		bad("Calls is set, and Profile.Name is empty")
	}
	c.MaxAttempts = cmp.Or(c.MaxAttempts, 4)
	if c.MaxAttempts < 1 {
		bad("MaxAttempts is %d, want at least 1", c.MaxAttempts)
	}
	most := c.Profile.horizon()
	c.MaxElapsed = cmp.Or(c.MaxElapsed, min(30*time.Second, most))
	if c.MaxElapsed < 0 || c.MaxElapsed > most {
		bad("MaxElapsed is %v, want 0 to %v: the service forgets the key after %v", c.MaxElapsed, most, c.Profile.Retention)
	}
	c.AttemptTimeout = cmp.Or(c.AttemptTimeout, 10*time.Second)
	if c.AttemptTimeout < time.Millisecond {
		bad("AttemptTimeout is %v, want at least 1ms", c.AttemptTimeout)
	}
	c.MaxRetryAfter = cmp.Or(c.MaxRetryAfter, 10*time.Second)
	if c.MaxRetryAfter < 0 {
		bad("MaxRetryAfter is %v, want at least 0", c.MaxRetryAfter)
	}
	c.MaxBody = cmp.Or(c.MaxBody, 1<<20)
	if c.MaxBody < 0 {
		bad("MaxBody is %d, want at least 0", c.MaxBody)
	}
	return c, errors.Join(errs...)
}

// horizon is for how long an attempt may follow the first one.
func (p *Profile) horizon() time.Duration { return p.Retention / 10 * 9 }

type stepKey struct{}

// WithStep returns a context for one call of the operation in ctx: the step names it
// within the operation, and must be the same in each repeat and differ from those of the
// operation's other calls to the service. A call under it without an operation fails.
func WithStep(ctx context.Context, step string) context.Context {
	return context.WithValue(ctx, stepKey{}, step)
}

// Sent is what became of a call.
type Sent struct {
	Key      string // under which it was sent
	Attempts int    // of the transport's
	Replayed bool   // the service says that it is the answer to an earlier attempt
}

type sentKey struct{}

// SentBy returns what became of the call with the given answer, and whether a
// [Transport] sent it under a key.
func SentBy(res *http.Response) (Sent, bool) {
	if res == nil || res.Request == nil {
		return Sent{}, false
	}
	s, ok := res.Request.Context().Value(sentKey{}).(Sent)
	return s, ok
}

// RoundTrip implements [http.RoundTripper].
func (t *Transport) RoundTrip(req *http.Request) (*http.Response, error) {
	c, err := t.withDefaults()
	if err != nil {
		closeBody(req)
		return nil, err
	}
	if !c.Profile.honours(req.Method) {
		return c.Base.RoundTrip(c.withoutKey(req))
	}
	call, err := c.call(req)
	if err != nil {
		closeBody(req)
		return nil, err
	}
	return call.run()
}

func closeBody(req *http.Request) {
	if req.Body != nil {
		_ = req.Body.Close()
	}
}

// withoutKey returns a request without the key that http.Client has copied to where
// another service redirects to, or to the GET that follows a POST.
func (t *Transport) withoutKey(req *http.Request) *http.Request {
	if req.Response == nil || len(req.Header.Values(t.Profile.Header)) == 0 {
		return req
	}
	req = req.Clone(req.Context())
	req.Header.Del(t.Profile.Header)
	return req
}

// An outgoing is one call: a request, its key, and how to send it again.
type outgoing struct {
	Transport
	req    *http.Request
	key    string
	body   func() (io.ReadCloser, error) // nil where there is none
	once   bool                          // it cannot be sent again
	begun  time.Time
	before time.Duration // the age of the first attempt when this call began
}

func (t *Transport) call(req *http.Request) (*outgoing, error) {
	c := &outgoing{Transport: *t, req: req, begun: time.Now()}
	lasting, err := c.chooseKey()
	if err != nil {
		return nil, err
	}
	hash, err := c.freeze()
	if err != nil {
		return nil, err
	}
	if t.Calls == nil || !lasting {
		return c, nil
	}
	if c.before, err = t.Calls.first(req.Context(), t.Profile.Name, c.key, hash); err != nil {
		return nil, err
	}
	if c.before > t.Profile.horizon() {
		return nil, fmt.Errorf("%w: it was %v ago", ErrHorizon, c.before.Round(time.Second))
	}
	return c, nil
}

// chooseKey finds the call's key, and whether other calls may have it too.
func (c *outgoing) chooseKey() (lasting bool, err error) {
	p := &c.Profile
	values := c.req.Header.Values(p.Header)
	step, hasStep := c.req.Context().Value(stepKey{}).(string)
	if r := c.req.Response; r != nil && r.Request != nil {
		if !sameOrigin(r.Request.URL, c.req.URL) {
			values, hasStep = nil, false // they are for another service
		} else if sent, ok := SentBy(r); ok {
			values = []string{sent.Key}
		}
	}
	switch {
	case len(values) > 0:
		if c.key, err = parseKey(values); err == nil && len(c.key) > p.MaxKey {
			err = badKey("it has %d characters, want at most %d", len(c.key), p.MaxKey)
		}
		if err != nil {
			return false, fmt.Errorf("idempotency: the request's %s: %w", p.Header, err)
		}
		return true, nil
	case hasStep:
		if c.key, err = p.Key(c.req.Context(), step); err != nil {
			return false, fmt.Errorf("idempotency: the key of step %q: %w", step, err)
		}
		return true, nil
	}
	c.key = postroom.NewID()
	if p.MaxKey < uuidLength {
		c.key = strings.ReplaceAll(c.key, "-", "")
	}
	return false, nil
}

func sameOrigin(a, b *url.URL) bool { return a.Scheme == b.Scheme && a.Host == b.Host }

// freeze sees to it that each attempt has the same body, and returns the body's hash.
// A body that is too long to be kept, and has no GetBody, is sent once and has no hash.
func (c *outgoing) freeze() (hash []byte, err error) {
	sum := sha256.New()
	switch {
	case c.req.Body == nil || c.req.Body == http.NoBody:
		return sum.Sum(nil), nil
	case c.req.GetBody != nil:
		c.body = c.req.GetBody
		if c.Calls == nil {
			break
		}
		b, err := c.body()
		if err != nil {
			return nil, fmt.Errorf("idempotency: the request's body: %w", err)
		}
		defer b.Close()
		if _, err := io.Copy(sum, b); err != nil {
			return nil, fmt.Errorf("idempotency: the request's body: %w", err)
		}
	default:
		kept, err := io.ReadAll(io.LimitReader(c.req.Body, c.MaxBody+1))
		if err != nil {
			return nil, fmt.Errorf("idempotency: the request's body: %w", err)
		}
		if int64(len(kept)) > c.MaxBody {
			c.once = true
			whole := readCloser{io.MultiReader(bytes.NewReader(kept), c.req.Body), c.req.Body}
			c.body = func() (io.ReadCloser, error) { return whole, nil }
			return nil, nil
		}
		c.body = func() (io.ReadCloser, error) { return io.NopCloser(bytes.NewReader(kept)), nil }
		sum.Write(kept)
	}
	return sum.Sum(nil), nil
}

type readCloser struct {
	io.Reader
	io.Closer
}

// run sends the call until there is an answer to be returned.
func (c *outgoing) run() (*http.Response, error) {
	if !c.once {
		defer closeBody(c.req) // what is sent are copies
	}
	ctx := c.req.Context()
	pause := waits.Growing(500*time.Millisecond, 10*time.Second)
	for attempt := 1; ; attempt++ {
		res, err := c.send(ctx, attempt)
		wait, again := c.again(res, err, pause)
		if !again || c.once || attempt == c.MaxAttempts || !c.inTime(ctx, wait) {
			return res, err
		}
		drain(res)
		if err := waits.For(ctx, wait); err != nil {
			return nil, err
		}
	}
}

// inTime reports whether another attempt may begin after a wait.
func (c *outgoing) inTime(ctx context.Context, wait time.Duration) bool {
	if ctx.Err() != nil {
		return false
	}
	if end, ok := ctx.Deadline(); ok && time.Until(end) <= wait {
		return false
	}
	since := time.Since(c.begun) + wait
	return since <= c.MaxElapsed && c.before+since <= c.Profile.horizon()
}

// send makes one attempt, and reads its answer as far as it is kept.
func (c *outgoing) send(ctx context.Context, attempt int) (*http.Response, error) {
	sent := Sent{Key: c.key, Attempts: attempt}
	req := c.req.Clone(ctx)
	key := c.key
	if c.Profile.Quoted {
		key = `"` + quoting.Replace(key) + `"`
	}
	req.Header.Set(c.Profile.Header, key)
	if c.body != nil {
		var err error
		if req.Body, err = c.body(); err != nil {
			return nil, fmt.Errorf("idempotency: the request's body: %w", err)
		}
		if c.once {
			req.GetBody = nil
		} else {
			req.GetBody = c.body // the transport below may need it
		}
	}
	actx, cancel := context.WithCancel(ctx)
	timer := time.AfterFunc(c.AttemptTimeout, cancel)
	res, err := c.Base.RoundTrip(req.WithContext(actx))
	if err == nil {
		sent.Replayed = isReplay(res)
		res.Request = req.WithContext(context.WithValue(ctx, sentKey{}, sent))
		err = c.keep(res)
	}
	late := !timer.Stop()
	switch {
	case err == nil && !late:
		body := res.Body
		res.Body = readCloser{body, closing(func() error { defer cancel(); return body.Close() })}
		return res, nil
	case late && ctx.Err() == nil:
		err = fmt.Errorf("idempotency: no whole answer within %v (Transport.AttemptTimeout)", c.AttemptTimeout)
	}
	cancel()
	if res != nil {
		_ = res.Body.Close()
	}
	return nil, err
}

type closing func() error

func (c closing) Close() error { return c() }

// keep reads an answer, as far as it is kept.
func (c *outgoing) keep(res *http.Response) error {
	kept, err := io.ReadAll(io.LimitReader(res.Body, c.MaxBody+1))
	if err != nil {
		return fmt.Errorf("idempotency: the answer broke off: %w", err)
	}
	res.Body = readCloser{io.MultiReader(bytes.NewReader(kept), res.Body), res.Body}
	return nil
}

// quoting escapes what a string in quotes cannot hold as it is.
var quoting = strings.NewReplacer(`\`, `\\`, `"`, `\"`)

func isReplay(res *http.Response) bool {
	return strings.EqualFold(res.Header.Get("Idempotent-Replayed"), "true")
}

// again reports whether what an attempt brought leaves the outcome open, and how long
// to wait before the next one.
func (c *outgoing) again(res *http.Response, err error, pause *backoff.ExponentialBackOff) (wait time.Duration, again bool) {
	wait = pause.NextBackOff()
	if err != nil {
		return wait, !errors.Is(err, context.Canceled)
	}
	after, asked := retryAfter(res.Header.Get("Retry-After"), time.Now())
	if asked {
		wait = max(min(wait, c.MaxRetryAfter), min(after, c.MaxRetryAfter))
	}
	switch should := res.Header.Get("Stripe-Should-Retry"); {
	case isReplay(res), should == "false":
		return 0, false
	case should == "true":
		return wait, true
	case res.StatusCode == http.StatusConflict:
		return wait, asked || inFlight(res)
	}
	return wait, slices.Contains([]int{
		http.StatusRequestTimeout, http.StatusTooEarly, http.StatusTooManyRequests, http.StatusInternalServerError,
		http.StatusBadGateway, http.StatusServiceUnavailable, http.StatusGatewayTimeout,
	}, res.StatusCode)
}

// retryAfter reads a number of seconds, or a date.
func retryAfter(value string, now time.Time) (time.Duration, bool) {
	if n, err := strconv.ParseUint(value, 10, 31); err == nil {
		return time.Duration(n) * time.Second, true
	}
	if at, err := http.ParseTime(value); err == nil {
		return max(at.Sub(now), 0), true
	}
	return 0, false
}

// mostProblem is how much of an answer is looked at for its problem type.
const mostProblem = 4 << 10

// inFlight reports whether a conflict is that with an attempt that is still running:
// by its problem type, or by the code that Stripe gives.
func inFlight(res *http.Response) bool {
	media, _, err := mime.ParseMediaType(res.Header.Get("Content-Type"))
	if err != nil || media != "application/problem+json" && media != "application/json" {
		return false
	}
	begin, err := io.ReadAll(io.LimitReader(res.Body, mostProblem))
	if err != nil {
		return false
	}
	res.Body = readCloser{io.MultiReader(bytes.NewReader(begin), res.Body), res.Body}
	var problem struct{ Type string }
	var failure struct{ Error struct{ Code string } }
	return json.Unmarshal(begin, &problem) == nil && strings.HasSuffix(problem.Type, "idempotency-in-flight") ||
		json.Unmarshal(begin, &failure) == nil && failure.Error.Code == "idempotency_key_in_use"
}

// drain reads what is left of an answer, so that its connection can be used again,
// unless that is much.
func drain(res *http.Response) {
	if res != nil {
		_, _ = io.CopyN(io.Discard, res.Body, mostProblem)
		_ = res.Body.Close()
	}
}
