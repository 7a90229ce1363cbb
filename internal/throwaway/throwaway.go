// Package throwaway starts servers for examples, tests and benchmarks, and ends
// them with the program that asked for them.
package throwaway
