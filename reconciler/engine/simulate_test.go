package engine_test

import (
	"flag"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/waymark-routes/waymark/internal/prefix"
	"github.com/waymark-routes/waymark/reconciler/engine"
	"github.com/waymark-routes/waymark/reconciler/plan"
)

var (
	seeds     = flag.Int("seeds", 500, "how many seeds TestSimulation plays")
	trace     = flag.Bool("show", false, "print what TestSimulation's seeds do")
	firstSeed = flag.Uint64("seed", 1, "the first seed of TestSimulation")
)

// TestSimulation plays random worlds in virtual time: a cluster that churns, a
// cloud that fails, lies, lags, throttles and hangs, sessions that break, a plugin
// that restarts. When the faults stop, the cloud must hold exactly what the nodes
// need, foreign routes must stand, and the engine must be quiet.
func TestSimulation(t *testing.T) {
	for i := range *seeds {
		seed := *firstSeed + uint64(i)
		if err := simulate(seed); err != nil {
			t.Fatalf("seed %d: %v\nreplay: go test ./reconciler/engine -run TestSimulation -seeds 1 -seed %d", seed, err, seed)
		}
	}
}

// simulation is one seed's world.
type simulation struct {
	*play
	rng     *rand.Rand
	foreign []string
}

func simulate(seed uint64) (err error) {
	defer func() {
		if cause := recover(); cause != nil {
			err = fmt.Errorf("panic: %v", cause)
		}
	}()
	s := &simulation{play: newPlay(), rng: rand.New(rand.NewPCG(seed, 7))}
	s.quiet = !*trace
	defer func() {
		if *trace {
			fmt.Print(s.out.String())
		}
	}()
	s.cfg.Seed = seed
	s.cfg.PollOnly = s.rng.IntN(5) == 0
	s.info.Replace = s.rng.IntN(3) == 0
	s.cloud.aware = s.rng.IntN(3) == 0
	s.cloud.byDestination = s.rng.IntN(3) == 0
	s.cloud.latency = time.Duration(s.rng.IntN(3)) * 100 * time.Millisecond
	s.foreign = []string{"0.0.0.0/0 -> gw", "10.0.0.0/8 -> vpn", "172.16.0.0/24 -> old"}
	for _, text := range s.foreign {
		destination, target, _ := strings.Cut(text, " -> ")
		s.row(destination, target)
	}
	for i := range s.rng.IntN(6) {
		s.row(fmt.Sprintf("10.244.%d.0/24", i), fmt.Sprintf("n%d", s.rng.IntN(8)))
	}
	for i := range s.rng.IntN(8) {
		s.nodes[fmt.Sprintf("n%d", i)] = s.node(i)
	}
	s.engine = engine.New(s.cfg, s.now)
	info := s.info
	s.step(engine.PluginChanged{Healthy: true, Info: &info, NewView: true})
	s.open("one")
	s.snapshot()
	s.settle(s.now)
	for range 30 {
		s.disturb()
		s.settle(s.now.Add(time.Duration(s.rng.IntN(20_000)) * time.Millisecond))
	}
	// The faults stop; everybody is there again.
	clear(s.cloud.faults)
	for id := range s.cloud.inFlight { // what hangs ends at its deadline
		s.answers = append(s.answers, answer{at: s.now.Add(30 * time.Second), input: func() engine.Input {
			return engine.CallEnded{ID: id, Err: &engine.Failure{Code: engine.CodeDeadlineExceeded, Name: "DEADLINE_EXCEEDED", Local: true}}
		}})
	}
	s.step(engine.PluginChanged{Healthy: true, Info: &info, NewView: true})
	s.open("one")
	s.snapshot()
	s.settle(s.now.Add(90 * time.Minute))
	if err := s.check(); err != nil {
		return err
	}
	lists, writes := s.cloud.lists, s.cloud.writes
	s.settle(s.now.Add(30 * time.Minute))
	if more := s.cloud.writes - writes; more > 0 {
		return fmt.Errorf("%d writes in half an hour without a cause", more)
	}
	if more := s.cloud.lists - lists; !s.cfg.PollOnly && more > 1 || more > 181 {
		return fmt.Errorf("%d lists in half an hour without a cause", more)
	}
	return nil
}

func (s *simulation) row(destination, target string) {
	s.cloud.ids++
	r := &plan.Row{ID: fmt.Sprint(s.cloud.ids), DestinationText: destination, Target: plan.Target{Kind: plan.TargetNodeName, Value: target}}
	if s.rng.IntN(6) == 0 && strings.HasPrefix(destination, "10.244") {
		r.State = plan.StateBlackhole
	}
	s.cloud.rows = append(s.cloud.rows, r)
}

// node makes a node; its CIDR is mostly its own, sometimes another's.
func (s *simulation) node(i int) *plan.Node {
	block := i
	if s.rng.IntN(4) == 0 {
		block = s.rng.IntN(8)
	}
	n := plan.Node{
		Name: fmt.Sprintf("n%d", i), UID: fmt.Sprintf("u%d-%d", i, s.rng.IntN(1000)),
		PodCIDRs:  []string{fmt.Sprintf("10.244.%d.0/24", block)},
		Addresses: []plan.Address{{Type: "InternalIP", Address: fmt.Sprintf("192.0.2.%d", 1+s.rng.IntN(200))}},
		Created:   time.Unix(int64(s.rng.IntN(100)), 0),
	}
	if s.rng.IntN(10) == 0 {
		n.PodCIDRs = nil
	}
	return plan.NewNode(n)
}

// disturb does one random thing to the world.
func (s *simulation) disturb() {
	i := s.rng.IntN(8)
	name := fmt.Sprintf("n%d", i)
	switch s.rng.IntN(12) {
	case 0, 1, 2:
		change := engine.NodeAdded
		if s.nodes[name] != nil {
			change = engine.NodeUpdated
		}
		s.nodes[name] = s.node(i)
		s.change(change, s.nodes[name])
	case 3:
		if n := s.nodes[name]; n != nil {
			delete(s.nodes, name)
			s.change(engine.NodeDeleted, n)
		}
	case 4, 5, 6:
		s.fault()
	case 7:
		clear(s.cloud.faults)
	case 8:
		s.open("one") // the watcher reconnects
		s.snapshot()
	case 9:
		s.step(engine.PluginChanged{Reason: "away"})
		s.settle(s.now.Add(time.Duration(s.rng.IntN(5000)) * time.Millisecond))
		info := s.info
		s.step(engine.PluginChanged{Healthy: true, Info: &info, NewView: true})
	case 10: // somebody removes a route of ours by hand
		if at := slices.IndexFunc(s.cloud.rows, func(r *plan.Row) bool { return strings.HasPrefix(r.DestinationText, "10.244.") }); at >= 0 {
			s.cloud.rows = slices.Delete(s.cloud.rows, at, at+1)
		}
	case 11:
		s.row(fmt.Sprintf("10.244.%d.0/24", 20+s.rng.IntN(5)), "nobody")
	}
}

func (s *simulation) fault() {
	failure := func(code engine.Code, name string) *engine.Failure { return &engine.Failure{Code: code, Name: name} }
	kind := []string{"create", "create", "delete", "replace", "list"}[s.rng.IntN(5)]
	f := fault{left: 1 + s.rng.IntN(3)}
	switch s.rng.IntN(9) {
	case 0:
		f.failure = failure(engine.CodeUnavailable, "UNAVAILABLE")
	case 1:
		f.failure = failure(engine.CodeInternal, "INTERNAL")
	case 2:
		f.failure = failure(engine.CodeDeadlineExceeded, "DEADLINE_EXCEEDED")
		f.failure.Local, f.effect, f.takes = true, s.rng.IntN(2) == 0, 30*time.Second
	case 3:
		f.failure = failure(engine.CodeResourceExhausted, "RESOURCE_EXHAUSTED")
		f.failure.HasRetry, f.failure.RetryAfter = true, time.Duration(s.rng.IntN(60))*time.Second
	case 4:
		f.failure = failure(engine.CodeInvalidArgument, "INVALID_ARGUMENT")
	case 5:
		f.failure = failure(engine.CodeAborted, "ABORTED")
	case 6:
		f.lies = kind != "list"
	case 7:
		f.hangs = kind != "list"
	case 8:
		f.failure = failure(engine.CodeFailedPrecondition, "FAILED_PRECONDITION")
	}
	s.cloud.faults[kind] = append(s.cloud.faults[kind], f)
}

// check compares the cloud with what the nodes need.
func (s *simulation) check() error {
	var foreign []string
	have := map[string][]string{}
	for _, r := range s.cloud.rows {
		d, err := prefix.Canonical(r.DestinationText)
		if err != nil || !strings.HasPrefix(d.String(), "10.244.") {
			foreign = append(foreign, r.DestinationText+" -> "+r.Target.Value)
			continue
		}
		if r.State == plan.StateBlackhole {
			return fmt.Errorf("a blackhole stays at %s", d)
		}
		if n := s.nodes[r.Target.Value]; s.cloud.aware && n != nil && r.HasAddresses && fmt.Sprint(r.Addresses) != fmt.Sprint(n.Addresses) {
			return fmt.Errorf("%s carries %v, the node has %v", d, r.Addresses, n.Addresses)
		}
		have[d.String()] = append(have[d.String()], r.Target.Value)
	}
	slices.Sort(foreign)
	want := slices.Clone(s.foreign)
	slices.Sort(want)
	if !slices.Equal(foreign, want) {
		return fmt.Errorf("foreign routes are %v, were %v", foreign, want)
	}
	claims := map[string][]string{}
	for _, n := range s.nodes {
		for _, d := range n.Destinations() {
			claims[d.String()] = append(claims[d.String()], n.Name)
		}
	}
	for d, names := range claims {
		if !slices.ContainsFunc(have[d], func(target string) bool { return slices.Contains(names, target) }) {
			return fmt.Errorf("%s is claimed by %v, the cloud has %v; rows: %+v", d, names, have[d], s.engine.Rows(""))
		}
	}
	for d, targets := range have {
		for _, target := range targets {
			if !slices.Contains(claims[d], target) {
				return fmt.Errorf("%s points at %s, claimed by %v; rows: %+v", d, target, claims[d], s.engine.Rows(""))
			}
		}
	}
	for _, status := range s.engine.NodeStatuses("") {
		served := true
		for _, d := range status.Node.Destinations() {
			served = served && slices.Contains(have[d.String()], status.Node.Name)
		}
		wants := len(status.Node.Destinations()) > 0
		switch availability := status.Verdict.Availability; {
		case wants && served && availability != engine.Available:
			return fmt.Errorf("node %s is served, its verdict is %v (%s)", status.Node.Name, availability, status.Verdict.Message)
		case wants && !served && availability == engine.Available:
			return fmt.Errorf("node %s is not served, its verdict is available", status.Node.Name)
		}
	}
	return nil
}
