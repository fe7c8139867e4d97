// Package telemetry gives every Waymark process its log, its probes and metrics
// over HTTP, and its traces.
package telemetry

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/prometheus/client_golang/prometheus/promhttp"
	"go.opentelemetry.io/otel"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/exporters/otlp/otlptrace/otlptracegrpc"
	"go.opentelemetry.io/otel/propagation"
	"go.opentelemetry.io/otel/sdk/resource"
	"go.opentelemetry.io/otel/sdk/trace"

	"github.com/waymark-routes/waymark/internal/build"
	"github.com/waymark-routes/waymark/internal/flags"
)

// NewLogger makes the process's logger: one line per event, as text or JSON.
func NewLogger(w io.Writer, level, format string) (*slog.Logger, error) {
	var least slog.Level
	switch level {
	case "debug", "info", "warn", "error":
		if err := least.UnmarshalText([]byte(level)); err != nil {
			return nil, fmt.Errorf("read log level %q: %w", level, err)
		}
	default:
		return nil, flags.Usagef("--log-level: %q is none of debug, info, warn, error", level)
	}
	options := &slog.HandlerOptions{Level: least}
	switch format {
	case "text":
		return slog.New(slog.NewTextHandler(w, options)), nil
	case "json":
		return slog.New(slog.NewJSONHandler(w, options)), nil
	default:
		return nil, flags.Usagef("--log-format: %q is neither text nor json", format)
	}
}

// NewRegistry makes a registry with the Go runtime's and the process's metrics.
func NewRegistry() *prometheus.Registry {
	registry := prometheus.NewRegistry()
	registry.MustRegister(collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	registry.MustRegister(prometheus.NewGaugeFunc(prometheus.GaugeOpts{
		Name: "waymark_build_info", Help: "Always 1; the labels tell the version.", ConstLabels: prometheus.Labels{"version": build.Version()},
	}, func() float64 { return 1 }))
	return registry
}

// HTTPOptions tune an HTTPServer.
type HTTPOptions struct {
	// Address to listen on; empty serves nothing.
	Address string
	Logger  *slog.Logger
	// Gatherer gives /metrics.
	Gatherer prometheus.Gatherer
	// Ready says why the process is not ready; nil means ready.
	Ready func() error
}

// HTTPServer serves /livez, /readyz, /healthz and /metrics.
type HTTPServer struct {
	options  HTTPOptions
	listener net.Listener
}

// NewHTTPServer listens, so that an address in use is an error at the start.
func NewHTTPServer(ctx context.Context, o HTTPOptions) (*HTTPServer, error) {
	s := &HTTPServer{options: o}
	if o.Address == "" {
		return s, nil
	}
	listener, err := (&net.ListenConfig{}).Listen(ctx, "tcp", o.Address)
	if err != nil {
		return nil, flags.Usagef("--http-address: listen on %s: %w", o.Address, err)
	}
	s.listener = listener
	return s, nil
}

// Address is where the server listens; empty when it does not.
func (s *HTTPServer) Address() string {
	if s.listener == nil {
		return ""
	}
	return s.listener.Addr().String()
}

// Run serves until ctx ends.
func (s *HTTPServer) Run(ctx context.Context) error {
	if s.listener == nil {
		<-ctx.Done()
		return nil
	}
	server := &http.Server{Handler: s.Handler(), ReadHeaderTimeout: 5 * time.Second, ReadTimeout: 10 * time.Second, IdleTimeout: time.Minute}
	stopped := make(chan struct{})
	go func() {
		defer close(stopped)
		<-ctx.Done()
		grace, cancel := context.WithTimeout(context.WithoutCancel(ctx), time.Second)
		defer cancel()
		if err := server.Shutdown(grace); err != nil {
			_ = server.Close()
		}
	}()
	err := server.Serve(s.listener)
	if errors.Is(err, http.ErrServerClosed) {
		<-stopped
		return nil
	}
	return fmt.Errorf("serve probes and metrics on %s: %w", s.options.Address, err)
}

// Handler is what is served.
func (s *HTTPServer) Handler() http.Handler {
	mux := http.NewServeMux()
	alive := func(w http.ResponseWriter, _ *http.Request) { _, _ = io.WriteString(w, "ok\n") }
	mux.HandleFunc("GET /livez", alive)
	mux.HandleFunc("GET /healthz", alive)
	mux.HandleFunc("GET /readyz", func(w http.ResponseWriter, r *http.Request) {
		var err error
		if s.options.Ready != nil {
			err = s.options.Ready()
		}
		_, verbose := r.URL.Query()["verbose"]
		switch {
		case err != nil:
			w.WriteHeader(http.StatusServiceUnavailable)
			fmt.Fprintf(w, "not ready: %v\n", err)
		case verbose:
			_ = json.NewEncoder(w).Encode(map[string]string{"ready": "true", "version": build.Version()})
		default:
			_, _ = io.WriteString(w, "ok\n")
		}
	})
	if s.options.Gatherer != nil {
		mux.Handle("GET /metrics", promhttp.HandlerFor(s.options.Gatherer, promhttp.HandlerOpts{EnableOpenMetrics: true}))
	}
	return mux
}

// SetupTracing makes the process's tracer: W3C propagation always, and export
// over OTLP when an endpoint is given. The returned function flushes and stops.
func SetupTracing(ctx context.Context, service, otlpEndpoint string) (func(context.Context) error, error) {
	otel.SetTextMapPropagator(propagation.NewCompositeTextMapPropagator(propagation.TraceContext{}, propagation.Baggage{}))
	if otlpEndpoint == "" {
		return func(context.Context) error { return nil }, nil
	}
	if _, _, err := net.SplitHostPort(otlpEndpoint); err != nil {
		return nil, flags.Usagef("--otlp-endpoint: %q is not host:port", otlpEndpoint)
	}
	exporter, err := otlptracegrpc.New(ctx, otlptracegrpc.WithEndpoint(otlpEndpoint), otlptracegrpc.WithInsecure())
	if err != nil {
		return nil, fmt.Errorf("make trace exporter to %s: %w", otlpEndpoint, err)
	}
	provider := trace.NewTracerProvider(
		trace.WithBatcher(exporter),
		trace.WithResource(resource.NewSchemaless(attribute.String("service.name", service), attribute.String("service.version", build.Version()))),
	)
	otel.SetTracerProvider(provider)
	return provider.Shutdown, nil
}
