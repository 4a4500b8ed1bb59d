"""`make acceptance`: everything that only real machines can show, tried in the order of what it costs."""
