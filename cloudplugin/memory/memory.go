// Package memory is a plugin over a route table in memory, with an optional JSON
// file that survives a restart. It is the embedded default of `waymark up`, and a
// small, complete example of a plugin.
package memory

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"sync"

	"github.com/waymark-routes/waymark/cloudplugin"
	"github.com/waymark-routes/waymark/internal/build"
	"github.com/waymark-routes/waymark/internal/prefix"
)

// Options tune New; the zero value works.
type Options struct {
	// State is the JSON file that keeps the table; empty: memory alone.
	State string
	// AddressAware makes routes carry their targets' addresses.
	AddressAware bool
}

// Row is one route as the state file holds it.
type Row struct {
	ID          string                    `json:"id"`
	Cluster     string                    `json:"cluster"`
	Name        string                    `json:"name,omitempty"`
	Destination string                    `json:"destination"`
	Node        string                    `json:"node,omitempty"`
	Blackhole   bool                      `json:"blackhole,omitempty"`
	Addresses   []cloudplugin.NodeAddress `json:"addresses,omitempty"`
}

type state struct {
	NextID int   `json:"nextId"`
	Routes []Row `json:"routes"`
}

// Plugin is the table. It is safe for concurrent use.
type Plugin struct {
	options Options

	mu    sync.Mutex // guards table and the state file
	table state
}

// New makes the plugin and reads its state file. A file that cannot be read as a
// table is an error, and is not overwritten.
func New(o Options) (*Plugin, error) {
	p := &Plugin{options: o}
	if o.State == "" {
		return p, nil
	}
	content, err := os.ReadFile(o.State)
	switch {
	case errors.Is(err, os.ErrNotExist):
		return p, p.save()
	case err != nil:
		return nil, fmt.Errorf("read state file: %w", err)
	}
	if err := json.Unmarshal(content, &p.table); err != nil {
		return nil, fmt.Errorf("read state file %s: %w (it is left as it is)", o.State, err)
	}
	return p, nil
}

// save writes the table; a reader sees the old or the new one, never a part.
func (p *Plugin) save() error {
	if p.options.State == "" {
		return nil
	}
	content, err := json.MarshalIndent(p.table, "", "  ")
	if err != nil {
		return fmt.Errorf("encode state: %w", err)
	}
	file, err := os.CreateTemp(filepath.Dir(p.options.State), filepath.Base(p.options.State)+".*")
	if err != nil {
		return fmt.Errorf("write state file %s: %w", p.options.State, err)
	}
	_, err = file.Write(append(content, '\n'))
	err = errors.Join(err, file.Sync(), file.Close())
	if err == nil {
		err = os.Rename(file.Name(), p.options.State)
	}
	if err != nil {
		_ = os.Remove(file.Name())
		return fmt.Errorf("write state file %s: %w", p.options.State, err)
	}
	return nil
}

// Info implements cloudplugin.Plugin.
func (p *Plugin) Info() cloudplugin.Info {
	return cloudplugin.Info{Name: "memory.waymark", Version: build.Version()}
}

const table = "memory"

func (p *Plugin) route(r Row) cloudplugin.Route {
	out := cloudplugin.Route{ID: r.ID, Name: r.Name, Table: table, Destination: r.Destination, Ownership: cloudplugin.Ours}
	if r.Node != "" {
		out.Target = cloudplugin.Target{Kind: cloudplugin.TargetNodeName, Value: r.Node}
	}
	if r.Blackhole {
		out.State = cloudplugin.Blackhole
	}
	if p.options.AddressAware {
		out.TargetAddresses = append([]cloudplugin.NodeAddress{}, r.Addresses...)
	}
	return out
}

// ListRoutes implements cloudplugin.Plugin.
func (p *Plugin) ListRoutes(_ context.Context, cluster cloudplugin.Cluster) (cloudplugin.RouteList, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	list := cloudplugin.RouteList{Tables: []string{table}}
	for _, r := range p.table.Routes {
		if r.Cluster == cluster.Name {
			list.Routes = append(list.Routes, p.route(r))
		}
	}
	return list, nil
}

// change runs f on the table and saves it; if that fails the table is as before.
func (p *Plugin) change(f func() (cloudplugin.Outcome, error)) (cloudplugin.Outcome, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	before := state{NextID: p.table.NextID, Routes: slices.Clone(p.table.Routes)}
	outcome, err := f()
	if err == nil && outcome.Kind == cloudplugin.Created {
		err = p.save()
	}
	if err != nil {
		p.table = before
	}
	return outcome, err
}

// CreateRoute implements cloudplugin.Plugin.
func (p *Plugin) CreateRoute(_ context.Context, request cloudplugin.CreateRequest) (cloudplugin.Outcome, error) {
	return p.change(func() (cloudplugin.Outcome, error) {
		destination, err := prefix.Canonical(request.Destination)
		if err != nil {
			return cloudplugin.Outcome{}, cloudplugin.Refused(err.Error())
		}
		for _, r := range p.table.Routes {
			if r.Cluster != request.Cluster.Name || !sameDestination(r.Destination, request.Destination) {
				continue
			}
			if r.Node == request.Node.Name && !r.Blackhole && (!p.options.AddressAware || slices.Equal(r.Addresses, request.Node.Addresses)) {
				return cloudplugin.Outcome{Kind: cloudplugin.Unchanged}, nil
			}
			return cloudplugin.Outcome{}, cloudplugin.Conflict(request.Destination, r.Node, "the table has a route for "+request.Destination+" already")
		}
		p.table.NextID++
		p.table.Routes = append(p.table.Routes, Row{
			ID: strconv.Itoa(p.table.NextID), Cluster: request.Cluster.Name, Name: request.NameHint,
			Destination: destination.String(), Node: request.Node.Name, Addresses: request.Node.Addresses,
		})
		return cloudplugin.Outcome{}, nil
	})
}

func sameDestination(a, b string) bool {
	pa, errA := prefix.Canonical(a)
	pb, errB := prefix.Canonical(b)
	return errA == nil && errB == nil && pa == pb
}

// DeleteRoute implements cloudplugin.Plugin.
func (p *Plugin) DeleteRoute(_ context.Context, request cloudplugin.DeleteRequest) (cloudplugin.Outcome, error) {
	return p.change(func() (cloudplugin.Outcome, error) {
		before := len(p.table.Routes)
		p.table.Routes = slices.DeleteFunc(p.table.Routes, func(r Row) bool {
			return r.Cluster == request.Cluster.Name && r.ID == request.Route.ID
		})
		if len(p.table.Routes) == before {
			return cloudplugin.Outcome{Kind: cloudplugin.Unchanged}, nil
		}
		return cloudplugin.Outcome{}, nil
	})
}

// ReplaceRoute implements cloudplugin.Replacer.
func (p *Plugin) ReplaceRoute(_ context.Context, request cloudplugin.ReplaceRequest) (cloudplugin.Outcome, error) {
	return p.change(func() (cloudplugin.Outcome, error) {
		for i := range p.table.Routes {
			r := &p.table.Routes[i]
			if r.Cluster == request.Cluster.Name && r.ID == request.Route.ID {
				r.Node, r.Name, r.Blackhole, r.Addresses = request.Node.Name, request.NameHint, false, request.Node.Addresses
				return cloudplugin.Outcome{}, nil
			}
		}
		return cloudplugin.Outcome{}, cloudplugin.TargetNotFound("the table has no row " + request.Route.ID)
	})
}
