package reconciler

import (
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/waymark-routes/waymark/reconciler/engine"
)

// metrics are the reconciler's figures; docs/metrics.md lists them.
type metrics struct {
	syncs        *prometheus.CounterVec
	calls        *prometheus.CounterVec
	callDuration *prometheus.HistogramVec
	passCalls    *prometheus.HistogramVec
	started      prometheus.Histogram
	confirmed    prometheus.Histogram
	held         prometheus.Counter
	ready        prometheus.Gauge
	inFlight     prometheus.Gauge
}

func newMetrics(r prometheus.Registerer) *metrics {
	latency := []float64{.001, .0025, .005, .01, .025, .05, .1, .25, .5, 1, 2.5, 5, 10, 30, 60, 300}
	m := &metrics{
		syncs: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "route_controller_route_sync_total", Help: "Passes by outcome (error, changed, noop) and trigger; upstream's metric under its own name.",
		}, []string{"outcome", "trigger"}),
		calls: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "waymark_plugin_calls_total", Help: "Calls of the plugin by method and gRPC code.",
		}, []string{"method", "code"}),
		callDuration: prometheus.NewHistogramVec(prometheus.HistogramOpts{
			Name: "waymark_plugin_call_duration_seconds", Help: "Time that calls of the plugin took.", Buckets: latency,
			NativeHistogramBucketFactor: 1.1,
		}, []string{"method"}),
		passCalls: prometheus.NewHistogramVec(prometheus.HistogramOpts{
			Name: "waymark_pass_plugin_calls", Help: "Calls of the plugin per pass, by scope (full, node).", Buckets: []float64{0, 1, 2, 3, 5, 10, 30, 100, 300, 1000, 3000},
		}, []string{"scope"}),
		started: prometheus.NewHistogram(prometheus.HistogramOpts{
			Name: "waymark_node_change_reconcile_start_seconds", Help: "Time from a node change to the start of its reconcile (KEP-5237's SLI).", Buckets: latency,
			NativeHistogramBucketFactor: 1.1,
		}),
		confirmed: prometheus.NewHistogram(prometheus.HistogramOpts{
			Name: "waymark_node_change_route_confirmed_seconds", Help: "Time from a node change to all of the node's routes being in place.", Buckets: latency,
			NativeHistogramBucketFactor: 1.1,
		}),
		held: prometheus.NewCounter(prometheus.CounterOpts{
			Name: "waymark_deletes_held_total", Help: "Deletes that the deletion guard held.",
		}),
		ready: prometheus.NewGauge(prometheus.GaugeOpts{
			Name: "waymark_cluster_ready", Help: "1 when the first snapshot and the first complete list of this session are there.",
		}),
		inFlight: prometheus.NewGauge(prometheus.GaugeOpts{
			Name: "waymark_writes_in_flight", Help: "Writes that the plugin has not answered yet.",
		}),
	}
	r.MustRegister(m.syncs, m.calls, m.callDuration, m.passCalls, m.started, m.confirmed, m.held, m.ready, m.inFlight)
	// Series that alerts compute rates of exist from the start.
	for _, outcome := range []string{"error", "changed", "noop"} {
		for _, trigger := range []engine.Cause{engine.CauseNodeChange, engine.CausePeriodic} {
			m.syncs.WithLabelValues(outcome, trigger.String())
		}
	}
	return m
}

func (m *metrics) call(method string, failure *engine.Failure, took time.Duration) {
	code := "OK"
	if failure != nil {
		code = failure.Name
	}
	m.calls.WithLabelValues(method, code).Inc()
	m.callDuration.WithLabelValues(method).Observe(took.Seconds())
}

func (m *metrics) pass(p *engine.Pass) {
	scope := "node"
	if p.Full {
		scope = "full"
	}
	m.syncs.WithLabelValues(p.Outcome(), p.Cause.String()).Inc()
	m.passCalls.WithLabelValues(scope).Observe(float64(p.Lists + p.Creates + p.Deletes + p.Replaces))
}
