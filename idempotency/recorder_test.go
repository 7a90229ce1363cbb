package idempotency_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/postroom/postroom/idempotency"
)

func TestTooLargeAnswers(t *testing.T) {
	pool := newPool(t)
	size := 0
	a := serve(t, pool, idempotency.Config{MaxResponse: 1000}, func(w http.ResponseWriter, r *http.Request) {
		note(r.Context(), fmt.Sprint(size))
		for range size / 100 {
			_, _ = w.Write(bytes.Repeat([]byte("x"), 100))
		}
	})
	for _, size = range []int{1000, 1100} {
		got := a.post(fmt.Sprint("k", size), "x")
		if size == 1000 {
			got.want(t, 200, "")
			continue
		}
		got.want(t, 500, "idempotency-response-too-large")
	}
	wantStrings(t, "payments", payments(t, pool), "1000")
	wantStrings(t, "keys", states(t, pool), "k1000 completed", "k1100 released")
}

func TestStreamingIsRefused(t *testing.T) {
	a := serve(t, newPool(t), idempotency.Config{}, func(w http.ResponseWriter, _ *http.Request) {
		c := http.NewResponseController(w)
		_, _, hijacked := c.Hijack()
		for name, err := range map[string]error{
			"Flush": c.Flush(), "Hijack": hijacked, "SetReadDeadline": c.SetReadDeadline(time.Now()),
			"SetWriteDeadline": c.SetWriteDeadline(time.Now()), "EnableFullDuplex": c.EnableFullDuplex(),
		} {
			if !errors.Is(err, http.ErrNotSupported) {
				t.Errorf("%s = %v, want ErrNotSupported", name, err)
			}
		}
		if _, ok := w.(http.Flusher); ok {
			t.Error("there is a Flush")
		}
		if _, ok := w.(interface{ Unwrap() http.ResponseWriter }); ok {
			t.Error("there is an Unwrap")
		}
	})
	a.post("k1", "x").want(t, 200, "")
}

func TestHeaders(t *testing.T) {
	pool := newPool(t)
	a := serve(t, pool, idempotency.Config{ReplayHeaders: []string{"X-Total"}}, func(w http.ResponseWriter, _ *http.Request) {
		h := w.Header()
		h.Set("Location", "/payments/1")
		h.Set("ETag", `"v1"`)
		h["Link"] = []string{"<a>", "<b>, <c>"}
		h.Set("Content-Disposition", `attachment; filename="a, b"`)
		h.Set("X-Total", "1")
		h.Set("X-Other", "1")
		h.Set("Set-Cookie", "session=1")
		h.Add("Set-Cookie", "csrf=2")
		h.Set("Www-Authenticate", "Basic")
		h.Set("Connection", "X-Hop")
		h.Set("X-Hop", "1")
		h.Set("Transfer-Encoding", "gzip")
		h.Set("Content-Length", "999")
		h.Set("Trailer", "X-Sum")
		h.Set("Cache-Control", "max-age=1")
		w.WriteHeader(103)
		w.WriteHeader(201)
		h.Set("X-Late", "1")
		w.WriteHeader(500)
		_, _ = io.WriteString(w, "<html><body>paid</body></html>")
		h.Set("X-Sum", "1")
		h.Set(http.TrailerPrefix+"X-More", "1")
	})
	first, again := a.post("k1", "x"), a.post("k1", "x")
	for name, want := range map[string][2]string{
		"Location":            {"/payments/1", "/payments/1"},
		"Etag":                {`"v1"`, `"v1"`},
		"Link":                {"<a>|<b>, <c>", "<a>|<b>, <c>"},
		"Content-Disposition": {`attachment; filename="a, b"`, `attachment; filename="a, b"`},
		"Content-Type":        {"text/html; charset=utf-8", "text/html; charset=utf-8"},
		"Content-Length":      {"30", "30"},
		"X-Total":             {"1", "1"},
		"X-Other":             {"1", ""},
		"Set-Cookie":          {"session=1|csrf=2", ""},
		"Www-Authenticate":    {"Basic", ""},
		"X-Hop":               {"", ""},
		"Transfer-Encoding":   {"", ""},
		"X-Late":              {"", ""},
		"X-Sum":               {"", ""},
		"X-Request-Id":        {"outer", "outer"},
		"Cache-Control":       {"max-age=1", ""},
		"Idempotent-Replayed": {"", "true"},
	} {
		for i, r := range []reply{first, again} {
			if got := strings.Join(r.header[name], "|"); got != want[i] {
				t.Errorf("%s of answer %d = %q, want %q", name, i+1, got, want[i])
			}
		}
	}
	first.want(t, 201, "")
	again.want(t, 201, "")
	if first.body != again.body || first.body != "<html><body>paid</body></html>" {
		t.Errorf("bodies %q and %q", first.body, again.body)
	}
}

func TestContentEncoding(t *testing.T) {
	a := serve(t, newPool(t), idempotency.Config{}, func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Encoding", "br")
		_, _ = w.Write([]byte{0, 1, 0xff})
	})
	for range 2 {
		got := a.post("k1", "x")
		if got.header.Get("Content-Encoding") != "br" || got.body != "\x00\x01\xff" || got.header.Get("Content-Type") != "" {
			t.Errorf("%+v", got)
		}
		if got.replayed() && got.header.Get("Vary") != "Accept-Encoding" {
			t.Errorf("Vary = %q", got.header.Get("Vary"))
		}
	}
}

func TestBodies(t *testing.T) {
	a := serve(t, newPool(t), idempotency.Config{}, func(w http.ResponseWriter, r *http.Request) {
		body, err := io.ReadAll(r.Body)
		if err != nil || int64(len(body)) != r.ContentLength {
			t.Errorf("read %d of %d bytes: %v", len(body), r.ContentLength, err)
		}
		_, _ = w.Write(body)
	})
	for i, body := range []string{"", "a\x00b", "\xff\xfe", `{"a":"\u0000","b":1.0e2,"a":2}`, strings.Repeat("\x00\xff", 1<<19)} {
		for range 2 {
			if got := a.post(fmt.Sprint("k", i), body); got.status != 200 || got.body != body {
				t.Errorf("body %d: %d, %d bytes of %d", i, got.status, len(got.body), len(body))
			}
		}
	}
	a.wantRuns(5)
}

func TestLateWrites(t *testing.T) {
	pool := newPool(t)
	late := make(chan error, 2)
	leave := make(chan struct{})
	a := serve(t, pool, idempotency.Config{}, func(w http.ResponseWriter, r *http.Request) {
		tx := idempotency.Tx(r.Context())
		ctx := context.WithoutCancel(r.Context())
		go func() {
			<-leave
			_, err := io.WriteString(w, "late")
			late <- err
			w.WriteHeader(500)
			_, err = tx.Exec(ctx, insertPayment, "late")
			late <- err
		}()
		_, _ = io.WriteString(w, "in time")
	})
	first := a.post("k1", "x")
	close(leave)
	if err := receive(t, "the late write", late); err == nil {
		t.Error("a late write succeeded")
	}
	if err := receive(t, "the late statement", late); !errors.Is(err, pgx.ErrTxClosed) {
		t.Errorf("late statement: %v", err)
	}
	again := a.post("k1", "x")
	if first.body != "in time" || again.body != "in time" {
		t.Errorf("bodies %q, %q", first.body, again.body)
	}
	wantStrings(t, "payments", payments(t, pool))
}

func TestStorageForms(t *testing.T) {
	pool := newPool(t)
	h := func(w http.ResponseWriter, r *http.Request) {
		pay(w, r)
		idempotency.Refer(r.Context(), "payment", "7")
	}
	t.Run("without body", func(t *testing.T) {
		a := serve(t, pool, idempotency.Config{WithoutBody: true}, h)
		first, again := a.post("without", "x"), a.post("without", "x")
		if first.body == "" || again.status != 201 || again.body != "" || !again.replayed() ||
			again.header.Get("Location") != first.header.Get("Location") || again.header.Get("Content-Type") != "" {
			t.Errorf("first %+v, repeat %+v", first, again)
		}
	})
	t.Run("rebuilt", func(t *testing.T) {
		status := 0
		a := serve(t, pool, idempotency.Config{
			Rebuild: func(w http.ResponseWriter, _ *http.Request, kind, id string) {
				if status != 0 {
					w.WriteHeader(status)
				}
				fmt.Fprintf(w, "%s %s again", kind, id)
			},
		}, h)
		first, again := a.post("rebuilt", "x"), a.post("rebuilt", "x")
		if again.status != 201 || again.body != "payment 7 again" || !again.replayed() ||
			again.header.Get("Location") != first.header.Get("Location") {
			t.Errorf("first %+v, repeat %+v", first, again)
		}
		status = 410
		if again := a.post("rebuilt", "x"); again.status != 410 || !again.replayed() {
			t.Errorf("repeat %+v", again)
		}
		wantStrings(t, "resources", query(t, pool, `SELECT resource_type || resource_id FROM postroom.idempotency_keys WHERE key = 'rebuilt'`), "payment7")
		wantStrings(t, "bodies", query(t, pool, `SELECT key FROM postroom.idempotency_answers WHERE body IS NULL ORDER BY 1`), "rebuilt", "without")
	})
	t.Run("refused", func(t *testing.T) {
		a := serve(t, pool, idempotency.Config{AllowReplay: func(r *http.Request) bool { return r.Header.Get("X-May") != "" }}, h)
		a.post("refused", "x").want(t, 201, "")
		a.post("refused", "x").want(t, 403, "")
		a.do(ask{key: "refused", body: "x", header: http.Header{"X-May": {"1"}}}).want(t, 201, "")
	})
}

func TestSwitchingProtocols(t *testing.T) {
	a := serve(t, newPool(t), idempotency.Config{}, func(w http.ResponseWriter, _ *http.Request) {
		w.WriteHeader(http.StatusSwitchingProtocols)
		if _, err := io.WriteString(w, "x"); err == nil {
			t.Error("wrote to another protocol")
		}
	})
	a.post("k1", "x").want(t, 500, "")
}
