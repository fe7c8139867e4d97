package plan

import (
	"iter"
	"net/netip"

	"github.com/waymark-routes/waymark/internal/prefix"
)

// Abilities are what the plugin can do, as far as planning cares.
type Abilities struct {
	// IPv4 and IPv6 say which families are routed.
	IPv4, IPv6 bool
	// Replace says that a row can be pointed elsewhere with no gap.
	Replace bool
}

// World is what a decision looks at: the cluster, its nodes, and the route view.
// It is a plain in-memory index with no clock and no I/O; its owner (the engine)
// changes it, one call at a time, and asks Decide.
type World struct {
	// CIDRs are the cluster's pod address ranges, canonical. A destination is
	// ours only if it lies fully inside one of them (field case B-21).
	CIDRs []netip.Prefix
	// Abilities of the plugin.
	Abilities Abilities

	nodes  *nodeIndex
	routes *routeIndex
	tables []string
	// others counts listed rows outside the cluster's CIDRs, unreadable those
	// whose destination is no CIDR; neither is kept.
	others, unreadable int
}

// NewWorld makes an empty world.
func NewWorld(cidrs []netip.Prefix) *World {
	return &World{
		CIDRs:     cidrs,
		Abilities: Abilities{IPv4: true, IPv6: true},
		nodes:     newNodeIndex(),
		routes:    newRouteIndex(),
	}
}

// InRange says whether d lies fully inside one of the cluster's CIDRs.
func (w *World) InRange(d netip.Prefix) bool {
	for _, cidr := range w.CIDRs {
		if prefix.Contains(cidr, d) {
			return true
		}
	}
	return false
}

// Serves says whether the plugin routes d's family.
func (w *World) Serves(d netip.Prefix) bool {
	if d.Addr().Is4() {
		return w.Abilities.IPv4
	}
	return w.Abilities.IPv6
}

// Node finds a node by name; nil when there is none.
func (w *World) Node(name string) *Node { return w.nodes.byName[name] }

// Nodes yields all nodes in no order.
func (w *World) Nodes() iter.Seq[*Node] {
	return func(yield func(*Node) bool) {
		for _, n := range w.nodes.byName {
			if !yield(n) {
				return
			}
		}
	}
}

// NodeCount is the number of nodes.
func (w *World) NodeCount() int { return len(w.nodes.byName) }

// PutNode adds a node or replaces the one of its name.
func (w *World) PutNode(n *Node) { w.nodes.put(n) }

// RemoveNode removes a node.
func (w *World) RemoveNode(name string) { w.nodes.remove(name) }

// ReplaceNodes makes nodes the whole truth.
func (w *World) ReplaceNodes(nodes []*Node) {
	w.nodes = newNodeIndex()
	for _, n := range nodes {
		w.nodes.put(n)
	}
}

// Claimants are the nodes that hold d as a pod CIDR.
func (w *World) Claimants(d netip.Prefix) []*Node { return w.nodes.byClaim[d] }

// ReplaceRows makes a complete list the route view. Rows outside the cluster's
// CIDRs or without a readable destination are only counted; warn is called for
// the latter (field case B-22). Rows of destinations for which keep answers true
// stay as they are: our own write to them ended after the list began.
func (w *World) ReplaceRows(tables []string, rows []*Row, keep func(netip.Prefix) bool, warn func(*Row)) {
	old := w.routes
	w.routes, w.tables, w.others, w.unreadable = newRouteIndex(), tables, 0, 0
	for d, kept := range old.byDestination {
		if keep(d) {
			for _, r := range kept {
				w.routes.add(r)
			}
		}
	}
	for _, r := range rows {
		d, err := prefix.Canonical(r.DestinationText)
		if err != nil {
			w.unreadable++
			warn(r)
			continue
		}
		if r.Destination = d; !w.InRange(d) {
			w.others++
			continue
		}
		if !keep(d) {
			w.routes.add(r)
		}
	}
}

// ClearRows forgets the route view.
func (w *World) ClearRows() { w.routes, w.tables = newRouteIndex(), nil }

// AddRow adds a row that our own write made. Its Destination is set.
func (w *World) AddRow(r *Row) { w.routes.add(r) }

// RemoveRow removes a row that our own write removed.
func (w *World) RemoveRow(r *Row) { w.routes.remove(r) }

// Rows are the rows of one destination.
func (w *World) Rows(d netip.Prefix) []*Row { return w.routes.byDestination[d] }

// RowCount is the number of rows in range that are not foreign.
func (w *World) RowCount() int { return w.routes.count }

// Tables are the route tables that the latest list named.
func (w *World) Tables() []string { return w.tables }

// OtherRows counts rows of the latest list that are none of ours: outside the
// cluster's CIDRs, and those whose destination is no CIDR.
func (w *World) OtherRows() (outside, unreadable int) { return w.others, w.unreadable }

// Destinations yields every destination that is claimed or has rows, each once,
// in no order.
func (w *World) Destinations() iter.Seq[netip.Prefix] {
	return func(yield func(netip.Prefix) bool) {
		for d := range w.nodes.byClaim {
			if !yield(d) {
				return
			}
		}
		for d := range w.routes.byDestination {
			if len(w.nodes.byClaim[d]) == 0 && !yield(d) {
				return
			}
		}
	}
}

// Touched adds to set the destinations that a node's change may touch: those it
// holds, and those of every row that may point at it. Call it before and after
// the change. It costs what the node costs, not what the cluster costs.
func (w *World) Touched(n *Node, set map[netip.Prefix]struct{}) {
	for _, d := range n.destinations {
		set[d] = struct{}{}
	}
	w.routes.of(n, func(r *Row) { set[r.Destination] = struct{}{} })
}

// HasRows says whether rows that are not foreign point at the node.
func (w *World) HasRows(n *Node) bool {
	found := false
	w.routes.of(n, func(r *Row) {
		if found || r.Foreign {
			return
		}
		if at, how := w.nodes.resolve(r); how == resolvedNode && at == n {
			found = true
		}
	})
	return found
}

// Resolve finds the node that a row points at; nil when it points at none or it
// cannot be told.
func (w *World) Resolve(r *Row) *Node {
	n, _ := w.nodes.resolve(r)
	return n
}

// Undetermined says that it cannot be told what a row points at.
func (w *World) Undetermined(r *Row) bool {
	_, how := w.nodes.resolve(r)
	return how == undetermined
}

// Mismatched says whether the list and Kubernetes seem to name machines
// differently: three or more live rows are listed, and none resolves to a node.
func (w *World) Mismatched() bool {
	rows := 0
	for _, list := range w.routes.byDestination {
		for _, r := range list {
			if r.Foreign || r.Written || r.State == StateBlackhole || r.Target.Kind == TargetNone {
				continue
			}
			switch _, how := w.nodes.resolve(r); how {
			case resolvedNode:
				return false
			case resolvedNone:
				rows++
			case undetermined:
			}
		}
	}
	return rows >= 3
}
