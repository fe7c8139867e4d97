package elapsed

import (
	"testing"
	"time"
)

func TestClockTakesTheLargerProgress(t *testing.T) {
	var boot, wall time.Duration
	start := time.Unix(1000, 0)
	c := newClock(start, func() time.Duration { return boot }, func() time.Duration { return wall })
	steps := []struct {
		boot, wall time.Duration // progress
		want       time.Duration // since the start
	}{
		{time.Second, time.Second, time.Second},
		{time.Second, -time.Hour, 2 * time.Second},                        // the wall clock was set back
		{0, time.Second, 3 * time.Second},                                 // BOOTTIME stood still
		{time.Minute, time.Second, time.Minute + 3*time.Second},           // the machine slept
		{-time.Second, -time.Second, time.Minute + 3*time.Second},         // never back
		{time.Second, time.Hour, time.Hour + time.Minute + 3*time.Second}, // the wall clock jumped ahead
	}
	for i, step := range steps {
		boot, wall = boot+step.boot, wall+step.wall
		if got := c.Now().Sub(start); got != step.want {
			t.Fatalf("step %d: %v elapsed, want %v", i, got, step.want)
		}
	}
}

func TestRealClockAdvances(t *testing.T) {
	c := New()
	first := c.Now()
	deadline := time.Now().Add(5 * time.Second)
	for !c.Now().After(first) {
		if time.Now().After(deadline) {
			t.Fatal("the clock stands still")
		}
	}
}
