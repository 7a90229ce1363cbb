package idempotency

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"net/textproto"
	"slices"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/postroom/postroom"
	"github.com/postroom/postroom/internal/pg"
)

// Config adjusts [Middleware], [Do] and [DoTx]. The zero value selects the
// defaults. Routes that need different ones get a middleware each.
type Config struct {
	// Schema holds Postroom's tables. Default "postroom".
	Schema string

	// IsoLevel is the isolation level of the handlers' transactions. One that
	// loses a conflict is run again, three times at most, with the request's body
	// rewound. Default: the database's or role's own.
	IsoLevel pgx.TxIsoLevel

	// Timeout is how long a handler may take: its context ends then. The context of
	// a function of Do ends with the caller's alone. In both the database's server
	// ends a transaction that makes no statement for longer, which frees the key of
	// a process that the network has cut off. Default 30s, at least 10ms.
	Timeout time.Duration

	// Lease bounds the gap between the claim of a key and the begin of its
	// transaction: after it, the key of a process that has died in the gap may be
	// claimed by another. A handler may take longer, since its transaction tells
	// that it lives. With TwoPhase the lease is renewed until the transaction begins,
	// and is how long the key of a process that has died is kept from others.
	// Default 5s, with TwoPhase 30s; at least 10ms.
	Lease time.Duration

	// Retention is how long an answer is kept, counted from the first request with
	// the key. Default 24h, at least a second.
	Retention time.Duration

	// Tombstone is how long it is known after that that the key was used: a late
	// repeat is answered 410 and not run again. Default 30 days; negative means
	// no time.
	Tombstone time.Duration

	// ReuseExpired runs a request whose key's answer has expired as a new one.
	ReuseExpired bool

	// Wait is how long a repeat waits for the request that it repeats before it is
	// answered that this one is still running. It holds no connection meanwhile.
	// Default 0: not at all.
	Wait time.Duration

	// QueueTimeout is how long a request waits for a connection. Default 10s, at
	// least 10ms.
	QueueTimeout time.Duration

	// MaxResponse is the most bytes that an answer's body may have, or what [Do]
	// returns. What exceeds it is not committed. Default 1 MiB.
	MaxResponse int

	// Logger receives what cannot be answered. Default slog.Default().
	Logger *slog.Logger

	// The fields below concern [Middleware] alone.

	// TwoPhase runs handlers without a transaction until they call [Begin], for those
	// that wait for other services: they hold no connection while they do. What a
	// handler does before Begin may happen more than once, after an attempt that
	// failed or died, so it needs a key by which the other side knows it again
	// ([github.com/postroom/postroom.OperationKey]), or [Unknown] where there is none.
	// Where the lease is lost the handler's context ends. A conflict is answered
	// 503 and not run again.
	TwoPhase bool

	// Reconcile, where set, is asked before a two-phase handler runs for a key whose
	// last attempt died or left an unknown outcome. It finds out, by the derived keys
	// that its context gives, whether that attempt had its effect: it returns the
	// status by which to answer, 200 to 599, with an empty body, or 0 where there was
	// none and the handler may run. With an error the outcome stays unknown. Default:
	// the handler runs after an attempt that died, and an unknown outcome waits for an
	// operator. It needs TwoPhase.
	Reconcile func(ctx context.Context, o postroom.Operation) (status int, err error)

	// Methods are the protected ones; requests with others pass untouched.
	// Default POST and PATCH.
	Methods []string

	// Operation names what a request does; keys of one operation are apart from
	// those of others. Default: the pattern of the [http.ServeMux] that has routed
	// the request, as in "POST /payments". 1 to 512 bytes.
	Operation func(*http.Request) string

	// SharedKeys makes the keys of a tenant one name space: a key that comes for
	// another operation is answered 422, and not run.
	SharedKeys bool

	// Key returns a request's key, such as a field of its body; "" means that there
	// is none, an error that it is invalid. Default: the header Idempotency-Key.
	Key func(r *http.Request, body []byte) (string, error)

	// CheckKey, where set, says whether a key has the form that this service asks
	// for, beyond 1 to 255 characters of printable ASCII.
	CheckKey func(key string) bool

	// Optional has requests without a key run: in a transaction that [Tx] returns,
	// but once for each.
	Optional bool

	// FailOpen has requests run unprotected, without a transaction, where the
	// database cannot be asked or gives no connection in time. Default: they are
	// answered 503.
	FailOpen bool

	// MaxRequest is the most bytes that a request's body may have. What is larger
	// is answered 413. Default 1 MiB.
	MaxRequest int

	// CanonicalJSON compares JSON bodies by their value: white space, the order of
	// members and the writing of numbers make no difference. Default: bytes.
	CanonicalJSON bool

	// CanonicalMultipart compares bodies of multipart/form-data by their parts:
	// the boundary and the order of parts with different names make no difference.
	// Default: bytes.
	CanonicalMultipart bool

	// IgnoreFields are left out of comparisons: members of JSON bodies, by pointers as
	// in "/meta/sent_at" (RFC 6901), and parts of multipart bodies, by name. They need
	// CanonicalJSON and CanonicalMultipart.
	IgnoreFields []string

	// IgnoreQuery are parameters of the query that comparisons leave out.
	IgnoreQuery []string

	// NotStored are statuses of 400 to 499 after which a repeat runs the handler
	// again. Default 401, 403, 408, 409, 421, 423, 425, 426, 428, 429. Empty but
	// not nil: none.
	NotStored []int

	// StoreServerErrors stores answers of 500 and above too. Default: a repeat
	// runs the handler again.
	StoreServerErrors bool

	// ReplayHeaders are stored and repeated besides Content-Type, -Language,
	// -Encoding, -Disposition and -Location, Location, ETag, Last-Modified, Link,
	// Deprecation and Sunset. Cookies, credentials and what belongs to a connection
	// cannot be among them.
	ReplayHeaders []string

	// WithoutBody stores status and headers alone: a repeat gets an empty body.
	WithoutBody bool

	// Rebuild, where set, writes the body again for a repeat, from the resource
	// that the handler has named by [Refer]. Such answers are stored without their
	// body. The stored headers are set before; a status that is written replaces
	// the stored one.
	Rebuild func(w http.ResponseWriter, r *http.Request, resourceType, resourceID string)

	// AllowReplay, where set, says whether the caller may get a stored answer: its
	// rights may have changed since. Else the repeat is answered 403.
	AllowReplay func(*http.Request) bool

	rules   rules
	replays map[string]bool // canonical names of headers
}

const maxOperationLen = 512 // bytes: with tenant and key it must fit an index

func (c Config) withDefaults() (Config, error) {
	var errs []error
	bad := func(format string, args ...any) {
		errs = append(errs, fmt.Errorf("idempotency: Config."+format, args...))
	}
	schema, err := pg.Schema(c.Schema)
	if err != nil {
		bad("%w", err)
	}
	c.Schema = schema
	switch c.IsoLevel {
	case "", pgx.ReadCommitted, pgx.RepeatableRead, pgx.Serializable:
	default:
		bad("IsoLevel is %q, want read committed, repeatable read or serializable", c.IsoLevel)
	}
	lease := 5 * time.Second
	if c.TwoPhase {
		lease = 30 * time.Second
	}
	for _, d := range []struct {
		name            string
		value           *time.Duration
		standard, least time.Duration
	}{
		{"Timeout", &c.Timeout, 30 * time.Second, 10 * time.Millisecond},
		{"Lease", &c.Lease, lease, 10 * time.Millisecond},
		{"Retention", &c.Retention, 24 * time.Hour, time.Second},
		{"Tombstone", &c.Tombstone, 30 * 24 * time.Hour, -maxDuration},
		{"Wait", &c.Wait, 0, 0},
		{"QueueTimeout", &c.QueueTimeout, 10 * time.Second, 10 * time.Millisecond},
	} {
		if *d.value == 0 {
			*d.value = d.standard
		}
		if *d.value < d.least || *d.value > maxDuration {
			bad("%s is %v, want %v to %v", d.name, *d.value, d.least, maxDuration)
		}
	}
	c.Tombstone = max(c.Tombstone, 0)
	if c.Timeout > maxTimeout {
		bad("Timeout is %v, want at most %v", c.Timeout, maxTimeout)
	}
	for _, n := range []struct {
		name  string
		value *int
	}{{"MaxRequest", &c.MaxRequest}, {"MaxResponse", &c.MaxResponse}} {
		if *n.value == 0 {
			*n.value = 1 << 20
		}
		if *n.value < 1 {
			bad("%s is %d, want at least 1", n.name, *n.value)
		}
	}
	if c.Logger == nil {
		c.Logger = slog.Default()
	}
	if c.Reconcile != nil && !c.TwoPhase {
		bad("Reconcile is set, but TwoPhase is not")
	}
	c.forRequests(bad)
	return c, errors.Join(errs...)
}

// maxTimeout is what PostgreSQL's timeouts can hold, rounded.
const (
	maxTimeout  = 500 * time.Hour
	maxDuration = 100 * 365 * 24 * time.Hour
)

// forRequests fills in and checks what concerns Middleware alone.
func (c *Config) forRequests(bad func(format string, args ...any)) {
	if c.Methods == nil {
		c.Methods = []string{http.MethodPost, http.MethodPatch}
	}
	c.Methods = slices.Clone(c.Methods)
	for _, m := range c.Methods {
		if m == "" || strings.ToUpper(m) != m {
			bad("Methods has %q, want names in upper case", m)
		}
		if m == http.MethodOptions {
			bad("Methods has OPTIONS, whose preflight requests carry no key")
		}
	}
	if c.Operation == nil {
		c.Operation = func(r *http.Request) string { return r.Pattern }
	}
	if c.NotStored == nil {
		c.NotStored = []int{401, 403, 408, 409, 421, 423, 425, 426, 428, 429}
	}
	c.NotStored = slices.Clone(c.NotStored)
	for _, status := range c.NotStored {
		if status < 400 || status > 499 {
			bad("NotStored has %d, want 400 to 499", status)
		}
	}
	c.rules = rules{
		json: c.CanonicalJSON, multipart: c.CanonicalMultipart,
		fields: new(fields), parts: make(map[string]bool), parameters: make(map[string]bool),
	}
	for _, f := range c.IgnoreFields {
		pointer := strings.HasPrefix(f, "/")
		switch {
		case f == "":
			bad("IgnoreFields has an empty name")
		case pointer && !c.CanonicalJSON:
			bad("IgnoreFields has %q, but CanonicalJSON is not set", f)
		case !pointer && !c.CanonicalMultipart:
			bad("IgnoreFields has %q, but CanonicalMultipart is not set; pointers into JSON begin with a slash", f)
		case pointer:
			c.rules.fields.add(f)
		default:
			c.rules.parts[f] = true
		}
	}
	for _, p := range c.IgnoreQuery {
		c.rules.parameters[p] = true
	}
	c.replays = make(map[string]bool)
	for _, name := range slices.Concat(replayed, c.ReplayHeaders) {
		name = textproto.CanonicalMIMEHeaderKey(name)
		if name == "" || neverReplayed[name] {
			bad("ReplayHeaders has %q, which is not to be repeated", name)
		}
		c.replays[name] = true
	}
}

// replayed are the headers that describe a resource and its representation.
var replayed = []string{
	"Content-Type", "Content-Language", "Content-Encoding", "Content-Disposition", "Content-Location",
	"Location", "ETag", "Last-Modified", "Link", "Deprecation", "Sunset",
}

// neverReplayed are headers that belong to one caller, one connection or one
// exchange. Those of a connection are dropped from first answers too.
var neverReplayed = map[string]bool{
	"Set-Cookie": true, "Set-Cookie2": true, "Authorization": true, "Authentication-Info": true, "Www-Authenticate": true,
	"Proxy-Authenticate": true, "Proxy-Authorization": true, "Proxy-Authentication-Info": true,
	"Connection": true, "Keep-Alive": true, "Proxy-Connection": true, "Te": true, "Trailer": true,
	"Transfer-Encoding": true, "Upgrade": true, "Content-Length": true, "Date": true,
	"Idempotent-Replayed": true, "Retry-After": true,
}
