package main

import "testing"

func TestAudit(t *testing.T) {
	l := newLedger()
	a1, a2, a3, b1 := entry{"a", 1, [32]byte{1}}, entry{"a", 2, [32]byte{2}}, entry{"a", 3, [32]byte{3}}, entry{"b", 1, [32]byte{4}}
	l.add("a1", a1)
	l.add("a2", a2)
	l.add("a3", a3)
	l.add("b1", b1)
	type arrival struct {
		id string
		entry
	}
	type counts struct{ total, distinct, repeats, unknown, altered, disordered, missing int }
	tests := []struct {
		name     string
		arrivals []arrival
		want     counts
	}{
		{"nothing", nil, counts{missing: 4}},
		{"all", []arrival{{"a1", a1}, {"a2", a2}, {"b1", b1}, {"a3", a3}}, counts{total: 4, distinct: 4}},
		{"lost", []arrival{{"a1", a1}, {"a3", a3}, {"b1", b1}}, counts{total: 3, distinct: 3, missing: 1}},
		{
			"repeats do not disturb the order",
			[]arrival{{"a1", a1}, {"a2", a2}, {"a1", a1}, {"a3", a3}, {"a2", a2}, {"b1", b1}},
			counts{total: 6, distinct: 4, repeats: 2},
		},
		{"two overtaken", []arrival{{"a3", a3}, {"a1", a1}, {"b1", b1}, {"a2", a2}}, counts{total: 4, distinct: 4, disordered: 2}},
		{"never committed", []arrival{{"a1", a1}, {"x", b1}, {"x", b1}}, counts{total: 3, distinct: 1, repeats: 1, unknown: 1, missing: 3}},
		{
			"altered",
			[]arrival{{"a1", entry{"b", 1, a1.sum}}, {"a2", entry{"a", 9, a2.sum}}, {"a3", entry{"a", 3, b1.sum}}, {"b1", b1}, {"b1", entry{}}},
			counts{total: 5, distinct: 4, repeats: 1, altered: 4},
		},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			a := newAudit(l)
			for _, x := range tt.arrivals {
				a.add(x.id, x.entry)
			}
			got := counts{a.Total, a.Distinct, a.Repeats, a.Unknown, a.Altered, a.Disordered, a.missing()}
			if got != tt.want {
				t.Errorf("got %+v, want %+v", got, tt.want)
			}
		})
	}
}
