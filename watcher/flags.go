package watcher

import (
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/spf13/pflag"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"

	"github.com/waymark-routes/waymark/internal/flags"
	"github.com/waymark-routes/waymark/watcher/source"
)

// Flags are the watcher's flags; waymark-watcher and `waymark up` share them.
type Flags struct {
	kubeconfig, nodes, selector string
	clusterName, clusterCIDR    string
	condition                   string
	elect, single               bool
	duration, renew, retry      time.Duration
	leaseName, leaseNamespace   string
	grace                       time.Duration
}

// RegisterFlags adds the flags to fs.
func RegisterFlags(fs *pflag.FlagSet, defaultClusterCIDR string) *Flags {
	f := &Flags{}
	fs.StringVar(&f.kubeconfig, "kubeconfig", "", "kubeconfig of the API server; in a pod it is found without")
	fs.StringVar(&f.nodes, "nodes", "", "file or folder of Node manifests, in place of an API server")
	fs.StringVar(&f.selector, "node-selector", "", "label selector of the nodes, applied by the API server")
	fs.StringVar(&f.clusterName, "cluster-name", "kubernetes", "the cluster's name, as the plugin gets it")
	fs.StringVar(&f.clusterCIDR, "cluster-cidr", defaultClusterCIDR, "the cluster's pod address range, or one of each family (A,B)")
	fs.StringVar(&f.condition, "node-condition", "on", "on, or off to leave NetworkUnavailable to another component")
	fs.BoolVar(&f.elect, "leader-elect", true, "elect a leader (API server only); off only together with --single-instance")
	fs.BoolVar(&f.single, "single-instance", false, "says that no second watcher runs")
	fs.DurationVar(&f.duration, "leader-elect-lease-duration", 15*time.Second, "how long the Lease stands without a renewal")
	fs.DurationVar(&f.renew, "leader-elect-renew-deadline", 10*time.Second, "how long a leader tries to renew")
	fs.DurationVar(&f.retry, "leader-elect-retry-period", 2*time.Second, "pause between tries")
	fs.StringVar(&f.leaseName, "leader-elect-resource-name", "waymark", "name of the Lease")
	fs.StringVar(&f.leaseNamespace, "leader-elect-resource-namespace", "", "namespace of the Lease (default: the pod's own, else kube-system)")
	fs.DurationVar(&f.grace, "plugin-grace", 90*time.Second, "how long a leader's plugin may be away before it steps down")
	return f
}

// Apply checks the values and puts them into o; warnings go to logger.
func (f *Flags) Apply(o *Options, logger *slog.Logger) error {
	cidrs, warnings, err := flags.ClusterCIDRs(f.clusterCIDR)
	if err != nil {
		return err
	}
	for _, warning := range warnings {
		logger.Warn(warning)
	}
	if f.clusterName == "" {
		return flags.Usagef("--cluster-name: is empty")
	}
	if f.condition != "on" && f.condition != "off" {
		return flags.Usagef("--node-condition: %q is neither on nor off", f.condition)
	}
	if _, err := labels.Parse(f.selector); err != nil {
		return flags.Usagef("--node-selector: %w", err)
	}
	if f.retry <= 0 || f.renew <= f.retry*12/10 || f.duration <= f.renew {
		return flags.Usagef("--leader-elect-lease-duration (%v) must be above --leader-elect-renew-deadline (%v), and that above 1.2 times --leader-elect-retry-period (%v)", f.duration, f.renew, f.retry)
	}
	if f.grace <= 0 {
		return flags.Usagef("--plugin-grace: %v is not above zero", f.grace)
	}
	host, _ := os.Hostname()
	o.Holder = fmt.Sprintf("%s_%d_%d", host, os.Getpid(), time.Now().UnixNano())
	o.ClusterName, o.ClusterCIDRs, o.NodeSelector, o.ConditionsOff = f.clusterName, cidrs, f.selector, f.condition == "off"
	o.LeaseName, o.LeaseNamespace, o.LeaseDuration, o.RenewDeadline, o.RetryPeriod = f.leaseName, f.leaseNamespace, f.duration, f.renew, f.retry
	o.PluginGrace = f.grace
	if o.LeaseNamespace == "" {
		o.LeaseNamespace = ownNamespace()
	}
	if f.nodes != "" {
		return f.applyFile(o, logger)
	}
	return f.applyKube(o, logger)
}

func (f *Flags) applyFile(o *Options, logger *slog.Logger) error {
	if f.kubeconfig != "" {
		return flags.Usagef("--nodes and --kubeconfig: only one of them is taken")
	}
	if f.selector != "" {
		return flags.Usagef("--node-selector: is applied by an API server, and --nodes has none")
	}
	path, err := filepath.Abs(f.nodes)
	if err != nil {
		return flags.Usagef("--nodes: %w", err)
	}
	file, err := source.NewFile(path, logger)
	if err != nil {
		return flags.Usagef("--nodes: %w", err)
	}
	sum := sha256.Sum256([]byte(path))
	o.Source, o.ClusterUID = file, "file-"+hex.EncodeToString(sum[:8])
	return nil
}

func (f *Flags) applyKube(o *Options, logger *slog.Logger) error {
	if !f.elect && !f.single {
		return flags.Usagef("--leader-elect=false: needs --single-instance, which says that no second watcher runs")
	}
	var config *rest.Config
	var err error
	if f.kubeconfig != "" {
		if config, err = clientcmd.BuildConfigFromFlags("", f.kubeconfig); err != nil {
			return flags.Usagef("--kubeconfig: %w", err)
		}
	} else if config, err = rest.InClusterConfig(); err != nil {
		return flags.Usagef("--kubeconfig: is required outside of a pod (or --nodes): %w", err)
	}
	config.ContentType = "application/vnd.kubernetes.protobuf"
	config.AcceptContentTypes = "application/vnd.kubernetes.protobuf,application/json"
	config.UserAgent = "waymark-watcher"
	config.QPS, config.Burst = 200, 400
	client, err := kubernetes.NewForConfig(config)
	if err != nil {
		return flags.Usagef("--kubeconfig: %w", err)
	}
	o.Client, o.Elect = client, f.elect
	o.Source = source.NewKube(client, f.selector, logger)
	return nil
}

// ownNamespace is the pod's own namespace, else kube-system.
func ownNamespace() string {
	content, err := os.ReadFile("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
	if name := strings.TrimSpace(string(content)); err == nil && name != "" {
		return name
	}
	return "kube-system"
}
