package cloudplugin

import (
	routesv1 "github.com/waymark-routes/waymark/proto/waymark/routes/v1"
)

func clusterOf(name string, cidrs []string) Cluster { return Cluster{Name: name, CIDRs: cidrs} }

func contextOf(c *routesv1.WriteContext) WriteContext {
	token := c.GetFencingToken()
	out := WriteContext{
		Cluster:     clusterOf(c.GetClusterName(), c.GetClusterCidrs()),
		OperationID: c.GetOperationId(),
		Token:       Token{LeaseUID: token.GetLeaseUid(), Transitions: token.GetLeaseTransitions()},
	}
	if created := token.GetLeaseCreated(); created != nil {
		out.Token.LeaseCreated = created.AsTime()
	}
	return out
}

func addressesOf(list []*routesv1.NodeAddress) []NodeAddress {
	out := make([]NodeAddress, 0, len(list))
	for _, a := range list {
		out = append(out, NodeAddress{Type: a.GetType(), Address: a.GetAddress()})
	}
	return out
}

func addressesProto(list []NodeAddress) []*routesv1.NodeAddress {
	out := make([]*routesv1.NodeAddress, 0, len(list))
	for _, a := range list {
		out = append(out, &routesv1.NodeAddress{Type: a.Type, Address: a.Address})
	}
	return out
}

func nodeOf(n *routesv1.TargetNode) Node {
	return Node{
		Name: n.GetName(), UID: n.GetUid(), ProviderID: n.GetProviderId(),
		Addresses: addressesOf(n.GetAddresses()), Labels: n.GetLabels(),
	}
}

// RouteFromProto reads a row of the contract.
func RouteFromProto(r *routesv1.Route) Route {
	out := Route{
		ID: r.GetId(), Name: r.GetName(), Table: r.GetTable(), Destination: r.GetDestination(),
		NextHop: r.GetNextHop(), Priority: r.GetPriority(), Origin: r.GetOrigin(), ETag: r.GetEtag(), Problem: r.GetProblem(),
	}
	switch target := r.GetTarget().(type) {
	case *routesv1.Route_NodeName:
		out.Target = Target{TargetNodeName, target.NodeName}
	case *routesv1.Route_ProviderId:
		out.Target = Target{TargetProviderID, target.ProviderId}
	case *routesv1.Route_InstanceId:
		out.Target = Target{TargetInstanceID, target.InstanceId}
	case *routesv1.Route_Address:
		out.Target = Target{TargetAddress, target.Address}
	}
	switch r.GetState() {
	case routesv1.RouteState_ROUTE_STATE_PENDING:
		out.State = Pending
	case routesv1.RouteState_ROUTE_STATE_BLACKHOLE:
		out.State = Blackhole
	}
	switch r.GetOwnership() {
	case routesv1.RouteOwnership_ROUTE_OWNERSHIP_OURS:
		out.Ownership = Ours
	case routesv1.RouteOwnership_ROUTE_OWNERSHIP_FOREIGN:
		out.Ownership = Foreign
	}
	if set, ok := r.GetAddresses().(*routesv1.Route_TargetAddresses); ok {
		out.TargetAddresses = addressesOf(set.TargetAddresses.GetAddresses())
	}
	return out
}

// Proto is the row as the contract carries it.
func (r Route) Proto() *routesv1.Route {
	out := &routesv1.Route{
		Id: r.ID, Name: r.Name, Table: r.Table, Destination: r.Destination,
		Priority: r.Priority, Origin: r.Origin, Etag: r.ETag, Problem: r.Problem,
		State:     [...]routesv1.RouteState{routesv1.RouteState_ROUTE_STATE_ACTIVE, routesv1.RouteState_ROUTE_STATE_PENDING, routesv1.RouteState_ROUTE_STATE_BLACKHOLE}[r.State],
		Ownership: [...]routesv1.RouteOwnership{routesv1.RouteOwnership_ROUTE_OWNERSHIP_UNKNOWN, routesv1.RouteOwnership_ROUTE_OWNERSHIP_OURS, routesv1.RouteOwnership_ROUTE_OWNERSHIP_FOREIGN}[r.Ownership],
	}
	switch r.Target.Kind {
	case TargetNone:
	case TargetNodeName:
		out.Target = &routesv1.Route_NodeName{NodeName: r.Target.Value}
	case TargetProviderID:
		out.Target = &routesv1.Route_ProviderId{ProviderId: r.Target.Value}
	case TargetInstanceID:
		out.Target = &routesv1.Route_InstanceId{InstanceId: r.Target.Value}
	case TargetAddress:
		out.Target = &routesv1.Route_Address{Address: r.Target.Value}
	}
	switch {
	case r.TargetAddresses != nil:
		out.Addresses = &routesv1.Route_TargetAddresses{TargetAddresses: &routesv1.TargetAddresses{Addresses: addressesProto(r.TargetAddresses)}}
	case r.NextHop != "":
		out.Addresses = &routesv1.Route_NextHop{NextHop: r.NextHop}
	}
	return out
}

func createOf(r *routesv1.CreateRouteRequest) CreateRequest {
	return CreateRequest{
		WriteContext: contextOf(r.GetContext()), Destination: r.GetDestination(), Node: nodeOf(r.GetNode()),
		Table: r.GetTable(), NameHint: r.GetNameHint(),
	}
}

func deleteOf(r *routesv1.DeleteRouteRequest) DeleteRequest {
	out := DeleteRequest{WriteContext: contextOf(r.GetContext()), Route: RouteFromProto(r.GetRoute())}
	if r.GetNode() != nil {
		n := nodeOf(r.GetNode())
		out.Node = &n
	}
	return out
}

func replaceOf(r *routesv1.ReplaceRouteRequest) ReplaceRequest {
	return ReplaceRequest{WriteContext: contextOf(r.GetContext()), Route: RouteFromProto(r.GetRoute()), Node: nodeOf(r.GetNode()), NameHint: r.GetNameHint()}
}

var outcomes = [...]routesv1.WriteOutcome{
	Created:    routesv1.WriteOutcome_WRITE_OUTCOME_CREATED,
	Unchanged:  routesv1.WriteOutcome_WRITE_OUTCOME_UNCHANGED,
	Accepted:   routesv1.WriteOutcome_WRITE_OUTCOME_PENDING,
	NotManaged: routesv1.WriteOutcome_WRITE_OUTCOME_NOT_MANAGED,
}
