package source

import (
	"context"
	"fmt"
	"log/slog"
	"slices"
	"sync"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/cache"
)

// censusPage is how many nodes one page of a fresh read holds.
const censusPage = 500

// Kube watches the nodes of an API server.
type Kube struct {
	client   kubernetes.Interface
	selector string
	logger   *slog.Logger

	mu      sync.Mutex // guards problem
	problem error
}

// NewKube makes a source; selector is a label selector that the API server
// applies, empty for all nodes.
func NewKube(client kubernetes.Interface, selector string, logger *slog.Logger) *Kube {
	return &Kube{client: client, selector: selector, logger: logger}
}

// Problem implements Source.
func (k *Kube) Problem() error {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.problem
}

func (k *Kube) setProblem(err error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.problem = err
}

// Run implements Source with a shared informer.
func (k *Kube) Run(ctx context.Context, labelKeys []string, sink Sink) error {
	nodes := k.client.CoreV1().Nodes()
	lw := &cache.ListWatch{
		ListWithContextFunc: func(ctx context.Context, o metav1.ListOptions) (runtime.Object, error) {
			o.LabelSelector = k.selector
			if o.ResourceVersion == "0" {
				// The first list of a session is a quorum read, never one from a cache
				// that may be hours old.
				o.ResourceVersion, o.ResourceVersionMatch = "", ""
			}
			list, err := nodes.List(ctx, o)
			k.setProblem(err)
			return list, err
		},
		WatchFuncWithContext: func(ctx context.Context, o metav1.ListOptions) (watch.Interface, error) {
			o.LabelSelector = k.selector
			w, err := nodes.Watch(ctx, o)
			k.setProblem(err)
			return w, err
		},
	}
	informer := cache.NewSharedIndexInformer(cache.ToListWatcherWithWatchListSemantics(lw, k.client), &corev1.Node{}, 0, cache.Indexers{})
	if err := informer.SetTransform(func(obj any) (any, error) {
		if n, ok := obj.(*corev1.Node); ok {
			return trim(n, labelKeys), nil
		}
		return obj, nil
	}); err != nil {
		return fmt.Errorf("set up node informer: %w", err)
	}
	_ = informer.SetWatchErrorHandlerWithContext(func(ctx context.Context, _ *cache.Reflector, err error) {
		k.setProblem(err)
		k.logger.WarnContext(ctx, "watch of nodes broke; it is taken up again", slog.Any("err", err))
	})
	handler := &kubeHandler{sink: sink, labelKeys: labelKeys, logger: k.logger, informer: informer}
	registration, err := informer.AddEventHandler(handler)
	if err != nil {
		return fmt.Errorf("set up node informer: %w", err)
	}
	var wg sync.WaitGroup
	defer wg.Wait()
	wg.Go(func() { informer.RunWithContext(ctx) })
	if cache.WaitForCacheSync(ctx.Done(), registration.HasSynced) {
		handler.synced()
	}
	<-ctx.Done()
	return ctx.Err()
}

// kubeHandler turns the informer's calls into the sink's. The informer calls it
// from one goroutine; synced comes from another.
type kubeHandler struct {
	sink      Sink
	labelKeys []string
	logger    *slog.Logger
	informer  cache.SharedIndexInformer

	mu      sync.Mutex // guards all below
	first   map[string]Node
	started bool
}

// synced ends the first list.
func (h *kubeHandler) synced() {
	h.mu.Lock()
	defer h.mu.Unlock()
	nodes := make([]Node, 0, len(h.first))
	for _, n := range h.first {
		nodes = append(nodes, n)
	}
	slices.SortFunc(nodes, func(a, b Node) int {
		switch {
		case a.Name < b.Name:
			return -1
		case a.Name > b.Name:
			return 1
		}
		return 0
	})
	h.first, h.started = nil, true
	h.sink.Replace(nodes, h.informer.LastSyncResourceVersion())
}

// OnAdd implements cache.ResourceEventHandler.
func (h *kubeHandler) OnAdd(obj any, _ bool) {
	n, ok := obj.(*corev1.Node)
	if !ok {
		h.logger.Error("object of another kind ignored", slog.String("kind", fmt.Sprintf("%T", obj)))
		return
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	value := fromKube(n, h.labelKeys)
	if !h.started {
		if h.first == nil {
			h.first = map[string]Node{}
		}
		h.first[n.Name] = value
		return
	}
	h.sink.Added(value)
}

// OnUpdate implements cache.ResourceEventHandler.
func (h *kubeHandler) OnUpdate(oldObj, newObj any) {
	old, ok := oldObj.(*corev1.Node)
	updated, ok2 := newObj.(*corev1.Node)
	if !ok || !ok2 {
		h.logger.Error("object of another kind ignored", slog.String("kind", fmt.Sprintf("%T", newObj)))
		return
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	fields := Relevant(old, updated, h.labelKeys)
	switch {
	case !h.started:
		h.first[updated.Name] = fromKube(updated, h.labelKeys)
	case fields != 0 || !sameCondition(old, updated):
		h.sink.Updated(fromKube(updated, h.labelKeys), fields)
	}
}

// OnDelete implements cache.ResourceEventHandler; a delete that was noticed on a
// relist comes wrapped (field case B-50).
func (h *kubeHandler) OnDelete(obj any) {
	name := ""
	switch obj := obj.(type) {
	case *corev1.Node:
		if obj != nil {
			name = obj.Name
		}
	case cache.DeletedFinalStateUnknown:
		switch inner := obj.Obj.(type) {
		case nil:
			name = obj.Key
		case *corev1.Node:
			name = obj.Key
		default:
			h.logger.Error("tombstone of another kind ignored", slog.String("kind", fmt.Sprintf("%T", inner)))
		}
	}
	if name == "" {
		h.logger.Error("delete without a node ignored", slog.String("kind", fmt.Sprintf("%T", obj)))
		return
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	if !h.started {
		delete(h.first, name)
		return
	}
	h.sink.Deleted(name)
}

// Census implements Source with a quorum read.
func (k *Kube) Census(ctx context.Context, names []string) (Census, error) {
	found := map[string]Presence{}
	var out Census
	options := metav1.ListOptions{LabelSelector: k.selector, Limit: censusPage}
	for {
		page, err := k.client.CoreV1().Nodes().List(ctx, options)
		if err != nil {
			return Census{}, fmt.Errorf("list nodes by quorum read: %w", err)
		}
		for i := range page.Items {
			n := &page.Items[i]
			out.Total++
			if slices.Contains(names, n.Name) {
				found[n.Name] = Presence{Name: n.Name, UID: string(n.UID), Present: true, PodCIDRs: podCIDRs(n)}
			}
		}
		out.ResourceVersion = page.ResourceVersion
		if options.Continue = page.Continue; options.Continue == "" {
			break
		}
	}
	for _, name := range names {
		presence, ok := found[name]
		if !ok {
			presence.Name = name
		}
		out.Nodes = append(out.Nodes, presence)
	}
	return out, nil
}
