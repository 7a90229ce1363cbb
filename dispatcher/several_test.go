package dispatcher_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/postroom/postroom"
	"github.com/postroom/postroom/dispatcher"
	"github.com/postroom/postroom/internal/pgtest"
	"github.com/postroom/postroom/migrations"
)

// One process serves three databases: while one of them is away and another one is not
// set up, the third flows, and each says what is wrong with it; then all flow.
func TestSeveralDatabases(t *testing.T) {
	t.Parallel()
	db := pgtest.First(t)
	var away atomic.Bool
	cfg := db.New(t).Config()
	cfg.ConnConfig.DialFunc = func(ctx context.Context, network, addr string) (net.Conn, error) {
		if away.Load() {
			return nil, errors.New("away")
		}
		return new(net.Dialer).DialContext(ctx, network, addr)
	}
	gone, err := pgxpool.NewWithConfig(t.Context(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	defer gone.Close()
	pools := map[string]*pgxpool.Pool{"well": db.New(t), "away": gone, "bare": db.Empty(t)}
	write(t, gone, postroom.Message{ID: "away", Topic: "orders"})
	write(t, pools["well"], postroom.Message{ID: "well", Topic: "orders"})
	away.Store(true)
	gone.Reset()

	r := &recorder{}
	var log lockedBuffer
	ds := make(map[string]*dispatcher.Dispatcher)
	var all []*dispatcher.Dispatcher
	for name, pool := range pools {
		d, err := dispatcher.New(pool, r, dispatcher.Config{Name: name, Logger: slog.New(slog.NewTextHandler(&log, nil))})
		if err != nil {
			t.Fatal(err)
		}
		ds[name] = d
		all = append(all, d)
	}
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	done := make(chan error, 1)
	go func() { done <- dispatcher.RunAll(ctx, all...) }()

	waitStored(t, r, 1)
	for name, want := range map[string]string{"away": "away", "bare": "setup"} {
		eventually(t, time.Minute, func() string {
			if err := ds[name].Health(); err == nil || !strings.Contains(err.Error(), fmt.Sprintf("dispatcher of %q", name)) ||
				!strings.Contains(err.Error(), want) {
				return fmt.Sprintf("the health of %s is %v", name, err)
			}
			return ""
		})
	}
	if err := ds["well"].Health(); err != nil {
		t.Errorf("the health of a database with which nothing is wrong: %v", err)
	}
	write(t, pools["well"], postroom.Message{ID: "well too", Topic: "orders"})
	waitStored(t, r, 2)

	away.Store(false)
	if _, err := migrations.Up(t.Context(), pools["bare"], migrations.Config{}); err != nil {
		t.Fatal(err)
	}
	write(t, pools["bare"], postroom.Message{ID: "bare", Topic: "orders"})
	waitStored(t, r, 4)
	var ids []string
	for _, m := range r.messages() {
		ids = append(ids, m.ID)
	}
	slices.Sort(ids)
	if !slices.Equal(ids, []string{"away", "bare", "well", "well too"}) {
		t.Errorf("messages %q", ids)
	}
	eventually(t, time.Minute, func() string {
		for name, d := range ds {
			if err := d.Health(); err != nil {
				return fmt.Sprintf("the health of %s is %v", name, err)
			}
		}
		return ""
	})
	cancel()
	if err := <-done; err != nil {
		t.Errorf("RunAll = %v", err)
	}
	for _, name := range []string{"away", "bare"} {
		if !strings.Contains(log.String(), "outbox="+name) {
			t.Errorf("the log does not name %s:\n%s", name, log.String())
		}
	}
}

type lockedBuffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (b *lockedBuffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.b.Write(p)
}

func (b *lockedBuffer) String() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.b.String()
}
