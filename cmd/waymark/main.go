// Command waymark is the command line of Waymark. `waymark up` runs all three
// roles on one machine.
package main

import (
	"context"
	"io"

	"github.com/spf13/cobra"

	"github.com/waymark-routes/waymark/internal/build"
	"github.com/waymark-routes/waymark/internal/flags"
)

func main() { flags.Main("waymark", run) }

func run(ctx context.Context, args []string, stdout, stderr io.Writer) error {
	root := &cobra.Command{
		Use: "waymark", Short: "Keeps a cloud's routes equal to what a Kubernetes cluster's nodes need",
		Version: build.Version(), SilenceErrors: true, SilenceUsage: true,
		Args: func(_ *cobra.Command, args []string) error {
			if len(args) > 0 {
				return flags.Usagef("unknown command %q (see waymark --help)", args[0])
			}
			return nil
		},
		RunE: func(command *cobra.Command, _ []string) error { return command.Help() },
	}
	root.SetArgs(args)
	root.SetOut(stdout)
	root.SetErr(stderr)
	root.SetFlagErrorFunc(func(_ *cobra.Command, err error) error { return flags.Usagef("%w", err) })
	root.AddCommand(upCommand())
	return root.ExecuteContext(ctx)
}
