"""Since when this head has been able to act: it runs without a pause, and the bucket takes what it writes. Pure."""

from __future__ import annotations

GAP = 2.0  # seconds: after such a pause, the head no longer trusts what it knows about silent nodes
PATIENCE = 10.0  # seconds: if the bucket refuses for longer, operators are told, and their requests are answered
OUTAGE = 60.0  # seconds: after such a time in which the head could not act, jobs get time again for their last state


class Presence:
    """Times are by the head's clock, epoch seconds."""

    def __init__(self, now: float = 0.0) -> None:
        """now: when the head starts."""
        self.began = self.awake_since = self.able_since = self._ticked_at = now
        self._refused_since: float | None = None  # when the bucket first refused; None: it took the last turn's writes

    def tick(self, now: float) -> None:
        """The head runs. A tick that comes late shows that it was suspended."""
        pause, self._ticked_at = now - self._ticked_at, now
        if pause > GAP:
            self.awake_since = now
        if pause > OUTAGE:
            self.able_since = now

    def refused(self, now: float) -> bool:
        """The bucket has not taken a turn's writes. Returns whether this has gone on for longer than PATIENCE."""
        if self._refused_since is None:
            self._refused_since = now
        return now - self._refused_since > PATIENCE

    def wrote(self, now: float) -> None:
        """The bucket has taken a turn's writes."""
        if self._refused_since is not None and now - self._refused_since > OUTAGE:
            self.able_since = now
        self._refused_since = None
