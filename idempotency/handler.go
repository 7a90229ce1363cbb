package idempotency

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"slices"
	"strconv"
	"sync"
	"time"
	"unicode/utf8"

	"github.com/jackc/pgx/v5"

	"github.com/postroom/postroom"
	"github.com/postroom/postroom/internal/waits"
)

// scope is what a protected handler's context holds.
type scope struct {
	mu           sync.Mutex
	tx           pgx.Tx
	begin        func(context.Context) (pgx.Tx, error) // of a two-phase handler that is running
	resourceType *string
	resourceID   *string
	unknown      bool
}

// end lets no transaction begin any more.
func (s *scope) end() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.begin = nil
}

type scopeKey struct{}

func scopeOf(ctx context.Context) *scope {
	s, _ := ctx.Value(scopeKey{}).(*scope)
	return s
}

// in returns the context of a run under the key k, and what it holds.
func (s *store) in(ctx context.Context, kind string, k id, tx pgx.Tx) (context.Context, *scope) {
	sc := &scope{tx: tx}
	ctx = context.WithValue(ctx, scopeKey{}, sc)
	if k.key == "" {
		return ctx, sc
	}
	return postroom.WithOperation(ctx, postroom.Operation{
		Kind:  kind,
		Scope: strconv.Itoa(len(k.tenant)) + ":" + k.tenant + " " + k.operation, // no two pairs give the same
		Key:   k.key,
	}), sc
}

// handler is a protected handler.
type handler struct {
	s      *store
	tenant func(*http.Request) string
	next   http.Handler
}

func (h *handler) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	if !slices.Contains(h.s.cfg.Methods, r.Method) {
		h.next.ServeHTTP(w, r)
		return
	}
	p, body, k := h.read(w, r)
	if p != nil {
		p.send(w)
		return
	}
	if k.key == "" {
		h.plain(w, r, body)
		return
	}
	c := contentOf(r, h.operation(r), body)
	rules := h.s.cfg.rules
	prints := make(map[version][]byte)
	h.protected(w, r, body, call{
		id: k, version: rules.version(c),
		fingerprint: func(v version) []byte {
			if prints[v] == nil {
				prints[v] = rules.fingerprint(v, c)
			}
			return prints[v]
		},
	})
}

func (h *handler) operation(r *http.Request) string { return h.s.cfg.Operation(r) }

const maxTenantLen = 255 // bytes

// read reads the request: its body, and its key unless there is none and need be
// none. Nothing of it is stored or logged when it is refused.
func (h *handler) read(w http.ResponseWriter, r *http.Request) (*problem, []byte, id) {
	cfg := &h.s.cfg
	k := id{tenant: h.tenant(r), operation: h.operation(r)}
	if !storable(k.tenant, maxTenantLen) || !storable(k.operation, maxOperationLen) {
		cfg.Logger.LogAttrs(r.Context(), slog.LevelError, "a request without a usable tenant or operation",
			slog.Bool("tenant", storable(k.tenant, maxTenantLen)), slog.Bool("operation", storable(k.operation, maxOperationLen)))
		return &problemMisused, nil, k
	}
	if cfg.SharedKeys {
		k.operation = "*" // the fingerprint tells operations apart
	}
	var err error
	if cfg.Key == nil { // a refusal needs no body
		k.key, err = parseKey(r.Header.Values(headerName))
		if p := h.refused(k.key, err); p != nil {
			return p, nil, k
		}
	}
	if r.ContentLength > int64(cfg.MaxRequest) {
		return &problemRequest, nil, k
	}
	if r.Body == nil { // as no server does
		r.Body = http.NoBody
	}
	body, err := io.ReadAll(http.MaxBytesReader(w, r.Body, int64(cfg.MaxRequest)))
	if _, tooLarge := errors.AsType[*http.MaxBytesError](err); tooLarge {
		return &problemRequest, nil, k
	}
	if err != nil {
		return &problemBody, nil, k // half a body must not become the key's request
	}
	if len(r.PostForm) > 0 || r.MultipartForm != nil || len(body) == 0 && r.ContentLength > 0 {
		cfg.Logger.LogAttrs(r.Context(), slog.LevelError, "a handler outside of the middleware has read the request's body",
			slog.String("operation", k.operation))
		return &problemMisused, nil, k // without it, all requests would look the same
	}
	if cfg.Key != nil {
		r.Body = io.NopCloser(bytes.NewReader(body)) // the function may read it
		k.key, err = cfg.Key(r, body)
		switch {
		case err != nil:
			err = errBadKey
		case k.key == "":
			err = errNoKey
		default:
			err = checkKey(k.key)
		}
		if p := h.refused(k.key, err); p != nil {
			return p, nil, k
		}
	}
	return nil, body, k
}

func storable(s string, most int) bool {
	return s != "" && len(s) <= most && utf8.ValidString(s) && !bytes.ContainsRune([]byte(s), 0)
}

func (h *handler) refused(key string, err error) *problem {
	cfg := &h.s.cfg
	switch {
	case errors.Is(err, errNoKey) && cfg.Optional:
		return nil
	case errors.Is(err, errNoKey):
		return &problemMissing
	case err != nil, cfg.CheckKey != nil && !cfg.CheckKey(key):
		return &problemInvalid
	}
	return nil
}

// protected runs the handler under the key, or answers from what is known of it.
func (h *handler) protected(w http.ResponseWriter, r *http.Request, body []byte, c call) {
	a, v, found, err := h.s.enterPatiently(r.Context(), c)
	switch {
	case err != nil:
		h.unavailable(w, r, body, err)
	case v == verdictMine:
		h.run(w, r, body, c, a)
	default:
		h.repeat(w, r, v, found)
	}
}

// enterPatiently is enter that waits for the end of another run, if it may.
func (s *store) enterPatiently(ctx context.Context, c call) (*attempt, verdict, *row, error) {
	begin := time.Now()
	pause := waits.Growing(20*time.Millisecond, time.Second)
	for {
		a, v, r, err := s.enter(ctx, c)
		if err != nil || v != verdictInFlight || s.cfg.Wait == 0 {
			return a, v, r, err
		}
		rest := s.cfg.Wait - time.Since(begin)
		if rest <= 0 || waits.For(ctx, min(rest, pause.NextBackOff())) != nil {
			return a, v, r, err
		}
	}
}

// unavailable answers where the database could not be asked.
func (h *handler) unavailable(w http.ResponseWriter, r *http.Request, body []byte, err error) {
	if r.Context().Err() != nil {
		problemUnavailable.send(w) // to nobody
		return
	}
	h.s.cfg.Logger.LogAttrs(r.Context(), slog.LevelWarn, "claim an idempotency key",
		slog.String("operation", h.operation(r)), slog.Bool("fail_open", h.s.cfg.FailOpen), slog.Any("error", err))
	if h.s.cfg.FailOpen {
		h.next.ServeHTTP(w, withBody(r, r.Context(), body))
		return
	}
	problemUnavailable.send(w)
}

// withBody returns the request with a body that can be read again.
func withBody(r *http.Request, ctx context.Context, body []byte) *http.Request { //nolint:revive // the request is what it is about
	r = r.WithContext(ctx)
	r.Body = io.NopCloser(bytes.NewReader(body))
	r.ContentLength = int64(len(body))
	r.TransferEncoding = nil
	r.Form, r.PostForm, r.MultipartForm = nil, nil, nil // what Config.Key has parsed
	return r
}

// repeat answers a request that is not run.
func (h *handler) repeat(w http.ResponseWriter, r *http.Request, v verdict, found *row) {
	switch v {
	case verdictReplay:
		h.replay(w, r, found)
	case verdictReused:
		problemReused.send(w)
	case verdictExpired:
		problemExpired.send(w)
	case verdictUnknown:
		problemOutcome.send(w)
	case verdictForeign:
		problemUnavailable.after(maxRetryAfter).send(w)
	default:
		var rest time.Duration
		if found != nil {
			rest = found.rest
		}
		problemInFlight.after(rest).send(w)
	}
}

func (h *handler) replay(w http.ResponseWriter, r *http.Request, found *row) {
	if allow := h.s.cfg.AllowReplay; allow != nil && !allow(r) {
		problemForbidden.send(w)
		return
	}
	stored := found.answer.response()
	if h.s.cfg.Rebuild == nil || found.resourceType == nil || found.answer.body != nil {
		stored.send(w)
		return
	}
	rec := newRecorder(h.s.cfg.MaxResponse)
	rec.header, rec.standard = stored.header, stored.status
	h.s.cfg.Rebuild(rec, r, *found.resourceType, *found.resourceID)
	again := rec.close()
	if rec.tooLarge {
		problemTooLarge.send(w)
		return
	}
	again.send(w)
}

// run runs the handler under the key that a holds.
func (h *handler) run(w http.ResponseWriter, r *http.Request, body []byte, c call, a *attempt) {
	var own outcome
	var e end
	var err error
	// The work outlives the client, whose going shows as soon as the body has been read.
	ctx := context.WithoutCancel(r.Context())
	if h.s.cfg.TwoPhase {
		e, err = a.runLate(ctx, func(ctx context.Context, begin func(context.Context) (pgx.Tx, error)) (d decision) {
			if a.inherited && h.s.cfg.Reconcile != nil {
				if d, own = h.reconcile(ctx, r, c.id); d.act != actRelease {
					return d
				}
			}
			d, own = h.serve(ctx, r, body, c.id, nil, begin)
			return d
		})
	} else {
		e, err = a.run(ctx, func(ctx context.Context, tx pgx.Tx) (d decision) {
			d, own = h.serve(ctx, r, body, c.id, tx, nil)
			return d
		})
	}
	if err != nil && e != endLost {
		h.s.cfg.Logger.LogAttrs(r.Context(), slog.LevelError, "a request was not carried out",
			slog.String("operation", h.operation(r)), slog.Any("error", err))
	}
	switch {
	case e == endDone, own.act == actRelease && own.status != 0 && (e == endFailed || e == endTrouble):
		own.send(w)
	case (e == endUnknown || e == endPending) && c.key == "":
		problemUnsettled.send(w)
	case e == endLost:
		h.lost(w, r, c)
	case e == endUnknown:
		problemOutcome.send(w)
	case e == endPending:
		problemUnavailable.after(maxRetryAfter).send(w)
	case e == endFailed:
		problemInternal.send(w)
	default:
		problemUnavailable.send(w)
	}
}

// lost answers where another attempt has the key: as that one was answered.
func (h *handler) lost(w http.ResponseWriter, r *http.Request, c call) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(r.Context()), claimTime)
	defer cancel()
	found, err := h.s.look(ctx, c.id)
	if err != nil {
		problemUnavailable.send(w)
		return
	}
	h.repeat(w, r, h.s.judge(c, found, -1), found)
}

// outcome is a handler's answer, and what becomes of its transaction.
type outcome struct {
	response
	act     act
	problem *problem // in place of the response
}

func (o outcome) send(w http.ResponseWriter) {
	if o.problem != nil {
		o.problem.send(w)
		return
	}
	o.response.send(w)
}

// serve calls the handler with a transaction, or with what begins one.
func (h *handler) serve(
	ctx context.Context, r *http.Request, body []byte, k id, tx pgx.Tx, begin func(context.Context) (pgx.Tx, error),
) (decision, outcome) {
	cfg := &h.s.cfg
	ctx, cancel := context.WithTimeout(ctx, cfg.Timeout)
	defer cancel()
	ctx, sc := h.s.in(ctx, "http", k, tx)
	sc.begin = begin
	rec := newRecorder(cfg.MaxResponse)
	req := withBody(r, ctx, body)
	defer func() {
		rec.close()
		sc.end()
		if req.MultipartForm != nil { // net/http removes the files of its own request only
			_ = req.MultipartForm.RemoveAll()
		}
	}()
	h.next.ServeHTTP(rec, req)
	sc.end()
	return h.decide(rec, sc)
}

// reconcile finds out what the attempt before has done. It decides to release the
// key where that had no effect.
func (h *handler) reconcile(ctx context.Context, r *http.Request, k id) (decision, outcome) {
	cfg := &h.s.cfg
	ctx, cancel := context.WithTimeout(ctx, cfg.Timeout)
	defer cancel()
	ctx, _ = h.s.in(ctx, "http", k, nil)
	o, _ := postroom.OperationFrom(ctx)
	status, err := cfg.Reconcile(ctx, o)
	if err == nil && status != 0 && (status < 200 || status > 599) {
		err = fmt.Errorf("Config.Reconcile returned the status %d", status)
	}
	if err != nil {
		cfg.Logger.LogAttrs(ctx, slog.LevelWarn, "find out an outcome",
			slog.String("operation", h.operation(r)), slog.Any("error", err))
		return decision{act: actUnknown}, outcome{act: actUnknown}
	}
	if status == 0 {
		return decision{}, outcome{}
	}
	res := response{status: status, header: make(http.Header)}
	return decision{act: actCommit, answer: cfg.keep(res, true)}, outcome{response: res, act: actCommit}
}

// decide says what the handler's answer means for its transaction.
func (h *handler) decide(rec *recorder, sc *scope) (decision, outcome) {
	cfg := &h.s.cfg
	res := rec.close()
	sc.mu.Lock()
	defer sc.mu.Unlock()
	o := outcome{response: res}
	switch {
	case sc.unknown:
		o.act = actUnknown
	case rec.tooLarge:
		o.problem = &problemTooLarge
	case res.status == http.StatusSwitchingProtocols:
		o.problem = &problemInternal
	case res.status >= 500 && !cfg.StoreServerErrors, slices.Contains(cfg.NotStored, res.status):
	case res.status >= 400:
		o.act = actStore
	default:
		o.act = actCommit
	}
	d := decision{act: o.act}
	if o.act == actStore || o.act == actCommit {
		referred := o.act == actCommit && cfg.Rebuild != nil && sc.resourceType != nil
		d.answer = cfg.keep(res, !referred && !cfg.WithoutBody)
		if o.act == actCommit {
			d.resourceType, d.resourceID = sc.resourceType, sc.resourceID
		}
	}
	return d, o
}

// plain runs the handler for a request without a key: in a transaction that ends
// as if there were one.
func (h *handler) plain(w http.ResponseWriter, r *http.Request, body []byte) {
	a, err := h.s.enterPlain(r.Context(), h.operation(r))
	if err != nil {
		h.unavailable(w, r, body, err)
		return
	}
	h.run(w, r, body, call{}, a)
}
