package postroom_test

import (
	"context"
	"errors"
	"fmt"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/postroom/postroom"
)

func TestNewIDIsOrderedAndUnique(t *testing.T) {
	form := regexp.MustCompile(`^[0-9a-f]{8}-[0-9a-f]{4}-7[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}$`)
	seen := map[string]bool{}
	last := ""
	for range 10_000 {
		id := postroom.NewID()
		if !form.MatchString(id) {
			t.Fatalf("NewID() = %q", id)
		}
		if seen[id] {
			t.Fatalf("NewID() gave %q twice", id)
		}
		seen[id] = true
		if id[:18] < last {
			t.Fatalf("%q after %q", id, last)
		}
		last = id[:18]
	}
}

func TestValidateReportsEveryProblem(t *testing.T) {
	tests := []struct {
		name string
		msg  postroom.Message
		want []string // fields
	}{
		{"fine", postroom.Message{Topic: "orders"}, nil},
		{"everything allowed", postroom.Message{
			ID: "a b/c", Topic: "orders.eu-1_x", Key: "any\nkey", Step: "1", DeliverAt: time.Now(),
			Headers: []postroom.Header{{Name: "x:y z"}, {Name: "x:y z"}},
		}, nil},
		{"nothing", postroom.Message{}, []string{"Topic"}},
		{"all wrong", postroom.Message{
			ID: " x", Topic: "a b", Key: "\xff", Step: strings.Repeat("s", 256),
			DeliverAt: time.Date(10000, 1, 1, 0, 0, 0, 0, time.UTC),
			Headers: []postroom.Header{
				{Name: ""},
				{Name: "fine"},
				{Name: "Postroom-Id"},
				{Name: "nats-msg-id"},
				{Name: "\x00"},
				{Name: strings.Repeat("n", 256)},
			},
		}, []string{
			"ID", "Topic", "Key", "Headers[0].Name", "Headers[2].Name", "Headers[3].Name", "Headers[4].Name",
			"Headers[5].Name", "Step", "DeliverAt",
		}},
		{"long", postroom.Message{
			ID: strings.Repeat("i", 256), Topic: strings.Repeat("t", 250), Key: strings.Repeat("k", 1025),
		}, []string{"ID", "Topic", "Key"}},
		{"control", postroom.Message{ID: "a\nb", Topic: "a\x7f", Key: "\x00"}, []string{"ID", "Topic", "Key"}},
		{"not UTF-8", postroom.Message{ID: "\xff", Topic: "\xff", Key: "\xff"}, []string{"ID", "Topic", "Key"}},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			err := tt.msg.Validate(7)
			if (err != nil) != (tt.want != nil) || err != nil && !errors.Is(err, postroom.ErrInvalid) {
				t.Fatalf("Validate: %v", err)
			}
			var got []string
			if joined, ok := err.(interface{ Unwrap() []error }); ok {
				for _, e := range joined.Unwrap() {
					invalid, ok := errors.AsType[*postroom.InvalidError](e)
					if !ok || invalid.Index != 7 {
						t.Errorf("%#v", e)
						continue
					}
					got = append(got, invalid.Field)
				}
			}
			if fmt.Sprint(got) != fmt.Sprint(tt.want) {
				t.Errorf("problems with %v, want %v:\n%v", got, tt.want, err)
			}
		})
	}
}

func TestInvalidErrorHidesContents(t *testing.T) {
	m := postroom.Message{Topic: "t", Key: "secret\x00", Headers: []postroom.Header{{Name: "", Value: []byte("secret")}}}
	if err := m.Validate(0); err == nil || strings.Contains(err.Error(), "secret") {
		t.Errorf("Validate: %v", err)
	}
}

func TestHeaderIsFoundInAnyCase(t *testing.T) {
	m := postroom.Message{Headers: []postroom.Header{
		{Name: "X-A", Value: []byte("first")}, {Name: "x-a", Value: []byte("second")}, {Name: "nil"},
	}}
	if v, ok := m.Header("x-A"); !ok || string(v) != "first" {
		t.Errorf(`Header("x-A") = %q, %v`, v, ok)
	}
	if v, ok := m.Header("NIL"); !ok || v != nil {
		t.Errorf(`Header("NIL") = %q, %v`, v, ok)
	}
	if _, ok := m.Header("b"); ok {
		t.Error("found what is not there")
	}
}

func TestVerdicts(t *testing.T) {
	cause := errors.New("cause")
	wrapped := fmt.Errorf("outer: %w", postroom.Permanent(cause))
	if !postroom.IsPermanent(wrapped) || !errors.Is(wrapped, cause) || wrapped.Error() != "outer: cause" {
		t.Errorf("Permanent is lost in %v", wrapped)
	}
	if _, ok := postroom.RetryDelay(wrapped); ok || postroom.IsPermanent(cause) {
		t.Error("verdicts are mixed up")
	}
	later := fmt.Errorf("outer: %w", postroom.RetryAfter(cause, time.Minute))
	if d, ok := postroom.RetryDelay(later); !ok || d != time.Minute || postroom.IsPermanent(later) {
		t.Errorf("RetryDelay = %v, %v", d, ok)
	}
	if d, _ := postroom.RetryDelay(postroom.RetryAfter(cause, -1)); d != 0 {
		t.Errorf("negative delay came back as %v", d)
	}
	if postroom.Permanent(nil) != nil || postroom.RetryAfter(nil, 1) != nil {
		t.Error("nil became an error")
	}
}

var op = postroom.Operation{Kind: "message", Scope: "billing", Key: "018f9f3e-5c2a-7abc-8def-0123456789ab"}

// ids runs a handler that writes messages, as each attempt would.
func ids(o postroom.Operation, msgs ...postroom.Message) []string {
	ctx := postroom.WithOperation(context.Background(), o)
	var got []string
	for _, m := range msgs {
		m.Identify(ctx)
		got = append(got, m.ID)
	}
	return got
}

func TestDerivedIDsRepeat(t *testing.T) {
	a, b := postroom.Message{Topic: "a", Key: "k"}, postroom.Message{Topic: "b", Key: "k"}
	first := ids(op, a, a, b)
	if again := ids(op, a, a, b); fmt.Sprint(again) != fmt.Sprint(first) {
		t.Errorf("a repeat gives %v, not %v", again, first)
	}
	if other := ids(op, b, a, a); fmt.Sprint(other) != fmt.Sprint([]string{first[2], first[0], first[1]}) {
		t.Errorf("in another order over topics: %v, not %v", other, first)
	}
	all := map[string]bool{}
	var list []string
	list = append(list, first...)
	stepped := a
	stepped.Step = "1"
	list = append(list, ids(op, stepped)...)
	for _, o := range []postroom.Operation{
		{Kind: "http", Scope: op.Scope, Key: op.Key},
		{Kind: op.Kind, Scope: "x", Key: op.Key},
		{Kind: op.Kind, Scope: op.Scope, Key: "x"},
		{Kind: "messageb", Scope: "illing", Key: op.Key}, // parts are length-prefixed
	} {
		list = append(list, ids(o, a)...)
		list = append(list, o.ID())
	}
	list = append(list, op.ID())
	for _, step := range []string{"1", "2"} {
		key, err := postroom.OperationKey(postroom.WithOperation(context.Background(), op), step)
		if err != nil {
			t.Fatal(err)
		}
		list = append(list, key)
	}
	for _, id := range list {
		if all[id] {
			t.Errorf("%s stands for two things in %v", id, list)
		}
		all[id] = true
		if len(id) != 36 || id[14] != '8' {
			t.Errorf("%s is not a UUID of version 8", id)
		}
	}
	for _, id := range first {
		if id[:13] != op.Key[:13] {
			t.Errorf("%s lost the time of %s", id, op.Key)
		}
	}
	grandchild := ids(postroom.Operation{Kind: "message", Scope: "s", Key: first[0]}, a)[0]
	if grandchild[:13] != op.Key[:13] {
		t.Errorf("%s lost the time of its grandparent", grandchild)
	}
	random := ids(postroom.Operation{Kind: "message", Scope: "s", Key: "9f8f9f3e-5c2a-4abc-8def-0123456789ab"}, a)[0]
	if random[:8] == "9f8f9f3e" {
		t.Errorf("%s took time bits from a random UUID", random)
	}
}

// The derivation is on the wire and in tables: it must never change.
func TestDerivationIsFixed(t *testing.T) {
	got := ids(op, postroom.Message{Topic: "invoices", Key: "42"})[0]
	key, _ := postroom.OperationKey(postroom.WithOperation(context.Background(), op), "charge")
	if want := "018f9f3e-5c2a-8d8f-b70c-5df358dbd351"; got != want {
		t.Errorf("derived id %s, want %s", got, want)
	}
	if want := "018f9f3e-5c2a-892a-a03e-2f9da79008d5"; key != want {
		t.Errorf("operation key %s, want %s", key, want)
	}
	if want := "018f9f3e-5c2a-8e0d-a8c1-917654490b5e"; op.ID() != want {
		t.Errorf("operation id %s, want %s", op.ID(), want)
	}
}

func TestIdentifyWithoutOperation(t *testing.T) {
	m := postroom.Message{Operation: "forged"}
	m.Identify(context.Background())
	if len(m.ID) != 36 || m.ID[14] != '7' || m.Operation != "" {
		t.Errorf("%+v", m)
	}
	given := postroom.Message{ID: "mine"}
	given.Identify(postroom.WithOperation(context.Background(), op))
	if given.ID != "mine" || given.Operation != op.ID() {
		t.Errorf("%+v", given)
	}
	if _, err := postroom.OperationKey(context.Background(), "x"); !errors.Is(err, postroom.ErrNoOperation) {
		t.Errorf("OperationKey: %v", err)
	}
}
