package engine_test

import (
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/cockroachdb/datadriven"

	"github.com/waymark-routes/waymark/internal/prefix"
	"github.com/waymark-routes/waymark/reconciler/engine"
	"github.com/waymark-routes/waymark/reconciler/plan"
)

// modelCloud is a route table with faults, in virtual time.
type modelCloud struct {
	rows          []*plan.Row
	tables        []string
	ids           int
	aware         bool // rows carry complete address sets
	byDestination bool // delete removes every row of the destination, create refuses a taken one
	latency       time.Duration
	limit         int
	faults        map[string][]fault
	lists, writes int
	inFlight      map[uint64]string
	most          int
}

// fault is one misbehaviour. left counts how often it still strikes; negative
// means always.
type fault struct {
	failure *engine.Failure
	left    int
	effect  bool          // the cloud does it all the same
	takes   time.Duration // in place of the latency
	lies    bool          // OK, but nothing happens
	outcome engine.Outcome
	set     bool // outcome is set
	rows    []string
	partial bool // list: answer with these rows only
	hangs   bool
}

var codes = map[string]engine.Code{
	"CANCELLED": engine.CodeCancelled, "UNKNOWN": engine.CodeUnknown, "INVALID_ARGUMENT": engine.CodeInvalidArgument,
	"DEADLINE_EXCEEDED": engine.CodeDeadlineExceeded, "NOT_FOUND": engine.CodeNotFound, "ALREADY_EXISTS": engine.CodeAlreadyExists,
	"PERMISSION_DENIED": engine.CodePermissionDenied, "RESOURCE_EXHAUSTED": engine.CodeResourceExhausted,
	"FAILED_PRECONDITION": engine.CodeFailedPrecondition, "ABORTED": engine.CodeAborted, "UNIMPLEMENTED": engine.CodeUnimplemented,
	"INTERNAL": engine.CodeInternal, "UNAVAILABLE": engine.CodeUnavailable, "UNAUTHENTICATED": engine.CodeUnauthenticated,
}

// addFaults reads lines "list|create|delete|replace [DESTINATION] CODE [xN]
// [after=D] [retry=D] [quota] [holder=H] [text=T] [effect] [local] [not-sent]
// [takes=D]", or in place of CODE one of lies, hangs, unchanged, pending,
// not-managed, or for a list rows=A,B.
func (c *modelCloud) addFaults(t *testing.T, d *datadriven.TestData) {
	for line := range lines(d.Input) {
		fields := strings.Fields(line)
		key := fields[0]
		rest := fields[1:]
		if len(rest) > 0 && strings.Contains(rest[0], "/") && !strings.Contains(rest[0], "=") {
			key += " " + rest[0]
			rest = rest[1:]
		}
		if len(rest) > 0 && rest[0] == "none" {
			delete(c.faults, key)
			continue
		}
		f := fault{left: -1}
		for _, field := range rest {
			name, value, _ := strings.Cut(field, "=")
			failure := f.failure
			switch {
			case codes[name] != 0:
				f.failure = &engine.Failure{Code: codes[name], Name: name}
			case strings.HasPrefix(name, "x") && strings.Trim(name[1:], "0123456789") == "":
				f.left = atoi(t, d, name[1:])
			case name == "retry":
				failure.HasRetry, failure.RetryAfter = true, duration(t, d, value)
			case name == "quota":
				failure.Quota = true
			case name == "holder":
				failure.Holder = value
			case name == "text":
				failure.Text = strings.ReplaceAll(value, "_", " ")
			case name == "local":
				failure.Local = true
			case name == "not-sent":
				failure.Local, failure.NotSent = true, true
			case name == "effect":
				f.effect = true
			case name == "takes":
				f.takes = duration(t, d, value)
			case name == "lies":
				f.lies = true
			case name == "hangs":
				f.hangs = true
			case name == "unchanged":
				f.outcome, f.set = engine.OutcomeUnchanged, true
			case name == "pending":
				f.outcome, f.set = engine.OutcomePending, true
			case name == "not-managed":
				f.outcome, f.set, f.lies = engine.OutcomeNotManaged, true, true
			case name == "rows":
				f.partial = true
				if value != "" {
					f.rows = strings.Split(value, ",")
				}
			default:
				d.Fatalf(t, "unknown fault %s", name)
			}
		}
		c.faults[key] = append(c.faults[key], f)
	}
}

func (c *modelCloud) table(i int) string {
	if len(c.tables) == 0 {
		return ""
	}
	return c.tables[i]
}

// strike takes the next fault for a call, if there is one.
func (c *modelCloud) strike(kind, destination string) *fault {
	for _, key := range []string{kind + " " + destination, kind} {
		list := c.faults[key]
		for i := range list {
			if list[i].left == 0 {
				continue
			}
			if list[i].left > 0 {
				list[i].left--
			}
			f := list[i]
			return &f
		}
	}
	return nil
}

func (p *play) startList(effect engine.StartList) {
	c := p.cloud
	c.lists++
	f := c.strike("list", "")
	takes := c.latency
	if f != nil && f.takes > 0 {
		takes = f.takes
	}
	if f != nil && f.failure != nil {
		failure := *f.failure
		p.printf("list: %s", failure.String())
		p.answers = append(p.answers, answer{at: p.now.Add(takes), input: func() engine.Input {
			return engine.ListEnded{ID: effect.ID, Err: &failure}
		}})
		return
	}
	p.printf("list")
	// The list shows the table as it is when it begins.
	var rows []*plan.Row
	for _, r := range c.rows {
		if f != nil && f.partial && !slices.Contains(f.rows, r.DestinationText) {
			continue
		}
		listed := *r
		rows = append(rows, &listed)
	}
	tables := c.tables
	if len(tables) == 0 {
		tables = []string{""}
	}
	p.answers = append(p.answers, answer{at: p.now.Add(takes), input: func() engine.Input {
		return engine.ListEnded{ID: effect.ID, Tables: tables, Rows: rows}
	}})
}

func (p *play) startCall(effect engine.StartCall) {
	c := p.cloud
	c.writes++
	op := effect.Op
	f := c.strike(op.Kind.String(), op.Destination.String())
	takes := c.latency
	if f != nil && f.takes > 0 {
		takes = f.takes
	}
	if c.inFlight == nil {
		c.inFlight = map[uint64]string{}
	}
	label := op.Kind.String() + " " + op.Destination.String()
	switch op.Kind {
	case plan.OpCreate:
		label += " -> " + op.Node.Name
	case plan.OpDelete:
		label = "delete " + op.Row.DestinationText + " -> " + nothing(op.Row.Target.Value)
	case plan.OpReplace:
		label += " " + nothing(op.Row.Target.Value) + " -> " + op.Node.Name
	}
	c.inFlight[effect.ID] = label
	c.most = max(c.most, len(c.inFlight))
	if f != nil && f.hangs {
		p.printf("%s: hangs", label)
		return
	}
	finish := func() engine.Input {
		delete(c.inFlight, effect.ID)
		in := engine.CallEnded{ID: effect.ID}
		if f != nil && f.set {
			in.Outcome = f.outcome
		}
		if f != nil && f.failure != nil {
			failure := *f.failure
			in.Err = &failure
			if f.effect {
				_ = c.apply(op)
			}
		} else if f == nil || !f.lies {
			outcome, failure := c.applied(op)
			in.Err = failure
			if f == nil || !f.set {
				in.Outcome = outcome
			}
		}
		result := "ok"
		switch {
		case in.Err != nil:
			result = in.Err.String()
		case in.Outcome != engine.OutcomeCreated:
			result = [...]string{"", "unchanged", "pending", "not managed"}[in.Outcome]
		}
		p.printf("%s: %s", label, result)
		return in
	}
	if takes == 0 {
		p.answers = append(p.answers, answer{at: p.now, input: finish})
		return
	}
	p.printf("%s: sent", label)
	p.answers = append(p.answers, answer{at: p.now.Add(takes), input: finish})
}

func nothing(target string) string {
	if target == "" {
		return "nothing"
	}
	return target
}

// cancel ends a call that is under way; its outcome is unknown.
func (c *modelCloud) cancel(p *play, id uint64) string {
	label := c.inFlight[id]
	delete(c.inFlight, id)
	p.answers = append(p.answers, answer{at: p.now, input: func() engine.Input {
		return engine.CallEnded{ID: id, Err: &engine.Failure{Code: engine.CodeCancelled, Name: "CANCELLED", Local: true}}
	}})
	return label
}

func (c *modelCloud) apply(op plan.Op) engine.Outcome {
	outcome, _ := c.applied(op)
	return outcome
}

// applied changes the table.
func (c *modelCloud) applied(op plan.Op) (engine.Outcome, *engine.Failure) {
	switch op.Kind {
	case plan.OpDelete:
		before := len(c.rows)
		c.rows = slices.DeleteFunc(c.rows, func(r *plan.Row) bool {
			return r.ID == op.Row.ID && r.Table == op.Row.Table || c.byDestination && same(r.DestinationText, op.Row.DestinationText)
		})
		if len(c.rows) == before {
			return engine.OutcomeUnchanged, nil
		}
		return engine.OutcomeCreated, nil
	case plan.OpReplace:
		for _, r := range c.rows {
			if r.ID == op.Row.ID && r.Table == op.Row.Table {
				r.Target, r.State = plan.Target{Kind: plan.TargetNodeName, Value: op.Node.Name}, plan.StateActive
				if c.aware {
					r.HasAddresses, r.Addresses = true, op.Node.Addresses
				}
				return engine.OutcomeCreated, nil
			}
		}
		return 0, &engine.Failure{Code: engine.CodeNotFound, Name: "NOT_FOUND"}
	case plan.OpCreate:
		tables := c.tables
		if len(tables) == 0 {
			tables = []string{""}
		}
		outcome := engine.OutcomeUnchanged
		for _, table := range tables {
			taken := slices.IndexFunc(c.rows, func(r *plan.Row) bool { return r.Table == table && same(r.DestinationText, op.Destination.String()) })
			if taken >= 0 {
				r := c.rows[taken]
				if r.Target.Value == op.Node.Name && r.State != plan.StateBlackhole {
					continue
				}
				return 0, &engine.Failure{Code: engine.CodeAlreadyExists, Name: "ALREADY_EXISTS", Holder: nothing(r.Target.Value)}
			}
			if c.limit > 0 && len(c.rows) >= c.limit {
				return 0, &engine.Failure{Code: engine.CodeResourceExhausted, Name: "RESOURCE_EXHAUSTED", Text: "the table is full (quota " + strconv.Itoa(c.limit) + ")", Quota: true}
			}
			c.ids++
			r := &plan.Row{ID: strconv.Itoa(c.ids), Table: table, DestinationText: op.Destination.String(), Target: plan.Target{Kind: plan.TargetNodeName, Value: op.Node.Name}}
			if c.aware {
				r.HasAddresses, r.Addresses = true, op.Node.Addresses
			}
			c.rows = append(c.rows, r)
			outcome = engine.OutcomeCreated
		}
		return outcome, nil
	}
	return 0, nil
}

func same(a, b string) bool {
	pa, errA := prefix.Canonical(a)
	pb, errB := prefix.Canonical(b)
	return errA == nil && errB == nil && pa == pb
}
