// Package condition keeps the nodes' NetworkUnavailable conditions true to the
// reconciler's verdicts, and records the verdicts' notices as events. It patches
// only this condition, and only where status or reason differ (field cases B-51,
// B-52, B-69).
package condition

import (
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/record"
	"k8s.io/client-go/util/workqueue"

	nodesv1 "github.com/waymark-routes/waymark/proto/waymark/nodes/v1"
	"github.com/waymark-routes/waymark/watcher/source"
)

const (
	workers      = 16
	backoffLeast = 100 * time.Millisecond
	backoffMost  = 10 * time.Second
	putBackPause = time.Minute
	eventPause   = time.Minute
	eventMost    = 10 * time.Minute
	patchTimeout = 10 * time.Second
)

// Options tune a Keeper.
type Options struct {
	Client kubernetes.Interface
	// Recorder records events; nil records none.
	Recorder record.EventRecorder
	// Off writes no condition (--node-condition=off); events are recorded.
	Off    bool
	Logger *slog.Logger
	// Patched counts patches by result.
	Patched func(result string)
}

// node is what the keeper knows of one node.
type node struct {
	uid            string
	status, reason string
	want           *nodesv1.NodeVerdict
	wrote          time.Time // when the wanted state was last written
	eventAt        time.Time
	eventPause     time.Duration
}

// Keeper keeps conditions. Its map is guarded by mu; the queue's workers do the
// writing.
type Keeper struct {
	options Options
	queue   workqueue.TypedRateLimitingInterface[string]

	mu     sync.Mutex // guards all below
	nodes  map[string]*node
	silent bool
}

// New makes a keeper; it writes while Run runs.
func New(o Options) *Keeper {
	limiter := workqueue.NewTypedItemExponentialFailureRateLimiter[string](backoffLeast, backoffMost)
	return &Keeper{options: o, queue: workqueue.NewTypedRateLimitingQueue(limiter), nodes: map[string]*node{}}
}

// Run writes until ctx (the leadership) ends.
func (k *Keeper) Run(ctx context.Context) {
	var wg sync.WaitGroup
	for range workers {
		wg.Go(func() {
			for k.work(ctx) {
			}
		})
	}
	<-ctx.Done()
	k.queue.ShutDown()
	wg.Wait()
}

// Silence implements session.Keeper.
func (k *Keeper) Silence() {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.silent = true
}

// Observe implements session.Keeper.
func (k *Keeper) Observe(n source.Node) {
	k.mu.Lock()
	defer k.mu.Unlock()
	known := k.nodes[n.Name]
	if known == nil || known.uid != n.UID {
		known = &node{uid: n.UID}
		k.nodes[n.Name] = known
	}
	known.status, known.reason = "", ""
	if n.Condition != nil {
		known.status, known.reason = n.Condition.Status, n.Condition.Reason
	}
	if known.want != nil {
		k.queue.Add(n.Name)
	}
}

// Forget implements session.Keeper.
func (k *Keeper) Forget(name string) {
	k.mu.Lock()
	defer k.mu.Unlock()
	delete(k.nodes, name)
}

// Verdict implements session.Keeper.
func (k *Keeper) Verdict(v *nodesv1.NodeVerdict) {
	k.mu.Lock()
	defer k.mu.Unlock()
	known := k.nodes[v.GetNode()]
	if known == nil || known.uid != v.GetUid() {
		return // the node is gone, or another machine has its name
	}
	if notice := v.GetNotice(); notice != nil && k.options.Recorder != nil && !k.silent {
		k.event(v.GetNode(), known, notice)
	}
	switch v.GetAvailability() {
	case nodesv1.NodeAvailability_NODE_AVAILABILITY_AVAILABLE, nodesv1.NodeAvailability_NODE_AVAILABILITY_UNAVAILABLE, nodesv1.NodeAvailability_NODE_AVAILABILITY_NOT_MANAGED:
		if known.want.GetAvailability() != v.GetAvailability() {
			known.wrote = time.Time{}
		}
		if v.GetAvailability() == nodesv1.NodeAvailability_NODE_AVAILABILITY_AVAILABLE {
			known.eventPause = 0
		}
		known.want = v
		k.queue.Forget(v.GetNode())
		k.queue.Add(v.GetNode())
	}
}

// event records a notice, at most one a minute and node, then slower (field case
// B-68).
func (k *Keeper) event(name string, known *node, notice *nodesv1.NodeNotice) {
	now := time.Now()
	if now.Sub(known.eventAt) < known.eventPause {
		return
	}
	known.eventAt, known.eventPause = now, min(max(2*known.eventPause, eventPause), eventMost)
	reference := &corev1.ObjectReference{APIVersion: "v1", Kind: "Node", Name: name, UID: types.UID(known.uid)}
	k.options.Recorder.Event(reference, notice.GetType(), notice.GetReason(), notice.GetMessage())
}

// decide says which condition a node is to get now; ok is false for none, wait is
// for how long to hold back.
func (k *Keeper) decide(name string) (uid string, want corev1.NodeCondition, wait time.Duration, ok bool) {
	k.mu.Lock()
	defer k.mu.Unlock()
	known := k.nodes[name]
	if known == nil || known.want == nil || k.silent || k.options.Off {
		return "", want, 0, false
	}
	want = corev1.NodeCondition{Type: corev1.NodeNetworkUnavailable, Status: corev1.ConditionFalse, Reason: "RouteCreated", Message: "RouteController created a route"}
	switch known.want.GetAvailability() {
	case nodesv1.NodeAvailability_NODE_AVAILABILITY_UNAVAILABLE:
		want.Status, want.Reason, want.Message = corev1.ConditionTrue, "NoRouteCreated", "RouteController failed to create a route"
	case nodesv1.NodeAvailability_NODE_AVAILABILITY_NOT_MANAGED:
		if known.status != "True" || known.reason != "NoRouteCreated" {
			return "", want, 0, false
		}
	}
	if known.status == string(want.Status) && known.reason == want.Reason {
		return "", want, 0, false
	}
	// Another component changed it: put back at most once a minute.
	if !known.wrote.IsZero() {
		wait = max(putBackPause-time.Since(known.wrote), 0)
	}
	return known.uid, want, wait, true
}

// work handles one node; false ends the worker.
func (k *Keeper) work(ctx context.Context) bool {
	name, stopped := k.queue.Get()
	if stopped {
		return false
	}
	defer k.queue.Done(name)
	uid, want, wait, ok := k.decide(name)
	switch {
	case !ok || ctx.Err() != nil:
		k.queue.Forget(name)
		return true
	case wait > 0:
		k.queue.AddAfter(name, wait)
		return true
	}
	err := k.patch(ctx, name, uid, want)
	switch {
	case err == nil:
		k.result("ok")
		k.queue.Forget(name)
		k.mu.Lock()
		if known := k.nodes[name]; known != nil && known.uid == uid {
			known.wrote, known.status, known.reason = time.Now(), string(want.Status), want.Reason
		}
		k.mu.Unlock()
	case apierrors.IsNotFound(err):
		k.result("not_found")
		k.queue.Forget(name)
		k.options.Logger.DebugContext(ctx, "condition not written: the node is gone", slog.String("node", name))
	case apierrors.IsForbidden(err):
		k.result("forbidden")
		k.queue.Forget(name)
		k.options.Logger.ErrorContext(ctx, "condition not written: the API server forbids it", slog.String("node", name), slog.Any("err", err))
	default:
		k.result("error")
		k.options.Logger.WarnContext(ctx, "condition not written; tried again", slog.String("node", name), slog.Any("err", err))
		k.queue.AddRateLimited(name)
	}
	return true
}

func (k *Keeper) result(result string) {
	if k.options.Patched != nil {
		k.options.Patched(result)
	}
}

// patch writes one condition of one node; the UID makes it fail on another node
// of the same name.
func (k *Keeper) patch(ctx context.Context, name, uid string, want corev1.NodeCondition) error {
	now := metav1.Now()
	want.LastTransitionTime, want.LastHeartbeatTime = now, now
	body, err := json.Marshal(map[string]any{
		"metadata": map[string]any{"uid": uid},
		"status":   map[string]any{"conditions": []corev1.NodeCondition{want}},
	})
	if err != nil {
		return fmt.Errorf("encode condition: %w", err)
	}
	ctx, cancel := context.WithTimeout(ctx, patchTimeout)
	defer cancel()
	_, err = k.options.Client.CoreV1().Nodes().Patch(ctx, name, types.StrategicMergePatchType, body, metav1.PatchOptions{}, "status")
	if err != nil {
		return fmt.Errorf("patch NetworkUnavailable of node %s: %w", name, err)
	}
	return nil
}

// None keeps no conditions: for node sources without an API server.
type None struct{}

// Verdict implements session.Keeper.
func (None) Verdict(*nodesv1.NodeVerdict) {}

// Observe implements session.Keeper.
func (None) Observe(source.Node) {}

// Forget implements session.Keeper.
func (None) Forget(string) {}

// Silence implements session.Keeper.
func (None) Silence() {}
