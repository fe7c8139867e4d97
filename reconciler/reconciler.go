// Package reconciler is the process that decides. It joins the rooms:
//
//   - session serves the watcher and turns its messages into inputs,
//   - engine (with plan) decides,
//   - execute calls the plugin,
//   - status shows it all.
//
// One goroutine, [Reconciler.loop], owns the engine; the others send it inputs
// and carry out its effects. Start with [Run].
package reconciler

import (
	"context"
	"crypto/rand"
	"encoding/binary"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"google.golang.org/grpc/health"
	healthpb "google.golang.org/grpc/health/grpc_health_v1"

	"github.com/waymark-routes/waymark/cloudplugin"
	"github.com/waymark-routes/waymark/internal/elapsed"
	"github.com/waymark-routes/waymark/internal/endpoint"
	"github.com/waymark-routes/waymark/internal/rpc"
	"github.com/waymark-routes/waymark/internal/telemetry"
	nodesv1 "github.com/waymark-routes/waymark/proto/waymark/nodes/v1"
	routesv1 "github.com/waymark-routes/waymark/proto/waymark/routes/v1"
	statusv1 "github.com/waymark-routes/waymark/proto/waymark/status/v1"
	"github.com/waymark-routes/waymark/reconciler/engine"
	"github.com/waymark-routes/waymark/reconciler/execute"
	"github.com/waymark-routes/waymark/reconciler/plan"
	"github.com/waymark-routes/waymark/reconciler/session"
	"github.com/waymark-routes/waymark/reconciler/status"
)

// Health services on the reconciler's socket beside the empty name.
const (
	// HealthPlugin is SERVING while the plugin has identified itself and serves.
	HealthPlugin = "waymark.plugin"
	// HealthCluster is SERVING once the first snapshot and list are there.
	HealthCluster = "waymark.cluster"
)

const (
	// stopGrace bounds a clean stop.
	stopGrace = 8 * time.Second
	// inputs is how many inputs wait before their senders do.
	inputs = 256
)

// Options tune Run; the zero value works but for the endpoints.
type Options struct {
	// Listen serves watchers, StatusListen people; PluginEndpoint is dialled.
	Listen, StatusListen, PluginEndpoint string
	// AllowInsecure lets plaintext go over TCP off loopback.
	AllowInsecure bool
	Engine        engine.Config
	Execute       execute.Options
	// IdentityTimeout bounds GetPluginInfo; 0 means 5 s.
	IdentityTimeout time.Duration
	// HTTPAddress serves probes and metrics; empty: none.
	HTTPAddress string
	// Idle touches nothing and is ready (--configure-cloud-routes=false).
	Idle     bool
	Logger   *slog.Logger
	Registry *prometheus.Registry
	// Ready is called once both sockets listen.
	Ready func()
}

// Reconciler is the running process.
type Reconciler struct {
	options  Options
	logger   *slog.Logger
	metrics  *metrics
	clock    *elapsed.Clock
	inputs   chan engine.Input
	queries  chan func(*engine.Engine)
	stopped  chan struct{} // closed when the loop has ended
	health   *health.Server
	sessions *session.Server
	executor *execute.Executor
	notReady atomic.Pointer[string]

	// Owned by the loop.
	engine  *engine.Engine
	started map[uint64]callStart
	plugin  bool
	cluster bool
	told    bool
}

type callStart struct {
	method string
	at     time.Time
}

// Run serves until ctx ends, then drains: no new writes, those in flight end or
// are cancelled, sessions end.
func Run(ctx context.Context, o Options) error {
	if o.Logger == nil {
		o.Logger = slog.New(slog.DiscardHandler)
	}
	if o.Registry == nil {
		o.Registry = prometheus.NewRegistry()
	}
	r := &Reconciler{
		options: o, logger: o.Logger, metrics: newMetrics(o.Registry), clock: elapsed.New(),
		inputs: make(chan engine.Input, inputs), queries: make(chan func(*engine.Engine)), stopped: make(chan struct{}),
		health: health.NewServer(), started: map[uint64]callStart{},
	}
	starting := "starting"
	r.notReady.Store(&starting)
	http, err := telemetry.NewHTTPServer(ctx, telemetry.HTTPOptions{Address: o.HTTPAddress, Logger: o.Logger, Gatherer: o.Registry, Ready: r.ready})
	if err != nil {
		return err
	}
	var wg sync.WaitGroup
	defer wg.Wait()
	serving, stopServing := context.WithCancel(context.WithoutCancel(ctx))
	defer stopServing()
	wg.Go(func() { _ = http.Run(serving) })
	if o.Idle {
		o.Logger.InfoContext(ctx, "routes are not configured (--configure-cloud-routes=false); idle")
		idle := ""
		r.notReady.Store(&idle)
		if o.Ready != nil {
			o.Ready()
		}
		<-ctx.Done()
		return nil
	}
	return r.run(ctx, &wg)
}

func (r *Reconciler) ready() error {
	if reason := *r.notReady.Load(); reason != "" {
		return errors.New(reason)
	}
	return nil
}

func (r *Reconciler) run(ctx context.Context, wg *sync.WaitGroup) error {
	o := r.options
	listenAt, err := endpoint.Parse(o.Listen)
	if err != nil {
		return err
	}
	statusAt, err := endpoint.Parse(o.StatusListen)
	if err != nil {
		return err
	}
	client, err := cloudplugin.Dial(o.PluginEndpoint, cloudplugin.DialOptions{
		AllowInsecure: o.AllowInsecure, IdentityTimeout: o.IdentityTimeout,
		Extra: rpc.ClientOptions(rpc.ClientChain{Logger: o.Logger, Registerer: o.Registry, RetryMethods: cloudplugin.IdentityMethods}),
	})
	if err != nil {
		return err
	}
	defer func() { _ = client.Close() }()
	listener, err := endpoint.Listen(ctx, listenAt, endpoint.ListenOptions{AllowInsecure: o.AllowInsecure})
	if err != nil {
		return err
	}
	statusListener, err := endpoint.Listen(ctx, statusAt, endpoint.ListenOptions{})
	if err != nil {
		_ = listener.Close()
		return err
	}

	if o.Engine.Seed == 0 {
		var seed [8]byte
		_, _ = rand.Read(seed[:])
		o.Engine.Seed = binary.LittleEndian.Uint64(seed[:])
	}
	r.engine = engine.New(o.Engine, r.clock.Now())
	r.executor = execute.New(client.Routes, o.Execute, r.post)
	r.sessions = session.NewServer(r.post, r.clock.Now, o.Logger)
	r.health.SetServingStatus("", healthpb.HealthCheckResponse_SERVING)
	r.health.SetServingStatus(HealthPlugin, healthpb.HealthCheckResponse_NOT_SERVING)
	r.health.SetServingStatus(HealthCluster, healthpb.HealthCheckResponse_NOT_SERVING)

	server := rpc.NewServer(rpc.ServerOptions{Logger: o.Logger, Registerer: o.Registry, Stopping: ctx})
	nodesv1.RegisterNodeSessionServiceServer(server, r.sessions)
	healthpb.RegisterHealthServer(server, r.health)
	statusServer := rpc.NewServer(rpc.ServerOptions{Logger: o.Logger, Registerer: o.Registry, Stopping: ctx})
	statusv1.RegisterStatusServiceServer(statusServer, status.NewServer(r.query, r.post))
	healthpb.RegisterHealthServer(statusServer, r.health)

	looping, stopLoop := context.WithCancel(context.WithoutCancel(ctx))
	defer stopLoop()
	supervising, stopSupervising := context.WithCancel(context.WithoutCancel(ctx))
	defer stopSupervising()
	failed := make(chan error, 2)
	wg.Go(func() { r.loop(looping) })
	wg.Go(func() {
		client.Supervise(supervising, func(state cloudplugin.ClientState) { r.post(pluginOf(state)) })
	})
	wg.Go(func() {
		if err := server.Serve(listener); err != nil {
			failed <- fmt.Errorf("serve node sessions on %s: %w", listenAt, err)
		}
	})
	wg.Go(func() {
		if err := statusServer.Serve(statusListener); err != nil {
			failed <- fmt.Errorf("serve status on %s: %w", statusAt, err)
		}
	})
	r.logger.InfoContext(ctx, "reconciler serves", slog.String("endpoint", listenAt.String()), slog.String("status", statusAt.String()),
		slog.String("plugin", o.PluginEndpoint), slog.Bool("watch_based", !o.Engine.PollOnly), slog.Bool("dry_run", o.Engine.DryRun))
	if o.Ready != nil {
		o.Ready()
	}
	select {
	case <-ctx.Done():
	case err = <-failed:
	}
	// Streams first (field case B-60), then the servers, then the rest.
	r.logger.InfoContext(ctx, "reconciler stops")
	grace, cancel := context.WithTimeout(context.WithoutCancel(ctx), stopGrace)
	defer cancel()
	r.health.Shutdown()
	r.sessions.Stop(grace)
	rpc.GracefulStop(server, time.Second)
	rpc.GracefulStop(statusServer, time.Second)
	stopSupervising()
	r.executor.Close() // its results go to the loop, which still runs
	stopLoop()
	<-r.stopped
	return err
}

// post sends an input to the loop; it waits while the loop is behind, and drops
// the input once the loop has ended.
func (r *Reconciler) post(in engine.Input) {
	select {
	case r.inputs <- in:
	case <-r.stopped:
	}
}

// query runs f in the loop. f must not keep the engine.
func (r *Reconciler) query(ctx context.Context, f func(*engine.Engine)) error {
	done := make(chan struct{})
	select {
	case r.queries <- func(e *engine.Engine) { f(e); close(done) }:
		<-done
		return nil
	case <-r.stopped:
		return errors.New("the reconciler has stopped")
	case <-ctx.Done():
		return ctx.Err()
	}
}

// loop owns the engine.
func (r *Reconciler) loop(ctx context.Context) {
	defer close(r.stopped)
	timer := time.NewTimer(time.Hour)
	defer timer.Stop()
	r.step(engine.Tick{})
	for {
		if wake := r.engine.NextWake(); wake.IsZero() {
			timer.Reset(time.Hour)
		} else {
			timer.Reset(max(wake.Sub(r.clock.Now()), 0))
		}
		select {
		case in := <-r.inputs:
			r.step(in)
		case query := <-r.queries:
			query(r.engine)
		case <-timer.C:
			r.step(engine.Tick{})
		case <-ctx.Done():
			return
		}
	}
}

// step gives the engine one input and carries out its effects.
func (r *Reconciler) step(in engine.Input) {
	switch in := in.(type) {
	case engine.ListEnded:
		r.ended(in.ID, in.Err)
	case engine.CallEnded:
		r.ended(in.ID, in.Err)
	}
	for _, effect := range r.engine.Step(r.clock.Now(), in) {
		r.carryOut(effect)
	}
	r.publishHealth()
}

func (r *Reconciler) ended(id uint64, failure *engine.Failure) {
	if start, ok := r.started[id]; ok {
		delete(r.started, id)
		r.metrics.call(start.method, failure, time.Since(start.at))
	}
	r.executor.Done(id)
}

func (r *Reconciler) carryOut(effect engine.Effect) {
	switch e := effect.(type) {
	case engine.AcceptSession:
		r.sessions.Accept(e)
	case engine.EndSession:
		r.sessions.End(e)
	case engine.SendApplied:
		r.sessions.Applied(e)
	case engine.SendVerdict:
		r.sessions.Verdict(e)
	case engine.AskLease:
		r.sessions.AskLease(e)
	case engine.AskAbsence:
		r.sessions.AskAbsence(e)
	case engine.AskSnapshot:
		r.sessions.AskSnapshot(e)
	case engine.StartList:
		r.started[e.ID] = callStart{"ListRoutes", time.Now()}
		r.executor.StartList(e)
	case engine.StartCall:
		r.started[e.ID] = callStart{methods[e.Op.Kind], time.Now()}
		r.executor.StartCall(e)
		r.logger.Debug("write starts", slog.String("operation", e.Op.Kind.String()), slog.String("destination", e.Op.Destination.String()),
			slog.String("reason", e.Op.Reason), slog.String("cause", e.Cause.String()), slog.String("detail", e.Detail), slog.Int("attempt", e.Attempt))
	case engine.CancelList:
		r.executor.Cancel(e.ID)
	case engine.CancelCall:
		r.executor.Cancel(e.ID)
	case engine.Log:
		r.logger.LogAttrs(context.Background(), e.Level, e.Message, e.Attrs...)
	case engine.PassEnded:
		r.metrics.pass(&e.Pass)
		level := slog.LevelDebug
		if e.Pass.Changed || e.Pass.Failures > 0 {
			level = slog.LevelInfo
		}
		r.logger.Log(context.Background(), level, "pass ended", slog.Uint64("pass", e.Pass.ID), slog.Bool("full", e.Pass.Full),
			slog.String("cause", e.Pass.Cause.String()), slog.String("detail", e.Pass.Detail), slog.String("outcome", e.Pass.Outcome()),
			slog.Int("lists", e.Pass.Lists), slog.Int("creates", e.Pass.Creates), slog.Int("deletes", e.Pass.Deletes),
			slog.Int("replaces", e.Pass.Replaces), slog.Int("failures", e.Pass.Failures), slog.Duration("duration", e.Pass.Ended.Sub(e.Pass.Started)))
	case engine.ReconcileStarted:
		r.metrics.started.Observe(e.Waited.Seconds())
	case engine.RouteConfirmed:
		r.metrics.confirmed.Observe(e.Took.Seconds())
	case engine.GuardHeld:
		r.metrics.held.Inc()
	}
}

var methods = map[plan.OpKind]string{plan.OpCreate: "CreateRoute", plan.OpDelete: "DeleteRoute", plan.OpReplace: "ReplaceRoute"}

// publishHealth makes the health services and readiness follow the engine.
func (r *Reconciler) publishHealth() {
	r.metrics.inFlight.Set(float64(r.engine.InFlight()))
	plugin := r.engine.PluginHealthy()
	cluster, reason := r.engine.ClusterReady()
	r.notReady.Store(&reason)
	if plugin != r.plugin || !r.told {
		r.plugin = plugin
		r.health.SetServingStatus(HealthPlugin, serving(plugin))
	}
	if cluster != r.cluster || !r.told {
		r.cluster = cluster
		r.health.SetServingStatus(HealthCluster, serving(cluster))
		r.metrics.ready.Set(map[bool]float64{true: 1}[cluster])
	}
	r.told = true
}

func serving(yes bool) healthpb.HealthCheckResponse_ServingStatus {
	if yes {
		return healthpb.HealthCheckResponse_SERVING
	}
	return healthpb.HealthCheckResponse_NOT_SERVING
}

// pluginOf reads what supervision says of the plugin.
func pluginOf(state cloudplugin.ClientState) engine.PluginChanged {
	in := engine.PluginChanged{Healthy: state.Healthy, Reason: state.Reason, NewView: state.NewView}
	if state.Info == nil {
		return in
	}
	i := state.Info
	info := &engine.PluginInfo{
		Name: i.GetName(), Version: i.GetVersion(), InstanceID: i.GetInstanceId(),
		Replace: i.GetCapabilities().GetReplace(), Batch: i.GetCapabilities().GetBatch(), Watch: i.GetCapabilities().GetWatch(),
		MaxConcurrentWrites: int(max(i.GetLimits().GetMaxConcurrentWrites(), 0)), MaxWritesPerSecond: max(i.GetLimits().GetMaxWritesPerSecond(), 0),
		NodeLabelKeys: i.GetNodeLabelKeys(),
	}
	for _, family := range i.GetIpFamilies() {
		info.IPv4 = info.IPv4 || family == routesv1.IpFamily_IP_FAMILY_IPV4
		info.IPv6 = info.IPv6 || family == routesv1.IpFamily_IP_FAMILY_IPV6
	}
	if !info.IPv4 && !info.IPv6 {
		info.IPv4, info.IPv6 = true, true
	}
	in.Info = info
	return in
}
