package cloudplugin

import (
	"context"
	"errors"
	"time"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/protoadapt"
	"google.golang.org/protobuf/types/known/durationpb"
)

// Throttled says that the cloud refuses calls for now. All writes pause for at
// least after; zero means that the time is unknown.
func Throttled(after time.Duration, text string) error {
	if after <= 0 {
		return status.Error(codes.ResourceExhausted, text)
	}
	return detailed(codes.ResourceExhausted, text, &errdetails.RetryInfo{RetryDelay: durationpb.New(after)})
}

// QuotaExceeded says that a table is full; subject names it.
func QuotaExceeded(subject, text string) error {
	return detailed(codes.ResourceExhausted, text, &errdetails.QuotaFailure{
		Violations: []*errdetails.QuotaFailure_Violation{{Subject: subject, Description: text}},
	})
}

// Conflict says that the destination is taken by a route to holder; holder may be
// empty.
func Conflict(destination, holder, text string) error {
	return detailed(codes.AlreadyExists, text, &errdetails.ResourceInfo{ResourceType: "route", ResourceName: destination, Owner: holder, Description: text})
}

// TargetNotFound says that the cloud does not know the node.
func TargetNotFound(text string) error { return status.Error(codes.NotFound, text) }

// NotReady says that the target cannot take a route yet.
func NotReady(text string) error { return status.Error(codes.FailedPrecondition, text) }

// Busy says that a conflicting operation is pending.
func Busy(text string) error { return status.Error(codes.Aborted, text) }

// Refused says that the cloud refuses the route as it is (overlap, bad range).
func Refused(text string) error { return status.Error(codes.InvalidArgument, text) }

// Unavailable says that the cloud cannot be reached.
func Unavailable(text string) error { return status.Error(codes.Unavailable, text) }

// Denied says that the plugin's credentials do not suffice.
func Denied(text string) error { return status.Error(codes.PermissionDenied, text) }

// NotServed says that the family or ability is not served.
func NotServed(text string) error { return status.Error(codes.Unimplemented, text) }

func detailed(code codes.Code, text string, detail protoadapt.MessageV1) error {
	st, err := status.New(code, text).WithDetails(detail)
	if err != nil { // only for code OK
		return status.Error(code, text)
	}
	return st.Err()
}

// asStatus is the status of a plugin's error: statuses stay, context errors keep
// their meaning, all else is UNKNOWN.
func asStatus(err error) error {
	if err == nil {
		return nil
	}
	if _, ok := status.FromError(err); ok {
		return err
	}
	var wrapped interface{ GRPCStatus() *status.Status }
	if errors.As(err, &wrapped) {
		st := wrapped.GRPCStatus().Proto()
		st.Message = err.Error()
		return status.FromProto(st).Err()
	}
	switch {
	case errors.Is(err, context.DeadlineExceeded):
		return status.Error(codes.DeadlineExceeded, err.Error())
	case errors.Is(err, context.Canceled):
		return status.Error(codes.Canceled, err.Error())
	default:
		return status.Error(codes.Unknown, err.Error())
	}
}
