package cloudplugin

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"slices"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	rpcstatus "google.golang.org/genproto/googleapis/rpc/status"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/health"
	healthpb "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/reflection"
	"google.golang.org/grpc/status"

	"github.com/waymark-routes/waymark/internal/endpoint"
	"github.com/waymark-routes/waymark/internal/rpc"
	routesv1 "github.com/waymark-routes/waymark/proto/waymark/routes/v1"
)

const (
	// stopGrace is how long calls under way may take when a plugin stops.
	stopGrace = 10 * time.Second
	// listChunk is how many rows go into one message of a list: far under 1 MiB.
	listChunk = 1000
	// healthPeriod is how often a HealthChecker is asked.
	healthPeriod = 5 * time.Second
)

// ServeOptions tune Serve; the zero value works but for Listen.
type ServeOptions struct {
	// Listen is the endpoint text, for example unix:///run/waymark/plugin.sock.
	Listen string
	// Listener takes the place of Listen, for tests.
	Listener net.Listener
	// AllowInsecure lets plaintext listen on TCP off loopback.
	AllowInsecure bool
	Logger        *slog.Logger
	Registerer    prometheus.Registerer
	// NoReflection turns server reflection off.
	NoReflection bool
	// Ready is called once the plugin serves.
	Ready func()
}

// Serve serves a plugin until ctx ends, then lets calls under way end (10 s).
func Serve(ctx context.Context, plugin Plugin, o ServeOptions) error {
	if plugin.Info().Name == "" {
		return fmt.Errorf("serve plugin: Info gives no name")
	}
	logger := o.Logger
	if logger == nil {
		logger = slog.New(slog.DiscardHandler)
	}
	listener := o.Listener
	if listener == nil {
		at, err := endpoint.Parse(o.Listen)
		if err != nil {
			return err
		}
		if listener, err = endpoint.Listen(ctx, at, endpoint.ListenOptions{AllowInsecure: o.AllowInsecure}); err != nil {
			return err
		}
	}
	grpcServer := rpc.NewServer(rpc.ServerOptions{Logger: logger, Registerer: o.Registerer, Stopping: ctx})
	instance := make([]byte, 8)
	_, _ = rand.Read(instance)
	s := &server{plugin: plugin, instance: hex.EncodeToString(instance)}
	routesv1.RegisterIdentityServiceServer(grpcServer, s)
	routesv1.RegisterRoutesServiceServer(grpcServer, s)
	healthServer := health.NewServer()
	healthpb.RegisterHealthServer(grpcServer, healthServer)
	if !o.NoReflection {
		reflection.Register(grpcServer)
	}

	var wg sync.WaitGroup
	defer wg.Wait()
	checking, stopChecking := context.WithCancel(ctx)
	defer stopChecking()
	if checker, ok := plugin.(HealthChecker); ok {
		wg.Go(func() { checkHealth(checking, checker, healthServer, logger) })
	}
	served := make(chan error, 1)
	wg.Go(func() { served <- grpcServer.Serve(listener) })
	logger.InfoContext(ctx, "plugin serves", slog.String("endpoint", listener.Addr().String()), slog.String("plugin", plugin.Info().Name), slog.String("instance", s.instance))
	if o.Ready != nil {
		o.Ready()
	}
	select {
	case <-ctx.Done():
	case err := <-served:
		return fmt.Errorf("serve plugin on %s: %w", listener.Addr(), err)
	}
	healthServer.Shutdown()
	rpc.GracefulStop(grpcServer, stopGrace)
	if err := <-served; err != nil {
		return fmt.Errorf("serve plugin on %s: %w", listener.Addr(), err)
	}
	logger.InfoContext(ctx, "plugin stopped")
	return nil
}

func checkHealth(ctx context.Context, checker HealthChecker, server *health.Server, logger *slog.Logger) {
	ticker := time.NewTicker(healthPeriod)
	defer ticker.Stop()
	healthy := true
	for {
		err := checker.CheckHealth(ctx)
		if ctx.Err() != nil {
			return
		}
		if (err == nil) != healthy {
			healthy = err == nil
			state := healthpb.HealthCheckResponse_SERVING
			if err != nil {
				state = healthpb.HealthCheckResponse_NOT_SERVING
				logger.WarnContext(ctx, "cloud cannot be reached", slog.Any("err", err))
			}
			server.SetServingStatus("", state)
		}
		select {
		case <-ctx.Done():
			return
		case <-ticker.C:
		}
	}
}

// server turns the contract's messages into calls of a Plugin.
type server struct {
	routesv1.UnimplementedIdentityServiceServer
	routesv1.UnimplementedRoutesServiceServer
	plugin   Plugin
	instance string
}

// GetPluginInfo implements the contract.
func (s *server) GetPluginInfo(context.Context, *routesv1.GetPluginInfoRequest) (*routesv1.GetPluginInfoResponse, error) {
	info := s.plugin.Info()
	_, replace := s.plugin.(Replacer)
	_, batch := s.plugin.(Batcher)
	_, watch := s.plugin.(Watcher)
	out := &routesv1.GetPluginInfoResponse{
		Name: info.Name, Version: info.Version, InstanceId: s.instance, NodeLabelKeys: info.NodeLabelKeys,
		Capabilities: &routesv1.PluginCapabilities{Replace: replace, Batch: batch, Watch: watch},
		Limits: &routesv1.PluginLimits{
			MaxConcurrentWrites: int32(min(info.Limits.MaxConcurrentWrites, 1<<30)), MaxWritesPerSecond: info.Limits.MaxWritesPerSecond,
			MaxBatchSize: int32(min(info.Limits.MaxBatchSize, 1<<30)), MaxRoutesPerCluster: info.Limits.MaxRoutesPerCluster,
		},
	}
	for _, family := range info.Families {
		switch family {
		case IPv4:
			out.IpFamilies = append(out.IpFamilies, routesv1.IpFamily_IP_FAMILY_IPV4)
		case IPv6:
			out.IpFamilies = append(out.IpFamilies, routesv1.IpFamily_IP_FAMILY_IPV6)
		}
	}
	return out, nil
}

func invalid(field, text string) error {
	return status.Errorf(codes.InvalidArgument, "%s: %s", field, text)
}

// listChunks streams a list in chunks.
func listChunks(list RouteList, send func(*routesv1.ListRoutesResponse) error) error {
	if len(list.Tables) == 0 {
		return status.Error(codes.Internal, "the plugin named no table")
	}
	first := &routesv1.ListRoutesResponse{Tables: list.Tables}
	for _, q := range list.Quotas {
		first.Quotas = append(first.Quotas, &routesv1.TableQuota{Table: q.Table, Used: q.Used, Limit: q.Limit})
	}
	if err := send(first); err != nil {
		return err
	}
	for chunk := range slices.Chunk(list.Routes, listChunk) {
		message := &routesv1.ListRoutesResponse{Routes: make([]*routesv1.Route, len(chunk))}
		for i := range chunk {
			message.Routes[i] = chunk[i].Proto()
		}
		if err := send(message); err != nil {
			return err
		}
	}
	return nil
}

// ListRoutes implements the contract.
func (s *server) ListRoutes(r *routesv1.ListRoutesRequest, stream grpc.ServerStreamingServer[routesv1.ListRoutesResponse]) error {
	if r.GetClusterName() == "" {
		return invalid("cluster_name", "is required")
	}
	list, err := s.plugin.ListRoutes(stream.Context(), clusterOf(r.GetClusterName(), r.GetClusterCidrs()))
	if err != nil {
		return asStatus(err)
	}
	return listChunks(list, stream.Send)
}

func checkContext(c *routesv1.WriteContext) error {
	if c.GetClusterName() == "" {
		return invalid("context.cluster_name", "is required")
	}
	return nil
}

func checkCreate(r *routesv1.CreateRouteRequest) error {
	if err := checkContext(r.GetContext()); err != nil {
		return err
	}
	if _, err := netip.ParsePrefix(r.GetDestination()); err != nil {
		return invalid("destination", fmt.Sprintf("%q is no CIDR", r.GetDestination()))
	}
	if r.GetNode().GetName() == "" {
		return invalid("node.name", "is required")
	}
	return nil
}

func checkRow(c *routesv1.WriteContext, r *routesv1.Route) error {
	if err := checkContext(c); err != nil {
		return err
	}
	if r == nil {
		return invalid("route", "is required")
	}
	return nil
}

// CreateRoute implements the contract.
func (s *server) CreateRoute(ctx context.Context, r *routesv1.CreateRouteRequest) (*routesv1.CreateRouteResponse, error) {
	if err := checkCreate(r); err != nil {
		return nil, err
	}
	outcome, err := s.plugin.CreateRoute(ctx, createOf(r))
	if err != nil {
		return nil, asStatus(err)
	}
	return &routesv1.CreateRouteResponse{Outcome: outcomes[outcome.Kind], Message: outcome.Message}, nil
}

// DeleteRoute implements the contract.
func (s *server) DeleteRoute(ctx context.Context, r *routesv1.DeleteRouteRequest) (*routesv1.DeleteRouteResponse, error) {
	if err := checkRow(r.GetContext(), r.GetRoute()); err != nil {
		return nil, err
	}
	outcome, err := s.plugin.DeleteRoute(ctx, deleteOf(r))
	if err != nil {
		return nil, asStatus(err)
	}
	return &routesv1.DeleteRouteResponse{Outcome: outcomes[outcome.Kind], Message: outcome.Message}, nil
}

// ReplaceRoute implements the contract.
func (s *server) ReplaceRoute(ctx context.Context, r *routesv1.ReplaceRouteRequest) (*routesv1.ReplaceRouteResponse, error) {
	replacer, ok := s.plugin.(Replacer)
	if !ok {
		return nil, status.Error(codes.Unimplemented, "this plugin does not replace")
	}
	if err := checkRow(r.GetContext(), r.GetRoute()); err != nil {
		return nil, err
	}
	outcome, err := replacer.ReplaceRoute(ctx, replaceOf(r))
	if err != nil {
		return nil, asStatus(err)
	}
	return &routesv1.ReplaceRouteResponse{Outcome: outcomes[outcome.Kind], Message: outcome.Message}, nil
}

// ApplyRoutes implements the contract.
func (s *server) ApplyRoutes(r *routesv1.ApplyRoutesRequest, stream grpc.ServerStreamingServer[routesv1.ApplyRoutesResponse]) error {
	batcher, ok := s.plugin.(Batcher)
	if !ok {
		return status.Error(codes.Unimplemented, "this plugin takes no batches")
	}
	operations := make([]Operation, 0, len(r.GetOperations()))
	for i, op := range r.GetOperations() {
		switch op := op.GetOperation().(type) {
		case *routesv1.RouteOperation_Create:
			request := createOf(op.Create)
			operations = append(operations, Operation{Create: &request})
		case *routesv1.RouteOperation_Delete:
			request := deleteOf(op.Delete)
			operations = append(operations, Operation{Delete: &request})
		case *routesv1.RouteOperation_Replace:
			request := replaceOf(op.Replace)
			operations = append(operations, Operation{Replace: &request})
		default:
			return invalid(fmt.Sprintf("operations[%d]", i), "is empty")
		}
	}
	var sendErr error
	err := batcher.ApplyRoutes(stream.Context(), operations, func(result Result) {
		out := &routesv1.RouteOperationResult{Index: int32(result.Index), Outcome: outcomes[result.Outcome.Kind], Message: result.Outcome.Message}
		if result.Err != nil {
			st, _ := status.FromError(asStatus(result.Err))
			out.Status = &rpcstatus.Status{Code: int32(st.Code()), Message: st.Message(), Details: st.Proto().GetDetails()}
		}
		if sendErr == nil {
			sendErr = stream.Send(&routesv1.ApplyRoutesResponse{Results: []*routesv1.RouteOperationResult{out}})
		}
	})
	if sendErr != nil {
		return sendErr
	}
	return asStatus(err)
}

// WatchRoutes implements the contract.
func (s *server) WatchRoutes(r *routesv1.WatchRoutesRequest, stream grpc.ServerStreamingServer[routesv1.WatchRoutesResponse]) error {
	watcher, ok := s.plugin.(Watcher)
	if !ok {
		return status.Error(codes.Unimplemented, "this plugin does not watch")
	}
	return asStatus(watcher.WatchRoutes(stream.Context(), clusterOf(r.GetClusterName(), r.GetClusterCidrs()), watchSink{stream}))
}

type watchSink struct {
	stream grpc.ServerStreamingServer[routesv1.WatchRoutesResponse]
}

// Listed implements WatchSink.
func (w watchSink) Listed(list RouteList, revision string) error {
	err := listChunks(list, func(chunk *routesv1.ListRoutesResponse) error {
		return w.stream.Send(&routesv1.WatchRoutesResponse{Message: &routesv1.WatchRoutesResponse_List{List: chunk}})
	})
	if err != nil {
		return err
	}
	return w.stream.Send(&routesv1.WatchRoutesResponse{Message: &routesv1.WatchRoutesResponse_Listed{Listed: &routesv1.WatchListed{Revision: revision}}})
}

// Changed implements WatchSink.
func (w watchSink) Changed(changed []Route, removedIDs []string, revision string) error {
	change := &routesv1.WatchChange{RemovedIds: removedIDs, Revision: revision}
	for _, r := range changed {
		change.Changed = append(change.Changed, r.Proto())
	}
	return w.stream.Send(&routesv1.WatchRoutesResponse{Message: &routesv1.WatchRoutesResponse_Change{Change: change}})
}

// Lost implements WatchSink.
func (w watchSink) Lost(reason string) error {
	return w.stream.Send(&routesv1.WatchRoutesResponse{Message: &routesv1.WatchRoutesResponse_Lost{Lost: &routesv1.WatchLost{Reason: reason}}})
}
