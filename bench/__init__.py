"""Measured comparisons of spotrun with what a user would pick instead. `bench.recovery` is the one to run."""
