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

.PHONY: build
build: ## Build all binaries into bin/
	go build -trimpath -o bin/ ./cmd/...
