#!/usr/bin/env bash
# Builds the images localhost/waymark-*:dev with podman (or docker, in TOOL).
set -euo pipefail
cd "$(dirname "$0")/../.."
tool=${TOOL:-podman}
out=dist/linux
mkdir -p "$out"
CGO_ENABLED=0 go build -trimpath -ldflags '-s -w' -o "$out/" ./cmd/waymark-watcher ./cmd/waymark-reconciler ./cmd/waymark-plugin-memory
for name in waymark-watcher waymark-reconciler waymark-plugin-memory; do
	"$tool" build -q -f "deploy/images/$name.Containerfile" -t "localhost/$name:dev" "$out"
done
