package plan

import (
	"fmt"
	"net/netip"

	"github.com/waymark-routes/waymark/internal/prefix"
)

// TargetKind says in which way a route names its target.
type TargetKind uint8

// The ways to name a target. Only its own kind is matched.
const (
	TargetNone TargetKind = iota
	TargetNodeName
	TargetProviderID
	TargetInstanceID
	TargetAddress
)

// Target is what a route points at, as the cloud names it.
type Target struct {
	Kind  TargetKind
	Value string
}

// String shows the target to people; empty for none.
func (t Target) String() string { return t.Value }

// RouteState is a route's state in the cloud.
type RouteState uint8

// The states.
const (
	StateActive RouteState = iota
	StatePending
	StateBlackhole
)

// Row is one listed row of a route table, or one that our own write has made
// since the list. Rows are not changed after they are in a World.
type Row struct {
	ID, Name, Table string
	// DestinationText is the destination as listed.
	DestinationText string
	// Destination is the canonical form; set by World.
	Destination netip.Prefix
	Target      Target
	State       RouteState
	// Addresses is the complete set of the target's addresses where
	// HasAddresses is set.
	Addresses    []Address
	HasAddresses bool
	// NextHop is one address of the target; empty: none is given.
	NextHop  string
	Priority int64
	Origin   string
	ETag     string
	// Foreign rows are somebody else's and never touched.
	Foreign bool
	// Ours rows are marked as this cluster's. Shown only; decisions go by the
	// cluster's CIDRs.
	Ours bool
	// Problem says why the plugin could not look something up; such a row is
	// undetermined.
	Problem string
	// Written is set for rows that stem from our own write and have not been
	// listed since.
	Written bool
}

// stale says whether the addresses that the row carries differ from the node's.
// Addresses are compared as sets of IPs (field cases B-11 to B-13).
func (r *Row) stale(n *Node) bool {
	switch {
	case r.HasAddresses:
		seen := make(map[netip.Addr]struct{}, len(r.Addresses))
		for _, address := range r.Addresses {
			if ip, ok := prefix.Addr(address.Address); ok {
				seen[ip] = struct{}{}
			}
		}
		if len(seen) != len(n.ips) || len(seen) == 0 {
			return true
		}
		for _, ip := range n.ips {
			if _, ok := seen[ip]; !ok {
				return true
			}
		}
		return false
	case r.NextHop != "":
		hop, ok := prefix.Addr(r.NextHop)
		if !ok {
			return true
		}
		for _, ip := range n.ips {
			if ip == hop {
				return false
			}
		}
		return true
	default:
		return false
	}
}

// resolution is what a row's target turned out to be.
type resolution uint8

const (
	resolvedNone resolution = iota // points at no node that we know
	resolvedNode
	undetermined // cannot be told; never deleted, never counted
)

// resolve finds the node that a row points at.
func (x *nodeIndex) resolve(r *Row) (*Node, resolution) {
	if r.Problem != "" {
		return nil, undetermined
	}
	var candidates []*Node
	switch r.Target.Kind {
	case TargetNone:
		return nil, resolvedNone
	case TargetNodeName:
		if n := x.byName[r.Target.Value]; n != nil {
			return n, resolvedNode
		}
		return nil, resolvedNone
	case TargetProviderID:
		candidates = x.byProvider[r.Target.Value]
	case TargetInstanceID:
		for _, n := range x.bySegment[instanceSegment(r.Target.Value)] {
			if matchesInstance(n.ProviderID, r.Target.Value) {
				candidates = append(candidates, n)
			}
		}
	case TargetAddress:
		ip, ok := prefix.Addr(r.Target.Value)
		if !ok {
			return nil, undetermined
		}
		candidates = x.byIP[ip]
	}
	switch len(candidates) {
	case 0:
		return nil, resolvedNone
	case 1:
		return candidates[0], resolvedNode
	default:
		return nil, undetermined
	}
}

// undeterminedReason explains an undetermined row to people.
func undeterminedReason(r *Row) string {
	if r.Problem != "" {
		return "the plugin could not look up the target: " + r.Problem
	}
	if r.Target.Kind == TargetAddress {
		if _, ok := prefix.Addr(r.Target.Value); !ok {
			return fmt.Sprintf("the target %q is no address", r.Target.Value)
		}
	}
	return fmt.Sprintf("the target %q fits more than one node", r.Target.Value)
}

// routeIndex holds the rows of the route view that lie in the cluster's CIDRs.
type routeIndex struct {
	byDestination map[netip.Prefix][]*Row
	byTarget      map[Target][]*Row
	count         int // rows that are not foreign
}

func newRouteIndex() *routeIndex {
	return &routeIndex{byDestination: map[netip.Prefix][]*Row{}, byTarget: map[Target][]*Row{}}
}

// targetKey is the key under which rows of one target meet, whatever way of
// spelling the cloud chose.
func targetKey(t Target) Target {
	switch t.Kind {
	case TargetInstanceID:
		t.Value = instanceSegment(t.Value)
	case TargetAddress:
		if ip, ok := prefix.Addr(t.Value); ok {
			t.Value = ip.String()
		}
	}
	return t
}

func (x *routeIndex) add(r *Row) {
	x.byDestination[r.Destination] = append(x.byDestination[r.Destination], r)
	if r.Target.Kind != TargetNone {
		key := targetKey(r.Target)
		x.byTarget[key] = append(x.byTarget[key], r)
	}
	if !r.Foreign {
		x.count++
	}
}

func (x *routeIndex) remove(r *Row) {
	before := len(x.byDestination[r.Destination])
	dropFrom(x.byDestination, r.Destination, r)
	if len(x.byDestination[r.Destination]) == before {
		return
	}
	if r.Target.Kind != TargetNone {
		dropFrom(x.byTarget, targetKey(r.Target), r)
	}
	if !r.Foreign {
		x.count--
	}
}

// of calls yield for every row that may point at the node: all rows under any of
// the ways to name it. The caller resolves.
func (x *routeIndex) of(n *Node, yield func(*Row)) {
	each := func(t Target) {
		for _, r := range x.byTarget[t] {
			yield(r)
		}
	}
	each(Target{TargetNodeName, n.Name})
	if n.ProviderID != "" {
		each(Target{TargetProviderID, n.ProviderID})
		each(Target{TargetInstanceID, instanceSegment(n.ProviderID)})
	}
	for _, ip := range n.ips {
		each(Target{TargetAddress, ip.String()})
	}
}
