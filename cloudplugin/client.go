package cloudplugin

import (
	"context"
	"fmt"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/connectivity"
	healthpb "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/status"

	"github.com/waymark-routes/waymark/internal/elapsed"
	"github.com/waymark-routes/waymark/internal/endpoint"
	routesv1 "github.com/waymark-routes/waymark/proto/waymark/routes/v1"
)

// breakLimit is how long a connection may be away before the route view is void.
const breakLimit = time.Second

// DialOptions tune Dial; the zero value works.
type DialOptions struct {
	AllowInsecure bool
	// IdentityTimeout bounds GetPluginInfo; 0 means 5 s.
	IdentityTimeout time.Duration
	// Extra options, for example the interceptor chain.
	Extra []grpc.DialOption
}

// Client is a connection to a plugin.
type Client struct {
	Identity routesv1.IdentityServiceClient
	Routes   routesv1.RoutesServiceClient

	conn    *grpc.ClientConn
	health  healthpb.HealthClient
	options DialOptions
}

// ClientState is how a plugin is.
type ClientState struct {
	// Healthy: connected, identified and SERVING.
	Healthy bool
	// Reason says why it is not healthy.
	Reason string
	// Info is what the plugin last said of itself; nil before the first answer.
	Info *routesv1.GetPluginInfoResponse
	// NewView: what was known of the plugin's routes is void: it is another
	// instance, or it was away for more than a second.
	NewView bool
}

// IdentityMethods may be retried by middleware; no other method may.
var IdentityMethods = []string{routesv1.IdentityService_GetPluginInfo_FullMethodName}

// Dial makes a client; it connects by itself and does not wait for the plugin.
func Dial(text string, o DialOptions) (*Client, error) {
	at, err := endpoint.Parse(text)
	if err != nil {
		return nil, err
	}
	if o.IdentityTimeout <= 0 {
		o.IdentityTimeout = 5 * time.Second
	}
	conn, err := endpoint.Dial(at, endpoint.DialOptions{AllowInsecure: o.AllowInsecure, Extra: o.Extra})
	if err != nil {
		return nil, err
	}
	return &Client{
		Identity: routesv1.NewIdentityServiceClient(conn),
		Routes:   routesv1.NewRoutesServiceClient(conn),
		health:   healthpb.NewHealthClient(conn),
		conn:     conn, options: o,
	}, nil
}

// Close closes the connection.
func (c *Client) Close() error { return c.conn.Close() }

// Supervise watches the connection and the plugin's health until ctx ends, and
// reports every change. GetPluginInfo is called on every new connection before
// anything else. report is called from this goroutine alone.
func (c *Client) Supervise(ctx context.Context, report func(ClientState)) {
	s := supervision{client: c, report: report}
	for ctx.Err() == nil {
		reason := s.connection(ctx)
		if ctx.Err() != nil {
			return
		}
		s.away(reason)
		// A connection that is up but whose plugin misbehaves is asked again soon.
		if c.conn.GetState() == connectivity.Ready {
			elapsed.Sleep(ctx, time.Second)
		}
	}
}

// supervision is Supervise's state; its goroutine owns it.
type supervision struct {
	client  *Client
	report  func(ClientState)
	last    ClientState
	told    bool
	leftAt  time.Time // since when the plugin is away; zero: it is not
	pending bool      // NewView has to be told with the next healthy state
}

func (s *supervision) tell(state ClientState) {
	if s.told && state.Healthy == s.last.Healthy && state.Reason == s.last.Reason && state.Info == s.last.Info && !state.NewView {
		return
	}
	s.last, s.told = state, true
	s.report(state)
}

func (s *supervision) away(reason string) {
	if s.leftAt.IsZero() {
		s.leftAt = time.Now()
	}
	s.tell(ClientState{Reason: reason, Info: s.last.Info})
}

// connection follows one connection from ready to its end, and says why it ended.
func (s *supervision) connection(ctx context.Context) string {
	conn := s.client.conn
	for state := conn.GetState(); state != connectivity.Ready; state = conn.GetState() {
		if state == connectivity.Idle {
			conn.Connect()
		}
		if state == connectivity.TransientFailure {
			s.away("cannot connect to the plugin at " + conn.Target())
		}
		if !conn.WaitForStateChange(ctx, state) {
			return "stopped"
		}
	}
	identity, cancel := context.WithTimeout(ctx, s.client.options.IdentityTimeout)
	info, err := s.client.Identity.GetPluginInfo(identity, &routesv1.GetPluginInfoRequest{})
	cancel()
	switch {
	case err != nil:
		return fmt.Sprintf("ask the plugin who it is: %v", err)
	case info.GetName() == "" || info.GetInstanceId() == "":
		return "the plugin gives no name or no instance id"
	}
	if s.last.Info == nil || s.last.Info.GetInstanceId() != info.GetInstanceId() || (!s.leftAt.IsZero() && time.Since(s.leftAt) > breakLimit) {
		s.pending = true
	}
	s.last.Info = info
	return s.watchHealth(ctx, info)
}

// watchHealth follows grpc.health.v1 until the connection ends.
func (s *supervision) watchHealth(ctx context.Context, info *routesv1.GetPluginInfoResponse) string {
	watching, cancel := context.WithCancel(ctx)
	defer cancel()
	stream, err := s.client.health.Watch(watching, &healthpb.HealthCheckRequest{})
	if err != nil {
		return fmt.Sprintf("watch the plugin's health: %v", err)
	}
	for {
		answer, err := stream.Recv()
		switch {
		case status.Code(err) == codes.Unimplemented:
			return s.pollHealth(ctx, info)
		case err != nil:
			return fmt.Sprintf("connection to the plugin: %v", err)
		}
		s.health(info, answer.GetStatus())
	}
}

// pollHealth stands in for plugins that do not serve Health.Watch; one that
// serves no health at all is healthy while it is connected.
func (s *supervision) pollHealth(ctx context.Context, info *routesv1.GetPluginInfoResponse) string {
	for {
		checking, cancel := context.WithTimeout(ctx, s.client.options.IdentityTimeout)
		answer, err := s.client.health.Check(checking, &healthpb.HealthCheckRequest{})
		cancel()
		switch {
		case status.Code(err) == codes.Unimplemented:
			s.health(info, healthpb.HealthCheckResponse_SERVING)
		case err != nil:
			return fmt.Sprintf("check the plugin's health: %v", err)
		default:
			s.health(info, answer.GetStatus())
		}
		waiting, cancel := context.WithTimeout(ctx, healthPeriod)
		changed := s.client.conn.WaitForStateChange(waiting, connectivity.Ready)
		cancel()
		if changed || ctx.Err() != nil {
			return "the connection to the plugin ended"
		}
	}
}

func (s *supervision) health(info *routesv1.GetPluginInfoResponse, st healthpb.HealthCheckResponse_ServingStatus) {
	if st != healthpb.HealthCheckResponse_SERVING {
		s.away("the plugin says " + st.String())
		return
	}
	s.leftAt = time.Time{}
	s.tell(ClientState{Healthy: true, Info: info, NewView: s.pending})
	s.pending = false
}
