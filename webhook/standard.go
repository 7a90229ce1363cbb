package webhook

import (
	"crypto/ed25519"
	"encoding/base64"
	"errors"
	"fmt"
	"net/http"
	"strconv"
	"strings"
	"time"
)

// StandardWebhooks returns the scheme of the Standard Webhooks specification:
// webhook-signature over webhook-id, webhook-timestamp and the body. A secret whsec_…
// proves by HMAC (v1), a public key whpk_… by Ed25519 (v1a); a private key whsk_…
// signs so as well. What no secret is for proves nothing: with public keys alone, no
// v1 signature counts.
func StandardWebhooks(secrets ...Secret) *Scheme {
	return newScheme(Scheme{
		name: "Standard Webhooks", verify: verifyStandard("webhook-"), sign: signStandard("webhook-"),
	}, secrets, standardKey)
}

// Svix returns the scheme of webhooks that Svix sends: that of Standard Webhooks in
// the header fields svix-id, svix-timestamp and svix-signature, or in webhook-… where
// there are none of these.
func Svix(secrets ...Secret) *Scheme {
	svix, standard := verifyStandard("svix-"), verifyStandard("webhook-")
	return newScheme(Scheme{
		name: "Svix",
		verify: func(s *Scheme, header http.Header, body []byte, at time.Time) (Proof, error) {
			if len(header.Values("svix-signature")) == 0 {
				return standard(s, header, body, at)
			}
			return svix(s, header, body, at)
		},
		sign: signStandard("svix-"),
	}, secrets, standardKey)
}

const (
	leastSecret = 24 // bytes, by the specification
	mostSecret  = 64
)

func standardKey(value string) (key, error) {
	prefix, text, _ := strings.Cut(value, "_")
	raw, err := base64.StdEncoding.Strict().DecodeString(text)
	switch {
	case strings.Contains(prefix, ","):
		return nil, errors.New("it begins with a version and a comma: leave these out, it begins with whsec_")
	case prefix != "whsec" && prefix != "whpk" && prefix != "whsk":
		return nil, errors.New("it does not begin with whsec_, whpk_ or whsk_")
	case err != nil:
		return nil, fmt.Errorf("what follows %s_ is not base64", prefix)
	case prefix == "whsec" && (len(raw) < leastSecret || len(raw) > mostSecret):
		return nil, fmt.Errorf("it has %d bytes, want %d to %d", len(raw), leastSecret, mostSecret)
	case prefix == "whpk" && len(raw) != ed25519.PublicKeySize:
		return nil, fmt.Errorf("the public key has %d bytes, want %d", len(raw), ed25519.PublicKeySize)
	case prefix == "whsk" && len(raw) != ed25519.PrivateKeySize:
		return nil, fmt.Errorf("the private key has %d bytes, want %d", len(raw), ed25519.PrivateKeySize)
	case prefix == "whpk":
		return &pairKey{public: raw}, nil
	case prefix == "whsk":
		private := ed25519.NewKeyFromSeed(raw[:ed25519.SeedSize])
		if !private.Equal(ed25519.PrivateKey(raw)) {
			return nil, errors.New("the private key's halves do not belong together")
		}
		return &pairKey{private: private, public: private.Public().(ed25519.PublicKey)}, nil
	}
	return &macKey{raw, "v1"}, nil
}

// pairKey is Ed25519.
type pairKey struct {
	private ed25519.PrivateKey // nil where only the sender has it
	public  ed25519.PublicKey
}

func (k *pairKey) version() string { return "v1a" }

func (k *pairKey) proves(signature, signed []byte) bool {
	return len(signature) == ed25519.SignatureSize && ed25519.Verify(k.public, signed, signature)
}

func (k *pairKey) signs(signed []byte) ([]byte, error) {
	if k.private == nil {
		return nil, errors.New("signing takes the private key, whsk_…")
	}
	return ed25519.Sign(k.private, signed), nil
}

func verifyStandard(prefix string) func(*Scheme, http.Header, []byte, time.Time) (Proof, error) {
	return func(s *Scheme, header http.Header, body []byte, at time.Time) (Proof, error) {
		var id, timestamp, text string
		for _, f := range []struct {
			name  string
			value *string
		}{{"id", &id}, {"timestamp", &timestamp}, {"signature", &text}} {
			var err error
			if *f.value, err = field(header, prefix+f.name); err != nil {
				return Proof{}, err
			}
		}
		sent, ok := seconds(timestamp)
		if !ok {
			return Proof{}, fmt.Errorf("%w: %stimestamp is not of digits", ErrSignature, prefix)
		}
		name := s.matches(parseStandard(text), append([]byte(id+"."+timestamp+"."), body...), at)
		if name == "" {
			return Proof{}, ErrSignature
		}
		if err := s.fresh(sent, at); err != nil {
			return Proof{}, err
		}
		if strings.Contains(id, ".") && !s.DottedIDs {
			return Proof{}, fmt.Errorf("%w: %sid has a dot, which Scheme.DottedIDs would allow", ErrIdentity, prefix)
		}
		return Proof{ID: id, Secret: name, Sent: time.Unix(sent, 0)}, nil
	}
}

// parseStandard reads version,base64 with spaces between. What it cannot read is no
// signature.
func parseStandard(text string) (signatures []signature) {
	for part := range strings.SplitSeq(text, " ") {
		version, value, ok := strings.Cut(part, ",")
		b, err := base64.StdEncoding.Strict().DecodeString(value)
		if ok && err == nil && len(b) > 0 {
			signatures = append(signatures, signature{version, b})
		}
	}
	return signatures
}

func signStandard(prefix string) func(*Scheme, http.Header, string, []byte, time.Time) error {
	return func(s *Scheme, header http.Header, id string, body []byte, at time.Time) error {
		timestamp := strconv.FormatInt(at.Unix(), 10)
		made, err := s.made(append([]byte(id+"."+timestamp+"."), body...), at)
		if err != nil {
			return err
		}
		var parts []string
		for _, sig := range made {
			parts = append(parts, sig.version+","+base64.StdEncoding.EncodeToString(sig.value))
		}
		header.Set(prefix+"id", id)
		header.Set(prefix+"timestamp", timestamp)
		header.Set(prefix+"signature", strings.Join(parts, " "))
		return nil
	}
}
