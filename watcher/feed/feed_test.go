package feed_test

import (
	"fmt"
	"testing"

	"pgregory.net/rapid"

	"github.com/waymark-routes/waymark/watcher/feed"
	"github.com/waymark-routes/waymark/watcher/source"
)

// TestS2S3ReaderEndsWithTheWritersNodes: whatever the interleaving of writes and
// reads, the reader ends with exactly the writer's nodes, and the feed never holds
// more slots than there are names.
func TestS2S3ReaderEndsWithTheWritersNodes(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		f := feed.New()
		written, read := map[string]string{}, map[string]string{}
		names := []string{"a", "b", "c"}
		take := func() bool {
			item, ok := f.Take()
			switch {
			case !ok:
				return false
			case item.Snapshot:
				clear(read)
				for _, n := range item.Nodes {
					read[n.Name] = n.UID
				}
			case item.Event.Kind == feed.Deleted:
				delete(read, item.Event.Node.Name)
			default:
				if _, known := read[item.Event.Node.Name]; !known && item.Event.Kind == feed.Updated && item.Event.Fields == 0 {
					t.Fatalf("an update of %s without a field", item.Event.Node.Name)
				}
				read[item.Event.Node.Name] = item.Event.Node.UID
			}
			return true
		}
		steps := rapid.IntRange(1, 60).Draw(t, "steps")
		for step := range steps {
			name := rapid.SampledFrom(names).Draw(t, "name")
			uid := fmt.Sprint(step)
			switch rapid.IntRange(0, 9).Draw(t, "what") {
			case 0:
				var nodes []source.Node
				for n, u := range written {
					nodes = append(nodes, source.Node{Name: n, UID: u})
				}
				f.Replace(nodes, "")
			case 1, 2, 3:
				if _, ok := written[name]; ok {
					f.Updated(source.Node{Name: name, UID: uid}, source.FieldAddresses)
				} else {
					f.Added(source.Node{Name: name, UID: uid})
				}
				written[name] = uid
			case 4, 5:
				if _, ok := written[name]; ok {
					f.Deleted(name)
					delete(written, name)
				}
			default:
				take()
			}
			if f.Pending() > len(names) {
				t.Fatalf("%d slots for %d names", f.Pending(), len(names))
			}
		}
		for take() {
		}
		if fmt.Sprint(read) != fmt.Sprint(written) {
			t.Fatalf("the reader has %v, the writer %v", read, written)
		}
	})
}

func TestMerge(t *testing.T) {
	n := func(uid string) source.Node { return source.Node{Name: "a", UID: uid} }
	tests := []struct {
		name   string
		put    func(f *feed.Feed)
		kind   feed.Kind
		uid    string
		fields source.Field
	}{
		{"add and update is an add", func(f *feed.Feed) { f.Added(n("1")); f.Updated(n("2"), source.FieldAddresses) }, feed.Added, "2", source.FieldAddresses},
		{"updates join their fields", func(f *feed.Feed) { f.Updated(n("1"), source.FieldAddresses); f.Updated(n("2"), source.FieldPodCIDRs) }, feed.Updated, "2", source.FieldAddresses | source.FieldPodCIDRs},
		{"delete and add is another machine (B-10)", func(f *feed.Feed) { f.Deleted("a"); f.Added(n("2")) }, feed.Updated, "2", source.FieldUID},
		{"a delete wins over what came before", func(f *feed.Feed) { f.Updated(n("1"), source.FieldAddresses); f.Deleted("a") }, feed.Deleted, "", 0},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			f := feed.New()
			test.put(f)
			item, ok := f.Take()
			if e := item.Event; !ok || e.Kind != test.kind || e.Node.UID != test.uid || e.Fields != test.fields {
				t.Errorf("got %+v, %t", item.Event, ok)
			}
			if _, more := f.Take(); more {
				t.Error("more than one slot for one node")
			}
		})
	}
}

func TestIrrelevantUpdatesAreNotSent(t *testing.T) {
	f := feed.New()
	f.Updated(source.Node{Name: "a"}, 0)
	if item, ok := f.Take(); ok {
		t.Errorf("sent: %+v", item)
	}
}
