package idempotency

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"time"

	"github.com/postroom/postroom"
)

// A Profile says what another service makes of idempotency keys. [Vendors] holds
// some; the zero value is what the IETF's draft describes, raw keys apart.
type Profile struct {
	// Name tells services apart: it goes into derived keys, so that no two get the
	// same one. Not empty where keys are derived or remembered.
	Name string

	// Header carries the key. Default "Idempotency-Key".
	Header string

	// Quoted sends the key as a string in quotes, as the draft asks; most services
	// take them for part of the key.
	Quoted bool

	// MaxKey is the most characters that a key may have, 32 or more. Derived keys are
	// UUIDs of 36 characters, and their 32 digits alone where fewer are allowed.
	// Default 255.
	MaxKey int

	// Methods are those for which the service honours keys. Others are sent as they
	// are, once, without a key. Default POST and PATCH.
	Methods []string

	// Retention is how long the service knows a key. After that a repeat is a second
	// call. Default 24h.
	Retention time.Duration
}

// Vendors are profiles by what the services' documentation said in 2026. Where it says
// nothing of the retention, or texts disagree, a day is assumed.
var Vendors = struct {
	Stripe, PayPal, Adyen, AmazonPay, Worldline, CheckoutCom Profile
}{
	Stripe:      Profile{Name: "stripe", Methods: []string{http.MethodPost}},
	PayPal:      Profile{Name: "paypal", Header: "PayPal-Request-Id", MaxKey: 108, Retention: 6 * time.Hour},
	Adyen:       Profile{Name: "adyen", MaxKey: 64, Methods: []string{http.MethodPost}},
	AmazonPay:   Profile{Name: "amazon-pay", Header: "X-Amz-Pay-Idempotency-Key", MaxKey: 32, Methods: []string{http.MethodPost}},
	Worldline:   Profile{Name: "worldline", Header: "X-Gcs-Idempotence-Key", MaxKey: 40, Methods: []string{http.MethodPost}},
	CheckoutCom: Profile{Name: "checkout-com", Header: "Cko-Idempotency-Key", Methods: []string{http.MethodPost}},
}

const (
	uuidLength  = 36
	leastMaxKey = 32
)

func (p Profile) withDefaults() (Profile, error) {
	var errs []error
	bad := func(format string, args ...any) {
		errs = append(errs, fmt.Errorf("idempotency: Profile."+format, args...))
	}
	if p.Header == "" {
		p.Header = headerName
	}
	p.Header = http.CanonicalHeaderKey(p.Header)
	if p.MaxKey == 0 {
		p.MaxKey = 255
	}
	if p.MaxKey < leastMaxKey {
		bad("MaxKey is %d, want at least %d", p.MaxKey, leastMaxKey)
	}
	if p.Methods == nil {
		p.Methods = []string{http.MethodPost, http.MethodPatch}
	}
	if p.Retention == 0 {
		p.Retention = 24 * time.Hour
	}
	if p.Retention < time.Second {
		bad("Retention is %v, want at least 1s", p.Retention)
	}
	return p, errors.Join(errs...)
}

// Key returns the key for the call that the operation in ctx makes to the service at
// the given step: the same one in every repeat, also in another process, and another
// one for every service, operation and step. A caller's own key never shows in it. It
// fits in a header or a field of a body.
//
// It returns [postroom.ErrNoOperation] where ctx carries no operation.
func (p Profile) Key(ctx context.Context, step string) (string, error) {
	p, err := p.withDefaults()
	if err != nil {
		return "", err
	}
	if p.Name == "" {
		return "", errors.New("idempotency: Profile.Name is empty: without it two services would get the same key")
	}
	key, err := postroom.OperationKey(ctx, fmt.Sprintf("%d:%s:%s", len(p.Name), p.Name, step))
	if err != nil {
		return "", err
	}
	if p.MaxKey < uuidLength {
		key = strings.ReplaceAll(key, "-", "")
	}
	return key, nil
}

func (p *Profile) honours(method string) bool {
	if method == "" {
		method = http.MethodGet
	}
	return slices.Contains(p.Methods, method)
}

// RunScoped is the operation of one activity in one run of a workflow, for engines
// such as Temporal: its keys stay the same over the activity's retries and differ in
// every run. It is right where a run that starts over shall act anew: after a reset,
// continue-as-new, a retry of the workflow or its next scheduled run. activityID must be set
// by the workflow's code: numbers that the engine gives shift when the code changes.
// An attempt's number must not be part of either.
func RunScoped(runID, activityID string) postroom.Operation {
	return postroom.Operation{Kind: "workflow-run", Scope: runID, Key: activityID}
}

// BusinessScoped is the operation of an action that happens once for a workflow,
// however often that is reset, continued or retried: its keys come from the workflow's
// id, which names the business case, such as an order. It is right for payments, and
// for whatever else a second time would be wrong.
func BusinessScoped(workflowID, action string) postroom.Operation {
	return postroom.Operation{Kind: "workflow", Scope: workflowID, Key: action}
}
