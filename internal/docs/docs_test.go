// Package docs holds the pages in docs equal to the code, where a list can be
// checked.
package docs

import (
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

const root = "../.."

// sources reads all Go files that are not tests.
func sources(t *testing.T) map[string]string {
	t.Helper()
	files := map[string]string{}
	err := filepath.WalkDir(root, func(path string, entry fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		name := entry.Name()
		if entry.IsDir() && (name == "test" || name == "tools" || name == "bin" || name == "dist" || strings.HasPrefix(name, ".") && path != root) {
			return filepath.SkipDir
		}
		if strings.HasSuffix(name, ".go") && !strings.HasSuffix(name, "_test.go") && !strings.HasSuffix(name, ".pb.go") {
			content, err := os.ReadFile(path)
			if err != nil {
				return err
			}
			files[path] = string(content)
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return files
}

func page(t *testing.T, name string) string {
	t.Helper()
	content, err := os.ReadFile(filepath.Join(root, "docs", name))
	if err != nil {
		t.Fatal(err)
	}
	return string(content)
}

// compare fails for what only one side has.
func compare(t *testing.T, what, doc string, code, documented map[string]bool) {
	t.Helper()
	if len(code) < 5 {
		t.Fatalf("only %d %ss were found in the code: the test is blind", len(code), what)
	}
	for name := range code {
		if !documented[name] {
			t.Errorf("%s %s is not in docs/%s", what, name, doc)
		}
	}
	for name := range documented {
		if !code[name] {
			t.Errorf("docs/%s names %s %s, which the code does not have", doc, what, name)
		}
	}
}

func names(text string, pattern *regexp.Regexp) map[string]bool {
	out := map[string]bool{}
	for _, match := range pattern.FindAllStringSubmatch(text, -1) {
		out[match[1]] = true
	}
	return out
}

func TestMetricsPage(t *testing.T) {
	inCode := regexp.MustCompile(`Name:\s*"((?:waymark|route_controller)_[a-z_]+)"`)
	code := map[string]bool{}
	for _, content := range sources(t) {
		for name := range names(content, inCode) {
			code[name] = true
		}
	}
	compare(t, "metric", "metrics.md", code, names(page(t, "metrics.md"), regexp.MustCompile("(?m)^\\| `([a-z_]+)`")))
}

func TestFlagsPage(t *testing.T) {
	inCode := regexp.MustCompile(`fs\.(?:[A-Za-z0-9]+VarP?|Var|String|Bool|Int|Duration)\((?:[^"\n]*,\s*)?"([a-z][a-z-]+)"`)
	code := map[string]bool{}
	for _, content := range sources(t) {
		for name := range names(content, inCode) {
			code[name] = true
		}
	}
	compare(t, "flag", "flags.md", code, names(page(t, "flags.md"), regexp.MustCompile("(?m)^\\| `--([a-z-]+)`")))
}
