// The quick start shows the whole path on real servers, and checks it.
//
// Webhooks as GitHub sends them are written to PostgreSQL, each as a business
// row and an outbox message in one transaction, some of which roll back. Two
// dispatcher processes publish the messages to NATS JetStream or Kafka, a
// consumer process for each of two subscribers handles them, and all four are
// killed with SIGKILL at random moments, the worst ones among them. Messages are
// repeated, acknowledgements lost, handlers fail. At the end everything is
// counted by what has no part in Postroom.
//
//	go run ./examples/quickstart
//	go run ./examples/quickstart -broker kafka
//
// It starts servers of its own, on free ports of this machine, and leaves
// nothing behind. Kafka is Apache Kafka where Java and Maven are installed, and
// else a stand-in in this process. It exits with 1 if a message was lost, handled
// twice, altered, out of order at the broker, or published although its
// transaction rolled back; with Kafka also if it was handled before an earlier one
// of its key. With -break it breaks such a promise itself, to show that it notices.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"os/signal"
	"slices"
	"strings"
	"syscall"
	"time"
)

func main() {
	os.Exit(run(os.Args[1:], os.Stdin, os.Stdout, os.Stderr))
}

// Exit codes.
const (
	exitOK     = 0
	exitFailed = 1 // a promise was broken, or the run could not be finished
	exitUsage  = 2
)

// run is the program. It is called again, in processes of their own, with a
// role as the first argument.
func run(args []string, stdin io.Reader, stdout, stderr io.Writer) int {
	if len(args) > 0 && (args[0] == roleDispatcher || args[0] == roleConsumer) {
		return work(args[0], stdin, stdout, stderr)
	}
	o, err := parseOptions(args, stderr)
	if errors.Is(err, flag.ErrHelp) {
		return exitOK
	}
	if err != nil {
		return exitUsage
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM, syscall.SIGHUP)
	defer stop()
	context.AfterFunc(ctx, stop) // a second Ctrl-C ends the program at once

	report, err := play(ctx, o, newScreen(stdout))
	switch {
	case ctx.Err() != nil:
		fmt.Fprintln(stderr, "interrupted: everything that was started has been ended")
		return exitFailed
	case err != nil:
		fmt.Fprintln(stderr, "quickstart:", err)
		return exitFailed
	case len(report.problems()) > 0:
		return exitFailed
	}
	return exitOK
}

type options struct {
	databaseURL  string
	broker       string
	natsURL      string
	kafkaBrokers string
	messages     int
	kills        int
	seed         uint64
	timeout      time.Duration
	breaks       string
}

func parseOptions(args []string, stderr io.Writer) (options, error) {
	var o options
	f := flag.NewFlagSet("quickstart", flag.ContinueOnError)
	f.SetOutput(stderr)
	f.StringVar(&o.databaseURL, "database-url", "", "an empty PostgreSQL database to use (default: a throw-away server)")
	f.StringVar(&o.broker, "broker", "nats", "the broker: nats or kafka")
	f.StringVar(&o.natsURL, "nats-url", "", "a NATS server with JetStream to use (default: a throw-away server)")
	f.StringVar(&o.kafkaBrokers, "kafka-brokers", "",
		"addresses of a Kafka to use, with commas between them (default: a throw-away Apache Kafka, or a stand-in where Java or Maven is missing)")
	f.IntVar(&o.messages, "messages", 6000, "messages to commit")
	f.IntVar(&o.kills, "kills", 8, "processes to kill on the way")
	f.Uint64Var(&o.seed, "seed", 0, "seed of everything random; what runs at the same time still differs (default: a new one)")
	f.DurationVar(&o.timeout, "timeout", 30*time.Second, "give up and count when nothing has moved for so long")
	f.StringVar(&o.breaks, "break", "", "break a promise, to see that it is noticed: dedupe, outbox, order, publish, or delivery (Kafka only)")
	if err := f.Parse(args); err != nil {
		return o, err
	}
	var errs []error
	if f.NArg() > 0 {
		errs = append(errs, fmt.Errorf("unexpected argument %q", f.Arg(0)))
	}
	errs = append(errs, o.checkBroker())
	if o.messages < 1 || o.messages > 10_000_000 {
		errs = append(errs, fmt.Errorf("-messages is %d, want 1 to 10000000", o.messages))
	}
	if o.kills < 0 || o.kills > 1000 {
		errs = append(errs, fmt.Errorf("-kills is %d, want 0 to 1000", o.kills))
	}
	if o.timeout <= 0 {
		errs = append(errs, fmt.Errorf("-timeout is %v, want more than 0", o.timeout))
	}
	breaks := []string{breakDedupe, breakOutbox, breakOrder, breakPublish, breakDelivery}
	if o.breaks != "" && !slices.Contains(breaks, o.breaks) {
		errs = append(errs, fmt.Errorf("-break is %q, want one of %s", o.breaks, strings.Join(breaks, ", ")))
	}
	if err := errors.Join(errs...); err != nil {
		fmt.Fprintln(stderr, err)
		return o, err
	}
	if o.seed == 0 {
		o.seed = 1 + rand.Uint64N(999_999)
	}
	return o, nil
}

// checkBroker reports what does not go together with -broker.
func (o options) checkBroker() error {
	switch {
	case o.broker != brokerNATS && o.broker != brokerKafka:
		return fmt.Errorf("-broker is %q, want %s or %s", o.broker, brokerNATS, brokerKafka)
	case o.broker == brokerKafka && o.natsURL != "":
		return errors.New("-nats-url is given, but -broker is not nats")
	case o.broker == brokerNATS && o.kafkaBrokers != "":
		return errors.New("-kafka-brokers is given, but -broker is not kafka")
	case o.broker == brokerNATS && o.breaks == breakDelivery:
		return errors.New("-break delivery needs -broker kafka: order in effect is not promised on JetStream")
	}
	return nil
}
