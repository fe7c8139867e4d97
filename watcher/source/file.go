package source

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"sync"
	"time"

	"github.com/fsnotify/fsnotify"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	utilyaml "k8s.io/apimachinery/pkg/util/yaml"
	"sigs.k8s.io/yaml"
)

// settleTime is how long a file must be quiet before it is read again.
const settleTime = 50 * time.Millisecond

// File reads Node manifests from a file or folder and again when they change.
// Content that cannot be read keeps the last good nodes.
type File struct {
	path   string
	logger *slog.Logger

	mu      sync.Mutex // guards problem
	problem error
}

// NewFile makes a source. A path that cannot be read now is an error that names
// the file and the document.
func NewFile(path string, logger *slog.Logger) (*File, error) {
	f := &File{path: path, logger: logger}
	if _, err := f.read(); err != nil {
		return nil, err
	}
	return f, nil
}

// Problem implements Source.
func (f *File) Problem() error {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.problem
}

// Census implements Source with a fresh, error-free read.
func (f *File) Census(_ context.Context, names []string) (Census, error) {
	nodes, err := f.read()
	if err != nil {
		return Census{}, err
	}
	out := Census{Total: len(nodes)}
	for _, name := range names {
		presence := Presence{Name: name}
		if n := nodes[name]; n != nil {
			presence = Presence{Name: name, UID: string(n.UID), Present: true, PodCIDRs: podCIDRs(n)}
		}
		out.Nodes = append(out.Nodes, presence)
	}
	return out, nil
}

// Run implements Source.
func (f *File) Run(ctx context.Context, labelKeys []string, sink Sink) error {
	watcher, err := fsnotify.NewWatcher()
	if err != nil {
		return fmt.Errorf("watch %s: %w", f.path, err)
	}
	defer func() { _ = watcher.Close() }()
	// The folder is watched, so that editors that rename are seen too.
	dir := f.path
	if info, err := os.Stat(f.path); err != nil || !info.IsDir() {
		dir = filepath.Dir(f.path)
	}
	if err := watcher.Add(dir); err != nil {
		return fmt.Errorf("watch %s: %w", dir, err)
	}
	var known map[string]*corev1.Node
	reread := func() {
		nodes, err := f.read()
		f.note(ctx, err)
		if err != nil {
			return
		}
		if known == nil {
			var all []Node
			for _, name := range sortedNames(nodes) {
				all = append(all, fromKube(nodes[name], labelKeys))
			}
			sink.Replace(all, "")
		} else {
			diff(known, nodes, labelKeys, sink)
		}
		known = nodes
	}
	reread()
	quiet := time.NewTimer(time.Hour)
	defer quiet.Stop()
	for {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case event, ok := <-watcher.Events:
			if !ok {
				return errors.New("the watch of " + dir + " ended")
			}
			if !event.Has(fsnotify.Chmod) || event.Op != fsnotify.Chmod {
				quiet.Reset(settleTime)
			}
		case err, ok := <-watcher.Errors:
			if !ok {
				return errors.New("the watch of " + dir + " ended")
			}
			f.logger.WarnContext(ctx, "watch of files failed; all is read again", slog.String("file", dir), slog.Any("err", err))
			quiet.Reset(settleTime)
		case <-quiet.C:
			reread()
			if known == nil || f.Problem() != nil {
				quiet.Reset(time.Second) // a half-written file may be whole soon
			} else {
				quiet.Reset(time.Hour)
			}
		}
	}
}

// note remembers a problem, and logs it once.
func (f *File) note(ctx context.Context, err error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if err != nil && (f.problem == nil || f.problem.Error() != err.Error()) {
		f.logger.WarnContext(ctx, "nodes cannot be read; the last good ones are kept", slog.Any("err", err))
	}
	if err == nil && f.problem != nil {
		f.logger.InfoContext(ctx, "nodes can be read again", slog.String("file", f.path))
	}
	f.problem = err
}

func sortedNames(nodes map[string]*corev1.Node) []string {
	names := make([]string, 0, len(nodes))
	for name := range nodes {
		names = append(names, name)
	}
	slices.Sort(names)
	return names
}

// diff tells the sink what differs.
func diff(old, updated map[string]*corev1.Node, labelKeys []string, sink Sink) {
	for _, name := range sortedNames(old) {
		if updated[name] == nil {
			sink.Deleted(name)
		}
	}
	for _, name := range sortedNames(updated) {
		n := updated[name]
		before := old[name]
		if before == nil {
			sink.Added(fromKube(n, labelKeys))
			continue
		}
		if fields := Relevant(before, n, labelKeys); fields != 0 || !sameCondition(before, n) {
			sink.Updated(fromKube(n, labelKeys), fields)
		}
	}
}

// read reads all manifests. Node names are unique over all files.
func (f *File) read() (map[string]*corev1.Node, error) {
	info, err := os.Stat(f.path)
	if err != nil {
		return nil, fmt.Errorf("read nodes: %w", err)
	}
	files := []string{f.path}
	if info.IsDir() {
		files = nil
		entries, err := os.ReadDir(f.path)
		if err != nil {
			return nil, fmt.Errorf("read nodes: %w", err)
		}
		for _, entry := range entries {
			switch filepath.Ext(entry.Name()) {
			case ".yaml", ".yml", ".json":
				files = append(files, filepath.Join(f.path, entry.Name()))
			}
		}
		if len(files) == 0 {
			return nil, fmt.Errorf("read nodes: folder %s holds no .yaml, .yml or .json file", f.path)
		}
	}
	nodes, from := map[string]*corev1.Node{}, map[string]string{}
	for _, file := range files {
		content, err := os.ReadFile(file)
		if err != nil {
			return nil, fmt.Errorf("read nodes: %w", err)
		}
		list, err := decode(content)
		if err != nil {
			return nil, fmt.Errorf("read nodes: %s: %w", file, err)
		}
		for _, n := range list {
			if other, ok := from[n.Name]; ok {
				return nil, fmt.Errorf("read nodes: %s: node %q stands twice (also in %s)", file, n.Name, other)
			}
			nodes[n.Name], from[n.Name] = trimAll(n), file
		}
	}
	return nodes, nil
}

// trimAll is trim, but keeps all labels: which are needed is not known yet.
func trimAll(n *corev1.Node) *corev1.Node {
	out := trim(n, nil)
	out.Labels = n.Labels
	return out
}

// decode reads a file's documents: Node, NodeList or List, as YAML or JSON. A
// file without any is an error: it may be half-written.
func decode(content []byte) ([]*corev1.Node, error) {
	reader := utilyaml.NewYAMLReader(bufio.NewReader(bytes.NewReader(content)))
	var nodes []*corev1.Node
	seen, line := 0, 1
	for document := 1; ; document++ {
		text, err := reader.Read()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return nil, fmt.Errorf("document %d (line %d): %w", document, line, err)
		}
		if len(bytes.TrimSpace(stripComments(text))) > 0 {
			list, err := decodeDocument(text)
			if err != nil {
				return nil, fmt.Errorf("document %d (from line %d): %w", document, line, err)
			}
			seen++
			nodes = append(nodes, list...)
		}
		line += bytes.Count(text, []byte("\n")) + 1
	}
	if seen == 0 {
		return nil, errors.New("it holds no document (want Node, NodeList or List)")
	}
	return nodes, nil
}

func stripComments(text []byte) []byte {
	var out []byte
	for line := range bytes.Lines(text) {
		if trimmed := bytes.TrimSpace(line); !bytes.HasPrefix(trimmed, []byte("#")) && !bytes.Equal(trimmed, []byte("---")) {
			out = append(out, line...)
		}
	}
	return out
}

func decodeDocument(text []byte) ([]*corev1.Node, error) {
	content, err := yaml.YAMLToJSON(text)
	if err != nil {
		return nil, err
	}
	var head struct {
		metav1.TypeMeta `json:",inline"`
		Items           []json.RawMessage `json:"items"`
	}
	if err := json.Unmarshal(content, &head); err != nil {
		return nil, fmt.Errorf("it is no Kubernetes object: %w", err)
	}
	switch head.Kind {
	case "Node":
		n, err := decodeNode(content)
		if err != nil {
			return nil, err
		}
		return []*corev1.Node{n}, nil
	case "NodeList", "List":
		var nodes []*corev1.Node
		for i, item := range head.Items {
			var kind metav1.TypeMeta
			if err := json.Unmarshal(item, &kind); err != nil || (kind.Kind != "" && kind.Kind != "Node") || (kind.Kind == "" && head.Kind == "List") {
				return nil, fmt.Errorf("items[%d]: kind %q is not Node", i, kind.Kind)
			}
			n, err := decodeNode(item)
			if err != nil {
				return nil, fmt.Errorf("items[%d]: %w", i, err)
			}
			nodes = append(nodes, n)
		}
		return nodes, nil
	default:
		return nil, fmt.Errorf("kind: %q is none of Node, NodeList, List", head.Kind)
	}
}

func decodeNode(content []byte) (*corev1.Node, error) {
	n := &corev1.Node{}
	if err := json.Unmarshal(content, n); err != nil {
		var field *json.UnmarshalTypeError
		if errors.As(err, &field) {
			return nil, fmt.Errorf("%s: want %s, found %s", field.Field, kindName(field.Type), field.Value)
		}
		return nil, err
	}
	if n.Name == "" {
		return nil, errors.New("metadata.name: is required")
	}
	return n, nil
}

func kindName(t reflect.Type) string {
	switch t.Kind() {
	case reflect.Slice, reflect.Array:
		return "a list"
	case reflect.Struct, reflect.Map:
		return "an object"
	default:
		return "a " + t.Kind().String()
	}
}
