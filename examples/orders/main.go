package main

import (
	"context"
	"fmt"
	"io"
	"log"
	"os"
	"os/signal"
	"syscall"
	"time"

	"github.com/jackc/pgx/v5"
	natsgo "github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
	"golang.org/x/sync/errgroup"

	"github.com/postroom/postroom/internal/throwaway"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if err := run(ctx, os.Stdout); err != nil {
		log.Fatal(err)
	}
}

// run serves on servers of its own until the order is billed.
func run(ctx context.Context, out io.Writer) error {
	postgres, err := throwaway.StartPostgres(ctx, throwaway.PostgresConfig{})
	if err != nil {
		return err
	}
	defer postgres.Close()
	server, err := throwaway.StartNATS(ctx, throwaway.NATSConfig{})
	if err != nil {
		return err
	}
	defer server.Close()
	if err := makeStream(ctx, server.URL); err != nil {
		return err
	}
	db, err := pgx.Connect(ctx, postgres.URL)
	if err != nil {
		return err
	}
	defer db.Close(context.WithoutCancel(ctx))
	if _, err := db.Exec(ctx, `CREATE TABLE orders (id text); CREATE TABLE invoices (order_id text)`); err != nil {
		return err
	}

	g, ctx := errgroup.WithContext(ctx)
	ctx, stop := context.WithCancel(ctx)
	g.Go(func() error { return serve(ctx, postgres.URL, server.URL) })
	g.Go(func() error {
		defer stop()
		return waitForInvoice(ctx, db, out)
	})
	return g.Wait()
}

// makeStream makes what Postroom expects to find: a stream for the topic.
func makeStream(ctx context.Context, url string) error {
	conn, err := natsgo.Connect(url)
	if err != nil {
		return err
	}
	defer conn.Close()
	js, err := jetstream.New(conn)
	if err != nil {
		return err
	}
	_, err = js.CreateStream(ctx, jetstream.StreamConfig{
		Name:       "ORDERS",
		Subjects:   []string{"orders"},
		Discard:    jetstream.DiscardNew,
		Duplicates: 2 * time.Minute,
	})
	return err
}

// waitForInvoice looks into the tables until the order has its invoice.
func waitForInvoice(ctx context.Context, db *pgx.Conn, out io.Writer) error {
	tick := time.NewTicker(10 * time.Millisecond)
	defer tick.Stop()
	for {
		var orders, invoices int
		err := db.QueryRow(ctx, `SELECT (SELECT count(*) FROM orders), (SELECT count(*) FROM invoices)`).Scan(&orders, &invoices)
		if err != nil {
			return err
		}
		if invoices > 0 {
			fmt.Fprintf(out, "%d order placed, %d invoice written\n", orders, invoices)
			return nil
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
}
