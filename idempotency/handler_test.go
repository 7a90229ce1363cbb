package idempotency_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"mime/multipart"
	"net/http"
	"net/http/httptest"
	"os"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/iotest"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/postroom/postroom/idempotency"
)

// Each status: whether the handler's writes stay, and whether a repeat runs it.
func TestStatuses(t *testing.T) {
	pool := newPool(t)
	status := 0
	h := func(w http.ResponseWriter, r *http.Request) {
		note(r.Context(), fmt.Sprint(status))
		w.WriteHeader(status)
		if status != 204 && status != 304 {
			_, _ = io.WriteString(w, "body")
		}
	}
	standard := serve(t, pool, idempotency.Config{}, h)
	strict := serve(t, pool, idempotency.Config{NotStored: []int{}, StoreServerErrors: true}, h)
	for _, test := range []struct {
		a              *api
		status         int
		written, again bool
	}{
		{standard, 200, true, false},
		{standard, 202, true, false},
		{standard, 204, true, false},
		{standard, 303, true, false},
		{standard, 304, true, false},
		{standard, 400, false, false},
		{standard, 404, false, false},
		{standard, 422, false, false},
		{standard, 401, false, true},
		{standard, 403, false, true},
		{standard, 409, false, true},
		{standard, 429, false, true},
		{standard, 500, false, true},
		{standard, 503, false, true},
		{strict, 429, false, false},
		{strict, 503, false, false},
		{strict, 201, true, false},
	} {
		t.Run(fmt.Sprint(test.status), func(t *testing.T) {
			mustExec(t, pool, `TRUNCATE payments, postroom.idempotency_keys, postroom.idempotency_answers`)
			status = test.status
			test.a.runs.Store(0)
			first := test.a.post("k1", "x")
			first.want(t, status, "")
			again := test.a.post("k1", "x")
			if again.status != status || again.body != first.body || again.replayed() == test.again {
				t.Errorf("repeat = %+v", again)
			}
			want, wantNotes := int32(1), []string(nil)
			if test.again {
				want = 2
			}
			if test.written {
				wantNotes = []string{fmt.Sprint(status)}
			}
			test.a.wantRuns(want)
			wantStrings(t, "payments", payments(t, pool), wantNotes...)
		})
	}
}

// A refusal is stored although the handler's transaction had failed before it.
func TestRefusalAfterAnError(t *testing.T) {
	pool := newPool(t)
	a := serve(t, pool, idempotency.Config{}, func(w http.ResponseWriter, r *http.Request) {
		note(r.Context(), "partial")
		if _, err := idempotency.Tx(r.Context()).Exec(r.Context(), `SELECT 1/0`); err == nil {
			t.Error("no error")
		}
		http.Error(w, "no", http.StatusBadRequest)
	})
	a.post("k1", "x").want(t, 400, "")
	if got := a.post("k1", "x"); got.status != 400 || !got.replayed() || got.body != "no\n" {
		t.Errorf("repeat = %+v", got)
	}
	a.wantRuns(1)
	wantStrings(t, "payments", payments(t, pool))
}

// What makes a request fail that the handler thought well. Each time nothing
// remains, the client is told so, and the next attempt runs.
func TestFailedCommits(t *testing.T) {
	pool := newPool(t)
	for name, test := range map[string]struct {
		do     func(context.Context, pgx.Tx)
		status int
	}{
		"deferred constraint": {func(ctx context.Context, tx pgx.Tx) {
			_, _ = tx.Exec(ctx, `INSERT INTO later VALUES (1)`)
		}, 500},
		"ignored error": {func(ctx context.Context, tx pgx.Tx) { _, _ = tx.Exec(ctx, `SELECT 1/0`) }, 500},
		"Commit": {func(ctx context.Context, tx pgx.Tx) {
			if err := tx.Commit(ctx); err == nil {
				t.Error("Commit succeeded")
			}
		}, 500},
		"Rollback": {func(ctx context.Context, tx pgx.Tx) {
			if err := tx.Rollback(ctx); err == nil {
				t.Error("Rollback succeeded")
			}
		}, 500},
		"rows left open": {func(ctx context.Context, tx pgx.Tx) { _, _ = tx.Query(ctx, `SELECT 1`) }, 500},
		"statement left running": {func(ctx context.Context, tx pgx.Tx) {
			go func() { _, _ = tx.Exec(context.WithoutCancel(ctx), `SELECT pg_sleep(60)`) }()
			eventually(t, "the statement", func() bool {
				return len(query(t, pool, `SELECT 'x' FROM pg_stat_activity WHERE query = 'SELECT pg_sleep(60)' AND state = 'active' AND datname = current_database()`)) > 0
			})
		}, 500},
		"connection closed": {func(ctx context.Context, tx pgx.Tx) { _ = tx.Conn().Close(ctx) }, 503},
		"fence lost": {func(ctx context.Context, tx pgx.Tx) {
			_, _ = tx.Exec(ctx, `UPDATE postroom.idempotency_keys SET fence = fence + 1`)
		}, 409},
		"killed": {func(ctx context.Context, tx pgx.Tx) {
			_, _ = tx.Exec(ctx, `SELECT pg_terminate_backend(pg_backend_pid())`)
		}, 503},
	} {
		t.Run(name, func(t *testing.T) {
			mustExec(t, pool, `TRUNCATE payments, postroom.idempotency_keys, postroom.idempotency_answers`)
			first := true
			a := serve(t, pool, idempotency.Config{Lease: 100 * time.Millisecond}, func(w http.ResponseWriter, r *http.Request) {
				note(r.Context(), fmt.Sprint("first ", first))
				if first {
					test.do(r.Context(), idempotency.Tx(r.Context()))
				}
				w.WriteHeader(201)
			})
			got := a.post("k1", "x")
			got.want(t, test.status, "")
			wantStrings(t, "payments", payments(t, pool))
			first = false
			eventually(t, "a run", func() bool { return a.post("k1", "x").status == 201 })
			a.wantRuns(2)
			wantStrings(t, "payments", payments(t, pool), "first false")
		})
	}
	if n := pool.Stat().AcquiredConns(); n != 0 {
		t.Errorf("%d connections are still acquired", n)
	}
}

// A handler that ends its transaction itself leaves an outcome that an operator
// has to find out.
func TestEndedTransactions(t *testing.T) {
	pool := newPool(t)
	for _, status := range []int{201, 400, 500} {
		for _, sql := range []string{"COMMIT", "ROLLBACK", "COMMIT AND CHAIN", "COMMIT; BEGIN", "ROLLBACK; BEGIN"} {
			t.Run(fmt.Sprint(sql, status), func(t *testing.T) {
				mustExec(t, pool, `TRUNCATE payments, postroom.idempotency_keys, postroom.idempotency_answers`)
				a := serve(t, pool, idempotency.Config{Lease: 10 * time.Millisecond}, func(w http.ResponseWriter, r *http.Request) {
					if _, err := idempotency.Tx(r.Context()).Exec(r.Context(), sql); err != nil {
						t.Error(err)
					}
					_, _ = idempotency.Tx(r.Context()).Exec(r.Context(), `INSERT INTO payments (note) VALUES ('late')`)
					w.WriteHeader(status)
				})
				for range 2 {
					got := a.post("k1", "x")
					got.want(t, 409, "idempotency-outcome-unknown")
					if got.header.Get("Retry-After") != "" {
						t.Error("there is a Retry-After")
					}
				}
				a.post("k1", "y").want(t, 422, "")
				a.wantRuns(1)
				wantStrings(t, "keys", states(t, pool), "k1 unknown")
			})
		}
	}
}

func TestUnknownOutcomeIsResolved(t *testing.T) {
	pool := newPool(t)
	unknown := true
	a := serve(t, pool, idempotency.Config{}, func(w http.ResponseWriter, r *http.Request) {
		note(r.Context(), "x")
		if unknown {
			idempotency.Unknown(r.Context())
		}
		w.WriteHeader(201)
	})
	for _, key := range []string{"k1", "k2"} {
		a.post(key, "x").want(t, 409, "idempotency-outcome-unknown")
	}
	wantStrings(t, "payments", payments(t, pool))
	wantStrings(t, "resolved", query(t, pool, `SELECT concat_ws(' ',
		postroom.resolve_idempotency_key('acme', 'POST /payments', 'k1', true, 202),
		postroom.resolve_idempotency_key('acme', 'POST /payments', 'k2', false),
		postroom.resolve_idempotency_key('acme', 'POST /payments', 'k3', false),
		postroom.resolve_idempotency_key('acme', 'POST /payments', 'k1', true))`), "t t f f")
	a.post("k4", "x").want(t, 409, "idempotency-outcome-unknown")
	k4 := idempotency.Call{Tenant: "acme", Operation: "POST /payments", Key: "k4"}
	if _, err := idempotency.Resolve(t.Context(), pool, k4, true, 0, idempotency.Config{}); err == nil {
		t.Error("Resolve took the status 0")
	}
	for _, want := range []bool{true, false} {
		if found, err := idempotency.Resolve(t.Context(), pool, k4, true, 204, idempotency.Config{}); found != want || err != nil {
			t.Errorf("Resolve = %v, %v, want %v", found, err, want)
		}
	}
	unknown = false
	if got := a.post("k4", "x"); got.status != 204 || !got.replayed() {
		t.Errorf("resolved by Resolve: %+v", got)
	}
	if got := a.post("k1", "x"); got.status != 202 || !got.replayed() {
		t.Errorf("resolved as done: %+v", got)
	}
	a.post("k2", "x").want(t, 201, "")
	a.wantRuns(4)
}

func TestPanics(t *testing.T) {
	pool := newPool(t)
	for name, end := range map[string]func(){
		"value":    func() { panic("at the disco") },
		"nil":      func() { panic(nil) },
		"abort":    func() { panic(http.ErrAbortHandler) },
		"Goexit":   runtime.Goexit,
		"open row": nil,
	} {
		t.Run(name, func(t *testing.T) {
			mustExec(t, pool, `TRUNCATE payments, postroom.idempotency_keys`)
			failing := true
			var seen any
			once, err := idempotency.Middleware(pool, func(*http.Request) string { return "acme" }, idempotency.Config{
				Operation: func(*http.Request) string { return "pay" },
			})
			if err != nil {
				t.Fatal(err)
			}
			inner := once(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				note(r.Context(), fmt.Sprint(failing))
				w.WriteHeader(201)
				switch {
				case failing && end == nil:
					_, _ = idempotency.Tx(r.Context()).Query(r.Context(), `SELECT 1`)
					panic("with rows open")
				case failing:
					end()
				}
			}))
			call := func() int {
				w := &discard{header: make(http.Header)}
				done := make(chan struct{})
				go func() {
					defer close(done)
					defer func() { seen = recover() }()
					r, _ := http.NewRequestWithContext(t.Context(), "POST", "/", strings.NewReader("x"))
					r.Header.Set("Idempotency-Key", "k1")
					inner.ServeHTTP(w, r)
				}()
				receive(t, "the end", done)
				return w.status
			}
			if status := call(); status != 0 {
				t.Errorf("the panic was answered %d", status)
			}
			switch _, isNil := seen.(*runtime.PanicNilError); name {
			case "value":
				if seen != "at the disco" {
					t.Errorf("recovered %v", seen)
				}
			case "nil":
				if !isNil {
					t.Errorf("recovered %v", seen)
				}
			case "abort":
				if seen != http.ErrAbortHandler { //nolint:errorlint // the very value
					t.Errorf("recovered %v", seen)
				}
			case "Goexit":
				if seen != nil {
					t.Errorf("recovered %v", seen)
				}
			}
			wantStrings(t, "keys", states(t, pool), "k1 released")
			failing = false
			if status := call(); status != 201 {
				t.Errorf("the next attempt was answered %d", status)
			}
			wantStrings(t, "payments", payments(t, pool), "false")
		})
	}
	if n := pool.Stat().AcquiredConns(); n != 0 {
		t.Errorf("%d connections are still acquired", n)
	}
}

// discard is a writer that keeps the status alone.
type discard struct {
	header http.Header
	status int
}

func (d *discard) Header() http.Header         { return d.header }
func (d *discard) Write(b []byte) (int, error) { return len(b), nil }
func (d *discard) WriteHeader(status int)      { d.status = status }

// Row 28: nothing gets around the recorder.
// Which headers the first answer and a repeat have.
// A stored encoding keeps its label, and caches are told.
// Bytes in are bytes out.
// A request in chunks is the same as one with its length.
func TestChunkedRequest(t *testing.T) {
	a := serve(t, newPool(t), idempotency.Config{}, func(w http.ResponseWriter, r *http.Request) {
		if len(r.TransferEncoding) > 0 || r.ContentLength != 1 {
			t.Errorf("transfer encoding %q, %d bytes", r.TransferEncoding, r.ContentLength)
		}
		w.WriteHeader(200)
	})
	r, err := a.request(t.Context(), ask{key: "k1", body: "x"})
	if err != nil {
		t.Fatal(err)
	}
	r.ContentLength = -1
	res, err := a.http.Do(r)
	if err != nil {
		t.Fatal(err)
	}
	_ = res.Body.Close()
	if got := a.post("k1", "x"); !got.replayed() {
		t.Errorf("repeat = %+v", got)
	}
}

// A body that ends too early is no request.
func TestHalfABody(t *testing.T) {
	pool := newPool(t)
	once, err := idempotency.Middleware(pool, tenantOf, idempotency.Config{})
	if err != nil {
		t.Fatal(err)
	}
	w := httptest.NewRecorder()
	r := httptest.NewRequestWithContext(t.Context(), "POST", "/",
		io.MultiReader(strings.NewReader("12345"), iotest.ErrReader(io.ErrUnexpectedEOF)))
	r.Pattern = "POST /"
	r.SetBasicAuth("acme", "")
	r.Header.Set("Idempotency-Key", "k1")
	once(http.HandlerFunc(func(http.ResponseWriter, *http.Request) { t.Error("the handler ran") })).ServeHTTP(w, r)
	if w.Code != 400 {
		t.Errorf("answer %d", w.Code)
	}
	wantStrings(t, "keys", states(t, pool))
}

// Files that the handler's form has left on disk are gone with the request.
func TestFormFilesAreRemoved(t *testing.T) {
	var files []string
	a := serve(t, newPool(t), idempotency.Config{CanonicalMultipart: true, MaxRequest: 1 << 20}, func(w http.ResponseWriter, r *http.Request) {
		if err := r.ParseMultipartForm(1); err != nil {
			t.Error(err)
		}
		f, _, err := r.FormFile("file")
		if err != nil {
			t.Error(err)
			return
		}
		if f, ok := f.(*os.File); ok {
			files = append(files, f.Name())
		}
		_ = f.Close()
		w.WriteHeader(200)
	})
	send := func() reply {
		var body bytes.Buffer
		w := multipart.NewWriter(&body) // with a boundary of its own
		part, _ := w.CreateFormFile("file", "a.bin")
		_, _ = part.Write(make([]byte, 1<<19))
		_ = w.Close()
		return a.do(ask{key: "k1", body: body.String(), header: http.Header{"Content-Type": {w.FormDataContentType()}}})
	}
	send().want(t, 200, "")
	if got := send(); !got.replayed() {
		t.Errorf("repeat = %+v", got)
	}
	if len(files) != 1 {
		t.Fatalf("files %q", files)
	}
	if _, err := os.Stat(files[0]); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("%s: %v", files[0], err)
	}
}

// What outlives the handler changes nothing.
// A transaction that loses a conflict is run again, with the body and an empty
// answer.
func TestConflictsAreRunAgain(t *testing.T) {
	pool := newPool(t)
	mustExec(t, pool, `CREATE TABLE totals (n int)`)
	mustExec(t, pool, `INSERT INTO totals VALUES (0)`)
	tries := 0
	a := serve(t, pool, idempotency.Config{IsoLevel: pgx.RepeatableRead}, func(w http.ResponseWriter, r *http.Request) {
		tries++
		body, _ := io.ReadAll(r.Body)
		tx := idempotency.Tx(r.Context())
		if tries < 3 || string(body) == "never" {
			mustExec(t, pool, `UPDATE totals SET n = n + 1`) // after the handler's snapshot
		}
		w.Header().Add("Location", "/"+fmt.Sprint(tries))
		if _, err := tx.Exec(r.Context(), `UPDATE totals SET n = n + 100`); err != nil {
			http.Error(w, "conflict", http.StatusInternalServerError)
			return
		}
		_, _ = w.Write(body)
	})
	got := a.post("k1", "body")
	got.want(t, 200, "")
	if got.body != "body" || !slices.Equal(got.header["Location"], []string{"/3"}) {
		t.Errorf("answer %+v", got)
	}
	a.wantRuns(3)
	wantStrings(t, "total", query(t, pool, `SELECT n::text FROM totals`), "102")
	got = a.post("k2", "never")
	got.want(t, 503, "idempotency-store-unavailable")
	if got.header.Get("Retry-After") == "" {
		t.Error("there is no Retry-After")
	}
	wantStrings(t, "keys", states(t, pool), "k1 completed", "k2 released")
}

// Case 33: a handler that goes on behind an inner time limit has no effect any
// more when that has answered for it.
func TestTimeoutHandlerInside(t *testing.T) {
	pool := newPool(t)
	leave, late := make(chan int), make(chan error, 1)
	var once sync.Once
	slow := http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		first := false
		once.Do(func() { first = true })
		if first {
			note(r.Context(), "early")
			<-leave
			_, err := idempotency.Tx(r.Context()).Exec(context.WithoutCancel(r.Context()), insertPayment, "late")
			late <- err
		}
		w.WriteHeader(201)
	})
	a := serve(t, pool, idempotency.Config{}, http.TimeoutHandler(slow, 50*time.Millisecond, "slow").ServeHTTP)
	a.post("k1", "x").want(t, 503, "")
	eventually(t, "the second run", func() bool { return a.post("k1", "x").status == 201 })
	close(leave)
	if err := receive(t, "the late statement", late); !errors.Is(err, pgx.ErrTxClosed) {
		t.Errorf("late statement: %v", err)
	}
	wantStrings(t, "payments", payments(t, pool))
}

// What has read the body before would make all requests look the same.
func TestBodyWasReadOutside(t *testing.T) {
	pool := newPool(t)
	once, err := idempotency.Middleware(pool, tenantOf, idempotency.Config{Logger: (&logs{}).logger()})
	if err != nil {
		t.Fatal(err)
	}
	inner := once(http.HandlerFunc(func(http.ResponseWriter, *http.Request) { t.Error("the handler ran") }))
	for name, read := range map[string]func(*http.Request){
		"ParseForm": func(r *http.Request) { _ = r.ParseForm() },
		"ParseForm of chunks": func(r *http.Request) {
			r.ContentLength = -1
			_ = r.ParseForm()
		},
		"ReadAll": func(r *http.Request) { _, _ = io.ReadAll(r.Body) },
	} {
		w := httptest.NewRecorder()
		r := httptest.NewRequestWithContext(t.Context(), "POST", "/", strings.NewReader("a=1"))
		r.Pattern = "POST /"
		r.SetBasicAuth("acme", "")
		r.Header.Set("Content-Type", "application/x-www-form-urlencoded")
		r.Header.Set("Idempotency-Key", "k1")
		read(r)
		inner.ServeHTTP(w, r)
		if w.Code != 500 {
			t.Errorf("%s: %d", name, w.Code)
		}
	}
	wantStrings(t, "keys", states(t, pool))
}
