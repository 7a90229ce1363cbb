package idempotency_test

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"testing"
	"time"

	"github.com/postroom/postroom"
	"github.com/postroom/postroom/idempotency"
)

// begun is pay for a two-phase handler.
func begun(w http.ResponseWriter, r *http.Request) {
	if _, err := idempotency.Begin(r.Context()); err != nil {
		http.Error(w, err.Error(), http.StatusInternalServerError)
		return
	}
	pay(w, r)
}

// While a two-phase handler waits for others it holds no connection, and is not
// overtaken however long that takes.
func TestTwoPhase(t *testing.T) {
	pool := newPool(t)
	entered, leave := make(chan int), make(chan int)
	a := serve(t, pool, idempotency.Config{TwoPhase: true, Lease: time.Second}, func(w http.ResponseWriter, r *http.Request) {
		if idempotency.Tx(r.Context()) != nil {
			t.Error("there is a transaction before Begin")
		}
		entered <- 0
		<-leave
		tx, err := idempotency.Begin(r.Context())
		if err != nil {
			t.Error(err)
		}
		if again, err := idempotency.Begin(r.Context()); err != nil || again != tx || idempotency.Tx(r.Context()) != tx {
			t.Errorf("a second Begin returned another transaction, %v", err)
		}
		begun(w, r)
	})
	done := a.start(ask{key: "k1", body: "x"})
	receive(t, "the handler", entered)
	eventually(t, "an unused pool", func() bool { return pool.Stat().AcquiredConns() == 0 })
	eventually(t, "several leases", func() bool {
		a.post("k1", "x").want(t, 409, "idempotency-in-flight")
		return query(t, pool, `SELECT (first_seen < clock_timestamp() - interval '2500 ms')::text FROM postroom.idempotency_keys`)[0] == "true"
	})
	leave <- 0
	first := receive(t, "the answer", done)
	first.want(t, 201, "")
	if again := a.post("k1", "x"); !again.replayed() || again.body != first.body {
		t.Errorf("repeat %+v of %+v", again, first)
	}
	a.wantRuns(1)
	wantStrings(t, "payments", payments(t, pool), "x")
}

// A two-phase handler that has lost its key is told so, and changes nothing.
func TestTwoPhaseLosesItsKey(t *testing.T) {
	for _, begin := range []bool{true, false} {
		for _, status := range []int{201, 500} {
			t.Run(fmt.Sprint(begin, status), func(t *testing.T) {
				pool := newPool(t)
				a := serve(t, pool, idempotency.Config{TwoPhase: true, Lease: 60 * time.Millisecond, Timeout: patience}, func(w http.ResponseWriter, r *http.Request) {
					mustExec(t, pool, `UPDATE postroom.idempotency_keys SET fence = fence + 1, locked_until = clock_timestamp() + interval '1 hour'`)
					select {
					case <-r.Context().Done():
					case <-time.After(patience / 2):
						t.Error("the context did not end")
					}
					if begin {
						if _, err := idempotency.Begin(context.WithoutCancel(r.Context())); err == nil {
							t.Error("Begin succeeded")
						}
					}
					w.WriteHeader(status)
				})
				a.post("k1", "x").want(t, 409, "idempotency-in-flight")
				wantStrings(t, "keys", states(t, pool), "k1 in_flight")
			})
		}
	}
}

// Row 26: who has lost its key is answered as the winner was.
func TestLoserGetsTheWinnersAnswer(t *testing.T) {
	pool := newPool(t)
	a := serve(t, pool, idempotency.Config{TwoPhase: true}, func(w http.ResponseWriter, r *http.Request) {
		mustExec(t, pool, `UPDATE postroom.idempotency_keys SET fence = fence + 1, state = 'completed', completed_at = now()`)
		mustExec(t, pool, `INSERT INTO postroom.idempotency_answers SELECT tenant, operation, key, expires_at, 202, '{Location}', '{/winner}', 'won'
			FROM postroom.idempotency_keys`)
		if _, err := idempotency.Begin(r.Context()); err == nil {
			t.Error("Begin succeeded")
		}
		w.WriteHeader(500)
	})
	got := a.post("k1", "x")
	if got.status != 202 || got.body != "won" || got.header.Get("Location") != "/winner" || !got.replayed() {
		t.Errorf("answer %+v", got)
	}
	a.wantRuns(1)
}

// What a two-phase handler may do without Begin, and with it.
func TestTwoPhaseEnds(t *testing.T) {
	pool := newPool(t)
	var do func(w http.ResponseWriter, r *http.Request)
	a := serve(t, pool, idempotency.Config{TwoPhase: true}, func(w http.ResponseWriter, r *http.Request) { do(w, r) })
	begin := func(r *http.Request) {
		if _, err := idempotency.Begin(r.Context()); err != nil {
			t.Error(err)
		}
		note(r.Context(), "x")
	}
	answer := func(status int, withBegin bool) func(w http.ResponseWriter, r *http.Request) {
		return func(w http.ResponseWriter, r *http.Request) {
			if withBegin {
				begin(r)
			}
			w.WriteHeader(status)
		}
	}
	for name, test := range map[string]struct {
		do     func(w http.ResponseWriter, r *http.Request)
		status int // 0: the connection is cut
		state  string
	}{
		"201":           {answer(201, false), 201, "completed"},
		"201 begun":     {answer(201, true), 201, "completed"},
		"404":           {answer(404, false), 404, "completed"},
		"404 begun":     {answer(404, true), 404, "completed"},
		"500":           {answer(500, false), 500, "released"},
		"500 begun":     {answer(500, true), 500, "released"},
		"unknown":       {func(_ http.ResponseWriter, r *http.Request) { idempotency.Unknown(r.Context()) }, 409, "unknown"},
		"unknown begun": {func(_ http.ResponseWriter, r *http.Request) { begin(r); idempotency.Unknown(r.Context()) }, 409, "unknown"},
		"panic":         {func(http.ResponseWriter, *http.Request) { panic(http.ErrAbortHandler) }, 0, "released"},
		"panic begun":   {func(_ http.ResponseWriter, r *http.Request) { begin(r); panic(http.ErrAbortHandler) }, 0, "released"},
		"deferred":      {func(_ http.ResponseWriter, r *http.Request) { begin(r); violate(r) }, 500, "released"},
		"connection closed": {func(_ http.ResponseWriter, r *http.Request) {
			begin(r)
			_ = idempotency.Tx(r.Context()).Conn().Close(r.Context())
		}, 503, "released"},
	} {
		t.Run(name, func(t *testing.T) {
			mustExec(t, pool, `TRUNCATE payments, postroom.idempotency_keys, postroom.idempotency_answers`)
			do = test.do
			got, err := a.try(t.Context(), ask{key: "k1", body: "x"})
			if got.status != test.status || (err != nil) != (test.status == 0) {
				t.Errorf("answer %+v, %v", got, err)
			}
			eventually(t, "the key's state", func() bool { return states(t, pool)[0] == "k1 "+test.state })
			want := []string(nil)
			if name == "201 begun" {
				want = []string{"x"}
			}
			wantStrings(t, "payments", payments(t, pool), want...)
		})
	}
	eventually(t, "an unused pool", func() bool { return pool.Stat().AcquiredConns() == 0 })
}

func violate(r *http.Request) {
	_, _ = idempotency.Tx(r.Context()).Exec(r.Context(), `INSERT INTO later VALUES (1)`)
}

// A success that is claimed although the transaction could not begin is none.
func TestTwoPhaseWithoutDatabase(t *testing.T) {
	base := newPool(t)
	p, pool := newProxy(t, base, 4)
	a := serve(t, pool, idempotency.Config{TwoPhase: true, QueueTimeout: time.Second}, func(w http.ResponseWriter, r *http.Request) {
		p.setAway(true)
		if _, err := idempotency.Begin(r.Context()); err == nil {
			t.Error("Begin succeeded")
		}
		p.setAway(false)
		w.WriteHeader(201)
	})
	a.post("k1", "x").want(t, 503, "idempotency-store-unavailable")
	wantStrings(t, "keys", states(t, base), "k1 released")
}

// What becomes of a key whose last attempt died, or left an unknown outcome.
func TestReconcile(t *testing.T) {
	pool := newPool(t)
	var status int
	var failure error
	var asked []string
	cfg := idempotency.Config{TwoPhase: true, Reconcile: func(ctx context.Context, o postroom.Operation) (int, error) {
		key, err := postroom.OperationKey(ctx, "bank")
		if err != nil {
			t.Error(err)
		}
		asked = append(asked, o.Key+" "+key)
		return status, failure
	}}
	var call string
	unknown := false
	a := serve(t, pool, cfg, func(w http.ResponseWriter, r *http.Request) {
		call, _ = postroom.OperationKey(r.Context(), "bank")
		if unknown {
			idempotency.Unknown(r.Context())
			return
		}
		begun(w, r)
	})
	for _, test := range []struct {
		name    string
		prepare string // of the key after its first attempt
		status  int
		err     error
		want    int
		runs    int32
		state   string
	}{
		{"died, had its effect", "in_flight", 202, nil, 202, 0, "completed"},
		{"died, had none", "in_flight", 0, nil, 201, 1, "completed"},
		{"died, not known", "in_flight", 0, errors.New("away"), 409, 0, "unknown"},
		{"died, a wrong status", "in_flight", 7, nil, 409, 0, "unknown"},
		{"unknown, had its effect", "unknown", 202, nil, 202, 0, "completed"},
		{"unknown, had none", "unknown", 0, nil, 201, 1, "completed"},
		{"unknown still", "unknown", 0, errors.New("away"), 409, 0, "unknown"},
		{"released", "released", 0, errors.New("not asked"), 201, 1, "completed"},
	} {
		t.Run(test.name, func(t *testing.T) {
			mustExec(t, pool, `TRUNCATE payments, postroom.idempotency_keys, postroom.idempotency_answers`)
			unknown = true
			a.post("k1", "x").want(t, 409, "idempotency-outcome-unknown")
			unknown = false
			mustExec(t, pool, `UPDATE postroom.idempotency_keys SET locked_until = clock_timestamp(), state = $1`, test.prepare)
			status, failure, asked = test.status, test.err, nil
			a.runs.Store(0)
			got := a.post("k1", "x")
			got.want(t, test.want, "")
			a.wantRuns(test.runs)
			wantStrings(t, "keys", states(t, pool), "k1 "+test.state)
			if test.prepare == "released" {
				wantStrings(t, "asked", asked)
			} else {
				wantStrings(t, "asked", asked, "k1 "+call)
			}
			if test.state == "completed" {
				if again := a.post("k1", "x"); again.status != test.want || !again.replayed() || again.body != got.body {
					t.Errorf("repeat %+v of %+v", again, got)
				}
			}
		})
	}
}

func TestBeginElsewhere(t *testing.T) {
	pool := newPool(t)
	if _, err := idempotency.Begin(t.Context()); err == nil {
		t.Error("Begin outside of a request succeeded")
	}
	usual := serve(t, pool, idempotency.Config{}, func(_ http.ResponseWriter, r *http.Request) {
		if tx, err := idempotency.Begin(r.Context()); err != nil || tx != idempotency.Tx(r.Context()) {
			t.Errorf("Begin in the usual form: %v, %v", tx, err)
		}
	})
	usual.post("usual", "x").want(t, 200, "")
	leave, late := make(chan int), make(chan error, 2)
	a := serve(t, pool, idempotency.Config{TwoPhase: true, Optional: true}, func(w http.ResponseWriter, r *http.Request) {
		if !r.URL.Query().Has("late") {
			begun(w, r)
			return
		}
		go func() {
			<-leave
			_, err := idempotency.Begin(context.WithoutCancel(r.Context()))
			late <- err
		}()
	})
	for _, key := range []string{"late", ""} {
		a.do(ask{path: "/payments?late", key: key}).want(t, 200, "")
	}
	close(leave)
	for range 2 {
		if err := receive(t, "a late Begin", late); err == nil {
			t.Error("Begin after the handler's return succeeded")
		}
	}
	a.post("", "plain").want(t, 201, "")
	wantStrings(t, "payments", payments(t, pool), "plain")
}
