package main

import (
	"fmt"
	"io"
	"os"
	"strings"
	"time"

	"golang.org/x/term"

	statusv1 "github.com/waymark-routes/waymark/proto/waymark/status/v1"
)

// screen shows rows: as a table that is drawn anew on a terminal, else as one
// line per change. One goroutine owns it.
type screen struct {
	out   io.Writer
	size  func() (width, height int) // nil: no terminal
	lines int                        // drawn last time
	shown map[string]string
	drawn string
}

func newScreen(out io.Writer) *screen {
	s := &screen{out: out, shown: map[string]string{}}
	if file, ok := out.(*os.File); ok && term.IsTerminal(int(file.Fd())) {
		s.size = func() (int, int) {
			width, height, err := term.GetSize(int(file.Fd()))
			if err != nil {
				return 80, 24
			}
			return width, height
		}
	}
	return s
}

func (s *screen) show(rows []*statusv1.RouteStatus, overview *statusv1.Overview) {
	if s.size == nil {
		s.print(rows)
		return
	}
	s.draw(rows, overview, time.Now())
}

// print prints one line for every row that changed.
func (s *screen) print(rows []*statusv1.RouteStatus) {
	now := map[string]bool{}
	for _, r := range rows {
		key := r.GetNode() + " " + r.GetDestinationCidr() + " " + r.GetTable()
		now[key] = true
		line := strings.TrimRight(fmt.Sprintf("%-20s %-20s -> %-20s %-12s %-12s %s", r.GetNode(), r.GetDestinationCidr(), r.GetTarget(), r.GetState(), r.GetCause(), r.GetError()), " ")
		if s.shown[key] != line {
			s.shown[key] = line
			fmt.Fprintln(s.out, time.Now().Format(time.TimeOnly), line)
		}
	}
	for key := range s.shown {
		if !now[key] {
			delete(s.shown, key)
			fmt.Fprintln(s.out, time.Now().Format(time.TimeOnly), key, "gone")
		}
	}
}

// draw draws the table over the last one.
func (s *screen) draw(rows []*statusv1.RouteStatus, overview *statusv1.Overview, now time.Time) {
	width, height := s.size()
	lines := table(rows, overview, now, width, height)
	text := strings.Join(lines, "\n")
	if text == s.drawn {
		return
	}
	s.drawn = text
	var b strings.Builder
	if s.lines > 0 {
		fmt.Fprintf(&b, "\x1b[%dA", s.lines)
	}
	for _, line := range lines {
		b.WriteString(line + "\x1b[K\n")
	}
	b.WriteString("\x1b[J")
	s.lines = len(lines)
	fmt.Fprint(s.out, b.String())
}

// table lays out the rows for a terminal of the given size.
func table(rows []*statusv1.RouteStatus, overview *statusv1.Overview, now time.Time, width, height int) []string {
	counts := overview.GetCounts()
	head := fmt.Sprintf("%d nodes, %d of %d routes in place, %d failed, %d held", counts.GetNodes(), counts.GetInPlace(), counts.GetDesired(), counts.GetFailed(), overview.GetGuard().GetHeld())
	if reason := overview.GetNotReadyReason(); reason != "" {
		head += "; not ready: " + reason
	}
	format := func(node, cidr, route, state, cause, age, text string) string {
		return strings.TrimRight(fmt.Sprintf("%-24s %-20s %-24s %-14s %-12s %-6s %s", node, cidr, route, state, cause, age, text), " ")
	}
	lines := []string{head, format("NODE", "POD CIDR", "ROUTE", "STATE", "CAUSE", "AGE", "")}
	room := max(height-len(lines)-2, 1)
	for i, r := range rows {
		if i >= room {
			lines = append(lines, fmt.Sprintf("… and %d more", len(rows)-i))
			break
		}
		age := ""
		if since := r.GetSince(); since != nil {
			age = max(now.Sub(since.AsTime()), 0).Truncate(time.Second).String()
		}
		lines = append(lines, format(r.GetNode(), r.GetDestinationCidr(), r.GetTarget(), r.GetState(), r.GetCause(), age, r.GetError()))
	}
	for i, line := range lines {
		if runes := []rune(line); len(runes) > width {
			lines[i] = string(runes[:width])
		}
	}
	return lines
}
