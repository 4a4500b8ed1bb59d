"""Random faults against small jobs on the local cloud: `make soak RUNS=10 SEED=1`. See `bench.soak.plan`."""
