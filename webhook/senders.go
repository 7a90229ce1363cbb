package webhook

import (
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"net/http"
	"strconv"
	"strings"
	"time"
)

// GitHub returns the scheme of GitHub's webhooks: X-Hub-Signature-256 over the body.
// It has no timestamp, and X-GitHub-Delivery, the id, and X-GitHub-Hook-ID are not
// signed, see [Proof]. Hooks that send the same bytes to one endpoint are one
// delivery. Signatures by SHA-1 prove nothing.
func GitHub(secrets ...Secret) *Scheme {
	return newScheme(Scheme{
		name: "GitHub", kind: "X-GitHub-Event", verify: verifyGitHub, sign: signGitHub,
	}, secrets, plainKey("sha256"))
}

func verifyGitHub(s *Scheme, header http.Header, body []byte, at time.Time) (Proof, error) {
	text, err := field(header, "X-Hub-Signature-256")
	if err != nil {
		return Proof{}, err
	}
	digits, ok := strings.CutPrefix(text, "sha256=")
	value, err := hex.DecodeString(digits)
	if !ok || err != nil {
		return Proof{}, fmt.Errorf("%w: X-Hub-Signature-256 is not sha256= and hexadecimal digits", ErrSignature)
	}
	name := s.matches([]signature{{"sha256", value}}, body, at)
	if name == "" {
		return Proof{}, ErrSignature
	}
	id := header.Get("X-GitHub-Delivery")
	if id == "" {
		return Proof{}, fmt.Errorf("%w: no header field X-GitHub-Delivery", ErrIdentity)
	}
	if hook := header.Get("X-GitHub-Hook-ID"); hook != "" {
		id = hook + "/" + id // several hooks send one event under one id
	}
	return Proof{ID: id, Unsigned: true, Secret: name}, nil
}

func signGitHub(s *Scheme, header http.Header, id string, body []byte, at time.Time) error {
	made, err := s.made(body, at)
	if err != nil {
		return err
	}
	header.Set("X-Hub-Signature-256", "sha256="+hex.EncodeToString(made[0].value))
	header.Set("X-GitHub-Delivery", id)
	return nil
}

// Stripe returns the scheme of Stripe's webhooks: Stripe-Signature, of which the
// signatures v1 count, over the timestamp and the body. The id is that of the event in
// the body, and the account's before it where there is one.
func Stripe(secrets ...Secret) *Scheme {
	return newScheme(Scheme{name: "Stripe", verify: verifyStripe, sign: signStripe}, secrets, plainKey("v1"))
}

func verifyStripe(s *Scheme, header http.Header, body []byte, at time.Time) (Proof, error) {
	text, err := field(header, "Stripe-Signature")
	if err != nil {
		return Proof{}, err
	}
	timestamp, signatures := parseStripe(text)
	sent, ok := seconds(timestamp)
	if !ok || len(signatures) == 0 {
		return Proof{}, fmt.Errorf("%w: Stripe-Signature has no t of digits, or no v1", ErrSignature)
	}
	name := s.matches(signatures, append([]byte(timestamp+"."), body...), at)
	if name == "" {
		return Proof{}, ErrSignature
	}
	if err := s.fresh(sent, at); err != nil {
		return Proof{}, err
	}
	var event struct{ ID, Account string }
	if err := json.Unmarshal(body, &event); err != nil || event.ID == "" {
		return Proof{}, fmt.Errorf("%w: the body is no JSON object with an id", ErrIdentity)
	}
	if event.Account != "" {
		event.ID = event.Account + "/" + event.ID
	}
	return Proof{ID: event.ID, Secret: name, Sent: time.Unix(sent, 0)}, nil
}

// parseStripe reads name=value pairs. What it cannot read is no signature; a second
// timestamp makes the first one worthless.
func parseStripe(text string) (timestamp string, signatures []signature) {
	stamps := 0
	for pair := range strings.SplitSeq(text, ",") {
		name, value, _ := strings.Cut(pair, "=")
		switch name {
		case "t":
			timestamp = value
			stamps++
		case "v1":
			if b, err := hex.DecodeString(value); err == nil && len(b) == sha256.Size {
				signatures = append(signatures, signature{name, b})
			}
		}
	}
	if stamps != 1 {
		return "", nil
	}
	return timestamp, signatures
}

func signStripe(s *Scheme, header http.Header, _ string, body []byte, at time.Time) error {
	timestamp := strconv.FormatInt(at.Unix(), 10)
	made, err := s.made(append([]byte(timestamp+"."), body...), at)
	if err != nil {
		return err
	}
	text := "t=" + timestamp
	for _, sig := range made {
		text += ",v1=" + hex.EncodeToString(sig.value)
	}
	header.Set("Stripe-Signature", text)
	return nil
}

// Slack returns the scheme of Slack's requests: X-Slack-Signature over the timestamp
// and the body. The id is the event's in the body, with its app and team; requests
// that have none, such as commands, are known by the hash of their body. The handler
// answers Slack's question whether the endpoint is there (url_verification).
func Slack(secrets ...Secret) *Scheme {
	return newScheme(Scheme{name: "Slack", verify: verifySlack, sign: signSlack}, secrets, plainKey("v0"))
}

func verifySlack(s *Scheme, header http.Header, body []byte, at time.Time) (Proof, error) {
	text, err := field(header, "X-Slack-Signature")
	if err != nil {
		return Proof{}, err
	}
	timestamp, err := field(header, "X-Slack-Request-Timestamp")
	if err != nil {
		return Proof{}, err
	}
	sent, ok := seconds(timestamp)
	digits, version := strings.CutPrefix(text, "v0=")
	value, err := hex.DecodeString(digits)
	if !ok || !version || err != nil {
		return Proof{}, fmt.Errorf("%w: X-Slack-Signature is not v0= and hexadecimal digits, or the timestamp not of digits", ErrSignature)
	}
	name := s.matches([]signature{{"v0", value}}, append([]byte("v0:"+timestamp+":"), body...), at)
	if name == "" {
		return Proof{}, ErrSignature
	}
	if err := s.fresh(sent, at); err != nil {
		return Proof{}, err
	}
	proof := Proof{Secret: name, Sent: time.Unix(sent, 0)}
	var event struct {
		Type      string
		Challenge string
		App       string `json:"api_app_id"`
		Team      string `json:"team_id"`
		Event     string `json:"event_id"`
	}
	switch err := json.Unmarshal(body, &event); {
	case err == nil && event.Type == "url_verification":
		proof.challenge = event.Challenge
	case err == nil && event.Event != "":
		proof.ID = strings.Join([]string{event.App, event.Team, event.Event}, "/")
	default:
		proof.ID = bodyID(body)
	}
	return proof, nil
}

// bodyID stands for the id of a delivery that has none.
func bodyID(body []byte) string {
	sum := sha256.Sum256(body)
	return "sha256:" + hex.EncodeToString(sum[:])
}

func signSlack(s *Scheme, header http.Header, _ string, body []byte, at time.Time) error {
	timestamp := strconv.FormatInt(at.Unix(), 10)
	made, err := s.made(append([]byte("v0:"+timestamp+":"), body...), at)
	if err != nil {
		return err
	}
	header.Set("X-Slack-Signature", "v0="+hex.EncodeToString(made[0].value))
	header.Set("X-Slack-Request-Timestamp", timestamp)
	return nil
}
