package idempotency_test

import (
	"context"
	"fmt"
	"net/http"
	"net/http/httptest"
	"strings"

	"github.com/postroom/postroom"
	"github.com/postroom/postroom/idempotency"
)

// A handler charges a card at a provider that loses its first answer. Run again, it
// would send the same key, and the provider would answer as before.
func ExampleTransport() {
	charges := make(map[string]bool)
	provider := httptest.NewServer(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
		repeat := charges[r.Header.Get("Idempotency-Key")]
		charges[r.Header.Get("Idempotency-Key")] = true
		if !repeat {
			panic(http.ErrAbortHandler) // charged, and the answer is lost
		}
	}))
	defer provider.Close()

	client := &http.Client{Transport: &idempotency.Transport{Profile: idempotency.Profile{Name: "provider"}}}
	// In a handler of package inbox the context carries the message's operation.
	ctx := postroom.WithOperation(context.Background(), postroom.Operation{Kind: "message", Scope: "billing", Key: "order-1"})
	req, err := http.NewRequestWithContext(idempotency.WithStep(ctx, "charge card"), http.MethodPost, provider.URL, strings.NewReader("amount=10"))
	if err != nil {
		fmt.Println(err)
		return
	}
	res, err := client.Do(req)
	if err != nil {
		fmt.Println(err)
		return
	}
	defer res.Body.Close()
	sent, _ := idempotency.SentBy(res)
	fmt.Println(res.StatusCode, "after", sent.Attempts, "attempts,", len(charges), "charge")
	// Output: 200 after 2 attempts, 1 charge
}
