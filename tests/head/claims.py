"""Claims and hosts for `allocate`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from spotrun.head.allocation.allocate import Allocation, Claim, Host

Holds = Mapping[str, tuple[int, ...]]


def claim(job: str, min: int = 1, max: int = 0, holds: str | Holds = "", pools: str = "", **more: Any) -> Claim:
    """A claim whose number is its place in the order of submission: a1 before b2. holds: hosts that it has alone."""
    held = dict.fromkeys(holds.split(), (0,)) if isinstance(holds, str) else holds
    order = (int("".join(c for c in job if c.isdigit())),)
    return Claim(job, order, min=min, max=max or min, holds=held, pools=frozenset(pools.split()), **more)


def machines(count: int, devices: int = 1, pool: str = "m") -> list[Host]:
    return [Host(f"{pool}{number}", pool, devices) for number in range(1, count + 1)]


def carried_out(claims: Iterable[Claim], found: Allocation) -> list[Claim]:
    """The claims when the jobs hold what they were given or may keep."""
    return [replace(c, holds=found.nodes.get(c.job) or found.kept.get(c.job) or {}) for c in claims]
