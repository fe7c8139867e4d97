package engine

import (
	"net/netip"
	"time"

	"github.com/waymark-routes/waymark/reconciler/plan"
)

// Input is something that happened. See the types below.
type Input interface{ input() }

// Token orders leaderships: LeaseCreated, then LeaseUID, then Transitions
// (invariant S4).
type Token struct {
	LeaseCreated time.Time
	LeaseUID     string
	Transitions  int64
}

// Compare orders two tokens.
func (t Token) Compare(o Token) int {
	if c := t.LeaseCreated.Compare(o.LeaseCreated); c != 0 {
		return c
	}
	switch {
	case t.LeaseUID < o.LeaseUID:
		return -1
	case t.LeaseUID > o.LeaseUID:
		return 1
	case t.Transitions < o.Transitions:
		return -1
	case t.Transitions > o.Transitions:
		return 1
	}
	return 0
}

// Cluster identifies the cluster that a session is for.
type Cluster struct {
	UID, Name string
	// CIDRs are canonical.
	CIDRs []netip.Prefix
	// CIDRTexts are the same as they are sent to the plugin.
	CIDRTexts []string
}

// SessionOpened says that a watcher opened a session.
type SessionOpened struct {
	// Session is unique within the process.
	Session string
	Cluster Cluster
	Holder  string
	Token   Token
	// WatcherVersion is for display.
	WatcherVersion string
}

// SessionEnding says that the watcher ends its session on purpose: no new write
// starts, those in flight are awaited for 5 s, then EndSession follows.
type SessionEnding struct{ Session, Reason string }

// SessionClosed says that a session's stream is gone.
type SessionClosed struct{ Session, Reason string }

// SnapshotReceived is a whole snapshot.
type SnapshotReceived struct {
	Session         string
	Nodes           []*plan.Node
	ResourceVersion string
	Sequence        uint64
}

// NodeChange says what happened to a node.
type NodeChange uint8

// The changes.
const (
	NodeAdded NodeChange = iota
	NodeUpdated
	NodeDeleted
)

// NodeChanged is one node event after the snapshot.
type NodeChanged struct {
	Session string
	Change  NodeChange
	// Node is the state after the change; for NodeDeleted only the name counts.
	Node *plan.Node
	// Fields names the changed fields, for people.
	Fields   string
	Sequence uint64
	// Observed is when the watcher saw the change, on the engine's clock.
	Observed time.Time
	// ResourceVersion and Trace (a W3C traceparent) are for people and traces.
	ResourceVersion, Trace string
}

// LeaseAnswered answers AskLease.
type LeaseAnswered struct {
	Session   string
	ID        uint64
	Remaining time.Duration
	Unlimited bool
}

// Presence is what a quorum read said of one node.
type Presence struct {
	Name         string
	Present      bool
	Destinations []netip.Prefix
}

// AbsenceAnswered answers AskAbsence.
type AbsenceAnswered struct {
	Session string
	ID      uint64
	Nodes   []Presence
	Total   int64
	// Err is set when the read failed; then nothing is concluded.
	Err string
}

// PluginInfo is what a plugin says of itself.
type PluginInfo struct {
	Name, Version, InstanceID string
	Replace, Batch, Watch     bool
	MaxConcurrentWrites       int
	MaxWritesPerSecond        float64
	IPv4, IPv6                bool
	NodeLabelKeys             []string
}

// PluginChanged says how the plugin is.
type PluginChanged struct {
	Healthy bool
	// Reason says why it is not healthy.
	Reason string
	// Info is nil until it has answered once.
	Info *PluginInfo
	// NewView voids the route view: another instance, or a break of over 1 s.
	NewView bool
}

// Quota is a table's fill.
type Quota struct {
	Table       string
	Used, Limit int64
}

// ListEnded ends a StartList.
type ListEnded struct {
	ID     uint64
	Tables []string
	Rows   []*plan.Row
	Quotas []Quota
	// Err is nil for a complete list.
	Err *Failure
}

// Outcome says what a successful write did.
type Outcome uint8

// The outcomes.
const (
	OutcomeCreated Outcome = iota
	OutcomeUnchanged
	OutcomePending
	OutcomeNotManaged
)

// CallEnded ends a StartCall.
type CallEnded struct {
	ID      uint64
	Outcome Outcome
	// Message is the plugin's text beside an outcome.
	Message string
	// Err is nil for a success.
	Err *Failure
}

// Tick says that time has passed.
type Tick struct{}

// Resync is an operator's command: a full pass now.
type Resync struct{ Reason string }

// Approve is an operator's command: held deletes may go; only Destination's when
// it is valid, else all.
type Approve struct{ Destination netip.Prefix }

func (SessionOpened) input()    {}
func (SessionEnding) input()    {}
func (SessionClosed) input()    {}
func (SnapshotReceived) input() {}
func (NodeChanged) input()      {}
func (LeaseAnswered) input()    {}
func (AbsenceAnswered) input()  {}
func (PluginChanged) input()    {}
func (ListEnded) input()        {}
func (CallEnded) input()        {}
func (Tick) input()             {}
func (Resync) input()           {}
func (Approve) input()          {}
