package flags_test

import (
	"bytes"
	"errors"
	"strings"
	"testing"

	"github.com/spf13/pflag"

	"github.com/waymark-routes/waymark/internal/flags"
)

func TestB66ClusterCIDR(t *testing.T) {
	tests := []struct {
		value    string
		want     string // space-separated prefixes; empty: refused
		warnings int
		mentions string // in the refusal
	}{
		{value: "", mentions: "required"},
		{value: "  ", mentions: "required"},
		{value: "10.244.0.0/16", want: "10.244.0.0/16"},
		{value: "10.10.0.1/24", want: "10.10.0.0/24", warnings: 1},
		{value: "10.244.0.0/16,", mentions: "empty"},
		{value: ",10.244.0.0/16", mentions: "empty"},
		{value: "10.244.0.0/16,fd00:10:244::/56", want: "10.244.0.0/16 fd00:10:244::/56"},
		{value: "fd00:10:244::/56, 10.244.0.0/16", want: "fd00:10:244::/56 10.244.0.0/16"},
		{value: "10.244.0.0/16,10.245.0.0/16", mentions: "one family"},
		{value: "10.244.0.0/16,fd00:10:244::/56,10.245.0.0/16", mentions: "at most two"},
		{value: "abc", mentions: `"abc"`},
		{value: "10.244.0.0", mentions: `"10.244.0.0"`},
		{value: "10.244.0.0/33", mentions: `"10.244.0.0/33"`},
		{value: "010.244.0.0/16", want: "10.244.0.0/16"},
	}
	for _, test := range tests {
		t.Run(test.value, func(t *testing.T) {
			prefixes, warnings, err := flags.ClusterCIDRs(test.value)
			if test.want == "" {
				var usage *flags.UsageError
				if !errors.As(err, &usage) {
					t.Fatalf("ClusterCIDRs(%q) = %v, %v; want a UsageError", test.value, prefixes, err)
				}
				if !strings.Contains(err.Error(), "--cluster-cidr") || !strings.Contains(err.Error(), test.mentions) {
					t.Fatalf("error %q names neither the flag nor %q", err, test.mentions)
				}
				return
			}
			if err != nil {
				t.Fatalf("ClusterCIDRs(%q): %v", test.value, err)
			}
			var got []string
			for _, prefix := range prefixes {
				got = append(got, prefix.String())
			}
			if strings.Join(got, " ") != test.want || len(warnings) != test.warnings {
				t.Fatalf("ClusterCIDRs(%q) = %v with %d warnings; want %s with %d", test.value, got, len(warnings), test.want, test.warnings)
			}
		})
	}
}

func TestFeatureGates(t *testing.T) {
	tests := []struct {
		args    []string
		want    bool
		refused bool
	}{
		{want: true},
		{args: []string{"--feature-gates=" + flags.WatchBasedGate + "=false"}, want: false},
		{args: []string{"--feature-gate=" + flags.WatchBasedGate + "=false"}, want: false},
		{args: []string{"--feature-gates=" + flags.WatchBasedGate + "=false", "--feature-gate=" + flags.WatchBasedGate + "=true"}, want: true},
		{args: []string{"--feature-gates=Other=true"}, refused: true},
		{args: []string{"--feature-gates=" + flags.WatchBasedGate}, refused: true},
		{args: []string{"--feature-gates=" + flags.WatchBasedGate + "=maybe"}, refused: true},
	}
	for _, test := range tests {
		t.Run(strings.Join(test.args, " "), func(t *testing.T) {
			var gates flags.FeatureGates
			fs := pflag.NewFlagSet("test", pflag.ContinueOnError)
			fs.SetOutput(&bytes.Buffer{})
			flags.RegisterFeatureGates(fs, &gates)
			err := flags.Parse(fs, test.args)
			if test.refused {
				if err == nil || !strings.Contains(err.Error(), "--feature-gate") {
					t.Fatalf("error %v does not name the flag", err)
				}
				return
			}
			if err != nil || gates.WatchBased() != test.want {
				t.Fatalf("WatchBased() = %t, %v; want %t", gates.WatchBased(), err, test.want)
			}
		})
	}
}

func TestReport(t *testing.T) {
	tests := []struct {
		err  error
		code int
		line string
	}{
		{nil, 0, ""},
		{pflag.ErrHelp, 0, ""},
		{flags.Usagef("--nodes: no such file"), flags.ExitUsage, "waymark: --nodes: no such file\n"},
		{errors.New("list routes:\n  plugin is away"), flags.ExitFailure, "waymark: list routes: plugin is away\n"},
	}
	for _, test := range tests {
		var out bytes.Buffer
		if code := flags.Report(&out, "waymark", test.err); code != test.code || out.String() != test.line {
			t.Errorf("Report(%v) = %d, %q; want %d, %q", test.err, code, out.String(), test.code, test.line)
		}
	}
}

func TestParseRefusesArguments(t *testing.T) {
	fs := pflag.NewFlagSet("test", pflag.ContinueOnError)
	fs.SetOutput(&bytes.Buffer{})
	if err := flags.Parse(fs, []string{"nodes.yaml"}); err == nil || !strings.Contains(err.Error(), "nodes.yaml") {
		t.Fatalf("Parse took a stray argument: %v", err)
	}
}
