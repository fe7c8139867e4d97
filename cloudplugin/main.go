package cloudplugin

import (
	"context"
	"fmt"
	"io"
	"sync"

	"github.com/spf13/pflag"

	"github.com/waymark-routes/waymark/internal/build"
	"github.com/waymark-routes/waymark/internal/flags"
	"github.com/waymark-routes/waymark/internal/telemetry"
)

// DefaultListen is where the reconciler looks for a plugin.
const DefaultListen = "unix:///run/waymark/plugin.sock"

// Main is a plugin's whole main function: it registers the standard flags
// (--listen, --http-address, --log-level, …) beside those that setup adds, makes
// the plugin, serves it, and ends the process. SIGTERM and SIGINT stop it
// gracefully. setup gets the flag set before parsing, and returns the function
// that makes the plugin after it.
func Main(name string, setup func(fs *pflag.FlagSet) func(ctx context.Context) (Plugin, error)) {
	flags.Main(name, func(ctx context.Context, args []string, stdout, stderr io.Writer) error {
		return run(ctx, name, args, stdout, stderr, setup)
	})
}

func run(ctx context.Context, name string, args []string, stdout, stderr io.Writer, setup func(fs *pflag.FlagSet) func(context.Context) (Plugin, error)) error {
	fs := pflag.NewFlagSet(name, pflag.ContinueOnError)
	fs.SetOutput(stdout)
	fs.SortFlags = false
	var process flags.Process
	listen := fs.String("listen", DefaultListen, "endpoint that the reconciler dials: unix:///path, or tcp://host:port on loopback")
	plugin := setup(fs)
	process.Register(fs, ":10283")
	if err := flags.Parse(fs, args); err != nil {
		return err
	}
	if process.Version {
		fmt.Fprintf(stdout, "%s %s\n", name, build.Version())
		return nil
	}
	logger, err := telemetry.NewLogger(stderr, process.LogLevel, process.LogFormat)
	if err != nil {
		return err
	}
	shutdown, err := telemetry.SetupTracing(ctx, name, process.OTLPEndpoint)
	if err != nil {
		return err
	}
	defer func() { _ = shutdown(context.WithoutCancel(ctx)) }()
	made, err := plugin(ctx)
	if err != nil {
		return err
	}
	registry := telemetry.NewRegistry()
	http, err := telemetry.NewHTTPServer(ctx, telemetry.HTTPOptions{Address: process.HTTPAddress, Logger: logger, Gatherer: registry, Ready: func() error {
		if checker, ok := made.(HealthChecker); ok {
			return checker.CheckHealth(ctx)
		}
		return nil
	}})
	if err != nil {
		return err
	}
	var wg sync.WaitGroup
	defer wg.Wait()
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	wg.Go(func() { _ = http.Run(ctx) })
	return Serve(ctx, made, ServeOptions{Listen: *listen, Logger: logger, Registerer: registry})
}
