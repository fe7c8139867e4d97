// Command waymark-plugin-memory serves a route table in memory, kept in a JSON
// file with --state.
package main

import (
	"context"

	"github.com/spf13/pflag"

	"github.com/waymark-routes/waymark/cloudplugin"
	"github.com/waymark-routes/waymark/cloudplugin/memory"
	"github.com/waymark-routes/waymark/internal/flags"
)

func main() {
	cloudplugin.Main("waymark-plugin-memory", func(fs *pflag.FlagSet) func(context.Context) (cloudplugin.Plugin, error) {
		var o memory.Options
		fs.StringVar(&o.State, "state", "", "JSON file that keeps the table over restarts; empty: memory alone")
		fs.BoolVar(&o.AddressAware, "address-aware", false, "routes carry their targets' addresses")
		return func(context.Context) (cloudplugin.Plugin, error) {
			p, err := memory.New(o)
			if err != nil {
				return nil, flags.Usagef("--state: %w", err)
			}
			return p, nil
		}
	})
}
