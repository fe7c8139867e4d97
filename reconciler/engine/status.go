package engine

import (
	"cmp"
	"net/netip"
	"slices"
	"time"

	"github.com/waymark-routes/waymark/reconciler/plan"
)

// Row is what status shows of a destination that a node wants, or of a row that
// nobody wants. See RouteStatus in status.proto for the words of State.
type Row struct {
	Node, Destination, Target string
	State                     string
	Cause                     Cause
	Since                     time.Time
	Error                     string
	NextAttempt               time.Time
	Attempts                  int
	Table                     string
}

// Overview is the state on one screen.
type Overview struct {
	Now, Begun     time.Time
	SessionID      string
	SessionSince   time.Time
	Holder         string
	WatcherVersion string
	Synced         bool
	Unlimited      bool
	WriteUntil     time.Time
	Cluster        *Cluster
	Plugin         PluginChanged
	WatchBased     bool
	DryRun         bool
	LastList       time.Time
	NextResync     time.Time
	ThrottledUntil time.Time
	Guard          GuardMode
	Held           int
	HeldSince      time.Time
	Nodes          int
	Observed       int
	Desired        int
	InPlace        int
	Failed         int
	InFlight       int
	Queued         int
	NotReady       string
	Settled        bool
	Warnings       []string
	Quotas         []Quota
}

// ClusterReady says whether the first snapshot and the first complete list of
// this session are there; else why not. The health service waymark.cluster
// follows it.
func (e *Engine) ClusterReady() (bool, string) {
	switch {
	case e.plugin.Info == nil:
		return false, "no plugin has answered yet" + reasonIn(e.plugin.Reason)
	case e.session == nil:
		return false, "no watcher holds a session"
	case !e.session.synced:
		return false, "the first snapshot is not complete"
	case !e.viewValid && e.listError != "":
		return false, "the list of routes failed: " + e.listError
	case !e.viewValid:
		return false, "the first list of routes is not complete"
	case !e.plugin.Healthy:
		return false, "the plugin is away" + reasonIn(e.plugin.Reason)
	default:
		return true, ""
	}
}

// PluginHealthy says whether the plugin has identified itself and serves. The
// health service waymark.plugin follows it.
func (e *Engine) PluginHealthy() bool { return e.plugin.Healthy && e.plugin.Info != nil }

// InFlight is the number of writes that have not been answered.
func (e *Engine) InFlight() int { return len(e.calls) }

// Held is the number of deletes that the guard holds.
func (e *Engine) Held() int { return len(e.held) }

// PollOnly says whether the feature gate is off.
func (e *Engine) PollOnly() bool { return e.cfg.PollOnly }

func reasonIn(reason string) string {
	if reason == "" {
		return ""
	}
	return ": " + reason
}

// Settled says whether all that can be done now is done: nothing is in flight,
// queued or about to be listed. Failed destinations wait for their retry.
func (e *Engine) Settled() bool {
	ready, _ := e.ClusterReady()
	return ready && len(e.calls) == 0 && e.queuedCount() == 0 && e.list == nil && e.listWanted == nil && !e.allDirty
}

// Overview shows the state on one screen. It costs as much as there are
// destinations.
func (e *Engine) Overview() Overview {
	o := Overview{
		Now: e.now, Begun: e.begun, Cluster: e.cluster, Plugin: e.plugin, WatchBased: !e.cfg.PollOnly, DryRun: e.cfg.DryRun,
		NextResync: e.resyncAt, Guard: e.cfg.Guard, Held: len(e.held), Nodes: e.world.NodeCount(), Observed: e.world.RowCount(),
		InFlight: len(e.calls), Queued: e.queuedCount(), Settled: e.Settled(), Quotas: e.quotas,
	}
	if e.viewValid {
		o.LastList = e.viewEnded
	}
	if e.cfg.PollOnly {
		o.NextResync = e.pollAt
	}
	if e.now.Before(e.pausedUntil) {
		o.ThrottledUntil = e.pausedUntil
	}
	if s := e.session; s != nil {
		o.SessionID, o.SessionSince, o.Holder, o.WatcherVersion = s.id, s.since, s.holder, s.watcher
		o.Synced, o.Unlimited, o.WriteUntil = s.synced, s.unlimited, s.writeUntil
	}
	for ds := range e.held {
		if o.HeldSince.IsZero() || ds.held.Before(o.HeldSince) {
			o.HeldSince = ds.held
		}
	}
	_, o.NotReady = e.ClusterReady()
	if e.now.Before(e.mismatchUntil) {
		o.Warnings = append(o.Warnings, "no listed route points at a node: the plugin and Kubernetes name machines differently; deletes stop until "+e.mismatchUntil.Format(time.RFC3339))
	}
	for d := range e.world.Destinations() {
		for _, n := range e.world.Claimants(d) {
			o.Desired++
			if s, _, _ := e.stand(d, n); s == standsInPlace {
				o.InPlace++
			}
		}
		if ds := e.dests[d]; ds != nil && ds.failures > 0 {
			o.Failed++
		}
	}
	return o
}

// Rows lists what every node wants and the rows that nobody wants, in order of
// destination; only those of one node when a name is given.
func (e *Engine) Rows(node string) []Row {
	var rows []Row
	for d := range e.world.Destinations() {
		rows = append(rows, e.rowsOf(d)...)
	}
	if node != "" {
		rows = slices.DeleteFunc(rows, func(r Row) bool { return r.Node != node && r.Target != node })
	}
	slices.SortFunc(rows, func(a, b Row) int {
		pa, _ := netip.ParsePrefix(a.Destination)
		pb, _ := netip.ParsePrefix(b.Destination)
		return cmp.Or(pa.Compare(pb), cmp.Compare(a.Node, b.Node), cmp.Compare(a.Target, b.Target))
	})
	return rows
}

func (e *Engine) rowsOf(d netip.Prefix) []Row {
	decision := plan.Decide(e.world, d)
	ds := e.dests[d]
	history := e.history[d]
	row := func(node, target, state string) Row {
		r := Row{Node: node, Destination: d.String(), Target: target, State: state, Cause: history.cause, Since: history.at}
		if ds == nil {
			return r
		}
		r.Attempts = ds.failures
		if ds.failures > 0 {
			r.Error, r.NextAttempt, r.Since, r.Cause = ds.text, ds.nextAt, ds.failedSince, ds.cause
		}
		if ds.call != nil {
			r.Since, r.Cause = ds.call.started, ds.cause
		}
		return r
	}
	var rows []Row
	for _, n := range e.world.Claimants(d) {
		target := n.Name
		for _, r := range e.world.Rows(d) {
			if at := e.world.Resolve(r); at == n && !r.Written {
				target = r.Target.Value
			}
		}
		r := row(n.Name, target, e.stateWord(decision, ds, n))
		if n != decision.Holder {
			r.Error, r.NextAttempt, r.Attempts = "", time.Time{}, 0
			if decision.Holder != nil && r.State == "conflict" {
				r.Error = "held by node " + decision.Holder.Name
			}
		}
		rows = append(rows, r)
	}
	for _, r := range e.world.Rows(d) {
		if n := e.world.Resolve(r); n != nil && n.Holds(d) && r.State != plan.StateBlackhole {
			continue // shown with its node
		}
		state := "orphan"
		switch {
		case r.Foreign:
			state = "foreign"
		case r.State == plan.StateBlackhole:
			state = "blackhole"
		case e.world.Undetermined(r):
			state = "undetermined"
		}
		if ds != nil && !ds.held.IsZero() {
			state = "held"
		} else if ds != nil && ds.call != nil && ds.call.op.Kind == plan.OpDelete {
			state = "deleting"
		}
		shown := row("", r.Target.Value, state)
		shown.Table = r.Table
		rows = append(rows, shown)
	}
	return rows
}

// stateWord is status' word for how d stands for n.
func (e *Engine) stateWord(decision plan.Decision, ds *dest, n *plan.Node) string {
	s, _, _ := e.stand(decision.Destination, n)
	switch {
	case decision.State == plan.OutOfRange:
		return "outside-cluster-cidr"
	case decision.State == plan.FamilyIgnored:
		return "family-ignored"
	case s == standsInPlace:
		return "in-place"
	case n != decision.Holder:
		return "conflict"
	case s == standsNotManaged:
		return "not-managed"
	case s == standsUndetermined:
		return "undetermined"
	case !e.viewValid:
		return "waiting-for-list"
	case ds != nil && ds.call != nil:
		return [...]string{plan.OpDelete: "deleting", plan.OpReplace: "replacing", plan.OpCreate: "creating"}[ds.call.op.Kind]
	case ds != nil && !ds.held.IsZero():
		return "held"
	case ds != nil && ds.failures > 0:
		return "failed"
	default:
		return "waiting"
	}
}

// NodeStatus is a node and its last verdict.
type NodeStatus struct {
	Node    *plan.Node
	Verdict Verdict
}

// NodeStatuses lists the nodes in order of name; only one when a name is given.
func (e *Engine) NodeStatuses(name string) []NodeStatus {
	var out []NodeStatus
	for n := range e.world.Nodes() {
		if name != "" && n.Name != name {
			continue
		}
		status := NodeStatus{Node: n}
		if st := e.nodes[n.Name]; st != nil {
			status.Verdict = st.sent
		}
		out = append(out, status)
	}
	slices.SortFunc(out, func(a, b NodeStatus) int { return cmp.Compare(a.Node.Name, b.Node.Name) })
	return out
}

// Passes lists the latest passes, newest first; all that are kept when limit is
// 0.
func (e *Engine) Passes(limit int) []Pass {
	if limit <= 0 || limit > len(e.passes) {
		limit = len(e.passes)
	}
	out := make([]Pass, 0, limit)
	for i := len(e.passes) - 1; len(out) < limit; i-- {
		out = append(out, *e.passes[i])
	}
	return out
}

// Plan is what a full pass would do now; reason says why there is none.
func (e *Engine) Plan() (ops []plan.Op, reason string) {
	if _, why := e.ClusterReady(); !e.viewValid {
		return nil, why
	}
	all := map[netip.Prefix]struct{}{}
	for d := range e.world.Destinations() {
		all[d] = struct{}{}
	}
	for _, d := range inOrder(all) {
		ops = append(ops, plan.Decide(e.world, d).Ops...)
	}
	return ops, ""
}
