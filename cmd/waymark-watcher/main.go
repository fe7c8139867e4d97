// Command waymark-watcher streams node changes to the reconciler and keeps the
// nodes' NetworkUnavailable conditions.
package main

import (
	"context"
	"fmt"
	"io"
	"time"

	"github.com/spf13/pflag"

	"github.com/waymark-routes/waymark/internal/build"
	"github.com/waymark-routes/waymark/internal/endpoint"
	"github.com/waymark-routes/waymark/internal/flags"
	"github.com/waymark-routes/waymark/internal/telemetry"
	"github.com/waymark-routes/waymark/watcher"
)

const name = "waymark-watcher"

// stepDownLimit bounds `waymark-watcher stepdown`.
const stepDownLimit = 20 * time.Second

func main() { flags.Main(name, run) }

func run(ctx context.Context, args []string, stdout, stderr io.Writer) error {
	fs := pflag.NewFlagSet(name, pflag.ContinueOnError)
	fs.SetOutput(stdout)
	fs.SortFlags = false
	var o watcher.Options
	var process flags.Process
	var ccm flags.CloudControllerManager
	fs.StringVar(&o.ReconcilerEndpoint, "reconciler-endpoint", "unix:///run/waymark/reconciler.sock", "endpoint of the reconciler")
	fs.StringVar(&o.ControlSocket, "control-socket", "unix:///run/waymark/watcher.sock", "socket that takes stepdown requests; empty: none")
	fs.BoolVar(&o.AllowInsecure, "allow-insecure-tcp", false, "let plaintext gRPC go over TCP off loopback")
	f := watcher.RegisterFlags(fs, "")
	ccm.Register(fs)
	process.Register(fs, ":10281")
	stepdown := len(args) > 0 && args[0] == "stepdown"
	if stepdown {
		args = args[1:]
	}
	if err := flags.Parse(fs, args); err != nil {
		return err
	}
	if process.Version {
		fmt.Fprintf(stdout, "%s %s\n", name, build.Version())
		return nil
	}
	if stepdown {
		limited, cancel := context.WithTimeout(ctx, stepDownLimit)
		defer cancel()
		return watcher.StepDown(limited, o.ControlSocket)
	}
	if _, err := endpoint.Parse(o.ReconcilerEndpoint); err != nil {
		return flags.Usagef("--reconciler-endpoint: %w", err)
	}
	logger, err := telemetry.NewLogger(stderr, process.LogLevel, process.LogFormat)
	if err != nil {
		return err
	}
	o.Idle = !ccm.ConfigureCloudRoutes
	if !o.Idle {
		if err := f.Apply(&o, logger); err != nil {
			return err
		}
	}
	shutdown, err := telemetry.SetupTracing(ctx, name, process.OTLPEndpoint)
	if err != nil {
		return err
	}
	defer func() { _ = shutdown(context.WithoutCancel(ctx)) }()
	if ccm.AllocateNodeCIDRs {
		logger.InfoContext(ctx, "--allocate-node-cidrs is ignored: Waymark allocates no pod CIDRs")
	}
	o.HTTPAddress, o.Logger, o.Registry = process.HTTPAddress, logger, telemetry.NewRegistry()
	return watcher.Run(ctx, o)
}
