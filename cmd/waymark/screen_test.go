package main

import (
	"strings"
	"testing"
	"time"

	"google.golang.org/protobuf/types/known/timestamppb"

	statusv1 "github.com/waymark-routes/waymark/proto/waymark/status/v1"
)

func TestTable(t *testing.T) {
	now := time.Date(2026, 1, 1, 12, 0, 0, 0, time.UTC)
	rows := []*statusv1.RouteStatus{
		{Node: "node-1", DestinationCidr: "10.244.1.0/24", Target: "node-1", State: "in-place", Cause: "node_change", Since: timestamppb.New(now.Add(-90 * time.Second))},
		{Node: "node-2", DestinationCidr: "10.244.2.0/24", Target: "node-2", State: "failed", Error: "create: INVALID_ARGUMENT"},
		{Node: "node-3", DestinationCidr: "10.244.3.0/24", Target: "node-3", State: "waiting"},
	}
	overview := &statusv1.Overview{Counts: &statusv1.Counts{Nodes: 3, Desired: 3, InPlace: 1, Failed: 1}, NotReadyReason: "the plugin is away"}
	want := []string{
		"3 nodes, 1 of 3 routes in place, 1 failed, 0 held; not ready: the plugin is away",
		"NODE                     POD CIDR             ROUTE                    STATE          CAUSE        AGE",
		"node-1                   10.244.1.0/24        node-1                   in-place       node_change  1m30s",
		"node-2                   10.244.2.0/24        node-2                   failed                             create: INVALID_ARGUMENT",
		"node-3                   10.244.3.0/24        node-3                   waiting",
	}
	if got := table(rows, overview, now, 200, 40); strings.Join(got, "\n") != strings.Join(want, "\n") {
		t.Errorf("got\n%s\nwant\n%s", strings.Join(got, "\n"), strings.Join(want, "\n"))
	}
	small := table(rows, overview, now, 40, 6)
	if len(small) != 5 || small[4] != "… and 1 more" {
		t.Errorf("on a small terminal:\n%s", strings.Join(small, "\n"))
	}
	for _, line := range small {
		if len([]rune(line)) > 40 {
			t.Errorf("line is wider than the terminal: %q", line)
		}
	}
}

func TestDrawOverwritesTheLastTable(t *testing.T) {
	out := &strings.Builder{}
	s := &screen{out: out, size: func() (int, int) { return 80, 24 }}
	rows := []*statusv1.RouteStatus{{Node: "node-1", State: "waiting"}}
	s.show(rows, &statusv1.Overview{})
	out.Reset()
	s.show(rows, &statusv1.Overview{})
	if out.Len() != 0 {
		t.Errorf("an unchanged table is drawn anew: %q", out)
	}
	rows[0].State = "in-place"
	s.show(rows, &statusv1.Overview{})
	if !strings.HasPrefix(out.String(), "\x1b[3A") || !strings.Contains(out.String(), "in-place") {
		t.Errorf("drawn: %q", out)
	}
}
