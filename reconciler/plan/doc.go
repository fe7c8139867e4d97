// Package plan decides what a cluster's routes need, and nothing else: nodes and
// a route view go in, operations come out. It has no I/O, no clock and no
// goroutine, and it imports nothing of Waymark but the pure package prefix.
//
// The unit of a decision is the destination CIDR. [Decide] looks at one
// destination: who claims it, which rows the cloud lists for it, what must be
// deleted, replaced and created, in that order. A full pass is Decide over every
// destination of a [World]; a node pass is Decide over the destinations that
// [World.Touched] names for the changed node. There is no second logic.
//
// Start with [World], then [Decide].
package plan
