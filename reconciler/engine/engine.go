package engine

import (
	"cmp"
	"fmt"
	"log/slog"
	"maps"
	"math/rand/v2"
	"net/netip"
	"slices"
	"time"

	"k8s.io/apimachinery/pkg/util/resourceversion"

	"github.com/waymark-routes/waymark/reconciler/plan"
)

// GuardMode says what the deletion guard does with too many deletes.
type GuardMode uint8

// The modes.
const (
	// GuardConfirm holds them until a quorum read has confirmed them.
	GuardConfirm GuardMode = iota
	// GuardHold holds them until an operator approves.
	GuardHold
	// GuardOff lets them go.
	GuardOff
)

// Config tunes an Engine. The zero value works and is what the flags default to.
type Config struct {
	// PollOnly turns the feature gate off: full passes at PollPeriod and nothing
	// else.
	PollOnly bool
	// PollPeriod is --route-reconciliation-period; 0 means 10 s.
	PollPeriod time.Duration
	// MinPassInterval is how old the route view may be for a node pass; 0 means
	// 10 s.
	MinPassInterval time.Duration
	// MinResyncPeriod is the least period of the periodic full pass, which is
	// drawn once from 1 to 2 times of it; 0 means 12 h.
	MinResyncPeriod time.Duration
	// DoubtPeriod is how long a write whose outcome is unknown may still take
	// effect; 0 means 90 s.
	DoubtPeriod time.Duration
	// MaxThrottlePause caps the pause that a plugin can ask for; 0 means 15 min.
	MaxThrottlePause time.Duration
	// MaxConcurrentWrites bounds writes in flight; 0 means 200.
	MaxConcurrentWrites int
	// Guard is the deletion guard's mode.
	Guard GuardMode
	// UnsupportedFamilyFails makes nodes unavailable for a family that the plugin
	// does not route; else the family is ignored.
	UnsupportedFamilyFails bool
	// DryRun plans and writes nothing.
	DryRun bool
	// Seed seeds the jitter; the same seed and inputs give the same effects.
	Seed uint64
}

func (c Config) withDefaults() Config {
	set := func(d *time.Duration, value time.Duration) {
		if *d <= 0 {
			*d = value
		}
	}
	set(&c.PollPeriod, 10*time.Second)
	set(&c.MinPassInterval, 10*time.Second)
	set(&c.MinResyncPeriod, 12*time.Hour)
	set(&c.DoubtPeriod, 90*time.Second)
	set(&c.MaxThrottlePause, 15*time.Minute)
	if c.MaxConcurrentWrites <= 0 {
		c.MaxConcurrentWrites = 200
	}
	return c
}

// Fixed figures of the design.
const (
	leaseAskPeriod  = 2 * time.Second
	drainPeriod     = 5 * time.Second
	verifyQuiet     = 10 * time.Second
	verifyLatest    = 25 * time.Second
	pendingAfter    = 5 * time.Second
	softFailureTime = time.Minute
	softFailures    = 3
	staleSnapshot   = time.Minute
	startWrites     = 32
	keptPasses      = 1000
	mismatchRounds  = 2
	mismatchPause   = 30 * time.Minute
	flapWrites      = 5
	flapWindow      = 10 * time.Minute
)

// session is the current node session.
type session struct {
	id        string
	holder    string
	token     Token
	watcher   string
	since     time.Time
	accepted  bool
	synced    bool
	draining  bool
	drainedBy time.Time
	// Write lease (S5).
	unlimited  bool
	writeUntil time.Time
	asked      map[uint64]time.Time
	askAt      time.Time
	askID      uint64
	// Stale snapshots are asked for again until staleUntil.
	staleUntil time.Time
}

// listRun is the list under way.
type listRun struct {
	id      uint64
	started time.Time
	pass    *Pass
}

// call is a write in flight.
type call struct {
	id        uint64
	op        plan.Op
	started   time.Time
	cancelled bool
}

// nodeState is what the engine remembers of a node beside the node itself.
type nodeState struct {
	firstSeen time.Time
	// changedAt is the observation of the oldest change not yet confirmed; zero
	// when there is none.
	changedAt time.Time
	sent      Verdict
	sentEver  bool
	notice    *Notice
}

// Engine is the state machine of one cluster. It is not safe for concurrent use:
// one goroutine owns it. See the package comment.
type Engine struct {
	cfg   Config
	rng   *rand.Rand
	now   time.Time
	out   []Effect
	world *plan.World
	begun time.Time

	cluster        *Cluster
	session        *session
	highest        Token
	highestHolder  string
	highestVersion string

	plugin PluginChanged

	// Route view.
	viewValid   bool
	viewSeq     uint64
	viewStarted time.Time // when the list that made it began
	viewEnded   time.Time
	viewRows    int // rows of ours at that list
	quotas      []Quota
	addressed   bool // rows carry complete address sets
	firstList   time.Time

	list         *listRun
	listWanted   *Pass // a full pass that waits for its list
	listAfter    time.Time
	listFailures int
	listNotUntil time.Time
	listError    string
	nextID       uint64

	verifyAt     time.Time
	firstWriteAt time.Time // first write since the last list began
	takeoverAt   time.Time
	resyncPeriod time.Duration
	resyncAt     time.Time
	pollAt       time.Time

	dests   map[netip.Prefix]*dest
	urgent  []*dest
	queue   []*dest
	deletes []*dest
	calls   map[uint64]*dest
	timers  timerHeap
	history map[netip.Prefix]work

	// Pace.
	limit       float64
	throttled   bool // ever: growth is slow from then on
	shrunkAt    time.Time
	pausedUntil time.Time
	pausedFor   time.Duration
	probing     bool
	nextWriteAt time.Time
	quotaTight  bool

	// Guard.
	admitted   []time.Time
	held       map[*dest]struct{}
	absenceID  uint64
	absenceAt  time.Time // next ask; zero: none due
	emptyReads int
	emptySince time.Time

	mismatches    int
	mismatchUntil time.Time

	nodes      map[string]*nodeState
	dirty      map[string]struct{}
	allDirty   bool
	passes     []*Pass // newest last
	running    map[*Pass]struct{}
	passCount  uint64
	warnedRows map[string]struct{}
}

// New makes an engine that waits for a plugin and a session.
func New(cfg Config, now time.Time) *Engine {
	cfg = cfg.withDefaults()
	e := &Engine{
		cfg: cfg, now: now, begun: now,
		rng:        rand.New(rand.NewPCG(cfg.Seed, 0x7761796d61726b)),
		world:      plan.NewWorld(nil),
		dests:      map[netip.Prefix]*dest{},
		calls:      map[uint64]*dest{},
		history:    map[netip.Prefix]work{},
		nodes:      map[string]*nodeState{},
		dirty:      map[string]struct{}{},
		running:    map[*Pass]struct{}{},
		held:       map[*dest]struct{}{},
		warnedRows: map[string]struct{}{},
		limit:      startWrites,
	}
	e.resyncPeriod = jitter(cfg.MinResyncPeriod, 1, e.rng)
	return e
}

// Step takes one input at the time now and returns the effects to carry out. The
// slice is the engine's and valid until the next Step.
func (e *Engine) Step(now time.Time, in Input) []Effect {
	clear(e.out)
	e.out = e.out[:0]
	if now.After(e.now) {
		e.now = now
	}
	switch in := in.(type) {
	case SessionOpened:
		e.sessionOpened(in)
	case SessionEnding:
		e.sessionEnding(in)
	case SessionClosed:
		e.sessionClosed(in)
	case SnapshotReceived:
		e.snapshotReceived(in)
	case NodeChanged:
		e.nodeChanged(in)
	case LeaseAnswered:
		e.leaseAnswered(in)
	case AbsenceAnswered:
		e.absenceAnswered(in)
	case PluginChanged:
		e.pluginChanged(in)
	case ListEnded:
		e.listEnded(in)
	case CallEnded:
		e.callEnded(in)
	case Resync:
		e.wantList(CauseOperator, in.Reason, time.Time{})
	case Approve:
		e.approve(in)
	case Tick:
	}
	e.advance()
	return e.out
}

func (e *Engine) emit(effect Effect) { e.out = append(e.out, effect) }

func (e *Engine) log(level slog.Level, message string, attrs ...slog.Attr) {
	e.emit(Log{Level: level, Message: message, Attrs: attrs})
}

// advance does all that time or the input has made due.
func (e *Engine) advance() {
	e.driveSession()
	e.fireTimers()
	e.drivePasses()
	e.driveList()
	e.dispatch()
	e.driveGuard()
	e.sendVerdicts()
	e.endPasses()
	e.drivePasses() // with the gate off, one that waited for the last to end
	e.driveList()
}

// NextWake is when the next Tick is due; zero when nothing is.
func (e *Engine) NextWake() time.Time {
	var wake time.Time
	add := func(at time.Time) {
		// What is due already waits for an input, or for another of these times.
		if at.After(e.now) && (wake.IsZero() || at.Before(wake)) {
			wake = at
		}
	}
	if s := e.session; s != nil && s.accepted {
		if !s.unlimited {
			add(s.askAt)
			if len(e.calls) > 0 {
				add(s.writeUntil)
			}
		}
		if s.draining {
			add(s.drainedBy)
		}
	}
	if len(e.timers) > 0 {
		add(e.timers[0].at)
	}
	if e.canList() && e.list == nil {
		if e.listWanted != nil {
			add(later(e.listNotUntil, e.listAfter))
		}
		add(e.verifyAt)
		add(e.takeoverAt)
		add(e.resyncAt)
		add(e.pollAt)
	}
	if e.queuedCount() > 0 && e.mayWrite() {
		add(e.pausedUntil)
		add(e.nextWriteAt)
	}
	add(e.absenceAt)
	return wake
}

func later(a, b time.Time) time.Time {
	if a.After(b) {
		return a
	}
	return b
}

// --- Session ---------------------------------------------------------------

func (e *Engine) sessionOpened(in SessionOpened) {
	refuse := func(format string, args ...any) {
		e.emit(EndSession{Session: in.Session, Reason: EndRefused, Text: fmt.Sprintf(format, args...)})
	}
	if c := e.cluster; c != nil && (c.UID != in.Cluster.UID || c.Name != in.Cluster.Name || !slices.Equal(c.CIDRs, in.Cluster.CIDRs)) {
		refuse("this reconciler belongs to cluster %q (UID %s, CIDRs %v); restart it to serve cluster %q (UID %s, CIDRs %v)",
			c.Name, c.UID, c.CIDRTexts, in.Cluster.Name, in.Cluster.UID, in.Cluster.CIDRTexts)
		return
	}
	if e.cluster != nil {
		order := in.Token.Compare(e.highest)
		switch {
		case order < 0:
			refuse("a younger leadership (%s) has been seen; this one (%s) is over", e.highestHolder, in.Holder)
			return
		case order == 0 && in.Holder != e.highestHolder && e.session != nil:
			refuse("holder %s lives and has the same fencing token as %s", e.highestHolder, in.Holder)
			return
		}
	}
	if e.session != nil {
		e.emit(EndSession{Session: e.session.id, Reason: EndSuperseded, Text: "a newer session of " + in.Holder + " took over"})
		e.dropSession("superseded by session " + in.Session)
	}
	if e.cluster == nil {
		cluster := in.Cluster
		e.cluster = &cluster
		e.world.CIDRs = cluster.CIDRs
	}
	if e.takeoverAt.IsZero() || in.Token.Compare(e.highest) > 0 {
		e.takeoverAt = time.Time{} // drawn at the first snapshot
		e.firstList = time.Time{}
	}
	e.highest, e.highestHolder = in.Token, in.Holder
	e.session = &session{
		id: in.Session, holder: in.Holder, token: in.Token, watcher: in.WatcherVersion,
		since: e.now, asked: map[uint64]time.Time{},
	}
}

func (e *Engine) sessionEnding(in SessionEnding) {
	if s := e.session; s != nil && s.id == in.Session && !s.draining {
		s.draining, s.drainedBy = true, e.now.Add(drainPeriod)
		e.log(slog.LevelInfo, "session ends", slog.String("session", s.id), slog.String("reason", in.Reason), slog.Int("in_flight", len(e.calls)))
	}
}

func (e *Engine) sessionClosed(in SessionClosed) {
	if e.session != nil && e.session.id == in.Session {
		e.dropSession(in.Reason)
	}
}

// dropSession ends the session's rights: no call goes on, the view is no longer
// this session's. Nodes, view and failures stay for the next one.
func (e *Engine) dropSession(reason string) {
	e.log(slog.LevelInfo, "session ended", slog.String("session", e.session.id), slog.String("reason", reason))
	e.session = nil
	e.viewValid = false
	e.cancelCalls("the session ended")
	if e.list != nil {
		e.emit(CancelList{ID: e.list.id})
	}
	e.list, e.listWanted, e.absenceAt = nil, nil, time.Time{}
	e.urgent, e.queue, e.deletes = nil, nil, nil
	for _, ds := range e.dests {
		ds.queued = false
	}
	for pass := range e.running {
		pass.open = 0
	}
}

func (e *Engine) cancelCalls(reason string) {
	for _, id := range slices.Sorted(maps.Keys(e.calls)) {
		if ds := e.calls[id]; !ds.call.cancelled {
			ds.call.cancelled = true
			e.emit(CancelCall{ID: id})
			e.log(slog.LevelWarn, "write cancelled", slog.String("destination", ds.prefix.String()), slog.String("reason", reason))
		}
	}
}

// driveSession accepts a session once the plugin is known, asks for the write
// lease, stops writes when it ran out, and ends a drained session.
func (e *Engine) driveSession() {
	s := e.session
	if s == nil {
		return
	}
	if s.draining && !s.accepted {
		e.emit(EndSession{Session: s.id, Reason: EndDone, Text: "drained"})
		e.dropSession("the watcher ended it")
		return
	}
	if !s.accepted {
		if e.plugin.Info == nil {
			return
		}
		s.accepted, s.askAt = true, e.now
		e.emit(AcceptSession{Session: s.id, NodeLabelKeys: e.plugin.Info.NodeLabelKeys, HighestResourceVersion: e.highestVersion, DryRun: e.cfg.DryRun})
		e.log(slog.LevelInfo, "session accepted", slog.String("session", s.id), slog.String("holder", s.holder), slog.String("cluster", e.cluster.Name))
	}
	if !s.unlimited && !e.now.Before(s.askAt) {
		s.askID++
		s.asked[s.askID] = e.now
		s.askAt = e.now.Add(leaseAskPeriod)
		for id, at := range s.asked { // unanswered ones grant less and less
			if e.now.Sub(at) > time.Minute {
				delete(s.asked, id)
			}
		}
		e.emit(AskLease{Session: s.id, ID: s.askID})
	}
	if len(e.calls) > 0 && !s.unlimited && !e.now.Before(s.writeUntil) {
		e.cancelCalls("the write lease ran out")
	}
	if s.draining {
		if !e.now.Before(s.drainedBy) {
			e.cancelCalls("the session ends")
		}
		if len(e.calls) == 0 || !e.now.Before(s.drainedBy) {
			e.emit(EndSession{Session: s.id, Reason: EndDone, Text: "drained"})
			e.dropSession("the watcher ended it")
		}
	}
}

func (e *Engine) leaseAnswered(in LeaseAnswered) {
	s := e.session
	if s == nil || s.id != in.Session {
		return
	}
	asked, ok := s.asked[in.ID]
	if !ok {
		return
	}
	delete(s.asked, in.ID)
	if in.Unlimited {
		s.unlimited = true
		return
	}
	// Counted from the asking: what lay in a buffer grants nothing (S5). An older
	// question's answer never shortens what a newer one granted, and a newer
	// answer that grants less counts.
	until := asked.Add(in.Remaining)
	if in.Remaining <= 0 {
		until = e.now
	}
	s.writeUntil = until
}

func (e *Engine) snapshotReceived(in SnapshotReceived) {
	s := e.session
	if s == nil || s.id != in.Session || !s.accepted {
		return
	}
	if in.ResourceVersion != "" {
		if e.highestVersion != "" {
			if order, err := resourceversion.CompareResourceVersion(in.ResourceVersion, e.highestVersion); err == nil && order < 0 {
				if s.staleUntil.IsZero() {
					s.staleUntil = e.now.Add(staleSnapshot)
				}
				if e.now.Before(s.staleUntil) {
					e.log(slog.LevelWarn, "snapshot is older than what was seen before; asked again",
						slog.String("resource_version", in.ResourceVersion), slog.String("highest", e.highestVersion))
					e.addTimer(e.now.Add(time.Second), timer{snapshot: s.id})
					return
				}
				e.log(slog.LevelWarn, "snapshot stays older than what was seen before; taken as the truth",
					slog.String("resource_version", in.ResourceVersion), slog.String("highest", e.highestVersion))
			}
		}
		e.highestVersion = in.ResourceVersion
	}
	s.staleUntil = time.Time{}
	before := make(map[string]*plan.Node, e.world.NodeCount())
	for n := range e.world.Nodes() {
		before[n.Name] = n
	}
	e.world.ReplaceNodes(in.Nodes)
	states := make(map[string]*nodeState, len(in.Nodes))
	for _, n := range in.Nodes {
		st := e.nodes[n.Name]
		if st == nil {
			st = &nodeState{firstSeen: e.now, changedAt: e.now}
		}
		st.sent, st.sentEver = Verdict{}, false // all verdicts again after a snapshot
		states[n.Name] = st
		if old := before[n.Name]; old == nil || !old.SameMachine(n) {
			e.forgive(n.Destinations())
		}
		e.warnNode(n)
	}
	e.nodes = states
	e.emit(SendApplied{Session: s.id, Sequence: in.Sequence})
	e.log(slog.LevelInfo, "snapshot applied", slog.String("session", s.id), slog.Int("nodes", len(in.Nodes)), slog.String("resource_version", in.ResourceVersion))
	first := !s.synced
	s.synced = true
	if e.takeoverAt.IsZero() {
		e.takeoverAt = e.now.Add(jitter(75*time.Second, 35.0/75, e.rng))
	}
	if e.resyncAt.IsZero() && !e.cfg.PollOnly {
		e.resyncAt = e.now.Add(e.resyncPeriod)
	}
	cause := CauseNodeChange
	if e.cfg.PollOnly {
		cause = CausePeriodic
		e.pollAt = e.now.Add(e.cfg.PollPeriod)
	}
	if first || !e.fresh() {
		e.wantList(cause, fmt.Sprintf("snapshot of %d nodes", len(in.Nodes)), time.Time{})
		return
	}
	if !e.cfg.PollOnly {
		e.planAll(e.beginPass(true, cause, "snapshot after a relist"))
	}
}

func (e *Engine) warnNode(n *plan.Node) {
	for _, problem := range n.Problems() {
		e.log(slog.LevelWarn, "pod CIDR ignored", slog.String("node", n.Name), slog.String("reason", problem))
	}
}

func (e *Engine) nodeChanged(in NodeChanged) {
	s := e.session
	if s == nil || s.id != in.Session {
		return
	}
	if !s.synced {
		e.emit(EndSession{Session: s.id, Reason: EndInvalid, Text: "a node event came before the snapshot"})
		e.dropSession("node event before the snapshot")
		return
	}
	if in.ResourceVersion != "" {
		if order, err := resourceversion.CompareResourceVersion(in.ResourceVersion, e.highestVersion); err != nil || order > 0 {
			e.highestVersion = in.ResourceVersion
		}
	}
	touched := map[netip.Prefix]struct{}{}
	name := in.Node.Name
	old := e.world.Node(name)
	if old != nil {
		e.world.Touched(old, touched)
	}
	st := e.nodes[name]
	switch in.Change {
	case NodeDeleted:
		e.world.RemoveNode(name)
		delete(e.nodes, name)
	case NodeAdded, NodeUpdated:
		e.world.PutNode(in.Node)
		e.world.Touched(in.Node, touched)
		e.warnNode(in.Node)
		if st == nil {
			st = &nodeState{firstSeen: e.now}
			e.nodes[name] = st
		}
		if st.changedAt.IsZero() {
			st.changedAt = in.Observed
		}
		if old != nil && old.UID != in.Node.UID {
			st.sent, st.sentEver, st.firstSeen = Verdict{}, false, e.now
		}
	}
	e.dirty[name] = struct{}{}
	detail := "node " + name + " " + [...]string{"added", "updated", "deleted"}[in.Change]
	if in.Fields != "" {
		detail += " (" + in.Fields + ")"
	}
	e.emit(SendApplied{Session: s.id, Sequence: in.Sequence})
	for d := range touched {
		if in.Change != NodeDeleted && in.Node.Holds(d) {
			e.forgive([]netip.Prefix{d})
		}
	}
	if e.cfg.PollOnly {
		return
	}
	if in.Change != NodeDeleted && old != nil && !slices.Equal(old.IPs(), in.Node.IPs()) && e.unseen(in.Node) {
		// Whether the cloud's row carries addresses is only known from a list.
		e.wantList(CauseNodeChange, detail, e.now)
	}
	e.emit(ReconcileStarted{Waited: e.now.Sub(in.Observed)})
	var pass *Pass
	switch {
	case e.list != nil:
		pass = e.list.pass // it will plan with the newest nodes
	case e.listWanted != nil:
		pass = e.listWanted
	case e.fresh():
		pass = e.beginPass(false, CauseNodeChange, detail)
	default:
		e.wantList(CauseNodeChange, detail, time.Time{})
		pass = e.listWanted
	}
	if !e.viewValid {
		return
	}
	e.surge(touched)
	for _, d := range inOrder(touched) {
		e.join(d, pass, CauseNodeChange, detail, in.Trace)
	}
}

// unseen says whether a row of the node stems from our own write, no list has
// shown it since, and it is not known whether it carries addresses.
func (e *Engine) unseen(n *plan.Node) bool {
	for _, d := range n.Destinations() {
		for _, r := range e.world.Rows(d) {
			if r.Written && !r.HasAddresses && e.world.Resolve(r) == n {
				return true
			}
		}
	}
	return false
}

// forgive makes failed destinations due at once: their node has changed.
func (e *Engine) forgive(destinations []netip.Prefix) {
	for _, d := range destinations {
		if ds := e.dests[d]; ds != nil {
			ds.notManaged = ""
			if !ds.nextAt.IsZero() && ds.nextAt.After(e.now) && !e.now.Before(e.pausedUntil) {
				ds.nextAt = e.now
			}
		}
	}
}

// --- Plugin ----------------------------------------------------------------

func (e *Engine) pluginChanged(in PluginChanged) {
	before := e.plugin
	e.plugin = in
	if in.Info == nil {
		e.plugin.Info = before.Info
	}
	if in.Healthy != before.Healthy {
		if in.Healthy {
			e.log(slog.LevelInfo, "plugin is healthy", slog.String("plugin", in.Info.Name), slog.String("version", in.Info.Version))
			e.listNotUntil = time.Time{}
		} else {
			e.log(slog.LevelWarn, "plugin is away; writes and lists wait for it", slog.String("reason", in.Reason))
		}
	}
	info := e.plugin.Info
	if info == nil {
		return
	}
	e.world.Abilities = plan.Abilities{IPv4: info.IPv4, IPv6: info.IPv6, Replace: info.Replace}
	if before.Info != nil && !slices.Equal(before.Info.NodeLabelKeys, info.NodeLabelKeys) && e.session != nil && e.session.accepted {
		e.emit(EndSession{Session: e.session.id, Reason: EndRestart, Text: "the plugin asks for other node labels than before"})
		e.dropSession("other node labels")
	}
	if in.NewView {
		e.viewValid = false
		e.limit = startWrites
		for _, ds := range e.dests {
			if ds.code == CodeUnavailable {
				ds.nextAt = e.now
			}
		}
		if e.session != nil && e.session.synced {
			e.wantList(CauseRetry, "the plugin is another instance or was away", e.now)
		}
	}
}

// --- Lists -----------------------------------------------------------------

// fresh says whether the route view is young enough for a pass without a list.
func (e *Engine) fresh() bool {
	return e.viewValid && e.now.Sub(e.viewEnded) <= e.cfg.MinPassInterval
}

// wantList asks for a full pass. With a time after, the list must begin at or
// after it, so that one under way does not count.
func (e *Engine) wantList(cause Cause, detail string, after time.Time) {
	if e.list != nil && after.IsZero() {
		return // the one under way plans with the newest nodes
	}
	e.listAfter = later(e.listAfter, after)
	if e.listWanted == nil {
		e.listWanted = e.beginPass(true, cause, detail)
	}
}

func (e *Engine) canList() bool {
	return e.session != nil && e.session.synced && !e.session.draining && e.plugin.Healthy
}

// drivePasses begins the full passes that are due by time.
func (e *Engine) drivePasses() {
	if !e.canList() || e.list != nil || e.listWanted != nil {
		return
	}
	due := func(at *time.Time) bool { return !at.IsZero() && !e.now.Before(*at) }
	switch {
	case due(&e.pollAt):
		if len(e.running) > 0 {
			return // passes never overlap; the next begins as soon as this ends
		}
		e.pollAt = e.now.Add(e.cfg.PollPeriod)
		e.wantList(CausePeriodic, "", time.Time{})
	case due(&e.resyncAt):
		e.resyncAt = e.now.Add(e.resyncPeriod)
		e.wantList(CausePeriodic, "resync", time.Time{})
	case due(&e.takeoverAt):
		e.wantList(CauseDrift, "after taking over", time.Time{})
	case due(&e.verifyAt):
		e.wantList(CauseDrift, "verifying writes", time.Time{})
	}
}

// driveList starts the list that is wanted.
func (e *Engine) driveList() {
	if e.listWanted == nil || e.list != nil || !e.canList() || e.now.Before(e.listNotUntil) || e.now.Before(e.listAfter) {
		return
	}
	pass := e.listWanted
	e.nextID++
	e.list = &listRun{id: e.nextID, started: e.now, pass: pass}
	e.listWanted, e.listAfter = nil, time.Time{}
	pass.Lists++
	e.verifyAt, e.firstWriteAt = time.Time{}, time.Time{}
	if !e.takeoverAt.IsZero() && !e.now.Before(e.takeoverAt) {
		e.takeoverAt = e.now.Add(1000 * time.Hour) // done for this leadership
	}
	e.emit(StartList{ID: e.list.id, Cluster: *e.cluster})
}

func (e *Engine) listEnded(in ListEnded) {
	run := e.list
	if run == nil || run.id != in.ID {
		return
	}
	e.list = nil
	if e.session == nil || !e.session.synced {
		e.closePass(run.pass)
		return
	}
	if in.Err != nil {
		wait := reactToList(in.Err, e.listFailures, e.cfg.MaxThrottlePause, e.rng)
		e.listFailures++
		e.listNotUntil, e.listError = e.now.Add(wait), in.Err.String()
		e.log(slog.LevelWarn, "list of routes failed; tried again", slog.String("err", in.Err.String()), slog.Duration("in", wait), slog.Int("attempt", e.listFailures))
		run.pass.Failures++
		e.closePass(run.pass)
		if e.listWanted == nil {
			e.listWanted = e.beginPass(true, run.pass.Cause, run.pass.Detail)
		}
		return
	}
	e.listFailures, e.listError, e.listNotUntil = 0, "", time.Time{}
	wasValid := e.viewValid
	e.viewValid = true
	e.viewSeq++
	e.viewStarted, e.viewEnded = run.started, e.now
	if e.firstList.IsZero() {
		e.firstList = e.now
	}
	e.quotas, e.addressed = in.Quotas, false
	for _, r := range in.Rows {
		if r.HasAddresses {
			e.addressed = true
			break
		}
	}
	e.world.ReplaceRows(in.Tables, in.Rows, func(d netip.Prefix) bool {
		ds := e.dests[d]
		return ds != nil && ds.write.at.After(run.started) // our write is younger than the list
	}, e.warnRow)
	e.viewRows = e.world.RowCount()
	e.settleWrites(run.started)
	e.watchMismatch()
	if !wasValid {
		e.log(slog.LevelInfo, "routes listed", slog.Int("routes", e.viewRows), slog.Int("rows", len(in.Rows)), slog.Duration("took", e.now.Sub(run.started)))
	}
	e.planAll(run.pass)
}

// warnRow logs a row without a readable destination, once per row and process.
func (e *Engine) warnRow(r *plan.Row) {
	key := r.Table + "/" + r.ID + "/" + r.DestinationText
	if _, ok := e.warnedRows[key]; ok || len(e.warnedRows) > 1000 {
		return
	}
	e.warnedRows[key] = struct{}{}
	e.log(slog.LevelInfo, "row ignored: its destination is no CIDR", slog.String("destination", r.DestinationText), slog.String("route", r.Name))
}

// watchMismatch stops replacing when the plugin and Kubernetes seem to name
// machines differently.
func (e *Engine) watchMismatch() {
	if e.world.NodeCount() == 0 || !e.world.Mismatched() {
		e.mismatches = 0
		return
	}
	e.mismatches++
	if e.mismatches > mismatchRounds && !e.now.Before(e.mismatchUntil) {
		e.mismatchUntil = e.now.Add(mismatchPause)
		e.log(slog.LevelError, "no listed route points at a node: the plugin and Kubernetes name machines differently; deletes stop",
			slog.Duration("for", mismatchPause))
	}
}

// planAll plans every destination; the second half of a full pass.
func (e *Engine) planAll(pass *Pass) {
	all := map[netip.Prefix]struct{}{}
	for d := range e.world.Destinations() {
		all[d] = struct{}{}
	}
	for d := range e.dests { // also those that nobody wants or shows any more
		all[d] = struct{}{}
	}
	for d := range e.history {
		if _, ok := all[d]; !ok {
			delete(e.history, d)
		}
	}
	e.surge(all)
	for _, d := range inOrder(all) {
		e.join(d, pass, pass.Cause, pass.Detail, "")
	}
	e.allDirty = true
	e.closePass(pass)
}

// --- Passes ----------------------------------------------------------------

func (e *Engine) beginPass(full bool, cause Cause, detail string) *Pass {
	e.passCount++
	pass := &Pass{ID: e.passCount, Full: full, Cause: cause, Detail: detail, Started: e.now}
	e.running[pass] = struct{}{}
	e.passes = append(e.passes, pass)
	if len(e.passes) > keptPasses {
		e.passes = slices.Delete(e.passes, 0, len(e.passes)-keptPasses)
	}
	if full {
		pass.open = 1 // until it has planned
	}
	return pass
}

// closePass says that a full pass has planned (or failed to).
func (e *Engine) closePass(pass *Pass) {
	if pass.open > 0 {
		pass.open--
	}
}

// endPasses ends the passes whose first attempts have all ended.
func (e *Engine) endPasses() {
	for _, pass := range slices.SortedFunc(maps.Keys(e.running), func(a, b *Pass) int { return cmp.Compare(a.ID, b.ID) }) {
		if pass.open > 0 {
			continue
		}
		pass.Ended = e.now
		delete(e.running, pass)
		e.emit(PassEnded{Pass: *pass})
	}
}
