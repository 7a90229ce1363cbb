package webhook

import (
	"crypto/hmac"
	"crypto/sha256"
	"errors"
	"fmt"
	"net/http"
	"strconv"
	"strings"
	"time"
)

// Errors of [Scheme.VerifyAt], to be tested for with errors.Is. Their texts hold
// nothing that was computed from a secret.
var (
	// ErrSignature says that no signature proves the delivery.
	ErrSignature = errors.New("webhook: no valid signature")

	// ErrTimestamp says that a proven delivery is older, or newer, than the tolerance
	// allows. It is a replay, or a clock is wrong: senders sign each attempt anew.
	ErrTimestamp = errors.New("webhook: timestamp outside the tolerance")

	// ErrIdentity says that a proven delivery does not name an id by which a repeat
	// could be known.
	ErrIdentity = errors.New("webhook: no usable delivery id")
)

// A Secret is what a sender signs with, in the spelling in which the sender shows it.
type Secret struct {
	// Name is kept with each delivery that the secret proves, to see when an old one
	// is not used any more. Default "1", "2" and so on.
	Name string

	// Value is the secret. It is never logged.
	Value string

	// From and Until bound when it counts, by the time of receipt, From included and
	// Until not. Zero: no bound.
	From, Until time.Time
}

func (s *Secret) validAt(t time.Time) bool {
	return (s.From.IsZero() || !t.Before(s.From)) && (s.Until.IsZero() || t.Before(s.Until))
}

// A Proof says what a signature proved.
type Proof struct {
	// ID is the same for all deliveries of one event to one endpoint.
	ID string

	// Unsigned says that the signature does not cover ID. The body then counts too: one
	// that was received before is a repeat under any ID.
	Unsigned bool

	// Secret is the name of the secret that matched.
	Secret string

	// Sent is the time that the sender signed, or zero.
	Sent time.Time

	challenge string // to be answered with, instead of being kept
}

// A Scheme is how one sender signs, with the secrets that prove it: [GitHub],
// [Stripe], [StandardWebhooks], [Svix], [Slack] or [Custom]. Set its fields before
// the first use; then it is safe for concurrent use.
type Scheme struct {
	// Tolerance is how far the sender's timestamp may be from the time of receipt,
	// both ways, in whole seconds. A delivery that somebody captured can be replayed
	// for twice as long, so receipts must be kept for longer. Default 5min, at
	// least 1s. GitHub has no timestamps.
	Tolerance time.Duration

	// DottedIDs lets ids with a dot pass in Standard Webhooks and Svix, where dots
	// stand between what is signed: who can make a sender sign an id of their choice can
	// then move its end into the timestamp. Default: they are no usable ids.
	DottedIDs bool

	name    string
	kind    string // header field that says the kind of event
	secrets []Secret
	keys    []key // of secrets
	err     error // what is wrong with them
	verify  func(*Scheme, http.Header, []byte, time.Time) (Proof, error)
	sign    func(*Scheme, http.Header, string, []byte, time.Time) error
}

const (
	// mostSecrets is how many secrets a scheme may have, and mostSignatures how many
	// signatures of a delivery are looked at.
	mostSecrets    = 4
	mostSignatures = 16
)

// A key checks and makes signatures.
type key interface {
	version() string
	proves(signature, signed []byte) bool
	signs(signed []byte) ([]byte, error)
}

// macKey is HMAC-SHA256.
type macKey struct {
	secret []byte
	label  string
}

func (k *macKey) version() string { return k.label }

func (k *macKey) signs(signed []byte) ([]byte, error) {
	m := hmac.New(sha256.New, k.secret)
	m.Write(signed)
	return m.Sum(nil), nil
}

func (k *macKey) proves(signature, signed []byte) bool {
	want, _ := k.signs(signed)
	return hmac.Equal(signature, want)
}

// newScheme returns a scheme whose keys are made of its secrets, and that knows
// what is wrong with them.
func newScheme(s Scheme, secrets []Secret, toKey func(value string) (key, error)) *Scheme {
	s.secrets = append([]Secret(nil), secrets...)
	var errs []error
	if len(secrets) == 0 || len(secrets) > mostSecrets {
		errs = append(errs, fmt.Errorf("webhook: %s: %d secrets, want 1 to %d", s.name, len(secrets), mostSecrets))
	}
	for i := range s.secrets {
		secret := &s.secrets[i]
		if secret.Name == "" {
			secret.Name = strconv.Itoa(i + 1)
		}
		k, err := toKey(secret.Value)
		switch {
		case secret.Value == "":
			err = errors.New("it is empty")
		case strings.TrimSpace(secret.Value) != secret.Value:
			err = errors.New("it begins or ends with white space")
		case err == nil && !secret.Until.IsZero() && !secret.From.Before(secret.Until):
			err = errors.New("Until is not after From")
		}
		if err != nil {
			errs = append(errs, fmt.Errorf("webhook: %s: secret %q: %w", s.name, secret.Name, err))
		}
		s.keys = append(s.keys, k)
	}
	s.err = errors.Join(errs...)
	return &s
}

// plainKey takes the secret as it is.
func plainKey(label string) func(string) (key, error) {
	return func(value string) (key, error) { return &macKey{[]byte(value), label}, nil }
}

// Custom returns a scheme of a sender's own. verify gets what was received, and the
// time; it must compare in constant time (hmac.Equal), should check a timestamp that
// is signed, and its errors should wrap those of this package: each other one counts
// as [ErrSignature]. Tolerance is not looked at.
func Custom(name string, verify func(header http.Header, body []byte, at time.Time) (Proof, error)) *Scheme {
	s := &Scheme{name: name}
	if verify == nil {
		s.err = fmt.Errorf("webhook: %s: verify is nil", name)
		return s
	}
	s.verify = func(_ *Scheme, header http.Header, body []byte, at time.Time) (Proof, error) {
		return verify(header, body, at)
	}
	return s
}

func (s *Scheme) check() error {
	errs := []error{s.err}
	if s.verify == nil && s.err == nil {
		errs = append(errs, errors.New("webhook: the scheme is empty: it is made by GitHub, Stripe and so on"))
	}
	if s.Tolerance != 0 && s.Tolerance < time.Second {
		errs = append(errs, fmt.Errorf("webhook: %s: Tolerance is %v, want at least 1s", s.name, s.Tolerance))
	}
	return errors.Join(errs...)
}

// VerifyAt checks a delivery that was received at the given time: now, or, for one
// that was kept, when it came. header and body are exactly what was received. The
// error is one of [ErrSignature], [ErrTimestamp] and [ErrIdentity], wrapped, or says
// what is wrong with the scheme; the proof is then empty.
func (s *Scheme) VerifyAt(header http.Header, body []byte, at time.Time) (Proof, error) {
	if err := s.check(); err != nil {
		return Proof{}, err
	}
	proof, err := s.verify(s, header, body, at)
	switch {
	case err == nil && proof.challenge == "" && !usableID(proof.ID):
		err = fmt.Errorf("%w: it is empty, longer than %d bytes, or not printable", ErrIdentity, mostID)
	case err == nil:
		return proof, nil
	case !errors.Is(err, ErrSignature) && !errors.Is(err, ErrTimestamp) && !errors.Is(err, ErrIdentity):
		err = fmt.Errorf("%w: %w", ErrSignature, err)
	}
	return Proof{}, err
}

// mostID is the most bytes of a delivery id.
const mostID = 255

func usableID(id string) bool {
	for i := range len(id) {
		if id[i] < 0x21 || id[i] > 0x7e {
			return false
		}
	}
	return id != "" && len(id) <= mostID
}

// Sign sets the header fields by which a delivery of the body is proven, for tests
// and for senders. id is the delivery's where the scheme has a field for it. Where it
// allows several signatures there is one for each secret that is valid at the time, so
// that receivers may change theirs one after the other; else that of the first.
func (s *Scheme) Sign(header http.Header, id string, body []byte, at time.Time) error {
	if err := s.check(); err != nil {
		return err
	}
	if s.sign == nil {
		return fmt.Errorf("webhook: %s: only its sender can sign", s.name)
	}
	return s.sign(s, header, id, body, at)
}

// matches returns the name of the secret that proves one of the signatures, each of
// which is compared in constant time, or "".
func (s *Scheme) matches(signatures []signature, signed []byte, at time.Time) string {
	for _, sig := range signatures[:min(len(signatures), mostSignatures)] {
		for i, k := range s.keys {
			if k.version() == sig.version && s.secrets[i].validAt(at) && k.proves(sig.value, signed) {
				return s.secrets[i].Name
			}
		}
	}
	return ""
}

type signature struct {
	version string
	value   []byte
}

// made returns a signature by each secret that is valid.
func (s *Scheme) made(signed []byte, at time.Time) ([]signature, error) {
	var all []signature
	for i, k := range s.keys {
		if !s.secrets[i].validAt(at) {
			continue
		}
		value, err := k.signs(signed)
		if err != nil {
			return nil, fmt.Errorf("webhook: %s: secret %q: %w", s.name, s.secrets[i].Name, err)
		}
		all = append(all, signature{k.version(), value})
	}
	if len(all) == 0 {
		return nil, fmt.Errorf("webhook: %s: no secret is valid at that time", s.name)
	}
	return all, nil
}

// seconds reads a timestamp of digits only, so that no other spelling is the same.
func seconds(text string) (int64, bool) {
	if len(text) < 1 || len(text) > 12 || strings.Trim(text, "0123456789") != "" {
		return 0, false
	}
	n, err := strconv.ParseInt(text, 10, 64)
	return n, err == nil
}

// fresh checks a timestamp that was proven.
func (s *Scheme) fresh(sent int64, at time.Time) error {
	tolerance := s.Tolerance
	if tolerance == 0 {
		tolerance = 5 * time.Minute
	}
	if skew := at.Unix() - sent; skew > int64(tolerance/time.Second) || -skew > int64(tolerance/time.Second) {
		return fmt.Errorf("%w: it differs by %d s, at most %v is allowed", ErrTimestamp, skew, tolerance)
	}
	return nil
}

// field returns the one value of a header field.
func field(header http.Header, name string) (string, error) {
	values := header.Values(name)
	if len(values) != 1 || values[0] == "" {
		return "", fmt.Errorf("%w: %d header fields %s, want one that is not empty", ErrSignature, len(values), name)
	}
	return values[0], nil
}
