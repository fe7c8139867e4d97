package plan

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"time"

	"github.com/waymark-routes/waymark/internal/prefix"
)

// Address is one entry of a node's .status.addresses.
type Address struct {
	// Type is for example InternalIP or Hostname.
	Type string
	// Address is the address or name as written there.
	Address string
}

// Condition is a node's NetworkUnavailable condition.
type Condition struct{ Status, Reason string }

// Node is all that reconciling knows of a Kubernetes Node. Values are made by
// NewNode and not changed afterwards.
type Node struct {
	Name, UID, ProviderID string
	// PodCIDRs as the node has them; see Destinations for the usable ones.
	PodCIDRs  []string
	Addresses []Address
	// Created is zero where the source has no creationTimestamp.
	Created time.Time
	// Condition is nil when the node has no NetworkUnavailable condition.
	Condition *Condition
	// Labels are those that the plugin asked for.
	Labels map[string]string

	destinations []netip.Prefix
	ips          []netip.Addr
	problems     []string
}

// NewNode prepares a node: it reads the pod CIDRs and addresses once. Pod CIDRs
// that are no CIDR are no destinations; each is named in Problems (field case
// B-01). One CIDR given twice counts once.
func NewNode(n Node) *Node {
	n.destinations, n.ips, n.problems = nil, nil, nil
	for i, text := range n.PodCIDRs {
		destination, err := prefix.Canonical(text)
		if err != nil {
			n.problems = append(n.problems, fmt.Sprintf("pod CIDR %d %q is no CIDR; taken as not assigned yet", i+1, text))
			continue
		}
		if !slices.Contains(n.destinations, destination) {
			n.destinations = append(n.destinations, destination)
		}
	}
	for _, address := range n.Addresses {
		if ip, ok := prefix.Addr(address.Address); ok && !slices.Contains(n.ips, ip) {
			n.ips = append(n.ips, ip)
		}
	}
	slices.SortFunc(n.ips, netip.Addr.Compare)
	return &n
}

// Destinations are the node's usable pod CIDRs, canonical, each once.
func (n *Node) Destinations() []netip.Prefix { return n.destinations }

// IPs are the node's addresses that are IPs, sorted, each once. Names never
// count when addresses are compared (field cases B-12, B-13).
func (n *Node) IPs() []netip.Addr { return n.ips }

// Problems names pod CIDRs that cannot be read.
func (n *Node) Problems() []string { return n.problems }

// Holds says whether d is one of the node's pod CIDRs.
func (n *Node) Holds(d netip.Prefix) bool { return slices.Contains(n.destinations, d) }

// SameMachine says whether other stands for the same machine: same UID and
// provider id (field case B-10).
func (n *Node) SameMachine(other *Node) bool {
	return n.UID == other.UID && n.ProviderID == other.ProviderID
}

// instanceSegment is the part of a provider id (or instance id) after its last
// "/" or ".".
func instanceSegment(id string) string {
	return id[strings.LastIndexAny(id, "/.")+1:]
}

// matchesInstance says whether the provider id ends in the instance id after "/"
// or ".", or is it.
func matchesInstance(providerID, instanceID string) bool {
	rest, ok := strings.CutSuffix(providerID, instanceID)
	if !ok || instanceID == "" {
		return false
	}
	return rest == "" || rest[len(rest)-1] == '/' || rest[len(rest)-1] == '.'
}

// nodeIndex holds all nodes and finds them by what a route may call its target.
type nodeIndex struct {
	byName     map[string]*Node
	byClaim    map[netip.Prefix][]*Node
	byProvider map[string][]*Node
	bySegment  map[string][]*Node
	byIP       map[netip.Addr][]*Node
}

func newNodeIndex() *nodeIndex {
	return &nodeIndex{
		byName:     map[string]*Node{},
		byClaim:    map[netip.Prefix][]*Node{},
		byProvider: map[string][]*Node{},
		bySegment:  map[string][]*Node{},
		byIP:       map[netip.Addr][]*Node{},
	}
}

func (x *nodeIndex) put(n *Node) {
	x.remove(n.Name)
	x.byName[n.Name] = n
	for _, d := range n.destinations {
		x.byClaim[d] = append(x.byClaim[d], n)
	}
	for _, ip := range n.ips {
		x.byIP[ip] = append(x.byIP[ip], n)
	}
	if n.ProviderID != "" {
		x.byProvider[n.ProviderID] = append(x.byProvider[n.ProviderID], n)
		segment := instanceSegment(n.ProviderID)
		x.bySegment[segment] = append(x.bySegment[segment], n)
	}
}

func (x *nodeIndex) remove(name string) {
	n := x.byName[name]
	if n == nil {
		return
	}
	delete(x.byName, name)
	for _, d := range n.destinations {
		dropFrom(x.byClaim, d, n)
	}
	for _, ip := range n.ips {
		dropFrom(x.byIP, ip, n)
	}
	if n.ProviderID != "" {
		dropFrom(x.byProvider, n.ProviderID, n)
		dropFrom(x.bySegment, instanceSegment(n.ProviderID), n)
	}
}

// dropFrom removes one value from a slice in a map, and the key with the last.
func dropFrom[K comparable, V comparable](m map[K][]V, key K, value V) {
	rest := m[key]
	i := slices.Index(rest, value)
	if i < 0 {
		return
	}
	if len(rest) == 1 {
		delete(m, key)
		return
	}
	rest[i] = rest[len(rest)-1]
	clear(rest[len(rest)-1:])
	m[key] = rest[:len(rest)-1]
}
