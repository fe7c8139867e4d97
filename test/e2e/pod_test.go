package e2e

import (
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"sigs.k8s.io/yaml"

	"github.com/waymark-routes/waymark/test/e2e/cluster"
	"github.com/waymark-routes/waymark/test/e2e/process"
)

// containersConf suits a machine without cgroup delegation.
const containersConf = `[containers]
default_ulimits = ["nofile=1024:1024", "nproc=1024:1024"]
[engine]
runtime = "runc"
`

const podUser = 65532

// TestPod builds the images and runs the shipped pod with podman against a real
// API server: as the non-root user, with the read-only root, with the shipped
// role. Podman knows no native sidecars and no projected tokens: they become plain
// containers and a host path.
func TestPod(t *testing.T) {
	for _, tool := range []string{"podman", "runc", "catatonit"} {
		if _, err := exec.LookPath(tool); err != nil {
			t.Fatalf("%s is missing: `make e2e` installs it", tool)
		}
	}
	conf := filepath.Join(t.TempDir(), "containers.conf")
	if err := os.WriteFile(conf, []byte(containersConf), 0o600); err != nil {
		t.Fatal(err)
	}
	t.Setenv("CONTAINERS_CONF", conf)
	if out, err := process.Output(t, "../../deploy/images/build.sh"); err != nil {
		t.Fatalf("build images: %v\n%s", err, out)
	}
	c := cluster.Start(t)
	apply(t, c)
	manifest := renderPod(t, c)
	down := func() {
		out, err := exec.Command("podman", "play", "kube", "--down", manifest).CombinedOutput() //nolint:noctx // also after the test's context
		if err != nil {
			t.Logf("podman play kube --down: %v\n%s", err, out)
		}
	}
	down() // what an earlier, killed run left
	t.Cleanup(func() {
		if t.Failed() {
			for _, name := range []string{"watcher", "reconciler", "plugin"} {
				out, _ := exec.Command("podman", "logs", "--tail", "30", "waymark-"+name).CombinedOutput() //nolint:noctx // also after the test's context
				t.Logf("%s:\n%s", name, out)
			}
		}
		down()
	})
	if out, err := process.Output(t, "podman", "play", "kube", "--network", "host", "--build=false", manifest); err != nil {
		t.Fatalf("podman play kube: %v\n%s", err, out)
	}
	for _, name := range []string{"watcher", "reconciler", "plugin"} {
		out, err := process.Output(t, "podman", "inspect", "--format", "{{.HostConfig.ReadonlyRootfs}} {{.Config.User}} {{.EffectiveCaps}}", "waymark-"+name)
		if want := fmt.Sprintf("true %d:%d []", podUser, podUser); err != nil || strings.TrimSpace(out) != want {
			t.Errorf("%s runs as %q, %v; want %q", name, strings.TrimSpace(out), err, want)
		}
	}
	process.Eventually(t, 60*time.Second, "the pod is ready", func() error {
		code, body, err := process.Get("127.0.0.1:10281", "/readyz")
		if err == nil && code != 200 {
			err = fmt.Errorf("%s", body)
		}
		return err
	})
	c.Join(t, "node", 1, 5)
	process.Eventually(t, 30*time.Second, "five nodes are routed", func() error {
		nodes, err := c.Admin.CoreV1().Nodes().List(t.Context(), metav1.ListOptions{})
		if err != nil {
			return err
		}
		for i := range nodes.Items {
			if status := networkUnavailable(&nodes.Items[i]); status != "False/RouteCreated" {
				return fmt.Errorf("%s: %q", nodes.Items[i].Name, status)
			}
		}
		return nil
	})
	// As kubelet does: the plugin first, then the watcher's preStop, then SIGTERM.
	for _, step := range [][]string{
		{"stop", "--time", "12", "waymark-plugin"},
		{"exec", "waymark-watcher", "/waymark-watcher", "stepdown"},
	} {
		if out, err := process.Output(t, "podman", step...); err != nil {
			t.Errorf("podman %v: %v\n%s", step, err, out)
		}
	}
	if name := holder(t, c); name != "" {
		t.Errorf("the Lease is still held by %s after the stepdown", name)
	}
	for _, name := range []string{"watcher", "reconciler", "plugin"} {
		if out, err := process.Output(t, "podman", "stop", "--time", "12", "waymark-"+name); err != nil {
			t.Errorf("podman stop %s: %v\n%s", name, err, out)
		}
		out, err := process.Output(t, "podman", "inspect", "--format", "{{.State.ExitCode}}", "waymark-"+name)
		if err != nil || strings.TrimSpace(out) != "0" {
			t.Errorf("%s ended with exit code %s, %v", name, strings.TrimSpace(out), err)
		}
	}
}

// renderPod turns the shipped Deployment into a pod for podman.
func renderPod(t *testing.T, c *cluster.Cluster) string {
	t.Helper()
	var spec map[string]any
	for _, object := range shipped(t) {
		if object.GetKind() == "Deployment" {
			spec, _, _ = unstructured.NestedMap(object.Object, "spec", "template", "spec")
		}
	}
	dir := t.TempDir()
	sockets, token := hostFolder(t, dir, "sockets"), hostFolder(t, dir, "token")
	files := map[string]string{"token": c.ServiceAccountToken(t, namespace, "waymark"), "namespace": namespace}
	ca, err := os.ReadFile(c.CAFile())
	if err != nil {
		t.Fatal(err)
	}
	files["ca.crt"] = string(ca)
	for name, content := range files {
		path := filepath.Join(token, name)
		if err := os.WriteFile(path, []byte(content), 0o400); err != nil {
			t.Fatal(err)
		}
		if err := os.Chown(path, podUser, podUser); err != nil {
			t.Fatal(err)
		}
	}
	host, port, _ := net.SplitHostPort(strings.TrimPrefix(c.Config.Host, "https://"))
	var containers []any
	for _, list := range []string{"initContainers", "containers"} {
		for _, each := range spec[list].([]any) {
			container := each.(map[string]any)
			for _, unknown := range []string{"ports", "restartPolicy", "startupProbe", "livenessProbe", "readinessProbe", "lifecycle", "resources"} {
				delete(container, unknown)
			}
			container["image"] = "localhost/" + container["image"].(string) + ":dev"
			container["imagePullPolicy"] = "Never"
			container["securityContext"].(map[string]any)["runAsUser"] = podUser
			container["securityContext"].(map[string]any)["runAsGroup"] = podUser
			container["env"] = []any{
				map[string]any{"name": "KUBERNETES_SERVICE_HOST", "value": host},
				map[string]any{"name": "KUBERNETES_SERVICE_PORT", "value": port},
			}
			containers = append(containers, container)
		}
	}
	pod := map[string]any{
		"apiVersion": "v1", "kind": "Pod", "metadata": map[string]any{"name": "waymark"},
		"spec": map[string]any{
			"hostNetwork": true, "restartPolicy": "Never", "containers": containers,
			"volumes": []any{
				map[string]any{"name": "sockets", "hostPath": map[string]any{"path": sockets}},
				map[string]any{"name": "token", "hostPath": map[string]any{"path": token}},
			},
		},
	}
	content, err := yaml.Marshal(pod)
	if err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(dir, "pod.yaml")
	if err := os.WriteFile(path, content, 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

// hostFolder makes a folder that belongs to the pod's user.
func hostFolder(t *testing.T, dir, name string) string {
	t.Helper()
	path := filepath.Join(dir, name)
	if err := os.Mkdir(path, 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.Chown(path, podUser, podUser); err != nil {
		t.Fatalf("the pod test runs as root: %v", err)
	}
	// The folders above are made by the test framework for its own user alone.
	for up := dir; up != os.TempDir() && up != "/"; up = filepath.Dir(up) {
		if err := os.Chmod(up, 0o755); err != nil { //nolint:gosec // must be passable
			t.Fatal(err)
		}
	}
	return path
}
