package main

import (
	"encoding/json"
	"testing"
)

func TestLoadWebhooks(t *testing.T) {
	hooks, err := loadWebhooks()
	if err != nil {
		t.Fatal(err)
	}
	events, keys, size := map[string]int{}, map[string]int{}, 0
	for i, h := range hooks {
		if !json.Valid(h.Payload) {
			t.Errorf("payload %d (%s) is not valid JSON", i, h.Event)
		}
		events[h.Event]++
		keys[h.Key]++
		size += len(h.Payload)
	}
	if len(hooks) != 329 || len(events) != 58 || size != 3_252_799 {
		t.Errorf("%d payloads of %d events in %d bytes, want 329 of 58 in 3252799", len(hooks), len(events), size)
	}
	if events["issues"] != 29 || events["ping"] != 4 {
		t.Errorf("%d issues and %d ping events, want 29 and 4", events["issues"], events["ping"])
	}
	if n := len(keys); n < 50 || n > 200 {
		t.Errorf("%d keys, want 50 to 200, so that keys are shared and many", n)
	}
	if n := keys["Codertocat/Hello-World/pull_request/2"]; n < 20 {
		t.Errorf("%d events of the busiest pull request, want at least 20; keys: %v", n, keys)
	}
}

func TestEntityKey(t *testing.T) {
	tests := []struct{ name, event, payload, want string }{
		{"issue", "issues", `{"issue":{"id":7,"number":3},"repository":{"full_name":"o/r"}}`, "o/r/issue/3"},
		{"id only", "release", `{"release":{"id":7},"repository":{"full_name":"o/r"}}`, "o/r/release/7"},
		{"comment belongs to its issue", "issue_comment", `{"comment":{"id":9},"issue":{"number":3},"repository":{"full_name":"o/r"}}`, "o/r/issue/3"},
		{"no entity", "push", `{"ref":"main","repository":{"full_name":"o/r"}}`, "o/r/push"},
		{"no repository", "organization", `{"organization":{"login":"o"}}`, "o/organization"},
		{"nobody", "meta", `{"issue":"text"}`, "github/meta"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			got, err := entityKey(tt.event, []byte(tt.payload))
			if err != nil || got != tt.want {
				t.Errorf("entityKey(%q, %s) = %q, %v, want %q", tt.event, tt.payload, got, err, tt.want)
			}
		})
	}
	if _, err := entityKey("push", []byte(`{`)); err == nil {
		t.Error("entityKey takes half a payload")
	}
}
