// Package execute carries out the engine's lists and writes: it turns them into
// calls of the plugin contract with a deadline each, and their results back into
// the engine's inputs. It decides nothing; order, pace and retries are the
// engine's.
package execute

import (
	"context"
	"errors"
	"fmt"
	"io"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"go.opentelemetry.io/otel"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/propagation"
	"go.opentelemetry.io/otel/trace"
	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/timestamppb"

	routesv1 "github.com/waymark-routes/waymark/proto/waymark/routes/v1"
	"github.com/waymark-routes/waymark/reconciler/engine"
	"github.com/waymark-routes/waymark/reconciler/plan"
)

// Options tune an Executor; zero values mean the defaults.
type Options struct {
	// ListTimeout bounds a whole list (60 s), ListTryTimeout the first chunk and
	// the gap between two (10 s), WriteTimeout one write (30 s).
	ListTimeout, ListTryTimeout, WriteTimeout time.Duration
	// MaxRows is the most rows that a list may have (1,000,000); a longer one is
	// refused whole, and nothing is deleted because of it.
	MaxRows int
}

// Executor runs calls. Start and Cancel methods are called by the engine's owner
// alone; results go to report, from other goroutines.
type Executor struct {
	routes  routesv1.RoutesServiceClient
	options Options
	report  func(engine.Input)
	ctx     context.Context
	stop    context.CancelFunc
	wg      sync.WaitGroup
	cancels map[uint64]context.CancelFunc // owned by the engine's owner
	tracer  trace.Tracer
	prefix  string // makes operation ids unique over restarts
}

// New makes an executor; report takes results.
func New(routes routesv1.RoutesServiceClient, o Options, report func(engine.Input)) *Executor {
	set := func(d *time.Duration, value time.Duration) {
		if *d <= 0 {
			*d = value
		}
	}
	set(&o.ListTimeout, time.Minute)
	set(&o.ListTryTimeout, 10*time.Second)
	set(&o.WriteTimeout, 30*time.Second)
	if o.MaxRows <= 0 {
		o.MaxRows = 1_000_000
	}
	ctx, stop := context.WithCancel(context.Background())
	return &Executor{
		routes: routes, options: o, report: report, ctx: ctx, stop: stop, cancels: map[uint64]context.CancelFunc{},
		tracer: otel.Tracer("waymark/reconciler"), prefix: strconv.FormatInt(time.Now().UnixNano(), 36) + "-",
	}
}

// Close cancels all calls and waits for them.
func (x *Executor) Close() {
	x.stop()
	x.wg.Wait()
}

// Done forgets a call whose result the engine has taken.
func (x *Executor) Done(id uint64) {
	if cancel := x.cancels[id]; cancel != nil {
		cancel()
		delete(x.cancels, id)
	}
}

// Cancel cancels a call; its result still follows.
func (x *Executor) Cancel(id uint64) {
	if cancel := x.cancels[id]; cancel != nil {
		cancel()
	}
}

// StartList starts a list.
func (x *Executor) StartList(e engine.StartList) {
	ctx, cancel := context.WithTimeout(x.ctx, x.options.ListTimeout)
	x.cancels[e.ID] = cancel
	x.wg.Go(func() {
		result := engine.ListEnded{ID: e.ID}
		if err := x.list(ctx, cancel, e, &result); err != nil {
			result = engine.ListEnded{ID: e.ID, Err: Failure(err)}
		}
		x.report(result)
	})
}

var errTooManyRows = errors.New("the list is too long")

func (x *Executor) list(ctx context.Context, cancel context.CancelFunc, e engine.StartList, result *engine.ListEnded) error {
	// The idle limit: a list that stalls is cut before its whole time is over.
	var stalled atomic.Bool
	idle := time.AfterFunc(x.options.ListTryTimeout, func() { stalled.Store(true); cancel() })
	defer idle.Stop()
	stream, err := x.routes.ListRoutes(ctx, &routesv1.ListRoutesRequest{ClusterName: e.Cluster.Name, ClusterCidrs: e.Cluster.CIDRTexts})
	if err != nil {
		return err
	}
	for first := true; ; first = false {
		chunk, err := stream.Recv()
		if errors.Is(err, io.EOF) {
			if len(result.Tables) == 0 {
				return status.Error(codes.Internal, "the list names no table")
			}
			return nil
		}
		if err != nil && stalled.Load() {
			return status.Errorf(codes.DeadlineExceeded, "no chunk of the list came within %v", x.options.ListTryTimeout)
		}
		if err != nil {
			return err
		}
		idle.Reset(x.options.ListTryTimeout)
		if first {
			result.Tables = chunk.GetTables()
		}
		for _, q := range chunk.GetQuotas() {
			result.Quotas = append(result.Quotas, engine.Quota{Table: q.GetTable(), Used: q.GetUsed(), Limit: q.GetLimit()})
		}
		for _, r := range chunk.GetRoutes() {
			result.Rows = append(result.Rows, rowOf(r))
		}
		if len(result.Rows) > x.options.MaxRows {
			return status.Errorf(codes.Internal, "%v: more than %d rows; it is refused whole", errTooManyRows, x.options.MaxRows)
		}
	}
}

// StartCall starts a write.
func (x *Executor) StartCall(e engine.StartCall) {
	ctx, cancel := context.WithTimeout(x.ctx, x.options.WriteTimeout)
	x.cancels[e.ID] = cancel
	if e.Trace != "" {
		ctx = propagation.TraceContext{}.Extract(ctx, propagation.MapCarrier{"traceparent": e.Trace})
	}
	write := &routesv1.WriteContext{
		ClusterName: e.Cluster.Name, ClusterCidrs: e.Cluster.CIDRTexts, OperationId: x.prefix + strconv.FormatUint(e.ID, 36),
		FencingToken: &routesv1.FencingToken{LeaseUid: e.Token.LeaseUID, LeaseTransitions: e.Token.Transitions},
	}
	if !e.Token.LeaseCreated.IsZero() {
		write.FencingToken.LeaseCreated = timestamppb.New(e.Token.LeaseCreated)
	}
	x.wg.Go(func() {
		ctx, span := x.tracer.Start(ctx, "waymark."+e.Op.Kind.String(), trace.WithAttributes(
			attribute.String("waymark.destination", e.Op.Destination.String()),
			attribute.String("waymark.cause", e.Cause.String()),
			attribute.Int("waymark.attempt", e.Attempt),
		))
		outcome, message, err := x.write(ctx, e.Op, write)
		ended := ctx.Err() != nil // our own deadline or cancel
		if err != nil {
			span.RecordError(err)
		}
		span.End()
		result := engine.CallEnded{ID: e.ID, Outcome: outcome, Message: message}
		if err != nil {
			failure := Failure(err)
			failure.Local = failure.Local || ended && (failure.Code == engine.CodeDeadlineExceeded || failure.Code == engine.CodeCancelled)
			result = engine.CallEnded{ID: e.ID, Err: failure}
		}
		x.report(result)
	})
}

func (x *Executor) write(ctx context.Context, op plan.Op, write *routesv1.WriteContext) (engine.Outcome, string, error) {
	switch op.Kind {
	case plan.OpCreate:
		answer, err := x.routes.CreateRoute(ctx, &routesv1.CreateRouteRequest{
			Context: write, Destination: op.Destination.String(), Node: nodeProto(op.Node), NameHint: op.Node.UID,
		})
		return outcomeOf(answer.GetOutcome()), answer.GetMessage(), err
	case plan.OpReplace:
		answer, err := x.routes.ReplaceRoute(ctx, &routesv1.ReplaceRouteRequest{
			Context: write, Route: rowProto(op.Row), Node: nodeProto(op.Node), NameHint: op.Node.UID,
		})
		return outcomeOf(answer.GetOutcome()), answer.GetMessage(), err
	case plan.OpDelete:
		answer, err := x.routes.DeleteRoute(ctx, &routesv1.DeleteRouteRequest{Context: write, Route: rowProto(op.Row)})
		return outcomeOf(answer.GetOutcome()), answer.GetMessage(), err
	default:
		return 0, "", fmt.Errorf("unknown operation %v", op.Kind)
	}
}

func outcomeOf(o routesv1.WriteOutcome) engine.Outcome {
	switch o {
	case routesv1.WriteOutcome_WRITE_OUTCOME_UNCHANGED:
		return engine.OutcomeUnchanged
	case routesv1.WriteOutcome_WRITE_OUTCOME_PENDING:
		return engine.OutcomePending
	case routesv1.WriteOutcome_WRITE_OUTCOME_NOT_MANAGED:
		return engine.OutcomeNotManaged
	default:
		return engine.OutcomeCreated
	}
}

func nodeProto(n *plan.Node) *routesv1.TargetNode {
	out := &routesv1.TargetNode{Name: n.Name, Uid: n.UID, ProviderId: n.ProviderID, Labels: n.Labels, Addresses: make([]*routesv1.NodeAddress, len(n.Addresses))}
	for i, a := range n.Addresses {
		out.Addresses[i] = &routesv1.NodeAddress{Type: a.Type, Address: a.Address}
	}
	return out
}

// rowOf reads a listed row.
func rowOf(r *routesv1.Route) *plan.Row {
	row := &plan.Row{
		ID: r.GetId(), Name: r.GetName(), Table: r.GetTable(), DestinationText: r.GetDestination(),
		NextHop: r.GetNextHop(), Priority: r.GetPriority(), Origin: r.GetOrigin(), ETag: r.GetEtag(), Problem: r.GetProblem(),
		Foreign: r.GetOwnership() == routesv1.RouteOwnership_ROUTE_OWNERSHIP_FOREIGN,
		Ours:    r.GetOwnership() == routesv1.RouteOwnership_ROUTE_OWNERSHIP_OURS,
	}
	switch target := r.GetTarget().(type) {
	case *routesv1.Route_NodeName:
		row.Target = plan.Target{Kind: plan.TargetNodeName, Value: target.NodeName}
	case *routesv1.Route_ProviderId:
		row.Target = plan.Target{Kind: plan.TargetProviderID, Value: target.ProviderId}
	case *routesv1.Route_InstanceId:
		row.Target = plan.Target{Kind: plan.TargetInstanceID, Value: target.InstanceId}
	case *routesv1.Route_Address:
		row.Target = plan.Target{Kind: plan.TargetAddress, Value: target.Address}
	}
	if row.Target.Value == "" {
		row.Target = plan.Target{}
	}
	switch r.GetState() {
	case routesv1.RouteState_ROUTE_STATE_PENDING:
		row.State = plan.StatePending
	case routesv1.RouteState_ROUTE_STATE_BLACKHOLE:
		row.State = plan.StateBlackhole
	}
	if set, ok := r.GetAddresses().(*routesv1.Route_TargetAddresses); ok {
		row.HasAddresses = true
		for _, a := range set.TargetAddresses.GetAddresses() {
			row.Addresses = append(row.Addresses, plan.Address{Type: a.GetType(), Address: a.GetAddress()})
		}
	}
	return row
}

// rowProto is a row as it was listed (field case B-24).
func rowProto(r *plan.Row) *routesv1.Route {
	out := &routesv1.Route{
		Id: r.ID, Name: r.Name, Table: r.Table, Destination: r.DestinationText,
		Priority: r.Priority, Origin: r.Origin, Etag: r.ETag, Problem: r.Problem,
		State:     [...]routesv1.RouteState{plan.StateActive: routesv1.RouteState_ROUTE_STATE_ACTIVE, plan.StatePending: routesv1.RouteState_ROUTE_STATE_PENDING, plan.StateBlackhole: routesv1.RouteState_ROUTE_STATE_BLACKHOLE}[r.State],
		Ownership: routesv1.RouteOwnership_ROUTE_OWNERSHIP_UNKNOWN,
	}
	if r.Ours {
		out.Ownership = routesv1.RouteOwnership_ROUTE_OWNERSHIP_OURS
	}
	switch r.Target.Kind {
	case plan.TargetNone:
	case plan.TargetNodeName:
		out.Target = &routesv1.Route_NodeName{NodeName: r.Target.Value}
	case plan.TargetProviderID:
		out.Target = &routesv1.Route_ProviderId{ProviderId: r.Target.Value}
	case plan.TargetInstanceID:
		out.Target = &routesv1.Route_InstanceId{InstanceId: r.Target.Value}
	case plan.TargetAddress:
		out.Target = &routesv1.Route_Address{Address: r.Target.Value}
	}
	switch {
	case r.HasAddresses:
		set := &routesv1.TargetAddresses{}
		for _, a := range r.Addresses {
			set.Addresses = append(set.Addresses, &routesv1.NodeAddress{Type: a.Type, Address: a.Address})
		}
		out.Addresses = &routesv1.Route_TargetAddresses{TargetAddresses: set}
	case r.NextHop != "":
		out.Addresses = &routesv1.Route_NextHop{NextHop: r.NextHop}
	}
	return out
}

// codeNames are the codes as people know them.
var codeNames = map[codes.Code]string{
	codes.Canceled: "CANCELLED", codes.Unknown: "UNKNOWN", codes.InvalidArgument: "INVALID_ARGUMENT", codes.DeadlineExceeded: "DEADLINE_EXCEEDED",
	codes.NotFound: "NOT_FOUND", codes.AlreadyExists: "ALREADY_EXISTS", codes.PermissionDenied: "PERMISSION_DENIED",
	codes.ResourceExhausted: "RESOURCE_EXHAUSTED", codes.FailedPrecondition: "FAILED_PRECONDITION", codes.Aborted: "ABORTED",
	codes.OutOfRange: "OUT_OF_RANGE", codes.Unimplemented: "UNIMPLEMENTED", codes.Internal: "INTERNAL", codes.Unavailable: "UNAVAILABLE",
	codes.DataLoss: "DATA_LOSS", codes.Unauthenticated: "UNAUTHENTICATED",
}

// maxText bounds a plugin's text in logs, verdicts and events, in bytes.
const maxText = 1024

// Failure reads an error of a plugin call.
func Failure(err error) *engine.Failure {
	st := status.Convert(err)
	f := &engine.Failure{Code: engine.Code(st.Code()), Name: codeNames[st.Code()], Text: st.Message()}
	if f.Name == "" {
		f.Name = st.Code().String()
	}
	if len(f.Text) > maxText {
		f.Text = f.Text[:maxText] + " …"
	}
	f.Local, f.NotSent = origin(st)
	for _, detail := range st.Details() {
		switch detail := detail.(type) {
		case *errdetails.RetryInfo:
			if delay := detail.GetRetryDelay().AsDuration(); delay > 0 {
				f.HasRetry, f.RetryAfter = true, delay
			}
		case *errdetails.QuotaFailure:
			f.Quota = true
		case *errdetails.ResourceInfo:
			f.Holder = detail.GetOwner()
		}
	}
	return f
}
