package inbox

import (
	"errors"
	"fmt"
	"log/slog"
	"time"

	"github.com/jackc/pgx/v5"
	"go.opentelemetry.io/otel"
	"go.opentelemetry.io/otel/metric"

	"github.com/postroom/postroom"
	"github.com/postroom/postroom/internal/pg"
)

// Config adjusts [Handle] and a [Consumer]. The zero value selects the defaults.
type Config struct {
	// Schema holds Postroom's tables. Default "postroom".
	Schema string

	// IsoLevel is the isolation level of the transactions. Conflicts that it
	// brings are retried and are no fault of the message. Default: the
	// database's or role's own, which is read committed unless it was set.
	IsoLevel pgx.TxIsoLevel

	// LockTimeout bounds how long a transaction waits for a lock: for another
	// copy of its message that is being handled, and in the handler's own
	// statements. The message is then tried again, which is not counted as an
	// attempt. It should be below the time after which the broker gives an
	// unacknowledged message to somebody else. Default 5s, at least 1ms.
	LockTimeout time.Duration

	// Logger receives what cannot be returned. Default slog.Default().
	Logger *slog.Logger

	// MeterProvider makes the instruments that count what a Consumer does, see
	// docs/operating.md. Default OpenTelemetry's global one, which counts nothing
	// unless the program has set another.
	MeterProvider metric.MeterProvider

	// The fields below concern a [Consumer] alone.

	// Concurrency is the most messages that are handled at a time, each with a
	// connection of the pool. It must not exceed the pool's MaxConns; a handler
	// that takes further connections of the pool needs more room there.
	// Default 8, or one less than MaxConns where that is smaller, but at least 1.
	Concurrency int

	// MaxInFlight is the most messages that are held in memory: being handled,
	// waiting for their key or for their retry. One key can fill it with
	// messages that wait behind its first, and then holds up the others until
	// that one is handled or a dead letter. At least Concurrency. Default 16
	// times Concurrency.
	MaxInFlight int

	// MaxAttempts is how often a message is handled before it becomes a dead
	// letter. Attempts are counted in memory, so a restart begins anew; database
	// trouble does not count. Default 10; negative means no limit, so that only
	// [postroom.Permanent] makes a dead letter.
	MaxAttempts int

	// RetryDelay is the most time before the second attempt. It doubles with
	// each further one; the delay itself is drawn at random below that.
	// Default 100ms, at least 1ms.
	RetryDelay time.Duration

	// MaxRetryDelay caps the delay before an attempt, and before the next look
	// at a database that is away. [postroom.RetryAfter] is not capped.
	// Default 30s, at least RetryDelay.
	MaxRetryDelay time.Duration

	// OnDeadLetter says what becomes of the messages behind a dead letter.
	// Default DeadLetterContinue.
	OnDeadLetter DeadLetterPolicy

	// RequeueInterval is how often a Consumer looks for dead letters that were
	// requeued. Default 1s, at least 10ms.
	RequeueInterval time.Duration

	// DeadLetterTopic, where it is not empty, gets a message for each dead
	// letter, through the outbox, with the original's key, payload and headers,
	// an id of its own, and the headers postroom-dead-id, -subscriber, -reason,
	// -attempts and -source. What the outbox cannot take is logged, and stands
	// in the table of dead letters alone, as all of them do.
	DeadLetterTopic string

	// MessageID, where it is not nil, says what identifies a message, in the place
	// of its own ID: see [IDFromHeader] and [IDFromCloudEvent]. It must return the
	// same for every repeat of a message, at once and by the message alone. What
	// it returns must pass [postroom.CheckID]; else, and where it panics, the
	// message has no usable id.
	MessageID func(postroom.Message) string

	// MissingID says what to do with a message that has no usable id.
	// Default IDFromPosition.
	MissingID MissingID

	// DrainTimeout bounds how long Run waits, once its context has ended, for
	// handlers that are running. Their context ends then. Default 30s; negative
	// waits without limit.
	DrainTimeout time.Duration
}

// MissingID is a policy for messages without a usable id, such as other
// programs publish.
type MissingID string

const (
	// IDFromPosition takes the message's place in the broker as its id:
	// "position:topic/partition/offset". It protects against redelivery, not
	// against a producer that publishes twice. A topic or stream that is
	// deleted and made again repeats its positions: use another subscriber then.
	IDFromPosition MissingID = ""

	// DeadLetterWithoutID makes the message a dead letter, under the id that
	// IDFromPosition would have given it.
	DeadLetterWithoutID MissingID = "dead-letter"
)

// DeadLetterPolicy is a policy for what follows on a dead letter.
type DeadLetterPolicy string

const (
	// DeadLetterContinue goes on with the messages of the same key.
	DeadLetterContinue DeadLetterPolicy = ""

	// DeadLetterWait keeps the order of a key beyond its dead letters: later
	// messages of the key are set aside as waiting, durably, and acknowledged.
	// They are handled in order once the dead letter has been requeued with
	// success or deleted. Other keys, and messages without a key, go on. Of one
	// key, all of the subscriber's consumers must have this policy, and the
	// broker must deliver in order.
	DeadLetterWait DeadLetterPolicy = "wait"

	// DeadLetterStop writes no dead letter: Run gives the message back to the
	// broker and returns [ErrStopped]. A message that was a dead letter before,
	// or whose handler ended its transaction, is set aside nevertheless.
	DeadLetterStop DeadLetterPolicy = "stop"
)

func (c Config) withDefaults() (Config, error) {
	var errs []error
	bad := func(format string, args ...any) {
		errs = append(errs, fmt.Errorf("inbox: Config."+format, args...))
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
	if c.LockTimeout == 0 {
		c.LockTimeout = 5 * time.Second
	}
	if c.LockTimeout < time.Millisecond || c.LockTimeout > maxDuration {
		bad("LockTimeout is %v, want 1ms to %v", c.LockTimeout, maxDuration)
	}
	if c.Logger == nil {
		c.Logger = slog.Default()
	}
	if c.MeterProvider == nil {
		c.MeterProvider = otel.GetMeterProvider()
	}
	return c, errors.Join(errs...)
}

// maxDuration is what PostgreSQL's lock_timeout can hold, rounded.
const maxDuration = 500 * time.Hour

const maxInFlight = 1 << 20

// forConsumer fills in and checks what concerns a Consumer alone.
func (c Config) forConsumer(maxConns int) (Config, error) {
	c, err := c.withDefaults()
	errs := []error{err}
	bad := func(format string, args ...any) {
		errs = append(errs, fmt.Errorf("inbox: Config."+format, args...))
	}
	if c.Concurrency == 0 {
		c.Concurrency = max(1, min(8, maxConns-1))
	}
	if c.Concurrency < 1 || c.Concurrency > maxConns {
		bad("Concurrency is %d, want 1 to the pool's MaxConns, which is %d", c.Concurrency, maxConns)
	}
	if c.MaxInFlight == 0 {
		c.MaxInFlight = 16 * c.Concurrency
	}
	if c.MaxInFlight < c.Concurrency || c.MaxInFlight < 1 || c.MaxInFlight > maxInFlight {
		bad("MaxInFlight is %d, want Concurrency, which is %d, to %d", c.MaxInFlight, c.Concurrency, maxInFlight)
	}
	if c.MaxAttempts == 0 {
		c.MaxAttempts = 10
	}
	if c.RetryDelay == 0 {
		c.RetryDelay = 100 * time.Millisecond
	}
	if c.RetryDelay < time.Millisecond {
		bad("RetryDelay is %v, want at least 1ms", c.RetryDelay)
	}
	if c.MaxRetryDelay == 0 {
		c.MaxRetryDelay = max(30*time.Second, c.RetryDelay)
	}
	if c.MaxRetryDelay < max(c.RetryDelay, time.Millisecond) {
		bad("MaxRetryDelay is %v, want at least 1ms and RetryDelay, which is %v", c.MaxRetryDelay, c.RetryDelay)
	}
	switch c.OnDeadLetter {
	case DeadLetterContinue, DeadLetterWait, DeadLetterStop:
	default:
		bad("OnDeadLetter is %q, want DeadLetterContinue, DeadLetterWait or DeadLetterStop", c.OnDeadLetter)
	}
	if c.RequeueInterval == 0 {
		c.RequeueInterval = time.Second
	}
	if c.RequeueInterval < 10*time.Millisecond {
		bad("RequeueInterval is %v, want at least 10ms", c.RequeueInterval)
	}
	if c.DeadLetterTopic != "" {
		if err := checkTopic(c.DeadLetterTopic); err != nil {
			bad("DeadLetterTopic %w", err)
		}
	}
	if c.MissingID != IDFromPosition && c.MissingID != DeadLetterWithoutID {
		bad("MissingID is %q, want IDFromPosition or DeadLetterWithoutID", c.MissingID)
	}
	if c.DrainTimeout == 0 {
		c.DrainTimeout = 30 * time.Second
	}
	return c, errors.Join(errs...)
}
