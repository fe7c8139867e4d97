package engine

import (
	"math/rand/v2"
	"time"

	"github.com/waymark-routes/waymark/reconciler/plan"
)

// Code is how a call failed. The names and numbers are gRPC's, so that the
// executor converts them without a table; the engine knows no gRPC.
type Code uint32

// The codes.
const (
	CodeCancelled          Code = 1
	CodeUnknown            Code = 2
	CodeInvalidArgument    Code = 3
	CodeDeadlineExceeded   Code = 4
	CodeNotFound           Code = 5
	CodeAlreadyExists      Code = 6
	CodePermissionDenied   Code = 7
	CodeResourceExhausted  Code = 8
	CodeFailedPrecondition Code = 9
	CodeAborted            Code = 10
	CodeUnimplemented      Code = 12
	CodeInternal           Code = 13
	CodeUnavailable        Code = 14
	CodeUnauthenticated    Code = 16
)

// Failure is how a call failed, with the details that the plugin gave.
type Failure struct {
	Code Code
	// Name is the code's name, as people know it (for example UNAVAILABLE).
	Name string
	// Text is the plugin's (or the transport's) message.
	Text string
	// Local says that the plugin did not send this error itself: the transport
	// broke, our own deadline ran out, or our own gRPC stack refused a message.
	Local bool
	// NotSent says that the request certainly never left this process.
	NotSent bool
	// RetryAfter is RetryInfo's delay, where HasRetry.
	RetryAfter time.Duration
	HasRetry   bool
	// Quota says that a QuotaFailure detail came with it.
	Quota bool
	// Holder is what ResourceInfo names as the destination's holder.
	Holder string
}

// String is the failure for people.
func (f *Failure) String() string {
	if f.Text == "" {
		return f.Name
	}
	return f.Name + ": " + f.Text
}

// Lanes and back-off bounds of the code table.
const (
	laneRefused     = 10 * time.Minute
	laneCredentials = 5 * time.Minute
	laneUnserved    = 30 * time.Minute
	backoffMin      = time.Second
	backoffMax      = 5 * time.Minute
	notReadyMin     = 5 * time.Second
	notReadyMax     = time.Minute
)

// reaction is what a failed write leads to. This is the code table of the plugin
// contract, one place for all of it.
type reaction struct {
	// done: the failure means that all is well.
	done bool
	// wait until the next attempt.
	wait time.Duration
	// definite: the write has certainly failed, and will not do so by chance; the
	// verdict follows at once, not from the third failure in a row.
	definite bool
	// unknown: the write may still take effect.
	unknown bool
	// throttled: concurrency shrinks; pause is how long all writes pause.
	throttled bool
	pause     time.Duration
	// quota: deletes go first, and a successful delete wakes the destination.
	quota bool
	// loud failures are logged as errors.
	loud bool
	// reason is the verdict's machine-readable reason.
	reason string
}

// react reads the code table. failures counts the failures in a row before this
// one; declared says that the plugin declared the ability or family.
func react(kind plan.OpKind, f *Failure, failures int, maxPause time.Duration, rng *rand.Rand) reaction {
	r := reactToCode(kind, f, failures, maxPause, rng)
	if f.Quota && !r.done && !r.unknown {
		r = reaction{wait: jitter(laneRefused, 0.1, rng), definite: true, quota: true, reason: "QuotaExceeded"}
	}
	if f.HasRetry { // the least wait, but not beyond what an operator allows
		r.wait = max(r.wait, min(f.RetryAfter, maxPause))
	}
	return r
}

func reactToCode(kind plan.OpKind, f *Failure, failures int, maxPause time.Duration, rng *rand.Rand) reaction {
	backoff := func(least, most time.Duration) time.Duration {
		return jitter(doubled(least, most, failures), 0.1, rng)
	}
	switch f.Code {
	case CodeInvalidArgument:
		return reaction{wait: jitter(laneRefused, 0.1, rng), definite: true, reason: "RouteRefused"}
	case CodeNotFound:
		if kind == plan.OpDelete {
			return reaction{done: true} // field case B-36
		}
		return reaction{wait: backoff(backoffMin, backoffMax), definite: true, reason: "TargetNotFound"}
	case CodeAlreadyExists:
		return reaction{wait: jitter(laneRefused, 0.1, rng), definite: true, reason: "DestinationTaken"}
	case CodeFailedPrecondition:
		return reaction{wait: backoff(notReadyMin, notReadyMax), definite: true, reason: "TargetNotReady"}
	case CodeAborted:
		if failures < 3 { // quick retries with jitter, then back-off
			return reaction{wait: time.Duration(50+rng.IntN(200)) * time.Millisecond, throttled: true, reason: "ConflictingOperation"}
		}
		return reaction{wait: jitter(doubled(backoffMin, backoffMax, failures-3), 0.1, rng), throttled: true, reason: "ConflictingOperation"}
	case CodeResourceExhausted:
		if f.Local {
			return reaction{wait: jitter(laneRefused, 0.1, rng), definite: true, loud: true, reason: "MessageTooLarge"}
		}
		r := reaction{wait: backoff(backoffMin, backoffMax), throttled: true, reason: "Throttled"}
		if f.HasRetry {
			r.pause = min(max(f.RetryAfter, 0), maxPause)
			r.wait = r.pause
		}
		return r
	case CodeUnavailable:
		if f.Local && !f.NotSent {
			return unknownOutcome(backoff(backoffMin, backoffMax))
		}
		most := doubled(backoffMin, backoffMax, failures)
		return reaction{wait: most/4 + time.Duration(rng.Int64N(int64(most))*3/4), definite: !f.Local, reason: "PluginUnavailable"}
	case CodeDeadlineExceeded, CodeCancelled:
		return unknownOutcome(backoff(backoffMin, backoffMax))
	case CodePermissionDenied, CodeUnauthenticated:
		return reaction{wait: jitter(laneCredentials, 0.1, rng), definite: true, loud: true, reason: "CredentialsRefused"}
	case CodeUnimplemented:
		return reaction{wait: jitter(laneUnserved, 0.1, rng), definite: true, loud: true, reason: "NotServed"}
	case CodeInternal, CodeUnknown:
		if f.Local {
			return unknownOutcome(backoff(backoffMin, backoffMax))
		}
		return reaction{wait: backoff(backoffMin, backoffMax), definite: true, loud: true, reason: "PluginFailed"}
	default:
		return reaction{wait: backoff(backoffMin, backoffMax), definite: true, loud: true, reason: "PluginFailed"}
	}
}

func unknownOutcome(wait time.Duration) reaction {
	return reaction{wait: wait, unknown: true, reason: "OutcomeUnknown"}
}

// reactToList says how long to wait before the next list, after failures failed
// lists in a row before this one.
func reactToList(f *Failure, failures int, maxPause time.Duration, rng *rand.Rand) time.Duration {
	most := 10 * time.Second
	switch f.Code {
	case CodeFailedPrecondition, CodePermissionDenied, CodeUnauthenticated, CodeUnimplemented, CodeInvalidArgument:
		most = backoffMax
	}
	wait := jitter(doubled(backoffMin, most, failures), 0.1, rng)
	if f.HasRetry {
		wait = max(wait, min(f.RetryAfter, maxPause))
	}
	return wait
}

// doubled is least, doubled times times, at most most.
func doubled(least, most time.Duration, times int) time.Duration {
	if times > 30 {
		return most
	}
	return min(least<<max(times, 0), most)
}

// jitter lengthens d by up to share of it.
func jitter(d time.Duration, share float64, rng *rand.Rand) time.Duration {
	return d + time.Duration(rng.Float64()*share*float64(d))
}
