package engine

import (
	"cmp"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"time"

	"github.com/waymark-routes/waymark/reconciler/plan"
)

// Reasons of verdicts and events. The first two are upstream's words.
const (
	reasonCreated     = "RouteCreated"
	reasonFailed      = "FailedToCreateRoute"
	reasonConflict    = "PodCIDRConflict"
	reasonOutOfRange  = "PodCIDROutsideClusterCIDR"
	reasonFamily      = "FamilyNotServed"
	reasonNoPodCIDR   = "NoPodCIDR"
	reasonNotYet      = "RouteNotConfirmedYet"
	reasonNotManaged  = "NotManaged"
	messageAvailable  = "all routes are in place"
	messageNotManaged = "the plugin does not manage this node"
)

// standing is how one pod CIDR stands for one node.
type standing uint8

const (
	standsInPlace standing = iota
	standsIgnored          // the family is not served, and that is fine
	standsNotManaged
	standsProgress // work is under way, or nothing is known for certain
	standsUndetermined
	standsFailed
)

// stand says how destination d stands for node n, with a reason and text where
// it failed.
func (e *Engine) stand(d netip.Prefix, n *plan.Node) (s standing, reason, text string) {
	decision := plan.Decide(e.world, d)
	ds := e.dests[d]
	switch {
	case decision.State == plan.OutOfRange:
		return standsFailed, reasonOutOfRange, d.String() + ": " + decision.Note
	case decision.State == plan.FamilyIgnored:
		if e.cfg.UnsupportedFamilyFails {
			return standsFailed, reasonFamily, d.String() + ": " + decision.Note
		}
		return standsIgnored, "", ""
	case decision.Holder != n:
		if e.world.Served(d, n) {
			return standsInPlace, "", ""
		}
		return standsFailed, reasonConflict, d.String() + ": held by node " + decision.Holder.Name
	case ds != nil && ds.notManaged != "" && ds.notManaged == n.UID:
		return standsNotManaged, "", ""
	case decision.State == plan.InPlace:
		if ds != nil && ds.distrust {
			return standsFailed, ds.reason, ds.text
		}
		return standsInPlace, "", ""
	case decision.State == plan.Undetermined:
		return standsUndetermined, "", ""
	case decision.State == plan.Missing && ds != nil && ds.failures > 0 && e.certain(ds):
		return standsFailed, ds.reason, ds.text
	default:
		return standsProgress, "", ""
	}
}

// certain says whether a failure is to be believed: a definite one at once,
// others from the third in a row or after 60 s.
func (e *Engine) certain(ds *dest) bool {
	return ds.definite || ds.failures >= softFailures || !e.now.Before(ds.failedSince.Add(softFailureTime))
}

// verdict says what is known of a node. Availability NoVerdict means that
// nothing is to be said. progress tells that the answer is still open.
func (e *Engine) verdict(n *plan.Node) (v Verdict, progress bool) {
	v = Verdict{Node: n.Name, UID: n.UID}
	wanted, placed, unmanaged, unknown := 0, 0, 0, false
	var texts []string
	for _, d := range n.Destinations() {
		s, reason, text := e.stand(d, n)
		switch s {
		case standsIgnored:
			continue
		case standsInPlace:
			placed++
		case standsNotManaged:
			unmanaged++
		case standsProgress:
			progress = true
		case standsUndetermined:
			unknown = true
		case standsFailed:
			texts = append(texts, text)
			v.Reason = cmp.Or(v.Reason, reason)
		}
		wanted++
	}
	switch {
	case len(texts) > 0:
		v.Availability, v.Message = Unavailable, strings.Join(texts, "; ")
	case wanted == 0:
		if e.world.HasRows(n) {
			v.Availability, v.Reason, v.Message = Unavailable, reasonNoPodCIDR, "the node has no usable pod CIDR, but routes under its name remain"
		}
	case progress || unknown:
	case placed == 0 && unmanaged > 0:
		v.Availability, v.Reason, v.Message = NotManaged, reasonNotManaged, messageNotManaged
	default:
		v.Availability, v.Reason, v.Message = Available, reasonCreated, messageAvailable
	}
	return v, progress
}

// sendVerdicts sends what has changed for the nodes that this step touched. None
// is sent before the first complete list of the session (invariant S1).
func (e *Engine) sendVerdicts() {
	if e.session == nil || !e.session.synced || !e.viewValid {
		return
	}
	if e.allDirty {
		for n := range e.world.Nodes() {
			e.dirty[n.Name] = struct{}{}
		}
		e.allDirty = false
	}
	if len(e.dirty) == 0 {
		return
	}
	for _, name := range slices.Sorted(maps.Keys(e.dirty)) {
		if n, st := e.world.Node(name), e.nodes[name]; n != nil && st != nil {
			e.sendVerdict(n, st)
		}
	}
	clear(e.dirty)
}

func (e *Engine) sendVerdict(n *plan.Node, st *nodeState) {
	v, progress := e.verdict(n)
	if v.Availability == NoVerdict && progress && n.Condition == nil && !st.sentEver && !e.cfg.DryRun {
		// A new node must not get pods before its routes are there.
		due := later(st.firstSeen, e.firstList).Add(pendingAfter)
		if e.now.Before(due) {
			e.addTimer(due, timer{node: n.Name})
		} else {
			v.Availability, v.Reason, v.Message = Unavailable, reasonNotYet, "routes are being made"
		}
	}
	if v.Availability == Available && !st.changedAt.IsZero() {
		e.emit(RouteConfirmed{Took: e.now.Sub(st.changedAt)})
		st.changedAt = time.Time{}
	}
	v.Notice, st.notice = st.notice, nil
	changed := v.Availability != NoVerdict && (!st.sentEver || st.sent.Availability != v.Availability || st.sent.Reason != v.Reason || st.sent.Message != v.Message)
	if changed && v.Notice == nil && v.Availability == Unavailable && (v.Reason == reasonConflict || v.Reason == reasonOutOfRange) {
		v.Notice = &Notice{Type: "Warning", Reason: reasonFailed, Message: v.Message}
	}
	if !changed && v.Notice == nil {
		return
	}
	if v.Availability != NoVerdict {
		st.sent, st.sentEver = v, true
		st.sent.Notice = nil
	}
	e.emit(SendVerdict{Session: e.session.id, Verdict: v})
}

// noteFailure makes an event on the node that a write was for.
func (e *Engine) noteFailure(ds *dest, op plan.Op) {
	if op.Node == nil {
		return
	}
	if st := e.nodes[op.Node.Name]; st != nil {
		st.notice = &Notice{Type: "Warning", Reason: reasonFailed, Message: ds.text}
		e.dirty[op.Node.Name] = struct{}{}
	}
}
