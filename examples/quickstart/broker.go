package main

import (
	"context"
	"log/slog"
	"strings"
	"time"

	"github.com/postroom/postroom/broker"
	"github.com/postroom/postroom/broker/kafka"
	"github.com/postroom/postroom/broker/nats"
)

// What -broker takes.
const (
	brokerNATS  = "nats"
	brokerKafka = "kafka"
)

// A sight is the quick start's own sight of the broker. It knows nothing of
// Postroom but the names of the headers, so it can tell what Postroom did.
type sight interface {
	// read calls f with every record from the first on, those of one key in
	// their order, and follows what is added until ctx ends or f returns false.
	read(ctx context.Context, f func(record) bool) error

	// length returns how many records the broker holds.
	length(ctx context.Context) (int, error)

	// settled reports whether all subscribers have settled every record.
	settled(ctx context.Context) (bool, error)
}

// A record is one message as it stands in the broker.
type record struct {
	id    string
	entry // as far as the broker's message tells

	// repeat stores a copy.
	repeat func(context.Context) error
}

// A bus is how Postroom reaches the broker.
type bus interface {
	broker.Publisher
	broker.Subscriber
}

// A route is all that Postroom's processes need to know of the broker.
type route struct {
	Broker         string // as -broker has it
	URL            string // of NATS; addresses of Kafka, with commas between them
	SessionTimeout time.Duration
}

func (r route) open(ctx context.Context, logger *slog.Logger) (bus, error) {
	if r.Broker == brokerKafka {
		return kafka.Open(ctx, strings.Split(r.URL, ","), kafka.Config{
			SessionTimeout: r.SessionTimeout,
			Logger:         logger,
		})
	}
	return nats.Open(ctx, r.URL, nats.Config{
		Topics:  []string{topic},
		AckWait: 2 * time.Second, // short, so that what a killed consumer held comes soon
		Logger:  logger,
	})
}

// setBroker starts or connects to the broker, makes what Postroom never makes
// by itself, and returns a line that says which broker it is.
func (st *stage) setBroker(ctx context.Context, o options) (is string, err error) {
	st.route.Broker = o.broker
	if o.broker == brokerKafka {
		return st.setKafka(ctx, o.kafkaBrokers)
	}
	return st.setNATS(ctx, o.natsURL)
}
