// Package examples holds programs that a reader can run.
package examples
