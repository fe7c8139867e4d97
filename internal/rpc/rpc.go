// Package rpc is the one place where Waymark's gRPC servers and clients get their
// interceptors, limits and stop rules.
//
// The order in a server, outermost first, and why (field case B-63):
//
//  1. recovery: a panic anywhere below it, also in another interceptor, becomes
//     INTERNAL for the caller. The stack goes to the log, not into the answer.
//  2. metrics and 3. logging: they see every call with its code.
//  4. recovery once more, around the handler alone: so that a handler's panic
//     passes metrics and logging as the INTERNAL that the caller gets.
//
// Tracing is a stats handler and sees all of it. In a client: logging and
// metrics outside, retry inside, so that each counts a call once. Only the
// methods named in ClientChain.RetryMethods are retried; writes and lists are
// retried by the engine alone, and no per-try time-out ever covers a stream
// (field case B-62).
package rpc

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"runtime/debug"
	"sync"
	"time"

	grpcprom "github.com/grpc-ecosystem/go-grpc-middleware/providers/prometheus"
	"github.com/grpc-ecosystem/go-grpc-middleware/v2/interceptors/logging"
	"github.com/grpc-ecosystem/go-grpc-middleware/v2/interceptors/recovery"
	"github.com/grpc-ecosystem/go-grpc-middleware/v2/interceptors/retry"
	"github.com/prometheus/client_golang/prometheus"
	"go.opentelemetry.io/contrib/instrumentation/google.golang.org/grpc/otelgrpc"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	healthpb "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/keepalive"
	"google.golang.org/grpc/status"

	routesv1 "github.com/waymark-routes/waymark/proto/waymark/routes/v1"
)

// MaxMessageSize bounds one message in either direction, in bytes. Lists and
// snapshots are streamed in chunks far below it (field case B-59).
const MaxMessageSize = 64 << 20

// ServerOptions tune NewServer; the zero value works.
type ServerOptions struct {
	// Logger takes call lines (at debug level, failures at info) and panics.
	Logger *slog.Logger
	// Registerer takes the metrics grpc_server_* and waymark_grpc_panics_total.
	Registerer prometheus.Registerer
	// Stopping ends the streams that would go on for ever (health watches, route
	// watches, reflection) when it is done, so that a graceful stop waits for real
	// work alone (field case B-60). Nil: never.
	Stopping context.Context
	// Extra options come last; interceptors in them run inside ours.
	Extra []grpc.ServerOption
}

// NewServer makes a server with Waymark's interceptors and limits.
func NewServer(o ServerOptions) *grpc.Server {
	logger, registerer := orDiscard(o.Logger), orNew(o.Registerer)
	metrics := register(registerer, grpcprom.NewServerMetrics())
	panics := register(registerer, prometheus.NewCounter(prometheus.CounterOpts{
		Name: "waymark_grpc_panics_total", Help: "Panics in gRPC handlers and interceptors that became INTERNAL.",
	}))
	recovered := recovery.WithRecoveryHandlerContext(func(ctx context.Context, cause any) error {
		panics.Inc()
		method, _ := grpc.Method(ctx)
		logger.ErrorContext(ctx, "handler panicked", slog.String("method", method), slog.Any("err", cause), slog.String("stack", string(debug.Stack())))
		return status.Error(codes.Internal, "internal error; the stack is in the server's log")
	})
	return grpc.NewServer(append([]grpc.ServerOption{
		grpc.MaxRecvMsgSize(MaxMessageSize), grpc.MaxSendMsgSize(MaxMessageSize),
		grpc.StatsHandler(otelgrpc.NewServerHandler()),
		// Peers may ping as often as they like on a local socket (B-61); we look for
		// a frozen peer once a minute.
		grpc.KeepaliveEnforcementPolicy(keepalive.EnforcementPolicy{MinTime: time.Second, PermitWithoutStream: true}),
		grpc.ChainUnaryInterceptor(
			recovery.UnaryServerInterceptor(recovered),
			metrics.UnaryServerInterceptor(),
			logging.UnaryServerInterceptor(slogger(logger), logOptions...),
			recovery.UnaryServerInterceptor(recovered),
		),
		grpc.ChainStreamInterceptor(
			recovery.StreamServerInterceptor(recovered),
			metrics.StreamServerInterceptor(),
			logging.StreamServerInterceptor(slogger(logger), logOptions...),
			endless(o.Stopping),
			recovery.StreamServerInterceptor(recovered),
		),
	}, o.Extra...)...)
}

// endless ends streams that have no end of their own once stopping is done.
func endless(stopping context.Context) grpc.StreamServerInterceptor {
	methods := map[string]bool{
		healthpb.Health_Watch_FullMethodName:                             true,
		routesv1.RoutesService_WatchRoutes_FullMethodName:                true,
		"/grpc.reflection.v1.ServerReflection/ServerReflectionInfo":      true,
		"/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo": true,
	}
	return func(srv any, stream grpc.ServerStream, info *grpc.StreamServerInfo, handler grpc.StreamHandler) error {
		if stopping == nil || !methods[info.FullMethod] {
			return handler(srv, stream)
		}
		ctx, cancel := context.WithCancel(stream.Context())
		defer cancel()
		stop := context.AfterFunc(stopping, cancel)
		defer stop()
		ended := make(chan error, 1)
		go func() { ended <- handler(srv, &cancelledStream{ServerStream: stream, ctx: ctx}) }()
		select {
		case err := <-ended:
			return err
		case <-stopping.Done():
			// A handler that waits in Recv ends with the stream, which ends now.
			return status.Error(codes.Unavailable, "the server shuts down; dial again")
		}
	}
}

// cancelledStream is a stream with a context of its own.
type cancelledStream struct {
	grpc.ServerStream
	ctx context.Context
}

// Context implements grpc.ServerStream.
func (s *cancelledStream) Context() context.Context { return s.ctx }

// ClientChain tunes ClientOptions; the zero value works.
type ClientChain struct {
	// Logger takes call lines at debug level.
	Logger *slog.Logger
	// Registerer takes the metrics grpc_client_*.
	Registerer prometheus.Registerer
	// RetryMethods are full names of unary methods that are retried on
	// UNAVAILABLE, three attempts in all.
	RetryMethods []string
}

// ClientOptions are the options of every client connection.
func ClientOptions(o ClientChain) []grpc.DialOption {
	logger, registerer := orDiscard(o.Logger), orNew(o.Registerer)
	metrics := register(registerer, grpcprom.NewClientMetrics())
	retried := retry.UnaryClientInterceptor(
		retry.WithMax(3), retry.WithCodes(codes.Unavailable), retry.WithBackoff(retry.BackoffExponential(50*time.Millisecond)),
	)
	return []grpc.DialOption{
		grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(MaxMessageSize), grpc.MaxCallSendMsgSize(MaxMessageSize)),
		grpc.WithStatsHandler(otelgrpc.NewClientHandler()),
		// gRPC's own transparent retries stay off for writes whose request may have
		// left: the engine alone decides.
		grpc.WithDisableRetry(),
		grpc.WithChainUnaryInterceptor(
			metrics.UnaryClientInterceptor(),
			logging.UnaryClientInterceptor(slogger(logger), logOptions...),
			only(o.RetryMethods, retried),
		),
		grpc.WithChainStreamInterceptor(
			metrics.StreamClientInterceptor(),
			logging.StreamClientInterceptor(slogger(logger), logOptions...),
		),
	}
}

// only applies an interceptor to some methods.
func only(methods []string, interceptor grpc.UnaryClientInterceptor) grpc.UnaryClientInterceptor {
	wanted := make(map[string]bool, len(methods))
	for _, method := range methods {
		wanted[method] = true
	}
	return func(ctx context.Context, method string, req, reply any, cc *grpc.ClientConn, invoker grpc.UnaryInvoker, opts ...grpc.CallOption) error {
		if !wanted[method] {
			return invoker(ctx, method, req, reply, cc, opts...)
		}
		return interceptor(ctx, method, req, reply, cc, invoker, opts...)
	}
}

// GracefulStop stops a server: no new calls, those under way may end within
// timeout, then they are cut. Long streams must be ended by their owners first
// (field case B-60).
func GracefulStop(s *grpc.Server, timeout time.Duration) {
	var wg sync.WaitGroup
	stopped := make(chan struct{})
	wg.Go(func() {
		s.GracefulStop()
		close(stopped)
	})
	timer := time.NewTimer(timeout)
	defer timer.Stop()
	select {
	case <-stopped:
	case <-timer.C:
		s.Stop()
	}
	wg.Wait()
}

var logOptions = []logging.Option{
	logging.WithLogOnEvents(logging.FinishCall),
	logging.WithLevels(func(code codes.Code) logging.Level {
		switch code {
		case codes.Internal, codes.Unknown, codes.DataLoss:
			return logging.LevelWarn
		default:
			return logging.LevelDebug
		}
	}),
	logging.WithDisableLoggingFields(logging.SystemTag[0], logging.ComponentFieldKey, logging.MethodTypeFieldKey),
}

func slogger(logger *slog.Logger) logging.Logger {
	return logging.LoggerFunc(func(ctx context.Context, level logging.Level, message string, fields ...any) {
		logger.Log(ctx, slog.Level(level), message, fields...)
	})
}

func orDiscard(logger *slog.Logger) *slog.Logger {
	if logger == nil {
		return slog.New(slog.DiscardHandler)
	}
	return logger
}

func orNew(registerer prometheus.Registerer) prometheus.Registerer {
	if registerer == nil {
		return prometheus.NewRegistry()
	}
	return registerer
}

// register registers a collector, or takes the equal one that is there: several
// servers of one process share their metrics.
func register[C prometheus.Collector](registerer prometheus.Registerer, collector C) C {
	if err := registerer.Register(collector); err != nil {
		var there prometheus.AlreadyRegisteredError
		if errors.As(err, &there) {
			if same, ok := there.ExistingCollector.(C); ok {
				return same
			}
		}
		panic(fmt.Sprintf("register metrics: %v", err)) // a bug: two metrics of one name
	}
	return collector
}
