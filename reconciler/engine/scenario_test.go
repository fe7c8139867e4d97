package engine_test

import (
	"cmp"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/cockroachdb/datadriven"

	"github.com/waymark-routes/waymark/reconciler/engine"
	"github.com/waymark-routes/waymark/reconciler/plan"
)

// TestScenarios plays the files in testdata: commands to a real engine with a
// model cloud in virtual time, and the calls, verdicts and events that must
// follow. Each file is named after the field case that it tells. Record anew
// with: go test ./reconciler/engine -run TestScenarios -rewrite
//
// testdata/README.md explains the commands.
func TestScenarios(t *testing.T) {
	datadriven.Walk(t, "testdata", func(t *testing.T, path string) {
		if !strings.HasSuffix(path, ".txt") {
			return
		}
		play := newPlay()
		datadriven.RunTest(t, path, play.command)
	})
}

// play is one scenario: an engine, its model cloud, and the clock.
type play struct {
	cfg     engine.Config
	info    engine.PluginInfo
	cidrs   []string
	now     time.Time
	begun   time.Time
	engine  *engine.Engine
	cloud   *modelCloud
	nodes   map[string]*plan.Node
	answers []answer // of lists and calls, by time
	session string
	count   int
	version int
	seq     uint64
	lease   time.Duration // 0: unlimited
	absent  bool          // the watcher answers absence requests
	out     strings.Builder
	quiet   bool
}

type answer struct {
	at    time.Time
	input func() engine.Input
}

func newPlay() *play {
	begun := time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)
	return &play{
		info:  engine.PluginInfo{Name: "model", InstanceID: "1", IPv4: true, IPv6: true},
		cidrs: []string{"10.244.0.0/16"},
		now:   begun, begun: begun,
		cloud: &modelCloud{faults: map[string][]fault{}},
		nodes: map[string]*plan.Node{}, version: 100, absent: true,
	}
}

func (p *play) printf(format string, args ...any) {
	if p.quiet {
		return
	}
	fmt.Fprintf(&p.out, "%-7s ", "+"+short(p.now.Sub(p.begun)))
	fmt.Fprintf(&p.out, format+"\n", args...)
}

// short prints a duration without the jitter's digits.
func short(d time.Duration) string {
	d = d.Round(100 * time.Millisecond)
	if d >= time.Minute {
		d = d.Round(time.Second)
	}
	return d.String()
}

func (p *play) command(t *testing.T, d *datadriven.TestData) string {
	p.out.Reset()
	switch d.Cmd {
	case "config":
		for _, arg := range d.CmdArgs {
			switch arg.Key {
			case "poll":
				p.cfg.PollOnly = true
			case "dry-run":
				p.cfg.DryRun = true
			case "guard":
				p.cfg.Guard = map[string]engine.GuardMode{"confirm": engine.GuardConfirm, "hold": engine.GuardHold, "off": engine.GuardOff}[arg.Vals[0]]
			case "cluster-cidr":
				p.cidrs = arg.Vals
			case "unsupported-family":
				p.cfg.UnsupportedFamilyFails = arg.Vals[0] == "fail"
			default:
				d.Fatalf(t, "unknown config %s", arg.Key)
			}
		}
	case "plugin":
		for _, arg := range d.CmdArgs {
			switch arg.Key {
			case "replace":
				p.info.Replace = true
			case "ipv4-only":
				p.info.IPv6 = false
			case "max-writes":
				p.info.MaxConcurrentWrites = atoi(t, d, arg.Vals[0])
			case "addresses":
				p.cloud.aware = true
			case "by-destination":
				p.cloud.byDestination = true
			case "latency":
				p.cloud.latency = duration(t, d, arg.Vals[0])
			case "limit":
				p.cloud.limit = atoi(t, d, arg.Vals[0])
			case "tables":
				p.cloud.tables = arg.Vals
			default:
				d.Fatalf(t, "unknown plugin ability %s", arg.Key)
			}
		}
	case "cloud":
		for line := range lines(d.Input) {
			p.cloud.rows = append(p.cloud.rows, parseRow(t, d, line, p.cloud))
		}
	case "fault":
		p.cloud.addFaults(t, d)
	case "nodes":
		for line := range lines(d.Input) {
			n := parseNode(t, d, line)
			p.nodes[n.Name] = n
		}
	case "start":
		if p.engine == nil {
			p.engine = engine.New(p.cfg, p.now)
			info := p.info
			p.step(engine.PluginChanged{Healthy: true, Info: &info, NewView: true})
		}
		p.open("one")
		p.snapshot()
		p.settle(p.now)
	case "connect":
		p.open(d.CmdArgs[0].Key)
		p.snapshot()
		p.settle(p.now)
	case "disconnect":
		p.step(engine.SessionClosed{Session: p.session, Reason: "cut"})
		p.settle(p.now)
	case "plugin-down":
		p.step(engine.PluginChanged{Reason: "connection refused"})
		p.settle(p.now)
	case "plugin-up":
		info := p.info
		if d.HasArg("restarted") {
			info.InstanceID += "+"
			p.info = info
		}
		p.step(engine.PluginChanged{Healthy: true, Info: &info, NewView: true})
		p.settle(p.now)
	case "add", "update":
		for line := range lines(d.Input) {
			n := parseNode(t, d, line)
			p.nodes[n.Name] = n
			p.change(map[string]engine.NodeChange{"add": engine.NodeAdded, "update": engine.NodeUpdated}[d.Cmd], n)
		}
		p.settle(p.now)
	case "delete":
		for _, arg := range d.CmdArgs {
			n := p.nodes[arg.Key]
			delete(p.nodes, arg.Key)
			p.change(engine.NodeDeleted, n)
		}
		p.settle(p.now)
	case "snapshot":
		if d.HasArg("older") {
			p.version -= 50
		}
		p.snapshot()
		p.settle(p.now)
	case "forget-rows": // somebody empties the table by hand
		p.cloud.rows = nil
	case "forget-nodes": // what the watcher's cache loses and the API server has
		for _, arg := range d.CmdArgs {
			n := p.nodes[arg.Key]
			p.change(engine.NodeDeleted, n)
		}
		p.settle(p.now)
	case "absence":
		p.absent = d.CmdArgs[0].Key == "answered"
	case "lease":
		p.lease = duration(t, d, d.CmdArgs[0].Key)
	case "resync":
		p.step(engine.Resync{Reason: "asked"})
		p.settle(p.now)
	case "approve":
		p.step(engine.Approve{})
		p.settle(p.now)
	case "advance":
		p.quiet = d.HasArg("quietly")
		p.settle(p.now.Add(duration(t, d, d.CmdArgs[0].Key)))
		p.quiet = false
	case "show":
		p.show(t, d)
	default:
		d.Fatalf(t, "unknown command %s", d.Cmd)
	}
	if p.out.Len() == 0 {
		return "ok"
	}
	return p.out.String()
}

func (p *play) open(holder string) {
	p.count++
	p.session = "s" + strconv.Itoa(p.count)
	cluster := engine.Cluster{UID: "c1", Name: "c1", CIDRTexts: p.cidrs}
	for _, text := range p.cidrs {
		cluster.CIDRs = append(cluster.CIDRs, netip.MustParsePrefix(text))
	}
	p.step(engine.SessionOpened{Session: p.session, Cluster: cluster, Holder: holder, Token: engine.Token{LeaseUID: "l", Transitions: int64(p.count)}})
}

func (p *play) snapshot() {
	p.version++
	var nodes []*plan.Node
	for _, name := range slices.Sorted(maps.Keys(p.nodes)) {
		nodes = append(nodes, p.nodes[name])
	}
	p.step(engine.SnapshotReceived{Session: p.session, Nodes: nodes, ResourceVersion: strconv.Itoa(p.version)})
}

func (p *play) change(change engine.NodeChange, n *plan.Node) {
	p.version++
	p.seq++
	p.step(engine.NodeChanged{Session: p.session, Change: change, Node: n, Sequence: p.seq, Observed: p.now, ResourceVersion: strconv.Itoa(p.version)})
}

// settle lets all happen that is due up to the time until.
func (p *play) settle(until time.Time) {
	for steps := 0; ; steps++ {
		if steps > 1_000_000 {
			panic("hot loop")
		}
		next := time.Time{}
		if wake := p.engine.NextWake(); !wake.IsZero() {
			next = wake
		}
		slices.SortStableFunc(p.answers, func(a, b answer) int { return a.at.Compare(b.at) })
		if len(p.answers) > 0 && (next.IsZero() || !p.answers[0].at.After(next)) {
			if p.answers[0].at.After(until) {
				break
			}
			first := p.answers[0]
			p.answers = p.answers[1:]
			if first.at.After(p.now) {
				p.now = first.at
			}
			p.step(first.input())
			continue
		}
		if next.IsZero() || next.After(until) {
			break
		}
		p.now = next
		p.step(engine.Tick{})
	}
	p.now = until
}

// step gives the engine one input and carries out its effects.
func (p *play) step(in engine.Input) {
	for _, effect := range slices.Clone(p.engine.Step(p.now, in)) {
		switch effect := effect.(type) {
		case engine.EndSession:
			p.printf("session %s ended: %s", effect.Session, effect.Text)
		case engine.AskLease:
			id, at, session := effect.ID, p.now, p.session
			lease := p.lease
			p.answers = append(p.answers, answer{at: at, input: func() engine.Input {
				return engine.LeaseAnswered{Session: session, ID: id, Remaining: lease, Unlimited: lease == 0}
			}})
		case engine.AskAbsence:
			p.printf("ask whether gone: %s", strings.Join(effect.Names, " "))
			if p.absent {
				ask := effect
				p.answers = append(p.answers, answer{at: p.now, input: func() engine.Input { return p.presence(ask) }})
			}
		case engine.AskSnapshot:
			p.printf("ask for a snapshot: %s", effect.Reason)
		case engine.SendVerdict:
			v := effect.Verdict
			if v.Availability != engine.NoVerdict {
				text := v.Message
				if v.Availability == engine.Available {
					text = ""
				}
				p.printf("%s", strings.TrimSpace(fmt.Sprintf("verdict %s %s %s %s", v.Node, v.Availability, v.Reason, text)))
			}
			if v.Notice != nil {
				p.printf("event %s %s: %s", v.Node, v.Notice.Reason, v.Notice.Message)
			}
		case engine.StartList:
			p.startList(effect)
		case engine.StartCall:
			p.startCall(effect)
		case engine.CancelCall:
			p.printf("cancel call %s", p.cloud.cancel(p, effect.ID))
		}
	}
}

func (p *play) presence(ask engine.AskAbsence) engine.Input {
	in := engine.AbsenceAnswered{Session: ask.Session, ID: ask.ID, Total: int64(len(p.nodes))}
	for _, name := range ask.Names {
		n := p.nodes[name]
		presence := engine.Presence{Name: name, Present: n != nil}
		if n != nil {
			presence.Destinations = n.Destinations()
		}
		in.Nodes = append(in.Nodes, presence)
	}
	return in
}

func (p *play) show(t *testing.T, d *datadriven.TestData) {
	switch d.CmdArgs[0].Key {
	case "cloud":
		slices.SortStableFunc(p.cloud.rows, func(a, b *plan.Row) int { return cmp.Compare(a.DestinationText, b.DestinationText) })
		for _, r := range p.cloud.rows {
			fmt.Fprintf(&p.out, "%s -> %s", r.DestinationText, cmp.Or(r.Target.Value, "nothing"))
			if r.State == plan.StateBlackhole {
				p.out.WriteString(" blackhole")
			}
			p.out.WriteString("\n")
		}
		if len(p.cloud.rows) == 0 {
			p.out.WriteString("empty\n")
		}
	case "routes":
		for _, r := range p.engine.Rows("") {
			fmt.Fprintf(&p.out, "%s %s -> %s %s", cmp.Or(r.Node, "-"), r.Destination, cmp.Or(r.Target, "nothing"), r.State)
			if r.Attempts > 0 {
				fmt.Fprintf(&p.out, ", %d failed", r.Attempts)
			}
			if !r.NextAttempt.IsZero() {
				fmt.Fprintf(&p.out, ", next attempt at +%s", short(r.NextAttempt.Sub(p.begun)))
			}
			p.out.WriteString("\n")
		}
	case "passes":
		passes := p.engine.Passes(0)
		slices.Reverse(passes)
		for _, pass := range passes {
			scope := "node"
			if pass.Full {
				scope = "full"
			}
			fmt.Fprintf(&p.out, "%s pass, trigger %s: %s, %d lists, %d creates, %d deletes, %d replaces\n",
				scope, pass.Cause, pass.Outcome(), pass.Lists, pass.Creates, pass.Deletes, pass.Replaces)
		}
	case "plan":
		ops, reason := p.engine.Plan()
		for _, op := range ops {
			fmt.Fprintf(&p.out, "%s %s: %s\n", op.Kind, op.Destination, op.Reason)
		}
		p.out.WriteString(reason)
	case "counts":
		fmt.Fprintf(&p.out, "%d lists, %d writes, at most %d writes at once\n", p.cloud.lists, p.cloud.writes, p.cloud.most)
	default:
		d.Fatalf(t, "show what?")
	}
}

func lines(text string) func(func(string) bool) {
	return func(yield func(string) bool) {
		for line := range strings.SplitSeq(text, "\n") {
			line, _, _ = strings.Cut(line, "#")
			if line = strings.TrimSpace(line); line != "" && !yield(line) {
				return
			}
		}
	}
}

func atoi(t *testing.T, d *datadriven.TestData, text string) int {
	n, err := strconv.Atoi(text)
	if err != nil {
		d.Fatalf(t, "%v", err)
	}
	return n
}

func duration(t *testing.T, d *datadriven.TestData, text string) time.Duration {
	value, err := time.ParseDuration(text)
	if err != nil {
		d.Fatalf(t, "%v", err)
	}
	return value
}

// parseNode reads "NAME [cidr=A,B] [addr=[TYPE:]X,Y] [uid=U] [provider=P]
// [created=N] [NU=STATUS/REASON]".
func parseNode(t *testing.T, d *datadriven.TestData, line string) *plan.Node {
	fields := strings.Fields(line)
	n := plan.Node{Name: fields[0], UID: "uid-" + fields[0]}
	for _, field := range fields[1:] {
		key, value, _ := strings.Cut(field, "=")
		switch key {
		case "cidr":
			n.PodCIDRs = strings.Split(strings.Trim(value, `"`), ",")
		case "addr":
			for _, text := range strings.Split(value, ",") {
				address := plan.Address{Type: "InternalIP", Address: text}
				if kind, rest, ok := strings.Cut(text, "="); ok {
					address = plan.Address{Type: kind, Address: rest}
				}
				if name, ok := strings.CutPrefix(text, "name!"); ok {
					address = plan.Address{Type: "Hostname", Address: name}
				}
				n.Addresses = append(n.Addresses, address)
			}
		case "uid":
			n.UID = value
		case "provider":
			n.ProviderID = value
		case "created":
			n.Created = time.Date(2025, 1, 1, 0, atoi(t, d, value), 0, 0, time.UTC)
		case "NU":
			status, reason, _ := strings.Cut(value, "/")
			n.Condition = &plan.Condition{Status: status, Reason: reason}
		default:
			d.Fatalf(t, "unknown node field %s", key)
		}
	}
	return plan.NewNode(n)
}

// parseRow reads "DESTINATION -> TARGET [blackhole] [pending] [foreign]
// [by=provider|instance|address] [addrs=X,Y] [hop=X] [problem=TEXT] [table=T]
// [id=I]"; the target "nothing" means none.
func parseRow(t *testing.T, d *datadriven.TestData, line string, cloud *modelCloud) *plan.Row {
	fields := strings.Fields(line)
	if len(fields) < 3 || fields[1] != "->" {
		d.Fatalf(t, "a row reads DESTINATION -> TARGET, not %q", line)
	}
	cloud.ids++
	r := &plan.Row{ID: strconv.Itoa(cloud.ids), DestinationText: strings.Trim(fields[0], `"`), Table: cloud.table(0)}
	if fields[2] != "nothing" {
		r.Target = plan.Target{Kind: plan.TargetNodeName, Value: fields[2]}
	}
	for _, field := range fields[3:] {
		key, value, _ := strings.Cut(field, "=")
		switch key {
		case "blackhole":
			r.State = plan.StateBlackhole
		case "pending":
			r.State = plan.StatePending
		case "foreign":
			r.Foreign = true
		case "by":
			r.Target.Kind = map[string]plan.TargetKind{"provider": plan.TargetProviderID, "instance": plan.TargetInstanceID, "address": plan.TargetAddress}[value]
		case "addrs":
			r.HasAddresses = true
			for _, text := range strings.Split(value, ",") {
				if text != "" {
					r.Addresses = append(r.Addresses, plan.Address{Type: "InternalIP", Address: text})
				}
			}
		case "hop":
			r.NextHop = value
		case "problem":
			r.Problem = value
		case "table":
			r.Table = value
		case "id":
			r.ID = value
		default:
			d.Fatalf(t, "unknown row field %s", key)
		}
	}
	return r
}
