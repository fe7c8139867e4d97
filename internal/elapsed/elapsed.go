// Package elapsed measures and waits. Its Clock is for leases: it never goes back, and it advances by
// the larger of what CLOCK_BOOTTIME and the wall clock say, so that neither a
// suspended machine nor a clock that was set back makes a lease seem younger
// than it is (invariant S5).
package elapsed

import (
	"context"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

// Clock is such a clock. The zero value is not ready; use New. Safe for
// concurrent use.
type Clock struct {
	boot, wall func() time.Duration

	mu                 sync.Mutex // guards all below
	now                time.Time
	lastBoot, lastWall time.Duration
}

// New makes a clock that starts at the wall clock's time.
func New() *Clock {
	return newClock(time.Now().Round(0), bootTime, func() time.Duration { return time.Duration(time.Now().UnixNano()) })
}

func newClock(start time.Time, boot, wall func() time.Duration) *Clock {
	return &Clock{boot: boot, wall: wall, now: start, lastBoot: boot(), lastWall: wall()}
}

func bootTime() time.Duration {
	var ts unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_BOOTTIME, &ts); err != nil {
		return 0 // then the wall clock counts alone
	}
	return time.Duration(ts.Nano())
}

// Now is the time on this clock. Differences between two readings are at least
// the real time between them.
func (c *Clock) Now() time.Time {
	c.mu.Lock()
	defer c.mu.Unlock()
	boot, wall := c.boot(), c.wall()
	c.now = c.now.Add(max(boot-c.lastBoot, wall-c.lastWall, 0))
	c.lastBoot, c.lastWall = boot, wall
	return c.now
}

// Sleep waits for d, or until ctx ends.
func Sleep(ctx context.Context, d time.Duration) {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-ctx.Done():
	case <-timer.C:
	}
}
