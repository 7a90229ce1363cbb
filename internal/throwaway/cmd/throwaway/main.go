// Command throwaway starts a server for tests and examples and prints one line
// of JSON that says where it is. The server ends, and its files go, when standard
// input ends or the command does, in whatever way.
//
//	throwaway postgres [-version 14] [-url URL] [-set name=value]...
//	throwaway nats [-port 4222] [-store DIR]
//	throwaway kafka [-version 3.9] [-fake] [-require-real] [-set name=value]...
package main

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"strings"
	"syscall"

	"github.com/postroom/postroom/internal/throwaway"
)

const usage = `usage:
  throwaway postgres [-version 14] [-url URL] [-set name=value]...
  throwaway nats [-port 4222] [-store DIR]
  throwaway kafka [-version 3.9] [-fake] [-require-real] [-set name=value]...
`

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM, syscall.SIGHUP)
	defer stop()
	ctx, cancel := context.WithCancel(ctx)
	go func() {
		_, _ = io.Copy(io.Discard, os.Stdin)
		cancel()
	}()
	err := run(ctx, os.Args[1:], os.Stdout, os.Stderr)
	if err != nil && !errors.Is(err, flag.ErrHelp) {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

// run lives until ctx ends.
func run(ctx context.Context, args []string, stdout, stderr io.Writer) error {
	if len(args) == 0 {
		return errors.New(usage)
	}
	flags := flag.NewFlagSet("throwaway "+args[0], flag.ContinueOnError)
	flags.SetOutput(stderr)
	switch args[0] {
	case "postgres":
		return runPostgres(ctx, flags, args[1:], stdout)
	case "nats":
		return runNATS(ctx, flags, args[1:], stdout)
	case "kafka":
		return runKafka(ctx, flags, args[1:], stdout)
	default:
		return fmt.Errorf("unknown server %q\n%s", args[0], usage)
	}
}

func runPostgres(ctx context.Context, flags *flag.FlagSet, args []string, stdout io.Writer) (err error) {
	cfg := throwaway.PostgresConfig{Settings: map[string]string{}}
	flags.StringVar(&cfg.Version, "version", "", "major version, 14 or later (default any)")
	flags.StringVar(&cfg.URL, "url", "", "describe this running server instead of starting one")
	settings(flags, cfg.Settings)
	if err := parse(flags, args); err != nil {
		return err
	}
	p, err := throwaway.StartPostgres(ctx, cfg)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, p.Close()) }()
	return report(ctx, stdout, struct {
		URL     string `json:"url"`
		Version string `json:"version"`
		Source  string `json:"source"`
		DataDir string `json:"data_dir"`
		BinDir  string `json:"bin_dir"`
	}{p.URL, p.Version, p.Source, p.DataDir, p.BinDir})
}

func runNATS(ctx context.Context, flags *flag.FlagSet, args []string, stdout io.Writer) (err error) {
	var cfg throwaway.NATSConfig
	flags.IntVar(&cfg.Port, "port", 0, "port of 127.0.0.1 (default a free one)")
	flags.StringVar(&cfg.StoreDir, "store", "", "directory of the streams, kept at the end (default a new one, removed)")
	if err := parse(flags, args); err != nil {
		return err
	}
	n, err := throwaway.StartNATS(ctx, cfg)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, n.Close()) }()
	return report(ctx, stdout, struct {
		URL      string `json:"url"`
		StoreDir string `json:"store_dir"`
	}{n.URL, n.StoreDir})
}

func runKafka(ctx context.Context, flags *flag.FlagSet, args []string, stdout io.Writer) (err error) {
	cfg := throwaway.KafkaConfig{Settings: map[string]string{}}
	flags.StringVar(&cfg.Version, "version", "", "release line, 4.4 or 3.9 (default the newest)")
	flags.BoolVar(&cfg.Fake, "fake", false, "start kfake, also where Apache Kafka can be had")
	flags.BoolVar(&cfg.RequireReal, "require-real", false, "fail where Apache Kafka cannot be had, instead of starting kfake")
	settings(flags, cfg.Settings)
	if err := parse(flags, args); err != nil {
		return err
	}
	k, err := throwaway.StartKafka(ctx, cfg)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, k.Close()) }()
	return report(ctx, stdout, struct {
		Brokers string `json:"brokers"`
		Version string `json:"version"`
		Source  string `json:"source"`
	}{strings.Join(k.Brokers, ","), k.Version, k.Source})
}

// settings adds a flag that fills into.
func settings(flags *flag.FlagSet, into map[string]string) {
	flags.Func("set", "server setting, `name=value`; may be repeated", func(s string) error {
		name, value, ok := strings.Cut(s, "=")
		if !ok {
			return errors.New("want name=value")
		}
		into[name] = value
		return nil
	})
}

func parse(flags *flag.FlagSet, args []string) error {
	if err := flags.Parse(args); err != nil {
		return err
	}
	if flags.NArg() > 0 {
		return fmt.Errorf("unexpected argument %q\n%s", flags.Arg(0), usage)
	}
	return nil
}

func report(ctx context.Context, stdout io.Writer, v any) error {
	if err := json.NewEncoder(stdout).Encode(v); err != nil {
		return err
	}
	<-ctx.Done()
	return nil
}
