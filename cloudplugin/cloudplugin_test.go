package cloudplugin_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"
	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/waymark-routes/waymark/cloudplugin"
	"github.com/waymark-routes/waymark/internal/rpc"
	routesv1 "github.com/waymark-routes/waymark/proto/waymark/routes/v1"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// stub is a plugin whose answers are set by the test.
type stub struct {
	routes  []cloudplugin.Route
	err     error
	release chan struct{} // CreateRoute waits for it where it is set
	entered chan struct{}
}

func (s *stub) Info() cloudplugin.Info { return cloudplugin.Info{Name: "stub"} }

func (s *stub) ListRoutes(context.Context, cloudplugin.Cluster) (cloudplugin.RouteList, error) {
	return cloudplugin.RouteList{Tables: []string{"t"}, Routes: s.routes}, s.err
}

func (s *stub) CreateRoute(ctx context.Context, _ cloudplugin.CreateRequest) (cloudplugin.Outcome, error) {
	if s.release != nil {
		close(s.entered)
		select {
		case <-s.release:
		case <-ctx.Done():
			return cloudplugin.Outcome{}, ctx.Err()
		}
	}
	return cloudplugin.Outcome{}, s.err
}

func (s *stub) DeleteRoute(context.Context, cloudplugin.DeleteRequest) (cloudplugin.Outcome, error) {
	return cloudplugin.Outcome{Kind: cloudplugin.Unchanged}, s.err
}

func socket(t *testing.T) string {
	t.Helper()
	dir, err := os.MkdirTemp("", "wm")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	return "unix://" + filepath.Join(dir, "p.sock")
}

// serve serves a plugin; the returned function stops it and says how long that
// took.
func serve(t *testing.T, at string, plugin cloudplugin.Plugin) (stop func() time.Duration) {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	ready, ended := make(chan struct{}), make(chan error, 1)
	go func() {
		ended <- cloudplugin.Serve(ctx, plugin, cloudplugin.ServeOptions{Listen: at, Ready: func() { close(ready) }})
	}()
	select {
	case <-ready:
	case err := <-ended:
		t.Fatalf("serve: %v", err)
	}
	var once sync.Once
	var took time.Duration
	stop = func() time.Duration {
		once.Do(func() {
			began := time.Now()
			cancel()
			if err := <-ended; err != nil {
				t.Errorf("serve: %v", err)
			}
			took = time.Since(began)
		})
		return took
	}
	t.Cleanup(func() { stop() })
	return stop
}

func dial(t *testing.T, at string) *cloudplugin.Client {
	t.Helper()
	client, err := cloudplugin.Dial(at, cloudplugin.DialOptions{Extra: rpc.ClientOptions(rpc.ClientChain{RetryMethods: cloudplugin.IdentityMethods})})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = client.Close() })
	return client
}

// supervise runs Supervise and returns its reports.
func supervise(t *testing.T, client *cloudplugin.Client) <-chan cloudplugin.ClientState {
	t.Helper()
	states := make(chan cloudplugin.ClientState, 100)
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan struct{})
	go func() {
		client.Supervise(ctx, func(s cloudplugin.ClientState) { states <- s })
		close(ended)
	}()
	t.Cleanup(func() { cancel(); <-ended })
	return states
}

// until waits for a state that fits.
func until(t *testing.T, states <-chan cloudplugin.ClientState, what string, fits func(cloudplugin.ClientState) bool) cloudplugin.ClientState {
	t.Helper()
	deadline := time.After(10 * time.Second)
	for {
		select {
		case state := <-states:
			if fits(state) {
				return state
			}
		case <-deadline:
			t.Fatalf("%s: not within 10 s", what)
		}
	}
}

func healthy(s cloudplugin.ClientState) bool { return s.Healthy }
func away(s cloudplugin.ClientState) bool    { return !s.Healthy }

func TestB57PluginRestartIsNoticedAndVoidsTheView(t *testing.T) {
	at := socket(t)
	client := dial(t, at)
	states := supervise(t, client)
	first := until(t, states, "away at the start", away)
	if first.Reason == "" {
		t.Error("no reason is given")
	}
	stop := serve(t, at, &stub{})
	one := until(t, states, "healthy", healthy)
	if !one.NewView || one.Info.GetName() != "stub" {
		t.Errorf("the first state is %+v", one)
	}
	stop()
	until(t, states, "away after the stop", away)
	began := time.Now()
	serve(t, at, &stub{})
	two := until(t, states, "healthy again", healthy)
	if took := time.Since(began); took > 2*time.Second {
		t.Errorf("back after %v", took)
	}
	if !two.NewView || two.Info.GetInstanceId() == one.Info.GetInstanceId() {
		t.Error("another instance does not void the view")
	}
}

func TestB60StopDoesNotWaitForHealthWatches(t *testing.T) {
	at := socket(t)
	stop := serve(t, at, &stub{})
	until(t, supervise(t, dial(t, at)), "healthy", healthy)
	if took := stop(); took > 2*time.Second {
		t.Errorf("the stop took %v", took)
	}
}

func TestStopLetsAWriteEnd(t *testing.T) {
	at := socket(t)
	plugin := &stub{release: make(chan struct{}), entered: make(chan struct{})}
	stop := serve(t, at, plugin)
	client := dial(t, at)
	result := make(chan error, 1)
	go func() {
		_, err := client.Routes.CreateRoute(t.Context(), create())
		result <- err
	}()
	<-plugin.entered
	stopped := make(chan struct{})
	go func() { stop(); close(stopped) }()
	close(plugin.release)
	if err := <-result; err != nil {
		t.Errorf("a write that was under way failed: %v", err)
	}
	<-stopped
}

func create() *routesv1.CreateRouteRequest {
	return &routesv1.CreateRouteRequest{
		Context: &routesv1.WriteContext{ClusterName: "c"}, Destination: "10.244.1.0/24", Node: &routesv1.TargetNode{Name: "a"},
	}
}

func TestErrorsCarryCodeAndDetails(t *testing.T) {
	tests := []struct {
		err    error
		code   codes.Code
		detail func(any) bool
	}{
		{cloudplugin.Throttled(30*time.Second, "slow down"), codes.ResourceExhausted, func(d any) bool {
			retry, ok := d.(*errdetails.RetryInfo)
			return ok && retry.GetRetryDelay().AsDuration() == 30*time.Second
		}},
		{cloudplugin.Throttled(0, "slow down"), codes.ResourceExhausted, nil},
		{cloudplugin.QuotaExceeded("table", "full"), codes.ResourceExhausted, func(d any) bool {
			quota, ok := d.(*errdetails.QuotaFailure)
			return ok && quota.GetViolations()[0].GetSubject() == "table"
		}},
		{cloudplugin.Conflict("10.244.1.0/24", "gw", "taken"), codes.AlreadyExists, func(d any) bool {
			resource, ok := d.(*errdetails.ResourceInfo)
			return ok && resource.GetOwner() == "gw"
		}},
		{cloudplugin.TargetNotFound("x"), codes.NotFound, nil},
		{cloudplugin.NotReady("x"), codes.FailedPrecondition, nil},
		{cloudplugin.Busy("x"), codes.Aborted, nil},
		{cloudplugin.Refused("x"), codes.InvalidArgument, nil},
		{cloudplugin.Unavailable("x"), codes.Unavailable, nil},
		{cloudplugin.Denied("x"), codes.PermissionDenied, nil},
		{cloudplugin.NotServed("x"), codes.Unimplemented, nil},
		{errors.New("whatever"), codes.Unknown, nil},
		{fmt.Errorf("create: %w", cloudplugin.Busy("x")), codes.Aborted, nil},
		{fmt.Errorf("create: %w", context.DeadlineExceeded), codes.DeadlineExceeded, nil},
	}
	at := socket(t)
	plugin := &stub{}
	serve(t, at, plugin)
	client := dial(t, at)
	for _, test := range tests {
		t.Run(test.err.Error(), func(t *testing.T) {
			plugin.err = test.err
			_, err := client.Routes.CreateRoute(t.Context(), create())
			st := status.Convert(err)
			if st.Code() != test.code {
				t.Fatalf("code %v, want %v", st.Code(), test.code)
			}
			if test.detail != nil && (len(st.Details()) != 1 || !test.detail(st.Details()[0])) {
				t.Errorf("details %v", st.Details())
			}
		})
	}
}

func TestB59LargeListsArriveWhole(t *testing.T) {
	at := socket(t)
	plugin := &stub{}
	for i := range 30_000 {
		plugin.routes = append(plugin.routes, cloudplugin.Route{
			ID: fmt.Sprint(i), Destination: fmt.Sprintf("10.%d.%d.0/24", i/256, i%256), Target: cloudplugin.Target{Kind: cloudplugin.TargetNodeName, Value: "node"},
			TargetAddresses: []cloudplugin.NodeAddress{{Type: "InternalIP", Address: "192.0.2.1"}, {Type: "ExternalIP", Address: "198.51.100.1"}, {Type: "Hostname", Address: "a-rather-long-name-of-a-node.example.org"}},
		})
	}
	serve(t, at, plugin)
	stream, err := dial(t, at).Routes.ListRoutes(t.Context(), &routesv1.ListRoutesRequest{ClusterName: "c"})
	if err != nil {
		t.Fatal(err)
	}
	rows, size := 0, 0
	for {
		chunk, err := stream.Recv()
		if err != nil {
			if rows != 30_000 {
				t.Errorf("%d rows came: %v", rows, err)
			}
			break
		}
		rows += len(chunk.GetRoutes())
		for _, r := range chunk.GetRoutes() {
			size += len(r.String())
		}
	}
	if size < 4<<20 {
		t.Errorf("the list has only %d bytes: it proves nothing", size)
	}
}

func TestRequestsAreChecked(t *testing.T) {
	at := socket(t)
	serve(t, at, &stub{})
	client := dial(t, at)
	tests := map[string]func(*routesv1.CreateRouteRequest){
		"context.cluster_name": func(r *routesv1.CreateRouteRequest) { r.Context = nil },
		"destination":          func(r *routesv1.CreateRouteRequest) { r.Destination = "not-a-cidr" },
		"node.name":            func(r *routesv1.CreateRouteRequest) { r.Node = nil },
	}
	for field, breakIt := range tests {
		request := create()
		breakIt(request)
		_, err := client.Routes.CreateRoute(t.Context(), request)
		if st := status.Convert(err); st.Code() != codes.InvalidArgument || st.Message()[:len(field)] != field {
			t.Errorf("%s: %v", field, err)
		}
	}
}

func TestUndeclaredAbilitiesAreUnimplemented(t *testing.T) {
	at := socket(t)
	serve(t, at, &stub{})
	client := dial(t, at)
	info, err := client.Identity.GetPluginInfo(t.Context(), &routesv1.GetPluginInfoRequest{})
	if err != nil || info.GetCapabilities().GetReplace() || info.GetCapabilities().GetBatch() || info.GetCapabilities().GetWatch() {
		t.Errorf("capabilities %v, %v", info.GetCapabilities(), err)
	}
	if _, err := client.Routes.ReplaceRoute(t.Context(), &routesv1.ReplaceRouteRequest{}); status.Code(err) != codes.Unimplemented {
		t.Errorf("ReplaceRoute: %v", err)
	}
}

func TestRoutesSurviveTheWire(t *testing.T) {
	route := cloudplugin.Route{
		ID: "1", Name: "n", Table: "t", Destination: "FD00::/64", Target: cloudplugin.Target{Kind: cloudplugin.TargetAddress, Value: "192.0.2.1"},
		State: cloudplugin.Blackhole, TargetAddresses: []cloudplugin.NodeAddress{}, Priority: 7, Origin: "o", ETag: "e", Ownership: cloudplugin.Foreign, Problem: "p",
	}
	if got := cloudplugin.RouteFromProto(route.Proto()); fmt.Sprintf("%#v", got) != fmt.Sprintf("%#v", route) {
		t.Errorf("got %#v, want %#v", got, route)
	}
}
