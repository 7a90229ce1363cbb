package throwaway_test

import (
	"testing"

	"github.com/postroom/postroom/internal/throwaway"
)

// The default version is installed and may have pg_basebackup; those that are
// fetched have not, and are copied by hand.
func TestStandbyThatLaggedIsPromoted(t *testing.T) {
	for _, version := range []string{"", "14", "18"} {
		t.Run("version "+version, func(t *testing.T) {
			t.Parallel()
			p := startPostgres(t, throwaway.PostgresConfig{Version: version})
			execSQL(t, p.URL, `CREATE TABLE t (n int)`)
			execSQL(t, p.URL, `INSERT INTO t VALUES (1)`)
			s, err := p.Standby(t.Context())
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() {
				if err := s.Close(); err != nil {
					t.Error(err)
				}
			})
			if !query[bool](t, s.URL, `SELECT pg_is_in_recovery()`) {
				t.Error("the standby is not in recovery")
			}
			check := func(when string, want int) {
				t.Helper()
				if n := query[int](t, s.URL, `SELECT count(*) FROM t`); n != want {
					t.Errorf("%s the standby has %d rows, want %d", when, n, want)
				}
			}
			check("when made", 1)

			execSQL(t, p.URL, `INSERT INTO t VALUES (2)`)
			must(t, s.CatchUp(t.Context()))
			check("after CatchUp", 2)

			must(t, s.PauseReplay(t.Context()))
			eventually(t, "the primary has nobody to send to", func() bool {
				return query[int](t, p.URL, `SELECT count(*) FROM pg_stat_replication`) == 0
			})
			execSQL(t, p.URL, `INSERT INTO t VALUES (3)`)
			check("while it lags", 2)
			must(t, s.ResumeReplay(t.Context()))
			must(t, s.CatchUp(t.Context()))
			check("after ResumeReplay", 3)

			must(t, s.PauseReplay(t.Context()))
			execSQL(t, p.URL, `INSERT INTO t VALUES (4)`)
			if behind := query[bool](t, s.URL, `SELECT pg_last_wal_replay_lsn() < $1::pg_lsn`,
				query[string](t, p.URL, `SELECT pg_current_wal_flush_lsn()::text`)); !behind {
				t.Error("the standby has what was committed after PauseReplay")
			}
			must(t, s.Promote(t.Context()))
			check("promoted", 3)
			execSQL(t, s.URL, `INSERT INTO t VALUES (5)`)
			if a, b := systemID(t, p), systemID(t, s.Postgres); a != b {
				t.Errorf("system identifier %d of the primary, %d of the standby", a, b)
			}
			must(t, s.Crash(t.Context()))
			must(t, s.Start(t.Context()))
			check("crashed and started", 4)
			if n := query[int](t, p.URL, `SELECT count(*) FROM t`); n != 4 {
				t.Errorf("the primary has %d rows, want 4", n)
			}
			must(t, s.Close())
			if n := query[int](t, p.URL, `SELECT count(*) FROM pg_replication_slots`); n != 0 {
				t.Errorf("a closed standby left %d slots", n)
			}
		})
	}
}

func systemID(t *testing.T, p *throwaway.Postgres) int64 {
	t.Helper()
	return query[int64](t, p.URL, `SELECT system_identifier FROM pg_control_system()`)
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}
