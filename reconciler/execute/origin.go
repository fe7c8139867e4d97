package execute

import (
	"strings"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// origin tells whether the peer sent a status itself, or our own gRPC stack made
// it, and if so, whether the request certainly never left. gRPC offers no field
// for it; the texts below are grpc-go's own and are held by a test that provokes
// each of them against the version in go.mod.
func origin(st *status.Status) (local, notSent bool) {
	text := st.Message()
	switch st.Code() {
	case codes.Unavailable:
		switch {
		case strings.HasPrefix(text, "connection error: desc"), strings.HasPrefix(text, "last connection error:"),
			strings.HasPrefix(text, "name resolver error"), strings.HasPrefix(text, "no children to pick from"):
			return true, true
		case strings.HasPrefix(text, "error reading from server"), strings.Contains(text, "transport is closing"),
			strings.Contains(text, "connection reset"), strings.Contains(text, "broken pipe"), strings.HasPrefix(text, "closing transport"),
			strings.Contains(text, "connection is draining"), strings.Contains(text, "unexpected EOF"), text == "EOF":
			return true, false
		}
	case codes.DeadlineExceeded:
		return text == "context deadline exceeded", false
	case codes.Canceled:
		return text == "context canceled" || strings.HasPrefix(text, "grpc: the client connection is closing"), false
	case codes.ResourceExhausted:
		return strings.HasPrefix(text, "grpc: received message larger") || strings.HasPrefix(text, "trying to send message larger") ||
			strings.HasPrefix(text, "grpc: message after decompression larger"), false
	case codes.Internal:
		return strings.HasPrefix(text, "stream terminated by RST_STREAM") || strings.HasPrefix(text, "server closed the stream without sending trailers"), false
	case codes.Unknown:
		return strings.HasPrefix(text, "grpc: "), false
	}
	return false, false
}
