package main

import (
	"bytes"
	"context"
	"encoding/json"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// output is a writer that can be read while it is written.
type output struct {
	mu  sync.Mutex
	buf bytes.Buffer
}

func (o *output) Write(p []byte) (int, error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.buf.Write(p)
}

func (o *output) String() string {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.buf.String()
}

// up runs `waymark up` with the given flags.
func runUp(ctx context.Context, stdout *output, args ...string) error {
	command := upCommand()
	command.SilenceErrors, command.SilenceUsage = true, true
	command.SetArgs(args)
	command.SetOut(stdout)
	command.SetErr(&output{})
	return command.ExecuteContext(ctx)
}

func TestOnceMakesTheRoutes(t *testing.T) {
	stdout := &output{}
	if err := runUp(t.Context(), stdout, "--nodes", "../../testdata/nodes.yaml", "--once", "-o", "json"); err != nil {
		t.Fatal(err)
	}
	var rows []row
	if err := json.Unmarshal([]byte(stdout.String()), &rows); err != nil {
		t.Fatalf("%v: %s", err, stdout)
	}
	want := []row{
		{Node: "node-1", DestinationCIDR: "10.244.1.0/24", Target: "node-1", State: "in-place"},
		{Node: "node-2", DestinationCIDR: "10.244.2.0/24", Target: "node-2", State: "in-place"},
		{Node: "node-3", DestinationCIDR: "10.244.3.0/24", Target: "node-3", State: "in-place"},
	}
	if len(rows) != len(want) {
		t.Fatalf("rows %+v", rows)
	}
	for i := range want {
		if rows[i] != want[i] {
			t.Errorf("row %d is %+v, want %+v", i, rows[i], want[i])
		}
	}
}

func TestOnceFailsWhenARouteCannotBeMade(t *testing.T) {
	stdout := &output{}
	err := runUp(t.Context(), stdout, "--nodes", "../../testdata/nodes.yaml", "--once", "--cluster-cidr", "10.244.0.0/23")
	if err == nil || !strings.Contains(err.Error(), "2 of 3 routes are not in place") || !strings.Contains(stdout.String(), "outside-cluster-cidr") {
		t.Errorf("error %v, output %s", err, stdout)
	}
}

func TestRoutesFollowTheFile(t *testing.T) {
	dir := t.TempDir()
	nodes, state := filepath.Join(dir, "nodes.yaml"), filepath.Join(dir, "routes.json")
	write := func(text string) {
		t.Helper()
		if err := os.WriteFile(nodes, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	node := func(name, cidr string) string {
		return "---\nkind: Node\nmetadata: {name: " + name + ", uid: u-" + name + "}\nspec: {podCIDRs: [" + cidr + "]}\n"
	}
	table := func() string {
		content, _ := os.ReadFile(state)
		var file struct {
			Routes []struct{ Destination, Node string }
		}
		_ = json.Unmarshal(content, &file)
		var rows []string
		for _, r := range file.Routes {
			rows = append(rows, r.Destination+" "+r.Node)
		}
		slices.Sort(rows) // creates run in parallel
		return strings.Join(rows, ", ")
	}
	poll := func(what func() string, fits func(string) bool) {
		t.Helper()
		ticker := time.NewTicker(10 * time.Millisecond)
		defer ticker.Stop()
		for deadline := time.Now().Add(30 * time.Second); !fits(what()); <-ticker.C {
			if time.Now().After(deadline) {
				t.Fatalf("it stays at %q", what())
			}
		}
	}
	expect := func(want string) {
		t.Helper()
		poll(table, func(got string) bool { return got == want })
	}
	write(node("a", "10.244.1.0/24"))
	ctx, stop := context.WithCancel(t.Context())
	stdout, ended := &output{}, make(chan error, 1)
	go func() { ended <- runUp(ctx, stdout, "--nodes", nodes, "--state", state) }()
	expect("10.244.1.0/24 a")
	write(node("a", "10.244.1.0/24") + node("b", "10.244.2.0/24"))
	expect("10.244.1.0/24 a, 10.244.2.0/24 b")
	write("kind: Node\nmetadata: {na") // half-written: nothing is lost
	write(node("b", "10.244.2.0/24"))
	expect("10.244.2.0/24 b")
	write(node("b", "10.244.9.0/24"))
	expect("10.244.9.0/24 b")
	shows := func(text string) func(string) bool {
		return func(screen string) bool { return strings.Contains(screen, text) }
	}
	poll(stdout.String, shows("10.244.9.0/24"))
	write(node("c", "10.244.3.0/24"))
	expect("10.244.3.0/24 c")
	poll(stdout.String, shows("b 10.244.9.0/24  gone"))
	stop()
	if err := <-ended; err != nil {
		t.Errorf("the end: %v", err)
	}
}

func TestBadInputNamesTheFlag(t *testing.T) {
	tests := []struct {
		args     []string
		mentions string
	}{
		{[]string{}, "--kubeconfig"},
		{[]string{"--nodes", "/no/such/file"}, "--nodes"},
		{[]string{"--nodes", "up.go"}, "up.go"},
		{[]string{"--nodes", "../../testdata", "--kubeconfig", "x"}, "--kubeconfig"},
		{[]string{"--nodes", "../../testdata", "--cluster-cidr", ""}, "--cluster-cidr"},
		{[]string{"--nodes", "../../testdata", "--plugin", "nonsense"}, "--plugin"},
		{[]string{"--nodes", "../../testdata", "--output", "xml"}, "--output"},
		{[]string{"--nodes", "../../testdata", "--deletion-guard", "maybe"}, "--deletion-guard"},
		{[]string{"--nodes", "../../testdata", "--write-timeout", "0s"}, "--write-timeout"},
		{[]string{"--nodes", "../../testdata", "--node-selector", "a=b"}, "--node-selector"},
		{[]string{"--kubeconfig", "/no/such/file"}, "--kubeconfig"},
		{[]string{"--kubeconfig", "up.go"}, "--kubeconfig"},
		{[]string{"--no-such-flag"}, "--no-such-flag"},
	}
	for _, test := range tests {
		t.Run(strings.Join(test.args, " "), func(t *testing.T) {
			if err := runUp(t.Context(), &output{}, test.args...); err == nil || !strings.Contains(err.Error(), test.mentions) {
				t.Errorf("error %v does not name %s", err, test.mentions)
			}
		})
	}
}
