"""Machines that run although no pool's size counts them: they cost money, and the head neither uses nor ends them.

A person may have taken such a machine out of its group, to look at it. So the head tells of it, and leaves it alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from spotrun.cloud.base import Instance
from spotrun.text import count

LINGER = 600.0  # seconds for which a machine may be too many: after a size is lowered, clouds take minutes to end it


class Surplus:
    """Pools in which more machines run than their sizes say, and since when."""

    def __init__(self) -> None:
        self.messages: dict[str, str] = {}
        """By pool: one line for the operator, once machines have been too many for `LINGER`."""
        self._since: dict[str, float] = {}

    def look(self, instances: Iterable[Instance], sizes: Mapping[str, int], now: float) -> list[str]:
        """Take in the cloud's answer. Returns the pools that have a message now, and had none at the last look.

        now: seconds by the head's clock. A pool without a size is left out.
        """
        running: dict[str, list[str]] = {}
        for each in instances:
            if each.state == "running" and each.pool in sizes:
                running.setdefault(each.pool, []).append(each.name)
        many = {pool: names for pool, names in running.items() if len(names) > sizes[pool]}
        self._since = {pool: self._since.get(pool, now) for pool in many}
        before = self.messages
        self.messages = {
            pool: _message(sorted(names), sizes[pool])
            for pool, names in many.items()
            if now - self._since[pool] >= LINGER
        }
        return [pool for pool in self.messages if pool not in before]


def _message(names: list[str], size: int) -> str:
    what = "has run" if len(names) - size == 1 else "have run"
    those = f"these run: {', '.join(names)}" if size else ", ".join(names)
    return (
        f"{count(len(names) - size, 'machine')} more than the pool's size {what} for over {LINGER / 60:.0f} min:"
        f" {those}; a group may have lost a machine that still costs money: put it back into its group, or end it"
    )
