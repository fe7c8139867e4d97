// Command waymark is the command line of Waymark. `waymark up` runs all three
// roles on one machine.
package main

import (
	"context"
	"fmt"
	"os"
	"os/signal"
	"syscall"

	"github.com/spf13/cobra"

	"github.com/waymark-routes/waymark/internal/build"
	"github.com/waymark-routes/waymark/internal/flags"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, syscall.SIGINT)
	root := &cobra.Command{
		Use: "waymark", Short: "Keeps a cloud's routes equal to what a Kubernetes cluster's nodes need",
		Version: build.Version(), SilenceErrors: true, SilenceUsage: true,
	}
	root.SetFlagErrorFunc(func(_ *cobra.Command, err error) error { return flags.Usagef("%w", err) })
	root.AddCommand(upCommand())
	err := root.ExecuteContext(ctx)
	stop()
	if err != nil && ctx.Err() != nil {
		fmt.Fprintln(os.Stderr)
	}
	os.Exit(flags.Report(os.Stderr, "waymark", err))
}
