package webhook_test

import (
	"encoding/json"
	"fmt"
	"log"
	"net/http"
	"net/http/httptest"
	"os"
	"strings"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/postroom/postroom/webhook"
)

// An endpoint for Stripe, while its secret is being changed: messages of one
// customer, say, keep the order in which they were received.
func ExampleNew() {
	var pool *pgxpool.Pool // of the service's database
	scheme := webhook.Stripe(
		webhook.Secret{Name: "2026", Value: os.Getenv("STRIPE_SECRET")},
		webhook.Secret{Name: "2025", Value: os.Getenv("STRIPE_OLD_SECRET"), Until: time.Date(2026, 7, 1, 0, 0, 0, 0, time.UTC)},
	)
	h, err := webhook.New(pool, "stripe", scheme, "stripe-events", webhook.Config{
		Key: func(_ http.Header, body []byte) (string, error) {
			var event struct {
				Data struct{ Object struct{ ID string } }
			}
			err := json.Unmarshal(body, &event)
			return event.Data.Object.ID, err
		},
	})
	if err != nil {
		log.Print(err) // no secret, no endpoint
		return
	}
	http.Handle("POST /webhooks/stripe", h)
}

// Signing a delivery, and proving it.
func ExampleScheme_Sign() {
	scheme := webhook.StandardWebhooks(webhook.Secret{Value: "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"})
	body := []byte(`{"type":"invoice.paid"}`)
	r := httptest.NewRequest(http.MethodPost, "/webhooks", strings.NewReader(string(body)))
	if err := scheme.Sign(r.Header, "msg_1", body, time.Now()); err != nil {
		log.Fatal(err)
	}
	proof, err := scheme.VerifyAt(r.Header, body, time.Now())
	fmt.Println(proof.ID, err)
	// Output: msg_1 <nil>
}
