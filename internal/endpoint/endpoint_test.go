package endpoint_test

import (
	"context"
	"net"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/waymark-routes/waymark/internal/endpoint"
)

func TestParse(t *testing.T) {
	long := "/" + strings.Repeat("a", 107)
	tests := []struct{ text, want, mentions string }{
		{text: "unix:///run/waymark/plugin.sock", want: "unix:///run/waymark/plugin.sock"},
		{text: "unix:/run/waymark/plugin.sock", want: "unix:///run/waymark/plugin.sock"},
		{text: "tcp://127.0.0.1:7443", want: "tcp://127.0.0.1:7443"},
		{text: "localhost:7443", want: "tcp://localhost:7443"},
		{text: "[::1]:7443", want: "tcp://[::1]:7443"},
		{text: "unix://relative.sock", mentions: "absolute"},
		{text: "unix://" + long, mentions: "107"},
		{text: "", mentions: "want"},
		{text: "foo", mentions: "want"},
		{text: "http://host:80/path", mentions: "want"},
		{text: "host:port", mentions: "want"},
	}
	for _, test := range tests {
		got, err := endpoint.Parse(test.text)
		if test.want == "" {
			if err == nil || !strings.Contains(err.Error(), test.mentions) {
				t.Errorf("Parse(%q) = %v, %v; want an error with %q", test.text, got, err, test.mentions)
			}
			continue
		}
		if err != nil || got.String() != test.want {
			t.Errorf("Parse(%q) = %v, %v; want %s", test.text, got, err, test.want)
		}
	}
}

func socket(t *testing.T) endpoint.Endpoint {
	t.Helper()
	dir, err := os.MkdirTemp("", "wm")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	return endpoint.Endpoint{Network: "unix", Address: filepath.Join(dir, "s.sock")}
}

func reachable(e endpoint.Endpoint) bool {
	conn, err := (&net.Dialer{}).DialContext(context.Background(), "unix", e.Address)
	if err == nil {
		_ = conn.Close()
	}
	return err == nil
}

func TestB55StaleSocketIsReplaced(t *testing.T) {
	at := socket(t)
	// A server that was killed leaves its file behind.
	fd, err := syscall.Socket(syscall.AF_UNIX, syscall.SOCK_STREAM, 0)
	if err != nil {
		t.Fatal(err)
	}
	if err := syscall.Bind(fd, &syscall.SockaddrUnix{Name: at.Address}); err != nil {
		t.Fatal(err)
	}
	_ = syscall.Close(fd)
	listener, err := endpoint.Listen(t.Context(), at, endpoint.ListenOptions{})
	if err != nil {
		t.Fatalf("a stale socket is not replaced: %v", err)
	}
	if !reachable(at) {
		t.Error("the new socket is not reachable")
	}
	info, err := os.Stat(at.Address)
	if err != nil || info.Mode().Perm() != 0o660 {
		t.Errorf("mode %v, %v; want 0660", info.Mode(), err)
	}
	_ = listener.Close()
	if _, err := os.Lstat(at.Address); !os.IsNotExist(err) {
		t.Errorf("the socket stays after Close: %v", err)
	}
}

func TestB55ForeignFilesAreLeftAlone(t *testing.T) {
	for name, make := range map[string]func(path string) error{
		"regular file":  func(path string) error { return os.WriteFile(path, []byte("precious"), 0o600) },
		"folder":        func(path string) error { return os.Mkdir(path, 0o700) },
		"symbolic link": func(path string) error { return os.Symlink("/nowhere", path) },
	} {
		t.Run(name, func(t *testing.T) {
			at := socket(t)
			if err := make(at.Address); err != nil {
				t.Fatal(err)
			}
			before, _ := os.Lstat(at.Address)
			_, err := endpoint.Listen(t.Context(), at, endpoint.ListenOptions{})
			if err == nil || !strings.Contains(err.Error(), at.Address) {
				t.Fatalf("error %v does not name the path", err)
			}
			if after, err := os.Lstat(at.Address); err != nil || !os.SameFile(before, after) {
				t.Errorf("the file was touched: %v", err)
			}
		})
	}
}

func TestB56SecondServerOnALiveSocket(t *testing.T) {
	at := socket(t)
	first, err := endpoint.Listen(t.Context(), at, endpoint.ListenOptions{})
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = first.Close() }()
	if _, err := endpoint.Listen(t.Context(), at, endpoint.ListenOptions{}); err == nil || !strings.Contains(err.Error(), "another process") {
		t.Fatalf("the second server starts: %v", err)
	}
	if !reachable(at) {
		t.Error("the first server is not reachable any more")
	}
}

func TestB56OnlyTheOwnSocketIsRemoved(t *testing.T) {
	at := socket(t)
	first, err := endpoint.Listen(t.Context(), at, endpoint.ListenOptions{})
	if err != nil {
		t.Fatal(err)
	}
	if err := os.Remove(at.Address); err != nil { // somebody unlinks it
		t.Fatal(err)
	}
	second, err := endpoint.Listen(t.Context(), at, endpoint.ListenOptions{})
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = second.Close() }()
	_ = first.Close()
	if !reachable(at) {
		t.Error("the first server's end removed the second's socket")
	}
}

func TestListenErrorsNameTheFolder(t *testing.T) {
	at := endpoint.Endpoint{Network: "unix", Address: "/no-such-folder/s.sock"}
	if _, err := endpoint.Listen(t.Context(), at, endpoint.ListenOptions{}); err == nil || !strings.Contains(err.Error(), "/no-such-folder does not exist") {
		t.Errorf("error %v does not name the folder", err)
	}
}

func TestPlaintextOffLoopbackIsRefused(t *testing.T) {
	at, err := endpoint.Parse("tcp://0.0.0.0:0")
	if err != nil {
		t.Fatal(err)
	}
	if _, err := endpoint.Listen(t.Context(), at, endpoint.ListenOptions{}); err == nil {
		t.Error("plaintext listens off loopback")
	}
	if _, err := endpoint.Dial(endpoint.Endpoint{Network: "tcp", Address: "192.0.2.1:1"}, endpoint.DialOptions{}); err == nil {
		t.Error("plaintext dials off loopback")
	}
}
