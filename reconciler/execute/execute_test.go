package execute_test

import (
	"context"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"testing"
	"time"

	"go.uber.org/goleak"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/waymark-routes/waymark/cloudplugin"
	"github.com/waymark-routes/waymark/internal/endpoint"
	"github.com/waymark-routes/waymark/internal/rpc"
	routesv1 "github.com/waymark-routes/waymark/proto/waymark/routes/v1"
	"github.com/waymark-routes/waymark/reconciler/engine"
	"github.com/waymark-routes/waymark/reconciler/execute"
	"github.com/waymark-routes/waymark/reconciler/plan"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// rude is a plugin server whose behaviour the test sets.
type rude struct {
	routesv1.UnimplementedRoutesServiceServer
	create func(ctx context.Context) error
	list   func(stream grpc.ServerStreamingServer[routesv1.ListRoutesResponse]) error
}

func (r *rude) CreateRoute(ctx context.Context, _ *routesv1.CreateRouteRequest) (*routesv1.CreateRouteResponse, error) {
	return &routesv1.CreateRouteResponse{}, r.create(ctx)
}

func (r *rude) ListRoutes(_ *routesv1.ListRoutesRequest, stream grpc.ServerStreamingServer[routesv1.ListRoutesResponse]) error {
	return r.list(stream)
}

type rig struct {
	server   *grpc.Server
	executor *execute.Executor
	results  chan engine.Input
}

func start(t *testing.T, plugin *rude, o execute.Options) *rig {
	t.Helper()
	dir, err := os.MkdirTemp("", "wm")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	at := endpoint.Endpoint{Network: "unix", Address: filepath.Join(dir, "p.sock")}
	listener, err := endpoint.Listen(t.Context(), at, endpoint.ListenOptions{})
	if err != nil {
		t.Fatal(err)
	}
	r := &rig{server: grpc.NewServer(), results: make(chan engine.Input, 10)}
	routesv1.RegisterRoutesServiceServer(r.server, plugin)
	served := make(chan struct{})
	go func() { _ = r.server.Serve(listener); close(served) }()
	client, err := cloudplugin.Dial(at.String(), cloudplugin.DialOptions{Extra: rpc.ClientOptions(rpc.ClientChain{})})
	if err != nil {
		t.Fatal(err)
	}
	r.executor = execute.New(client.Routes, o, func(in engine.Input) { r.results <- in })
	t.Cleanup(func() {
		r.executor.Close()
		_ = client.Close()
		r.server.Stop()
		<-served
	})
	return r
}

func (r *rig) create(id uint64) {
	n := plan.NewNode(plan.Node{Name: "a", UID: "u"})
	r.executor.StartCall(engine.StartCall{
		ID: id, Op: plan.Op{Kind: plan.OpCreate, Destination: netip.MustParsePrefix("10.244.1.0/24"), Node: n}, Cluster: engine.Cluster{Name: "c"},
	})
}

func (r *rig) result(t *testing.T) engine.Input {
	t.Helper()
	select {
	case in := <-r.results:
		return in
	case <-time.After(15 * time.Second):
		t.Fatal("no result within 15 s")
		return nil
	}
}

// TestWhoseErrorItIs provokes grpc-go's own errors and the same codes from a
// plugin: the engine treats them differently, and gRPC has no field for it.
func TestWhoseErrorItIs(t *testing.T) {
	block := func(ctx context.Context) error { <-ctx.Done(); return ctx.Err() }
	tests := []struct {
		name           string
		plugin         *rude
		play           func(r *rig)
		code           engine.Code
		local, notSent bool
	}{
		{"the plugin says UNAVAILABLE", &rude{create: func(context.Context) error { return status.Error(codes.Unavailable, "cloud down") }}, nil, engine.CodeUnavailable, false, false},
		{"the plugin says DEADLINE_EXCEEDED", &rude{create: func(context.Context) error { return status.Error(codes.DeadlineExceeded, "cloud slow") }}, nil, engine.CodeDeadlineExceeded, false, false},
		{"the plugin says RESOURCE_EXHAUSTED", &rude{create: func(context.Context) error { return status.Error(codes.ResourceExhausted, "slow down") }}, nil, engine.CodeResourceExhausted, false, false},
		{"our deadline runs out", &rude{create: block}, nil, engine.CodeDeadlineExceeded, true, false},
		{"we cancel", &rude{create: block}, func(r *rig) { r.executor.Cancel(1) }, engine.CodeCancelled, true, false},
		{"the plugin dies in the call", &rude{create: block}, func(r *rig) { r.server.Stop() }, engine.CodeUnavailable, true, false},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			entered := make(chan struct{})
			inner := test.plugin.create
			r := start(t, &rude{create: func(ctx context.Context) error { close(entered); return inner(ctx) }}, execute.Options{WriteTimeout: 500 * time.Millisecond})
			r.create(1)
			<-entered
			if test.play != nil {
				test.play(r)
			}
			ended := r.result(t).(engine.CallEnded)
			if f := ended.Err; f == nil || f.Code != test.code || f.Local != test.local || f.NotSent != test.notSent {
				t.Errorf("failure %+v; want code %d, local %t, not sent %t", f, test.code, test.local, test.notSent)
			}
		})
	}
	t.Run("nobody listens", func(t *testing.T) {
		r := start(t, &rude{}, execute.Options{})
		r.server.Stop()
		var last *engine.Failure
		// The first ones may still find the dying connection.
		for id, deadline := uint64(1), time.Now().Add(10*time.Second); time.Now().Before(deadline); id++ {
			r.create(id)
			if last = r.result(t).(engine.CallEnded).Err; last != nil && last.NotSent {
				break
			}
		}
		if last == nil || last.Code != engine.CodeUnavailable || !last.Local || !last.NotSent {
			t.Errorf("failure %+v; want UNAVAILABLE that was not sent", last)
		}
	})
}

func TestLists(t *testing.T) {
	send := func(rows, chunks int, end error) func(grpc.ServerStreamingServer[routesv1.ListRoutesResponse]) error {
		return func(stream grpc.ServerStreamingServer[routesv1.ListRoutesResponse]) error {
			for chunk := range chunks {
				message := &routesv1.ListRoutesResponse{}
				if chunk == 0 {
					message.Tables = []string{"t"}
				}
				for i := range rows {
					message.Routes = append(message.Routes, &routesv1.Route{Id: fmt.Sprint(chunk, i), Destination: "10.244.1.0/24"})
				}
				if err := stream.Send(message); err != nil {
					return err
				}
			}
			return end
		}
	}
	hang := func(stream grpc.ServerStreamingServer[routesv1.ListRoutesResponse]) error {
		if err := send(1, 1, nil)(stream); err != nil {
			return err
		}
		<-stream.Context().Done()
		return stream.Context().Err()
	}
	tests := []struct {
		name string
		list func(grpc.ServerStreamingServer[routesv1.ListRoutesResponse]) error
		rows int // -1: the list fails, and no row counts
	}{
		{"several chunks", send(10, 3, nil), 30},
		{"empty", send(0, 1, nil), 0},
		{"no table is named", send(0, 0, nil), -1},
		{"cut off after a chunk (B-59)", send(10, 1, status.Error(codes.Unavailable, "cut")), -1},
		{"stalls after a chunk", hang, -1},
		{"without end", send(10, 1000, nil), -1},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			r := start(t, &rude{list: test.list}, execute.Options{ListTryTimeout: 300 * time.Millisecond, MaxRows: 100})
			r.executor.StartList(engine.StartList{ID: 1, Cluster: engine.Cluster{Name: "c"}})
			ended := r.result(t).(engine.ListEnded)
			switch {
			case test.rows < 0 && (ended.Err == nil || len(ended.Rows) > 0 || len(ended.Tables) > 0):
				t.Errorf("an incomplete list counts: %d rows, %v", len(ended.Rows), ended.Err)
			case test.rows >= 0 && (ended.Err != nil || len(ended.Rows) != test.rows):
				t.Errorf("%d rows, %v; want %d", len(ended.Rows), ended.Err, test.rows)
			}
		})
	}
}

func TestFailureReadsDetails(t *testing.T) {
	if f := execute.Failure(cloudplugin.Throttled(30*time.Second, "slow")); !f.HasRetry || f.RetryAfter != 30*time.Second || f.Name != "RESOURCE_EXHAUSTED" {
		t.Errorf("throttled: %+v", f)
	}
	if f := execute.Failure(cloudplugin.QuotaExceeded("t", "full")); !f.Quota {
		t.Errorf("quota: %+v", f)
	}
	if f := execute.Failure(cloudplugin.Conflict("10.244.1.0/24", "gw", "taken")); f.Holder != "gw" {
		t.Errorf("conflict: %+v", f)
	}
}
