// Package cloudplugin is the Go SDK of Waymark's plugin contract
// (proto/waymark/routes/v1). A vendor implements [Plugin] over plain Go values
// and calls [Main]:
//
//	func main() { cloudplugin.Main("waymark-plugin-example", newExample) }
//
// Optional abilities are optional interfaces: [Replacer], [Batcher], [Watcher],
// [HealthChecker]. Errors are made by the constructors in this package
// (Throttled, QuotaExceeded, Conflict, …), which choose the gRPC code and the
// details that the contract asks for.
//
// The reconciler uses the other half of the package: [Dial] and [Client].
package cloudplugin

import (
	"context"
	"time"
)

// Plugin keeps the routes of clusters in one vendor's cloud. Its methods are
// called from several goroutines at once; never two writes on one destination.
type Plugin interface {
	// Info says who the plugin is and what it needs. Called on every new
	// connection.
	Info() Info
	// ListRoutes returns all routes of the cluster's tables. A row whose target
	// cannot be looked up gets a Problem; it never fails the list.
	ListRoutes(ctx context.Context, cluster Cluster) (RouteList, error)
	// CreateRoute makes the route in every table that lacks it (or in the one
	// named). It never overwrites a route to another target: that is Conflict.
	CreateRoute(ctx context.Context, request CreateRequest) (Outcome, error)
	// DeleteRoute removes exactly the listed row. A missing one is Unchanged.
	DeleteRoute(ctx context.Context, request DeleteRequest) (Outcome, error)
}

// Replacer points a row at another node with no moment without a route.
type Replacer interface {
	ReplaceRoute(ctx context.Context, request ReplaceRequest) (Outcome, error)
}

// Batcher carries out many operations; report is called once per item, as it
// ends, from one goroutine at a time. An item that is not reported has an unknown
// outcome.
type Batcher interface {
	ApplyRoutes(ctx context.Context, operations []Operation, report func(Result)) error
}

// Watcher streams what changes in the cloud's tables. listed is called once with
// the complete list, then changed for every change; lost ends the watch.
type Watcher interface {
	WatchRoutes(ctx context.Context, cluster Cluster, sink WatchSink) error
}

// WatchSink takes what a Watcher sees; each method fails when the reader is gone.
type WatchSink interface {
	Listed(list RouteList, revision string) error
	Changed(changed []Route, removedIDs []string, revision string) error
	Lost(reason string) error
}

// HealthChecker says whether the plugin can reach its cloud; called every few
// seconds. Without it a running plugin is healthy.
type HealthChecker interface {
	CheckHealth(ctx context.Context) error
}

// Family is an IP family.
type Family string

// The families.
const (
	IPv4 Family = "ipv4"
	IPv6 Family = "ipv6"
)

// Info describes a plugin. Abilities follow from the interfaces it implements.
type Info struct {
	// Name, for example "routes.example.com"; required.
	Name    string
	Version string
	Limits  Limits
	// Families routed; none means all.
	Families []Family
	// NodeLabelKeys are the labels that the plugin needs in Node.Labels.
	NodeLabelKeys []string
}

// Limits bound the load; zero means no limit.
type Limits struct {
	MaxConcurrentWrites int
	MaxWritesPerSecond  float64
	MaxBatchSize        int
	MaxRoutesPerCluster int64
}

// Cluster says whose routes are meant.
type Cluster struct {
	// Name is the cluster's name, unchanged: any length, any characters.
	Name string
	// CIDRs are the cluster's pod address ranges.
	CIDRs []string
}

// Token orders leaderships; see FencingToken in routes.proto.
type Token struct {
	LeaseCreated time.Time
	LeaseUID     string
	Transitions  int64
}

// WriteContext comes with every write.
type WriteContext struct {
	Cluster     Cluster
	OperationID string
	Token       Token
}

// NodeAddress is an address of a node with its Kubernetes type.
type NodeAddress struct{ Type, Address string }

// Node is what a route shall point at.
type Node struct {
	Name, UID, ProviderID string
	Addresses             []NodeAddress
	Labels                map[string]string
}

// TargetKind says in which way a route names its target.
type TargetKind int

// The ways to name a target.
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

// State is a route's state.
type State int

// The states.
const (
	Active State = iota
	Pending
	Blackhole
)

// Ownership says whose route it is, as far as the cloud can tell.
type Ownership int

// The ownerships.
const (
	OwnershipUnknown Ownership = iota
	Ours
	Foreign
)

// Route is one row of one route table; see Route in routes.proto.
type Route struct {
	ID, Name, Table string
	Destination     string
	Target          Target
	State           State
	// TargetAddresses is the complete set of the target's addresses; nil means
	// that the cloud does not carry them, empty that it carries none.
	TargetAddresses []NodeAddress
	// NextHop is one address of the target.
	NextHop   string
	Priority  int64
	Origin    string
	ETag      string
	Ownership Ownership
	Problem   string
}

// Quota tells how full a table is.
type Quota struct {
	Table       string
	Used, Limit int64
}

// RouteList is a complete list.
type RouteList struct {
	// Tables that hold the cluster's routes, at least one.
	Tables []string
	Routes []Route
	Quotas []Quota
}

// Outcome says what a successful write did. The zero value is Created.
type Outcome struct {
	Kind OutcomeKind
	// Message is for people.
	Message string
}

// OutcomeKind says what a successful write did.
type OutcomeKind int

// The outcomes.
const (
	// Created: the cloud was changed as asked (also for deletes and replaces).
	Created OutcomeKind = iota
	// Unchanged: it was so already.
	Unchanged
	// Accepted: accepted, not yet effective; the next list decides.
	Accepted
	// NotManaged: this node is not this plugin's job.
	NotManaged
)

// CreateRequest asks for one route.
type CreateRequest struct {
	WriteContext
	// Destination in canonical CIDR notation.
	Destination string
	Node        Node
	// Table is the one to write to; empty: every table that lacks the route.
	Table string
	// NameHint is a unique name for the route; the node's UID.
	NameHint string
}

// DeleteRequest asks to remove one row.
type DeleteRequest struct {
	WriteContext
	// Route exactly as it was listed.
	Route Route
	// Node that held it, where known.
	Node *Node
}

// ReplaceRequest asks to point a row at another node.
type ReplaceRequest struct {
	WriteContext
	Route    Route
	Node     Node
	NameHint string
}

// Operation is one item of a batch: exactly one field is set.
type Operation struct {
	Create  *CreateRequest
	Delete  *DeleteRequest
	Replace *ReplaceRequest
}

// Result is the result of one item of a batch.
type Result struct {
	Index   int
	Outcome Outcome
	Err     error
}
