package readme

import (
	"bufio"
	"context"
	"net/http"
	"net/http/httptest"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/postroom/postroom/internal/throwaway"
	"github.com/postroom/postroom/migrations"
)

// A step of the README's transcript: a request, the comment before it, and the status
// and header fields that are shown of its answer.
type step struct {
	comment, key, body string
	status             string
	header             []string
}

var curl = regexp.MustCompile(`^\$ curl -i -u acme: -H 'Idempotency-Key: (\S+)' -d '(\S+)' localhost:8080/orders$`)

func transcript(t *testing.T) (steps []step) {
	t.Helper()
	_, text, ok := strings.Cut(read(t, "../../README.md"), "```console\n")
	text, _, closed := strings.Cut(text, "```")
	if !ok || !closed {
		t.Fatal("the README has no transcript")
	}
	var comment string
	lines := bufio.NewScanner(strings.NewReader(text))
	for lines.Scan() {
		line := lines.Text()
		if m := curl.FindStringSubmatch(line); m != nil {
			steps = append(steps, step{comment: comment, key: m[1], body: m[2]})
			comment = ""
			continue
		}
		switch after, ok := strings.CutPrefix(line, "$ # "); {
		case ok:
			comment = after
		case line == "":
		case strings.HasPrefix(line, "$") || len(steps) == 0:
			t.Fatalf("the transcript has %q", line)
		case strings.HasPrefix(line, "HTTP/1.1 "):
			steps[len(steps)-1].status = strings.TrimPrefix(line, "HTTP/1.1 ")
		default:
			steps[len(steps)-1].header = append(steps[len(steps)-1].header, line)
		}
	}
	return steps
}

// What the README shows of requests is what they are answered.
func TestREADMETranscript(t *testing.T) {
	t.Setenv("STRIPE_SECRET", "secret")
	ctx := t.Context()
	db, err := throwaway.StartPostgres(ctx, throwaway.PostgresConfig{})
	if err != nil {
		t.Fatal(err)
	}
	defer db.Close()
	pool, err := pgxpool.New(ctx, db.URL)
	if err != nil {
		t.Fatal(err)
	}
	defer pool.Close()
	if _, err := migrations.Up(ctx, pool, migrations.Config{}); err != nil {
		t.Fatal(err)
	}
	exec(t, pool, `CREATE TABLE orders (id text PRIMARY KEY, total int)`)
	h, err := serve(pool, func(r *http.Request) string { name, _, _ := r.BasicAuth(); return name })
	if err != nil {
		t.Fatal(err)
	}
	server := httptest.NewServer(h)
	defer server.Close()
	steps := transcript(t)
	if len(steps) != 5 {
		t.Fatalf("the transcript has %d steps, want 5", len(steps))
	}
	for _, s := range steps {
		t.Log(s.comment, s.key, s.body)
		release := func() {}
		switch {
		case strings.HasPrefix(s.comment, "while"):
			release = whileTheFirstRuns(t, pool, server.URL, s)
		case strings.HasPrefix(s.comment, "a day later"):
			exec(t, pool, `DELETE FROM postroom.idempotency_answers`)
			exec(t, pool, `UPDATE postroom.idempotency_keys SET expires_at = clock_timestamp()`)
		}
		res, err := send(ctx, server.URL, s)
		if err != nil {
			t.Fatal(err)
		}
		_ = res.Body.Close()
		release()
		if res.Status != s.status {
			t.Errorf("status %q, the README shows %q", res.Status, s.status)
		}
		for _, line := range s.header {
			name, value, _ := strings.Cut(line, ": ")
			got := res.Header.Get(name)
			if name == "Retry-After" && got != "" {
				continue // as long as it takes
			}
			if got != value {
				t.Errorf("%s is %q, the README shows %q", name, got, value)
			}
		}
		if got := res.Header.Get("Idempotent-Replayed"); got != "" && !strings.Contains(strings.Join(s.header, "\n"), "Idempotent-Replayed") {
			t.Errorf("Idempotent-Replayed is %q, and the README shows none", got)
		}
	}
}

func send(ctx context.Context, url string, s step) (*http.Response, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, url+"/orders", strings.NewReader(s.body))
	if err != nil {
		return nil, err
	}
	req.SetBasicAuth("acme", "")
	req.Header.Set("Content-Type", "application/x-www-form-urlencoded")
	req.Header.Set("Idempotency-Key", s.key)
	return http.DefaultClient.Do(req)
}

// whileTheFirstRuns sends a request whose handler waits, and returns what lets it go
// on and waits for its answer.
func whileTheFirstRuns(t *testing.T, pool *pgxpool.Pool, url string, s step) (release func()) {
	t.Helper()
	tx, err := pool.Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if _, err := tx.Exec(t.Context(), `LOCK TABLE orders`); err != nil {
		t.Fatal(err)
	}
	answered := make(chan string, 1)
	go func() {
		res, err := send(t.Context(), url, s)
		if err != nil {
			answered <- err.Error()
			return
		}
		_ = res.Body.Close()
		answered <- res.Status
	}()
	deadline := time.After(time.Minute)
	for waiting := false; !waiting; {
		err := tx.QueryRow(t.Context(), `SELECT EXISTS (SELECT FROM pg_locks WHERE NOT granted AND relation = 'orders'::regclass)`).Scan(&waiting)
		if err != nil {
			t.Fatal(err)
		}
		select {
		case <-deadline:
			t.Fatal("the first attempt does not run")
		case <-time.After(5 * time.Millisecond):
		}
	}
	return func() {
		if err := tx.Rollback(context.WithoutCancel(t.Context())); err != nil {
			t.Error(err)
		}
		if status := <-answered; status != "201 Created" {
			t.Errorf("the first attempt: %s", status)
		}
	}
}

func exec(t *testing.T, pool *pgxpool.Pool, sql string) {
	t.Helper()
	if _, err := pool.Exec(t.Context(), sql); err != nil {
		t.Fatal(err)
	}
}
