// Package watcher is the process that holds the Kubernetes credentials: it
// watches nodes (source), elects the one that works (lease), streams changes to
// the reconciler (feed, session), and keeps the nodes' conditions (condition).
// Start with [Run].
package watcher

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"net/netip"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"google.golang.org/grpc"
	healthpb "google.golang.org/grpc/health/grpc_health_v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/kubernetes/scheme"
	typedcorev1 "k8s.io/client-go/kubernetes/typed/core/v1"
	"k8s.io/client-go/tools/record"

	"github.com/waymark-routes/waymark/internal/elapsed"
	"github.com/waymark-routes/waymark/internal/endpoint"
	"github.com/waymark-routes/waymark/internal/flags"
	"github.com/waymark-routes/waymark/internal/rpc"
	"github.com/waymark-routes/waymark/internal/telemetry"
	"github.com/waymark-routes/waymark/watcher/condition"
	"github.com/waymark-routes/waymark/watcher/lease"
	"github.com/waymark-routes/waymark/watcher/session"
	"github.com/waymark-routes/waymark/watcher/source"
)

// Options tune Run.
type Options struct {
	// ReconcilerEndpoint is dialled.
	ReconcilerEndpoint string
	AllowInsecure      bool
	// Client reaches the API server; nil with a file source.
	Client kubernetes.Interface
	// Source gives the nodes.
	Source       source.Source
	NodeSelector string
	// ClusterUID identifies the cluster; empty: asked of the API server.
	ClusterUID, ClusterName string
	ClusterCIDRs            []netip.Prefix
	// Holder identifies this process.
	Holder string
	// Elect campaigns for the Lease; else this process works alone.
	Elect                                     bool
	LeaseNamespace, LeaseName                 string
	LeaseDuration, RenewDeadline, RetryPeriod time.Duration
	PluginGrace                               time.Duration
	// ConditionsOff writes no conditions.
	ConditionsOff bool
	// ControlSocket takes stepdown requests; empty: none.
	ControlSocket string
	HTTPAddress   string
	// Idle touches nothing and is ready.
	Idle     bool
	Logger   *slog.Logger
	Registry *prometheus.Registry
}

// watcher is the running process.
type watcher struct {
	options Options
	logger  *slog.Logger
	plugin  *healthState
	cluster *healthState
	elector *lease.Elector
	client  *session.Client

	mu     sync.Mutex // guards client's assignment and starting
	reason string
}

// Run works until ctx ends; then the session ends in good order and the Lease is
// released.
func Run(ctx context.Context, o Options) error {
	if o.Logger == nil {
		o.Logger = slog.New(slog.DiscardHandler)
	}
	if o.Registry == nil {
		o.Registry = prometheus.NewRegistry()
	}
	w := &watcher{options: o, logger: o.Logger, plugin: newHealthState(), cluster: newHealthState(), reason: "starting"}
	web, err := telemetry.NewHTTPServer(ctx, telemetry.HTTPOptions{Address: o.HTTPAddress, Logger: o.Logger, Gatherer: o.Registry, Ready: w.ready})
	if err != nil {
		return err
	}
	var wg sync.WaitGroup
	defer wg.Wait()
	serving, stopServing := context.WithCancel(context.WithoutCancel(ctx))
	defer stopServing()
	wg.Go(func() { _ = web.Run(serving) })
	if o.Idle {
		o.Logger.InfoContext(ctx, "routes are not configured (--configure-cloud-routes=false); idle")
		<-ctx.Done()
		return nil
	}
	at, err := endpoint.Parse(o.ReconcilerEndpoint)
	if err != nil {
		return err
	}
	conn, err := endpoint.Dial(at, endpoint.DialOptions{AllowInsecure: o.AllowInsecure, Extra: rpc.ClientOptions(rpc.ClientChain{Logger: o.Logger, Registerer: o.Registry})})
	if err != nil {
		return err
	}
	defer func() { _ = conn.Close() }()
	watching, stopWatching := context.WithCancel(context.WithoutCancel(ctx))
	defer stopWatching()
	wg.Go(func() { w.plugin.follow(watching, conn, "waymark.plugin") })
	wg.Go(func() { w.cluster.follow(watching, conn, "waymark.cluster") })
	if o.Elect {
		w.elector = lease.New(lease.Options{
			Client: o.Client, Namespace: o.LeaseNamespace, Name: o.LeaseName, Identity: o.Holder,
			LeaseDuration: o.LeaseDuration, RenewDeadline: o.RenewDeadline, RetryPeriod: o.RetryPeriod, Grace: o.PluginGrace,
			Eligible: w.plugin.get, Now: elapsed.New().Now, Logger: o.Logger,
		})
	}
	if o.ControlSocket != "" {
		stop, err := w.serveControl(ctx, &wg)
		if err != nil {
			return err
		}
		defer stop()
	}
	uid, err := w.clusterUID(ctx)
	if ctx.Err() != nil {
		return nil
	}
	if err != nil {
		return err
	}
	w.work(ctx, uid, conn)
	return nil
}

// work leads, or works alone, until ctx ends.
func (w *watcher) work(ctx context.Context, uid string, conn *grpc.ClientConn) {
	o := w.options
	connected := prometheus.NewGauge(prometheus.GaugeOpts{Name: "waymark_watcher_session_connected", Help: "1 while a session with the reconciler stands."})
	sent := prometheus.NewCounterVec(prometheus.CounterOpts{Name: "waymark_watcher_events_sent_total", Help: "Node events sent to the reconciler by type."}, []string{"type"})
	patches := prometheus.NewCounterVec(prometheus.CounterOpts{Name: "waymark_condition_patches_total", Help: "Patches of NetworkUnavailable by result."}, []string{"result"})
	leads := prometheus.NewGaugeFunc(prometheus.GaugeOpts{Name: "waymark_watcher_leader", Help: "1 while this watcher leads or works alone."}, func() float64 {
		if w.elector == nil || w.elector.Leading() {
			return 1
		}
		return 0
	})
	o.Registry.MustRegister(connected, sent, patches, leads)
	remaining := func() (time.Duration, bool) { return 0, true }
	if w.elector != nil {
		remaining = w.elector.Remaining
	}
	var recorder record.EventRecorder
	if o.Client != nil {
		broadcaster := record.NewBroadcaster(record.WithContext(context.WithoutCancel(ctx)))
		defer broadcaster.Shutdown()
		broadcaster.StartRecordingToSink(&typedcorev1.EventSinkImpl{Interface: o.Client.CoreV1().Events("")})
		recorder = broadcaster.NewRecorder(scheme.Scheme, corev1.EventSource{Component: "waymark"})
	}
	lead := func(ctx context.Context, token lease.Token) {
		var keeper session.Keeper = condition.None{}
		var wg sync.WaitGroup
		defer wg.Wait()
		if o.Client != nil {
			k := condition.New(condition.Options{
				Client: o.Client, Recorder: recorder, Off: o.ConditionsOff, Logger: w.logger,
				Patched: func(result string) { patches.WithLabelValues(result).Inc() },
			})
			keeper = k
			wg.Go(func() { k.Run(ctx) })
		}
		client := session.New(session.Options{
			Conn: conn, Source: o.Source, Keeper: keeper, ClusterUID: uid, ClusterName: o.ClusterName, ClusterCIDRs: o.ClusterCIDRs,
			Holder: o.Holder, NodeSelector: o.NodeSelector, Remaining: remaining, Logger: w.logger,
			Connected: func(yes bool) { connected.Set(map[bool]float64{true: 1}[yes]) },
			Sent:      func(kind string) { sent.WithLabelValues(kind).Inc() },
		})
		w.mu.Lock()
		w.client = client
		w.mu.Unlock()
		client.Run(ctx, token)
		w.mu.Lock()
		w.client = nil
		w.mu.Unlock()
	}
	w.setReason("")
	if w.elector == nil {
		lead(ctx, lease.Token{LeaseUID: uid})
		return
	}
	w.elector.Run(ctx, lead)
}

func (w *watcher) setReason(reason string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.reason = reason
}

// ready: a standby is ready when its plugin is healthy, a leader when the
// cluster's first snapshot and list are there.
func (w *watcher) ready() error {
	w.mu.Lock()
	client, reason := w.client, w.reason
	w.mu.Unlock()
	switch {
	case w.options.Idle:
		return nil
	case reason != "":
		return errors.New(reason)
	case w.elector != nil && !w.elector.Leading():
		if ok, _ := w.plugin.get(); !ok {
			return errors.New("standby: the reconciler or its plugin is not healthy")
		}
		return nil
	case client == nil:
		return errors.New("no session with the reconciler yet")
	case client.Reason() != "":
		return errors.New(client.Reason())
	case w.options.Source.Problem() != nil:
		return fmt.Errorf("the nodes may be old: %w", w.options.Source.Problem())
	}
	if ok, _ := w.cluster.get(); !ok {
		return errors.New("the reconciler is not ready: the first snapshot or the first list of routes is missing, or the plugin is away")
	}
	return nil
}

// clusterUID asks the API server for the UID of kube-system until it answers.
// Credentials that are refused at the start are bad input; later nothing exits.
func (w *watcher) clusterUID(ctx context.Context) (string, error) {
	if w.options.ClusterUID != "" {
		return w.options.ClusterUID, nil
	}
	for {
		ns, err := w.options.Client.CoreV1().Namespaces().Get(ctx, "kube-system", metav1.GetOptions{})
		if err == nil {
			return string(ns.UID), nil
		}
		if ctx.Err() != nil {
			return "", ctx.Err()
		}
		if apierrors.IsUnauthorized(err) {
			return "", flags.Usagef("--kubeconfig: the API server refuses the credentials: %w", err)
		}
		w.setReason(fmt.Sprintf("the API server does not tell the cluster's UID: %v", err))
		w.logger.WarnContext(ctx, "namespace kube-system cannot be read; tried again", slog.Any("err", err))
		elapsed.Sleep(ctx, 2*time.Second)
	}
}

// serveControl serves POST /stepdown on the control socket.
func (w *watcher) serveControl(ctx context.Context, wg *sync.WaitGroup) (stop func(), err error) {
	at, err := endpoint.Parse(w.options.ControlSocket)
	if err != nil {
		return nil, err
	}
	listener, err := endpoint.Listen(ctx, at, endpoint.ListenOptions{Mode: 0o600})
	if err != nil {
		return nil, err
	}
	mux := http.NewServeMux()
	mux.HandleFunc("POST /stepdown", func(rw http.ResponseWriter, r *http.Request) {
		if w.elector != nil {
			if err := w.elector.StepDown(r.Context()); err != nil {
				http.Error(rw, err.Error(), http.StatusInternalServerError)
				return
			}
		}
		_, _ = rw.Write([]byte("released\n"))
	})
	server := &http.Server{Handler: mux, ReadHeaderTimeout: 5 * time.Second}
	wg.Go(func() { _ = server.Serve(listener) })
	return func() { _ = server.Close() }, nil
}

// StepDown asks the watcher behind a control socket to release its Lease, and
// waits until it has.
func StepDown(ctx context.Context, controlSocket string) error {
	at, err := endpoint.Parse(controlSocket)
	if err != nil {
		return err
	}
	client := &http.Client{Transport: &http.Transport{DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
		return (&net.Dialer{}).DialContext(ctx, at.Network, at.Address)
	}}}
	request, err := http.NewRequestWithContext(ctx, http.MethodPost, "http://watcher/stepdown", http.NoBody)
	if err != nil {
		return fmt.Errorf("make stepdown request: %w", err)
	}
	answer, err := client.Do(request)
	if err != nil {
		return fmt.Errorf("ask the watcher at %s to step down: %w", at, err)
	}
	defer func() { _ = answer.Body.Close() }()
	if answer.StatusCode != http.StatusOK {
		return fmt.Errorf("ask the watcher at %s to step down: it answers %s", at, answer.Status)
	}
	return nil
}

// healthState follows one health service of the reconciler.
type healthState struct {
	mu      sync.Mutex // guards all below
	ok      bool
	changed chan struct{}
}

func newHealthState() *healthState { return &healthState{changed: make(chan struct{})} }

// get says how it is; the channel is closed at the next change.
func (h *healthState) get() (ok bool, changed <-chan struct{}) {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.ok, h.changed
}

func (h *healthState) set(ok bool) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if ok != h.ok {
		h.ok = ok
		close(h.changed)
		h.changed = make(chan struct{})
	}
}

func (h *healthState) follow(ctx context.Context, conn *grpc.ClientConn, service string) {
	for ctx.Err() == nil {
		stream, err := healthpb.NewHealthClient(conn).Watch(ctx, &healthpb.HealthCheckRequest{Service: service})
		for err == nil {
			var answer *healthpb.HealthCheckResponse
			if answer, err = stream.Recv(); err == nil {
				h.set(answer.GetStatus() == healthpb.HealthCheckResponse_SERVING)
			}
		}
		h.set(false)
		elapsed.Sleep(ctx, 200*time.Millisecond)
	}
}
