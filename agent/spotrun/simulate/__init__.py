"""Replays traces of markets against the head's own decisions, in simulated time. No processes, no cloud, no bucket."""
