// Package status serves status.v1: what the engine knows and does, for people
// and scripts. Reading asks the engine's owner for a copy; the two operator
// commands are posted as inputs.
package status

import (
	"context"
	"fmt"
	"slices"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/waymark-routes/waymark/internal/build"
	"github.com/waymark-routes/waymark/internal/prefix"
	statusv1 "github.com/waymark-routes/waymark/proto/waymark/status/v1"
	"github.com/waymark-routes/waymark/reconciler/engine"
	"github.com/waymark-routes/waymark/reconciler/plan"
)

// chunk is how many rows go into one message.
const chunk = 500

// Server serves status.v1.
type Server struct {
	statusv1.UnimplementedStatusServiceServer
	query func(context.Context, func(*engine.Engine)) error
	post  func(engine.Input)
}

// NewServer makes a server that asks the engine's owner through query.
func NewServer(query func(context.Context, func(*engine.Engine)) error, post func(engine.Input)) *Server {
	return &Server{query: query, post: post}
}

func (s *Server) ask(ctx context.Context, f func(*engine.Engine)) error {
	if err := s.query(ctx, f); err != nil {
		return status.Error(codes.Unavailable, err.Error())
	}
	return nil
}

func stamp(t time.Time) *timestamppb.Timestamp {
	if t.IsZero() {
		return nil
	}
	return timestamppb.New(t)
}

var guards = map[engine.GuardMode]string{engine.GuardConfirm: "confirm", engine.GuardHold: "hold", engine.GuardOff: "off"}

// GetOverview implements status.v1.
func (s *Server) GetOverview(ctx context.Context, _ *statusv1.GetOverviewRequest) (*statusv1.GetOverviewResponse, error) {
	var o engine.Overview
	if err := s.ask(ctx, func(e *engine.Engine) { o = e.Overview() }); err != nil {
		return nil, err
	}
	out := &statusv1.Overview{
		Version: build.Version(), Started: stamp(o.Begun), WatchBased: o.WatchBased, DryRun: o.DryRun,
		Counts: &statusv1.Counts{
			Nodes: int64(o.Nodes), Desired: int64(o.Desired), Observed: int64(o.Observed), InPlace: int64(o.InPlace),
			Failed: int64(o.Failed), InFlight: int64(o.InFlight), Queued: int64(o.Queued),
		},
		LastList: stamp(o.LastList), NextResync: stamp(o.NextResync), ThrottledUntil: stamp(o.ThrottledUntil),
		Guard:          &statusv1.Guard{Mode: guards[o.Guard], Held: int64(o.Held), Since: stamp(o.HeldSince)},
		NotReadyReason: o.NotReady, Settled: o.Settled, Warnings: o.Warnings,
	}
	if o.Held > 0 {
		out.Guard.Reason = "more deletes at once than the guard lets go unasked, or an empty node list"
	}
	if o.SessionID != "" {
		out.Session = &statusv1.Session{
			Id: o.SessionID, Since: stamp(o.SessionSince), ClusterName: o.Cluster.Name, ClusterCidrs: o.Cluster.CIDRTexts,
			HolderIdentity: o.Holder, Synced: o.Synced, WatcherVersion: o.WatcherVersion,
		}
		if !o.Unlimited {
			out.Session.WriteLeaseRemaining = durationpb.New(max(o.WriteUntil.Sub(o.Now), 0))
		}
	}
	if info := o.Plugin.Info; info != nil {
		out.Plugin = &statusv1.Plugin{Name: info.Name, Version: info.Version, InstanceId: info.InstanceID, Healthy: o.Plugin.Healthy, Reason: o.Plugin.Reason}
		for name, has := range map[string]bool{"replace": info.Replace, "batch": info.Batch, "watch": info.Watch} {
			if has {
				out.Plugin.Capabilities = append(out.Plugin.Capabilities, name)
			}
		}
		slices.Sort(out.Plugin.Capabilities)
	}
	return &statusv1.GetOverviewResponse{Overview: out}, nil
}

func nodeStatus(n engine.NodeStatus) *statusv1.NodeStatus {
	out := &statusv1.NodeStatus{
		Name: n.Node.Name, Uid: n.Node.UID, PodCidrs: n.Node.PodCIDRs, Verdict: n.Verdict.Availability.String(),
		Reason: n.Verdict.Reason, Message: n.Verdict.Message,
	}
	for _, a := range n.Node.Addresses {
		out.Addresses = append(out.Addresses, a.Address)
	}
	return out
}

// ListNodes implements status.v1.
func (s *Server) ListNodes(r *statusv1.ListNodesRequest, stream grpc.ServerStreamingServer[statusv1.ListNodesResponse]) error {
	var nodes []engine.NodeStatus
	if err := s.ask(stream.Context(), func(e *engine.Engine) { nodes = e.NodeStatuses(r.GetName()) }); err != nil {
		return err
	}
	for part := range slices.Chunk(nodes, chunk) {
		message := &statusv1.ListNodesResponse{}
		for _, n := range part {
			message.Nodes = append(message.Nodes, nodeStatus(n))
		}
		if err := stream.Send(message); err != nil {
			return err
		}
	}
	return nil
}

// causes are status' words for what caused the last work.
var causes = map[engine.Cause]string{
	engine.CauseNodeChange: "node_change", engine.CausePeriodic: "resync", engine.CauseRetry: "retry",
	engine.CauseDrift: "drift", engine.CauseOperator: "operator",
}

func (s *Server) rows(ctx context.Context, node string) ([]*statusv1.RouteStatus, error) {
	var rows []engine.Row
	poll := false
	if err := s.ask(ctx, func(e *engine.Engine) { rows, poll = e.Rows(node), e.PollOnly() }); err != nil {
		return nil, err
	}
	out := make([]*statusv1.RouteStatus, 0, len(rows))
	for _, r := range rows {
		cause := causes[r.Cause]
		if poll && r.Cause == engine.CausePeriodic {
			cause = "poll"
		}
		out = append(out, &statusv1.RouteStatus{
			Node: r.Node, DestinationCidr: r.Destination, Target: r.Target, State: r.State, Cause: cause, Since: stamp(r.Since),
			Error: r.Error, NextAttempt: stamp(r.NextAttempt), Attempts: int32(min(r.Attempts, 1<<30)), Table: r.Table,
		})
	}
	return out, nil
}

// ListRoutes implements status.v1.
func (s *Server) ListRoutes(r *statusv1.ListRoutesRequest, stream grpc.ServerStreamingServer[statusv1.ListRoutesResponse]) error {
	rows, err := s.rows(stream.Context(), r.GetNode())
	if err != nil {
		return err
	}
	for part := range slices.Chunk(rows, chunk) {
		if err := stream.Send(&statusv1.ListRoutesResponse{Routes: part}); err != nil {
			return err
		}
	}
	return nil
}

// ListPasses implements status.v1.
func (s *Server) ListPasses(ctx context.Context, r *statusv1.ListPassesRequest) (*statusv1.ListPassesResponse, error) {
	var passes []engine.Pass
	if err := s.ask(ctx, func(e *engine.Engine) { passes = e.Passes(int(r.GetLimit())) }); err != nil {
		return nil, err
	}
	out := &statusv1.ListPassesResponse{}
	for _, p := range passes {
		scope := "node"
		if p.Full {
			scope = "full"
		}
		pass := &statusv1.Pass{
			Id: p.ID, Scope: scope, Cause: p.Cause.String(), Started: stamp(p.Started), Outcome: p.Outcome(), Failures: int64(p.Failures), Detail: p.Detail,
			Calls: map[string]int64{"ListRoutes": int64(p.Lists), "CreateRoute": int64(p.Creates), "DeleteRoute": int64(p.Deletes), "ReplaceRoute": int64(p.Replaces)},
		}
		if !p.Ended.IsZero() {
			pass.Duration = durationpb.New(p.Ended.Sub(p.Started))
		}
		out.Passes = append(out.Passes, pass)
	}
	return out, nil
}

// GetPlan implements status.v1.
func (s *Server) GetPlan(ctx context.Context, _ *statusv1.GetPlanRequest) (*statusv1.GetPlanResponse, error) {
	var ops []plan.Op
	var reason string
	if err := s.ask(ctx, func(e *engine.Engine) { ops, reason = e.Plan() }); err != nil {
		return nil, err
	}
	out := &statusv1.GetPlanResponse{NotReadyReason: reason}
	for _, op := range ops {
		planned := &statusv1.PlannedOperation{Kind: op.Kind.String(), DestinationCidr: op.Destination.String(), Reason: op.Reason}
		if op.Node != nil {
			planned.Node = op.Node.Name
		}
		if op.Row != nil {
			planned.CurrentTarget = op.Row.Target.Value
		}
		out.Operations = append(out.Operations, planned)
	}
	return out, nil
}

// ExplainNode implements status.v1.
func (s *Server) ExplainNode(ctx context.Context, r *statusv1.ExplainNodeRequest) (*statusv1.ExplainNodeResponse, error) {
	if r.GetName() == "" {
		return nil, status.Error(codes.InvalidArgument, "name: is required")
	}
	var nodes []engine.NodeStatus
	var notReady string
	err := s.ask(ctx, func(e *engine.Engine) {
		nodes = e.NodeStatuses(r.GetName())
		_, notReady = e.ClusterReady()
	})
	if err != nil {
		return nil, err
	}
	out := &statusv1.ExplainNodeResponse{}
	if out.Routes, err = s.rows(ctx, r.GetName()); err != nil {
		return nil, err
	}
	if notReady != "" {
		out.Findings = append(out.Findings, "The reconciler is not ready: "+notReady+".")
	}
	if len(nodes) == 0 {
		out.Findings = append(out.Findings, fmt.Sprintf("No node %q is known.", r.GetName()))
		return out, nil
	}
	out.Node = nodeStatus(nodes[0])
	for _, problem := range nodes[0].Node.Problems() {
		out.Findings = append(out.Findings, "The node's "+problem+".")
	}
	if len(nodes[0].Node.Destinations()) == 0 {
		out.Findings = append(out.Findings, "The node has no usable pod CIDR, so it wants no route.")
	}
	for _, route := range out.GetRoutes() {
		line := fmt.Sprintf("%s is %s", route.GetDestinationCidr(), route.GetState())
		if route.GetError() != "" {
			line += ": " + route.GetError()
		}
		if next := route.GetNextAttempt(); next != nil {
			line += ", next attempt at " + next.AsTime().Format(time.RFC3339)
		}
		out.Findings = append(out.Findings, line+".")
	}
	return out, nil
}

// Resync implements status.v1.
func (s *Server) Resync(ctx context.Context, r *statusv1.ResyncRequest) (*statusv1.ResyncResponse, error) {
	s.post(engine.Resync{Reason: r.GetReason()})
	out := &statusv1.ResyncResponse{}
	err := s.ask(ctx, func(e *engine.Engine) {
		for _, p := range e.Passes(0) {
			if p.Full {
				out.PassId = p.ID
				return
			}
		}
	})
	return out, err
}

// Approve implements status.v1.
func (s *Server) Approve(ctx context.Context, r *statusv1.ApproveRequest) (*statusv1.ApproveResponse, error) {
	in := engine.Approve{}
	if text := r.GetDestinationCidr(); text != "" {
		d, err := prefix.Canonical(text)
		if err != nil {
			return nil, status.Errorf(codes.InvalidArgument, "destination_cidr: %v", err)
		}
		in.Destination = d
	}
	var before, after int
	if err := s.ask(ctx, func(e *engine.Engine) { before = e.Held() }); err != nil {
		return nil, err
	}
	s.post(in)
	if err := s.ask(ctx, func(e *engine.Engine) { after = e.Held() }); err != nil {
		return nil, err
	}
	return &statusv1.ApproveResponse{Released: int64(max(before-after, 0))}, nil
}
