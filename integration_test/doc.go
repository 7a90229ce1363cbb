// Package integration_test holds the tests of the whole system on real servers:
// faults, crashes, and what needs more than the library may import.
package integration_test
