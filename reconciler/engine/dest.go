package engine

import (
	"container/heap"
	"fmt"
	"log/slog"
	"maps"
	"net/netip"
	"slices"
	"time"

	"github.com/waymark-routes/waymark/reconciler/plan"
)

// dest is what the engine remembers of a destination that has work, a failure or
// an unconfirmed write. Settled destinations have none.
type dest struct {
	prefix netip.Prefix
	call   *call
	queued bool
	urgent bool  // queue before all others
	pass   *Pass // waits for this destination's first attempt
	cause  Cause
	detail string
	trace  string

	// The last failure.
	failures    int
	failedSince time.Time
	nextAt      time.Time
	code        Code
	reason      string
	text        string
	definite    bool
	quota       bool

	// Doubt: writes need a list that began at listAfter or later, and one more follows
	// after doubtEnd.
	listAfter time.Time
	doubtEnd  time.Time

	// The last write that succeeded and that no list has confirmed yet.
	write    lastWrite
	vanished int  // lists in a row that lacked what was written
	distrust bool // an answer alone does not count; a list must show it
	// notManaged is the UID of the node that is not the plugin's job.
	notManaged string

	// Guard.
	held     time.Time // since when; zero: not held
	heldPace bool      // held by pace, not for a confirmation
	released bool
	admitted bool
}

// lastWrite is a write that succeeded.
type lastWrite struct {
	kind plan.OpKind
	at   time.Time
	uid  string // of the node that was written
	row  *plan.Row
	// unchanged: the plugin said that it was so already.
	unchanged bool
}

// work is the last work done on a destination, for people, and how often its
// route had to be written again lately although no node had changed.
type work struct {
	cause Cause
	at    time.Time
	uid   string    // of the node that was written
	first time.Time // of the rewrites counted
	again int
}

// rewritten counts a write that brought a route.
func (w work) rewritten(cause Cause, uid string, now time.Time) work {
	next := work{cause: cause, at: now, uid: uid, first: w.first, again: w.again}
	if w.uid != uid || cause == CauseNodeChange || now.Sub(w.first) > flapWindow {
		next.first, next.again = now, 0
	}
	if w.uid == uid && cause != CauseNodeChange {
		next.again++
	}
	return next
}

// idle says whether nothing needs remembering.
func (ds *dest) idle(now time.Time) bool {
	return ds.call == nil && !ds.queued && ds.failures == 0 && ds.write.at.IsZero() && ds.notManaged == "" &&
		ds.held.IsZero() && !ds.released && !now.Before(ds.doubtEnd) && ds.pass == nil
}

func (e *Engine) dest(d netip.Prefix) *dest {
	ds := e.dests[d]
	if ds == nil {
		ds = &dest{prefix: d}
		e.dests[d] = ds
	}
	return ds
}

// forget drops a destination's memory when there is nothing in it.
func (e *Engine) forget(ds *dest) {
	if ds.idle(e.now) {
		delete(e.dests, ds.prefix)
	}
}

// inOrder yields a set of destinations in order, so that the same inputs give
// the same effects.
func inOrder(set map[netip.Prefix]struct{}) []netip.Prefix {
	return slices.SortedFunc(maps.Keys(set), netip.Prefix.Compare)
}

// join makes a destination part of a pass and examines it.
func (e *Engine) join(d netip.Prefix, pass *Pass, cause Cause, detail, trace string) {
	decision := plan.Decide(e.world, d)
	if len(decision.Ops) == 0 && e.dests[d] == nil {
		e.touchNodes(d)
		return
	}
	ds := e.dest(d)
	if ds.pass != pass && len(decision.Ops) > 0 {
		e.leavePass(ds)
		ds.pass = pass
		pass.open++
	}
	ds.cause, ds.detail = cause, detail
	if trace != "" {
		ds.trace = trace
	}
	e.examine(ds, decision)
}

func (e *Engine) leavePass(ds *dest) {
	if ds.pass != nil {
		if ds.pass.open > 0 {
			ds.pass.open--
		}
		ds.pass = nil
	}
}

// touchNodes marks the nodes whose verdict may depend on d.
func (e *Engine) touchNodes(d netip.Prefix) {
	for _, n := range e.world.Claimants(d) {
		e.dirty[n.Name] = struct{}{}
	}
	for _, r := range e.world.Rows(d) {
		if n := e.world.Resolve(r); n != nil {
			e.dirty[n.Name] = struct{}{}
		}
	}
}

// examine looks at one destination anew and queues its first operation, or
// notes what it waits for. It is the one place where work begins.
func (e *Engine) examine(ds *dest, decision plan.Decision) {
	e.touchNodes(ds.prefix)
	if ds.call != nil {
		return // examined again when the call ends
	}
	if len(decision.Ops) == 0 {
		e.leavePass(ds)
		if !ds.distrust { // else an answer alone settles nothing
			e.clearFailure(ds)
		}
		e.unhold(ds)
		ds.released, ds.admitted = false, false
		e.forget(ds)
		return
	}
	op := decision.Ops[0]
	if e.cfg.DryRun || (op.Node != nil && op.Node.UID == ds.notManaged && ds.notManaged != "") {
		e.leavePass(ds)
		return
	}
	e.calm(ds, op)
	if e.now.Before(ds.nextAt) {
		e.leavePass(ds)
		if !e.cfg.PollOnly { // with the gate off the next tick retries
			e.addTimer(ds.nextAt, timer{dest: ds})
		}
		return
	}
	if !e.viewValid || ds.listAfter.After(e.viewStarted) {
		e.needList(ds)
		return
	}
	if op.Kind != plan.OpCreate {
		switch {
		case e.now.Before(e.mismatchUntil):
			e.leavePass(ds)
			e.addTimer(e.mismatchUntil, timer{dest: ds})
			return
		case op.Row.Written || !e.fresh() && e.list == nil:
			// A row is deleted exactly as listed, and only on a young view.
			e.needList(ds)
			return
		case e.list != nil:
			return // deletes wait for the list under way, which examines again
		}
		if op.Kind == plan.OpDelete && !e.admit(ds, decision) {
			e.leavePass(ds)
			return
		}
	}
	if !ds.queued {
		ds.queued = true
		switch {
		case ds.urgent:
			e.urgent = append(e.urgent, ds)
		case updates(decision):
			e.queue = append(e.queue, ds)
		default:
			e.deletes = append(e.deletes, ds)
		}
	}
}

// calm puts a destination into the slow lane whose route was written five times
// within ten minutes and is gone again: somebody else is writing, and a hot fight
// helps nobody.
func (e *Engine) calm(ds *dest, op plan.Op) {
	h := e.history[ds.prefix]
	if op.Node == nil || h.again < flapWrites || h.uid != op.Node.UID || e.now.Sub(h.first) > flapWindow || e.now.Before(ds.nextAt) {
		return
	}
	e.count(ds, "RouteFlaps", fmt.Sprintf("create %s: written %d times within %v and gone again; somebody else writes it", ds.prefix, h.again, flapWindow), true)
	ds.nextAt = e.now.Add(jitter(laneRefused, 0.1, e.rng))
	h.again = 0
	e.history[ds.prefix] = h
	e.log(slog.LevelError, "a route is written again and again and gone each time: somebody else writes it; it waits",
		slog.String("destination", ds.prefix.String()), slog.Duration("in", laneRefused))
	e.noteFailure(ds, op)
}

// needList makes a destination wait for a list; planAll examines it again.
func (e *Engine) needList(ds *dest) {
	pass := ds.pass
	cause := ds.cause
	if cause == 0 {
		cause = CauseRetry
	}
	if e.cfg.PollOnly && e.viewValid && ds.listAfter.IsZero() {
		e.leavePass(ds) // the next tick lists
		return
	}
	e.wantList(cause, ds.detail, ds.listAfter)
	if pass != nil && pass != e.listWanted && (e.list == nil || pass != e.list.pass) {
		e.leavePass(ds)
	}
}

func (e *Engine) clearFailure(ds *dest) {
	// A doubt outlives it: the lost write may still take effect.
	ds.failures, ds.failedSince, ds.nextAt, ds.code, ds.reason, ds.text, ds.definite, ds.quota = 0, time.Time{}, time.Time{}, 0, "", "", false, false
}

// --- Timers ----------------------------------------------------------------

// timer is something due at a time: a destination to examine, a node whose
// verdict may be due, or a snapshot to ask for.
type timer struct {
	at       time.Time
	seq      uint64
	dest     *dest
	node     string
	snapshot string
}

type timerHeap []timer

func (h timerHeap) Len() int { return len(h) }
func (h timerHeap) Less(i, j int) bool {
	if c := h[i].at.Compare(h[j].at); c != 0 {
		return c < 0
	}
	return h[i].seq < h[j].seq
}
func (h timerHeap) Swap(i, j int) { h[i], h[j] = h[j], h[i] }
func (h *timerHeap) Push(x any)   { *h = append(*h, x.(timer)) }
func (h *timerHeap) Pop() any {
	old := *h
	last := old[len(old)-1]
	old[len(old)-1] = timer{}
	*h = old[:len(old)-1]
	return last
}

func (e *Engine) addTimer(at time.Time, t timer) {
	e.nextID++
	t.at, t.seq = at, e.nextID
	heap.Push(&e.timers, t)
}

// fireTimers handles what is due. A timer that is out of date does no harm: what
// it points at is examined by its newest state.
func (e *Engine) fireTimers() {
	var retried map[netip.Prefix]struct{}
	for len(e.timers) > 0 && !e.now.Before(e.timers[0].at) {
		t := heap.Pop(&e.timers).(timer)
		switch {
		case t.dest != nil:
			ds := t.dest
			if e.dests[ds.prefix] != ds || e.session == nil || !e.session.synced {
				continue // the next session begins with a list and examines all
			}
			if !ds.doubtEnd.IsZero() && !e.now.Before(ds.doubtEnd) {
				// One list after the doubt ends, whether or not anyone wants it.
				ds.listAfter, ds.doubtEnd = ds.doubtEnd, time.Time{}
				e.wantList(CauseRetry, "a write's outcome was unknown", e.now)
				continue
			}
			if ds.queued || ds.call != nil || e.now.Before(ds.nextAt) {
				continue // a later timer stands for it
			}
			if retried == nil {
				retried = map[netip.Prefix]struct{}{}
			}
			retried[ds.prefix] = struct{}{}
		case t.node != "":
			e.dirty[t.node] = struct{}{}
		case t.snapshot != "":
			if e.session != nil && e.session.id == t.snapshot {
				e.emit(AskSnapshot{Session: t.snapshot, Reason: "the last one was older than what was seen before"})
			}
		}
	}
	if retried != nil {
		pass := e.beginPass(false, CauseRetry, "")
		for _, d := range inOrder(retried) {
			e.join(d, pass, CauseRetry, "", "")
		}
	}
}

// --- Writes ----------------------------------------------------------------

// mayWrite says whether any write may start now, pace aside.
func (e *Engine) mayWrite() bool {
	s := e.session
	return s != nil && s.synced && !s.draining && e.plugin.Healthy && e.viewValid && !e.cfg.DryRun &&
		(s.unlimited || e.now.Before(s.writeUntil))
}

// maxWrites is the most writes in flight.
func (e *Engine) maxWrites() int {
	most := float64(e.cfg.MaxConcurrentWrites)
	if info := e.plugin.Info; info != nil && info.MaxConcurrentWrites > 0 {
		most = min(most, float64(info.MaxConcurrentWrites))
	}
	return int(max(1, min(e.limit, most)))
}

// dispatch starts queued writes as far as rights and pace allow.
func (e *Engine) dispatch() {
	for e.mayWrite() && e.queuedCount() > 0 && len(e.calls) < e.maxWrites() {
		if e.now.Before(e.pausedUntil) || e.probing && len(e.calls) > 0 {
			return
		}
		if info := e.plugin.Info; info.MaxWritesPerSecond > 0 {
			if e.now.Before(e.nextWriteAt) {
				return
			}
			gap := time.Duration(float64(time.Second) / info.MaxWritesPerSecond)
			e.nextWriteAt = later(e.nextWriteAt.Add(gap), e.now.Add(gap/2))
		}
		e.start(e.next())
	}
}

func (e *Engine) queuedCount() int { return len(e.urgent) + len(e.queue) + len(e.deletes) }

// next takes a destination from the queues: begun updates, then those that bring
// a route, then deletes; deletes before creates while a table is full.
func (e *Engine) next() *dest {
	from := &e.queue
	switch {
	case len(e.urgent) > 0:
		from = &e.urgent
	case len(e.deletes) > 0 && (len(e.queue) == 0 || e.quotaTight):
		from = &e.deletes
	}
	ds := (*from)[0]
	(*from)[0] = nil
	*from = (*from)[1:]
	ds.queued = false
	return ds
}

// start starts the first operation that a destination needs now; it may need
// none any more.
func (e *Engine) start(ds *dest) {
	decision := plan.Decide(e.world, ds.prefix)
	if len(decision.Ops) == 0 {
		e.examine(ds, decision)
		return
	}
	op := decision.Ops[0]
	if op.Kind != plan.OpCreate && (op.Row.Written || e.list != nil || e.now.Before(e.mismatchUntil) ||
		op.Kind == plan.OpDelete && !ds.admitted && !e.exempt(op)) || ds.listAfter.After(e.viewStarted) {
		e.examine(ds, decision) // it has changed since it was queued
		return
	}
	e.nextID++
	ds.call = &call{id: e.nextID, op: op, started: e.now}
	e.calls[e.nextID] = ds
	if ds.pass != nil {
		switch op.Kind {
		case plan.OpCreate:
			ds.pass.Creates++
		case plan.OpDelete:
			ds.pass.Deletes++
		case plan.OpReplace:
			ds.pass.Replaces++
		}
	}
	e.emit(StartCall{
		ID: e.nextID, Op: op, Cluster: *e.cluster, Token: e.session.token,
		Attempt: ds.failures + 1, Cause: ds.cause, Detail: ds.detail, Trace: ds.trace,
	})
}

func (e *Engine) callEnded(in CallEnded) {
	ds := e.calls[in.ID]
	if ds == nil {
		return
	}
	delete(e.calls, in.ID)
	ended := ds.call
	ds.call = nil
	ds.admitted = false
	if in.Err == nil {
		e.succeeded(ds, ended, in)
	} else {
		e.failed(ds, ended, in.Err)
	}
	decision := plan.Decide(e.world, ds.prefix)
	if in.Err == nil && len(decision.Ops) > 0 {
		// The next operation of the same update: until the create has ended too,
		// there is no route.
		ds.urgent = true
		e.examine(ds, decision)
		ds.urgent = false
		return
	}
	e.examine(ds, decision)
	if ds.call == nil && !ds.queued {
		e.leavePass(ds)
	}
}

func (e *Engine) succeeded(ds *dest, ended *call, in CallEnded) {
	op := ended.op
	if op.Node != nil && in.Outcome != OutcomeUnchanged {
		e.history[ds.prefix] = e.history[ds.prefix].rewritten(ds.cause, op.Node.UID, e.now)
	} else {
		before := e.history[ds.prefix]
		before.cause, before.at = ds.cause, e.now
		e.history[ds.prefix] = before
	}
	if e.probing {
		e.probing = false
		e.pausedUntil = e.now.Add(time.Duration(e.rng.Float64() * 0.1 * float64(e.pausedFor)))
	}
	if e.throttled {
		e.limit += 1 / max(e.limit, 1)
	} else {
		e.limit++
	}
	e.limit = min(e.limit, float64(e.cfg.MaxConcurrentWrites))
	if ds.pass != nil && in.Outcome != OutcomeUnchanged && in.Outcome != OutcomeNotManaged {
		ds.pass.Changed = true
	}
	ds.released = false
	e.unhold(ds)
	if in.Outcome == OutcomeNotManaged {
		ds.notManaged = op.Node.UID
		e.clearFailure(ds)
		return
	}
	repeated := ds.vanished > 0 && in.Outcome != OutcomeUnchanged && op.Kind != plan.OpDelete
	switch op.Kind {
	case plan.OpDelete:
		e.dropRow(op.Row)
		e.quotaFreed()
	case plan.OpReplace:
		e.dropRow(op.Row)
		row := e.writtenRow(ds, op, in.Outcome, op.Row.Table)
		row.ID, row.Name = op.Row.ID, op.Row.Name
		e.world.AddRow(row)
	case plan.OpCreate:
		e.addWritten(ds, op, in.Outcome)
	}
	if !repeated {
		e.clearFailure(ds)
	}
	if in.Outcome == OutcomeUnchanged && op.Kind != plan.OpDelete {
		// It was so already: settled, and nothing to verify.
		ds.write, ds.vanished, ds.distrust = lastWrite{at: e.now, kind: op.Kind, uid: op.Node.UID, unchanged: true}, 0, false
		return
	}
	ds.write = lastWrite{kind: op.Kind, at: e.now, row: op.Row}
	if op.Node != nil {
		ds.write.uid = op.Node.UID
	}
	e.verifySoon()
	if repeated {
		// A list lacked what we wrote, and the cloud says "created" once more.
		ds.distrust = true
		e.count(ds, "RouteVanished", "create "+ds.prefix.String()+": the plugin says created, but its list lacks the route", true)
		ds.nextAt = e.now.Add(jitter(doubled(backoffMin, backoffMax, ds.vanished), 0.1, e.rng))
		e.noteFailure(ds, op)
	}
}

// verifySoon makes a verifying list due: 10 s after the last write of a burst,
// and within 30 s of the first.
func (e *Engine) verifySoon() {
	if e.cfg.PollOnly {
		return // the next tick lists anyway
	}
	if e.firstWriteAt.IsZero() {
		e.firstWriteAt = e.now
	}
	e.verifyAt = e.now.Add(verifyQuiet)
	if latest := e.firstWriteAt.Add(verifyLatest); e.verifyAt.After(latest) {
		e.verifyAt = latest
	}
}

func (e *Engine) writtenRow(ds *dest, op plan.Op, outcome Outcome, table string) *plan.Row {
	row := &plan.Row{
		Table: table, Destination: ds.prefix, DestinationText: ds.prefix.String(),
		Target:  plan.Target{Kind: plan.TargetNodeName, Value: op.Node.Name},
		Written: true,
	}
	if outcome == OutcomePending {
		row.State = plan.StatePending
	}
	if e.addressed {
		row.HasAddresses, row.Addresses = true, op.Node.Addresses
	}
	return row
}

// addWritten adds to the view what a create has made: one row in every table
// that lacks one.
func (e *Engine) addWritten(ds *dest, op plan.Op, outcome Outcome) {
	tables := e.world.Tables()
	if len(tables) == 0 {
		tables = []string{""}
	}
	for _, table := range tables {
		has := slices.ContainsFunc(e.world.Rows(ds.prefix), func(r *plan.Row) bool {
			n := e.world.Resolve(r)
			return r.Table == table && !r.Foreign && r.State != plan.StateBlackhole && n != nil && n.Name == op.Node.Name
		})
		if !has {
			e.world.AddRow(e.writtenRow(ds, op, outcome, table))
		}
	}
}

// dropRow removes a deleted row from the view, also when a list has brought the
// same row as another value meanwhile.
func (e *Engine) dropRow(gone *plan.Row) {
	for _, r := range slices.Clone(e.world.Rows(gone.Destination)) {
		if r == gone || r.ID == gone.ID && r.Table == gone.Table && r.Target == gone.Target && !r.Written {
			e.world.RemoveRow(r)
		}
	}
}

func (e *Engine) failed(ds *dest, ended *call, f *Failure) {
	op := ended.op
	r := react(op.Kind, f, ds.failures, e.cfg.MaxThrottlePause, e.rng)
	if r.done || f.Code == CodeAlreadyExists && f.Holder != "" && op.Node != nil && f.Holder == op.Node.Name {
		outcome := OutcomeUnchanged
		e.succeeded(ds, ended, CallEnded{ID: ended.id, Outcome: outcome})
		return
	}
	if ds.pass != nil {
		ds.pass.Failures++
	}
	text := op.Kind.String() + " " + ds.prefix.String() + ": " + f.String()
	if f.Holder != "" {
		text += " (held by " + f.Holder + ")"
	}
	ds.code, ds.quota = f.Code, r.quota
	e.count(ds, r.reason, text, r.definite)
	ds.nextAt = e.now.Add(r.wait)
	if r.throttled {
		e.shrink()
	}
	if r.pause > 0 {
		if until := e.now.Add(r.pause); until.After(e.pausedUntil) {
			e.pausedUntil, e.pausedFor, e.probing = until, r.pause, true
			e.log(slog.LevelWarn, "the cloud throttles; all writes pause", slog.Duration("for", r.pause), slog.String("err", f.String()))
		}
	}
	if r.quota {
		e.quotaTight = true
	}
	if r.unknown {
		ds.listAfter, ds.doubtEnd = e.now.Add(1), e.now.Add(e.cfg.DoubtPeriod)
		e.addTimer(ds.doubtEnd, timer{dest: ds})
		if e.session != nil && e.session.synced && !e.session.draining {
			e.wantList(CauseRetry, "a write's outcome is unknown", e.now.Add(1))
		}
	}
	if f.Code == CodeAlreadyExists && f.Holder == "" && ds.failures == 1 {
		// Only the first time: a list tells whether the holder is our own target (field case B-28).
		ds.listAfter = e.now.Add(1)
		ds.definite = false
		ds.nextAt = e.now
		e.wantList(CauseRetry, "the destination is taken; the list tells by whom", e.now.Add(1))
	}
	level := slog.LevelWarn
	if r.loud {
		level = slog.LevelError
	}
	e.log(level, "write failed; tried again", slog.String("operation", op.Kind.String()), slog.String("destination", ds.prefix.String()),
		slog.String("node", nodeName(op)), slog.String("err", f.String()), slog.String("cause", ds.cause.String()),
		slog.Int("attempt", ds.failures), slog.Duration("in", r.wait))
	if ds.definite {
		e.noteFailure(ds, op)
	}
	if !r.definite && op.Node != nil {
		e.addTimer(ds.failedSince.Add(softFailureTime), timer{node: op.Node.Name})
	}
}

func nodeName(op plan.Op) string {
	if op.Node != nil {
		return op.Node.Name
	}
	return op.Row.Target.Value
}

// count notes one more failure in a row.
func (e *Engine) count(ds *dest, reason, text string, definite bool) {
	if ds.failures == 0 {
		ds.failedSince = e.now
	}
	ds.failures++
	ds.reason, ds.text, ds.definite = reason, text, definite
}

// shrink halves the concurrency, at most once a second.
func (e *Engine) shrink() {
	if e.now.Sub(e.shrunkAt) < time.Second && !e.shrunkAt.IsZero() {
		return
	}
	e.throttled, e.shrunkAt = true, e.now
	e.limit = max(1, e.limit/2)
}

// quotaFreed wakes what waits for room.
func (e *Engine) quotaFreed() {
	if !e.quotaTight {
		return
	}
	e.quotaTight = false
	for _, ds := range e.orderedDests() {
		if ds.quota && ds.call == nil && !ds.queued {
			ds.nextAt = e.now
			e.addTimer(e.now, timer{dest: ds})
		}
	}
}

func (e *Engine) orderedDests() []*dest {
	return slices.SortedFunc(maps.Values(e.dests), func(a, b *dest) int { return a.prefix.Compare(b.prefix) })
}

// settleWrites compares a list with what was written before it began.
func (e *Engine) settleWrites(started time.Time) {
	for _, ds := range e.orderedDests() {
		if ds.distrust && ds.write.at.IsZero() && ds.call == nil && plan.Decide(e.world, ds.prefix).State == plan.InPlace {
			ds.distrust, ds.vanished = false, 0 // a list shows it at last
			e.clearFailure(ds)
		}
		if ds.write.at.IsZero() || ds.write.at.After(started) || ds.call != nil {
			continue
		}
		decision := plan.Decide(e.world, ds.prefix)
		var lost bool
		switch ds.write.kind {
		case plan.OpDelete:
			lost = slices.ContainsFunc(decision.Ops, func(op plan.Op) bool {
				return op.Row != nil && op.Row.ID == ds.write.row.ID && op.Row.Table == ds.write.row.Table && op.Row.Target == ds.write.row.Target
			})
		case plan.OpCreate, plan.OpReplace:
			// A row with old addresses is not lost, only stale.
			lost = decision.Holder != nil && decision.Holder.UID == ds.write.uid && decision.State == plan.Missing && !e.shows(ds.prefix, decision.Holder)
		}
		if !lost {
			ds.write, ds.vanished, ds.distrust = lastWrite{}, 0, false
			e.clearFailure(ds)
			continue
		}
		e.vanish(ds)
	}
}

// shows says whether the view has a live row of d that points at n.
func (e *Engine) shows(d netip.Prefix, n *plan.Node) bool {
	return slices.ContainsFunc(e.world.Rows(d), func(r *plan.Row) bool {
		return !r.Foreign && r.State != plan.StateBlackhole && e.world.Resolve(r) == n
	})
}

// vanish notes that a list lacks what was written (or shows what was deleted).
// The first time it is written once more, at once; then back-off applies.
func (e *Engine) vanish(ds *dest) {
	kind, unchanged := ds.write.kind, ds.write.unchanged
	ds.write = lastWrite{}
	ds.vanished++
	if unchanged {
		return // a list that lags; asking once more costs one call
	}
	if kind == plan.OpDelete && ds.vanished > 1 {
		e.count(ds, "RouteReappears", "delete "+ds.prefix.String()+": the plugin says deleted, but its list shows the route", true)
		ds.nextAt = later(ds.nextAt, e.now.Add(jitter(doubled(backoffMin, backoffMax, ds.vanished-1), 0.1, e.rng)))
	}
	e.log(slog.LevelWarn, "a list lacks what was written", slog.String("destination", ds.prefix.String()), slog.String("operation", kind.String()), slog.Int("attempt", ds.vanished))
}

// --- Deletion guard --------------------------------------------------------

// exempt says whether the guard lets a delete go without asking.
func (e *Engine) exempt(op plan.Op) bool {
	return e.cfg.Guard == GuardOff || op.Exempt
}

// guardRoom is how many more deletes may go within the sliding minute.
func (e *Engine) guardRoom() int {
	e.admitted = slices.DeleteFunc(e.admitted, func(at time.Time) bool { return e.now.Sub(at) >= time.Minute })
	return max(5, max(e.viewRows, e.world.RowCount())/10) - len(e.admitted)
}

// surge holds the deletes of a set beforehand when there are more of them than
// the guard lets go unasked.
func (e *Engine) surge(set map[netip.Prefix]struct{}) {
	if e.cfg.Guard == GuardOff || e.cfg.DryRun {
		return
	}
	room := e.guardRoom()
	var fresh []*dest
	for d := range set {
		decision := plan.Decide(e.world, d)
		if len(decision.Ops) == 0 || decision.Ops[0].Kind != plan.OpDelete || decision.Ops[0].Exempt || updates(decision) {
			continue
		}
		ds := e.dest(d)
		if ds.call == nil && !ds.admitted && !ds.released && ds.held.IsZero() {
			fresh = append(fresh, ds)
		}
	}
	if len(fresh) <= room && e.world.NodeCount() > 0 && len(e.held) == 0 {
		return
	}
	slices.SortFunc(fresh, func(a, b *dest) int { return a.prefix.Compare(b.prefix) })
	for _, ds := range fresh {
		e.hold(ds, false)
	}
}

// updates says whether a decision also brings a route.
func updates(decision plan.Decision) bool {
	return decision.Ops[len(decision.Ops)-1].Kind != plan.OpDelete
}

// admit says whether a delete may go now; if not, the destination is held.
func (e *Engine) admit(ds *dest, decision plan.Decision) bool {
	if e.exempt(decision.Ops[0]) || ds.admitted {
		return true
	}
	update := updates(decision)
	switch {
	case ds.released, ds.held.IsZero() && e.guardRoom() > 0 && (e.world.NodeCount() > 0 || update), update && e.guardRoom() > 0:
		ds.admitted = true
		e.unhold(ds)
		e.admitted = append(e.admitted, e.now)
		return true
	}
	e.hold(ds, update)
	return false
}

// hold makes a delete wait: for a confirmation, or, where a create follows it,
// for room in the sliding minute.
func (e *Engine) hold(ds *dest, pace bool) {
	if ds.held.IsZero() {
		ds.held = e.now
		e.held[ds] = struct{}{}
		e.emit(GuardHeld{Destination: ds.prefix})
		e.log(slog.LevelWarn, "delete held by the deletion guard", slog.String("destination", ds.prefix.String()))
	}
	ds.heldPace = pace
	if pace {
		wait := time.Second
		if len(e.admitted) > 0 {
			wait = max(wait, e.admitted[0].Add(time.Minute).Sub(e.now))
		}
		e.addTimer(e.now.Add(wait), timer{dest: ds})
		return
	}
	if e.cfg.Guard == GuardConfirm && e.absenceAt.IsZero() {
		e.absenceAt = e.now
	}
}

func (e *Engine) unhold(ds *dest) {
	ds.held = time.Time{}
	delete(e.held, ds)
}

// driveGuard asks for the quorum read that held deletes wait for, at most once
// in 5 s.
func (e *Engine) driveGuard() {
	if len(e.held) == 0 {
		e.absenceAt = time.Time{}
		return
	}
	if e.absenceAt.IsZero() || e.now.Before(e.absenceAt) || e.session == nil || !e.session.synced || e.session.draining {
		return
	}
	names := map[string]struct{}{}
	for ds := range e.held {
		for _, r := range e.world.Rows(ds.prefix) {
			if r.Target.Kind == plan.TargetNodeName {
				names[r.Target.Value] = struct{}{}
			}
		}
	}
	e.absenceID++
	e.absenceAt = e.now.Add(30 * time.Second) // asked again when no answer comes
	e.emit(AskAbsence{Session: e.session.id, ID: e.absenceID, Names: slices.Sorted(maps.Keys(names))})
}

func (e *Engine) absenceAnswered(in AbsenceAnswered) {
	if e.session == nil || e.session.id != in.Session || in.ID != e.absenceID || e.cfg.Guard != GuardConfirm {
		return
	}
	e.absenceAt = e.now.Add(30 * time.Second)
	if in.Err != "" {
		e.absenceAt = e.now.Add(5 * time.Second)
		e.log(slog.LevelWarn, "quorum read for held deletes failed; asked again", slog.String("err", in.Err))
		return
	}
	present := map[string]Presence{}
	claimed := map[netip.Prefix]string{}
	for _, p := range in.Nodes {
		present[p.Name] = p
		for _, d := range p.Destinations {
			if p.Present {
				claimed[d] = p.Name
			}
		}
	}
	secondEmpty := false
	if in.Total == 0 {
		if e.emptyReads++; e.emptyReads == 1 {
			e.emptySince = e.now
		}
		secondEmpty = e.emptyReads > 1 && e.now.Sub(e.emptySince) >= 10*time.Second
		if !secondEmpty {
			e.absenceAt = e.now.Add(10 * time.Second)
		}
	} else {
		e.emptyReads = 0
	}
	released := 0
	for _, ds := range e.heldInOrder() {
		if ds.heldPace {
			continue
		}
		if name, ok := claimed[ds.prefix]; ok {
			e.log(slog.LevelWarn, "held delete stays: the quorum read shows a node that claims the destination",
				slog.String("destination", ds.prefix.String()), slog.String("node", name))
			continue
		}
		named, asked := false, true
		for _, r := range e.world.Rows(ds.prefix) {
			if r.Target.Kind == plan.TargetNodeName {
				named = true
				if _, ok := present[r.Target.Value]; !ok {
					asked = false
				}
			}
		}
		if named && asked || !named && (in.Total > 0 || secondEmpty) {
			e.release(ds)
			released++
		} else if named && !asked {
			e.absenceAt = e.now.Add(5 * time.Second)
		}
	}
	e.log(slog.LevelInfo, "quorum read for held deletes", slog.Int("released", released), slog.Int64("nodes", in.Total))
}

func (e *Engine) approve(in Approve) {
	for _, ds := range e.heldInOrder() {
		if !in.Destination.IsValid() || in.Destination == ds.prefix {
			e.release(ds)
		}
	}
}

func (e *Engine) heldInOrder() []*dest {
	return slices.SortedFunc(maps.Keys(e.held), func(a, b *dest) int { return a.prefix.Compare(b.prefix) })
}

// release lets a held delete go; it is planned again first.
func (e *Engine) release(ds *dest) {
	e.unhold(ds)
	ds.released = true
	e.addTimer(e.now, timer{dest: ds})
}
