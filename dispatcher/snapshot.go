package dispatcher

import (
	"fmt"
	"strconv"
	"strings"
)

const (
	// emptySnapshot has seen nothing.
	emptySnapshot = "1:1:"

	// closedSnapshot has seen everything: it ends what another database wrote.
	closedSnapshot = "9223372036854775807:9223372036854775807:"

	// settledID as the last id of a cursor says that its difference is settled.
	settledID = 1<<63 - 1
)

// snapshot is a parsed pg_snapshot: what has an id of xmax or above, or one of
// xip, was not yet visible.
type snapshot struct {
	xmax uint64
	xip  []uint64 // ascending
}

// parseSnapshot reads the text form "xmin:xmax:xip,xip,…".
func parseSnapshot(s string) (snapshot, error) {
	parts := strings.Split(s, ":")
	if len(parts) != 3 {
		return snapshot{}, fmt.Errorf("snapshot %q is not xmin:xmax:xip", s)
	}
	xmax, err := strconv.ParseUint(parts[1], 10, 64)
	if err != nil {
		return snapshot{}, fmt.Errorf("snapshot %q: %w", s, err)
	}
	snap := snapshot{xmax: xmax}
	if parts[2] == "" {
		return snap, nil
	}
	for x := range strings.SplitSeq(parts[2], ",") {
		id, err := strconv.ParseUint(x, 10, 64)
		if err != nil {
			return snapshot{}, fmt.Errorf("snapshot %q: %w", s, err)
		}
		snap.xip = append(snap.xip, id)
	}
	return snap, nil
}

// sees reports whether a transaction had ended for s.
func (s snapshot) sees(xid uint64) bool {
	if xid >= s.xmax {
		return false
	}
	for _, x := range s.xip {
		if x == xid {
			return false
		}
	}
	return true
}

// finished returns, as text, the transactions that were running for prev and
// had ended for s.
func (s snapshot) finished(prev snapshot) []string {
	fin := []string{}
	for _, x := range prev.xip {
		if s.sees(x) {
			fin = append(fin, strconv.FormatUint(x, 10))
		}
	}
	return fin
}
