// Package process runs servers and Waymark's binaries as real processes that die
// with the test, keeps their logs, and asks their HTTP ports.
package process

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"
)

// Process is one running process. The test that started it owns it.
type Process struct {
	Name string
	Log  string
	cmd  *exec.Cmd
	done chan struct{} // closed when it has ended
	code int
}

// Start starts a binary; its output goes to a file, whose end is shown when the
// test fails.
func Start(t *testing.T, binary, name string, args ...string) *Process {
	t.Helper()
	log := filepath.Join(t.TempDir(), name+".log")
	file, err := os.Create(log)
	if err != nil {
		t.Fatal(err)
	}
	p := &Process{Name: name, Log: log, cmd: exec.CommandContext(context.WithoutCancel(t.Context()), binary, args...), done: make(chan struct{})}
	p.cmd.Stdout, p.cmd.Stderr = file, file
	p.cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	if err := p.cmd.Start(); err != nil {
		t.Fatalf("start %s: %v", name, err)
	}
	go func() {
		_ = p.cmd.Wait()
		p.code = p.cmd.ProcessState.ExitCode()
		_ = file.Close()
		close(p.done)
	}()
	t.Cleanup(func() {
		p.Kill()
		if t.Failed() {
			t.Logf("end of %s's log:\n%s", name, tail(log, 30))
		}
	})
	return p
}

func tail(path string, lines int) string {
	content, _ := os.ReadFile(path)
	all := strings.Split(strings.TrimSpace(string(content)), "\n")
	return strings.Join(all[max(0, len(all)-lines):], "\n")
}

// Signal sends a signal.
func (p *Process) Signal(sig os.Signal) { _ = p.cmd.Process.Signal(sig) }

// Kill kills the process and waits for its end.
func (p *Process) Kill() {
	_ = p.cmd.Process.Kill()
	<-p.done
}

// Stop sends SIGTERM and returns the exit code; it fails when the process is not
// gone within limit.
func (p *Process) Stop(limit time.Duration) (int, error) {
	p.Signal(syscall.SIGTERM)
	select {
	case <-p.done:
		return p.code, nil
	case <-time.After(limit):
		return 0, fmt.Errorf("%s did not end within %v of SIGTERM", p.Name, limit)
	}
}

// Running says whether the process still runs.
func (p *Process) Running() bool {
	select {
	case <-p.done:
		return false
	default:
		return true
	}
}

// FreeAddress is a loopback address that was free a moment ago.
func FreeAddress(t *testing.T) string {
	t.Helper()
	listener, err := (&net.ListenConfig{}).Listen(t.Context(), "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = listener.Close() }()
	return listener.Addr().String()
}

// Get reads a page of a process's HTTP port.
func Get(address, path string) (int, string, error) {
	request, err := http.NewRequestWithContext(context.Background(), http.MethodGet, "http://"+address+path, http.NoBody)
	if err != nil {
		return 0, "", err
	}
	answer, err := http.DefaultClient.Do(request)
	if err != nil {
		return 0, "", err
	}
	defer func() { _ = answer.Body.Close() }()
	body, err := io.ReadAll(answer.Body)
	return answer.StatusCode, string(body), err
}

// Eventually asks until check is nil; it fails the test with the last answer
// after limit.
func Eventually(t *testing.T, limit time.Duration, what string, check func() error) time.Duration {
	t.Helper()
	began := time.Now()
	ticker := time.NewTicker(20 * time.Millisecond)
	defer ticker.Stop()
	err := errors.New("never asked")
	for time.Since(began) < limit {
		if err = check(); err == nil {
			return time.Since(began)
		}
		select {
		case <-t.Context().Done():
			t.Fatalf("%s: the test ended: %v", what, err)
		case <-ticker.C:
		}
	}
	t.Fatalf("%s: not within %v: %v", what, limit, err)
	return 0
}

// Output runs a binary to its end and returns what it printed.
func Output(t *testing.T, binary string, args ...string) (string, error) {
	t.Helper()
	out, err := exec.CommandContext(t.Context(), binary, args...).CombinedOutput()
	return string(out), err
}
