package main

import (
	"bytes"
	"slices"
	"strings"
	"testing"
	"time"
)

// goodReport is one of a run without any trouble: one message, two subscribers.
func goodReport() *report {
	l := newLedger()
	l.add("1", entry{key: "a", n: 1})
	r := &report{messages: 1, committed: 1, events: 1, took: time.Second, broker: newAudit(l), effects: []*audit{newAudit(l), newAudit(l)}}
	for _, a := range []*audit{r.broker, r.effects[0], r.effects[1]} {
		a.add("1", entry{key: "a", n: 1})
	}
	return r
}

func TestReportProblems(t *testing.T) {
	tests := []struct {
		name   string
		damage func(*report)
		want   string
	}{
		{"none", func(*report) {}, ""},
		{"repeats at the broker are none", func(r *report) { r.broker.Repeats = 9 }, ""},
		{"nor is the order in effect, where it is not promised", func(r *report) { r.effects[0].Disordered = 9 }, ""},
		{"out of order in effect", func(r *report) { r.effects[0].Disordered = 9; r.ordered = true }, "9 out of order in effect"},
		{"lost", func(r *report) { r.effects[1].Distinct = 0 }, "1 lost"},
		{"doubled", func(r *report) { r.effects[1].Repeats = 2 }, "2 doubled"},
		{"published although rolled back", func(r *report) { r.broker.Unknown = 1 }, "1 although rolled back"},
		{"handled although rolled back", func(r *report) { r.effects[0].Unknown = 1 }, "1 although rolled back"},
		{"altered", func(r *report) { r.effects[0].Altered = 1; r.broker.Altered = 1 }, "2 altered"},
		{"out of order", func(r *report) { r.broker.Disordered = 1000 }, "1,000 out of order at the broker"},
		{"stalled", func(r *report) { r.stalled = true }, "nothing has moved for the time that -timeout gives"},
		{"business row missing", func(r *report) { r.events = 0 }, "0 business rows and 1 committed transactions, want 1"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			r := goodReport()
			tt.damage(r)
			var want []string
			if tt.want != "" {
				want = []string{tt.want}
			}
			if got := r.problems(); !slices.Equal(got, want) {
				t.Errorf("problems %q, want %q", got, want)
			}
			if failed := strings.Contains(r.String(), "FAILED: "+tt.want); failed != (tt.want != "") {
				t.Errorf("the verdict reads:\n%s", r)
			}
		})
	}
}

func TestPlanKills(t *testing.T) {
	plan := planKills(8, 7)
	if !slices.Equal(plan, planKills(8, 7)) {
		t.Error("one seed gives two plans")
	}
	if slices.Equal(plan, planKills(8, 8)) {
		t.Error("two seeds give one plan")
	}
	if !slices.IsSortedFunc(plan, func(a, b kill) int { return int(1e6 * (a.at - b.at)) }) {
		t.Error("the plan is not in order")
	}
	counts := map[kill]int{}
	for _, k := range plan {
		if k.at < 0 || k.at > 0.9 {
			t.Errorf("a kill at %v of the work, want one while there is work left", k.at)
		}
		k.at = 0
		counts[k]++
	}
	for _, role := range []string{roleDispatcher, roleConsumer} {
		for _, moment := range []bool{true, false} {
			if n := counts[kill{role: role, moment: moment}]; n != 2 {
				t.Errorf("%d kills of a %s with moment %v, want 2 of 8", n, role, moment)
			}
		}
	}
}

func TestScreen(t *testing.T) {
	var out bytes.Buffer
	s := &screen{out: &out, begun: time.Now()}
	s.line("a line")
	s.update("written %d", 1)
	s.event("killed")
	s.end()
	if want := "a line\n  0.0s  written 1\n  0.0s  killed\n"; out.String() != want {
		t.Errorf("elsewhere: %q, want %q", &out, want)
	}
	out.Reset()
	s.live = true
	s.update("written %d", 1)
	s.event("killed")
	s.update("written %d", 2)
	s.end()
	s.line("done")
	want := "  0.0s  written 1" + "\r\x1b[K  0.0s  killed\n" + "  0.0s  written 1" + "\r\x1b[K  0.0s  written 2\ndone\n"
	if out.String() != want {
		t.Errorf("on a terminal: %q, want %q", &out, want)
	}
}

func TestGrouped(t *testing.T) {
	for n, want := range map[int]string{0: "0", 999: "999", 1000: "1,000", -52: "-52", -152: "-152", -1520: "-1,520", 1234567: "1,234,567"} {
		if got := grouped(n); got != want {
			t.Errorf("grouped(%d) = %q, want %q", n, got, want)
		}
	}
}
