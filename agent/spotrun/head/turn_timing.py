"""How often the head takes a turn and sends its status. Mere progress takes a limited part of a core. Pure."""

from __future__ import annotations

TICK = 0.25  # seconds between turns while a job is active; a report of more than progress wakes the loop at once
TICK_SHARE = 0.2  # of a core, at most, for turns that bring only progress: with many agents, there are fewer turns
IDLE_TICK = 2.0  # seconds between turns without a job

GAP_MOST = 1.0  # seconds; the longest time for which a turn that is due has to wait after the last one

FOLLOW_EVERY = 0.2  # seconds; `ctl follow` gets at most one status document in this time: a person reads no faster
FOLLOW_SHARE = 0.1  # of a core, at most, for one `ctl follow`: with many nodes, there are fewer documents


def tick(active: bool, took: float) -> float:
    """Seconds until the next turn, if nothing but progress happens.

    active: whether there is a job. took: seconds of processor time that the last turn took.
    """
    return max(TICK, took / TICK_SHARE) if active else IDLE_TICK


def gap(took: float) -> float:
    """Seconds until the next turn may begin, whatever has changed.

    Turns take at most half of a core, so that connections are served between them. Without a pause, one turn would
    follow another while 1,000 agents connect, and most of their TLS handshakes would run out of time.
    took: seconds of processor time that the last turn took.
    """
    return min(took, GAP_MOST)


def follow(took: float) -> float:
    """Seconds until the next status document. took: seconds of processor time that the last one took."""
    return max(FOLLOW_EVERY, took / FOLLOW_SHARE)
