// Package cluster starts a real etcd, kube-apiserver (RBAC on) and the node-ipam
// controller of kube-controller-manager on loopback. The binaries are built by
// test/e2e/kube/build.sh.
package cluster

import (
	"crypto/rand"
	"crypto/rsa"
	"crypto/x509"
	"encoding/pem"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"testing"
	"time"

	authenticationv1 "k8s.io/api/authentication/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"

	"github.com/waymark-routes/waymark/test/e2e/process"
)

// ClusterCIDR is the range that the node-ipam controller hands out from.
const ClusterCIDR = "10.244.0.0/16"

const adminToken = "admin-token-of-the-test"

// Cluster is a running control plane. The test that started it owns it.
type Cluster struct {
	Admin  kubernetes.Interface
	Config *rest.Config

	t         *testing.T // owns the processes, also those started in subtests
	dir       string
	bin       string
	etcd      string
	address   string
	apiserver *process.Process
}

// Binary is the path of a built binary; a missing one fails the test with what
// to do.
func Binary(t *testing.T, name string) string {
	t.Helper()
	dir, err := filepath.Abs(".bin")
	if err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(dir, name)
	if _, err := os.Stat(path); err != nil {
		t.Fatalf("%s is missing: run `make e2e`, which builds it", path)
	}
	return path
}

// Start starts the control plane and waits until it is ready.
func Start(t *testing.T) *Cluster {
	t.Helper()
	c := &Cluster{t: t, dir: t.TempDir(), bin: filepath.Dir(Binary(t, "kube-apiserver")), address: process.FreeAddress(t)}
	c.etcd = "http://" + process.FreeAddress(t)
	peer := "http://" + process.FreeAddress(t)
	process.Start(t, filepath.Join(c.bin, "etcd"), "etcd", "--data-dir", filepath.Join(c.dir, "etcd"), "--unsafe-no-fsync",
		"--listen-client-urls", c.etcd, "--advertise-client-urls", c.etcd, "--listen-peer-urls", peer,
		"--initial-advertise-peer-urls", peer, "--initial-cluster", "default="+peer, "--log-level", "warn")
	c.writeKeys(t)
	c.StartAPIServer()
	ca := filepath.Join(c.dir, "apiserver.crt") // the server makes it as it starts
	process.Eventually(t, 30*time.Second, "kube-apiserver has its certificate", func() error {
		_, err := os.Stat(ca)
		return err
	})
	c.Config = &rest.Config{Host: "https://" + c.address, BearerToken: adminToken, TLSClientConfig: rest.TLSClientConfig{CAFile: ca}, QPS: 500, Burst: 1000}
	admin, err := kubernetes.NewForConfig(c.Config)
	if err != nil {
		t.Fatal(err)
	}
	c.Admin = admin
	c.WaitReady(t)
	kubeconfig := c.Kubeconfig(t, adminToken)
	process.Start(t, filepath.Join(c.bin, "kube-controller-manager"), "kube-controller-manager", "--kubeconfig", kubeconfig,
		"--controllers", "node-ipam-controller", "--allocate-node-cidrs", "--cluster-cidr", ClusterCIDR, "--leader-elect=false",
		"--secure-port", "0", "--service-cluster-ip-range", "10.0.0.0/24", "--kube-api-qps", "500", "--kube-api-burst", "1000")
	return c
}

func (c *Cluster) writeKeys(t *testing.T) {
	t.Helper()
	key, err := rsa.GenerateKey(rand.Reader, 2048)
	if err != nil {
		t.Fatal(err)
	}
	block := pem.EncodeToMemory(&pem.Block{Type: "RSA PRIVATE KEY", Bytes: x509.MarshalPKCS1PrivateKey(key)})
	write := func(name string, content []byte) {
		if err := os.WriteFile(filepath.Join(c.dir, name), content, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	write("sa.key", block)
	write("tokens.csv", []byte(adminToken+`,admin,admin,"system:masters"`+"\n"))
}

// StartAPIServer starts the API server, again on the same port after a stop.
func (c *Cluster) StartAPIServer() {
	c.t.Helper()
	_, port, _ := net.SplitHostPort(c.address)
	c.apiserver = process.Start(c.t, filepath.Join(c.bin, "kube-apiserver"), "kube-apiserver", "--etcd-servers", c.etcd,
		"--bind-address", "127.0.0.1", "--secure-port", port, "--cert-dir", c.dir,
		"--service-account-key-file", filepath.Join(c.dir, "sa.key"), "--service-account-signing-key-file", filepath.Join(c.dir, "sa.key"),
		"--service-account-issuer", "https://kubernetes.default.svc", "--authorization-mode", "RBAC",
		"--token-auth-file", filepath.Join(c.dir, "tokens.csv"), "--service-cluster-ip-range", "10.0.0.0/24")
}

// StopAPIServer kills the API server; etcd keeps its data.
func (c *Cluster) StopAPIServer() { c.apiserver.Kill() }

// WaitReady waits until the API server is ready and kube-system exists.
func (c *Cluster) WaitReady(t *testing.T) {
	t.Helper()
	process.Eventually(t, 60*time.Second, "kube-apiserver is ready", func() error {
		if !c.apiserver.Running() {
			t.Fatal("kube-apiserver has ended")
		}
		if err := c.Admin.CoreV1().RESTClient().Get().AbsPath("/readyz").Do(t.Context()).Error(); err != nil {
			return err
		}
		_, err := c.Admin.CoreV1().Namespaces().Get(t.Context(), "kube-system", metav1.GetOptions{})
		return err
	})
}

// Kubeconfig writes a kubeconfig with a token and returns its path.
func (c *Cluster) Kubeconfig(t *testing.T, token string) string {
	t.Helper()
	config := clientcmdapi.NewConfig()
	config.Clusters["c"] = &clientcmdapi.Cluster{Server: "https://" + c.address, CertificateAuthority: filepath.Join(c.dir, "apiserver.crt")}
	config.AuthInfos["u"] = &clientcmdapi.AuthInfo{Token: token}
	config.Contexts["x"] = &clientcmdapi.Context{Cluster: "c", AuthInfo: "u"}
	config.CurrentContext = "x"
	path := filepath.Join(t.TempDir(), "kubeconfig")
	if err := clientcmd.WriteToFile(*config, path); err != nil {
		t.Fatal(err)
	}
	return path
}

// ServiceAccountToken makes a token of a ServiceAccount.
func (c *Cluster) ServiceAccountToken(t *testing.T, namespace, name string) string {
	t.Helper()
	request := &authenticationv1.TokenRequest{}
	answer, err := c.Admin.CoreV1().ServiceAccounts(namespace).CreateToken(t.Context(), name, request, metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	return answer.Status.Token
}

// Join creates nodes as a kubelet and a cloud's node controller would: addresses,
// provider id, labels, 50 images, conditions, and no NetworkUnavailable.
func (c *Cluster) Join(t *testing.T, prefix string, from, to int) {
	t.Helper()
	for i := from; i <= to; i++ {
		name := fmt.Sprintf("%s-%d", prefix, i)
		n := &corev1.Node{
			ObjectMeta: metav1.ObjectMeta{Name: name, Labels: map[string]string{
				"kubernetes.io/hostname": name, "kubernetes.io/os": "linux", "topology.kubernetes.io/zone": "zone-" + strconv.Itoa(i%3),
			}},
			Spec: corev1.NodeSpec{ProviderID: "example:///zone/i-" + name},
		}
		created, err := c.Admin.CoreV1().Nodes().Create(t.Context(), n, metav1.CreateOptions{})
		if err != nil {
			t.Fatal(err)
		}
		created.Status = corev1.NodeStatus{
			Addresses: []corev1.NodeAddress{
				{Type: corev1.NodeInternalIP, Address: fmt.Sprintf("192.0.2.%d", i)}, {Type: corev1.NodeHostName, Address: name},
			},
			Conditions: []corev1.NodeCondition{{Type: corev1.NodeReady, Status: corev1.ConditionTrue, Reason: "KubeletReady"}},
		}
		for image := range 50 {
			created.Status.Images = append(created.Status.Images, corev1.ContainerImage{Names: []string{fmt.Sprintf("registry.example.com/team/image-%d:v1", image)}, SizeBytes: 1 << 20})
		}
		if _, err := c.Admin.CoreV1().Nodes().UpdateStatus(t.Context(), created, metav1.UpdateOptions{}); err != nil {
			c.setStatus(t, name, created.Status)
		}
	}
}

func (c *Cluster) setStatus(t *testing.T, name string, status corev1.NodeStatus) {
	t.Helper()
	process.Eventually(t, 10*time.Second, "status of "+name+" is written", func() error {
		n, err := c.Admin.CoreV1().Nodes().Get(t.Context(), name, metav1.GetOptions{})
		if err != nil {
			return err
		}
		conditions := n.Status.Conditions
		n.Status = status
		for _, kept := range conditions {
			if kept.Type == corev1.NodeNetworkUnavailable {
				n.Status.Conditions = append(n.Status.Conditions, kept)
			}
		}
		_, err = c.Admin.CoreV1().Nodes().UpdateStatus(t.Context(), n, metav1.UpdateOptions{})
		return err
	})
}

// Heartbeat changes only what a kubelet's heartbeat changes.
func (c *Cluster) Heartbeat(t *testing.T, name string) {
	t.Helper()
	now := time.Now().UTC().Format(time.RFC3339)
	body := fmt.Sprintf(`{"status":{"conditions":[{"type":"Ready","status":"True","reason":"KubeletReady","lastHeartbeatTime":%q,"message":"beat %d"}]}}`, now, time.Now().UnixNano())
	if _, err := c.Admin.CoreV1().Nodes().Patch(t.Context(), name, "application/strategic-merge-patch+json", []byte(body), metav1.PatchOptions{}, "status"); err != nil {
		t.Fatal(err)
	}
}

// SetAddress gives a node another InternalIP.
func (c *Cluster) SetAddress(t *testing.T, name, address string) {
	t.Helper()
	n, err := c.Admin.CoreV1().Nodes().Get(t.Context(), name, metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	status := n.Status
	var conditions []corev1.NodeCondition
	for _, condition := range status.Conditions {
		if condition.Type != corev1.NodeNetworkUnavailable {
			conditions = append(conditions, condition)
		}
	}
	status.Conditions = conditions
	status.Addresses = []corev1.NodeAddress{{Type: corev1.NodeInternalIP, Address: address}, {Type: corev1.NodeHostName, Address: name}}
	c.setStatus(t, name, status)
}

// AdminKubeconfig is a kubeconfig of the administrator.
func (c *Cluster) AdminKubeconfig(t *testing.T) string { return c.Kubeconfig(t, adminToken) }

// Client is a client with a token.
func (c *Cluster) Client(t *testing.T, token string) kubernetes.Interface {
	t.Helper()
	config := rest.CopyConfig(c.Config)
	config.BearerToken = token
	client, err := kubernetes.NewForConfig(config)
	if err != nil {
		t.Fatal(err)
	}
	return client
}

// CAFile is the certificate that the API server's clients trust.
func (c *Cluster) CAFile() string { return filepath.Join(c.dir, "apiserver.crt") }
