// Package flags turns command lines into options for Waymark's binaries: the
// flags that all of them share, the flags that users know from a
// cloud-controller-manager, and one way to end a process on bad input (one line
// that names the flag, exit code 2).
package flags

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"os"
	"os/signal"
	"strings"
	"syscall"

	"github.com/spf13/pflag"

	"github.com/waymark-routes/waymark/internal/prefix"
)

// WatchBasedGate is upstream's name of the feature gate for watch-based route
// reconciling (KEP-5237). In Waymark it is on by default.
const WatchBasedGate = "CloudControllerManagerWatchBasedRoutesReconciliation"

// Exit codes of all binaries.
const (
	// ExitFailure says that the work could not be done.
	ExitFailure = 1
	// ExitUsage says that the input was refused before any work began.
	ExitUsage = 2
)

// UsageError is bad input: a flag, file or field that was refused before any
// work began.
type UsageError struct{ err error }

// Error implements error.
func (e *UsageError) Error() string { return e.err.Error() }

// Unwrap gives access to the cause.
func (e *UsageError) Unwrap() error { return e.err }

// Usagef makes a UsageError; the text names the flag, file or field.
func Usagef(format string, args ...any) error {
	return &UsageError{err: fmt.Errorf(format, args...)}
}

// Report writes err as one line to w, prefixed by the program's name, and
// returns the exit code: 0 for nil and for a request for help, 2 for a
// UsageError, else 1.
func Report(w io.Writer, program string, err error) int {
	if err == nil || errors.Is(err, pflag.ErrHelp) {
		return 0
	}
	line := strings.Join(strings.Fields(strings.ReplaceAll(err.Error(), "\n", " ")), " ")
	fmt.Fprintf(w, "%s: %s\n", program, line)
	var usage *UsageError
	if errors.As(err, &usage) {
		return ExitUsage
	}
	return ExitFailure
}

// Main is a binary's whole main function: run gets a context that SIGTERM and
// SIGINT end, and the process ends with Report's exit code.
func Main(program string, run func(ctx context.Context, args []string, stdout, stderr io.Writer) error) {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, syscall.SIGINT)
	code := Report(os.Stderr, program, run(ctx, os.Args[1:], os.Stdout, os.Stderr))
	stop()
	os.Exit(code)
}

// Process holds the flags that all binaries share.
type Process struct {
	// LogLevel is debug, info, warn or error.
	LogLevel string
	// LogFormat is text or json.
	LogFormat string
	// HTTPAddress serves probes and metrics; empty: nothing is served.
	HTTPAddress string
	// OTLPEndpoint takes traces (host:port, gRPC); empty: none are exported.
	OTLPEndpoint string
	// Version asks for the version and nothing else.
	Version bool
}

// Register adds the shared flags to fs.
func (p *Process) Register(fs *pflag.FlagSet, defaultHTTPAddress string) {
	fs.StringVar(&p.LogLevel, "log-level", "info", "least level of log lines: debug, info, warn or error")
	fs.StringVar(&p.LogFormat, "log-format", "json", "format of log lines: text or json")
	fs.StringVar(&p.HTTPAddress, "http-address", defaultHTTPAddress, "address of probes and metrics (/livez, /readyz, /metrics); empty serves none")
	fs.StringVar(&p.OTLPEndpoint, "otlp-endpoint", "", "host:port of an OpenTelemetry collector (OTLP over gRPC) that takes traces; empty exports none")
	fs.BoolVar(&p.Version, "version", false, "print the version and exit")
}

// Parse parses args into fs and turns its errors into UsageErrors. Arguments
// that are no flags are refused.
func Parse(fs *pflag.FlagSet, args []string) error {
	if err := fs.Parse(args); err != nil {
		if errors.Is(err, pflag.ErrHelp) {
			return err
		}
		return &UsageError{err: err}
	}
	if fs.NArg() > 0 {
		return Usagef("unexpected argument %q: only flags are taken (see --help)", fs.Arg(0))
	}
	return nil
}

// ClusterCIDRs parses the value of --cluster-cidr: one range, or one of each
// family (field case B-66). Ranges with host bits are masked, with a warning.
func ClusterCIDRs(value string) (prefixes []netip.Prefix, warnings []string, err error) {
	if strings.TrimSpace(value) == "" {
		return nil, nil, Usagef("--cluster-cidr: a range is required, for example 10.244.0.0/16")
	}
	parts := strings.Split(value, ",")
	for i, part := range parts {
		part = strings.TrimSpace(part)
		if part == "" {
			return nil, nil, Usagef("--cluster-cidr: range %d of %q is empty", i+1, value)
		}
		cidr, err := prefix.Parse(part)
		if err != nil {
			return nil, nil, Usagef("--cluster-cidr: %q is no CIDR (want for example 10.244.0.0/16 or fd00:10:244::/56)", part)
		}
		if masked := cidr.Masked(); masked != cidr {
			warnings = append(warnings, fmt.Sprintf("--cluster-cidr: %s has host bits; taken as %s", part, masked))
			cidr = masked
		}
		prefixes = append(prefixes, cidr)
	}
	if len(prefixes) > 2 {
		return nil, nil, Usagef("--cluster-cidr: %d ranges given, at most two are taken (one of each family)", len(prefixes))
	}
	if len(prefixes) == 2 && prefixes[0].Addr().Is4() == prefixes[1].Addr().Is4() {
		return nil, nil, Usagef("--cluster-cidr: %s and %s are of one family; two ranges must be one IPv4 and one IPv6", prefixes[0], prefixes[1])
	}
	return prefixes, warnings, nil
}

// FeatureGates is the value of --feature-gates: a list of Name=bool, merged over
// repeated use. The zero value holds the defaults.
type FeatureGates struct{ watchBasedOff bool }

// WatchBased says whether node changes start work at once (the default) or full
// passes run at a fixed interval.
func (g *FeatureGates) WatchBased() bool { return !g.watchBasedOff }

// String implements pflag.Value.
func (g *FeatureGates) String() string {
	return fmt.Sprintf("%s=%t", WatchBasedGate, g.WatchBased())
}

// Type implements pflag.Value.
func (g *FeatureGates) Type() string { return "Name=bool,..." }

// Set implements pflag.Value.
func (g *FeatureGates) Set(value string) error {
	for pair := range strings.SplitSeq(value, ",") {
		name, setting, ok := strings.Cut(strings.TrimSpace(pair), "=")
		if !ok {
			return fmt.Errorf("%q is not of the form Name=true or Name=false", pair)
		}
		if name != WatchBasedGate {
			return fmt.Errorf("unknown gate %q (known: %s)", name, WatchBasedGate)
		}
		switch setting {
		case "true", "True", "TRUE":
			g.watchBasedOff = false
		case "false", "False", "FALSE":
			g.watchBasedOff = true
		default:
			return fmt.Errorf("gate %s: %q is neither true nor false", name, setting)
		}
	}
	return nil
}

// RegisterFeatureGates adds --feature-gates and its alias --feature-gate.
func RegisterFeatureGates(fs *pflag.FlagSet, gates *FeatureGates) {
	fs.Var(gates, "feature-gates", "feature gates; "+WatchBasedGate+"=false brings back full passes at a fixed interval")
	fs.Var(gates, "feature-gate", "alias of --feature-gates")
}

// CloudControllerManager holds flags that users know from a
// cloud-controller-manager and that both processes accept.
type CloudControllerManager struct {
	// ConfigureCloudRoutes false makes the process idle, ready, and say so.
	ConfigureCloudRoutes bool
	// AllocateNodeCIDRs is accepted and ignored.
	AllocateNodeCIDRs bool
}

// Register adds the flags to fs.
func (c *CloudControllerManager) Register(fs *pflag.FlagSet) {
	fs.BoolVar(&c.ConfigureCloudRoutes, "configure-cloud-routes", true, "false: touch no route, idle and be ready")
	fs.BoolVar(&c.AllocateNodeCIDRs, "allocate-node-cidrs", false, "accepted for compatibility and ignored: Waymark allocates no pod CIDRs")
}
