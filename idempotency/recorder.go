package idempotency

import (
	"errors"
	"fmt"
	"net/http"
	"net/textproto"
	"slices"
	"strconv"
	"strings"
	"sync"
)

var (
	errTooLarge  = errors.New("idempotency: the answer exceeds Config.MaxResponse")
	errRecorded  = errors.New("idempotency: the handler has returned")
	errSwitching = errors.New("idempotency: a protected handler cannot switch protocols")
)

// recorder keeps a handler's answer until its transaction has committed. It has
// no Flush, Hijack or Unwrap: an [http.ResponseController] says so
// ([http.ErrNotSupported]), and nothing gets around it.
type recorder struct {
	most     int // bytes of body
	standard int // status where none is written

	mu       sync.Mutex
	header   http.Header
	sent     http.Header // header as it was at WriteHeader; nil before
	status   int         // 0 before
	body     []byte
	tooLarge bool
	closed   bool
}

func newRecorder(most int) *recorder {
	return &recorder{most: most, standard: http.StatusOK, header: make(http.Header)}
}

func (r *recorder) Header() http.Header { return r.header }

func (r *recorder) WriteHeader(status int) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.writeHeader(status)
}

func (r *recorder) writeHeader(status int) {
	if status < 100 || status > 999 {
		panic(fmt.Sprintf("invalid WriteHeader code %v", status)) // as net/http does
	}
	if r.closed || r.status != 0 || status < 200 && status != http.StatusSwitchingProtocols {
		return // informational ones would go out before the commit
	}
	r.status = status
	r.sent = r.header.Clone()
}

func (r *recorder) Write(b []byte) (int, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.closed {
		return 0, errRecorded
	}
	r.writeHeader(r.standard)
	switch {
	case r.status == http.StatusSwitchingProtocols:
		return 0, errSwitching
	case !bodyAllowed(r.status):
		return 0, http.ErrBodyNotAllowed
	case len(b) > r.most-len(r.body):
		r.tooLarge = true
		return 0, errTooLarge
	}
	r.body = append(r.body, b...)
	return len(b), nil
}

func bodyAllowed(status int) bool {
	return status >= 200 && status != http.StatusNoContent && status != http.StatusNotModified
}

// close makes r inert and returns what was recorded, as it is to be sent.
func (r *recorder) close() response {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.writeHeader(r.standard)
	r.closed = true
	h := r.sent
	for name := range h {
		if strings.HasPrefix(name, http.TrailerPrefix) {
			delete(h, name)
		}
	}
	for _, list := range slices.Concat(h["Connection"], h["Trailer"]) {
		for name := range strings.SplitSeq(list, ",") {
			if name = textproto.CanonicalMIMEHeaderKey(strings.TrimSpace(name)); name != "Close" {
				delete(h, name)
			}
		}
	}
	for _, name := range []string{"Trailer", "Transfer-Encoding", "Content-Length", "Keep-Alive", "Proxy-Connection", "Te", "Upgrade"} {
		delete(h, name)
	}
	_, typed := h["Content-Type"]
	if !typed && len(r.body) > 0 && h.Get("Content-Encoding") == "" {
		h.Set("Content-Type", http.DetectContentType(r.body))
	}
	return response{r.status, h, r.body}
}

// response is an answer in the form of net/http.
type response struct {
	status int
	header http.Header
	body   []byte
}

// send writes the response. What outer handlers have set of the same name gives way.
func (r response) send(w http.ResponseWriter) {
	h := w.Header()
	for name, values := range r.header {
		h[name] = values
	}
	if bodyAllowed(r.status) {
		h["Content-Length"] = []string{strconv.Itoa(len(r.body))}
	}
	w.WriteHeader(r.status)
	if bodyAllowed(r.status) && len(r.body) > 0 {
		_, _ = w.Write(r.body) // a client that has gone repeats the request
	}
}

// ofBody are headers that say nothing without the body that they describe.
var ofBody = map[string]bool{
	"Content-Type": true, "Content-Encoding": true, "Content-Language": true, "Content-Disposition": true,
}

// keep returns what is stored of r.
func (c *Config) keep(r response, body bool) answer {
	a := answer{status: r.status}
	if body {
		a.body = orEmpty(r.body)
	}
	for name, values := range r.header {
		if !c.replays[name] || !body && c.Rebuild == nil && ofBody[name] {
			continue
		}
		for _, v := range values {
			a.names = append(a.names, name)
			a.values = append(a.values, []byte(v))
		}
	}
	return a
}

// response returns a as it is repeated.
func (a *answer) response() response {
	h := make(http.Header)
	for i, name := range a.names {
		h[name] = append(h[name], string(a.values[i]))
	}
	if h.Get("Content-Encoding") != "" {
		h.Add("Vary", "Accept-Encoding")
	}
	h.Set("Idempotent-Replayed", "true")
	return response{a.status, h, a.body}
}
