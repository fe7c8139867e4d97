// Command waymark-reconciler serves node sessions and keeps the plugin's routes
// equal to what the nodes need.
package main

import (
	"context"
	"fmt"
	"io"

	"github.com/spf13/pflag"

	"github.com/waymark-routes/waymark/cloudplugin"
	"github.com/waymark-routes/waymark/internal/build"
	"github.com/waymark-routes/waymark/internal/endpoint"
	"github.com/waymark-routes/waymark/internal/flags"
	"github.com/waymark-routes/waymark/internal/telemetry"
	"github.com/waymark-routes/waymark/reconciler"
)

const name = "waymark-reconciler"

func main() { flags.Main(name, run) }

func run(ctx context.Context, args []string, stdout, stderr io.Writer) error {
	fs := pflag.NewFlagSet(name, pflag.ContinueOnError)
	fs.SetOutput(stdout)
	fs.SortFlags = false
	var o reconciler.Options
	var process flags.Process
	var ccm flags.CloudControllerManager
	fs.StringVar(&o.Listen, "listen", "unix:///run/waymark/reconciler.sock", "endpoint that the watcher dials")
	fs.StringVar(&o.StatusListen, "status-listen", "unix:///run/waymark/status.sock", "endpoint of the status service")
	fs.StringVar(&o.PluginEndpoint, "plugin-endpoint", cloudplugin.DefaultListen, "endpoint of the cloud plugin")
	fs.BoolVar(&o.AllowInsecure, "allow-insecure-tcp", false, "let plaintext gRPC go over TCP off loopback")
	tuning := reconciler.RegisterFlags(fs)
	fs.DurationVar(&o.IdentityTimeout, "identity-timeout", 0, "limit of GetPluginInfo (default 5s)")
	ccm.Register(fs)
	process.Register(fs, ":10282")
	if err := flags.Parse(fs, args); err != nil {
		return err
	}
	if process.Version {
		fmt.Fprintf(stdout, "%s %s\n", name, build.Version())
		return nil
	}
	for flag, value := range map[string]string{"--listen": o.Listen, "--status-listen": o.StatusListen, "--plugin-endpoint": o.PluginEndpoint} {
		if _, err := endpoint.Parse(value); err != nil {
			return flags.Usagef("%s: %w", flag, err)
		}
	}
	if err := tuning.Apply(&o); err != nil {
		return err
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
	if ccm.AllocateNodeCIDRs {
		logger.InfoContext(ctx, "--allocate-node-cidrs is ignored: Waymark allocates no pod CIDRs")
	}
	o.Idle = !ccm.ConfigureCloudRoutes
	o.HTTPAddress, o.Logger, o.Registry = process.HTTPAddress, logger, telemetry.NewRegistry()
	return reconciler.Run(ctx, o)
}
