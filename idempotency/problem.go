package idempotency

import (
	"encoding/json"
	"math"
	"net/http"
	"strconv"
	"time"
)

// problemBase is where the types of problems are documented. They are stable.
const problemBase = "https://github.com/postroom/postroom/blob/main/docs/idempotency.md#"

// problem is an answer of the middleware (RFC 9457).
type problem struct {
	Type      string `json:"type"`
	Title     string `json:"title"`
	Status    int    `json:"status"`
	Detail    string `json:"detail"`
	Retryable bool   `json:"retryable"` // the same request may succeed later
	SameKey   bool   `json:"sameKey"`   // a further attempt must have this request's key, not a new one

	retryAfter time.Duration // 0: without the header
}

var (
	problemMissing = problem{
		Type: "idempotency-key-missing", Title: "Idempotency-Key is missing", Status: http.StatusBadRequest,
		Detail: "This operation requires an idempotency key. Choose one for each new request, and send it again with each repeat.",
	}
	problemInvalid = problem{
		Type: "idempotency-key-invalid", Title: "Idempotency-Key is not valid", Status: http.StatusBadRequest,
		Detail: "A key is given once and has 1 to 255 characters of printable ASCII, such as a UUID.",
	}
	problemReused = problem{
		Type: "idempotency-key-reused", Title: "Idempotency-Key belongs to another request", Status: http.StatusUnprocessableEntity,
		Detail: "This key has come with another request before. A new request needs a new key.",
	}
	problemInFlight = problem{
		Type: "idempotency-in-flight", Title: "The request is still running", Status: http.StatusConflict,
		Detail:    "A request with this key is being handled. Repeat it with the same key to get its answer.",
		Retryable: true, SameKey: true,
	}
	problemExpired = problem{
		Type: "idempotency-key-expired", Title: "Idempotency-Key has expired", Status: http.StatusGone,
		Detail: "The request with this key has been handled, and its answer is kept no longer. It is not run again.",
	}
	problemOutcome = problem{
		Type: "idempotency-outcome-unknown", Title: "The outcome is unknown", Status: http.StatusConflict,
		Detail:  "Whether the request with this key had its effect has to be found out by an operator. Do not send it under a new key before.",
		SameKey: true,
	}
	problemUnavailable = problem{
		Type: "idempotency-store-unavailable", Title: "The service is not available", Status: http.StatusServiceUnavailable,
		Detail:    "Repeat the request with the same key.",
		Retryable: true, SameKey: true, retryAfter: time.Second,
	}
	problemTooLarge = problem{
		Type: "idempotency-response-too-large", Title: "The answer is too large", Status: http.StatusInternalServerError,
		Detail: "The answer exceeds what can be stored, so the request was not carried out.",
	}
)

// problems without a type of ours: their status says all.
var (
	problemBody = problem{
		Status: http.StatusBadRequest, Detail: "The request's body could not be read.",
		Retryable: true, SameKey: true,
	}
	problemRequest = problem{
		Status: http.StatusRequestEntityTooLarge, Detail: "The request's body exceeds what this operation takes.",
	}
	problemForbidden = problem{
		Status: http.StatusForbidden, Detail: "The answer under this key is not for this caller.",
	}
	problemMisused = problem{
		Status: http.StatusInternalServerError, Detail: "The service is not set up for this request.",
	}
	problemUnsettled = problem{
		Status: http.StatusInternalServerError, Detail: "Whether the request was carried out is not known.",
	}
	problemInternal = problem{
		Status: http.StatusInternalServerError, Detail: "The request was not carried out.",
		Retryable: true, SameKey: true,
	}
)

// after returns p with a Retry-After of d.
func (p problem) after(d time.Duration) problem {
	p.retryAfter = min(max(d, time.Second), maxRetryAfter)
	return p
}

const maxRetryAfter = 5 * time.Second

func (p problem) send(w http.ResponseWriter) {
	h := w.Header()
	if p.Type == "" {
		p.Type, p.Title = "about:blank", http.StatusText(p.Status)
	} else {
		p.Type = problemBase + p.Type
		h.Add("Link", "<"+p.Type+`>; rel="describedby"; type="text/html"`)
	}
	if p.retryAfter > 0 {
		h.Set("Retry-After", strconv.Itoa(int(math.Ceil(p.retryAfter.Seconds()))))
	}
	h.Set("Cache-Control", "no-store")
	h.Set("Content-Type", "application/problem+json")
	h.Set("Content-Language", "en")
	b, err := json.Marshal(p)
	if err != nil {
		panic(err) // a struct of strings, numbers and booleans
	}
	h.Set("Content-Length", strconv.Itoa(len(b)))
	w.WriteHeader(p.Status)
	_, _ = w.Write(b)
}
