"""Benchmarks of spotrun, some of them against what a user would pick instead. `make` lists them as `bench-…`."""
