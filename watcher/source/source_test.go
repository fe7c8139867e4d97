package source

import (
	"context"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/tools/cache"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// recorder is a sink that writes down what it is told.
type recorder struct {
	mu  sync.Mutex
	log []string
	up  chan struct{}
}

func newRecorder() *recorder { return &recorder{up: make(chan struct{}, 100)} }

func (r *recorder) add(format string, args ...any) {
	r.mu.Lock()
	r.log = append(r.log, fmt.Sprintf(format, args...))
	r.mu.Unlock()
	r.up <- struct{}{}
}

func (r *recorder) Replace(nodes []Node, _ string) {
	var names []string
	for _, n := range nodes {
		names = append(names, n.Name)
	}
	r.add("snapshot %s", strings.Join(names, " "))
}
func (r *recorder) Added(n Node)                 { r.add("added %s", n.Name) }
func (r *recorder) Updated(n Node, fields Field) { r.add("updated %s %d", n.Name, fields) }
func (r *recorder) Deleted(name string)          { r.add("deleted %s", name) }

func (r *recorder) take(t *testing.T) string {
	t.Helper()
	select {
	case <-r.up:
	case <-time.After(10 * time.Second):
		t.Fatal("nothing came within 10 s")
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	first := r.log[0]
	r.log = r.log[1:]
	return first
}

func node(name string, change func(*corev1.Node)) *corev1.Node {
	n := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name, UID: "u1", ResourceVersion: "1", Labels: map[string]string{"zone": "a", "other": "x"}}}
	n.Spec.PodCIDRs, n.Spec.PodCIDR, n.Spec.ProviderID = []string{"10.244.1.0/24"}, "10.244.1.0/24", "x://i-1"
	n.Status.Addresses = []corev1.NodeAddress{{Type: corev1.NodeInternalIP, Address: "192.0.2.1"}}
	n.Status.Conditions = []corev1.NodeCondition{{Type: corev1.NodeReady, Status: corev1.ConditionTrue}}
	if change != nil {
		change(n)
	}
	return n
}

func TestS6RelevantFields(t *testing.T) {
	tests := []struct {
		name   string
		change func(*corev1.Node)
		want   Field
	}{
		{"nothing", nil, 0},
		{"podCIDRs", func(n *corev1.Node) { n.Spec.PodCIDRs = []string{"10.244.2.0/24"} }, FieldPodCIDRs},
		{"podCIDR alone changes nothing", func(n *corev1.Node) { n.Spec.PodCIDR = "10.244.9.0/24" }, 0},
		{"B-04: podCIDRs gone, podCIDR stays", func(n *corev1.Node) { n.Spec.PodCIDRs = nil }, 0},
		{"both gone", func(n *corev1.Node) { n.Spec.PodCIDRs, n.Spec.PodCIDR = nil, "" }, FieldPodCIDRs},
		{"addresses", func(n *corev1.Node) { n.Status.Addresses[0].Address = "192.0.2.2" }, FieldAddresses},
		{"B-10: uid", func(n *corev1.Node) { n.UID = "u2" }, FieldUID},
		{"B-10: providerID", func(n *corev1.Node) { n.Spec.ProviderID = "x://i-2" }, FieldProviderID},
		{"a label that is needed", func(n *corev1.Node) { n.Labels["zone"] = "b" }, FieldLabels},
		{"a label that is needed goes", func(n *corev1.Node) { delete(n.Labels, "zone") }, FieldLabels},
		{"a label that is not needed", func(n *corev1.Node) { n.Labels["other"] = "y" }, 0},
		{"B-44: heartbeat", func(n *corev1.Node) {
			n.ResourceVersion, n.Annotations = "2", map[string]string{"a": "b"}
			n.Status.Conditions[0].LastHeartbeatTime = metav1.Now()
			n.Status.Images = []corev1.ContainerImage{{SizeBytes: 1}}
			n.ManagedFields = []metav1.ManagedFieldsEntry{{Manager: "kubelet"}}
		}, 0},
		{"B-70: cordoned, not ready, being deleted", func(n *corev1.Node) {
			now := metav1.Now()
			n.Spec.Unschedulable, n.DeletionTimestamp = true, &now
			n.Status.Conditions[0].Status = corev1.ConditionUnknown
		}, 0},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			if got := Relevant(node("a", nil), node("a", test.change), []string{"zone"}); got != test.want {
				t.Errorf("Relevant = %b, want %b", got, test.want)
			}
		})
	}
	old, beat := node("a", nil), node("a", func(n *corev1.Node) { n.ResourceVersion = "2" })
	if allocs := testing.AllocsPerRun(100, func() { Relevant(old, beat, nil) }); allocs != 0 {
		t.Errorf("a heartbeat costs %v allocations", allocs)
	}
}

func BenchmarkRelevantHeartbeat(b *testing.B) {
	old, beat := node("a", nil), node("a", func(n *corev1.Node) { n.ResourceVersion = "2" })
	b.ReportAllocs()
	for b.Loop() {
		Relevant(old, beat, nil)
	}
}

func TestB14OnlyWhatIsNeededIsStored(t *testing.T) {
	big := node("a", func(n *corev1.Node) {
		n.Annotations = map[string]string{"a": strings.Repeat("x", 50_000)}
		n.ManagedFields = make([]metav1.ManagedFieldsEntry, 20)
		n.Status.Images = make([]corev1.ContainerImage, 100)
		for range 40 {
			n.Status.Conditions = append(n.Status.Conditions, corev1.NodeCondition{Type: "Other", Message: strings.Repeat("x", 100)})
		}
		n.Status.Conditions = append(n.Status.Conditions, corev1.NodeCondition{Type: corev1.NodeNetworkUnavailable, Status: "True", Reason: "NoRouteCreated", Message: "long"})
	})
	small := trim(big, []string{"zone"})
	if size := small.Size(); size > 400 {
		t.Errorf("%d bytes are kept of %d", size, big.Size())
	}
	got := fromKube(small, []string{"zone"})
	if got.Condition == nil || *got.Condition != (Condition{"True", "NoRouteCreated"}) || got.Labels["zone"] != "a" || len(got.Labels) != 1 || len(got.Addresses) != 1 {
		t.Errorf("lost on the way: %+v", got)
	}
}

func TestB50Tombstones(t *testing.T) {
	tests := []struct {
		name string
		obj  any
		want string // empty: dropped
	}{
		{"node", node("a", nil), "deleted a"},
		{"tombstone with the node", cache.DeletedFinalStateUnknown{Key: "a", Obj: node("a", nil)}, "deleted a"},
		{"tombstone without an object", cache.DeletedFinalStateUnknown{Key: "a"}, "deleted a"},
		{"tombstone of another kind", cache.DeletedFinalStateUnknown{Key: "a", Obj: &corev1.Pod{}}, ""},
		{"nil", nil, ""},
		{"typed nil", (*corev1.Node)(nil), ""},
		{"text", "text", ""},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			r := newRecorder()
			h := &kubeHandler{sink: r, logger: slog.New(slog.DiscardHandler), started: true}
			h.OnDelete(test.obj)
			if got := strings.Join(r.log, ","); got != test.want {
				t.Errorf("got %q, want %q", got, test.want)
			}
		})
	}
}

func manifest(name, cidr string) string {
	return fmt.Sprintf("apiVersion: v1\nkind: Node\nmetadata: {name: %s}\nspec: {podCIDRs: [%s]}\n", name, cidr)
}

func TestFileShapes(t *testing.T) {
	tests := []struct{ name, content, want, mentions string }{
		{name: "one", content: manifest("a", "10.244.1.0/24"), want: "a"},
		{name: "several documents", content: manifest("a", "10.244.1.0/24") + "---\n# comment\n---\n" + manifest("b", "10.244.2.0/24"), want: "a b"},
		{name: "List", content: "kind: List\nitems:\n- {kind: Node, metadata: {name: a}}\n- {kind: Node, metadata: {name: b}}\n", want: "a b"},
		{name: "NodeList as JSON", content: `{"kind":"NodeList","items":[{"metadata":{"name":"a"}}]}`, want: "a"},
		{name: "an empty NodeList is empty", content: "kind: NodeList\nitems: []\n", want: ""},
		{name: "no YAML", content: "\t: [", mentions: "line 1"},
		{name: "empty", content: "", mentions: "no document"},
		{name: "another kind", content: "kind: Pod\n", mentions: `kind: "Pod"`},
		{name: "another kind in a List", content: "kind: List\nitems:\n- {kind: Pod}\n", mentions: "items[0]"},
		{name: "no name", content: "kind: Node\n", mentions: "metadata.name"},
		{name: "wrong type", content: "kind: Node\nmetadata: {name: a}\nspec: {podCIDRs: text}\n", mentions: "spec.podCIDRs"},
		{name: "twice", content: manifest("a", "10.244.1.0/24") + "---\n" + manifest("a", "10.244.1.0/24"), mentions: `"a" stands twice`},
		{name: "second document broken", content: manifest("a", "10.244.1.0/24") + "---\nkind: [\n", mentions: "document 2"},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			path := filepath.Join(t.TempDir(), "nodes.yaml")
			if err := os.WriteFile(path, []byte(test.content), 0o600); err != nil {
				t.Fatal(err)
			}
			f, err := NewFile(path, slog.New(slog.DiscardHandler))
			if test.mentions != "" {
				if err == nil || !strings.Contains(err.Error(), test.mentions) || !strings.Contains(err.Error(), path) {
					t.Fatalf("error %v names not both %s and %q", err, path, test.mentions)
				}
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			nodes, err := f.read()
			if got := strings.Join(sortedNames(nodes), " "); err != nil || got != test.want {
				t.Errorf("read %q, %v; want %q", got, err, test.want)
			}
		})
	}
}

func TestFileFollowsChanges(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "nodes.yaml")
	write := func(content string) {
		t.Helper()
		// As editors do: a new file, then a rename.
		if err := os.WriteFile(path+".new", []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
		if err := os.Rename(path+".new", path); err != nil {
			t.Fatal(err)
		}
	}
	write(manifest("a", "10.244.1.0/24"))
	f, err := NewFile(path, slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	r := newRecorder()
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan struct{})
	go func() { _ = f.Run(ctx, nil, r); close(ended) }()
	defer func() { cancel(); <-ended }()
	expect := func(want ...string) {
		t.Helper()
		for _, line := range want {
			if got := r.take(t); got != line {
				t.Fatalf("got %q, want %q", got, line)
			}
		}
	}
	expect("snapshot a")
	write(manifest("a", "10.244.7.0/24") + "---\n" + manifest("b", "10.244.2.0/24"))
	expect("updated a 1", "added b")
	// Half-written content changes nothing, and is said.
	write("kind: Node\nmetadata: {na")
	deadline := time.Now().Add(10 * time.Second)
	for f.Problem() == nil {
		if time.Now().After(deadline) {
			t.Fatal("no problem is shown")
		}
	}
	if _, err := f.Census(ctx, []string{"a"}); err == nil {
		t.Error("a census is answered from a broken file")
	}
	write(manifest("b", "10.244.2.0/24"))
	expect("deleted a")
	if f.Problem() != nil {
		t.Errorf("the problem stays: %v", f.Problem())
	}
	census, err := f.Census(ctx, []string{"a", "b"})
	if err != nil || census.Total != 1 || census.Nodes[0].Present || !census.Nodes[1].Present || !slices.Equal(census.Nodes[1].PodCIDRs, []string{"10.244.2.0/24"}) {
		t.Errorf("census %+v, %v", census, err)
	}
}
