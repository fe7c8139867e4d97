package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"path/filepath"
	"sync"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"

	"github.com/waymark-routes/waymark/cloudplugin"
	"github.com/waymark-routes/waymark/cloudplugin/memory"
	"github.com/waymark-routes/waymark/internal/endpoint"
	"github.com/waymark-routes/waymark/internal/flags"
	"github.com/waymark-routes/waymark/internal/telemetry"
	statusv1 "github.com/waymark-routes/waymark/proto/waymark/status/v1"
	"github.com/waymark-routes/waymark/reconciler"
	"github.com/waymark-routes/waymark/watcher"
)

// pollPeriod is how often the table is looked at.
const pollPeriod = 200 * time.Millisecond

// up is one run of `waymark up`.
type up struct {
	once          bool
	output        string
	plugin, state string
	process       flags.Process
	watcherFlags  *watcher.Flags
	tuning        *reconciler.Flags
}

func upCommand() *cobra.Command {
	u := &up{}
	command := &cobra.Command{
		Use: "up", Args: cobra.NoArgs,
		Short: "Run watcher, reconciler and a plugin on this machine",
		RunE: func(command *cobra.Command, _ []string) error {
			return u.run(command.Context(), command.OutOrStdout(), command.ErrOrStderr())
		},
	}
	fs := command.Flags()
	fs.SortFlags = false
	fs.BoolVar(&u.once, "once", false, "run until settled, print the table, and exit; non-zero when a route could not be made")
	fs.StringVarP(&u.output, "output", "o", "table", "what --once prints: table or json")
	fs.StringVar(&u.plugin, "plugin", "", "endpoint of a running plugin, in place of the memory plugin")
	fs.StringVar(&u.state, "state", "", "JSON file that keeps the memory plugin's table")
	u.watcherFlags = watcher.RegisterFlags(fs, "10.244.0.0/16")
	u.tuning = reconciler.RegisterFlags(fs)
	u.process.Register(fs, "")
	_ = fs.Lookup("log-level").Value.Set("warn")
	_ = fs.Lookup("log-format").Value.Set("text")
	return command
}

func (u *up) run(ctx context.Context, stdout, stderr io.Writer) (err error) {
	if u.output != "table" && u.output != "json" {
		return flags.Usagef("--output: %q is neither table nor json", u.output)
	}
	logger, err := telemetry.NewLogger(stderr, u.process.LogLevel, u.process.LogFormat)
	if err != nil {
		return err
	}
	var wo watcher.Options
	if err := u.watcherFlags.Apply(&wo, logger); err != nil {
		return err
	}
	var ro reconciler.Options
	if err := u.tuning.Apply(&ro); err != nil {
		return err
	}
	if u.plugin != "" {
		if _, err := endpoint.Parse(u.plugin); err != nil {
			return flags.Usagef("--plugin: %w", err)
		}
	}
	dir, err := os.MkdirTemp("", "waymark-")
	if err != nil {
		return fmt.Errorf("make a folder for the sockets: %w", err)
	}
	defer func() { err = errors.Join(err, os.RemoveAll(dir)) }()
	socket := func(name string) string { return "unix://" + filepath.Join(dir, name+".sock") }

	// Each role gets a context of its own: they end one after the other.
	failed := make(chan error, 3)
	var stops []func()
	role := func(name string, run func(context.Context) error) {
		roleCtx, cancel := context.WithCancel(context.WithoutCancel(ctx))
		var wg sync.WaitGroup
		wg.Go(func() {
			if err := run(roleCtx); err != nil {
				failed <- fmt.Errorf("%s: %w", name, err)
			}
		})
		stops = append(stops, func() { cancel(); wg.Wait() })
	}
	defer func() {
		for i := len(stops) - 1; i >= 0; i-- { // watcher, reconciler, plugin
			stops[i]()
		}
	}()
	ro.PluginEndpoint = u.plugin
	if u.plugin == "" {
		plugin, err := memory.New(memory.Options{State: u.state})
		if err != nil {
			return flags.Usagef("--state: %w", err)
		}
		ro.PluginEndpoint = socket("plugin")
		role("plugin", func(ctx context.Context) error {
			return cloudplugin.Serve(ctx, plugin, cloudplugin.ServeOptions{Listen: ro.PluginEndpoint, Logger: logger.With(slog.String("role", "plugin"))})
		})
	}
	ro.Listen, ro.StatusListen, ro.Logger = socket("reconciler"), socket("status"), logger.With(slog.String("role", "reconciler"))
	shutdown, err := telemetry.SetupTracing(ctx, "waymark-up", u.process.OTLPEndpoint)
	if err != nil {
		return err
	}
	defer func() { _ = shutdown(context.WithoutCancel(ctx)) }()
	ro.HTTPAddress, ro.Registry = u.process.HTTPAddress, telemetry.NewRegistry()
	role("reconciler", func(ctx context.Context) error { return reconciler.Run(ctx, ro) })
	wo.ReconcilerEndpoint, wo.Logger = ro.Listen, logger.With(slog.String("role", "watcher"))
	role("watcher", func(ctx context.Context) error { return watcher.Run(ctx, wo) })

	at, err := endpoint.Parse(ro.StatusListen)
	if err != nil {
		return err
	}
	conn, err := endpoint.Dial(at, endpoint.DialOptions{})
	if err != nil {
		return err
	}
	defer func() { _ = conn.Close() }()
	return u.follow(ctx, statusv1.NewStatusServiceClient(conn), stdout, failed)
}

// follow shows what changes until ctx ends, or, with --once, until all is settled.
func (u *up) follow(ctx context.Context, client statusv1.StatusServiceClient, stdout io.Writer, failed <-chan error) error {
	ticker := time.NewTicker(pollPeriod)
	defer ticker.Stop()
	screen := newScreen(stdout)
	for {
		rows, overview, err := look(ctx, client)
		switch {
		case err == nil && u.once && overview.GetSettled():
			return u.finish(rows, stdout)
		case err == nil && !u.once:
			screen.show(rows, overview)
		}
		select {
		case <-ctx.Done():
			if u.once {
				return errors.New("interrupted before all was settled")
			}
			return nil
		case err := <-failed:
			return err
		case <-ticker.C:
		}
	}
}

func look(ctx context.Context, client statusv1.StatusServiceClient) ([]*statusv1.RouteStatus, *statusv1.Overview, error) {
	answer, err := client.GetOverview(ctx, &statusv1.GetOverviewRequest{})
	if err != nil {
		return nil, nil, fmt.Errorf("ask for the overview: %w", err)
	}
	stream, err := client.ListRoutes(ctx, &statusv1.ListRoutesRequest{})
	if err != nil {
		return nil, nil, fmt.Errorf("ask for the routes: %w", err)
	}
	var rows []*statusv1.RouteStatus
	for {
		part, err := stream.Recv()
		if errors.Is(err, io.EOF) {
			return rows, answer.GetOverview(), nil
		}
		if err != nil {
			return nil, nil, fmt.Errorf("ask for the routes: %w", err)
		}
		rows = append(rows, part.GetRoutes()...)
	}
}

// row is one object of `-o json`.
type row struct {
	Node            string `json:"node"`
	DestinationCIDR string `json:"destinationCIDR"`
	Target          string `json:"target"`
	State           string `json:"state"`
	Error           string `json:"error,omitempty"`
}

// finish prints the table; it fails when a route is not in place.
func (u *up) finish(rows []*statusv1.RouteStatus, stdout io.Writer) error {
	list, missing := make([]row, 0, len(rows)), 0
	for _, r := range rows {
		list = append(list, row{r.GetNode(), r.GetDestinationCidr(), r.GetTarget(), r.GetState(), r.GetError()})
		switch r.GetState() {
		case "in-place", "foreign", "family-ignored", "not-managed":
		default:
			missing++
		}
	}
	if u.output == "json" {
		encoder := json.NewEncoder(stdout)
		encoder.SetIndent("", "  ")
		if err := encoder.Encode(list); err != nil {
			return fmt.Errorf("print routes: %w", err)
		}
	} else {
		table := tabwriter.NewWriter(stdout, 0, 4, 2, ' ', 0)
		fmt.Fprintln(table, "NODE\tPOD CIDR\tROUTE\tSTATE\tERROR")
		for _, r := range list {
			fmt.Fprintf(table, "%s\t%s\t%s\t%s\t%s\n", r.Node, r.DestinationCIDR, r.Target, r.State, r.Error)
		}
		if err := table.Flush(); err != nil {
			return fmt.Errorf("print routes: %w", err)
		}
	}
	if missing > 0 {
		return fmt.Errorf("%d of %d routes are not in place", missing, len(list))
	}
	return nil
}
