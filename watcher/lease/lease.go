// Package lease elects the one watcher that may hold a session, and says how long
// writes stay allowed (invariants S4, S5). It wraps client-go's leader election:
// it campaigns only while the pod is eligible (its plugin is healthy), steps down
// when it has not been for a while, and ends the work before it releases the
// Lease.
package lease

import (
	"context"
	"fmt"
	"log/slog"
	"sync"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/leaderelection"
	"k8s.io/client-go/tools/leaderelection/resourcelock"

	"github.com/waymark-routes/waymark/internal/elapsed"
)

// margin is taken off the Lease's remaining time (S5).
const margin = 3 * time.Second

// releaseTimeout bounds the release at a term's end.
const releaseTimeout = 3 * time.Second

// Token orders leaderships.
type Token struct {
	LeaseCreated time.Time
	LeaseUID     string
	Transitions  int64
}

// Options tune an Elector.
type Options struct {
	Client          kubernetes.Interface
	Namespace, Name string
	// Identity is this process's holder identity.
	Identity                                  string
	LeaseDuration, RenewDeadline, RetryPeriod time.Duration
	// Grace is how long the pod may be ineligible, or unasked for a write lease,
	// before it steps down (--plugin-grace).
	Grace time.Duration
	// Eligible says whether this pod may lead now; its channel is closed at the
	// next change.
	Eligible func() (ok bool, changed <-chan struct{})
	// Now is the lease clock; see package elapsed.
	Now    func() time.Time
	Logger *slog.Logger
}

// Elector campaigns for the Lease.
type Elector struct {
	options Options

	mu        sync.Mutex // guards all below
	leading   bool
	renewed   time.Time // start of the last successful renewal
	lastAsked time.Time
	stepDown  chan struct{} // closed to step down; nil while not leading
	released  chan struct{} // closed once the Lease is released
}

// New makes an elector.
func New(o Options) *Elector { return &Elector{options: o} }

// Leading says whether this process leads.
func (e *Elector) Leading() bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.leading
}

// Remaining answers a write lease request: how long the Lease still stands, by
// its last successful renewal's start, less the margin.
func (e *Elector) Remaining() (remaining time.Duration, unlimited bool) {
	e.mu.Lock()
	defer e.mu.Unlock()
	now := e.options.Now()
	e.lastAsked = now
	if !e.leading || e.renewed.IsZero() {
		return 0, false
	}
	return e.renewed.Add(e.options.LeaseDuration - margin).Sub(now), false
}

// StepDown makes a leader end its work and release the Lease; it returns when
// that is done, or at once when this process does not lead.
func (e *Elector) StepDown(ctx context.Context) error {
	e.mu.Lock()
	step, released := e.stepDown, e.released
	if step != nil {
		select {
		case <-step:
		default:
			close(step)
		}
	}
	e.mu.Unlock()
	if step == nil {
		return nil
	}
	select {
	case <-released:
		return nil
	case <-ctx.Done():
		return fmt.Errorf("wait for the Lease to be released: %w", ctx.Err())
	}
}

// Run campaigns until ctx ends, and runs lead while it leads. lead's context ends
// when the leadership is to end; the Lease is released after lead has returned.
// After stepping down for a reason of its own it waits one lease duration, so
// that another can take over.
func (e *Elector) Run(ctx context.Context, lead func(ctx context.Context, token Token)) {
	for ctx.Err() == nil {
		if !e.waitEligible(ctx) {
			return
		}
		if led := e.term(ctx, lead); led {
			timer := time.NewTimer(e.options.LeaseDuration)
			select {
			case <-ctx.Done():
			case <-timer.C:
			}
			timer.Stop()
		}
	}
}

func (e *Elector) waitEligible(ctx context.Context) bool {
	for {
		ok, changed := e.options.Eligible()
		if ok {
			return true
		}
		select {
		case <-ctx.Done():
			return false
		case <-changed:
		}
	}
}

// term is one candidacy and, if it is won, one leadership.
func (e *Elector) term(ctx context.Context, lead func(context.Context, Token)) (led bool) {
	o := e.options
	campaign, endCampaign := context.WithCancel(context.WithoutCancel(ctx))
	defer endCampaign()
	work, endWork := context.WithCancel(campaign)
	defer endWork()
	step, released, done := make(chan struct{}), make(chan struct{}), make(chan struct{})
	started := make(chan struct{})

	lock := &watchedLock{
		Interface: &resourcelock.LeaseLock{
			LeaseMeta:  metav1.ObjectMeta{Namespace: o.Namespace, Name: o.Name},
			Client:     o.Client.CoordinationV1(),
			LockConfig: resourcelock.ResourceLockConfig{Identity: o.Identity},
		},
		elector: e,
	}
	elector, err := leaderelection.NewLeaderElector(leaderelection.LeaderElectionConfig{
		Lock: lock, LeaseDuration: o.LeaseDuration, RenewDeadline: o.RenewDeadline, RetryPeriod: o.RetryPeriod,
		ReleaseOnCancel: true, Name: o.Name,
		Callbacks: leaderelection.LeaderCallbacks{
			OnStartedLeading: func(held context.Context) {
				defer close(done)
				close(started)
				stop := context.AfterFunc(held, endWork) // lost: nothing to release
				defer stop()
				token, err := e.token(work)
				if err != nil {
					o.Logger.ErrorContext(ctx, "lease cannot be read; leadership is given up", slog.Any("err", err))
				} else {
					o.Logger.InfoContext(ctx, "leading", slog.String("lease", o.Namespace+"/"+o.Name), slog.String("holder", o.Identity), slog.Int64("transitions", token.Transitions))
					lead(work, token)
				}
				endCampaign() // the work has ended: release
			},
			OnStoppedLeading: func() {},
		},
	})
	if err != nil {
		o.Logger.ErrorContext(ctx, "leader election cannot be set up; tried again", slog.Any("err", err))
		elapsed.Sleep(ctx, o.RetryPeriod)
		return false
	}
	var wg sync.WaitGroup
	wg.Go(func() {
		e.supervise(ctx, campaign, started, step, endWork, endCampaign)
	})
	e.mu.Lock()
	e.stepDown, e.released = step, released
	e.mu.Unlock()
	elector.Run(campaign)
	endCampaign()
	select {
	case <-started:
		led = true
		<-done
	default:
	}
	wg.Wait()
	e.release(context.WithoutCancel(ctx))
	e.mu.Lock()
	e.leading, e.renewed, e.stepDown = false, time.Time{}, nil
	e.mu.Unlock()
	close(released)
	if led {
		o.Logger.InfoContext(ctx, "no longer leading", slog.String("holder", o.Identity))
	}
	return led
}

// release makes sure that the Lease does not keep this process's name: a term
// that was cut while it took the Lease may have got it all the same, and client-go
// releases only what it knows to hold. A Lease of another holder is left alone.
func (e *Elector) release(ctx context.Context) {
	ctx, cancel := context.WithTimeout(ctx, releaseTimeout)
	defer cancel()
	leases := e.options.Client.CoordinationV1().Leases(e.options.Namespace)
	object, err := leases.Get(ctx, e.options.Name, metav1.GetOptions{})
	if apierrors.IsNotFound(err) || err == nil && (object.Spec.HolderIdentity == nil || *object.Spec.HolderIdentity != e.options.Identity) {
		return
	}
	if err == nil {
		one := int32(1)
		object.Spec.HolderIdentity, object.Spec.LeaseDurationSeconds = new(string), &one
		_, err = leases.Update(ctx, object, metav1.UpdateOptions{})
	}
	if err != nil {
		e.options.Logger.WarnContext(ctx, "lease cannot be released; it runs out by itself", slog.Any("err", err), slog.Duration("in", e.options.LeaseDuration))
	}
}

// supervise ends a term: at once when ctx ends, on StepDown, when a candidate is
// no longer eligible, and when a leader has been ineligible, or unasked for a
// write lease, for longer than the grace.
func (e *Elector) supervise(ctx, campaign context.Context, started, step <-chan struct{}, endWork, endCampaign context.CancelFunc) {
	o := e.options
	end := func(reason string) {
		select {
		case <-started:
			o.Logger.InfoContext(ctx, "stepping down", slog.String("reason", reason))
			endWork() // the lease is released when the work has ended
		default:
			endCampaign()
		}
	}
	e.mu.Lock()
	e.lastAsked = o.Now()
	e.mu.Unlock()
	ticker := time.NewTicker(time.Second)
	defer ticker.Stop()
	ineligible := time.Time{}
	leads := false
	for {
		ok, changed := o.Eligible()
		now := o.Now()
		switch {
		case ok:
			ineligible = time.Time{}
		case !leads:
			end("the plugin is not healthy")
			return
		case ineligible.IsZero():
			ineligible = now
		case now.Sub(ineligible) > o.Grace:
			end("the plugin has been away for longer than the grace")
			return
		}
		e.mu.Lock()
		asked := e.lastAsked
		e.mu.Unlock()
		if leads && now.Sub(asked) > o.Grace {
			end("the reconciler has asked for no write lease for longer than the grace")
			return
		}
		nowStarted := started
		if leads {
			nowStarted = nil
		}
		select {
		case <-ctx.Done():
			end("the process stops")
			return
		case <-step:
			end("asked to")
			return
		case <-campaign.Done():
			return
		case <-nowStarted:
			leads = true
			e.mu.Lock()
			e.leading, e.lastAsked = true, o.Now()
			e.mu.Unlock()
		case <-changed:
		case <-ticker.C:
		}
	}
}

// token reads the Lease that was just won.
func (e *Elector) token(ctx context.Context) (Token, error) {
	for {
		object, err := e.options.Client.CoordinationV1().Leases(e.options.Namespace).Get(ctx, e.options.Name, metav1.GetOptions{})
		if err == nil {
			token := Token{LeaseCreated: object.CreationTimestamp.Time, LeaseUID: string(object.UID)}
			if object.Spec.LeaseTransitions != nil {
				token.Transitions = int64(*object.Spec.LeaseTransitions)
			}
			if object.Spec.HolderIdentity == nil || *object.Spec.HolderIdentity != e.options.Identity {
				return Token{}, fmt.Errorf("read Lease %s/%s: it has another holder already", e.options.Namespace, e.options.Name)
			}
			e.mu.Lock()
			e.leading = true
			e.mu.Unlock()
			return token, nil
		}
		if ctx.Err() != nil {
			return Token{}, fmt.Errorf("read Lease %s/%s: %w", e.options.Namespace, e.options.Name, err)
		}
		elapsed.Sleep(ctx, 200*time.Millisecond)
	}
}

// watchedLock notes when each successful renewal began.
type watchedLock struct {
	resourcelock.Interface
	elector *Elector
}

func (l *watchedLock) note(started time.Time, err error) error {
	if err == nil {
		l.elector.mu.Lock()
		l.elector.renewed = started
		l.elector.mu.Unlock()
	}
	return err
}

// Create implements resourcelock.Interface.
func (l *watchedLock) Create(ctx context.Context, record resourcelock.LeaderElectionRecord) error {
	started := l.elector.options.Now()
	return l.note(started, l.Interface.Create(ctx, record))
}

// Update implements resourcelock.Interface.
func (l *watchedLock) Update(ctx context.Context, record resourcelock.LeaderElectionRecord) error {
	started := l.elector.options.Now()
	return l.note(started, l.Interface.Update(ctx, record))
}
