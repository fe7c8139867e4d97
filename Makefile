# Waymark. The two commands that matter: `make run` and `make test`.
SHELL := /bin/bash
.DEFAULT_GOAL := build
TOOLS := bin/tools

# Build tools are pinned in tools/go.mod; nothing is installed by hand.
$(TOOLS)/%: tools/go.mod tools/go.sum
	@mkdir -p $(TOOLS)
	@echo "building $* (pinned in tools/go.mod)"
	@pkg=$$(go -C tools list -f '{{.ImportPath}}' tool | grep -E "/$*$$") && go -C tools build -o ../$(TOOLS)/$* $$pkg

.PHONY: generate
generate: $(TOOLS)/buf $(TOOLS)/protoc-gen-go $(TOOLS)/protoc-gen-go-grpc ## Make the Go code of the contracts
	$(TOOLS)/buf generate

.PHONY: generate-check
generate-check: generate ## Fail when the committed generated code is old
	@git diff --exit-code --stat -- proto || { echo "generated code is old: run make generate and commit"; exit 1; }

.PHONY: lint
lint: $(TOOLS)/buf $(TOOLS)/gofumpt $(TOOLS)/golangci-lint ## Lint the contracts and the code
	$(TOOLS)/buf lint
	$(TOOLS)/buf format -d --exit-code proto
	@if git rev-parse -q --verify HEAD~1 >/dev/null && git cat-file -e HEAD~1:proto 2>/dev/null; then \
		$(TOOLS)/buf breaking proto --against '.git#ref=HEAD~1,subdir=proto'; fi
	@out=$$($(TOOLS)/gofumpt -l $$(git ls-files '*.go' ':!*.pb.go')); test -z "$$out" || { echo "not formatted: $$out"; exit 1; }
	$(TOOLS)/golangci-lint run ./...
	cd test/e2e && ../../$(TOOLS)/golangci-lint run ./...
	go vet ./...
	go -C test/e2e vet ./...
	go -C test/deploy vet ./...
	@for module in . test/e2e test/deploy; do go -C $$module mod tidy -diff >/dev/null || { echo "$$module/go.mod is not tidy"; exit 1; }; done

.PHONY: build
build: ## Build all binaries into bin/
	go build -trimpath -o bin/ ./cmd/...

.PHONY: test
test: unit deploy-test e2e ## Run all tests; sets up what they need

.PHONY: deploy-test
deploy-test: ## The chart lints, equals the kustomize base, and refuses bad values
	go -C test/deploy test ./...

.PHONY: unit
unit: ## The tests that need nothing but Go, with the race detector
	go test -race ./...

.PHONY: e2e
e2e: ## Real kube-apiserver, etcd and node-ipam controller; the real binaries (first build about 10 minutes)
	@for tool in podman runc catatonit; do command -v $$tool >/dev/null || missing=1; done; [ -z "$$missing" ] || { apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends podman runc catatonit; }
	test/e2e/kube/build.sh
	CGO_ENABLED=0 go build -trimpath -o test/e2e/.bin/ ./cmd/...
	go -C test/e2e test -v -count=1 -timeout 20m ./...

.PHONY: help
help: ## What can be made
	@grep -hE '^[a-z0-9-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 16

.PHONY: run
run: ## The main job on the embedded default: nodes from a file, the memory plugin
	go run ./cmd/waymark up --nodes testdata/nodes.yaml
