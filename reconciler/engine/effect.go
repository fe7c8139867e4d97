package engine

import (
	"log/slog"
	"net/netip"
	"time"

	"github.com/waymark-routes/waymark/reconciler/plan"
)

// Effect is something that the caller must do. See the types below.
type Effect interface{ effect() }

// AcceptSession lets a session in.
type AcceptSession struct {
	Session                string
	NodeLabelKeys          []string
	HighestResourceVersion string
	DryRun                 bool
}

// EndReason says why a session is refused or ended.
type EndReason uint8

// The reasons; the session server turns them into gRPC codes.
const (
	// EndDone: the watcher asked for it.
	EndDone EndReason = iota
	// EndRefused: lower token, other cluster, or another live holder.
	EndRefused
	// EndSuperseded: a newer session took over.
	EndSuperseded
	// EndInvalid: a message out of order.
	EndInvalid
	// EndRestart: the watcher shall start over.
	EndRestart
)

// EndSession ends or refuses a session.
type EndSession struct {
	Session string
	Reason  EndReason
	Text    string
}

// SendApplied says that the state covers all events up to Sequence.
type SendApplied struct {
	Session  string
	Sequence uint64
}

// Availability is what a verdict says.
type Availability uint8

// The availabilities.
const (
	// NoVerdict: only the notice matters.
	NoVerdict Availability = iota
	Available
	Unavailable
	NotManaged
)

// String is the word that status shows.
func (a Availability) String() string {
	switch a {
	case NoVerdict:
		return "none"
	case Available:
		return "available"
	case Unavailable:
		return "unavailable"
	case NotManaged:
		return "not-managed"
	default:
		return "unknown"
	}
}

// Notice becomes a Kubernetes event on the node.
type Notice struct{ Type, Reason, Message string }

// Verdict is the answer for one node.
type Verdict struct {
	Node, UID    string
	Availability Availability
	Reason       string
	Message      string
	Notice       *Notice
}

// SendVerdict sends a verdict to the watcher.
type SendVerdict struct {
	Session string
	Verdict Verdict
}

// AskLease asks the watcher how long writes stay allowed.
type AskLease struct {
	Session string
	ID      uint64
}

// AskAbsence asks for a quorum read.
type AskAbsence struct {
	Session string
	ID      uint64
	Names   []string
}

// AskSnapshot asks for a new snapshot.
type AskSnapshot struct{ Session, Reason string }

// StartList starts a list of the cluster's routes.
type StartList struct {
	ID      uint64
	Cluster Cluster
}

// CancelList cancels the list under way; its ListEnded still follows.
type CancelList struct{ ID uint64 }

// StartCall starts a write.
type StartCall struct {
	ID      uint64
	Op      plan.Op
	Cluster Cluster
	Token   Token
	// Attempt counts attempts in a row on the destination, from 1.
	Attempt int
	Cause   Cause
	Detail  string
	Trace   string
}

// CancelCall cancels a write; its CallEnded still follows.
type CancelCall struct{ ID uint64 }

// Log is a line for the log.
type Log struct {
	Level   slog.Level
	Message string
	Attrs   []slog.Attr
}

// PassEnded tells of a pass that has ended.
type PassEnded struct{ Pass Pass }

// ReconcileStarted tells how long a node change waited before its pass began
// (an SLI of KEP-5237).
type ReconcileStarted struct{ Waited time.Duration }

// RouteConfirmed tells how long it took from a node change to all of the node's
// routes being in place.
type RouteConfirmed struct{ Took time.Duration }

// GuardHeld tells that a delete is held.
type GuardHeld struct{ Destination netip.Prefix }

func (AcceptSession) effect()    {}
func (EndSession) effect()       {}
func (SendApplied) effect()      {}
func (SendVerdict) effect()      {}
func (AskLease) effect()         {}
func (AskAbsence) effect()       {}
func (AskSnapshot) effect()      {}
func (StartList) effect()        {}
func (CancelList) effect()       {}
func (StartCall) effect()        {}
func (CancelCall) effect()       {}
func (Log) effect()              {}
func (PassEnded) effect()        {}
func (ReconcileStarted) effect() {}
func (RouteConfirmed) effect()   {}
func (GuardHeld) effect()        {}

// Cause says why work is done. It stands in logs, traces, status and metrics.
type Cause uint8

// The causes; the first two are upstream's.
const (
	CauseNodeChange Cause = iota + 1
	CausePeriodic
	CauseRetry
	CauseDrift
	CauseOperator
)

// String is the metric's label value.
func (c Cause) String() string {
	switch c {
	case CauseNodeChange:
		return "node_change"
	case CausePeriodic:
		return "periodic"
	case CauseRetry:
		return "retry"
	case CauseDrift:
		return "drift"
	case CauseOperator:
		return "operator"
	default:
		return ""
	}
}

// Pass is one pass, running or ended.
type Pass struct {
	ID      uint64
	Full    bool
	Cause   Cause
	Detail  string
	Started time.Time
	// Ended is zero while it runs.
	Ended time.Time
	// Lists and Writes count calls.
	Lists, Creates, Deletes, Replaces int
	Failures                          int
	Changed                           bool

	open int // destinations whose first attempt has not ended
}

// Outcome is upstream's word: error, changed or noop; running before the end.
func (p *Pass) Outcome() string {
	switch {
	case p.Ended.IsZero():
		return "running"
	case p.Failures > 0:
		return "error"
	case p.Changed:
		return "changed"
	default:
		return "noop"
	}
}
