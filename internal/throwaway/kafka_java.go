package throwaway

import (
	"bufio"
	"context"
	"crypto/rand"
	"crypto/sha256"
	_ "embed"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"time"
)

//go:embed java/Bridge.java
var bridgeSource string

// A Java is a process with Kafka's own Java clients, for tests that others read
// what we write and the reverse. Its methods may be called from several
// goroutines; it does one thing at a time.
type Java struct {
	id     string // of transactions
	cmd    *exec.Cmd
	stdin  io.WriteCloser
	stdout *bufio.Reader
	log    *tail

	mu     sync.Mutex
	closed error // why there are no more answers
}

// A JavaRecord is a record as the Java clients have it: nil is null.
type JavaRecord struct {
	Topic     string       `json:"topic"`
	Partition int32        `json:"partition"` // the producer chooses it
	Offset    int64        `json:"offset"`
	Key       []byte       `json:"key"`
	Value     []byte       `json:"value"`
	Headers   []JavaHeader `json:"headers"`
	Timestamp int64        `json:"timestamp"` // milliseconds since 1970; 0 lets the producer choose
}

// A JavaHeader is one header of a record.
type JavaHeader struct {
	Name  string `json:"name"`
	Value []byte `json:"value"`
}

// JavaClient starts the Java clients of the newest Kafka that is known here. They
// come as [StartKafka]'s server does, and need a JDK. settings are of producer
// and consumer alike, under Kafka's names, and may be nil. ctx bounds the start
// only.
func JavaClient(ctx context.Context, brokers []string, settings map[string]string) (*Java, error) {
	j, err := javaClient(ctx, brokers, settings)
	if err != nil {
		return nil, fmt.Errorf("throwaway: start Kafka's Java client: %w", err)
	}
	return j, nil
}

func javaClient(ctx context.Context, brokers []string, settings map[string]string) (*Java, error) {
	files, err := findKafka(ctx, kafka44, nil)
	if err != nil {
		return nil, err
	}
	classes, err := files.compileBridge(ctx)
	if err != nil {
		return nil, err
	}
	all := map[string]string{"bootstrap.servers": strings.Join(brokers, ",")}
	maps.Copy(all, settings)
	argument, err := json.Marshal(all)
	if err != nil {
		return nil, err
	}
	j := &Java{id: "throwaway-" + rand.Text(), log: &tail{}}
	j.cmd = exec.Command(files.java, "-Xmx256m", "-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC", "-XX:-UsePerfData",
		"-cp", classes+string(os.PathListSeparator)+files.classPath(), "Bridge", string(argument))
	j.cmd.Stderr = j.log
	j.cmd.WaitDelay = closeTime
	if j.stdin, err = j.cmd.StdinPipe(); err != nil {
		return nil, err
	}
	stdout, err := j.cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	j.stdout = bufio.NewReader(stdout)
	return j, j.cmd.Start()
}

// compileBridge returns where the classes are.
func (f kafkaFiles) compileBridge(ctx context.Context) (string, error) {
	dir := fmt.Sprintf("%s-bridge-%.4x", f.dir, sha256.Sum256([]byte(bridgeSource)))
	return dir, once(ctx, dir, func(dir string) error {
		javac, err := javaProgram("javac")
		if err != nil {
			return fmt.Errorf("%w: install a JDK, not only a Java runtime", err)
		}
		source := filepath.Join(dir, "Bridge.java")
		if err := os.WriteFile(source, []byte(bridgeSource), 0o644); err != nil {
			return err
		}
		cmd := exec.CommandContext(ctx, javac, "-cp", f.classPath(), "-proc:none", "-d", dir, source)
		if out, err := cmd.CombinedOutput(); err != nil {
			return fmt.Errorf("compile Bridge.java: %w: %s", err, out)
		}
		return nil
	})
}

type javaRequest struct {
	Op        string       `json:"op"`
	Records   []JavaRecord `json:"records,omitempty"`
	End       string       `json:"end,omitempty"`
	ID        string       `json:"id,omitempty"`
	Topic     string       `json:"topic,omitempty"`
	Isolation string       `json:"isolation,omitempty"`
}

// Produce sends records with the producer's defaults and returns them with
// partition, offset and timestamp filled in.
func (j *Java) Produce(ctx context.Context, records ...JavaRecord) ([]JavaRecord, error) {
	return j.produce(ctx, javaRequest{Op: "produce", Records: records})
}

// Commit is [Java.Produce] in a transaction.
func (j *Java) Commit(ctx context.Context, records ...JavaRecord) ([]JavaRecord, error) {
	return j.produce(ctx, javaRequest{Op: "produce", Records: records, End: "commit", ID: j.id})
}

// Abort is [Java.Produce] in a transaction that is then aborted. The records
// have their places all the same.
func (j *Java) Abort(ctx context.Context, records ...JavaRecord) ([]JavaRecord, error) {
	return j.produce(ctx, javaRequest{Op: "produce", Records: records, End: "abort", ID: j.id})
}

// Consume returns what a topic holds, of each partition in order, without what
// was aborted and what is not decided.
func (j *Java) Consume(ctx context.Context, topic string) ([]JavaRecord, error) {
	return j.ask(ctx, javaRequest{Op: "consume", Topic: topic, Isolation: "read_committed"})
}

// ConsumeUncommitted is [Java.Consume] with what was aborted or is not decided.
func (j *Java) ConsumeUncommitted(ctx context.Context, topic string) ([]JavaRecord, error) {
	return j.ask(ctx, javaRequest{Op: "consume", Topic: topic, Isolation: "read_uncommitted"})
}

func (j *Java) produce(ctx context.Context, request javaRequest) ([]JavaRecord, error) {
	places, err := j.ask(ctx, request)
	if err != nil {
		return nil, err
	}
	if len(places) != len(request.Records) {
		return nil, fmt.Errorf("throwaway: Kafka's Java client: %d answers to %d records", len(places), len(request.Records))
	}
	for i, r := range request.Records {
		places[i].Key, places[i].Value, places[i].Headers = r.Key, r.Value, r.Headers
	}
	return places, nil
}

// ask ends the process when ctx ends: what it would answer later belongs to
// nobody.
func (j *Java) ask(ctx context.Context, request javaRequest) ([]JavaRecord, error) {
	j.mu.Lock()
	defer j.mu.Unlock()
	if j.closed != nil {
		return nil, fmt.Errorf("throwaway: Kafka's Java client: %w", j.closed)
	}
	var answer struct {
		Records []JavaRecord `json:"records"`
		Error   string       `json:"error"`
	}
	stop := context.AfterFunc(ctx, func() { _ = j.cmd.Process.Kill() }) // it may have ended
	err := json.NewEncoder(j.stdin).Encode(request)
	var line []byte
	if err == nil {
		line, err = j.stdout.ReadBytes('\n')
	}
	if !stop() {
		j.closed = fmt.Errorf("ended by a context: %w", context.Cause(ctx))
		return nil, fmt.Errorf("throwaway: Kafka's Java client: %s: %w: %s", request.Op, context.Cause(ctx), j.log)
	}
	if err == nil {
		err = json.Unmarshal(line, &answer)
	}
	if err == nil && answer.Error != "" {
		err = errors.New(answer.Error)
	}
	if err != nil {
		return nil, fmt.Errorf("throwaway: Kafka's Java client: %s: %w: %s", request.Op, err, j.log)
	}
	return answer.Records, nil
}

// Close ends the process. A second call does nothing.
func (j *Java) Close() error {
	j.mu.Lock()
	defer j.mu.Unlock()
	if errors.Is(j.closed, os.ErrClosed) {
		return nil
	}
	ended := j.closed != nil
	j.closed = os.ErrClosed
	kill := time.AfterFunc(closeTime, func() { _ = j.cmd.Process.Kill() })
	defer kill.Stop()
	_ = j.stdin.Close() // which ends it
	if err := j.cmd.Wait(); err != nil && !ended {
		return fmt.Errorf("throwaway: close Kafka's Java client: %w: %s", err, j.log)
	}
	return nil
}
