// Package engine is the state machine of one cluster: [Engine.Step] takes the
// time and one input (a session event, a list's or a call's result, a tick, an
// operator's command) and returns the effects that the caller must carry out.
// It has no goroutine, no lock, no clock and no I/O, so that a test or a
// simulation can run years of it in seconds; etcd's raft is the model.
//
// The duties of the caller (package reconciler):
//
//   - One goroutine owns the Engine and calls Step, one call at a time, with a
//     time that never goes back.
//   - Every effect is carried out, in order. StartList and StartCall are answered
//     by exactly one ListEnded or CallEnded with their id, also after a cancel.
//   - A Tick is due at [Engine.NextWake]; later is harmless, earlier too.
//
// How it decides: the unit of work is the destination CIDR. Nothing is planned
// ahead and stored: whenever something about a destination changes, it is
// examined anew (plan.Decide) against the newest nodes and the newest route
// view, and its first operation is queued. When that ends, it is examined again.
// So a late event can never carry out an outdated plan, and a hung call holds
// back nothing but its own destination.
package engine
