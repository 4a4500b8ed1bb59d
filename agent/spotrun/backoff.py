"""Growing pauses between tries."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Backoff:
    """Pauses that double from `first` seconds until they reach `longest` seconds."""

    first: float
    longest: float
    tries: int = 0  # pauses taken since the last reset

    def next(self) -> float:
        """Seconds to pause after another failed try."""
        self.tries += 1
        return self.after(self.tries)

    def after(self, tries: int) -> float:
        """Seconds to pause after this many failed tries, from 1 on."""
        return min(self.longest, self.first * 2.0 ** min(tries - 1, 60))

    def reset(self) -> None:
        """Begin with the first pause again."""
        self.tries = 0
