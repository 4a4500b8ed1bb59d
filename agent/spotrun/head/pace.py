"""How often the head looks and speaks. Work that only shows progress takes a limited part of a core. Pure."""

from __future__ import annotations

TICK = 0.25  # seconds between looks while a job is active; a report of more than progress wakes the loop at once
TICK_SHARE = 0.2  # of a core, that looks for mere progress take at the most: with many agents they are rarer
IDLE_TICK = 2.0  # seconds between looks without a job

GAP_MOST = 1.0  # seconds in which no turn begins after another one, at the most

FOLLOW_EVERY = 0.2  # seconds; `ctl follow` gets at most one status document in this time: a person reads no faster
FOLLOW_SHARE = 0.1  # of a core, that one `ctl follow` takes at the most: with many nodes, documents are rarer


def tick(active: bool, took: float) -> float:
    """Seconds until the next look, if nothing but progress happens.

    active: whether there is a job. took: seconds of processor time that the last turn took.
    """
    return max(TICK, took / TICK_SHARE) if active else IDLE_TICK


def gap(took: float) -> float:
    """Seconds until the next turn may begin, whatever has changed.

    Turns take at most half of a core, so that connections are served between them. Without this, turn would follow
    turn while 1,000 agents connect, and most of their TLS handshakes would run out of time.
    took: seconds of processor time that the last turn took.
    """
    return min(took, GAP_MOST)


def follow(took: float) -> float:
    """Seconds until the next status document. took: seconds of processor time that the last one took."""
    return max(FOLLOW_EVERY, took / FOLLOW_SHARE)
