package rpc_test

import (
	"bytes"
	"context"
	"log/slog"
	"net"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"
	"go.uber.org/goleak"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"
	"google.golang.org/grpc/test/bufconn"

	"github.com/waymark-routes/waymark/internal/rpc"
	routesv1 "github.com/waymark-routes/waymark/proto/waymark/routes/v1"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// fake is a plugin whose methods misbehave.
type fake struct {
	routesv1.UnimplementedIdentityServiceServer
	routesv1.UnimplementedRoutesServiceServer
	unavailable atomic.Int32 // how many calls fail before one works
	calls       atomic.Int32
	panics      bool
	hold        chan struct{}
}

func (f *fake) answer() error {
	f.calls.Add(1)
	if f.panics {
		panic("secret of the handler")
	}
	if f.unavailable.Add(-1) >= 0 {
		return status.Error(codes.Unavailable, "not now")
	}
	return nil
}

func (f *fake) GetPluginInfo(context.Context, *routesv1.GetPluginInfoRequest) (*routesv1.GetPluginInfoResponse, error) {
	return &routesv1.GetPluginInfoResponse{Name: "fake"}, f.answer()
}

func (f *fake) CreateRoute(context.Context, *routesv1.CreateRouteRequest) (*routesv1.CreateRouteResponse, error) {
	return &routesv1.CreateRouteResponse{}, f.answer()
}

func (f *fake) ListRoutes(_ *routesv1.ListRoutesRequest, stream grpc.ServerStreamingServer[routesv1.ListRoutesResponse]) error {
	if f.panics {
		panic("secret of the handler")
	}
	if err := stream.Send(&routesv1.ListRoutesResponse{}); err != nil {
		return err
	}
	select {
	case <-f.hold:
	case <-stream.Context().Done():
	}
	return nil
}

type rig struct {
	conn     *grpc.ClientConn
	registry *prometheus.Registry
	log      *bytes.Buffer
	server   *grpc.Server
}

func start(t *testing.T, f *fake, o rpc.ServerOptions) *rig {
	t.Helper()
	r := &rig{registry: prometheus.NewRegistry(), log: &bytes.Buffer{}}
	o.Logger, o.Registerer = slog.New(slog.NewTextHandler(r.log, nil)), r.registry
	r.server = rpc.NewServer(o)
	routesv1.RegisterIdentityServiceServer(r.server, f)
	routesv1.RegisterRoutesServiceServer(r.server, f)
	listener := bufconn.Listen(1 << 16)
	served := make(chan struct{})
	go func() { _ = r.server.Serve(listener); close(served) }()
	options := append([]grpc.DialOption{
		grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithContextDialer(func(ctx context.Context, _ string) (net.Conn, error) { return listener.DialContext(ctx) }),
	}, rpc.ClientOptions(rpc.ClientChain{RetryMethods: []string{routesv1.IdentityService_GetPluginInfo_FullMethodName}})...)
	conn, err := grpc.NewClient("passthrough:///fake", options...)
	if err != nil {
		t.Fatal(err)
	}
	r.conn = conn
	t.Cleanup(func() {
		_ = conn.Close()
		r.server.Stop()
		<-served
	})
	return r
}

func TestB62OnlyIdentityIsRetried(t *testing.T) {
	f := &fake{}
	r := start(t, f, rpc.ServerOptions{})
	f.unavailable.Store(2)
	if _, err := routesv1.NewIdentityServiceClient(r.conn).GetPluginInfo(t.Context(), &routesv1.GetPluginInfoRequest{}); err != nil || f.calls.Load() != 3 {
		t.Errorf("GetPluginInfo: %v after %d calls; want success on the third", err, f.calls.Load())
	}
	f.calls.Store(0)
	f.unavailable.Store(1)
	_, err := routesv1.NewRoutesServiceClient(r.conn).CreateRoute(t.Context(), &routesv1.CreateRouteRequest{})
	if status.Code(err) != codes.Unavailable || f.calls.Load() != 1 {
		t.Errorf("CreateRoute: %v after %d calls; want UNAVAILABLE after one", err, f.calls.Load())
	}
}

func TestB63PanicsBecomeInternal(t *testing.T) {
	tests := map[string]struct {
		options rpc.ServerOptions
		fake    *fake
		stream  bool
	}{
		"unary handler":  {fake: &fake{panics: true}},
		"stream handler": {fake: &fake{panics: true}, stream: true},
		"interceptor": {fake: &fake{}, options: rpc.ServerOptions{Extra: []grpc.ServerOption{grpc.ChainUnaryInterceptor(
			func(context.Context, any, *grpc.UnaryServerInfo, grpc.UnaryHandler) (any, error) {
				panic("secret of the interceptor")
			},
		)}}},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			r := start(t, test.fake, test.options)
			client := routesv1.NewRoutesServiceClient(r.conn)
			var err error
			method := "CreateRoute"
			if test.stream {
				method = "ListRoutes"
				stream, openErr := client.ListRoutes(t.Context(), &routesv1.ListRoutesRequest{})
				if openErr != nil {
					t.Fatal(openErr)
				}
				_, err = stream.Recv()
			} else {
				_, err = client.CreateRoute(t.Context(), &routesv1.CreateRouteRequest{})
			}
			if status.Code(err) != codes.Internal || strings.Contains(err.Error(), "secret") || strings.Contains(err.Error(), "goroutine") {
				t.Errorf("the caller gets %v; want INTERNAL without the stack", err)
			}
			r.server.GracefulStop() // the log and metrics are complete
			if !strings.Contains(r.log.String(), "secret") || !strings.Contains(r.log.String(), "goroutine") {
				t.Errorf("the log has no stack: %s", r.log)
			}
			if n, _ := testutil.GatherAndCount(r.registry, "waymark_grpc_panics_total"); n != 1 {
				t.Errorf("%d series of waymark_grpc_panics_total", n)
			}
			families, _ := r.registry.Gather()
			seen := false
			for _, family := range families {
				if family.GetName() != "grpc_server_handled_total" {
					continue
				}
				for _, metric := range family.GetMetric() {
					labels := map[string]string{}
					for _, label := range metric.GetLabel() {
						labels[label.GetName()] = label.GetValue()
					}
					seen = seen || labels["grpc_method"] == method && labels["grpc_code"] == "Internal" && metric.GetCounter().GetValue() == 1
				}
			}
			if !seen {
				t.Error("grpc_server_handled_total does not count the panic as Internal")
			}
		})
	}
}

func TestGracefulStopCutsWhatDoesNotEnd(t *testing.T) {
	r := start(t, &fake{hold: make(chan struct{})}, rpc.ServerOptions{})
	stream, err := routesv1.NewRoutesServiceClient(r.conn).ListRoutes(t.Context(), &routesv1.ListRoutesRequest{})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := stream.Recv(); err != nil {
		t.Fatal(err)
	}
	began := time.Now()
	rpc.GracefulStop(r.server, 50*time.Millisecond)
	if took := time.Since(began); took > 5*time.Second {
		t.Errorf("the stop took %v", took)
	}
	if _, err := stream.Recv(); err == nil {
		t.Error("the stream goes on after the stop")
	}
}
