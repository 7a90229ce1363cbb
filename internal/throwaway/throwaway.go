// Package throwaway starts servers for examples, tests and benchmarks, and ends
// them with the program that asked for them: PostgreSQL with standbys, NATS with
// JetStream, Kafka, and PgBouncer.
//
// Every server listens on a free port of 127.0.0.1 only and keeps its files in a
// directory of its own. It ends, and the directory goes, at Close or when the
// program ends, be it by a return, a panic, Ctrl-C or SIGKILL. A program that
// runs as root gets servers that run as an unprivileged user.
//
// The package runs on Linux and macOS. Its functions take a context that bounds
// the call, not the server.
package throwaway

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"strconv"
	"time"
)

// pollInterval is the pause between two looks at a condition of a server.
const pollInterval = 10 * time.Millisecond

// closeTime bounds what Close asks of other servers.
const closeTime = 10 * time.Second

// poll calls done until it is true or fails. When ctx ends first, it returns
// the cause with what was being waited for.
func poll(ctx context.Context, what string, done func() (bool, error)) error {
	tick := time.NewTicker(pollInterval)
	defer tick.Stop()
	for {
		ok, err := done()
		if ok || err != nil {
			return err
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return fmt.Errorf("wait for %s: %w", what, context.Cause(ctx))
		}
	}
}

// freePort returns a port of 127.0.0.1 on which nobody listens. It lies below
// the range from which systems take the ports of outgoing connections: there a
// client that dials a stopped server again and again may be given the server's
// own port, connect to itself, and keep the server from coming back.
func freePort() (int, error) {
	for range 100 {
		port := 15_000 + rand.IntN(17_000)
		l, err := net.Listen("tcp", address(port))
		if err == nil {
			return port, l.Close()
		}
	}
	return 0, errors.New("100 random ports of 127.0.0.1 from 15000 to 31999 are all taken")
}

func address(port int) string {
	return net.JoinHostPort("127.0.0.1", strconv.Itoa(port))
}
