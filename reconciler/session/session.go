// Package session is the server side of the node session: it turns a watcher's
// messages into the engine's inputs and the engine's effects into messages.
// Whether a session may be, and what an event means, the engine decides; here is
// only the order of messages (contiguous snapshots, counted events) and the
// translation.
package session

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/waymark-routes/waymark/internal/build"
	"github.com/waymark-routes/waymark/internal/prefix"
	nodesv1 "github.com/waymark-routes/waymark/proto/waymark/nodes/v1"
	"github.com/waymark-routes/waymark/reconciler/engine"
	"github.com/waymark-routes/waymark/reconciler/plan"
)

const (
	// startTimeout is how long a new stream may wait with its SessionStart.
	startTimeout = 10 * time.Second
	// maxNodes bounds a snapshot.
	maxNodes = 1_000_000
)

// Server serves node sessions.
type Server struct {
	nodesv1.UnimplementedNodeSessionServiceServer
	post   func(engine.Input) // blocks while the engine is behind
	now    func() time.Time   // the engine's clock
	logger *slog.Logger
	prefix string

	mu       sync.Mutex // guards all below
	sessions map[string]*outbox
	count    int
	stopping bool
	wg       sync.WaitGroup
}

// NewServer makes a server that posts inputs to the engine's owner.
func NewServer(post func(engine.Input), now func() time.Time, logger *slog.Logger) *Server {
	return &Server{
		post: post, now: now, logger: logger,
		prefix: strconv.FormatInt(time.Now().UnixNano(), 36), sessions: map[string]*outbox{},
	}
}

// outbox holds what is to be sent in one session. Verdicts wait in one slot per
// node, the newest wins, so that a slow watcher costs bounded memory.
type outbox struct {
	mu       sync.Mutex // guards all below
	urgent   []*nodesv1.SessionResponse
	applied  uint64
	verdicts map[string]*nodesv1.NodeVerdict
	order    []string
	end      error
	ended    bool
	wake     chan struct{}
}

func newOutbox() *outbox {
	return &outbox{verdicts: map[string]*nodesv1.NodeVerdict{}, wake: make(chan struct{}, 1)}
}

func (o *outbox) change(f func()) {
	o.mu.Lock()
	f()
	o.mu.Unlock()
	select {
	case o.wake <- struct{}{}:
	default:
	}
}

// take returns all that is to be sent now.
func (o *outbox) take() (messages []*nodesv1.SessionResponse, ended bool, end error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	messages, o.urgent = o.urgent, nil
	if o.applied > 0 {
		messages = append(messages, &nodesv1.SessionResponse{Message: &nodesv1.SessionResponse_Applied{Applied: &nodesv1.Applied{Sequence: o.applied}}})
		o.applied = 0
	}
	for _, name := range o.order {
		messages = append(messages, &nodesv1.SessionResponse{Message: &nodesv1.SessionResponse_NodeVerdict{NodeVerdict: o.verdicts[name]}})
	}
	o.order = nil
	clear(o.verdicts)
	return messages, o.ended, o.end
}

// Session implements the contract.
func (s *Server) Session(stream grpc.BidiStreamingServer[nodesv1.SessionRequest, nodesv1.SessionResponse]) error {
	opened, err := s.start(stream)
	if err != nil {
		return err
	}
	box := newOutbox()
	s.mu.Lock()
	if s.stopping {
		s.mu.Unlock()
		return status.Error(codes.Unavailable, "the reconciler shuts down; dial again")
	}
	s.count++
	opened.Session = s.prefix + "-" + strconv.Itoa(s.count)
	s.sessions[opened.Session] = box
	s.wg.Add(1)
	s.mu.Unlock()

	s.post(opened)
	go func() {
		defer s.wg.Done()
		err := s.receive(stream, opened.Session)
		reason := "the watcher ended the stream"
		if err != nil {
			reason = err.Error()
		}
		s.post(engine.SessionClosed{Session: opened.Session, Reason: reason})
		box.change(func() {
			if !box.ended {
				box.ended, box.end = true, err
			}
		})
	}()
	defer func() {
		s.mu.Lock()
		delete(s.sessions, opened.Session)
		s.mu.Unlock()
	}()
	for {
		select {
		case <-box.wake:
		case <-stream.Context().Done():
			return status.FromContextError(stream.Context().Err()).Err()
		}
		messages, ended, end := box.take()
		for _, message := range messages {
			if err := stream.Send(message); err != nil {
				return err
			}
		}
		if ended {
			return end
		}
	}
}

// start reads and checks the first message.
func (s *Server) start(stream grpc.BidiStreamingServer[nodesv1.SessionRequest, nodesv1.SessionResponse]) (engine.SessionOpened, error) {
	type received struct {
		message *nodesv1.SessionRequest
		err     error
	}
	first := make(chan received, 1)
	go func() { // ends with the stream at the latest
		message, err := stream.Recv()
		first <- received{message, err}
	}()
	timer := time.NewTimer(startTimeout)
	defer timer.Stop()
	var in engine.SessionOpened
	var got received
	select {
	case got = <-first:
	case <-timer.C:
		return in, status.Errorf(codes.InvalidArgument, "no SessionStart came within %v", startTimeout)
	}
	if got.err != nil {
		return in, got.err
	}
	start := got.message.GetStart()
	if start == nil {
		return in, status.Error(codes.InvalidArgument, "the first message is not SessionStart")
	}
	if start.GetClusterUid() == "" || start.GetClusterName() == "" || len(start.GetClusterCidrs()) == 0 {
		return in, status.Error(codes.InvalidArgument, "SessionStart: cluster_uid, cluster_name and cluster_cidrs are required")
	}
	token := start.GetFencingToken()
	in = engine.SessionOpened{
		Holder: start.GetHolderIdentity(), WatcherVersion: start.GetWatcherVersion(),
		Cluster: engine.Cluster{UID: start.GetClusterUid(), Name: start.GetClusterName(), CIDRTexts: start.GetClusterCidrs()},
		Token:   engine.Token{LeaseUID: token.GetLeaseUid(), Transitions: token.GetLeaseTransitions()},
	}
	if created := token.GetLeaseCreated(); created != nil {
		in.Token.LeaseCreated = created.AsTime()
	}
	for _, text := range start.GetClusterCidrs() {
		cidr, err := prefix.Canonical(text)
		if err != nil {
			return in, status.Errorf(codes.InvalidArgument, "SessionStart: cluster_cidrs: %v", err)
		}
		in.Cluster.CIDRs = append(in.Cluster.CIDRs, cidr)
	}
	slices.SortFunc(in.Cluster.CIDRs, netip.Prefix.Compare)
	return in, nil
}

// receive reads the session's messages until the stream ends.
func (s *Server) receive(stream grpc.BidiStreamingServer[nodesv1.SessionRequest, nodesv1.SessionResponse], id string) error {
	var snapshot []*plan.Node
	within := false
	invalid := func(format string, args ...any) error { return status.Errorf(codes.InvalidArgument, format, args...) }
	for {
		message, err := stream.Recv()
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
		switch m := message.GetMessage().(type) {
		case *nodesv1.SessionRequest_SnapshotBegin:
			if within {
				return invalid("SnapshotBegin within a snapshot")
			}
			within, snapshot = true, nil
		case *nodesv1.SessionRequest_SnapshotComplete:
			if !within {
				return invalid("SnapshotComplete without SnapshotBegin")
			}
			if m.SnapshotComplete.GetNodeCount() != int64(len(snapshot)) {
				return invalid("SnapshotComplete counts %d nodes, %d came", m.SnapshotComplete.GetNodeCount(), len(snapshot))
			}
			within = false
			s.post(engine.SnapshotReceived{
				Session: id, Nodes: snapshot, ResourceVersion: m.SnapshotComplete.GetResourceVersion(), Sequence: m.SnapshotComplete.GetSequence(),
			})
			snapshot = nil
		case *nodesv1.SessionRequest_NodeEvent:
			event := m.NodeEvent
			if event.GetNode().GetName() == "" {
				return invalid("NodeEvent without a node name")
			}
			if isSnapshot := event.GetType() == nodesv1.NodeEventType_NODE_EVENT_TYPE_SNAPSHOT; isSnapshot != within {
				return invalid("NodeEvent of type %v at the wrong place (within a snapshot: %t)", event.GetType(), within)
			}
			if within {
				if len(snapshot) >= maxNodes {
					return status.Errorf(codes.ResourceExhausted, "more than %d nodes in a snapshot", maxNodes)
				}
				snapshot = append(snapshot, nodeOf(event.GetNode()))
				continue
			}
			change, ok := changes[event.GetType()]
			if !ok {
				return invalid("NodeEvent of unknown type %v", event.GetType())
			}
			s.post(engine.NodeChanged{
				Session: id, Change: change, Node: nodeOf(event.GetNode()), Fields: fieldsOf(event.GetChangedFields()), Sequence: event.GetSequence(),
				Observed: s.now().Add(-max(event.GetAge().AsDuration(), 0)), ResourceVersion: event.GetNode().GetResourceVersion(), Trace: event.GetTraceparent(),
			})
		case *nodesv1.SessionRequest_WriteLease:
			s.post(engine.LeaseAnswered{
				Session: id, ID: m.WriteLease.GetRequestId(), Remaining: m.WriteLease.GetRemaining().AsDuration(), Unlimited: m.WriteLease.GetUnlimited(),
			})
		case *nodesv1.SessionRequest_Absence:
			s.post(absenceOf(id, m.Absence))
		case *nodesv1.SessionRequest_End:
			s.post(engine.SessionEnding{Session: id, Reason: m.End.GetReason()})
		case *nodesv1.SessionRequest_Start:
			return invalid("a second SessionStart")
		default:
			// A message of a newer minor version (S7).
			s.logger.Debug("message of unknown kind ignored", slog.String("session", id))
		}
	}
}

var changes = map[nodesv1.NodeEventType]engine.NodeChange{
	nodesv1.NodeEventType_NODE_EVENT_TYPE_ADDED:   engine.NodeAdded,
	nodesv1.NodeEventType_NODE_EVENT_TYPE_UPDATED: engine.NodeUpdated,
	nodesv1.NodeEventType_NODE_EVENT_TYPE_DELETED: engine.NodeDeleted,
}

var fieldNames = map[nodesv1.NodeField]string{
	nodesv1.NodeField_NODE_FIELD_POD_CIDRS:   "podCIDRs",
	nodesv1.NodeField_NODE_FIELD_ADDRESSES:   "addresses",
	nodesv1.NodeField_NODE_FIELD_UID:         "uid",
	nodesv1.NodeField_NODE_FIELD_PROVIDER_ID: "providerID",
	nodesv1.NodeField_NODE_FIELD_LABELS:      "labels",
}

func fieldsOf(fields []nodesv1.NodeField) string {
	var names []string
	for _, field := range fields {
		if name := fieldNames[field]; name != "" {
			names = append(names, name)
		}
	}
	return strings.Join(names, ", ")
}

func nodeOf(n *nodesv1.Node) *plan.Node {
	out := plan.Node{Name: n.GetName(), UID: n.GetUid(), ProviderID: n.GetProviderId(), PodCIDRs: n.GetPodCidrs(), Labels: n.GetLabels()}
	if created := n.GetCreated(); created != nil {
		out.Created = created.AsTime()
	}
	if c := n.GetNetworkUnavailable(); c != nil {
		out.Condition = &plan.Condition{Status: c.GetStatus(), Reason: c.GetReason()}
	}
	if len(n.GetAddresses()) > 0 {
		out.Addresses = make([]plan.Address, len(n.GetAddresses()))
		for i, a := range n.GetAddresses() {
			out.Addresses[i] = plan.Address{Type: a.GetType(), Address: a.GetAddress()}
		}
	}
	return plan.NewNode(out)
}

func absenceOf(id string, a *nodesv1.Absence) engine.AbsenceAnswered {
	in := engine.AbsenceAnswered{Session: id, ID: a.GetRequestId(), Total: a.GetTotalNodes(), Err: a.GetError()}
	for _, n := range a.GetNodes() {
		presence := engine.Presence{Name: n.GetName(), Present: n.GetPresent()}
		for _, text := range n.GetPodCidrs() {
			if d, err := prefix.Canonical(text); err == nil {
				presence.Destinations = append(presence.Destinations, d)
			}
		}
		in.Nodes = append(in.Nodes, presence)
	}
	return in
}

// --- Effects; called by the engine's owner, never block ---------------------

func (s *Server) box(id string) *outbox {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.sessions[id]
}

func (s *Server) urgent(id string, message *nodesv1.SessionResponse) {
	if box := s.box(id); box != nil {
		box.change(func() { box.urgent = append(box.urgent, message) })
	}
}

// Accept carries out engine.AcceptSession.
func (s *Server) Accept(e engine.AcceptSession) {
	s.urgent(e.Session, &nodesv1.SessionResponse{Message: &nodesv1.SessionResponse_Accepted{Accepted: &nodesv1.SessionAccepted{
		SessionId: e.Session, ReconcilerVersion: build.Version(), NodeLabelKeys: e.NodeLabelKeys,
		HighestResourceVersion: e.HighestResourceVersion, DryRun: e.DryRun,
	}}})
}

// End carries out engine.EndSession.
func (s *Server) End(e engine.EndSession) {
	box := s.box(e.Session)
	if box == nil {
		return
	}
	var end error
	switch e.Reason {
	case engine.EndDone:
		s.mu.Lock()
		if s.stopping {
			end = status.Error(codes.Unavailable, "the reconciler shuts down; dial again")
		}
		s.mu.Unlock()
	case engine.EndRefused:
		end = status.Error(codes.FailedPrecondition, e.Text)
	case engine.EndSuperseded:
		end = status.Error(codes.Aborted, e.Text)
	case engine.EndInvalid:
		end = status.Error(codes.InvalidArgument, e.Text)
	case engine.EndRestart:
		end = status.Error(codes.Unavailable, e.Text)
	default:
		end = status.Error(codes.Internal, fmt.Sprintf("unknown end %d: %s", e.Reason, e.Text))
	}
	box.change(func() { box.ended, box.end = true, end })
}

// Applied carries out engine.SendApplied.
func (s *Server) Applied(e engine.SendApplied) {
	if box := s.box(e.Session); box != nil {
		box.change(func() { box.applied = max(box.applied, e.Sequence) })
	}
}

var availabilities = map[engine.Availability]nodesv1.NodeAvailability{
	engine.NoVerdict:   nodesv1.NodeAvailability_NODE_AVAILABILITY_UNCHANGED,
	engine.Available:   nodesv1.NodeAvailability_NODE_AVAILABILITY_AVAILABLE,
	engine.Unavailable: nodesv1.NodeAvailability_NODE_AVAILABILITY_UNAVAILABLE,
	engine.NotManaged:  nodesv1.NodeAvailability_NODE_AVAILABILITY_NOT_MANAGED,
}

// Verdict carries out engine.SendVerdict.
func (s *Server) Verdict(e engine.SendVerdict) {
	box := s.box(e.Session)
	if box == nil {
		return
	}
	v := &nodesv1.NodeVerdict{
		Node: e.Verdict.Node, Uid: e.Verdict.UID, Availability: availabilities[e.Verdict.Availability],
		Reason: e.Verdict.Reason, Message: e.Verdict.Message,
	}
	if n := e.Verdict.Notice; n != nil {
		v.Notice = &nodesv1.NodeNotice{Type: n.Type, Reason: n.Reason, Message: n.Message}
	}
	box.change(func() {
		old := box.verdicts[v.GetNode()]
		switch {
		case old == nil:
			box.order = append(box.order, v.GetNode())
		case v.GetAvailability() == nodesv1.NodeAvailability_NODE_AVAILABILITY_UNCHANGED && old.GetUid() == v.GetUid():
			// A notice alone does not hide the verdict that waits.
			v.Availability, v.Reason, v.Message = old.GetAvailability(), old.GetReason(), old.GetMessage()
		case v.GetNotice() == nil && old.GetUid() == v.GetUid():
			v.Notice = old.GetNotice()
		}
		box.verdicts[v.GetNode()] = v
	})
}

// AskLease carries out engine.AskLease.
func (s *Server) AskLease(e engine.AskLease) {
	s.urgent(e.Session, &nodesv1.SessionResponse{Message: &nodesv1.SessionResponse_WriteLeaseRequest{WriteLeaseRequest: &nodesv1.WriteLeaseRequest{Id: e.ID}}})
}

// AskAbsence carries out engine.AskAbsence.
func (s *Server) AskAbsence(e engine.AskAbsence) {
	s.urgent(e.Session, &nodesv1.SessionResponse{Message: &nodesv1.SessionResponse_AbsenceRequest{AbsenceRequest: &nodesv1.AbsenceRequest{Id: e.ID, Names: e.Names}}})
}

// AskSnapshot carries out engine.AskSnapshot.
func (s *Server) AskSnapshot(e engine.AskSnapshot) {
	s.urgent(e.Session, &nodesv1.SessionResponse{Message: &nodesv1.SessionResponse_SnapshotRequest{SnapshotRequest: &nodesv1.SnapshotRequest{Reason: e.Reason}}})
}

// Stop refuses new sessions and asks the engine to drain the ones that live; it
// returns when they have ended or ctx is over.
func (s *Server) Stop(ctx context.Context) {
	s.mu.Lock()
	s.stopping = true
	ids := make([]string, 0, len(s.sessions))
	for id := range s.sessions {
		ids = append(ids, id)
	}
	s.mu.Unlock()
	for _, id := range ids {
		s.post(engine.SessionEnding{Session: id, Reason: "the reconciler shuts down"})
	}
	ended := make(chan struct{})
	go func() {
		s.wg.Wait()
		close(ended)
	}()
	select {
	case <-ended:
	case <-ctx.Done():
		for _, id := range ids {
			if box := s.box(id); box != nil {
				box.change(func() {
					box.ended, box.end = true, status.Error(codes.Unavailable, "the reconciler shuts down; dial again")
				})
			}
		}
		<-ended
	}
}
