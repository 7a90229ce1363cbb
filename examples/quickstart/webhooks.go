package main

import (
	"bytes"
	"compress/gzip"
	_ "embed"
	"encoding/json"
	"errors"
	"fmt"
	"io"
)

// archive holds the payloads that GitHub sends, see data/README.md.
//
//go:embed data/webhooks.jsonl.gz
var archive []byte

// A webhook is one event as GitHub sends it.
type webhook struct {
	Event   string // "issues", "pull_request", …
	Key     string // the entity it is about: "Codertocat/Hello-World/issue/1"
	Payload []byte // JSON, byte for byte as in the archive
}

// loadWebhooks unpacks the archive.
func loadWebhooks() ([]webhook, error) {
	unzip, err := gzip.NewReader(bytes.NewReader(archive))
	if err != nil {
		return nil, fmt.Errorf("unpack webhooks: %w", err)
	}
	var hooks []webhook
	lines := json.NewDecoder(unzip)
	for {
		var line struct {
			Event   string
			Payload json.RawMessage
		}
		err := lines.Decode(&line)
		if errors.Is(err, io.EOF) {
			return hooks, nil
		}
		if err != nil {
			return nil, fmt.Errorf("unpack webhook %d: %w", len(hooks)+1, err)
		}
		key, err := entityKey(line.Event, line.Payload)
		if err != nil {
			return nil, fmt.Errorf("unpack webhook %d: %w", len(hooks)+1, err)
		}
		hooks = append(hooks, webhook{line.Event, key, line.Payload})
	}
}

// entities are the fields that say what an event is about, the most telling
// first.
var entities = []string{
	"pull_request", "issue", "discussion", "release", "deployment", "check_run", "check_suite",
	"workflow_run", "workflow_job", "milestone", "label", "project_card", "project_column", "project",
	"team", "member", "package", "alert", "projects_v2_item", "installation",
}

// entityKey names what an event is about. Events of one entity must keep their
// order, those of different entities need none.
func entityKey(event string, payload []byte) (string, error) {
	var owner struct {
		Repository struct {
			FullName string `json:"full_name"`
		}
		Organization, Sender struct{ Login string }
	}
	if err := json.Unmarshal(payload, &owner); err != nil {
		return "", err
	}
	var fields map[string]json.RawMessage
	if err := json.Unmarshal(payload, &fields); err != nil {
		return "", err
	}
	key := "github"
	for _, name := range []string{owner.Repository.FullName, owner.Organization.Login, owner.Sender.Login} {
		if name != "" {
			key = name
			break
		}
	}
	for _, name := range entities {
		var entity struct{ Number, ID int64 }
		if json.Unmarshal(fields[name], &entity) != nil {
			continue // no such field, or not an object with numbers
		}
		if entity.Number != 0 {
			return fmt.Sprintf("%s/%s/%d", key, name, entity.Number), nil
		}
		if entity.ID != 0 {
			return fmt.Sprintf("%s/%s/%d", key, name, entity.ID), nil
		}
	}
	return key + "/" + event, nil
}
