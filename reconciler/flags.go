package reconciler

import (
	"time"

	"github.com/spf13/pflag"

	"github.com/waymark-routes/waymark/internal/flags"
	"github.com/waymark-routes/waymark/reconciler/engine"
)

// Flags are the flags that tune reconciling; waymark-reconciler and `waymark up`
// share them.
type Flags struct {
	gates                            flags.FeatureGates
	poll, resync, pass, pause, doubt time.Duration
	list, listTry, write             time.Duration
	guard, family                    string
	concurrent                       int
	dryRun                           bool
}

// RegisterFlags adds the flags to fs.
func RegisterFlags(fs *pflag.FlagSet) *Flags {
	f := &Flags{}
	flags.RegisterFeatureGates(fs, &f.gates)
	fs.DurationVar(&f.poll, "route-reconciliation-period", 10*time.Second, "interval of full passes with the feature gate off")
	fs.DurationVar(&f.resync, "min-resync-period", 12*time.Hour, "least interval of the periodic full pass; drawn once from 1 to 2 times of it")
	fs.DurationVar(&f.pass, "min-pass-interval", 10*time.Second, "how old the route view may be for a node pass without a list")
	fs.StringVar(&f.guard, "deletion-guard", "confirm", "what happens to too many deletes at once: confirm (quorum read), hold (until approved) or off")
	fs.StringVar(&f.family, "unsupported-family", "ignore", "a family that the plugin does not route: ignore, or fail (the node is unavailable)")
	fs.BoolVar(&f.dryRun, "dry-run", false, "plan and show the plan; write nothing")
	fs.DurationVar(&f.pause, "max-throttle-pause", 15*time.Minute, "longest pause that a throttling plugin can ask for")
	fs.DurationVar(&f.doubt, "doubt-period", 90*time.Second, "how long a write of unknown outcome may still take effect")
	fs.IntVar(&f.concurrent, "max-concurrent-writes", 200, "most writes in flight")
	fs.DurationVar(&f.list, "list-timeout", time.Minute, "limit of a whole list")
	fs.DurationVar(&f.listTry, "list-try-timeout", 10*time.Second, "limit of a list's first chunk, and of the gap between two")
	fs.DurationVar(&f.write, "write-timeout", 30*time.Second, "limit of one write")
	return f
}

// Apply checks the values and puts them into o.
func (f *Flags) Apply(o *Options) error {
	for name, value := range map[string]time.Duration{
		"route-reconciliation-period": f.poll, "min-resync-period": f.resync, "min-pass-interval": f.pass, "max-throttle-pause": f.pause,
		"doubt-period": f.doubt, "list-timeout": f.list, "list-try-timeout": f.listTry, "write-timeout": f.write,
	} {
		if value <= 0 {
			return flags.Usagef("--%s: %v is not above zero", name, value)
		}
	}
	if f.concurrent <= 0 {
		return flags.Usagef("--max-concurrent-writes: %d is not above zero", f.concurrent)
	}
	guard, ok := map[string]engine.GuardMode{"confirm": engine.GuardConfirm, "hold": engine.GuardHold, "off": engine.GuardOff}[f.guard]
	if !ok {
		return flags.Usagef("--deletion-guard: %q is none of confirm, hold, off", f.guard)
	}
	if f.family != "ignore" && f.family != "fail" {
		return flags.Usagef("--unsupported-family: %q is neither ignore nor fail", f.family)
	}
	o.Engine = engine.Config{
		PollOnly: !f.gates.WatchBased(), PollPeriod: f.poll, MinPassInterval: f.pass, MinResyncPeriod: f.resync, DoubtPeriod: f.doubt,
		MaxThrottlePause: f.pause, MaxConcurrentWrites: f.concurrent, Guard: guard, UnsupportedFamilyFails: f.family == "fail", DryRun: f.dryRun,
	}
	o.Execute.ListTimeout, o.Execute.ListTryTimeout, o.Execute.WriteTimeout = f.list, f.listTry, f.write
	return nil
}
