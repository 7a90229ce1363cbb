package webhook_test

import (
	"crypto/hmac"
	"crypto/sha256"
	"encoding/base64"
	"errors"
	"fmt"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/postroom/postroom/webhook"
)

const (
	githubDocs  = "It's a Secret to Everybody"
	standardKey = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"
	standardOld = "whsec_C2FVsBQIhrscChlQIMV+b5sSYspob7oD"
	privateKey  = "whsk_6Xb/dCcHpPea21PS1N9VY/NZW723CEc77N4rJCubMbfVKIDij2HKpMKkioLlX0dRqSKJp4AJ6p9lMicMFs6Kvg=="
	publicKey   = "whpk_1SiA4o9hyqTCpIqC5V9HUakiiaeACeqfZTInDBbOir4="
	standardID  = "msg_p5jXN8AQM9LWM0D4loKWxJek"
	standardMsg = `{"test": 2432232314}`
)

// stripeEvent is an event as Stripe sends it, byte by byte.
var stripeEvent = decode("ewogICJpZCI6ICJldnRfMTIzIiwKICAib2JqZWN0IjogImV2ZW50IiwKICAiYWNjb3VudCI6ICJhY2N0XzEyMyIsCiAgImFwaV92ZXJza" +
	"W9uIjogIjIwMTctMDUtMjUiLAogICJjcmVhdGVkIjogMTUzMzIwNDYyMCwKICAiZGF0YSI6IHsKICAgICJvYmplY3QiOiB7CiAgICAgICJpZCI6ICJjdXNfMTIzIiwKI" +
	"CAgICAgIm9iamVjdCI6ICJjdXN0b21lciIsCiAgICAgICJjcmVhdGVkIjogMTIzNDU2Nzg5LAogICAgICAiZW1haWwiOiAidGVzdEBzdHJpcGUuY29tIiwKICAgICAgI" +
	"mxpdmVtb2RlIjogZmFsc2UsCiAgICAgICJtZXRhZGF0YSI6IHt9CiAgICB9CiAgfSwKICAibGl2ZW1vZGUiOiBmYWxzZSwKICAicGVuZGluZ193ZWJob29rcyI6IDEsC" +
	"iAgInJlcXVlc3QiOiB7CiAgICAiaWQiOiAicmVxXzEyMyIsCiAgICAiaWRlbXBvdGVuY3lfa2V5IjogImlkZW1wb3RlbmN5LWtleS0xMjMiCiAgfSwKICAidHlwZSI6I" +
	"CJjdXN0b21lci5jcmVhdGVkIgp9Cg==")

const slackCommand = "token=xyzz0WbapA4vBCDEFasx0q6G&team_id=T1DC2JH3J&team_domain=testteamnow&channel_id=G8PSS9T3V&channel_name=foobar" +
	"&user_id=U2CERLKJA&user_name=roadrunner&command=%2Fwebhook-collect&text=&response_url=https%3A%2F%2Fhooks.slack.com%2Fcommands%2FT1DC2JH3J" +
	"%2F397700885554%2F96rGlfmibIGlgcZRskXaIFfN&trigger_id=398738663015.47445629121.803a0bc887a14d10d2c447fce8b6703c"

const slackEvent = `{"token":"aF5ynEYQH0dFN9imlgcADxDB","team_id":"XXXXXXXXX","api_app_id":"YYYYYYYYY","event":{"type":"app_mention",` +
	`"user":"AAAAAAAAA","text":"<@EEEEEEEEE> hello world","client_msg_id":"477cc591-ch73-a14z-4db8-g0cd76321bec","ts":"1531431954.000073",` +
	`"channel":"TTTTTTTTT","event_ts":"1531431954.000073"},"type":"event_callback","event_id":"TvBP7LRED7","event_time":1531431954,` +
	`"authed_users":["EEEEEEEEE"]}`

func decode(s string) string {
	b, err := base64.StdEncoding.DecodeString(s)
	if err != nil {
		panic(err)
	}
	return string(b)
}

func one(value string) webhook.Secret { return webhook.Secret{Value: value} }

func header(pairs ...string) http.Header {
	h := make(http.Header)
	for i := 0; i < len(pairs); i += 2 {
		h.Add(pairs[i], pairs[i+1])
	}
	return h
}

func githubHeader(signature string) http.Header {
	return header("X-Hub-Signature-256", signature, "X-GitHub-Delivery", "d1", "X-GitHub-Hook-ID", "7")
}

func standardHeader(id, timestamp, signature string) http.Header {
	return header("webhook-id", id, "webhook-timestamp", timestamp, "webhook-signature", signature)
}

// Signatures that others have published, or that were computed by the same rules.
func TestVectors(t *testing.T) {
	t.Parallel()
	for _, v := range []struct {
		name   string
		scheme *webhook.Scheme
		at     int64
		header http.Header
		body   string
		id     string
	}{
		{
			"G1", webhook.GitHub(one(githubDocs)), 0,
			githubHeader("sha256=757107ea0eb2509fc211221cce984b8a37570b6d7586c22c46f4379c8b043e17"), "Hello, World!", "7/d1",
		},
		{
			"G2", webhook.GitHub(one("0123456789abcdef")), 0,
			githubHeader("sha256=b1f8020f5b4cd42042f807dd939015c4a418bc1ff7f604dd55b0a19b5d953d9b"), `{"yo":true}`, "7/d1",
		},
		{
			"D3", webhook.GitHub(one(githubDocs)), 0,
			githubHeader("sha256=c70eb59e246fed53f1c9f5ad5aef62e59f0843eb0f6f458719dfb4169d485549"), `{"t":"🚀"}`, "7/d1",
		},
		{
			"D4", webhook.GitHub(one(githubDocs)), 0,
			githubHeader("sha256=66a0c074deaa0f489ead6537e0d32f9a344b90bbeda705b6ed45ecd3b413fb40"), "", "7/d1",
		},
		{"S1", webhook.Stripe(one("webhook_secret")), 1533204620, header("Stripe-Signature",
			"t=1533204620,v1=2220f87ef101a04665f11cdf770523143f875572008577fa0f20882ddb9cc3c7,v0=63f3a723"), stripeEvent, "acct_123/evt_123"},
		{
			"D1", webhook.Stripe(one("whsec_test_secret")), 1614265330, header("Stripe-Signature",
				"t=1614265330,v1=3c5817089d739023dd6190f70a3757e04f7a2fd8b5dab12c2e000f51970dccff"),
			`{"id":"evt_test_webhook","object":"event"}`, "evt_test_webhook",
		},
		{
			"W1", webhook.StandardWebhooks(one(standardKey)), 1614265330,
			standardHeader(standardID, "1614265330", "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE="), standardMsg, standardID,
		},
		{"W1 by Svix", webhook.Svix(one(standardKey)), 1614265330, header("svix-id", standardID, "svix-timestamp", "1614265330",
			"svix-signature", "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE="), standardMsg, standardID},
		{
			"W1 by Svix in the other fields", webhook.Svix(one(standardKey)), 1614265330,
			standardHeader(standardID, "1614265330", "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE="), standardMsg, standardID,
		},
		{"W2", webhook.StandardWebhooks(one(publicKey)), 1614265330, standardHeader(standardID, "1614265330",
			"v1a,hnO3f9T8Ytu9HwrXslvumlUpqtNVqkhqw/enGzPCXe5BdqzCInXqYXFymVJaA7AZdpXwVLPo3mNl8EM+m7TBAg=="), standardMsg, standardID},
		{
			"D5", webhook.StandardWebhooks(one(standardOld)), 1614265330,
			standardHeader(standardID, "1614265330", "v1,78nXHjpFP0tVJQW5D0SBwmVyyW87BV/rL6MgfM/Bw44="), standardMsg, standardID,
		},
		{
			"K1", webhook.Slack(one("8f742231b10e8888abcd99yyyzzz85a5")), 1531420618, header("X-Slack-Request-Timestamp", "1531420618",
				"X-Slack-Signature", "v0=a2114d57b48eac39b9ad189dd8316235a7b4a8d21a10bd27519666489c69b503"), slackCommand,
			"sha256:" + hash(slackCommand),
		},
		{
			"K2", webhook.Slack(one("e6b19c573432dcc6b075501d51b51bb8")), 1531431954, header("X-Slack-Request-Timestamp", "1531431954",
				"X-Slack-Signature", "v0=adada4ed31709aef585c2580ca3267678c6a8eaeb7e0c1aca3ee57b656886b2c"), slackEvent,
			"YYYYYYYYY/XXXXXXXXX/TvBP7LRED7",
		},
		{
			"D6", webhook.StandardWebhooks(one(standardKey)), 1674087231,
			standardHeader("msg_2KWPBgLlAfxdpx2AI54pPJ85f4W", "1674087231", "v1,ARw42xaAApl/nxRo+iPGYwSaMQaOwMo2eyH5JBRA+bQ="),
			`{"type":"contact.created","timestamp":"2022-11-03T20:26:10.344522Z","data":{"id":"1f81eb52-5198-4599-803e-771906343485"}}`,
			"msg_2KWPBgLlAfxdpx2AI54pPJ85f4W",
		},
	} {
		t.Run(v.name, func(t *testing.T) {
			t.Parallel()
			at := time.Unix(v.at, 0)
			proof, err := v.scheme.VerifyAt(v.header, []byte(v.body), at)
			if err != nil || proof.ID != v.id || proof.Secret != "1" {
				t.Fatalf("VerifyAt = %+v, %v, want id %q", proof, err, v.id)
			}
			if v.at != 0 && !proof.Sent.Equal(at) {
				t.Errorf("sent at %v, want %v", proof.Sent, at)
			}
			for name := range v.header { // one bit changed anywhere proves nothing
				if !strings.Contains(strings.ToLower(name), "signature") {
					continue
				}
				changed := v.header.Clone()
				text := []byte(changed.Get(name))
				text[len(text)-5] ^= 1
				changed.Set(name, string(text))
				if v.name == "S1" {
					continue // what is last there is not looked at
				}
				if _, err := v.scheme.VerifyAt(changed, []byte(v.body), at); !errors.Is(err, webhook.ErrSignature) {
					t.Errorf("with another signature: %v", err)
				}
			}
			if _, err := v.scheme.VerifyAt(v.header, []byte(v.body+" "), at); !errors.Is(err, webhook.ErrSignature) {
				t.Errorf("with another body: %v", err)
			}
		})
	}
}

// D2: the signature of an empty body counts, though it names no event.
func TestVectorD2(t *testing.T) {
	t.Parallel()
	_, err := webhook.Stripe(one("whsec_test_secret")).VerifyAt(header("Stripe-Signature",
		"t=1614265330,v1=2f9d16b2d4c155166668449b6c0b717e91af5563cb1f78a3065927985f4a5900"), nil, time.Unix(1614265330, 0))
	if !errors.Is(err, webhook.ErrIdentity) {
		t.Errorf("VerifyAt = %v, want ErrIdentity", err)
	}
}

// What must prove nothing.
func TestNegativeVectors(t *testing.T) {
	t.Parallel()
	const w1 = "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE="
	w1At := time.Unix(1614265330, 0)
	standard := webhook.StandardWebhooks(one(standardKey))
	t.Run("N1 an empty secret", func(t *testing.T) {
		t.Parallel()
		for _, s := range []*webhook.Scheme{
			webhook.GitHub(one("")), webhook.GitHub(), webhook.Stripe(one("")), webhook.Slack(one(" ")), webhook.StandardWebhooks(one("whsec_")),
		} {
			_, err := s.VerifyAt(githubHeader("sha256=2bbcfa9524f3218c7a34b30e6936f8b1a4516cb097f1a85a1c7d98b5977ec769"), []byte("Hello, World!"), time.Now())
			if err == nil {
				t.Error("it proves something")
			}
		}
	})
	t.Run("N2 the secret undecoded", func(t *testing.T) {
		t.Parallel()
		_, err := standard.VerifyAt(standardHeader(standardID, "1614265330", "v1,TcxlhK9b6UD6iVI1ZU2tTqp8PEVfYRseNNfa6b+LcUg="), []byte(standardMsg), w1At)
		if !errors.Is(err, webhook.ErrSignature) {
			t.Errorf("VerifyAt = %v", err)
		}
	})
	t.Run("N3 dots move", func(t *testing.T) {
		t.Parallel()
		const both = "v1,3sw9NIz5qliwNgt8rVKHdsR6t/aSaXuciDcCDYVL0yo="
		dotted := webhook.StandardWebhooks(one(standardKey))
		dotted.DottedIDs = true
		if _, err := standard.VerifyAt(standardHeader("a", "1", both), []byte(`2.{"x":1}`), time.Unix(1, 0)); err != nil {
			t.Error(err)
		}
		if _, err := standard.VerifyAt(standardHeader("a.1", "2", both), []byte(`{"x":1}`), time.Unix(2, 0)); !errors.Is(err, webhook.ErrIdentity) {
			t.Errorf("VerifyAt = %v, want ErrIdentity", err)
		}
		if _, err := dotted.VerifyAt(standardHeader("a.1", "2", both), []byte(`{"x":1}`), time.Unix(2, 0)); err != nil {
			t.Error(err)
		}
	})
	t.Run("N4 secrets that are none", func(t *testing.T) {
		t.Parallel()
		for _, secret := range []string{
			"w", "whsec_%", "whsec_wronglength", privateKey[:len(privateKey)-3], "hwsec_" + standardKey[6:], "v1," + standardKey,
			"whsec_" + base64.StdEncoding.EncodeToString(make([]byte, 84)), "whsec_" + base64.StdEncoding.EncodeToString(make([]byte, 16)),
			publicKey[:20], standardKey + "\n", "whsk_" + base64.StdEncoding.EncodeToString(make([]byte, 64)),
		} {
			_, err := webhook.StandardWebhooks(one(secret)).VerifyAt(standardHeader(standardID, "1614265330", w1), []byte(standardMsg), w1At)
			if err == nil || errors.Is(err, webhook.ErrSignature) {
				t.Errorf("secret %q: %v", secret, err)
			} else if len(secret) > 10 && strings.Contains(err.Error(), secret[7:]) {
				t.Errorf("the secret stands in %q", err)
			}
		}
	})
	t.Run("N5 headers of Stripe", func(t *testing.T) {
		t.Parallel()
		s := webhook.Stripe(one("webhook_secret"))
		const good = "2220f87ef101a04665f11cdf770523143f875572008577fa0f20882ddb9cc3c7"
		at := time.Unix(1533204620, 0)
		for _, text := range []string{
			"t=,v1=" + good, "t,v1=,v0=", "t,v1=,", "t,,", ",,", "t", "v1,t=1", "", "t=1533204620", "t=1533204620,v0=" + good,
			"t=+1533204620,v1=" + good, "t=01533204620,v1=" + good, "t=1533204620,t=1533204620,v1=" + good, "t=1533204620,v1=" + good[:62],
		} {
			if _, err := s.VerifyAt(header("Stripe-Signature", text), []byte(stripeEvent), at); !errors.Is(err, webhook.ErrSignature) {
				t.Errorf("%q: %v", text, err)
			}
		}
		if _, err := s.VerifyAt(header("Stripe-Signature", "t=1533204620,v1=bad_signature,v1="+good), []byte(stripeEvent), at); err != nil {
			t.Errorf("a good signature beside one that cannot be read: %v", err)
		}
	})
	t.Run("N6 versions", func(t *testing.T) {
		t.Parallel()
		for text, ok := range map[string]bool{
			"v1,": false, "v2," + w1[3:]: false, "": false, w1[3:]: false,
			"v2,AAAA v1,AAAA " + w1 + " v3,AAAA": true,
			strings.Repeat("v1,AAAA ", 16) + w1:  false, // too many are not looked at
		} {
			if _, err := standard.VerifyAt(standardHeader(standardID, "1614265330", text), []byte(standardMsg), w1At); (err == nil) != ok {
				t.Errorf("%q: %v", text, err)
			}
		}
	})
	t.Run("N7 tolerance", func(t *testing.T) {
		t.Parallel()
		for skew, ok := range map[int]bool{-301: false, -300: true, 300: true, 301: false} {
			at := w1At.Add(time.Duration(skew)*time.Second + 900*time.Millisecond)
			_, err := standard.VerifyAt(standardHeader(standardID, "1614265330", w1), []byte(standardMsg), at)
			if ok && err != nil || !ok && !errors.Is(err, webhook.ErrTimestamp) {
				t.Errorf("%d s: %v", skew, err)
			}
		}
		hour := webhook.StandardWebhooks(one(standardKey))
		hour.Tolerance = time.Hour
		if _, err := hour.VerifyAt(standardHeader(standardID, "1614265330", w1), []byte(standardMsg), w1At.Add(time.Hour)); err != nil {
			t.Error(err)
		}
		hour.Tolerance = -1
		if _, err := hour.VerifyAt(standardHeader(standardID, "1614265330", w1), []byte(standardMsg), w1At); err == nil {
			t.Error("a negative tolerance is taken")
		}
	})
	t.Run("G2b SHA-1", func(t *testing.T) {
		t.Parallel()
		s := webhook.GitHub(one("0123456789abcdef"))
		for _, h := range []http.Header{
			header("X-Hub-Signature", "sha1=126f2c800419c60137ce748d7672e77b65cf16d6", "X-GitHub-Delivery", "d"),
			githubHeader("sha1=126f2c800419c60137ce748d7672e77b65cf16d6"),
		} {
			if _, err := s.VerifyAt(h, []byte(`{"yo":true}`), time.Now()); !errors.Is(err, webhook.ErrSignature) {
				t.Errorf("VerifyAt = %v", err)
			}
		}
	})
	t.Run("two header fields", func(t *testing.T) {
		t.Parallel()
		h := standardHeader(standardID, "1614265330", w1)
		h.Add("webhook-id", "other")
		if _, err := standard.VerifyAt(h, []byte(standardMsg), w1At); !errors.Is(err, webhook.ErrSignature) {
			t.Errorf("VerifyAt = %v", err)
		}
	})
	t.Run("an endpoint for v1a takes no v1", func(t *testing.T) {
		t.Parallel()
		_, err := webhook.StandardWebhooks(one(publicKey)).VerifyAt(standardHeader(standardID, "1614265330", w1), []byte(standardMsg), w1At)
		if !errors.Is(err, webhook.ErrSignature) {
			t.Errorf("VerifyAt = %v", err)
		}
	})
}

// Secrets count within their windows, and the proof names the one that matched.
func TestRotation(t *testing.T) {
	t.Parallel()
	roll := time.Unix(1614265330, 0)
	s := webhook.StandardWebhooks(
		webhook.Secret{Name: "old", Value: standardOld, Until: roll.Add(24 * time.Hour)},
		webhook.Secret{Name: "new", Value: standardKey, From: roll},
	)
	for _, c := range []struct {
		at     time.Duration
		signer string
		want   string
	}{
		{-time.Hour, standardOld, "old"},
		{-time.Hour, standardKey, ""},
		{0, standardKey, "new"},
		{24*time.Hour - time.Second, standardOld, "old"},
		{24 * time.Hour, standardOld, ""},
		{24 * time.Hour, standardKey, "new"},
	} {
		at := roll.Add(c.at)
		h := make(http.Header)
		if err := webhook.StandardWebhooks(one(c.signer)).Sign(h, "m", []byte("{}"), at); err != nil {
			t.Fatal(err)
		}
		if proof, err := s.VerifyAt(h, []byte("{}"), at); proof.Secret != c.want || (err == nil) != (c.want != "") {
			t.Errorf("at %v: %+v, %v, want secret %q", c.at, proof, err, c.want)
		}
	}
	for _, wrong := range []*webhook.Scheme{
		webhook.GitHub(one("a"), one("b"), one("c"), one("d"), one("e")),
		webhook.GitHub(webhook.Secret{Value: "a", From: roll, Until: roll}),
	} {
		if err := wrong.Sign(make(http.Header), "", nil, roll); err == nil {
			t.Error("wrong secrets are taken")
		}
	}
}

// What a scheme signs it proves, and a receiver that has changed its secret or not.
func TestSignAndVerify(t *testing.T) {
	t.Parallel()
	at := time.Unix(1_700_000_000, 0)
	body := []byte(`{"id":"e","event_id":"e"}`)
	for name, s := range map[string]*webhook.Scheme{
		"GitHub":   webhook.GitHub(one("secret")),
		"Stripe":   webhook.Stripe(one("secret"), one("other")),
		"Slack":    webhook.Slack(one("secret")),
		"Standard": webhook.StandardWebhooks(one(standardKey), one(privateKey)),
		"Svix":     webhook.Svix(one(standardKey), one(standardOld)),
	} {
		h := make(http.Header)
		if err := s.Sign(h, "id", body, at); err != nil {
			t.Errorf("%s: %v", name, err)
		}
		if _, err := s.VerifyAt(h, body, at); err != nil {
			t.Errorf("%s: %v", name, err)
		}
	}
	h := make(http.Header)
	if err := webhook.StandardWebhooks(one(standardKey), one(privateKey)).Sign(h, "id", body, at); err != nil {
		t.Fatal(err)
	}
	for _, secret := range []string{standardKey, publicKey} {
		if _, err := webhook.StandardWebhooks(one(secret)).VerifyAt(h, body, at); err != nil {
			t.Error(err)
		}
	}
	if err := webhook.StandardWebhooks(one(publicKey)).Sign(h, "id", body, at); err == nil {
		t.Error("a public key signs")
	}
}

// A sender's own scheme says what is proven, in its own way.
func TestCustom(t *testing.T) {
	t.Parallel()
	s := webhook.Custom("bearer", func(h http.Header, body []byte, _ time.Time) (webhook.Proof, error) {
		if !hmac.Equal([]byte(h.Get("Authorization")), []byte("Bearer token")) {
			return webhook.Proof{}, errors.New("no")
		}
		return webhook.Proof{ID: string(body)}, nil
	})
	if p, err := s.VerifyAt(header("Authorization", "Bearer token"), []byte("id"), time.Now()); err != nil || p.ID != "id" {
		t.Errorf("VerifyAt = %+v, %v", p, err)
	}
	if _, err := s.VerifyAt(header(), []byte("id"), time.Now()); !errors.Is(err, webhook.ErrSignature) {
		t.Errorf("VerifyAt = %v", err)
	}
	for _, id := range []string{"", "a b", "\x00", "ü", strings.Repeat("a", 256)} {
		if _, err := s.VerifyAt(header("Authorization", "Bearer token"), []byte(id), time.Now()); !errors.Is(err, webhook.ErrIdentity) {
			t.Errorf("id %q: %v", id, err)
		}
	}
	if _, err := webhook.Custom("none", nil).VerifyAt(nil, nil, time.Now()); err == nil {
		t.Error("a scheme without verify proves something")
	}
	if _, err := new(webhook.Scheme).VerifyAt(nil, nil, time.Now()); err == nil {
		t.Error("an empty scheme proves something")
	}
}

// Whatever a header holds, it proves nothing and breaks nothing.
func FuzzVerify(f *testing.F) {
	for _, seed := range []string{
		"", "t=1614265330,v1=00", "t,v1=,", "v1,", "v1a,AAAA", "sha256=", "v0=", "sha256=zz", "v1,=", "v1, ,", strings.Repeat("v1,AAAA ", 20),
	} {
		f.Add(seed, "1614265330", []byte("{}"))
	}
	schemes := []*webhook.Scheme{
		webhook.GitHub(one("s")), webhook.Stripe(one("s")), webhook.Slack(one("s")), webhook.StandardWebhooks(one(standardKey), one(publicKey)),
		webhook.Svix(one(standardKey)),
	}
	f.Fuzz(func(t *testing.T, signature, timestamp string, body []byte) {
		for i, s := range schemes {
			h := header("X-Hub-Signature-256", signature, "Stripe-Signature", signature, "X-Slack-Signature", signature,
				"X-Slack-Request-Timestamp", timestamp, "webhook-id", "i", "webhook-timestamp", timestamp, "webhook-signature", signature)
			if proof, err := s.VerifyAt(h, body, time.Unix(1614265330, 0)); err == nil {
				t.Errorf("scheme %d proves %+v", i, proof)
			} else if !errors.Is(err, webhook.ErrSignature) {
				t.Errorf("scheme %d: %v", i, err)
			}
		}
	})
}

func hash(s string) string { return fmt.Sprintf("%x", sha256.Sum256([]byte(s))) }
