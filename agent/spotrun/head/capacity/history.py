"""What the head learns about each pool: `learn` counts what happens, and old counts fade. Pure.

clusters/<name>/history.json has the counts, so that a new head continues them. It has the last machines too, so a new
head also counts what happened while there was no head.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set

from pydantic import Field

from spotrun.head.capacity.situation import History
from spotrun.head.capacity.sizes import Pool
from spotrun.wire import Document, Kept

HALF_LIFE = 3 * 86400.0
"""Seconds. Spot markets change with the hour of the day and the day of the week. So the last days count, and last week
hardly counts."""
LONGEST = 600.0  # the most seconds between two looks that count: what happened in the rest of the time is not known


class PoolRecord(Document):
    """The counts of one pool, as in `History`, and what was seen last."""

    hours: float = 0.0
    interruptions: float = 0.0
    up: float = 0.0
    down: float = 0.0
    lost: float = 0.0
    found: float = 0.0
    short_at: float = 0.0
    short_with: int = 0
    refusals: int = 0
    size: int = 0  # what the pool was asked for
    machines: dict[str, float] = Field(default={})  # the machines that ran, and when each was made
    state: str = ""  # up: it had what it was asked for; down: it had fewer; "": it was asked for none


class Histories(Kept):
    """clusters/<name>/history.json."""

    at: float = 0.0  # when the head looked last
    pools: dict[str, PoolRecord] = Field(default={})

    def of(self) -> Mapping[str, History]:
        """What the policies see."""
        return {
            name: History(**record.model_dump(include=set(History.__dataclass_fields__)))
            for name, record in self.pools.items()
        }


def learn(
    before: Histories,
    now: float,
    pools: Iterable[Pool],
    running: Mapping[str, Mapping[str, float]],
    replaced: Set[str] = frozenset(),
) -> Histories:
    """The counts after one more look at the cloud.

    pools: as the cloud knows them. running: by pool, the machines that run and are not under notice, and when each was
    made. replaced: machines that the head itself asked the cloud to replace.
    """
    span = max(0.0, now - before.at) if before.at else 0.0
    fade, hours = 0.5 ** (span / HALF_LIFE), min(span, LONGEST) / 3600
    found = {}
    for pool in pools:
        last = before.pools.get(pool.name, PoolRecord())
        if pool.supply == "away":
            found[pool.name] = last  # nobody knows
            continue
        found[pool.name] = _learned(last, pool, running.get(pool.name, {}), replaced, now, fade, hours)
    return before.replace(at=now, pools=found)


def _learned(
    last: PoolRecord,
    pool: Pool,
    machines: Mapping[str, float],
    replaced: Set[str],
    now: float,
    fade: float,
    hours: float,
) -> PoolRecord:
    gone = [name for name, made in last.machines.items() if machines.get(name) != made and name not in replaced]
    # If the size is lower now, the head itself has ended that many machines.
    taken = max(0, len(gone) - max(0, last.size - pool.size))
    state = _state(pool, len(machines), last)
    short = state == "down"
    return PoolRecord(
        hours=last.hours * fade + hours * len(last.machines),
        interruptions=last.interruptions * fade + taken,
        up=last.up * fade + (hours if last.state == "up" else 0.0),
        down=last.down * fade + (hours if last.state == "down" else 0.0),
        lost=last.lost * fade + (last.state == "up" and short),
        found=last.found * fade + (last.state == "down" and state == "up"),
        short_at=now if short else min(last.short_at, now),  # the clock of the last head may have been ahead
        short_with=len(machines) if short else last.short_with,
        refusals=0 if state == "up" else last.refusals + (short and last.state != "down"),
        size=pool.size,
        machines=dict(machines),
        state=state,
    )


def _state(pool: Pool, running: int, last: PoolRecord) -> str:
    if pool.size == 0:
        return ""
    if running >= pool.size:
        return "up"
    # While machines boot, nobody knows whether they come.
    return "down" if pool.supply != "open" else last.state
