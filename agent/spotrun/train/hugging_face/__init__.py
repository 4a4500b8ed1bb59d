"""A Trainer of Hugging Face, for `run.train`."""
