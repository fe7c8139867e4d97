package session_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/netip"
	"strings"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"
	"google.golang.org/grpc/test/bufconn"

	nodesv1 "github.com/waymark-routes/waymark/proto/waymark/nodes/v1"
	"github.com/waymark-routes/waymark/watcher/condition"
	"github.com/waymark-routes/waymark/watcher/lease"
	"github.com/waymark-routes/waymark/watcher/session"
	"github.com/waymark-routes/waymark/watcher/source"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// scripted is a source that the test drives.
type scripted struct {
	runs   chan run
	census source.Census
}

type run struct {
	sink   source.Sink
	labels []string
}

func (s *scripted) Run(ctx context.Context, labels []string, sink source.Sink) error {
	s.runs <- run{sink, labels}
	<-ctx.Done()
	return ctx.Err()
}

func (s *scripted) Census(context.Context, []string) (source.Census, error) { return s.census, nil }
func (s *scripted) Problem() error                                          { return nil }

// reconciler is a fake that hands its streams to the test.
type reconciler struct {
	nodesv1.UnimplementedNodeSessionServiceServer
	streams chan *served
}

type served struct {
	stream grpc.BidiStreamingServer[nodesv1.SessionRequest, nodesv1.SessionResponse]
	end    chan error
}

func (r *reconciler) Session(stream grpc.BidiStreamingServer[nodesv1.SessionRequest, nodesv1.SessionResponse]) error {
	s := &served{stream: stream, end: make(chan error, 1)}
	r.streams <- s
	select {
	case err := <-s.end:
		return err
	case <-stream.Context().Done():
		return nil
	}
}

type rig struct {
	t      *testing.T
	source *scripted
	fake   *reconciler
	client *session.Client
	stop   func()
}

func start(t *testing.T) *rig {
	t.Helper()
	r := &rig{t: t, source: &scripted{runs: make(chan run, 10)}, fake: &reconciler{streams: make(chan *served, 10)}}
	server := grpc.NewServer()
	nodesv1.RegisterNodeSessionServiceServer(server, r.fake)
	listener := bufconn.Listen(1 << 16)
	var wg sync.WaitGroup
	wg.Go(func() { _ = server.Serve(listener) })
	conn, err := grpc.NewClient("passthrough:///fake", grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithContextDialer(func(ctx context.Context, _ string) (net.Conn, error) { return listener.DialContext(ctx) }))
	if err != nil {
		t.Fatal(err)
	}
	r.client = session.New(session.Options{
		Conn: conn, Source: r.source, Keeper: condition.None{}, ClusterUID: "uid", ClusterName: "c1", Holder: "me",
		ClusterCIDRs: []netip.Prefix{netip.MustParsePrefix("10.244.0.0/16")}, Logger: slog.New(slog.DiscardHandler),
		Remaining: func() (time.Duration, bool) { return 7 * time.Second, false },
	})
	ctx, cancel := context.WithCancel(t.Context())
	wg.Go(func() { r.client.Run(ctx, lease.Token{LeaseUID: "l", Transitions: 3}) })
	var once sync.Once
	r.stop = func() {
		once.Do(func() {
			cancel()
			_ = server // stopped below, after the client has ended
		})
	}
	t.Cleanup(func() {
		r.stop()
		for {
			select {
			case s := <-r.fake.streams:
				s.end <- nil
				continue
			default:
			}
			break
		}
		server.Stop()
		_ = conn.Close()
		wg.Wait()
	})
	return r
}

// accept takes the next session and accepts it.
func (r *rig) accept(labels ...string) (*served, *nodesv1.SessionStart) {
	r.t.Helper()
	select {
	case s := <-r.fake.streams:
		start := s.recv(r.t).GetStart()
		if start == nil {
			r.t.Fatal("the first message is not SessionStart")
		}
		s.send(&nodesv1.SessionResponse{Message: &nodesv1.SessionResponse_Accepted{Accepted: &nodesv1.SessionAccepted{SessionId: "s", NodeLabelKeys: labels}}})
		return s, start
	case <-time.After(10 * time.Second):
		r.t.Fatal("no session within 10 s")
		return nil, nil
	}
}

func (r *rig) run() run {
	r.t.Helper()
	select {
	case run := <-r.source.runs:
		return run
	case <-time.After(10 * time.Second):
		r.t.Fatal("the source is not started within 10 s")
		return run{}
	}
}

func (s *served) recv(t *testing.T) *nodesv1.SessionRequest {
	t.Helper()
	message, err := s.stream.Recv()
	if err != nil {
		t.Fatalf("receive: %v", err)
	}
	return message
}

func (s *served) send(m *nodesv1.SessionResponse) { _ = s.stream.Send(m) }

// line shows a message in short.
func line(m *nodesv1.SessionRequest) string {
	switch m := m.GetMessage().(type) {
	case *nodesv1.SessionRequest_SnapshotBegin:
		return "begin"
	case *nodesv1.SessionRequest_SnapshotComplete:
		return fmt.Sprintf("complete %d rv %s seq %d", m.SnapshotComplete.GetNodeCount(), m.SnapshotComplete.GetResourceVersion(), m.SnapshotComplete.GetSequence())
	case *nodesv1.SessionRequest_NodeEvent:
		e := m.NodeEvent
		return fmt.Sprintf("%d %s %s %v", e.GetSequence(), strings.ToLower(strings.TrimPrefix(e.GetType().String(), "NODE_EVENT_TYPE_")), e.GetNode().GetName(), e.GetChangedFields())
	case *nodesv1.SessionRequest_WriteLease:
		return fmt.Sprintf("lease %d %v", m.WriteLease.GetRequestId(), m.WriteLease.GetRemaining().AsDuration())
	case *nodesv1.SessionRequest_Absence:
		return fmt.Sprintf("absence %d of %d", m.Absence.GetRequestId(), m.Absence.GetTotalNodes())
	case *nodesv1.SessionRequest_End:
		return "end " + m.End.GetReason()
	default:
		return fmt.Sprintf("%T", m)
	}
}

func (s *served) expect(t *testing.T, want ...string) {
	t.Helper()
	for _, each := range want {
		if got := line(s.recv(t)); got != each {
			t.Fatalf("got %q, want %q", got, each)
		}
	}
}

func TestSnapshotThenChanges(t *testing.T) {
	r := start(t)
	s, begun := r.accept("zone")
	if begun.GetClusterUid() != "uid" || begun.GetClusterName() != "c1" || begun.GetHolderIdentity() != "me" || begun.GetFencingToken().GetLeaseTransitions() != 3 || begun.GetClusterCidrs()[0] != "10.244.0.0/16" {
		t.Errorf("SessionStart: %v", begun)
	}
	source1 := r.run()
	if strings.Join(source1.labels, ",") != "zone" {
		t.Errorf("labels %v", source1.labels)
	}
	source1.sink.Replace([]source.Node{{Name: "a"}, {Name: "b"}}, "42")
	s.expect(t, "begin", "1 snapshot a []", "2 snapshot b []", "complete 2 rv 42 seq 2")
	source1.sink.Added(source.Node{Name: "c"})
	s.expect(t, "3 added c []")
	source1.sink.Updated(source.Node{Name: "c"}, source.FieldAddresses|source.FieldUID)
	s.expect(t, "4 updated c [NODE_FIELD_ADDRESSES NODE_FIELD_UID]")
	source1.sink.Updated(source.Node{Name: "c"}, 0) // only its condition changed
	source1.sink.Deleted("a")
	s.expect(t, "5 deleted a []")
	s.send(&nodesv1.SessionResponse{Message: &nodesv1.SessionResponse_WriteLeaseRequest{WriteLeaseRequest: &nodesv1.WriteLeaseRequest{Id: 9}}})
	s.expect(t, "lease 9 7s")
	if reason := r.client.Reason(); reason != "" {
		t.Errorf("reason %q while the session stands", reason)
	}
}

func TestS2B49EveryReconnectBeginsWithAFreshSnapshot(t *testing.T) {
	r := start(t)
	s, _ := r.accept()
	r.run().sink.Replace([]source.Node{{Name: "a"}, {Name: "b"}}, "")
	s.expect(t, "begin", "1 snapshot a []", "2 snapshot b []", "complete 2 rv  seq 2")
	s.end <- status.Error(codes.Unavailable, "restart")
	s, _ = r.accept()
	r.run().sink.Replace([]source.Node{{Name: "a"}}, "")
	s.expect(t, "begin", "1 snapshot a []", "complete 1 rv  seq 1")
}

func TestSnapshotRequestListsAnew(t *testing.T) {
	r := start(t)
	s, _ := r.accept()
	r.run().sink.Replace([]source.Node{{Name: "a"}}, "1")
	s.expect(t, "begin", "1 snapshot a []", "complete 1 rv 1 seq 1")
	s.send(&nodesv1.SessionResponse{Message: &nodesv1.SessionResponse_SnapshotRequest{SnapshotRequest: &nodesv1.SnapshotRequest{Reason: "old"}}})
	r.run().sink.Replace([]source.Node{{Name: "a"}}, "2")
	s.expect(t, "begin", "2 snapshot a []", "complete 1 rv 2 seq 2")
}

func TestAbsenceIsReadAfreshAndAWrongPictureIsListedAnew(t *testing.T) {
	r := start(t)
	r.source.census = source.Census{Total: 3, Nodes: []source.Presence{{Name: "a", Present: true}}}
	s, _ := r.accept()
	r.run().sink.Replace(nil, "1")
	s.expect(t, "begin", "complete 0 rv 1 seq 0")
	s.send(&nodesv1.SessionResponse{Message: &nodesv1.SessionResponse_AbsenceRequest{AbsenceRequest: &nodesv1.AbsenceRequest{Id: 4, Names: []string{"a"}}}})
	s.expect(t, "absence 4 of 3")
	r.run() // the source is started anew
}

func TestEndOfLeadershipEndsTheSessionInGoodOrder(t *testing.T) {
	r := start(t)
	s, _ := r.accept()
	r.run().sink.Replace(nil, "")
	s.expect(t, "begin", "complete 0 rv  seq 0")
	r.stop()
	s.expect(t, "end shutting down")
	if _, err := s.stream.Recv(); !errors.Is(err, io.EOF) {
		t.Errorf("after the end: %v", err)
	}
	s.end <- nil
}

func TestARefusedSessionShowsInTheReason(t *testing.T) {
	r := start(t)
	s := <-r.fake.streams
	s.recv(t)
	s.end <- status.Error(codes.FailedPrecondition, "another cluster")
	deadline := time.Now().Add(10 * time.Second)
	for !strings.Contains(r.client.Reason(), "another cluster") {
		if time.Now().After(deadline) {
			t.Fatalf("the reason is %q", r.client.Reason())
		}
	}
	select {
	case <-r.fake.streams:
		t.Error("a refused session is tried again at once")
	default:
	}
}
