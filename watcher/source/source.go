// Package source is where nodes come from: a Kubernetes API server ([Kube]) or
// files ([File]). Both turn Kubernetes' objects into plain [Node] values, drop
// what is irrelevant to routes, and say which relevant fields a change touched
// (invariant S6). Kubernetes' types end here.
//
// A source is started anew for every node session, so that the session's first
// snapshot is a fresh, quorum-consistent read.
package source

import (
	"context"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
)

// Address is one entry of a node's .status.addresses.
type Address struct{ Type, Address string }

// Condition is a node's NetworkUnavailable condition.
type Condition struct{ Status, Reason string }

// Node is all that routes need of a Kubernetes Node.
type Node struct {
	Name, UID, ProviderID string
	// PodCIDRs are .spec.podCIDRs, or the one .spec.podCIDR where those are empty
	// (field case B-04).
	PodCIDRs []string
	// ConflictingPodCIDR is .spec.podCIDR where podCIDRs does not hold it.
	ConflictingPodCIDR string
	Addresses          []Address
	ResourceVersion    string
	Created            time.Time
	// Condition is nil when the node has no NetworkUnavailable condition.
	Condition *Condition
	// Labels are those of the keys asked for.
	Labels map[string]string
}

// Field is a field whose change is relevant.
type Field uint8

// The relevant fields; a set is a sum of them.
const (
	FieldPodCIDRs Field = 1 << iota
	FieldAddresses
	FieldUID
	FieldProviderID
	FieldLabels
)

// Sink takes what a source sees. Its methods do not block for long, and are
// called from one goroutine at a time.
type Sink interface {
	// Replace makes nodes the whole truth.
	Replace(nodes []Node, resourceVersion string)
	// Added, Updated and Deleted tell of single changes; Updated only when a
	// relevant field or the condition changed (then fields is 0).
	Added(node Node)
	Updated(node Node, fields Field)
	Deleted(name string)
}

// Presence is what a fresh read says of one node.
type Presence struct {
	Name, UID string
	Present   bool
	PodCIDRs  []string
}

// Census is the result of a fresh read.
type Census struct {
	Nodes           []Presence
	Total           int
	ResourceVersion string
}

// Source gives nodes to a sink.
type Source interface {
	// Run gives the sink a snapshot and then the changes, until ctx ends. It
	// retries by itself what fails on the way. labelKeys are the labels to keep.
	Run(ctx context.Context, labelKeys []string, sink Sink) error
	// Census reads afresh, past every cache, whether nodes exist (the deletion
	// guard's question).
	Census(ctx context.Context, names []string) (Census, error)
	// Problem says why the source's nodes may be old; nil when they are not.
	Problem() error
}

// podCIDRs reads a node's pod CIDRs without copying.
func podCIDRs(n *corev1.Node) []string {
	if len(n.Spec.PodCIDRs) > 0 || n.Spec.PodCIDR == "" {
		return n.Spec.PodCIDRs
	}
	return []string{n.Spec.PodCIDR}
}

// Relevant says which fields that routes depend on differ between two states of
// a node. It allocates nothing for two states of equal relevance: heartbeats are
// most of what an API server sends.
func Relevant(old, updated *corev1.Node, labelKeys []string) Field {
	var fields Field
	if !slices.Equal(old.Spec.PodCIDRs, updated.Spec.PodCIDRs) || old.Spec.PodCIDR != updated.Spec.PodCIDR {
		if !slices.Equal(podCIDRs(old), podCIDRs(updated)) {
			fields |= FieldPodCIDRs
		}
	}
	if !slices.Equal(old.Status.Addresses, updated.Status.Addresses) {
		fields |= FieldAddresses
	}
	if old.UID != updated.UID {
		fields |= FieldUID
	}
	if old.Spec.ProviderID != updated.Spec.ProviderID {
		fields |= FieldProviderID
	}
	for _, key := range labelKeys {
		before, had := old.Labels[key]
		after, has := updated.Labels[key]
		if before != after || had != has {
			return fields | FieldLabels
		}
	}
	return fields
}

// condition finds a node's NetworkUnavailable condition.
func condition(n *corev1.Node) *corev1.NodeCondition {
	for i := range n.Status.Conditions {
		if n.Status.Conditions[i].Type == corev1.NodeNetworkUnavailable {
			return &n.Status.Conditions[i]
		}
	}
	return nil
}

func sameCondition(old, updated *corev1.Node) bool {
	a, b := condition(old), condition(updated)
	if a == nil || b == nil {
		return a == b
	}
	return a.Status == b.Status && a.Reason == b.Reason
}

// fromKube makes the plain value.
func fromKube(n *corev1.Node, labelKeys []string) Node {
	out := Node{
		Name: n.Name, UID: string(n.UID), ProviderID: n.Spec.ProviderID, PodCIDRs: podCIDRs(n),
		ResourceVersion: n.ResourceVersion, Created: n.CreationTimestamp.Time,
	}
	if n.Spec.PodCIDR != "" && !slices.Contains(out.PodCIDRs, n.Spec.PodCIDR) {
		out.ConflictingPodCIDR = n.Spec.PodCIDR
	}
	if len(n.Status.Addresses) > 0 {
		out.Addresses = make([]Address, len(n.Status.Addresses))
		for i, a := range n.Status.Addresses {
			out.Addresses[i] = Address{Type: string(a.Type), Address: a.Address}
		}
	}
	if c := condition(n); c != nil {
		out.Condition = &Condition{Status: string(c.Status), Reason: c.Reason}
	}
	for _, key := range labelKeys {
		if value, ok := n.Labels[key]; ok {
			if out.Labels == nil {
				out.Labels = map[string]string{}
			}
			out.Labels[key] = value
		}
	}
	return out
}

// trim keeps of a node only what routes need; the informer stores the result
// (field case B-14).
func trim(n *corev1.Node, labelKeys []string) *corev1.Node {
	out := &corev1.Node{}
	out.Name, out.UID, out.ResourceVersion, out.CreationTimestamp = n.Name, n.UID, n.ResourceVersion, n.CreationTimestamp
	out.Spec.ProviderID, out.Spec.PodCIDR, out.Spec.PodCIDRs = n.Spec.ProviderID, n.Spec.PodCIDR, n.Spec.PodCIDRs
	out.Status.Addresses = n.Status.Addresses
	if c := condition(n); c != nil {
		out.Status.Conditions = []corev1.NodeCondition{{Type: c.Type, Status: c.Status, Reason: c.Reason}}
	}
	for _, key := range labelKeys {
		if value, ok := n.Labels[key]; ok {
			if out.Labels == nil {
				out.Labels = map[string]string{}
			}
			out.Labels[key] = value
		}
	}
	return out
}
