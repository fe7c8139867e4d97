package condition_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/kubernetes/fake"
	clienttesting "k8s.io/client-go/testing"
	"k8s.io/client-go/tools/record"

	nodesv1 "github.com/waymark-routes/waymark/proto/waymark/nodes/v1"
	"github.com/waymark-routes/waymark/watcher/condition"
	"github.com/waymark-routes/waymark/watcher/source"
)

// rig is a keeper against an API server that writes down patches and fails as it
// is told.
type rig struct {
	keeper   *condition.Keeper
	recorder *record.FakeRecorder
	mu       sync.Mutex
	patches  []string
	errs     []error
}

func (r *rig) take() string {
	r.mu.Lock()
	defer r.mu.Unlock()
	out := strings.Join(r.patches, "; ")
	r.patches = nil
	return out
}

// play runs f in virtual time with a running keeper.
func play(t *testing.T, off bool, f func(r *rig)) {
	synctest.Test(t, func(t *testing.T) {
		r := &rig{recorder: record.NewFakeRecorder(1000)}
		client := fake.NewClientset()
		client.PrependReactor("patch", "nodes", func(action clienttesting.Action) (bool, runtime.Object, error) {
			patch := action.(clienttesting.PatchAction)
			var body struct {
				Metadata struct{ UID string }
				Status   struct{ Conditions []corev1.NodeCondition }
			}
			if err := json.Unmarshal(patch.GetPatch(), &body); err != nil {
				t.Error(err)
			}
			r.mu.Lock()
			defer r.mu.Unlock()
			c := body.Status.Conditions[0]
			r.patches = append(r.patches, fmt.Sprintf("%s/%s %s %s/%s", patch.GetName(), body.Metadata.UID, c.Type, c.Status, c.Reason))
			if patch.GetSubresource() != "status" || len(body.Status.Conditions) != 1 {
				t.Errorf("patch of %q with %d conditions", patch.GetSubresource(), len(body.Status.Conditions))
			}
			if len(r.errs) > 0 {
				err := r.errs[0]
				r.errs = r.errs[1:]
				return true, nil, err
			}
			return true, &corev1.Node{}, nil
		})
		r.keeper = condition.New(condition.Options{Client: client, Recorder: r.recorder, Off: off, Logger: slog.New(slog.DiscardHandler)})
		ctx, cancel := context.WithCancel(t.Context())
		ended := make(chan struct{})
		go func() { r.keeper.Run(ctx); close(ended) }()
		f(r)
		cancel()
		<-ended
		synctest.Wait()
	})
}

func observe(r *rig, name, current string) {
	n := source.Node{Name: name, UID: "u-" + name}
	if status, reason, ok := strings.Cut(current, "/"); ok {
		n.Condition = &source.Condition{Status: status, Reason: reason}
	}
	r.keeper.Observe(n)
}

func verdict(r *rig, name string, availability nodesv1.NodeAvailability) {
	r.keeper.Verdict(&nodesv1.NodeVerdict{Node: name, Uid: "u-" + name, Availability: availability})
}

const (
	available   = nodesv1.NodeAvailability_NODE_AVAILABILITY_AVAILABLE
	unavailable = nodesv1.NodeAvailability_NODE_AVAILABILITY_UNAVAILABLE
	notManaged  = nodesv1.NodeAvailability_NODE_AVAILABILITY_NOT_MANAGED
	unchanged   = nodesv1.NodeAvailability_NODE_AVAILABILITY_UNCHANGED
)

func TestB51B69WhatIsPatched(t *testing.T) {
	tests := []struct {
		name, current string
		verdict       nodesv1.NodeAvailability
		want          string
	}{
		{"absent, available", "", available, "a/u-a NetworkUnavailable False/RouteCreated"},
		{"absent, unavailable", "", unavailable, "a/u-a NetworkUnavailable True/NoRouteCreated"},
		{"another reason, available", "False/CNIIsUp", available, "a/u-a NetworkUnavailable False/RouteCreated"},
		{"another reason, unavailable", "False/CNIIsUp", unavailable, "a/u-a NetworkUnavailable True/NoRouteCreated"},
		{"set already, available", "False/RouteCreated", available, ""},
		{"set already, unavailable", "True/NoRouteCreated", unavailable, ""},
		{"kubelet's True is cleared", "True/NoRouteCreated", available, "a/u-a NetworkUnavailable False/RouteCreated"},
		{"not managed clears our own", "True/NoRouteCreated", notManaged, "a/u-a NetworkUnavailable False/RouteCreated"},
		{"not managed leaves others", "True/Other", notManaged, ""},
		{"a notice alone changes nothing", "", unchanged, ""},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			play(t, false, func(r *rig) {
				observe(r, "a", test.current)
				verdict(r, "a", test.verdict)
				synctest.Wait()
				if got := r.take(); got != test.want {
					t.Errorf("patched %q, want %q", got, test.want)
				}
			})
		})
	}
}

func TestOffWritesNothing(t *testing.T) {
	play(t, true, func(r *rig) {
		observe(r, "a", "")
		verdict(r, "a", unavailable)
		synctest.Wait()
		if got := r.take(); got != "" {
			t.Errorf("patched %q", got)
		}
	})
}

func TestB52ErrorsOfPatches(t *testing.T) {
	resource := schema.GroupResource{Resource: "nodes"}
	conflict := apierrors.NewConflict(resource, "a", errors.New("changed"))
	tests := []struct {
		name string
		errs []error
		want int // patches in all, within a minute
	}{
		{"three conflicts, then it works", []error{conflict, conflict, conflict}, 4},
		{"not found ends quietly", []error{apierrors.NewNotFound(resource, "a")}, 1},
		{"forbidden is not retried", []error{apierrors.NewForbidden(resource, "a", errors.New("no"))}, 1},
		{"B-30: other errors are retried", []error{errors.New("refused"), errors.New("refused")}, 3},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			play(t, false, func(r *rig) {
				r.errs = test.errs
				observe(r, "a", "")
				verdict(r, "a", available)
				time.Sleep(time.Minute) // virtual
				synctest.Wait()
				if got := len(r.patches); got != test.want {
					t.Errorf("%d patches, want %d", got, test.want)
				}
			})
		})
	}
}

func TestPutBackAtMostOnceAMinute(t *testing.T) {
	play(t, false, func(r *rig) {
		observe(r, "a", "")
		verdict(r, "a", available)
		synctest.Wait()
		r.take()
		for range 10 { // somebody fights
			observe(r, "a", "True/Other")
			time.Sleep(time.Second)
		}
		synctest.Wait()
		if got := r.take(); got != "" {
			t.Errorf("put back at once: %q", got)
		}
		time.Sleep(time.Minute)
		synctest.Wait()
		if got := r.take(); got != "a/u-a NetworkUnavailable False/RouteCreated" {
			t.Errorf("after a minute: %q", got)
		}
		// A new verdict does not wait.
		verdict(r, "a", unavailable)
		synctest.Wait()
		if got := r.take(); got != "a/u-a NetworkUnavailable True/NoRouteCreated" {
			t.Errorf("after a new verdict: %q", got)
		}
	})
}

func TestVerdictOfAnotherMachineIsIgnored(t *testing.T) {
	play(t, false, func(r *rig) {
		observe(r, "a", "")
		r.keeper.Verdict(&nodesv1.NodeVerdict{Node: "a", Uid: "old", Availability: unavailable})
		verdict(r, "gone", unavailable)
		synctest.Wait()
		if got := r.take(); got != "" {
			t.Errorf("patched %q", got)
		}
	})
}

func TestB68EventsAreFew(t *testing.T) {
	play(t, false, func(r *rig) {
		observe(r, "a", "")
		notice := &nodesv1.NodeVerdict{Node: "a", Uid: "u-a", Availability: unavailable, Notice: &nodesv1.NodeNotice{Type: "Warning", Reason: "FailedToCreateRoute", Message: "overlap"}}
		for range 24 * 60 * 6 { // every 10 s for a day
			r.keeper.Verdict(notice)
			time.Sleep(10 * time.Second)
		}
		if n := len(r.recorder.Events); n < 10 || n > 200 {
			t.Errorf("%d events in a day", n)
		}
	})
}
