package webhook_test

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"maps"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/iotest"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/postroom/postroom"
	"github.com/postroom/postroom/internal/pgtest"
	"github.com/postroom/postroom/migrations"
	"github.com/postroom/postroom/webhook"
)

// childURL names the database to a child process that dies after the commit.
const childURL = "POSTROOM_WEBHOOK_TEST_DATABASE"

func TestMain(m *testing.M) {
	if url := os.Getenv(childURL); url != "" {
		child(url)
	}
	os.Exit(m.Run())
}

// An endpoint is a handler under test, and what it has left in the database.
type endpoint struct {
	t      *testing.T
	pool   *pgxpool.Pool
	scheme *webhook.Scheme
	h      *webhook.Handler
}

func open(t *testing.T, pool *pgxpool.Pool, s *webhook.Scheme, cfg webhook.Config) *endpoint {
	t.Helper()
	if cfg.Logger == nil {
		cfg.Logger = slog.New(slog.DiscardHandler)
	}
	if cfg.Timeout == 0 {
		cfg.Timeout = time.Minute // the machine may be busy
	}
	h, err := webhook.New(pool, "hook", s, "events", cfg)
	if err != nil {
		t.Fatal(err)
	}
	return &endpoint{t, pool, s, h}
}

func stripe() *webhook.Scheme { return webhook.Stripe(one("webhook_secret")) }

// request returns a delivery that the scheme has signed now.
func (e *endpoint) request(id, body string) *http.Request {
	e.t.Helper()
	r := httptest.NewRequest(http.MethodPost, "/hook", strings.NewReader(body))
	r.Header.Set("Content-Type", "application/json")
	if err := e.scheme.Sign(r.Header, id, []byte(body), time.Now()); err != nil {
		e.t.Fatal(err)
	}
	return r
}

// serve answers a request.
func (e *endpoint) serve(r *http.Request) *http.Response {
	w := httptest.NewRecorder()
	e.h.ServeHTTP(w, r)
	return w.Result()
}

// want sends a delivery and checks its answer.
func (e *endpoint) want(status int, repeat bool, r *http.Request) {
	e.t.Helper()
	res := e.serve(r)
	if res.StatusCode != status || (res.Header.Get("Idempotent-Replayed") == "true") != repeat {
		e.t.Fatalf("answer %d, %v, want %d, repeated %v", res.StatusCode, res.Header, status, repeat)
	}
}

type stored struct {
	ID, Topic string
	Key       []byte
	Payload   []byte
	Headers   []string
	Operation string
}

func (e *endpoint) messages() []stored {
	e.t.Helper()
	rows, err := e.pool.Query(e.t.Context(), `
		SELECT message_id, topic, key, payload, header_names, header_values, operation FROM postroom.outbox_messages ORDER BY id`)
	if err != nil {
		e.t.Fatal(err)
	}
	all, err := pgx.CollectRows(rows, func(row pgx.CollectableRow) (s stored, err error) {
		var names, values [][]byte
		err = row.Scan(&s.ID, &s.Topic, &s.Key, &s.Payload, &names, &values, &s.Operation)
		for i := range names {
			s.Headers = append(s.Headers, string(names[i])+": "+string(values[i]))
		}
		return s, err
	})
	if err != nil {
		e.t.Fatal(err)
	}
	return all
}

func (e *endpoint) count(table string) (n int) {
	e.t.Helper()
	if err := e.pool.QueryRow(e.t.Context(), `SELECT count(*) FROM postroom.`+table).Scan(&n); err != nil {
		e.t.Fatal(err)
	}
	return n
}

func (e *endpoint) wantRows(receipts, messages, conflicts int) {
	e.t.Helper()
	got := [3]int{e.count("webhook_receipts"), e.count("outbox_messages"), e.count("webhook_conflicts")}
	if got != [3]int{receipts, messages, conflicts} {
		e.t.Errorf("%v receipts, messages and conflicts, want %v", got, [3]int{receipts, messages, conflicts})
	}
}

func exec1(t *testing.T, pool *pgxpool.Pool, sql string) {
	t.Helper()
	if _, err := pool.Exec(t.Context(), sql); err != nil {
		t.Fatal(err)
	}
}

// objectID is the id of the object that an event of Stripe is about.
func objectID(_ http.Header, body []byte) (string, error) {
	var e struct {
		Data struct{ Object struct{ ID string } }
	}
	err := json.Unmarshal(body, &e)
	return e.Data.Object.ID, err
}

// A delivery becomes one receipt and one message, byte by byte, however often it
// comes; and what was kept proves itself later.
func TestReceivedOnce(t *testing.T) {
	t.Parallel()
	pgtest.Each(t, func(t *testing.T, db *pgtest.Server) {
		t.Parallel()
		e := open(t, db.New(t), stripe(), webhook.Config{Key: objectID})
		e.want(http.StatusAccepted, false, e.request("", stripeEvent))
		for range 3 {
			e.want(http.StatusAccepted, true, e.request("", stripeEvent))
		}
		e.wantRows(1, 1, 0)
		got := e.messages()[0]
		if got.Topic != "events" || string(got.Key) != "cus_123" || string(got.Payload) != stripeEvent ||
			!slices.Equal(got.Headers, []string{"Content-Type: application/json"}) {
			t.Errorf("message %+v", got)
		}
		if want := (postroom.Operation{Kind: "receipt", Scope: "hook", Key: "acct_123/evt_123"}).ID(); got.Operation != want {
			t.Errorf("operation %q, want %q", got.Operation, want)
		}
		var secret, id string
		var at, sent time.Time
		var names, values [][]byte
		var body []byte
		err := e.pool.QueryRow(t.Context(), `
			SELECT secret, message_id, received_at, sent_at, header_names, header_values, body FROM postroom.webhook_receipts`).
			Scan(&secret, &id, &at, &sent, &names, &values, &body)
		if err != nil || secret != "1" || id != got.ID || string(body) != stripeEvent {
			t.Fatalf("receipt: secret %q, message %q, %v", secret, id, err)
		}
		kept := make(http.Header)
		for i := range names {
			kept.Add(string(names[i]), string(values[i]))
		}
		if p, err := e.scheme.VerifyAt(kept, body, at); err != nil || !p.Sent.Equal(sent) {
			t.Errorf("what is kept: %+v, %v", p, err)
		}
		// A receipt that was forgotten makes the same message again, which subscribers know.
		exec1(t, e.pool, `DELETE FROM postroom.webhook_receipts`)
		e.want(http.StatusAccepted, false, e.request("", stripeEvent))
		if all := e.messages(); len(all) != 2 || all[1].ID != got.ID {
			t.Errorf("messages %+v", all)
		}
	})
}

func TestAnswers(t *testing.T) {
	t.Parallel()
	pool := pgtest.New(t)
	const event = `{"id":"evt"}`
	refuse := func(name string, status int, e *endpoint, r *http.Request) {
		t.Run(name, func(t *testing.T) {
			res := e.serve(r)
			if res.StatusCode != status || res.Header.Get("Cache-Control") != "no-store" {
				t.Errorf("answer %d, %v, want %d", res.StatusCode, res.Header, status)
			}
			if res.ContentLength > 0 {
				t.Error("the answer says something")
			}
		})
	}
	e := open(t, pool, stripe(), webhook.Config{MaxBody: int64(len(event))})
	get := e.request("", event)
	get.Method = http.MethodGet
	refuse("GET", http.StatusMethodNotAllowed, e, get)
	unsigned := e.request("", event)
	unsigned.Header.Del("Stripe-Signature")
	refuse("no signature", http.StatusUnauthorized, e, unsigned)
	other := open(t, pool, webhook.Stripe(one("other")), webhook.Config{})
	refuse("another secret", http.StatusUnauthorized, e, other.request("", event))
	for name, skew := range map[string]time.Duration{"stale": time.Hour, "from the future": -time.Hour} {
		late := open(t, pool, stripe(), webhook.Config{Clock: func() time.Time { return time.Now().Add(skew) }})
		refuse(name, http.StatusUnauthorized, late, late.request("", event))
	}
	refuse("one byte too many", http.StatusRequestEntityTooLarge, e, e.request("", event+" "))
	chunked := e.request("", event+" ")
	chunked.ContentLength = -1
	refuse("one byte too many, of unknown length", http.StatusRequestEntityTooLarge, e, chunked)
	broken := e.request("", event)
	broken.Body = io.NopCloser(iotest.ErrReader(errors.New("gone")))
	refuse("the body breaks off", http.StatusBadRequest, e, broken)
	refuse("no id", http.StatusBadRequest, e, e.request("", `{"x":"evt"}`))
	github := open(t, pool, webhook.GitHub(one("s")), webhook.Config{})
	nameless := github.request("", "{}")
	nameless.Header.Del("X-GitHub-Delivery")
	refuse("no id of GitHub's", http.StatusBadRequest, github, nameless)
	for name, key := range map[string]func(http.Header, []byte) (string, error){
		"no key":    func(http.Header, []byte) (string, error) { return "", errors.New("none") },
		"not a key": func(http.Header, []byte) (string, error) { return strings.Repeat("k", 1<<17), nil },
	} {
		e := open(t, pool, stripe(), webhook.Config{Key: key})
		refuse(name, http.StatusInternalServerError, e, e.request("", event))
	}
	e.wantRows(0, 0, 0)

	e.want(http.StatusAccepted, false, e.request("", event)) // exactly MaxBody
	for i, status := range []int{http.StatusOK, http.StatusNoContent} {
		e := open(t, pool, stripe(), webhook.Config{Status: status})
		e.want(status, false, e.request("", fmt.Sprintf(`{"id":"evt%d"}`, i)))
	}
}

// The same id with another body is kept, told, and goes no further.
func TestConflict(t *testing.T) {
	t.Parallel()
	pool := pgtest.New(t)
	var log bytes.Buffer
	e := open(t, pool, stripe(), webhook.Config{Logger: slog.New(slog.NewTextHandler(&log, nil))})
	e.want(http.StatusAccepted, false, e.request("", `{"id":"evt","amount":1}`))
	for range 2 {
		e.want(http.StatusConflict, false, e.request("", `{"id":"evt","amount":1000}`))
	}
	e.wantRows(1, 1, 1)
	if s := log.String(); strings.Count(s, "webhook_conflicts") != 2 || strings.Contains(s, "amount") {
		t.Errorf("log:\n%s", s)
	}
	patient := open(t, pool, stripe(), webhook.Config{TakeConflicts: true})
	patient.want(http.StatusAccepted, false, e.request("", `{"id":"evt","amount":1000}`))
	e.want(http.StatusAccepted, true, e.request("", `{"id":"evt","amount":1}`))
	e.wantRows(1, 1, 1)
}

// GitHub does not sign its ids: a body that was received is a repeat under any of
// them. Hooks of their own send one event under one id.
func TestUnsignedIDs(t *testing.T) {
	t.Parallel()
	e := open(t, pgtest.New(t), webhook.GitHub(one("s")), webhook.Config{})
	first := e.request("d1", `{"n":1}`)
	first.Header.Set("X-GitHub-Event", "push")
	e.want(http.StatusAccepted, false, first)
	e.want(http.StatusAccepted, true, e.request("d1", `{"n":1}`))
	e.want(http.StatusAccepted, true, e.request("forged", `{"n":1}`))
	e.want(http.StatusConflict, false, e.request("d1", `{"n":2}`))
	hook := e.request("d1", `{"n":3}`)
	hook.Header.Set("X-GitHub-Hook-ID", "7")
	e.want(http.StatusAccepted, false, hook)
	e.wantRows(2, 2, 1)
	if h := e.messages()[0].Headers; !slices.Equal(h, []string{"Content-Type: application/json", "X-GitHub-Event: push"}) {
		t.Errorf("headers %q", h)
	}
}

// Where one sender delivers to two endpoints, each receives.
func TestEndpointsAreApart(t *testing.T) {
	t.Parallel()
	e := open(t, pgtest.New(t), stripe(), webhook.Config{})
	h, err := webhook.New(e.pool, "other", stripe(), "events", webhook.Config{})
	if err != nil {
		t.Fatal(err)
	}
	e.want(http.StatusAccepted, false, e.request("", `{"id":"evt"}`))
	e.h = h
	e.want(http.StatusAccepted, false, e.request("", `{"id":"evt"}`))
	if all := e.messages(); len(all) != 2 || all[0].ID == all[1].ID {
		t.Errorf("messages %+v", all)
	}
}

// Of many at once, one is taken, and each is answered.
func TestConcurrentDuplicates(t *testing.T) {
	t.Parallel()
	for name, setting := range map[string]string{"read committed": "", "serializable": "serializable"} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			pool := small(t, pgtest.New(t), setting)
			e := open(t, pool, stripe(), webhook.Config{})
			for round := range 5 {
				body := fmt.Sprintf(`{"id":"evt%d"}`, round)
				var first, repeats, others atomic.Int32
				var wg sync.WaitGroup
				for range 40 {
					r := e.request("", body)
					wg.Go(func() {
						switch res := e.serve(r); {
						case res.StatusCode != http.StatusAccepted:
							others.Add(1)
						case res.Header.Get("Idempotent-Replayed") == "true":
							repeats.Add(1)
						default:
							first.Add(1)
						}
					})
				}
				wg.Wait()
				if first.Load() != 1 || repeats.Load() != 39 || others.Load() != 0 {
					t.Fatalf("%d taken, %d repeated, %d otherwise", first.Load(), repeats.Load(), others.Load())
				}
			}
			e.wantRows(5, 5, 0)
		})
	}
}

// small returns a pool of four connections on the same database.
func small(t *testing.T, pool *pgxpool.Pool, isolation string) *pgxpool.Pool {
	t.Helper()
	cfg := pool.Config()
	cfg.MaxConns = 4
	if isolation != "" {
		cfg.ConnConfig.RuntimeParams["default_transaction_isolation"] = isolation
	}
	p, err := pgxpool.NewWithConfig(t.Context(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(p.Close)
	return p
}

// While the database is away the sender is told to try again, and then it is taken.
func TestDatabaseAway(t *testing.T) {
	t.Parallel()
	var away atomic.Bool
	cfg := pgtest.New(t).Config()
	cfg.ConnConfig.DialFunc = func(ctx context.Context, network, addr string) (net.Conn, error) {
		if away.Load() {
			return nil, errors.New("away")
		}
		return new(net.Dialer).DialContext(ctx, network, addr)
	}
	pool, err := pgxpool.NewWithConfig(t.Context(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	defer pool.Close()
	e := open(t, pool, stripe(), webhook.Config{})
	away.Store(true)
	pool.Reset()
	res := e.serve(e.request("", `{"id":"evt"}`))
	if res.StatusCode != http.StatusServiceUnavailable || res.Header.Get("Retry-After") == "" {
		t.Fatalf("answer %d, %v", res.StatusCode, res.Header)
	}
	away.Store(false)
	e.want(http.StatusAccepted, false, e.request("", `{"id":"evt"}`))
	e.wantRows(1, 1, 0)
}

// A sender that hangs up is no reason to forget what it sent.
func TestSenderHangsUp(t *testing.T) {
	t.Parallel()
	e := open(t, pgtest.New(t), stripe(), webhook.Config{})
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	e.want(http.StatusAccepted, false, e.request("", `{"id":"evt"}`).WithContext(ctx))
	e.wantRows(1, 1, 0)
}

// What the database may take does not begin before the body is there.
func TestSlowBody(t *testing.T) {
	t.Parallel()
	const timeout = 3 * time.Second
	e := open(t, pgtest.New(t), stripe(), webhook.Config{Timeout: timeout})
	const body = `{"id":"evt"}`
	r := e.request("", body)
	in, out := io.Pipe()
	r.Body, r.ContentLength = in, -1
	time.AfterFunc(timeout+time.Second, func() {
		_, _ = io.WriteString(out, body)
		_ = out.Close()
	})
	e.want(http.StatusAccepted, false, r)
}

// A process that dies after the commit and before its answer is asked again, and
// answers without a second message.
func TestKilledBeforeTheAnswer(t *testing.T) {
	t.Parallel()
	db := pgtest.First(t)
	e := open(t, db.New(t), stripe(), webhook.Config{})
	cmd := exec.CommandContext(t.Context(), os.Args[0])
	cmd.Env = append(os.Environ(), childURL+"="+db.URL(e.pool))
	out, err := cmd.CombinedOutput()
	if exit := (*exec.ExitError)(nil); !errors.As(err, &exit) || exit.ExitCode() != dead {
		t.Fatalf("child: %v\n%s", err, out)
	}
	e.wantRows(1, 1, 0)
	e.want(http.StatusAccepted, true, e.request("", childEvent))
	e.wantRows(1, 1, 0)
}

const (
	childEvent = `{"id":"evt_child"}`
	dead       = 7
)

// child receives a delivery and dies when it answers.
func child(url string) {
	pool, err := pgxpool.New(context.Background(), url)
	if err != nil {
		panic(err)
	}
	h, err := webhook.New(pool, "hook", stripe(), "events", webhook.Config{Timeout: time.Minute})
	if err != nil {
		panic(err)
	}
	r := httptest.NewRequest(http.MethodPost, "/hook", strings.NewReader(childEvent))
	if err := stripe().Sign(r.Header, "", []byte(childEvent), time.Now()); err != nil {
		panic(err)
	}
	h.ServeHTTP(deadly{make(http.Header)}, r)
}

type deadly struct{ h http.Header }

func (d deadly) Header() http.Header       { return d.h }
func (deadly) WriteHeader(int)             { os.Exit(dead) }
func (deadly) Write(p []byte) (int, error) { return len(p), nil }

// New reports all that is wrong, and no secret.
func TestNewProblems(t *testing.T) {
	t.Parallel()
	_, err := webhook.New(nil, "", webhook.StandardWebhooks(one("hidden"), one("")), "", webhook.Config{
		Schema: strings.Repeat("s", 64), MaxBody: -1, Headers: []string{"postroom-id"}, Status: 201, Timeout: -1,
	})
	for _, want := range []string{
		"pool is nil", "endpoint's name has 0 bytes", "topic", `secret "1"`, `secret "2": it is empty`, "Config.Schema", "MaxBody is -1", "postroom-id",
		"Status is 201", "Timeout is -1ns",
	} {
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%q is not in %v", want, err)
		}
	}
	if strings.Contains(err.Error(), "hidden") {
		t.Errorf("a secret stands in %v", err)
	}
	if _, err := webhook.New(pgtest.New(t), "hook", webhook.GitHub(), "t", webhook.Config{}); err == nil {
		t.Error("it starts without a secret")
	}
	if _, err := webhook.New(pgtest.New(t), "hook", nil, "t", webhook.Config{}); err == nil {
		t.Error("it starts without a scheme")
	}
}

// Slack asks once whether the endpoint is there.
func TestSlackChallenge(t *testing.T) {
	t.Parallel()
	e := open(t, pgtest.New(t), webhook.Slack(one("s")), webhook.Config{})
	w := httptest.NewRecorder()
	e.h.ServeHTTP(w, e.request("", `{"type":"url_verification","challenge":"3eZbrw1aB"}`))
	if w.Code != http.StatusOK || w.Body.String() != "3eZbrw1aB" {
		t.Errorf("answer %d, %q", w.Code, w.Body)
	}
	e.wantRows(0, 0, 0)
	e.want(http.StatusAccepted, false, e.request("", slackEvent))
	e.want(http.StatusAccepted, true, e.request("", slackEvent))
	e.want(http.StatusAccepted, false, e.request("", slackCommand)) // known by its body
	e.want(http.StatusAccepted, true, e.request("", slackCommand))
	e.wantRows(2, 2, 0)
}

// Bytes that are no text are kept as they are; what logs in is not kept.
func TestBytesAreKept(t *testing.T) {
	t.Parallel()
	const schema = `a "b' c`
	pool := pgtest.New(t)
	if _, err := migrations.Up(t.Context(), pool, migrations.Config{Schema: schema}); err != nil {
		t.Fatal(err)
	}
	e := open(t, pool, webhook.GitHub(one("s")), webhook.Config{Schema: schema})
	r := e.request("d", "\x00\xff\"")
	r.Header.Set("Authorization", "Basic c2VjcmV0")
	r.Header.Add("X-Two", "1")
	r.Header.Add("X-Two", "\xff")
	e.want(http.StatusAccepted, false, r)
	e.want(http.StatusAccepted, true, e.request("d", "\x00\xff\""))
	var body, payload []byte
	var values [][]byte
	err := pool.QueryRow(t.Context(), `
		SELECT r.body, r.header_values, m.payload FROM "a ""b' c".webhook_receipts r JOIN "a ""b' c".outbox_messages m USING (message_id)`).
		Scan(&body, &values, &payload)
	if err != nil || string(body) != "\x00\xff\"" || string(payload) != string(body) {
		t.Fatalf("body %q, payload %q, %v", body, payload, err)
	}
	var all []string
	for _, v := range values {
		all = append(all, string(v))
	}
	if slices.Contains(all, "Basic c2VjcmV0") || !slices.Contains(all, "\xff") {
		t.Errorf("kept %q of %q", all, slices.Collect(maps.Values(r.Header)))
	}
}

// A cleaner drops bodies first, and what is known of a delivery later.
func TestCleaner(t *testing.T) {
	t.Parallel()
	pool := pgtest.New(t)
	e := open(t, pool, webhook.GitHub(one("s")), webhook.Config{})
	for i, age := range []string{"0", "8 days", "91 days"} {
		e.want(http.StatusAccepted, false, e.request(fmt.Sprint(i), fmt.Sprint(i)))
		e.want(http.StatusConflict, false, e.request(fmt.Sprint(i), fmt.Sprint(i, "other")))
		for _, table := range []string{"receipts", "conflicts"} {
			exec1(t, pool, fmt.Sprintf(`UPDATE postroom.webhook_%s SET received_at = received_at - interval '%s' WHERE delivery_id = '%d'`, table, age, i))
		}
	}
	exec1(t, pool, `
		INSERT INTO postroom.webhook_receipts (endpoint, delivery_id, unsigned_id, body_sha256, message_id, secret, received_at)
		SELECT 'many', n::text, false, sha256(n::text::bytea), 'm', '1', now() - interval '100 days' FROM generate_series(1, 2500) n`)
	var wg sync.WaitGroup
	var changed atomic.Int64
	for range 3 {
		wg.Go(func() {
			n, err := webhook.Cleaner{Pool: pool}.Clean(t.Context())
			if err != nil {
				t.Error(err)
			}
			changed.Add(n)
		})
	}
	wg.Wait()
	if n, err := (webhook.Cleaner{Pool: pool}).Clean(t.Context()); err != nil || n+changed.Load() < 2500+1+2+1 {
		t.Errorf("%d and %d rows changed, %v", changed.Load(), n, err)
	}
	e.wantRows(2, 3, 1)
	e.want(http.StatusAccepted, true, e.request("1", "1")) // still known
	var bodies int
	if err := pool.QueryRow(t.Context(), `SELECT count(body) FROM postroom.webhook_receipts`).Scan(&bodies); err != nil || bodies != 1 {
		t.Errorf("%d bodies are kept, %v, want 1", bodies, err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- webhook.Cleaner{Pool: pool, Interval: time.Millisecond}.Run(ctx) }()
	cancel()
	if err := <-done; err != nil {
		t.Errorf("Run = %v", err)
	}
	err := webhook.Cleaner{Schema: strings.Repeat("s", 64), Bodies: time.Minute, Retention: time.Second, Interval: -1}.Run(t.Context())
	for _, want := range []string{"Pool is nil", "Schema", "Bodies is 1m0s", "Retention is 1s", "Interval is -1ns"} {
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%q is not in %v", want, err)
		}
	}
}
