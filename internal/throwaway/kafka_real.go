package throwaway

import (
	"context"
	"crypto/rand"
	"encoding/base64"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
)

// A realKafka is one process of Apache Kafka, broker and controller in one.
type realKafka struct {
	kafkaFiles
	cfg   KafkaConfig
	owner owner
	guard *guard

	listeners []listener
	process   *child
	paused    bool
}

type listener struct {
	name     string // as the settings have it
	protocol string
	port     int
}

func (l listener) brokers() []string { return []string{address(l.port)} }

func startRealKafka(ctx context.Context, cfg KafkaConfig, files kafkaFiles) (*Kafka, error) {
	o, err := serverOwner()
	if err != nil {
		return nil, err
	}
	if java, err := filepath.EvalSymlinks(files.java); err != nil || !o.reaches(filepath.Dir(java)) {
		o = owner{} // unlike PostgreSQL, Kafka does not mind
	}
	g, err := newGuardWith("kafka", o, "KILL")
	if err != nil {
		return nil, err
	}
	for try := 1; ; try++ {
		r := &realKafka{kafkaFiles: files, cfg: cfg, owner: o, guard: g}
		k := &Kafka{
			Version: files.version,
			Source:  fmt.Sprintf("Apache Kafka %s from %s on Java %s", files.version, files.dir, files.javaVersion),
			Real:    true,
			server:  r,
		}
		err := r.listen(k)
		if err == nil {
			err = r.configure()
		}
		if err == nil && try == 1 {
			err = r.format(ctx)
		}
		if err == nil {
			err = r.start(ctx)
		}
		switch {
		case err == nil:
			k.running = true
			return k, nil
		case try == 5 || !strings.Contains(err.Error(), "in use"):
			return nil, errors.Join(err, g.Close())
		}
	}
}

// listen chooses the listeners, with a port for each, and tells k.
func (r *realKafka) listen(k *Kafka) error {
	sasl, tls := r.cfg.SASLUsers != nil, r.cfg.TLS != nil
	for _, l := range []struct {
		listener
		wanted  bool
		brokers *[]string
	}{
		{listener{name: "OPEN", protocol: "PLAINTEXT"}, true, &k.Brokers},
		{listener{name: "CONTROLLER", protocol: "PLAINTEXT"}, true, new([]string)},
		{listener{name: "SASL", protocol: "SASL_PLAINTEXT"}, sasl, &k.SASLBrokers},
		{listener{name: "TLS", protocol: "SSL"}, tls, &k.TLSBrokers},
		{listener{name: "BOTH", protocol: "SASL_SSL"}, sasl && tls, &k.SASLTLSBrokers},
	} {
		if !l.wanted {
			continue
		}
		var err error
		if l.port, err = freePort(); err != nil {
			return err
		}
		r.listeners = append(r.listeners, l.listener)
		*l.brokers = l.listener.brokers()
	}
	return nil
}

// configure writes server.properties and what it names.
func (r *realKafka) configure() error {
	var addresses, protocols []string
	for _, l := range r.listeners {
		addresses = append(addresses, l.name+"://"+address(l.port))
		protocols = append(protocols, l.name+":"+l.protocol)
	}
	all := map[string]string{
		"process.roles":                  "broker,controller",
		"node.id":                        "1",
		"controller.quorum.voters":       "1@" + address(r.listeners[1].port),
		"controller.listener.names":      "CONTROLLER",
		"inter.broker.listener.name":     "OPEN",
		"listeners":                      strings.Join(addresses, ","),
		"listener.security.protocol.map": strings.Join(protocols, ","),
		"log.dirs":                       r.guard.path("data"),

		// A killed node is let back in when its old self's session ends.
		"broker.session.timeout.ms":    "3000",
		"broker.heartbeat.interval.ms": "500",

		"auto.create.topics.enable":                        "false",
		"group.initial.rebalance.delay.ms":                 "0",
		"log.retention.ms":                                 "-1", // records with old times stay
		"offsets.topic.num.partitions":                     "4",  // quickly made
		"offsets.topic.replication.factor":                 "1",
		"transaction.state.log.num.partitions":             "4",
		"transaction.state.log.replication.factor":         "1",
		"transaction.state.log.min.isr":                    "1",
		"share.coordinator.state.topic.num.partitions":     "4",
		"share.coordinator.state.topic.replication.factor": "1",
		"share.coordinator.state.topic.min.isr":            "1",
	}
	if r.cfg.SASLUsers != nil {
		r.addSASL(all)
	}
	if r.cfg.TLS != nil {
		if err := r.addTLS(all); err != nil {
			return err
		}
	}
	maps.Copy(all, r.cfg.Settings)
	level := "WARN"
	if r.cfg.Log != nil {
		level = "INFO"
	}
	return errors.Join(
		r.write("server.properties", properties(all)),
		r.write("log4j2.properties", "rootLogger = "+level+", C\nappender.c.type = Console\nappender.c.name = C\n"+
			"appender.c.layout.type = PatternLayout\nappender.c.layout.pattern = %d{HH:mm:ss.SSS} %p %c{1}: %m%n\n"),
		r.write("log4j.properties", "log4j.rootLogger="+level+", C\nlog4j.appender.C=org.apache.log4j.ConsoleAppender\n"+
			"log4j.appender.C.layout=org.apache.log4j.PatternLayout\nlog4j.appender.C.layout.ConversionPattern=%d{HH:mm:ss.SSS} %p %c{1}: %m%n\n"),
	)
}

func (r *realKafka) addSASL(all map[string]string) {
	var users strings.Builder
	for name, password := range r.cfg.SASLUsers {
		fmt.Fprintf(&users, " user_%s=%q", name, password)
	}
	all["sasl.enabled.mechanisms"] = "PLAIN,SCRAM-SHA-256,SCRAM-SHA-512"
	for _, l := range r.listeners {
		if !strings.HasPrefix(l.protocol, "SASL_") {
			continue
		}
		prefix := "listener.name." + strings.ToLower(l.name) + "."
		all[prefix+"plain.sasl.jaas.config"] = "org.apache.kafka.common.security.plain.PlainLoginModule required" + users.String() + ";"
		for _, mechanism := range []string{"scram-sha-256", "scram-sha-512"} {
			all[prefix+mechanism+".sasl.jaas.config"] = "org.apache.kafka.common.security.scram.ScramLoginModule required;"
		}
	}
}

func (r *realKafka) addTLS(all map[string]string) error {
	t := r.cfg.TLS
	all["ssl.keystore.type"] = "PEM"
	all["ssl.keystore.location"] = r.guard.path("keystore.pem")
	if err := r.write("keystore.pem", string(t.Key)+"\n"+string(t.Certificate)); err != nil {
		return err
	}
	if len(t.ClientCAs) == 0 {
		return nil
	}
	all["ssl.truststore.type"] = "PEM"
	all["ssl.truststore.location"] = r.guard.path("truststore.pem")
	for _, l := range r.listeners {
		if strings.HasSuffix(l.protocol, "SSL") { // the listener's own setting: the open one speaks no TLS
			all["listener.name."+strings.ToLower(l.name)+".ssl.client.auth"] = "required"
		}
	}
	return r.write("truststore.pem", string(t.ClientCAs))
}

func (r *realKafka) write(name, text string) error {
	path := r.guard.path(name)
	return errors.Join(os.WriteFile(path, []byte(text), 0o600), r.owner.own(path))
}

// properties writes settings as Java reads them.
func properties(all map[string]string) string {
	var text strings.Builder
	for _, name := range slices.Sorted(maps.Keys(all)) {
		fmt.Fprintf(&text, "%s=", name)
		for _, c := range all[name] {
			switch {
			case c == '\\':
				text.WriteString(`\\`)
			case c < ' ' || c > '~' && c <= 0xffff:
				fmt.Fprintf(&text, `\u%04x`, c)
			default:
				text.WriteRune(c)
			}
		}
		text.WriteByte('\n')
	}
	return text.String()
}

// format makes the data directory. The users of SCRAM stand in it.
func (r *realKafka) format(ctx context.Context) error {
	var id [16]byte
	if _, err := rand.Read(id[:]); err != nil {
		return err
	}
	id[0] &= 0x7f // so that the text begins with no hyphen, which looks like a flag
	args := []string{
		"-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC", "-XX:-UsePerfData", "-cp", r.classPath(), "kafka.tools.StorageTool",
		"format", "-t", base64.RawURLEncoding.EncodeToString(id[:]), "-c", r.guard.path("server.properties"),
	}
	for name, password := range r.cfg.SASLUsers {
		for _, mechanism := range []string{"SCRAM-SHA-256", "SCRAM-SHA-512"} {
			args = append(args, "--add-scram", fmt.Sprintf("%s=[name=%s,password=%s]", mechanism, name, password))
		}
	}
	if err := r.guard.run(ctx, r.owner, io.Discard, r.java, args...); err != nil {
		return fmt.Errorf("format the data directory: %w", err)
	}
	return nil
}

func (r *realKafka) start(ctx context.Context) error {
	if r.process != nil && r.process.alive() {
		return errors.New("the process runs still")
	}
	process, err := r.guard.start(r.owner, r.cfg.Log, nil, r.java, "-Xmx512m", "-XX:-UsePerfData",
		"-Dlog4j2.configurationFile="+r.guard.path("log4j2.properties"),
		"-Dlog4j.configuration=file:"+r.guard.path("log4j.properties"),
		"-cp", r.classPath(), "kafka.Kafka", r.guard.path("server.properties"))
	if err != nil {
		return err
	}
	_, err = kafkaAnswers(ctx, r.listeners[0].brokers(), func() error {
		if process.alive() {
			return nil
		}
		return fmt.Errorf("the process ended: %w", process.err)
	})
	if err != nil {
		_ = process.cmd.Process.Kill() // it may have ended
		<-process.done
		return fmt.Errorf("%w: its log ends: %s", err, process.log)
	}
	r.process, r.paused = process, false
	return nil
}

func (r *realKafka) stop(ctx context.Context) error {
	if err := r.resume(); err != nil {
		return err
	}
	return r.process.end(ctx, syscall.SIGTERM)
}

func (r *realKafka) kill(ctx context.Context) error { return r.process.end(ctx, syscall.SIGKILL) }

// close waits until nothing of this program looks after the process any more.
func (r *realKafka) close() error {
	err := r.guard.Close()
	if r.process != nil {
		<-r.process.done
	}
	return err
}

// pause returns when all of the server's threads have stopped: a busy machine
// lets them answer for a moment after the signal.
func (r *realKafka) pause() error {
	if r.paused {
		return nil // the stop was reported, and is so once
	}
	if err := r.signal(syscall.SIGSTOP); err != nil {
		return err
	}
	r.paused = true
	var status syscall.WaitStatus
	for {
		_, err := syscall.Wait4(r.process.cmd.Process.Pid, &status, syscall.WUNTRACED, nil)
		if !errors.Is(err, syscall.EINTR) {
			return err
		}
	}
}

func (r *realKafka) resume() error {
	r.paused = false
	return r.signal(syscall.SIGCONT)
}

func (r *realKafka) signal(sig syscall.Signal) error {
	err := r.process.cmd.Process.Signal(sig)
	if errors.Is(err, os.ErrProcessDone) && sig == syscall.SIGCONT {
		return nil
	}
	return err
}
