"""What jobs have logged: `reader` reads it from the bucket, `curves` says which points count. Without torch."""
