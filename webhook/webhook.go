// Package webhook receives webhooks: it proves who sent a delivery, keeps it once,
// and hands it to the service as a message of the outbox, all of that committed
// before the sender gets its answer.
//
//	h, err := webhook.New(pool, "stripe", webhook.Stripe(webhook.Secret{Value: secret}), "stripe-events", webhook.Config{})
//	mux.Handle("POST /webhooks/stripe", h)
//
// The work that a delivery asks for is that of an ordinary subscriber of the topic,
// see package inbox: its effect happens once, however often the sender repeats and
// whatever dies in between.
//
// Deliveries come out of order, and one change may be told by several. A handler
// should take what it needs from the sender, or guard by a version (inbox.Newer).
package webhook

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"slices"
	"strconv"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/postroom/postroom"
	"github.com/postroom/postroom/internal/pg"
	"github.com/postroom/postroom/outbox"
)

// Config adjusts a [Handler]. The zero value of each field selects the default that
// its comment names.
type Config struct {
	// Schema holds Postroom's tables. Default "postroom".
	Schema string

	// MaxBody is the most bytes that a body may have; more is answered with 413.
	// Default 1,000,000, which leaves room for headers below what brokers take by default.
	MaxBody int64

	// Key returns the key of the message, the id of the object that the delivery is
	// about, say, so that messages of one object keep the order in which they were
	// received. It is called with what was proven to come from the sender, though
	// header fields are not always signed. An error is answered with 500, and the
	// sender tries again. Default: no key.
	Key func(header http.Header, body []byte) (string, error)

	// Headers names the header fields of a delivery that the message carries, one
	// header for each value. Default: Content-Type, and what says the kind of event
	// (X-GitHub-Event).
	Headers []string

	// Status answers what was received, or had been before. Default 202; 200 and 204
	// are for senders that take nothing else.
	Status int

	// TakeConflicts answers a delivery that comes again with another body like one
	// that was received, so that the sender stops. Default: 409. Either way it is
	// kept in webhook_conflicts, logged, and goes no further.
	TakeConflicts bool

	// Timeout bounds what the database may take; then the answer is 503. Default 2s,
	// which leaves room within the 3s that the least patient sender waits.
	Timeout time.Duration

	// Clock tells the time, with which the sender's timestamp is compared. Default
	// time.Now.
	Clock func() time.Time

	// Logger receives refusals, without payload and secrets, and what the database
	// says. Default slog.Default().
	Logger *slog.Logger
}

func (c Config) withDefaults(s *Scheme) (Config, error) {
	var errs []error
	bad := func(format string, args ...any) {
		errs = append(errs, fmt.Errorf("webhook: Config."+format, args...))
	}
	schema, err := pg.Schema(c.Schema)
	if err != nil {
		bad("%w", err)
	}
	c.Schema = schema
	if c.MaxBody < 0 {
		bad("MaxBody is %d, want at least 1", c.MaxBody)
	}
	c.MaxBody = cmp.Or(c.MaxBody, 1_000_000)
	if c.Headers == nil {
		c.Headers = []string{"Content-Type"}
		if s != nil && s.kind != "" {
			c.Headers = append(c.Headers, s.kind)
		}
	}
	for _, name := range c.Headers {
		if postroom.Reserved(name) {
			bad("Headers has %q: names that begin so are Postroom's own", name)
		}
	}
	c.Status = cmp.Or(c.Status, http.StatusAccepted)
	if !slices.Contains([]int{http.StatusOK, http.StatusAccepted, http.StatusNoContent}, c.Status) {
		bad("Status is %d, want 200, 202 or 204", c.Status)
	}
	c.Timeout = cmp.Or(c.Timeout, 2*time.Second)
	if c.Timeout < time.Millisecond {
		bad("Timeout is %v, want at least 1ms", c.Timeout)
	}
	if c.Clock == nil {
		c.Clock = time.Now
	}
	if c.Logger == nil {
		c.Logger = slog.Default()
	}
	return c, errors.Join(errs...)
}

// A Handler receives the webhooks of one endpoint. It is safe for concurrent use.
//
//	202       the delivery and its message are committed, now or before; a repeat has the
//	          header Idempotent-Replayed: true
//	400       the body broke off, or the delivery names no id
//	401       the signature is missing or wrong, or the timestamp outside the tolerance
//	405, 413  not POST; more than Config.MaxBody
//	409       the id was received before, with another body
//	500, 503  Config.Key failed; the database is away: the sender should try again
//
// Nothing is read from the database before the signature is proven, and answers say
// no more than the status.
type Handler struct {
	pool     *pgxpool.Pool
	endpoint string
	scheme   *Scheme
	topic    string
	cfg      Config
	box      outbox.Outbox
	receive  string // statement
	conflict string
}

// New returns a handler of an endpoint's deliveries, which become messages of the
// topic. The endpoint names the sender's account or hook: a delivery is received once
// for each. It reports everything that is wrong, secrets included, and asks the
// database nothing.
func New(pool *pgxpool.Pool, endpoint string, scheme *Scheme, topic string, cfg Config) (*Handler, error) {
	cfg, err := cfg.withDefaults(scheme)
	errs := []error{err}
	if pool == nil {
		errs = append(errs, errors.New("webhook: the pool is nil"))
	}
	if endpoint == "" || len(endpoint) > mostEndpoint {
		errs = append(errs, fmt.Errorf("webhook: the endpoint's name has %d bytes, want 1 to %d", len(endpoint), mostEndpoint))
	}
	probe := postroom.Message{Topic: topic}
	if err := probe.Validate(0); err != nil {
		errs = append(errs, fmt.Errorf("webhook: topic %q: %w", topic, err))
	}
	if scheme == nil {
		errs = append(errs, errors.New("webhook: the scheme is nil"))
	} else {
		errs = append(errs, scheme.check())
	}
	if err := errors.Join(errs...); err != nil {
		return nil, err
	}
	return &Handler{
		pool: pool, endpoint: endpoint, scheme: scheme, topic: topic, cfg: cfg,
		// Bodies are bounded already.
		box:     outbox.Outbox{Schema: cfg.Schema, MaxSize: -1},
		receive: pg.InSchema(receive, cfg.Schema), conflict: pg.InSchema(keepConflict, cfg.Schema),
	}, nil
}

const mostEndpoint = 200

// ServeHTTP implements [http.Handler].
func (h *Handler) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	status, repeat, reply := h.serve(w, r)
	if reply != nil {
		w.Header().Set("Content-Type", "text/plain; charset=utf-8")
		w.Header().Set("X-Content-Type-Options", "nosniff")
	}
	if repeat {
		w.Header().Set("Idempotent-Replayed", "true")
	}
	if status == http.StatusServiceUnavailable {
		w.Header().Set("Retry-After", strconv.Itoa(retryAfter))
	}
	w.Header().Set("Cache-Control", "no-store")
	w.WriteHeader(status)
	_, _ = w.Write(reply)
}

// retryAfter is in seconds.
const retryAfter = 5

func (h *Handler) serve(w http.ResponseWriter, r *http.Request) (status int, repeat bool, reply []byte) {
	ctx := context.WithoutCancel(r.Context()) // what gives up half way is only asked again
	if r.Method != http.MethodPost {
		w.Header().Set("Allow", http.MethodPost)
		return http.StatusMethodNotAllowed, false, nil
	}
	at := h.cfg.Clock()
	body, err := io.ReadAll(http.MaxBytesReader(w, r.Body, h.cfg.MaxBody))
	if err != nil {
		if tooLarge := (*http.MaxBytesError)(nil); errors.As(err, &tooLarge) {
			h.refused(ctx, fmt.Errorf("the body has more than %d bytes (Config.MaxBody)", h.cfg.MaxBody))
			return http.StatusRequestEntityTooLarge, false, nil
		}
		return http.StatusBadRequest, false, nil
	}
	proof, err := h.scheme.VerifyAt(r.Header, body, at)
	switch {
	case errors.Is(err, ErrIdentity):
		h.refused(ctx, err)
		return http.StatusBadRequest, false, nil
	case err != nil:
		h.refused(ctx, err)
		return http.StatusUnauthorized, false, nil
	case proof.challenge != "":
		return http.StatusOK, false, []byte(proof.challenge)
	}
	outcome, err := h.takeInTime(ctx, r.Header, body, proof)
	switch {
	case errors.Is(err, errKey):
		h.cfg.Logger.LogAttrs(ctx, slog.LevelError, "webhook not taken", slog.String("endpoint", h.endpoint), slog.Any("error", err))
		return http.StatusInternalServerError, false, nil
	case err != nil:
		h.cfg.Logger.LogAttrs(ctx, slog.LevelError, "webhook not taken", slog.String("endpoint", h.endpoint), slog.Any("error", err))
		return http.StatusServiceUnavailable, false, nil
	case outcome == conflicting:
		h.cfg.Logger.LogAttrs(ctx, slog.LevelError, "webhook received again with another body, see webhook_conflicts",
			slog.String("endpoint", h.endpoint))
		if !h.cfg.TakeConflicts {
			return http.StatusConflict, false, nil
		}
	}
	return h.cfg.Status, outcome == repeated, nil
}

// refused logs why a delivery was not let in. What a stranger can cause is no error
// of ours.
func (h *Handler) refused(ctx context.Context, err error) {
	h.cfg.Logger.LogAttrs(ctx, slog.LevelWarn, "webhook refused", slog.String("endpoint", h.endpoint), slog.Any("error", err))
}
