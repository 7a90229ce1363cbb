package throwaway

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"github.com/jackc/pgx/v5"
)

// A Standby is a physical replica that follows its primary asynchronously and
// takes reading connections. Promoted, it is a server of its own.
type Standby struct {
	*Postgres

	primary  *Postgres
	slot     string
	conninfo string
}

// Standby makes a replica of p, with a port and a directory of its own, and
// returns when it has received and replayed what p holds now. It ends at Close
// or with the program.
func (p *Postgres) Standby(ctx context.Context) (*Standby, error) {
	s, err := p.standby(ctx)
	if err != nil {
		return nil, fmt.Errorf("throwaway: make a standby: %w", err)
	}
	return s, nil
}

func (p *Postgres) standby(ctx context.Context) (*Standby, error) {
	if p.guard == nil {
		return nil, errGiven
	}
	replica, err := newPostgres(binaries{dir: p.BinDir, version: p.Version, major: p.Major, source: p.Source}, p.owner, p.cfg)
	if err != nil {
		return nil, err
	}
	s := &Standby{
		Postgres: replica,
		primary:  p,
		slot:     strings.ReplaceAll(filepath.Base(replica.guard.dir), "-", "_"),
		conninfo: fmt.Sprintf("host=127.0.0.1 port=%d user=postgres sslmode=disable", p.Port),
	}
	// The slot keeps the WAL that the standby still needs.
	err = p.exec(ctx, `SELECT pg_create_physical_replication_slot($1, true)`, s.slot)
	if err == nil {
		err = s.copyData(ctx)
	}
	if err == nil {
		err = s.follow()
	}
	if err == nil {
		err = s.startOnFreePort(ctx)
	}
	if err == nil {
		err = s.CatchUp(ctx)
	}
	if err != nil {
		return nil, errors.Join(err, s.Close())
	}
	return s, nil
}

// copyData fills the standby's data directory: with pg_basebackup where the
// installation has it, else by hand.
func (s *Standby) copyData(ctx context.Context) error {
	program := filepath.Join(s.BinDir, "pg_basebackup")
	if _, err := os.Stat(program); err == nil {
		return s.guard.run(ctx, s.owner, s.cfg.Log, program, "--dbname", s.conninfo, "--pgdata", s.DataDir,
			"--wal-method", "none", "--checkpoint", "fast", "--no-sync")
	}
	// The backup lasts as long as the session.
	return s.primary.connected(ctx, func(conn *pgx.Conn) error {
		begin, end := `pg_backup_start('standby', true)`, `pg_backup_stop(false)`
		if s.Major < 15 {
			begin, end = `pg_start_backup('standby', true, false)`, `pg_stop_backup(false, false)`
		}
		if _, err := conn.Exec(ctx, `SELECT `+begin); err != nil {
			return fmt.Errorf("begin backup: %w", err)
		}
		if err := s.copyTree(s.primary.DataDir, s.DataDir); err != nil {
			return err
		}
		var label string
		if err := conn.QueryRow(ctx, `SELECT labelfile FROM `+end).Scan(&label); err != nil {
			return fmt.Errorf("end backup: %w", err)
		}
		return s.write("backup_label", label)
	})
}

// notCopied are files and contents of directories that belong to a running
// server; the standby fetches the WAL through its slot.
func notCopied(rel string) bool {
	switch filepath.Dir(rel) {
	case "pg_wal", "pg_replslot", "pg_stat_tmp", "pg_dynshmem", "pg_notify", "pg_serial", "pg_snapshots", "pg_subtrans":
		return true
	}
	switch filepath.Base(rel) {
	case "postmaster.pid", "postmaster.opts", "pg_internal.init":
		return true
	}
	return false
}

// copyTree copies a data directory while its server writes: what is torn, or
// vanishes, is repaired by replay.
func (s *Standby) copyTree(from, to string) error {
	return filepath.WalkDir(from, func(path string, d fs.DirEntry, err error) error {
		if errors.Is(err, fs.ErrNotExist) {
			return nil
		}
		if err != nil {
			return err
		}
		rel, err := filepath.Rel(from, path)
		if err != nil {
			return err
		}
		target := filepath.Join(to, rel)
		switch {
		case notCopied(rel) && d.IsDir():
			return fs.SkipDir
		case notCopied(rel):
			return nil
		case d.IsDir():
			err = os.Mkdir(target, 0o700)
		default:
			err = copyFile(path, target)
		}
		if errors.Is(err, fs.ErrNotExist) {
			return nil
		}
		return errors.Join(err, s.owner.own(target))
	})
}

func copyFile(from, to string) error {
	r, err := os.Open(from)
	if err != nil {
		return err
	}
	defer r.Close()
	w, err := os.OpenFile(to, os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	_, err = io.Copy(w, r)
	return errors.Join(err, w.Close())
}

// follow makes the copy a standby of its primary.
func (s *Standby) follow() error {
	auto := fmt.Sprintf("primary_conninfo = '%s'\nprimary_slot_name = '%s'\nhot_standby = on\n", s.conninfo, s.slot)
	return errors.Join(s.write("postgresql.auto.conf", auto), s.write("standby.signal", ""))
}

// write makes or replaces a file of the data directory.
func (s *Standby) write(name, text string) error {
	path := filepath.Join(s.DataDir, name)
	return errors.Join(os.WriteFile(path, []byte(text), 0o600), s.owner.own(path))
}

// CatchUp waits until the standby shows all that the primary has committed when
// it is called, asynchronous commits included.
func (s *Standby) CatchUp(ctx context.Context) error {
	var target string
	err := s.primary.connected(ctx, func(conn *pgx.Conn) error {
		// Its commit is synchronous, and so flushes what came before.
		return conn.QueryRow(ctx, `SELECT pg_logical_emit_message(true, 'throwaway', '')::text`).Scan(&target)
	})
	if err == nil {
		err = s.until(ctx, "the standby to catch up",
			`SELECT coalesce(pg_last_wal_replay_lsn() >= $1::pg_lsn, false)`, target)
	}
	if err != nil {
		return fmt.Errorf("throwaway: catch up: %w", err)
	}
	return nil
}

// PauseReplay makes the standby lag: what the primary commits from now on does
// not reach it. What it had received by then is replayed when PauseReplay
// returns. (pg_wal_replay_pause alone would not do: a promotion replays all that
// was received.)
func (s *Standby) PauseReplay(ctx context.Context) error {
	err := s.setPrimary(ctx, "")
	if err == nil {
		err = s.until(ctx, "the standby to disconnect", `SELECT count(*) = 0 FROM pg_stat_wal_receiver`)
	}
	if err == nil {
		err = s.until(ctx, "the standby to replay what it received",
			`SELECT pg_last_wal_receive_lsn() IS NULL OR pg_last_wal_replay_lsn() >= pg_last_wal_receive_lsn()`)
	}
	if err != nil {
		return fmt.Errorf("throwaway: pause replay: %w", err)
	}
	return nil
}

// ResumeReplay ends PauseReplay.
func (s *Standby) ResumeReplay(ctx context.Context) error {
	if err := s.setPrimary(ctx, s.conninfo); err != nil {
		return fmt.Errorf("throwaway: resume replay: %w", err)
	}
	return nil
}

// Promote makes the standby a server that takes writes, with what it has
// received so far. It does nothing to the primary.
func (s *Standby) Promote(ctx context.Context) error {
	err := s.connected(ctx, func(conn *pgx.Conn) error {
		_, err := conn.Exec(ctx, `SELECT pg_promote(false)`)
		return err
	})
	if err == nil {
		err = s.until(ctx, "the standby to be promoted", `SELECT NOT pg_is_in_recovery()`)
	}
	if err != nil {
		return fmt.Errorf("throwaway: promote: %w", err)
	}
	return nil
}

// Close ends the standby, removes its files, and lets a running primary drop
// the WAL that was kept for it.
func (s *Standby) Close() error {
	err := s.Postgres.Close()
	ctx, cancel := context.WithTimeout(context.Background(), closeTime)
	defer cancel()
	if s.primary.running() {
		err = errors.Join(err, s.primary.exec(ctx, `SELECT pg_drop_replication_slot(slot_name)
			FROM pg_replication_slots WHERE slot_name = $1 AND NOT active`, s.slot))
	}
	return err
}

func (s *Standby) setPrimary(ctx context.Context, conninfo string) error {
	return s.connected(ctx, func(conn *pgx.Conn) error {
		if _, err := conn.Exec(ctx, `ALTER SYSTEM SET primary_conninfo = '`+conninfo+`'`); err != nil {
			return err
		}
		_, err := conn.Exec(ctx, `SELECT pg_reload_conf()`)
		return err
	})
}

// until waits until a query of one boolean says true.
func (s *Standby) until(ctx context.Context, what, sql string, args ...any) error {
	return s.connected(ctx, func(conn *pgx.Conn) error {
		return poll(ctx, what, func() (ok bool, err error) {
			err = conn.QueryRow(ctx, sql, args...).Scan(&ok)
			return ok, err
		})
	})
}
