# The commands of this repository. Everything a target needs it fetches itself.
MODULES := . broker/franz examples integration_test internal/throwaway
ALL     := github.com/postroom/postroom/...
LINT    := go run github.com/golangci/golangci-lint/v2/cmd/golangci-lint@v2.12.2

FUZZ    := webhook:FuzzVerify idempotency:FuzzCanonicalJSON idempotency:FuzzParts idempotency:FuzzParseKey \
           broker/nats:FuzzHeaders broker/nats:FuzzDecode broker/kafka:FuzzSize
FUZZTIME := 10000x

.PHONY: help quickstart test versions lint fmt fuzz bench tidy

help: ## list the targets
	@grep -E '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/'

quickstart: ## the main job on throw-away servers, with processes killed on the way
	go run ./examples/quickstart

test: ## all tests on real servers, with the race detector
	go test -race -timeout 30m $(ALL)

versions: ## the same, on the oldest and the newest PostgreSQL, and the installed one
	POSTROOM_TEST_POSTGRES=14,15,18 go test -race -timeout 30m $(ALL)

lint: ## what the code must look like, the import arrows among it
	for m in $(MODULES); do (cd $$m && $(LINT) run ./...) || exit 1; done

fmt: ## format
	for m in $(MODULES); do (cd $$m && $(LINT) fmt ./...) || exit 1; done

fuzz: ## what reads input from outside, FUZZTIME each
	for f in $(FUZZ); do go test -run '^$$' -fuzz "^$${f#*:}\$$" -fuzztime $(FUZZTIME) ./$${f%:*} || exit 1; done

bench: ## benchmarks, each beside a hand-written loop of the same run
	go test -run '^$$' -bench . -benchtime=1x ./dispatcher
	go test -run '^$$' -bench . -benchtime=1x -timeout 30m ./integration_test/bench
	go test -run '^$$' -bench . ./outbox ./inbox
	go test -run '^$$' -bench . -benchtime=100x ./integration_test/kafka

tidy: ## go.mod of every module
	for m in $(MODULES); do (cd $$m && GOWORK=off go mod tidy) || exit 1; done
