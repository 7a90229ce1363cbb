package throwaway

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
)

// A kafkaRelease is what one line of Apache Kafka needs.
type kafkaRelease struct {
	line      string   // "4.4"
	version   string   // "4.4.0"
	minJava   int      // the oldest Java that runs its broker
	artifacts []string // group:artifact:version; Maven adds what these need
}

var (
	kafka44 = kafkaRelease{"4.4", "4.4.0", 17, []string{
		"org.apache.kafka:kafka_2.13:4.4.0",
		"org.apache.kafka:kafka-tools:4.4.0",
		"org.apache.logging.log4j:log4j-slf4j-impl:2.25.3",
	}}
	kafka39 = kafkaRelease{"3.9", "3.9.2", 11, []string{ // brings reload4j for its log
		"org.apache.kafka:kafka_2.13:3.9.2",
		"org.apache.kafka:kafka-tools:3.9.2",
	}}
)

var kafkaReleases = map[string]kafkaRelease{"": kafka44, "4.4": kafka44, "3.9": kafka39}

// kafkaFiles are a release that can be run.
type kafkaFiles struct {
	kafkaRelease
	java        string // the program
	javaVersion string // "17.0.15"
	dir         string // holds the jars
}

func (f kafkaFiles) classPath() string { return filepath.Join(f.dir, "*") }

// findKafka returns the release from the cache of earlier runs, or has Maven
// fetch it. Of several processes that want it at once, the first fetches it.
func findKafka(ctx context.Context, release kafkaRelease, log io.Writer) (kafkaFiles, error) {
	f := kafkaFiles{kafkaRelease: release}
	if err := f.findJava(ctx); err != nil {
		return f, err
	}
	cache, err := cacheDir()
	if err != nil {
		return f, err
	}
	pom := release.pom()
	f.dir = filepath.Join(cache, fmt.Sprintf("kafka-%s-%.4x", release.version, sha256.Sum256([]byte(pom))))
	err = once(ctx, f.dir, func(dir string) error { return mavenFetch(ctx, pom, dir, log) })
	if err != nil {
		return f, fmt.Errorf("fetch Apache Kafka %s: %w", release.version, err)
	}
	return f, nil
}

var javaVersionText = regexp.MustCompile(`version "((\d+)[^"]*)"`)

func (f *kafkaFiles) findJava(ctx context.Context) error {
	wanted := fmt.Sprintf("install a JDK, version %d or later, and Maven", f.minJava)
	java, err := javaProgram("java")
	if err != nil {
		return fmt.Errorf("find Java for Kafka: %w: %s", err, wanted)
	}
	out, err := exec.CommandContext(ctx, java, "-version").CombinedOutput()
	m := javaVersionText.FindStringSubmatch(string(out))
	if err != nil || m == nil {
		return fmt.Errorf("%s -version says %q: %w: %s", java, out, err, wanted)
	}
	if major, _ := strconv.Atoi(m[2]); major < f.minJava {
		return fmt.Errorf("%s is version %s, too old for Kafka %s: %s", java, m[1], f.version, wanted)
	}
	f.java, f.javaVersion = java, m[1]
	return nil
}

// javaProgram looks where Maven looks too.
func javaProgram(name string) (string, error) {
	if home := os.Getenv("JAVA_HOME"); home != "" {
		return exec.LookPath(filepath.Join(home, "bin", name))
	}
	return exec.LookPath(name)
}

// once makes a directory of the cache, unless it is there, in one step: another
// one is filled first.
func once(ctx context.Context, dir string, fill func(dir string) error) error {
	unlock, err := lock(ctx, dir+".lock")
	if err != nil {
		return err
	}
	defer unlock()
	if _, err := os.Stat(dir); !errors.Is(err, os.ErrNotExist) {
		return err
	}
	part := dir + ".part"
	if err := errors.Join(os.RemoveAll(part), os.Mkdir(part, 0o755)); err != nil { // of a run that was killed
		return err
	}
	if err := fill(part); err != nil {
		return errors.Join(err, os.RemoveAll(part))
	}
	if err := makeReadable(part); err != nil {
		return err
	}
	return os.Rename(part, dir)
}

func mavenFetch(ctx context.Context, pom, dir string, log io.Writer) (err error) {
	mvn, err := exec.LookPath("mvn")
	if err != nil {
		return fmt.Errorf("%w: install Maven", err)
	}
	g, err := newGuardWith("maven", owner{}, "KILL")
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, g.Close()) }()
	if err := os.WriteFile(g.path("pom.xml"), []byte(pom), 0o600); err != nil {
		return err
	}
	return g.run(ctx, owner{}, log, mvn, "--batch-mode", "--quiet", "-Dstyle.color=never", "--file", g.path("pom.xml"),
		"dependency:copy-dependencies", "-DincludeScope=runtime", "-DoutputDirectory="+dir)
}

func (r kafkaRelease) pom() string {
	var deps strings.Builder
	for _, a := range r.artifacts {
		part := strings.Split(a, ":")
		fmt.Fprintf(&deps, "<dependency><groupId>%s</groupId><artifactId>%s</artifactId><version>%s</version></dependency>\n",
			part[0], part[1], part[2])
	}
	return `<project xmlns="http://maven.apache.org/POM/4.0.0">
<modelVersion>4.0.0</modelVersion>
<groupId>throwaway</groupId><artifactId>kafka</artifactId><version>1</version><packaging>pom</packaging>
<dependencies>
` + deps.String() + `</dependencies>
</project>
`
}
