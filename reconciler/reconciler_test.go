package reconciler_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"go.uber.org/goleak"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	healthpb "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/waymark-routes/waymark/cloudplugin"
	"github.com/waymark-routes/waymark/cloudplugin/memory"
	"github.com/waymark-routes/waymark/internal/endpoint"
	nodesv1 "github.com/waymark-routes/waymark/proto/waymark/nodes/v1"
	statusv1 "github.com/waymark-routes/waymark/proto/waymark/status/v1"
	"github.com/waymark-routes/waymark/reconciler"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// rig is a reconciler with a memory plugin, over real sockets.
type rig struct {
	t        *testing.T
	dir      string
	plugin   *memory.Plugin
	conn     *grpc.ClientConn
	status   statusv1.StatusServiceClient
	registry *prometheus.Registry
	stop     func()
}

func (r *rig) socket(name string) string { return "unix://" + filepath.Join(r.dir, name+".sock") }

func start(t *testing.T, o reconciler.Options) *rig {
	t.Helper()
	dir, err := os.MkdirTemp("", "wm")
	if err != nil {
		t.Fatal(err)
	}
	plugin, err := memory.New(memory.Options{})
	if err != nil {
		t.Fatal(err)
	}
	r := &rig{t: t, dir: dir, plugin: plugin, registry: prometheus.NewRegistry()}
	ctx, cancel := context.WithCancel(t.Context())
	var wg sync.WaitGroup
	wg.Go(func() {
		if err := cloudplugin.Serve(ctx, plugin, cloudplugin.ServeOptions{Listen: r.socket("plugin")}); err != nil {
			t.Error(err)
		}
	})
	ready := make(chan struct{})
	o.Listen, o.StatusListen, o.PluginEndpoint, o.Registry = r.socket("reconciler"), r.socket("status"), r.socket("plugin"), r.registry
	o.Ready = func() { close(ready) }
	wg.Go(func() {
		if err := reconciler.Run(ctx, o); err != nil {
			t.Error(err)
		}
	})
	select {
	case <-ready:
	case <-time.After(10 * time.Second):
		t.Fatal("the reconciler does not start")
	}
	r.conn = r.dial("reconciler")
	r.status = statusv1.NewStatusServiceClient(r.dial("status"))
	var once sync.Once
	r.stop = func() { once.Do(func() { cancel(); wg.Wait() }) }
	t.Cleanup(func() {
		r.stop()
		_ = os.RemoveAll(dir)
	})
	r.eventually("the plugin is healthy", func() error { return r.health(reconciler.HealthPlugin, healthpb.HealthCheckResponse_SERVING) })
	return r
}

func (r *rig) dial(name string) *grpc.ClientConn {
	r.t.Helper()
	at, err := endpoint.Parse(r.socket(name))
	if err != nil {
		r.t.Fatal(err)
	}
	conn, err := endpoint.Dial(at, endpoint.DialOptions{})
	if err != nil {
		r.t.Fatal(err)
	}
	r.t.Cleanup(func() { _ = conn.Close() })
	return conn
}

func (r *rig) health(service string, want healthpb.HealthCheckResponse_ServingStatus) error {
	answer, err := healthpb.NewHealthClient(r.conn).Check(r.t.Context(), &healthpb.HealthCheckRequest{Service: service})
	if err == nil && answer.GetStatus() != want {
		err = fmt.Errorf("%s is %v", service, answer.GetStatus())
	}
	return err
}

func (r *rig) eventually(what string, check func() error) {
	r.t.Helper()
	ticker := time.NewTicker(5 * time.Millisecond)
	defer ticker.Stop()
	err := check()
	for deadline := time.Now().Add(15 * time.Second); err != nil; err = check() {
		if time.Now().After(deadline) {
			r.t.Fatalf("%s: %v", what, err)
		}
		<-ticker.C
	}
}

func (r *rig) table() string {
	r.t.Helper()
	list, err := r.plugin.ListRoutes(r.t.Context(), cloudplugin.Cluster{Name: "c1"})
	if err != nil {
		r.t.Fatal(err)
	}
	var rows []string
	for _, row := range list.Routes {
		rows = append(rows, row.Destination+" "+row.Target.Value)
	}
	slices.Sort(rows) // creates run in parallel
	return strings.Join(rows, ", ")
}

func (r *rig) expectTable(want string) {
	r.t.Helper()
	r.eventually("the table is "+want, func() error {
		if got := r.table(); got != want {
			return errors.New("it is " + got)
		}
		return nil
	})
}

// watcher is one session, held by the test.
type watcher struct {
	r      *rig
	stream grpc.BidiStreamingClient[nodesv1.SessionRequest, nodesv1.SessionResponse]
	seq    uint64
	mu     sync.Mutex
	got    map[string]*nodesv1.NodeVerdict
	ended  chan error
	lease  func() *nodesv1.WriteLease
}

type sessionStart struct {
	cluster, holder string
	transitions     int64
}

func (r *rig) open(s sessionStart) *watcher {
	r.t.Helper()
	stream, err := nodesv1.NewNodeSessionServiceClient(r.conn).Session(r.t.Context())
	if err != nil {
		r.t.Fatal(err)
	}
	w := &watcher{r: r, stream: stream, got: map[string]*nodesv1.NodeVerdict{}, ended: make(chan error, 1)}
	w.lease = func() *nodesv1.WriteLease { return &nodesv1.WriteLease{Unlimited: true} }
	if s.cluster == "" {
		s.cluster = "uid-1"
	}
	if s.holder == "" {
		s.holder = "one"
	}
	w.send(&nodesv1.SessionRequest{Message: &nodesv1.SessionRequest_Start{Start: &nodesv1.SessionStart{
		ClusterUid: s.cluster, ClusterName: "c1", ClusterCidrs: []string{"10.244.0.0/16"}, HolderIdentity: s.holder,
		FencingToken: &nodesv1.FencingToken{LeaseCreated: timestamppb.New(time.Unix(1, 0)), LeaseUid: "l", LeaseTransitions: s.transitions},
	}}})
	return w
}

// serve answers the reconciler's requests until the stream ends.
func (w *watcher) serve() *watcher {
	go func() {
		for {
			message, err := w.stream.Recv()
			if err != nil {
				w.ended <- err
				return
			}
			switch m := message.GetMessage().(type) {
			case *nodesv1.SessionResponse_NodeVerdict:
				w.mu.Lock()
				w.got[m.NodeVerdict.GetNode()] = m.NodeVerdict
				w.mu.Unlock()
			case *nodesv1.SessionResponse_WriteLeaseRequest:
				answer := w.lease()
				answer.RequestId = m.WriteLeaseRequest.GetId()
				w.send(&nodesv1.SessionRequest{Message: &nodesv1.SessionRequest_WriteLease{WriteLease: answer}})
			}
		}
	}()
	return w
}

func (w *watcher) send(m *nodesv1.SessionRequest) { _ = w.stream.Send(m) }

func node(name, cidr string) *nodesv1.Node {
	return &nodesv1.Node{Name: name, Uid: "uid-" + name, PodCidrs: []string{cidr}}
}

func (w *watcher) event(kind nodesv1.NodeEventType, n *nodesv1.Node) {
	w.seq++
	w.send(&nodesv1.SessionRequest{Message: &nodesv1.SessionRequest_NodeEvent{NodeEvent: &nodesv1.NodeEvent{Type: kind, Node: n, Sequence: w.seq, Age: durationpb.New(0)}}})
}

func (w *watcher) begin() {
	w.send(&nodesv1.SessionRequest{Message: &nodesv1.SessionRequest_SnapshotBegin{SnapshotBegin: &nodesv1.SnapshotBegin{}}})
}

func (w *watcher) complete(count int) {
	w.send(&nodesv1.SessionRequest{Message: &nodesv1.SessionRequest_SnapshotComplete{SnapshotComplete: &nodesv1.SnapshotComplete{NodeCount: int64(count)}}})
}

func (w *watcher) snapshot(nodes ...*nodesv1.Node) {
	w.begin()
	for _, n := range nodes {
		w.event(nodesv1.NodeEventType_NODE_EVENT_TYPE_SNAPSHOT, n)
	}
	w.complete(len(nodes))
}

func (w *watcher) verdict(name string, want nodesv1.NodeAvailability) {
	w.r.t.Helper()
	w.r.eventually("verdict of "+name, func() error {
		w.mu.Lock()
		defer w.mu.Unlock()
		if got := w.got[name].GetAvailability(); got != want {
			return fmt.Errorf("it is %v", got)
		}
		return nil
	})
}

func (w *watcher) end(want codes.Code) {
	w.r.t.Helper()
	select {
	case err := <-w.ended:
		if errors.Is(err, io.EOF) {
			err = nil
		}
		if status.Code(err) != want {
			w.r.t.Errorf("the session ends with %v, want %v", err, want)
		}
	case <-time.After(15 * time.Second):
		w.r.t.Fatalf("the session does not end (want %v)", want)
	}
}

const available = nodesv1.NodeAvailability_NODE_AVAILABILITY_AVAILABLE

func TestMainJob(t *testing.T) {
	r := start(t, reconciler.Options{})
	w := r.open(sessionStart{}).serve()
	w.snapshot(node("a", "10.244.1.0/24"))
	w.verdict("a", available)
	w.event(nodesv1.NodeEventType_NODE_EVENT_TYPE_ADDED, node("b", "10.244.2.0/24"))
	w.verdict("b", available)
	r.expectTable("10.244.1.0/24 a, 10.244.2.0/24 b")
	if err := r.health(reconciler.HealthCluster, healthpb.HealthCheckResponse_SERVING); err != nil {
		t.Error(err)
	}
	overview, err := r.status.GetOverview(t.Context(), &statusv1.GetOverviewRequest{})
	if err != nil || overview.GetOverview().GetCounts().GetInPlace() != 2 || overview.GetOverview().GetSession().GetClusterName() != "c1" {
		t.Errorf("overview %v, %v", overview, err)
	}
	w.event(nodesv1.NodeEventType_NODE_EVENT_TYPE_DELETED, &nodesv1.Node{Name: "a"})
	r.expectTable("10.244.2.0/24 b")
}

func TestS1B47NothingBeforeTheSnapshotIsComplete(t *testing.T) {
	r := start(t, reconciler.Options{})
	first := r.open(sessionStart{}).serve()
	first.snapshot(node("a", "10.244.1.0/24"), node("b", "10.244.2.0/24"))
	r.expectTable("10.244.1.0/24 a, 10.244.2.0/24 b")
	_ = first.stream.CloseSend()
	first.end(codes.OK)

	second := r.open(sessionStart{}).serve()
	second.begin()
	second.event(nodesv1.NodeEventType_NODE_EVENT_TYPE_SNAPSHOT, node("a", "10.244.1.0/24"))
	second.event(nodesv1.NodeEventType_NODE_EVENT_TYPE_SNAPSHOT, node("c", "10.244.3.0/24"))
	// A full answer round trip proves that the events have arrived.
	r.eventually("the new session stands", func() error {
		overview, err := r.status.GetOverview(t.Context(), &statusv1.GetOverviewRequest{})
		if err == nil && overview.GetOverview().GetNotReadyReason() != "the first snapshot is not complete" {
			err = errors.New(overview.GetOverview().GetNotReadyReason())
		}
		return err
	})
	if err := r.health(reconciler.HealthCluster, healthpb.HealthCheckResponse_NOT_SERVING); err != nil {
		t.Error(err)
	}
	if got := r.table(); got != "10.244.1.0/24 a, 10.244.2.0/24 b" {
		t.Errorf("the table changed before the snapshot was complete: %s", got)
	}
	second.complete(2)
	// B-49: b was deleted while the stream was down.
	r.expectTable("10.244.1.0/24 a, 10.244.3.0/24 c")
}

func TestS4FencingTokens(t *testing.T) {
	r := start(t, reconciler.Options{})
	one := r.open(sessionStart{holder: "one", transitions: 5}).serve()
	one.snapshot(node("a", "10.244.1.0/24"))
	one.verdict("a", available)

	r.open(sessionStart{holder: "old", transitions: 4}).serve().end(codes.FailedPrecondition)
	r.open(sessionStart{holder: "other", transitions: 5}).serve().end(codes.FailedPrecondition)

	again := r.open(sessionStart{holder: "one", transitions: 5}).serve()
	one.end(codes.Aborted)
	again.snapshot(node("a", "10.244.1.0/24"))
	again.verdict("a", available)

	two := r.open(sessionStart{holder: "two", transitions: 6}).serve()
	again.end(codes.Aborted)
	two.snapshot(node("a", "10.244.1.0/24"))
	two.verdict("a", available)
}

func TestS5NoWriteWithoutAWriteLease(t *testing.T) {
	r := start(t, reconciler.Options{})
	w := r.open(sessionStart{})
	granted := make(chan struct{})
	w.lease = func() *nodesv1.WriteLease {
		select {
		case <-granted:
			return &nodesv1.WriteLease{Remaining: durationpb.New(10 * time.Second)}
		default:
			return &nodesv1.WriteLease{Remaining: durationpb.New(-time.Second)}
		}
	}
	w.serve()
	w.snapshot(node("a", "10.244.1.0/24"))
	r.eventually("the list is there", func() error { return r.health(reconciler.HealthCluster, healthpb.HealthCheckResponse_SERVING) })
	if got := r.table(); got != "" {
		t.Errorf("written without a lease: %s", got)
	}
	close(granted)
	r.expectTable("10.244.1.0/24 a")
}

func TestS8AnotherClusterIsRefused(t *testing.T) {
	r := start(t, reconciler.Options{})
	w := r.open(sessionStart{}).serve()
	w.snapshot()
	r.eventually("ready", func() error { return r.health(reconciler.HealthCluster, healthpb.HealthCheckResponse_SERVING) })
	r.open(sessionStart{cluster: "uid-2", transitions: 9}).serve().end(codes.FailedPrecondition)
}

func TestMessagesOutOfOrderEndTheSession(t *testing.T) {
	tests := map[string]func(w *watcher){
		"event before the snapshot": func(w *watcher) { w.event(nodesv1.NodeEventType_NODE_EVENT_TYPE_ADDED, node("a", "10.244.1.0/24")) },
		"wrong count": func(w *watcher) {
			w.begin()
			w.complete(3)
		},
		"complete without begin": func(w *watcher) { w.complete(0) },
		"change within a snapshot": func(w *watcher) {
			w.begin()
			w.event(nodesv1.NodeEventType_NODE_EVENT_TYPE_DELETED, node("a", ""))
		},
		"no name": func(w *watcher) {
			w.begin()
			w.event(nodesv1.NodeEventType_NODE_EVENT_TYPE_SNAPSHOT, &nodesv1.Node{})
		},
	}
	for name, play := range tests {
		t.Run(name, func(t *testing.T) {
			r := start(t, reconciler.Options{})
			w := r.open(sessionStart{}).serve()
			r.eventually("accepted", func() error {
				overview, err := r.status.GetOverview(t.Context(), &statusv1.GetOverviewRequest{})
				if err == nil && overview.GetOverview().GetSession() == nil {
					err = errors.New("no session")
				}
				return err
			})
			play(w)
			w.end(codes.InvalidArgument)
		})
	}
}

func TestB60StopEndsSessionsWithUnavailable(t *testing.T) {
	r := start(t, reconciler.Options{})
	w := r.open(sessionStart{}).serve()
	w.snapshot(node("a", "10.244.1.0/24"))
	w.verdict("a", available)
	began := time.Now()
	r.stop()
	if took := time.Since(began); took > 5*time.Second {
		t.Errorf("the stop took %v", took)
	}
	w.end(codes.Unavailable)
	if got := r.table(); got != "10.244.1.0/24 a" {
		t.Errorf("the stop changed the table: %s", got)
	}
}

func TestIdleTouchesNothingAndIsReady(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	ended, ready := make(chan error, 1), make(chan struct{})
	go func() { ended <- reconciler.Run(ctx, reconciler.Options{Idle: true, Ready: func() { close(ready) }}) }()
	<-ready
	cancel()
	if err := <-ended; err != nil {
		t.Error(err)
	}
}
