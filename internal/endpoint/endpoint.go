// Package endpoint turns endpoint texts (unix:///run/waymark/plugin.sock,
// tcp://127.0.0.1:7443) into listeners and gRPC connections. It holds the rules
// for sockets: stale ones are replaced, live ones never stolen, foreign files
// never deleted (field cases B-55, B-56), and those for connections: never idle,
// back within a second (B-57, B-58), no pings that a server would punish (B-61).
package endpoint

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
	"google.golang.org/grpc/credentials/insecure"
)

// maxSocketPath is the longest path that the kernel takes for a unix socket.
const maxSocketPath = 107

// Endpoint is where a server listens.
type Endpoint struct {
	// Network is "unix" or "tcp".
	Network string
	// Address is an absolute path, or host:port.
	Address string
}

// Parse reads unix:///absolute/path, tcp://host:port or host:port.
func Parse(text string) (Endpoint, error) {
	if rest, ok := strings.CutPrefix(text, "unix:"); ok {
		path := rest
		if after, ok := strings.CutPrefix(rest, "//"); ok {
			path = after
		}
		switch {
		case !strings.HasPrefix(path, "/"):
			return Endpoint{}, fmt.Errorf("endpoint %q: want unix:///absolute/path", text)
		case len(path) > maxSocketPath:
			return Endpoint{}, fmt.Errorf("endpoint %q: the path has %d bytes, the kernel takes %d at most for a socket", text, len(path), maxSocketPath)
		}
		return Endpoint{Network: "unix", Address: filepath.Clean(path)}, nil
	}
	address, _ := strings.CutPrefix(text, "tcp://")
	host, port, err := net.SplitHostPort(address)
	if err != nil || port == "" || strings.ContainsAny(host, "/ ") || strings.Trim(port, "0123456789") != "" {
		return Endpoint{}, fmt.Errorf("endpoint %q: want unix:///absolute/path or tcp://host:port", text)
	}
	return Endpoint{Network: "tcp", Address: address}, nil
}

// String is the text that Parse reads.
func (e Endpoint) String() string { return e.Network + "://" + e.Address }

// Local says whether the endpoint never leaves this machine: a unix socket or a
// loopback address.
func (e Endpoint) Local() bool {
	if e.Network == "unix" {
		return true
	}
	host, _, err := net.SplitHostPort(e.Address)
	if err != nil {
		return false
	}
	if host == "localhost" {
		return true
	}
	addr, err := netip.ParseAddr(host)
	return err == nil && addr.IsLoopback()
}

// ListenOptions tune Listen; the zero value works.
type ListenOptions struct {
	// Mode is the socket's mode; 0 means 0660.
	Mode os.FileMode
	// AllowInsecure lets plaintext listen on TCP off loopback.
	AllowInsecure bool
}

// Listen listens on e. A socket that nobody serves any more is replaced; one
// that is alive, and a file that is no socket, are left alone and refused. The
// listener's Close removes only the socket that it made itself.
func Listen(ctx context.Context, e Endpoint, o ListenOptions) (net.Listener, error) {
	if e.Network != "unix" {
		if !e.Local() && !o.AllowInsecure {
			return nil, fmt.Errorf("listen on %s: plaintext off loopback is refused", e)
		}
		listener, err := (&net.ListenConfig{}).Listen(ctx, e.Network, e.Address)
		if err != nil {
			return nil, fmt.Errorf("listen on %s: %w", e, err)
		}
		return listener, nil
	}
	if err := clearStale(ctx, e.Address); err != nil {
		return nil, err
	}
	// The socket is made under another name and then moved: nobody sees it before
	// it has its mode, whatever the umask.
	mode := o.Mode
	if mode == 0 {
		mode = 0o660
	}
	listener, err := (&net.ListenConfig{}).Listen(ctx, "unix", e.Address)
	if err != nil {
		return nil, explainListen(e, err)
	}
	unix := listener.(*net.UnixListener)
	unix.SetUnlinkOnClose(false)
	if err := os.Chmod(e.Address, mode); err != nil {
		_ = unix.Close()
		return nil, fmt.Errorf("set mode of socket %s: %w", e.Address, err)
	}
	made, err := os.Lstat(e.Address)
	if err != nil {
		_ = unix.Close()
		return nil, fmt.Errorf("look at socket %s: %w", e.Address, err)
	}
	return &socketListener{UnixListener: unix, path: e.Address, made: made}, nil
}

// clearStale removes a socket that nobody serves.
func clearStale(ctx context.Context, path string) error {
	info, err := os.Lstat(path)
	switch {
	case errors.Is(err, os.ErrNotExist):
		return nil
	case err != nil:
		return fmt.Errorf("look at %s: %w", path, err)
	case info.Mode()&os.ModeSocket == 0:
		return fmt.Errorf("listen on unix://%s: the path is taken by something that is no socket (%s); it is left alone", path, info.Mode().Type())
	}
	conn, err := (&net.Dialer{Timeout: time.Second}).DialContext(ctx, "unix", path)
	if err == nil {
		_ = conn.Close()
		return fmt.Errorf("listen on unix://%s: another process serves it", path)
	}
	if !errors.Is(err, syscall.ECONNREFUSED) {
		return fmt.Errorf("listen on unix://%s: tell whether the socket is alive: %w", path, err)
	}
	if err := os.Remove(path); err != nil {
		return fmt.Errorf("remove stale socket %s: %w", path, err)
	}
	return nil
}

// explainListen adds what a person needs to mend a refused socket.
func explainListen(e Endpoint, err error) error {
	dir := filepath.Dir(e.Address)
	info, statErr := os.Stat(dir)
	switch {
	case errors.Is(statErr, os.ErrNotExist):
		return fmt.Errorf("listen on %s: folder %s does not exist", e, dir)
	case errors.Is(err, os.ErrPermission) && statErr == nil:
		owner := "unknown"
		if st, ok := info.Sys().(*syscall.Stat_t); ok {
			owner = fmt.Sprintf("uid %d gid %d", st.Uid, st.Gid)
		}
		return fmt.Errorf("listen on %s: uid %d may not write to folder %s (owner %s, mode %s): %w", e, os.Getuid(), dir, owner, info.Mode(), err)
	}
	return fmt.Errorf("listen on %s: %w", e, err)
}

// socketListener removes its socket on Close, if it is still its own.
type socketListener struct {
	*net.UnixListener
	path string
	made os.FileInfo
	once sync.Once
	err  error
}

// Close implements net.Listener.
func (l *socketListener) Close() error {
	l.once.Do(func() {
		if now, err := os.Lstat(l.path); err == nil && os.SameFile(now, l.made) {
			_ = os.Remove(l.path)
		}
		l.err = l.UnixListener.Close()
	})
	return l.err
}

// DialOptions tune Dial; the zero value works.
type DialOptions struct {
	// AllowInsecure lets plaintext dial TCP off loopback.
	AllowInsecure bool
	// Extra options, for example the interceptor chain of package rpc.
	Extra []grpc.DialOption
}

// Dial makes a connection that connects by itself, fails calls fast while the
// peer is away, is never idle, and is back within a second (unix) or five (TCP)
// of the peer's return. It does not wait for the peer.
func Dial(e Endpoint, o DialOptions) (*grpc.ClientConn, error) {
	if !e.Local() && !o.AllowInsecure {
		return nil, fmt.Errorf("dial %s: plaintext off loopback is refused", e)
	}
	most := 5 * time.Second
	if e.Network == "unix" {
		most = 500 * time.Millisecond
	}
	dialer := func(ctx context.Context, _ string) (net.Conn, error) {
		return (&net.Dialer{}).DialContext(ctx, e.Network, e.Address)
	}
	options := append([]grpc.DialOption{
		grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithContextDialer(dialer),
		grpc.WithIdleTimeout(0),
		grpc.WithNoProxy(),
		grpc.WithConnectParams(grpc.ConnectParams{
			Backoff:           backoff.Config{BaseDelay: 50 * time.Millisecond, Multiplier: 1.6, Jitter: 0.2, MaxDelay: most},
			MinConnectTimeout: 5 * time.Second,
		}),
		grpc.WithAuthority("localhost"),
	}, o.Extra...)
	conn, err := grpc.NewClient("passthrough:///"+e.Address, options...)
	if err != nil {
		return nil, fmt.Errorf("dial %s: %w", e, err)
	}
	conn.Connect()
	return conn, nil
}
