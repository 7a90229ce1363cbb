// Package examples holds programs that a reader can run.
//
//	go run ./examples/quickstart   the whole path on real servers, with kills, and a count at the end; also with -broker kafka
//	go run ./examples/orders       the least code that a service writes
package examples
