// Package session is the client side of the node session: it dials the
// reconciler, sends a snapshot and then changes, answers its requests, and hands
// its verdicts on. It reconnects for as long as the leadership lasts; every new
// session begins with a fresh snapshot (no resume).
package session

import (
	"context"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"net/netip"
	"slices"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/waymark-routes/waymark/internal/build"
	"github.com/waymark-routes/waymark/internal/elapsed"
	nodesv1 "github.com/waymark-routes/waymark/proto/waymark/nodes/v1"
	"github.com/waymark-routes/waymark/watcher/feed"
	"github.com/waymark-routes/waymark/watcher/lease"
	"github.com/waymark-routes/waymark/watcher/source"
)

const (
	endWait       = 6 * time.Second // the reconciler drains for 5 s
	censusPeriod  = 5 * time.Second
	backoffLeast  = 50 * time.Millisecond
	backoffMost   = 2 * time.Second
	refusedPeriod = 30 * time.Second
)

// Keeper takes verdicts and what the source says of conditions.
type Keeper interface {
	// Verdict takes one verdict.
	Verdict(v *nodesv1.NodeVerdict)
	// Observe tells of a node's UID and condition; Forget of its end.
	Observe(n source.Node)
	Forget(name string)
	// Silence makes the keeper write nothing (a dry run).
	Silence()
}

// Options tune a Client.
type Options struct {
	Conn   grpc.ClientConnInterface
	Source source.Source
	Keeper Keeper
	// Cluster as SessionStart carries it.
	ClusterUID, ClusterName string
	ClusterCIDRs            []netip.Prefix
	Holder                  string
	NodeSelector            string
	// Remaining answers write lease requests.
	Remaining func() (time.Duration, bool)
	Logger    *slog.Logger
	// Connected is told when a session begins and ends; Sent counts events by type.
	Connected func(bool)
	Sent      func(kind string)
}

// Client holds sessions, one after the other.
type Client struct {
	options Options

	mu     sync.Mutex // guards reason
	reason string
}

// New makes a client.
func New(o Options) *Client { return &Client{options: o, reason: "no session with the reconciler yet"} }

// Reason says why there is no session; empty when there is one.
func (c *Client) Reason() string {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.reason
}

func (c *Client) setReason(reason string) {
	c.mu.Lock()
	c.reason = reason
	c.mu.Unlock()
	if c.options.Connected != nil {
		c.options.Connected(reason == "")
	}
}

// Run holds sessions until ctx ends; the last one is ended in good order.
func (c *Client) Run(ctx context.Context, token lease.Token) {
	wait := backoffLeast
	for ctx.Err() == nil {
		began := time.Now()
		err := c.session(ctx, token)
		if ctx.Err() != nil {
			c.setReason("not leading")
			return
		}
		if time.Since(began) > backoffMost {
			wait = backoffLeast
		}
		pause := wait/2 + rand.N(wait/2)
		wait = min(2*wait, backoffMost)
		level := slog.LevelInfo
		if status.Code(err) == codes.FailedPrecondition { // S4, S8: it will not get better soon
			pause, level = refusedPeriod, slog.LevelError
		}
		c.setReason(fmt.Sprintf("no session with the reconciler: %v", err))
		c.options.Logger.Log(ctx, level, "session broke; a new one follows", slog.Any("err", err), slog.Duration("in", pause))
		elapsed.Sleep(ctx, pause)
	}
}

// active is one session.
type active struct {
	options  Options
	stream   grpc.BidiStreamingClient[nodesv1.SessionRequest, nodesv1.SessionResponse]
	feed     *feed.Feed
	answers  chan *nodesv1.SessionRequest
	absence  chan *nodesv1.AbsenceRequest
	relist   chan string
	sequence uint64
}

func (c *Client) session(ctx context.Context, token lease.Token) error {
	o := c.options
	// The stream outlives ctx a little, for a good end.
	streaming, cut := context.WithCancel(context.WithoutCancel(ctx))
	defer cut()
	stopOpening := context.AfterFunc(ctx, cut)
	stream, err := nodesv1.NewNodeSessionServiceClient(o.Conn).Session(streaming)
	if err != nil {
		return err
	}
	start := &nodesv1.SessionStart{
		ClusterUid: o.ClusterUID, ClusterName: o.ClusterName, HolderIdentity: o.Holder, NodeSelector: o.NodeSelector, WatcherVersion: build.Version(),
		FencingToken: &nodesv1.FencingToken{LeaseUid: token.LeaseUID, LeaseTransitions: token.Transitions},
	}
	if !token.LeaseCreated.IsZero() {
		start.FencingToken.LeaseCreated = timestamppb.New(token.LeaseCreated)
	}
	for _, cidr := range o.ClusterCIDRs {
		start.ClusterCidrs = append(start.ClusterCidrs, cidr.String())
	}
	if err := stream.Send(&nodesv1.SessionRequest{Message: &nodesv1.SessionRequest_Start{Start: start}}); err != nil {
		_, err = stream.Recv() // the real reason
		return err
	}
	first, err := stream.Recv()
	if err != nil {
		return err
	}
	accepted := first.GetAccepted()
	if accepted == nil {
		return status.Error(codes.Internal, "the reconciler's first message is not SessionAccepted")
	}
	if !stopOpening() {
		return ctx.Err()
	}
	c.setReason("")
	o.Logger.InfoContext(ctx, "session accepted", slog.String("session", accepted.GetSessionId()), slog.String("reconciler", accepted.GetReconcilerVersion()))
	if accepted.GetDryRun() {
		o.Keeper.Silence()
	}

	a := &active{
		options: o, stream: stream, feed: feed.New(),
		answers: make(chan *nodesv1.SessionRequest, 64), absence: make(chan *nodesv1.AbsenceRequest, 16), relist: make(chan string, 1),
	}
	working, stopWork := context.WithCancel(ctx)
	var wg sync.WaitGroup
	failed := make(chan struct{})
	wg.Go(func() { a.runSource(working, accepted.GetNodeLabelKeys()) })
	wg.Go(func() { a.runCensus(working) })
	sent := make(chan struct{})
	wg.Go(func() {
		defer close(sent)
		if err := a.send(working); err != nil && working.Err() == nil {
			close(failed)
		}
	})
	received := make(chan error, 1)
	wg.Go(func() { received <- a.receive() })

	select {
	case err = <-received:
		stopWork()
	case <-failed:
		err = <-received // the stream's status is the real reason
		stopWork()
	case <-ctx.Done():
		stopWork()
		<-sent
		err = ctx.Err()
		a.end(received)
	}
	cut()
	wg.Wait()
	return err
}

// end ends the session in good order: the reconciler stops writing first.
func (a *active) end(received <-chan error) {
	message := &nodesv1.SessionRequest{Message: &nodesv1.SessionRequest_End{End: &nodesv1.SessionEnd{Reason: "shutting down"}}}
	if a.stream.Send(message) != nil || a.stream.CloseSend() != nil {
		return
	}
	timer := time.NewTimer(endWait)
	defer timer.Stop()
	select {
	case err := <-received:
		a.options.Logger.Debug("session ended in good order", slog.Any("err", err))
	case <-timer.C:
	}
}

// runSource runs the source, and anew when a new snapshot is asked for.
func (a *active) runSource(ctx context.Context, labelKeys []string) {
	for ctx.Err() == nil {
		running, stop := context.WithCancel(ctx)
		ended := make(chan struct{})
		go func() {
			defer close(ended)
			if err := a.options.Source.Run(running, labelKeys, &sink{feed: a.feed, keeper: a.options.Keeper}); err != nil && running.Err() == nil {
				a.options.Logger.ErrorContext(ctx, "node source failed; it is started again", slog.Any("err", err))
				elapsed.Sleep(running, time.Second)
			}
		}()
		select {
		case reason := <-a.relist:
			a.options.Logger.InfoContext(ctx, "nodes are listed anew", slog.String("reason", reason))
		case <-ended:
		case <-ctx.Done():
		}
		stop()
		<-ended
	}
}

// sink hands what the source sees to the feed and to the keeper.
type sink struct {
	feed   *feed.Feed
	keeper Keeper
}

// Replace implements source.Sink.
func (s *sink) Replace(nodes []source.Node, resourceVersion string) {
	for _, n := range nodes {
		s.keeper.Observe(n)
	}
	s.feed.Replace(nodes, resourceVersion)
}

// Added implements source.Sink.
func (s *sink) Added(n source.Node) {
	s.keeper.Observe(n)
	s.feed.Added(n)
}

// Updated implements source.Sink.
func (s *sink) Updated(n source.Node, fields source.Field) {
	s.keeper.Observe(n)
	s.feed.Updated(n, fields)
}

// Deleted implements source.Sink.
func (s *sink) Deleted(name string) {
	s.keeper.Forget(name)
	s.feed.Deleted(name)
}

// send is the one goroutine that writes to the stream. Answers go before events.
func (a *active) send(ctx context.Context) error {
	for {
		if err := a.sendAnswers(); err != nil {
			return err
		}
		item, ok := a.feed.Take()
		switch {
		case ok && item.Snapshot:
			if err := a.sendSnapshot(ctx, item); err != nil {
				return err
			}
			continue
		case ok:
			if err := a.sendEvent(item.Event); err != nil {
				return err
			}
			continue
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-a.feed.Wake():
		case answer := <-a.answers:
			if err := a.stream.Send(answer); err != nil {
				return err
			}
		}
	}
}

func (a *active) sendAnswers() error {
	for {
		select {
		case answer := <-a.answers:
			if err := a.stream.Send(answer); err != nil {
				return err
			}
		default:
			return nil
		}
	}
}

func (a *active) sendSnapshot(ctx context.Context, item feed.Item) error {
	begin := &nodesv1.SnapshotBegin{ExpectedNodes: int64(len(item.Nodes))}
	if err := a.stream.Send(&nodesv1.SessionRequest{Message: &nodesv1.SessionRequest_SnapshotBegin{SnapshotBegin: begin}}); err != nil {
		return err
	}
	now := time.Now()
	for i := range item.Nodes {
		if i%256 == 0 {
			if err := a.sendAnswers(); err != nil {
				return err
			}
			if ctx.Err() != nil {
				return ctx.Err()
			}
		}
		if err := a.event(nodesv1.NodeEventType_NODE_EVENT_TYPE_SNAPSHOT, "snapshot", feed.Event{Node: item.Nodes[i], Observed: now}); err != nil {
			return err
		}
	}
	complete := &nodesv1.SnapshotComplete{NodeCount: int64(len(item.Nodes)), ResourceVersion: item.ResourceVersion, Sequence: a.sequence}
	return a.stream.Send(&nodesv1.SessionRequest{Message: &nodesv1.SessionRequest_SnapshotComplete{SnapshotComplete: complete}})
}

var kinds = map[feed.Kind]struct {
	kind nodesv1.NodeEventType
	name string
}{
	feed.Added:   {nodesv1.NodeEventType_NODE_EVENT_TYPE_ADDED, "added"},
	feed.Updated: {nodesv1.NodeEventType_NODE_EVENT_TYPE_UPDATED, "updated"},
	feed.Deleted: {nodesv1.NodeEventType_NODE_EVENT_TYPE_DELETED, "deleted"},
}

func (a *active) sendEvent(e feed.Event) error {
	kind := kinds[e.Kind]
	return a.event(kind.kind, kind.name, e)
}

func (a *active) event(kind nodesv1.NodeEventType, name string, e feed.Event) error {
	a.sequence++
	if a.options.Sent != nil {
		a.options.Sent(name)
	}
	return a.stream.Send(&nodesv1.SessionRequest{Message: &nodesv1.SessionRequest_NodeEvent{NodeEvent: &nodesv1.NodeEvent{
		Type: kind, Node: nodeProto(&e.Node), ChangedFields: fieldsProto(e.Fields), Sequence: a.sequence,
		ObservedAt: timestamppb.New(e.Observed), Age: durationpb.New(time.Since(e.Observed)),
	}}})
}

// receive reads the stream until it ends.
func (a *active) receive() error {
	for {
		message, err := a.stream.Recv()
		if err != nil {
			return err
		}
		switch m := message.GetMessage().(type) {
		case *nodesv1.SessionResponse_NodeVerdict:
			a.options.Keeper.Verdict(m.NodeVerdict)
		case *nodesv1.SessionResponse_WriteLeaseRequest:
			answer := &nodesv1.WriteLease{RequestId: m.WriteLeaseRequest.GetId()}
			remaining, unlimited := a.options.Remaining()
			if answer.Unlimited = unlimited; !unlimited {
				answer.Remaining = durationpb.New(remaining)
			}
			a.answer(&nodesv1.SessionRequest{Message: &nodesv1.SessionRequest_WriteLease{WriteLease: answer}})
		case *nodesv1.SessionResponse_AbsenceRequest:
			select {
			case a.absence <- m.AbsenceRequest:
			default: // the reconciler asks again
			}
		case *nodesv1.SessionResponse_SnapshotRequest:
			a.askRelist(m.SnapshotRequest.GetReason())
		}
	}
}

// answer queues an answer; when the sender is stuck, an answer is worth nothing
// by the time it would be read, and is dropped.
func (a *active) answer(message *nodesv1.SessionRequest) {
	select {
	case a.answers <- message:
	default:
	}
}

func (a *active) askRelist(reason string) {
	select {
	case a.relist <- reason:
	default:
	}
}

// runCensus answers absence requests, at most one fresh read per 5 s.
func (a *active) runCensus(ctx context.Context) {
	for {
		select {
		case <-ctx.Done():
			return
		case request := <-a.absence:
			census, err := a.options.Source.Census(ctx, request.GetNames())
			answer := &nodesv1.Absence{RequestId: request.GetId()}
			if err != nil {
				answer.Error = err.Error()
			} else {
				answer.TotalNodes, answer.ResourceVersion = int64(census.Total), census.ResourceVersion
				wrong := false
				for _, n := range census.Nodes {
					answer.Nodes = append(answer.Nodes, &nodesv1.NodePresence{Name: n.Name, Present: n.Present, Uid: n.UID, PodCidrs: n.PodCIDRs})
					wrong = wrong || n.Present
				}
				if wrong {
					// The reconciler holds deletes for nodes that exist: its picture, and so
					// ours, is wrong or old.
					a.askRelist("a fresh read shows nodes whose routes were about to be deleted")
				}
			}
			a.answer(&nodesv1.SessionRequest{Message: &nodesv1.SessionRequest_Absence{Absence: answer}})
			elapsed.Sleep(ctx, censusPeriod)
		}
	}
}

func nodeProto(n *source.Node) *nodesv1.Node {
	out := &nodesv1.Node{
		Name: n.Name, Uid: n.UID, ProviderId: n.ProviderID, PodCidrs: n.PodCIDRs, ResourceVersion: n.ResourceVersion,
		ConflictingPodCidr: n.ConflictingPodCIDR, Labels: n.Labels,
	}
	if !n.Created.IsZero() {
		out.Created = timestamppb.New(n.Created)
	}
	if n.Condition != nil {
		out.NetworkUnavailable = &nodesv1.NetworkUnavailable{Status: n.Condition.Status, Reason: n.Condition.Reason}
	}
	for _, address := range n.Addresses {
		out.Addresses = append(out.Addresses, &nodesv1.NodeAddress{Type: address.Type, Address: address.Address})
	}
	return out
}

var fieldProtos = []struct {
	field source.Field
	proto nodesv1.NodeField
}{
	{source.FieldPodCIDRs, nodesv1.NodeField_NODE_FIELD_POD_CIDRS},
	{source.FieldAddresses, nodesv1.NodeField_NODE_FIELD_ADDRESSES},
	{source.FieldUID, nodesv1.NodeField_NODE_FIELD_UID},
	{source.FieldProviderID, nodesv1.NodeField_NODE_FIELD_PROVIDER_ID},
	{source.FieldLabels, nodesv1.NodeField_NODE_FIELD_LABELS},
}

func fieldsProto(fields source.Field) []nodesv1.NodeField {
	var out []nodesv1.NodeField
	for _, f := range fieldProtos {
		if fields&f.field != 0 {
			out = append(out, f.proto)
		}
	}
	return slices.Clip(out)
}
