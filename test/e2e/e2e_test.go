// Package e2e runs Waymark's real binaries against a real kube-apiserver with
// RBAC on and the real node-ipam controller. `make e2e` builds what it needs.
package e2e

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	utilyaml "k8s.io/apimachinery/pkg/util/yaml"
	"k8s.io/client-go/dynamic"

	"github.com/waymark-routes/waymark/cloudplugin/memory"
	"github.com/waymark-routes/waymark/test/e2e/cluster"
	"github.com/waymark-routes/waymark/test/e2e/process"
)

// namespace is the one of the shipped manifests.
const namespace = "waymark-system"

// shipped reads the objects of the kustomize base.
func shipped(t *testing.T) []unstructured.Unstructured {
	t.Helper()
	var objects []unstructured.Unstructured
	for _, file := range []string{"namespace.yaml", "rbac.yaml", "deployment.yaml"} {
		content, err := os.ReadFile(filepath.Join("../../deploy/kustomize/base", file))
		if err != nil {
			t.Fatal(err)
		}
		reader := utilyaml.NewYAMLReader(bufio.NewReader(bytes.NewReader(content)))
		for {
			document, err := reader.Read()
			if errors.Is(err, io.EOF) {
				break
			}
			if err != nil {
				t.Fatal(err)
			}
			var object unstructured.Unstructured
			if err := utilyaml.Unmarshal(document, &object.Object); err != nil {
				t.Fatalf("%s: %v", file, err)
			}
			if object.Object != nil {
				objects = append(objects, object)
			}
		}
	}
	return objects
}

// apply creates the shipped objects, with strict field validation; the Deployment
// only as a dry run, since nothing here runs pods.
func apply(t *testing.T, c *cluster.Cluster) {
	t.Helper()
	client, err := dynamic.NewForConfig(c.Config)
	if err != nil {
		t.Fatal(err)
	}
	resources := map[string]string{
		"Namespace": "namespaces", "ServiceAccount": "serviceaccounts", "ClusterRole": "clusterroles", "ClusterRoleBinding": "clusterrolebindings",
		"Role": "roles", "RoleBinding": "rolebindings", "Deployment": "deployments",
	}
	for _, object := range shipped(t) {
		kind := object.GroupVersionKind()
		options := metav1.CreateOptions{FieldValidation: metav1.FieldValidationStrict}
		if kind.Kind == "Deployment" {
			options.DryRun = []string{metav1.DryRunAll}
		}
		resource := client.Resource(schema.GroupVersionResource{Group: kind.Group, Version: kind.Version, Resource: resources[kind.Kind]})
		var at dynamic.ResourceInterface = resource
		if object.GetNamespace() != "" {
			at = resource.Namespace(object.GetNamespace())
		}
		if _, err := at.Create(t.Context(), &object, options); err != nil {
			t.Fatalf("create %s %s: %v", kind.Kind, object.GetName(), err)
		}
	}
}

// pod is one pod's three processes on sockets of their own.
type pod struct {
	t                            *testing.T // owns the processes, also those started in subtests
	name, dir, state, kubeconfig string
	pluginArgs                   []string
	watcherHTTP, reconcilerHTTP  string
	plugin, reconciler, watcher  *process.Process
	watcherArgs, reconcilerArgs  []string
}

// newPod prepares a pod; pods share the plugin's state file where state is given.
func newPod(t *testing.T, c *cluster.Cluster, name string) *pod {
	t.Helper()
	dir, err := os.MkdirTemp("", "wm") // short: a socket's path is limited
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	return &pod{
		t: t, name: name, dir: dir, state: filepath.Join(dir, "routes.json"),
		kubeconfig:  c.Kubeconfig(t, c.ServiceAccountToken(t, namespace, "waymark")),
		watcherHTTP: process.FreeAddress(t), reconcilerHTTP: process.FreeAddress(t),
	}
}

func (p *pod) socket(name string) string { return "unix://" + filepath.Join(p.dir, name+".sock") }

func (p *pod) startPlugin() {
	p.t.Helper()
	p.plugin = process.Start(p.t, cluster.Binary(p.t, "waymark-plugin-memory"), p.name+"-plugin",
		append([]string{"--listen", p.socket("plugin"), "--state", p.state, "--http-address", ""}, p.pluginArgs...)...)
}

func (p *pod) startReconciler() {
	p.t.Helper()
	p.reconciler = process.Start(p.t, cluster.Binary(p.t, "waymark-reconciler"), p.name+"-reconciler",
		append([]string{
			"--listen", p.socket("reconciler"), "--status-listen", p.socket("status"), "--plugin-endpoint", p.socket("plugin"),
			"--http-address", p.reconcilerHTTP, "--log-format", "text",
		}, p.reconcilerArgs...)...)
}

func (p *pod) startWatcher() {
	p.t.Helper()
	p.watcher = process.Start(p.t, cluster.Binary(p.t, "waymark-watcher"), p.name+"-watcher",
		append([]string{
			"--kubeconfig", p.kubeconfig, "--cluster-cidr", cluster.ClusterCIDR, "--reconciler-endpoint", p.socket("reconciler"),
			"--control-socket", p.socket("watcher"), "--leader-elect-resource-namespace", namespace, "--http-address", p.watcherHTTP,
			"--log-format", "text",
		}, p.watcherArgs...)...)
}

func (p *pod) start() {
	p.t.Helper()
	p.startPlugin()
	p.startReconciler()
	p.startWatcher()
}

func (p *pod) ready(t *testing.T) {
	t.Helper()
	process.Eventually(t, 30*time.Second, p.name+" is ready", func() error {
		code, body, err := process.Get(p.watcherHTTP, "/readyz")
		if err == nil && code != 200 {
			err = errors.New(body)
		}
		return err
	})
}

// routes reads the plugin's table: destination to row.
func (p *pod) routes(t *testing.T) map[string]memory.Row {
	t.Helper()
	content, err := os.ReadFile(p.state)
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	if err != nil {
		t.Fatal(err)
	}
	var table struct{ Routes []memory.Row }
	if err := json.Unmarshal(content, &table); err != nil {
		t.Fatal(err)
	}
	out := map[string]memory.Row{}
	for _, r := range table.Routes {
		out[r.Destination] = r
	}
	return out
}

// metric reads one series of the reconciler; 0 when it is not there.
func (p *pod) metric(t *testing.T, series string) float64 {
	t.Helper()
	_, body, err := process.Get(p.reconcilerHTTP, "/metrics")
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(body) {
		if rest, ok := strings.CutPrefix(line, series+" "); ok {
			var value float64
			if _, err := fmt.Sscan(rest, &value); err != nil {
				t.Fatalf("%s: %v", line, err)
			}
			return value
		}
	}
	return 0
}

const lists = `waymark_plugin_calls_total{code="OK",method="ListRoutes"}`

// agrees says whether table and conditions are what the cluster's nodes need.
func agrees(t *testing.T, c *cluster.Cluster, p *pod, want int) error {
	t.Helper()
	nodes, err := c.Admin.CoreV1().Nodes().List(t.Context(), metav1.ListOptions{})
	if err != nil {
		return err
	}
	if len(nodes.Items) != want {
		return fmt.Errorf("%d nodes, want %d", len(nodes.Items), want)
	}
	routes := p.routes(t)
	if len(routes) != want {
		return fmt.Errorf("%d routes, want %d", len(routes), want)
	}
	for i := range nodes.Items {
		n := &nodes.Items[i]
		if r := routes[n.Spec.PodCIDR]; r.Node != n.Name {
			return fmt.Errorf("%s of node %s: the route points at %q", n.Spec.PodCIDR, n.Name, r.Node)
		}
		if status := networkUnavailable(n); status != "False/RouteCreated" {
			return fmt.Errorf("node %s: NetworkUnavailable is %q", n.Name, status)
		}
	}
	return nil
}

func networkUnavailable(n *corev1.Node) string {
	for _, condition := range n.Status.Conditions {
		if condition.Type == corev1.NodeNetworkUnavailable {
			return string(condition.Status) + "/" + condition.Reason
		}
	}
	return ""
}

func waitAgrees(t *testing.T, c *cluster.Cluster, p *pod, want int, limit time.Duration, what string) {
	t.Helper()
	took := process.Eventually(t, limit, what, func() error { return agrees(t, c, p, want) })
	t.Logf("%s: %v", what, took.Round(time.Millisecond))
}

func TestNodesGetRoutes(t *testing.T) {
	c := cluster.Start(t)
	apply(t, c)
	p := newPod(t, c, "one")
	p.pluginArgs = []string{"--address-aware"}
	p.start()
	p.ready(t)

	c.Join(t, "node", 1, 20)
	waitAgrees(t, c, p, 20, 20*time.Second, "20 nodes joined")

	c.SetAddress(t, "node-3", "192.0.2.203")
	process.Eventually(t, 15*time.Second, "the route of node-3 carries the new address", func() error {
		for _, r := range p.routes(t) {
			if r.Node == "node-3" && len(r.Addresses) > 0 && r.Addresses[0].Address == "192.0.2.203" {
				return nil
			}
		}
		return errors.New("it carries the old one")
	})

	if err := c.Admin.CoreV1().Nodes().Delete(t.Context(), "node-7", metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	waitAgrees(t, c, p, 19, 15*time.Second, "node-7 deleted")

	t.Run("heartbeats list and send nothing (B-44)", func(t *testing.T) {
		c.Join(t, "beat", 101, 181)
		waitAgrees(t, c, p, 100, 30*time.Second, "81 more nodes joined")
		before := p.metric(t, lists)
		sent := sentEvents(t, p)
		nodes, err := c.Admin.CoreV1().Nodes().List(t.Context(), metav1.ListOptions{})
		if err != nil {
			t.Fatal(err)
		}
		for range 3 {
			for i := range nodes.Items {
				c.Heartbeat(t, nodes.Items[i].Name)
			}
		}
		// A relevant change after them proves that they have passed.
		c.Join(t, "late", 100, 100)
		waitAgrees(t, c, p, 101, 15*time.Second, "a node after the heartbeats")
		// At most: one for the late node, one that verifies earlier writes.
		if now := p.metric(t, lists); now > before+2 {
			t.Errorf("heartbeats caused lists: %v before, %v after", before, now)
		}
		// The late node is added, gets its CIDR and its addresses.
		if now := sentEvents(t, p); now <= sent || now > sent+4 {
			t.Errorf("heartbeats were sent: %v events before, %v after", sent, now)
		}
	})

	t.Run("the API server goes away and comes back", func(t *testing.T) {
		c.StopAPIServer()
		if !p.watcher.Running() || !p.reconciler.Running() {
			t.Fatal("a process ended")
		}
		c.StartAPIServer()
		c.WaitReady(t)
		c.Join(t, "back", 190, 190)
		waitAgrees(t, c, p, 102, 60*time.Second, "a node after the API server's return")
	})

	for _, victim := range []string{"plugin", "reconciler", "watcher"} {
		t.Run("SIGKILL "+victim, func(t *testing.T) {
			switch victim {
			case "plugin":
				p.plugin.Kill()
				p.startPlugin()
			case "reconciler":
				p.reconciler.Kill()
				p.startReconciler()
			case "watcher":
				p.watcher.Kill()
				p.startWatcher()
			}
			nodes, err := c.Admin.CoreV1().Nodes().List(t.Context(), metav1.ListOptions{})
			if err != nil {
				t.Fatal(err)
			}
			number := 100 + len(nodes.Items)
			c.Join(t, victim, number, number)
			waitAgrees(t, c, p, len(nodes.Items)+1, 60*time.Second, "a node after the kill of the "+victim)
		})
	}
}

func sentEvents(t *testing.T, p *pod) float64 {
	t.Helper()
	_, body, err := process.Get(p.watcherHTTP, "/metrics")
	if err != nil {
		t.Fatal(err)
	}
	var sum float64
	for line := range strings.Lines(body) {
		if strings.HasPrefix(line, "waymark_watcher_events_sent_total") {
			var value float64
			_, _ = fmt.Sscan(line[strings.LastIndex(line, " ")+1:], &value)
			sum += value
		}
	}
	return sum
}

func TestFailingCreateShows(t *testing.T) {
	c := cluster.Start(t)
	apply(t, c)
	p := newPod(t, c, "one")
	// Its folder goes away once it runs: the plugin cannot save, so creates fail.
	p.state = filepath.Join(t.TempDir(), "gone", "routes.json")
	if err := os.Mkdir(filepath.Dir(p.state), 0o700); err != nil {
		t.Fatal(err)
	}
	p.start()
	p.ready(t)
	if err := os.RemoveAll(filepath.Dir(p.state)); err != nil {
		t.Fatal(err)
	}
	c.Join(t, "node", 1, 1)
	process.Eventually(t, 20*time.Second, "NetworkUnavailable is True/NoRouteCreated", func() error {
		n, err := c.Admin.CoreV1().Nodes().Get(t.Context(), "node-1", metav1.GetOptions{})
		if err != nil {
			return err
		}
		if status := networkUnavailable(n); status != "True/NoRouteCreated" {
			return fmt.Errorf("it is %q", status)
		}
		return nil
	})
	kubectl := cluster.Binary(t, "kubectl")
	process.Eventually(t, 20*time.Second, "kubectl describe node shows the event", func() error {
		out, err := process.Output(t, kubectl, "--kubeconfig", c.AdminKubeconfig(t), "describe", "node", "node-1")
		if err != nil {
			return err
		}
		if !strings.Contains(out, "FailedToCreateRoute") {
			return errors.New(out)
		}
		return nil
	})
}

func TestLeadership(t *testing.T) {
	c := cluster.Start(t)
	apply(t, c)
	one, two := newPod(t, c, "one"), newPod(t, c, "two")
	two.state = filepath.Join(two.dir, "routes.json")
	one.start()
	one.ready(t)
	two.start()
	two.ready(t) // a standby with a healthy plugin is ready
	c.Join(t, "node", 1, 3)
	waitAgrees(t, c, one, 3, 20*time.Second, "the first pod works")
	if n := len(two.routes(t)); n != 0 {
		t.Fatalf("the standby wrote %d routes", n)
	}
	t.Run("kubelet's order at a pod's end: the standby leads at once", func(t *testing.T) {
		if code, err := one.plugin.Stop(11 * time.Second); err != nil || code != 0 {
			t.Errorf("plugin: exit code %d, %v", code, err)
		}
		if out, err := process.Output(t, cluster.Binary(t, "waymark-watcher"), "stepdown", "--control-socket", one.socket("watcher")); err != nil {
			t.Errorf("stepdown: %v: %s", err, out)
		}
		began := time.Now()
		if code, err := one.watcher.Stop(6 * time.Second); err != nil || code != 0 {
			t.Errorf("watcher: exit code %d, %v", code, err)
		}
		if code, err := one.reconciler.Stop(10 * time.Second); err != nil || code != 0 {
			t.Errorf("reconciler: exit code %d, %v", code, err)
		}
		waitAgrees(t, c, two, 3, 10*time.Second, "the standby has taken over")
		t.Logf("since the stepdown: %v", time.Since(began).Round(time.Millisecond))
	})
	t.Run("the leader is killed: the other takes over when the Lease has run out", func(t *testing.T) {
		three := newPod(t, c, "three")
		three.start()
		three.ready(t)
		two.watcher.Signal(syscall.SIGKILL)
		c.Join(t, "after", 10, 10)
		waitAgrees(t, c, three, 4, 60*time.Second, "the third pod works")
	})
}

func TestCleanStopReleasesTheLease(t *testing.T) {
	c := cluster.Start(t)
	apply(t, c)
	for _, test := range []struct {
		name           string
		leads          bool // else it is stopped while it may be taking the Lease
		allThreeAtOnce bool
	}{
		{"a leader", true, false},
		{"a leader, all three at once", true, true},
		{"while it takes the Lease", false, false},
		{"while it takes the Lease, all three at once", false, true},
	} {
		t.Run(test.name, func(t *testing.T) {
			p := newPod(t, c, "one")
			p.start()
			p.ready(t)
			if test.leads {
				process.Eventually(t, 30*time.Second, "it leads", func() error {
					if holder(t, c) == "" {
						return errors.New("nobody holds the Lease")
					}
					return nil
				})
			}
			if test.allThreeAtOnce {
				p.plugin.Signal(syscall.SIGTERM)
				p.reconciler.Signal(syscall.SIGTERM)
			}
			if code, err := p.watcher.Stop(8 * time.Second); err != nil || code != 0 {
				t.Errorf("watcher: exit code %d, %v", code, err)
			}
			if name := holder(t, c); name != "" {
				t.Errorf("the Lease is still held by %s", name)
			}
		})
	}
}

// holder is who holds the Lease; empty when nobody does.
func holder(t *testing.T, c *cluster.Cluster) string {
	t.Helper()
	lease, err := c.Admin.CoordinationV1().Leases(namespace).Get(t.Context(), "waymark", metav1.GetOptions{})
	if apierrors.IsNotFound(err) {
		return ""
	}
	if err != nil {
		t.Fatal(err)
	}
	if lease.Spec.HolderIdentity == nil {
		return ""
	}
	return *lease.Spec.HolderIdentity
}

func TestUpAgainstAnAPIServer(t *testing.T) {
	c := cluster.Start(t)
	c.Join(t, "node", 1, 3)
	process.Eventually(t, 20*time.Second, "the nodes have their CIDRs", func() error {
		nodes, err := c.Admin.CoreV1().Nodes().List(t.Context(), metav1.ListOptions{})
		if err != nil {
			return err
		}
		for i := range nodes.Items {
			if nodes.Items[i].Spec.PodCIDR == "" {
				return fmt.Errorf("%s has none", nodes.Items[i].Name)
			}
		}
		return nil
	})
	waymark := cluster.Binary(t, "waymark")
	out, err := process.Output(t, waymark, "up", "--kubeconfig", c.AdminKubeconfig(t), "--cluster-cidr", cluster.ClusterCIDR, "--once", "-o", "json")
	if err != nil || strings.Count(out, `"in-place"`) != 3 {
		t.Errorf("waymark up: %v\n%s", err, out)
	}
	out, err = process.Output(t, waymark, "up", "--kubeconfig", c.Kubeconfig(t, "wrong-token"), "--single-instance", "--leader-elect=false", "--once")
	if err == nil || !strings.Contains(out, "--kubeconfig") || strings.Count(strings.TrimSpace(out), "\n") != 0 {
		t.Errorf("waymark up with a refused token: %v\n%s", err, out)
	}
}

func TestGateOff(t *testing.T) {
	c := cluster.Start(t)
	apply(t, c)
	p := newPod(t, c, "one")
	p.reconcilerArgs = []string{"--feature-gates", "CloudControllerManagerWatchBasedRoutesReconciliation=false", "--route-reconciliation-period", "2s"}
	p.start()
	p.ready(t)
	c.Join(t, "node", 1, 5)
	waitAgrees(t, c, p, 5, 20*time.Second, "five nodes joined, gate off")
	if n := p.metric(t, `route_controller_route_sync_total{outcome="changed",trigger="node_change"}`); n != 0 {
		t.Errorf("%v passes were triggered by node changes", n)
	}
}

func TestShippedRoleIsEnoughAndNoMore(t *testing.T) {
	c := cluster.Start(t)
	apply(t, c)
	c.Join(t, "node", 1, 1)
	client := c.Client(t, c.ServiceAccountToken(t, namespace, "waymark"))
	forbidden := map[string]error{}
	_, forbidden["list secrets"] = client.CoreV1().Secrets(namespace).List(t.Context(), metav1.ListOptions{})
	_, forbidden["list pods"] = client.CoreV1().Pods(namespace).List(t.Context(), metav1.ListOptions{})
	_, forbidden["read another namespace"] = client.CoreV1().Namespaces().Get(t.Context(), "default", metav1.GetOptions{})
	forbidden["delete a node"] = client.CoreV1().Nodes().Delete(t.Context(), "node-1", metav1.DeleteOptions{})
	_, forbidden["patch a node's spec"] = client.CoreV1().Nodes().Patch(t.Context(), "node-1", "application/merge-patch+json", []byte(`{"spec":{"unschedulable":true}}`), metav1.PatchOptions{})
	_, forbidden["read a Lease elsewhere"] = client.CoordinationV1().Leases("kube-system").Get(t.Context(), "waymark", metav1.GetOptions{})
	for what, err := range forbidden {
		if !apierrors.IsForbidden(err) {
			t.Errorf("%s: %v, want it forbidden", what, err)
		}
	}
}
