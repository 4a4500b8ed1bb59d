"""A Trainer of PyTorch Lightning, for `run.fit`."""
