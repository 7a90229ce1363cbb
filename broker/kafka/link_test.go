package kafka

import (
	"context"
	"errors"
	"net"
	"testing"
	"time"

	"github.com/segmentio/kafka-go/protocol/produce"
)

// A request that goes out before the transport knows any broker fails with the
// reason for that, not with what the transport makes of it: "topic not found".
func TestSendSaysWhyNoBrokerIsKnown(t *testing.T) {
	locked := errors.New("not let in")
	cfg, err := Config{
		Dial: func(context.Context, string, string) (net.Conn, error) { return nil, locked },
	}.withDefaults([]string{"127.0.0.1:1"})
	if err != nil {
		t.Fatal(err)
	}
	l := newLink([]string{"127.0.0.1:1"}, cfg)
	defer l.close()
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	req := &produce.Request{Topics: []produce.RequestTopic{{Topic: "t", Partitions: []produce.RequestPartition{{}}}}}
	if _, err := l.send(ctx, req); !errors.Is(err, locked) {
		t.Errorf("send = %v, want %v", err, locked)
	}
}
