package plan

import (
	"cmp"
	"fmt"
	"maps"
	"net/netip"
	"slices"
)

// OpKind says what an operation does.
type OpKind uint8

// The operations.
const (
	OpDelete OpKind = iota
	OpReplace
	OpCreate
)

// String is the operation's name for people.
func (k OpKind) String() string {
	switch k {
	case OpDelete:
		return "delete"
	case OpReplace:
		return "replace"
	case OpCreate:
		return "create"
	default:
		return "unknown"
	}
}

// Op is one operation on one destination.
type Op struct {
	Kind        OpKind
	Destination netip.Prefix
	// Row is what is deleted or replaced, as listed.
	Row *Row
	// Node is what a create or replace shall point at.
	Node *Node
	// Reason says why, for people.
	Reason string
	// Exempt deletes are not held by the deletion guard: a create of the same
	// destination waits for them, and the row is certainly wrong.
	Exempt bool
}

// State says how one destination stands for the node that claims it, or, where
// nobody claims it, what its rows are.
type State uint8

// The states of a destination.
const (
	// InPlace: every table has an active row for the holder.
	InPlace State = iota
	// Pending: rows are there, but not in effect yet.
	Pending
	// Missing: operations are needed.
	Missing
	// Undetermined: a row is there whose target cannot be told.
	Undetermined
	// OutOfRange: claimed, but outside every cluster CIDR. Never written.
	OutOfRange
	// FamilyIgnored: the plugin does not route this family.
	FamilyIgnored
	// Unclaimed: no node holds it.
	Unclaimed
)

// Decision is what one destination needs.
type Decision struct {
	Destination netip.Prefix
	// Holder is the claimant that has or gets the route; nil when nobody claims.
	Holder *Node
	// State is how the destination stands for the holder.
	State State
	// Ops are needed, in this order: deletes, then replaces, then a create.
	Ops []Op
	// Note explains states other than InPlace and Missing.
	Note string
}

// Served says whether claimant n has the route: it is the holder, or rows of its
// own stand beside the holder's.
func (w *World) Served(d netip.Prefix, n *Node) bool {
	for _, r := range w.routes.byDestination[d] {
		if r.Foreign || r.State != StateActive {
			continue
		}
		if at, how := w.nodes.resolve(r); how == resolvedNode && at == n && !r.stale(n) {
			return true
		}
	}
	return false
}

// holder chooses among the claimants: the one that the table shows, else the
// older one, then the lower name (field case B-09).
func (w *World) holder(d netip.Prefix) *Node {
	claimants := w.nodes.byClaim[d]
	if len(claimants) < 2 {
		if len(claimants) == 0 {
			return nil
		}
		return claimants[0]
	}
	shown := map[*Node]bool{}
	for _, r := range w.routes.byDestination[d] {
		if r.Foreign || r.State == StateBlackhole {
			continue
		}
		if n, how := w.nodes.resolve(r); how == resolvedNode {
			shown[n] = true
		}
	}
	return slices.MinFunc(claimants, func(a, b *Node) int {
		if shown[a] != shown[b] {
			if shown[a] {
				return -1
			}
			return 1
		}
		if a.Created.IsZero() != b.Created.IsZero() { // unknown age is no age
			if b.Created.IsZero() {
				return -1
			}
			return 1
		}
		if c := a.Created.Compare(b.Created); c != 0 {
			return c
		}
		return cmp.Compare(a.Name, b.Name)
	})
}

// tableView is what one table shows of one destination.
type tableView struct {
	good, pending, unknown bool
	// replaceable is a row to point at the holder in place of a delete and a
	// create.
	replaceable *Op
}

// Decide says what destination d needs. It costs what the rows and claimants of
// d cost.
//
// The rules, in upstream's order (what upstream does, steps 3 to 6) with the
// differences that docs/differences.md lists: a row is deleted when it is a
// blackhole, points at no node, points at a node that does not hold the CIDR,
// or carries other addresses than the node has. Rows that are foreign, lie
// outside the cluster's CIDRs, cannot be determined, or belong to another
// claimant are never deleted.
func Decide(w *World, d netip.Prefix) Decision {
	decision := Decision{Destination: d, Holder: w.holder(d), State: Unclaimed}
	holder := decision.Holder
	if !w.InRange(d) {
		if holder != nil {
			decision.State, decision.Note = OutOfRange, "the pod CIDR lies outside every cluster CIDR"
		}
		return decision
	}
	served := w.Serves(d)
	tables := map[string]*tableView{}
	for _, table := range w.tables {
		tables[table] = &tableView{}
	}
	wanted := holder != nil && served
	for _, r := range w.routes.byDestination[d] {
		view := tables[r.Table]
		if view == nil {
			view = &tableView{}
			tables[r.Table] = view
		}
		reason, exempt := "", false
		n, how := w.nodes.resolve(r)
		switch {
		case r.Foreign:
			decision.Note = "a row of somebody else has the destination"
			continue
		case how == undetermined:
			view.unknown, decision.Note = true, undeterminedReason(r)
			continue
		case r.State == StateBlackhole:
			reason, exempt = "the row is a blackhole", true
		case how == resolvedNone && r.Target.Kind == TargetNone:
			reason = "the row has no target"
		case how == resolvedNone:
			reason, exempt = fmt.Sprintf("the target %q is no node", r.Target.Value), r.Target.Kind == TargetNodeName
		case !n.Holds(d):
			reason, exempt = fmt.Sprintf("node %s does not hold the CIDR", n.Name), true
		case n != holder:
			continue // another claimant's row
		case r.stale(n):
			reason = fmt.Sprintf("the row's addresses differ from those of node %s", n.Name)
		default:
			view.good = true
			view.pending = view.pending || r.State == StatePending
			continue
		}
		if !served {
			continue // the plugin would refuse the delete
		}
		op := Op{Kind: OpDelete, Destination: d, Row: r, Reason: reason, Exempt: exempt && wanted}
		if w.Abilities.Replace && wanted && view.replaceable == nil {
			op.Kind, op.Node, op.Reason = OpReplace, holder, fmt.Sprintf("node %s holds the CIDR, but %s", holder.Name, reason)
			view.replaceable = &op
			continue
		}
		decision.Ops = append(decision.Ops, op)
	}
	w.settle(&decision, tables, wanted, served)
	return decision
}

// settle turns what the tables show into the decision's state and its replaces
// and create.
func (w *World) settle(decision *Decision, tables map[string]*tableView, wanted, served bool) {
	if len(tables) == 0 {
		tables = map[string]*tableView{"": {}}
	}
	create, pending, unknown := false, false, false
	for _, table := range slices.Sorted(maps.Keys(tables)) {
		view := tables[table]
		switch {
		case view.replaceable != nil && (view.good || view.unknown):
			// The table has (or may have) the wanted row already: the other is
			// removed.
			op := *view.replaceable
			op.Kind, op.Node = OpDelete, nil
			decision.Ops = slices.Insert(decision.Ops, 0, op)
			pending, unknown = pending || view.pending, unknown || !view.good
		case view.replaceable != nil:
			decision.Ops = append(decision.Ops, *view.replaceable)
		case view.good:
			pending = pending || view.pending
		case view.unknown:
			unknown = true
		default:
			create = true
		}
	}
	if !wanted {
		if decision.Holder != nil && !served {
			decision.State, decision.Note = FamilyIgnored, "the plugin does not route this family"
		}
		return
	}
	if create {
		decision.Ops = append(decision.Ops, Op{
			Kind: OpCreate, Destination: decision.Destination, Node: decision.Holder,
			Reason: fmt.Sprintf("node %s holds the CIDR and has no route", decision.Holder.Name),
		})
	}
	switch {
	case create || slices.ContainsFunc(decision.Ops, func(op Op) bool { return op.Kind == OpReplace }):
		decision.State = Missing
	case unknown:
		decision.State = Undetermined
	case pending:
		decision.State, decision.Note = Pending, "the cloud has accepted the route, but it is not in effect yet"
	default:
		decision.State, decision.Note = InPlace, ""
	}
}
