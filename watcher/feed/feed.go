// Package feed stands between a node source and a session: it keeps one pending
// slot per node, so that however slow the reader is, memory is bounded by the
// number of nodes, the newest state wins, and a delete is never lost (invariants
// S2, S3).
package feed

import (
	"sync"
	"time"

	"github.com/waymark-routes/waymark/watcher/source"
)

// Kind says what happened to a node since the reader last heard of it.
type Kind uint8

// The kinds.
const (
	Added Kind = iota
	Updated
	Deleted
)

// Event is one node's pending change.
type Event struct {
	Kind Kind
	// Node is the newest state; for Deleted only the name is set.
	Node source.Node
	// Fields is the union of what changed.
	Fields source.Field
	// Observed is when the oldest merged change was seen.
	Observed time.Time
}

// Item is what Take returns: a whole snapshot, or one event.
type Item struct {
	Snapshot        bool
	Nodes           []source.Node
	ResourceVersion string
	Event           Event
}

// Feed implements source.Sink on one side and gives items on the other. It is
// safe for one writer and one reader.
type Feed struct {
	now  func() time.Time
	wake chan struct{}

	mu       sync.Mutex // guards all below
	snapshot *Item
	slots    map[string]*Event
	order    []string
}

// New makes an empty feed.
func New() *Feed {
	return &Feed{now: time.Now, wake: make(chan struct{}, 1), slots: map[string]*Event{}}
}

// Wake is signalled when there may be something to take.
func (f *Feed) Wake() <-chan struct{} { return f.wake }

func (f *Feed) signal() {
	select {
	case f.wake <- struct{}{}:
	default:
	}
}

// Replace implements source.Sink: what was pending is covered by the snapshot.
func (f *Feed) Replace(nodes []source.Node, resourceVersion string) {
	f.mu.Lock()
	f.snapshot = &Item{Snapshot: true, Nodes: nodes, ResourceVersion: resourceVersion}
	clear(f.slots)
	f.order = nil
	f.mu.Unlock()
	f.signal()
}

// Added implements source.Sink.
func (f *Feed) Added(node source.Node) { f.put(Event{Kind: Added, Node: node}) }

// Updated implements source.Sink. Updates without a relevant field are not for
// the reader.
func (f *Feed) Updated(node source.Node, fields source.Field) {
	if fields != 0 {
		f.put(Event{Kind: Updated, Node: node, Fields: fields})
	}
}

// Deleted implements source.Sink.
func (f *Feed) Deleted(name string) { f.put(Event{Kind: Deleted, Node: source.Node{Name: name}}) }

func (f *Feed) put(e Event) {
	e.Observed = f.now()
	name := e.Node.Name
	f.mu.Lock()
	slot := f.slots[name]
	if slot == nil {
		f.slots[name] = &e
		f.order = append(f.order, name)
	} else {
		*slot = merge(*slot, e)
	}
	f.mu.Unlock()
	f.signal()
}

// merge joins a pending change and a newer one.
func merge(old, newer Event) Event {
	newer.Observed = old.Observed
	switch {
	case newer.Kind == Deleted:
	case old.Kind == Deleted:
		// The reader may know the old node: for it this is another machine under the
		// same name (field case B-10).
		newer.Kind, newer.Fields = Updated, newer.Fields|source.FieldUID
	default:
		if old.Kind == Added {
			newer.Kind = Added
		}
		newer.Fields |= old.Fields
	}
	return newer
}

// Take returns the next item; ok is false when there is none.
func (f *Feed) Take() (item Item, ok bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.snapshot != nil {
		item, f.snapshot = *f.snapshot, nil
		return item, true
	}
	if len(f.order) == 0 {
		return Item{}, false
	}
	name := f.order[0]
	f.order = f.order[1:]
	if len(f.order) == 0 {
		f.order = nil
	}
	item.Event = *f.slots[name]
	delete(f.slots, name)
	return item, true
}

// Pending is the number of slots in use.
func (f *Feed) Pending() int {
	f.mu.Lock()
	defer f.mu.Unlock()
	return len(f.slots)
}
