package memory_test

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/waymark-routes/waymark/cloudplugin"
	"github.com/waymark-routes/waymark/cloudplugin/memory"
)

func plugin(t *testing.T, o memory.Options) *memory.Plugin {
	t.Helper()
	p, err := memory.New(o)
	if err != nil {
		t.Fatal(err)
	}
	return p
}

func create(t *testing.T, p *memory.Plugin, cluster, destination, node string) (cloudplugin.OutcomeKind, error) {
	t.Helper()
	outcome, err := p.CreateRoute(t.Context(), cloudplugin.CreateRequest{
		WriteContext: cloudplugin.WriteContext{Cluster: cloudplugin.Cluster{Name: cluster}}, Destination: destination, Node: cloudplugin.Node{Name: node},
	})
	return outcome.Kind, err
}

func list(t *testing.T, p *memory.Plugin, cluster string) []cloudplugin.Route {
	t.Helper()
	routes, err := p.ListRoutes(t.Context(), cloudplugin.Cluster{Name: cluster})
	if err != nil {
		t.Fatal(err)
	}
	return routes.Routes
}

func TestWritesAreIdempotentAndNeverOverwrite(t *testing.T) {
	p := plugin(t, memory.Options{})
	if kind, err := create(t, p, "c1", "10.244.1.0/24", "a"); kind != cloudplugin.Created || err != nil {
		t.Fatalf("create: %v, %v", kind, err)
	}
	if kind, err := create(t, p, "c1", "10.244.1.5/24", "a"); kind != cloudplugin.Unchanged || err != nil {
		t.Errorf("create again, spelt otherwise: %v, %v", kind, err)
	}
	if _, err := create(t, p, "c1", "10.244.1.0/24", "b"); status.Code(err) != codes.AlreadyExists {
		t.Errorf("create to another node: %v", err)
	}
	if kind, err := create(t, p, "c2", "10.244.1.0/24", "z"); kind != cloudplugin.Created || err != nil {
		t.Errorf("another cluster: %v, %v", kind, err)
	}
	rows := list(t, p, "c1")
	if len(rows) != 1 || rows[0].Target.Value != "a" {
		t.Fatalf("rows %+v", rows)
	}
	request := cloudplugin.DeleteRequest{WriteContext: cloudplugin.WriteContext{Cluster: cloudplugin.Cluster{Name: "c1"}}, Route: rows[0]}
	for i, want := range []cloudplugin.OutcomeKind{cloudplugin.Created, cloudplugin.Unchanged} {
		if outcome, err := p.DeleteRoute(t.Context(), request); outcome.Kind != want || err != nil {
			t.Errorf("delete %d: %v, %v", i+1, outcome.Kind, err)
		}
	}
	if len(list(t, p, "c1")) != 0 || len(list(t, p, "c2")) != 1 {
		t.Error("the delete removed more or less than the listed row")
	}
}

func TestStateSurvivesARestart(t *testing.T) {
	path := filepath.Join(t.TempDir(), "routes.json")
	p := plugin(t, memory.Options{State: path})
	if _, err := create(t, p, "c1", "10.244.1.0/24", "a"); err != nil {
		t.Fatal(err)
	}
	rows := list(t, plugin(t, memory.Options{State: path}), "c1")
	if len(rows) != 1 || rows[0].Destination != "10.244.1.0/24" || rows[0].Target.Value != "a" {
		t.Errorf("after a restart: %+v", rows)
	}
}

func TestBrokenStateFileIsLeftAlone(t *testing.T) {
	path := filepath.Join(t.TempDir(), "routes.json")
	if err := os.WriteFile(path, []byte("{broken"), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := memory.New(memory.Options{State: path}); err == nil || !strings.Contains(err.Error(), path) {
		t.Errorf("error %v does not name the file", err)
	}
	if content, _ := os.ReadFile(path); string(content) != "{broken" {
		t.Errorf("the file is now %q", content)
	}
}

func TestAFailedSaveChangesNothing(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "d")
	if err := os.Mkdir(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	p := plugin(t, memory.Options{State: filepath.Join(dir, "routes.json")})
	if err := os.RemoveAll(dir); err != nil {
		t.Fatal(err)
	}
	if _, err := create(t, p, "c1", "10.244.1.0/24", "a"); err == nil {
		t.Fatal("a create that is not saved succeeds")
	}
	if rows := list(t, p, "c1"); len(rows) != 0 {
		t.Errorf("the table has it all the same: %+v", rows)
	}
}

func TestReplace(t *testing.T) {
	p := plugin(t, memory.Options{AddressAware: true})
	if _, err := create(t, p, "c1", "10.244.1.0/24", "a"); err != nil {
		t.Fatal(err)
	}
	row := list(t, p, "c1")[0]
	request := cloudplugin.ReplaceRequest{
		WriteContext: cloudplugin.WriteContext{Cluster: cloudplugin.Cluster{Name: "c1"}}, Route: row,
		Node: cloudplugin.Node{Name: "b", Addresses: []cloudplugin.NodeAddress{{Type: "InternalIP", Address: "192.0.2.2"}}},
	}
	if _, err := p.ReplaceRoute(t.Context(), request); err != nil {
		t.Fatal(err)
	}
	after := list(t, p, "c1")
	if len(after) != 1 || after[0].Target.Value != "b" || after[0].ID != row.ID || len(after[0].TargetAddresses) != 1 {
		t.Errorf("after the replace: %+v", after)
	}
}
