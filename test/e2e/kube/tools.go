//go:build tools

// Package kube pins the real Kubernetes servers that the end-to-end tests run
// against; build.sh builds them into ../.bin.
package kube

import (
	_ "go.etcd.io/etcd/server/v3"
	_ "k8s.io/kubernetes/cmd/kube-apiserver"
	_ "k8s.io/kubernetes/cmd/kube-controller-manager"
	_ "k8s.io/kubernetes/cmd/kubectl"
)
