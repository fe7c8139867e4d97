// Package deploy tests the shipped manifests: the chart is clean, renders what
// the kustomize base holds, and refuses bad values.
package deploy

import (
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"testing"

	"helm.sh/helm/v3/pkg/chart/loader"
	"helm.sh/helm/v3/pkg/chartutil"
	"helm.sh/helm/v3/pkg/engine"
	"helm.sh/helm/v3/pkg/lint"
	"helm.sh/helm/v3/pkg/lint/support"
	"sigs.k8s.io/kustomize/api/krusty"
	"sigs.k8s.io/kustomize/kyaml/filesys"
	"sigs.k8s.io/yaml"
)

const (
	chartDir = "../../deploy/helm/waymark"
	baseDir  = "../../deploy/kustomize/base"
)

func TestChartLints(t *testing.T) {
	linter := lint.All(chartDir, map[string]any{}, "waymark-system", true)
	for _, message := range linter.Messages {
		if message.Severity > support.InfoSev {
			t.Errorf("%v", message)
		}
	}
}

// object is a rendered object as plain values.
type object map[string]any

func (o object) key() string {
	metadata, _ := o["metadata"].(map[string]any)
	return fmt.Sprintf("%v/%v", o["kind"], metadata["name"])
}

func parse(t *testing.T, text string, into map[string]object) {
	t.Helper()
	for document := range strings.SplitSeq("\n"+text, "\n---") {
		var o object
		if err := yaml.Unmarshal([]byte(document), &o); err != nil {
			t.Fatalf("%v in:\n%s", err, document)
		}
		if len(o) > 0 {
			into[o.key()] = o
		}
	}
}

func render(t *testing.T, values map[string]any) (map[string]object, error) {
	t.Helper()
	chart, err := loader.Load(chartDir)
	if err != nil {
		t.Fatal(err)
	}
	options := chartutil.ReleaseOptions{Name: "waymark", Namespace: "waymark-system", IsInstall: true}
	all, err := chartutil.ToRenderValues(chart, values, options, nil)
	if err != nil {
		return nil, err
	}
	files, err := engine.Render(chart, all)
	if err != nil {
		return nil, err
	}
	objects := map[string]object{}
	for name, content := range files {
		if strings.HasSuffix(name, ".yaml") {
			parse(t, content, objects)
		}
	}
	return objects, nil
}

func TestChartEqualsKustomize(t *testing.T) {
	rendered, err := render(t, nil)
	if err != nil {
		t.Fatal(err)
	}
	built, err := krusty.MakeKustomizer(krusty.MakeDefaultOptions()).Run(filesys.MakeFsOnDisk(), baseDir)
	if err != nil {
		t.Fatal(err)
	}
	text, err := built.AsYaml()
	if err != nil {
		t.Fatal(err)
	}
	base := map[string]object{}
	parse(t, string(text), base)
	delete(base, "Namespace/waymark-system") // helm --create-namespace
	if len(base) < 6 {
		t.Fatalf("the base holds only %d objects", len(base))
	}
	for key, want := range base {
		got, ok := rendered[key]
		if !ok {
			t.Errorf("the chart lacks %s", key)
			continue
		}
		for _, line := range differences("", map[string]any(want), map[string]any(got)) {
			t.Errorf("%s: %s", key, line)
		}
	}
	for key := range rendered {
		if _, ok := base[key]; !ok {
			t.Errorf("the base lacks %s", key)
		}
	}
}

// differences names every field that differs.
func differences(path string, want, got any) []string {
	wantMap, ok1 := want.(map[string]any)
	gotMap, ok2 := got.(map[string]any)
	if ok1 && ok2 {
		var out []string
		keys := map[string]bool{}
		for key := range wantMap {
			keys[key] = true
		}
		for key := range gotMap {
			keys[key] = true
		}
		for key := range keys {
			out = append(out, differences(path+"."+key, wantMap[key], gotMap[key])...)
		}
		slices.Sort(out)
		return out
	}
	wantList, ok1 := want.([]any)
	gotList, ok2 := got.([]any)
	if ok1 && ok2 && len(wantList) == len(gotList) {
		var out []string
		for i := range wantList {
			out = append(out, differences(fmt.Sprintf("%s[%d]", path, i), wantList[i], gotList[i])...)
		}
		return out
	}
	a, _ := json.Marshal(want)
	b, _ := json.Marshal(got)
	if string(a) != string(b) {
		return []string{fmt.Sprintf("%s: base %s, chart %s", path, a, b)}
	}
	return nil
}

func TestSchemaRefusesBadValues(t *testing.T) {
	tests := []struct {
		values   map[string]any
		mentions string
	}{
		{map[string]any{"clusterCIDR": ""}, "clusterCIDR"},
		{map[string]any{"clusterCIDR": "10.244.0.0"}, "clusterCIDR"},
		{map[string]any{"replicas": 0}, "replicas"},
		{map[string]any{"clusterName": ""}, "clusterName"},
		{map[string]any{"plugin": map[string]any{"image": ""}}, "image"},
		{map[string]any{"imagePullPolicy": "Sometimes"}, "imagePullPolicy"},
		{map[string]any{"replicaCount": 3}, "replicaCount"},
	}
	for _, test := range tests {
		t.Run(test.mentions, func(t *testing.T) {
			if _, err := render(t, test.values); err == nil || !strings.Contains(err.Error(), test.mentions) {
				t.Errorf("error %v does not name %s", err, test.mentions)
			}
		})
	}
}

func TestTheTokenIsInTheWatcherAlone(t *testing.T) {
	rendered, err := render(t, nil)
	if err != nil {
		t.Fatal(err)
	}
	pod := rendered["Deployment/waymark"]["spec"].(map[string]any)["template"].(map[string]any)["spec"].(map[string]any)
	if pod["automountServiceAccountToken"] != false {
		t.Error("the pod mounts a token into every container")
	}
	containers := append(pod["initContainers"].([]any), pod["containers"].([]any)...)
	for _, each := range containers {
		container := each.(map[string]any)
		has := false
		for _, mount := range container["volumeMounts"].([]any) {
			has = has || mount.(map[string]any)["name"] == "token"
		}
		if has != (container["name"] == "watcher") {
			t.Errorf("container %v: token mounted: %t", container["name"], has)
		}
		security := container["securityContext"].(map[string]any)
		if security["readOnlyRootFilesystem"] != true || security["allowPrivilegeEscalation"] != false {
			t.Errorf("container %v: security context %v", container["name"], security)
		}
	}
}
