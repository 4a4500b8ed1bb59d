"""What each job's workers hold of this node: devices, and memory for snapshots.

A claim is made at the moment when workers start, and lasts as long as one of their processes lives. So no device ever
has workers of two jobs, even if the head orders it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from spotrun.errors import SpotrunError
from spotrun.node.memory import Need, free


@dataclass(frozen=True)
class _Claim:
    devices: tuple[int, ...]
    need: Need
    living: Callable[[], bool]  # whether a worker's process may still exist


class Claims:
    """The claims of all jobs of this node. tmpfs: the folder in memory that has all snapshots."""

    def __init__(self, tmpfs: Path) -> None:
        self._tmpfs = tmpfs
        self._claims: dict[str, _Claim] = {}

    def make(self, job: str, devices: tuple[int, ...], need: Need, living: Callable[[], bool]) -> None:
        """Claim these devices for a job, until `living` is false."""
        self._claims = {**dict(self._living()), job: _Claim(devices, need, living)}  # others may have ended long ago

    def devices(self, job: str) -> tuple[int, ...]:
        """The devices that the job's living workers use; (): no worker lives."""
        claim = self._claims.get(job)
        return claim.devices if claim is not None and claim.living() else ()

    def holder(self, devices: Iterable[int]) -> tuple[int, str] | None:
        """The first of these devices that living workers use, and their job; None: all are free."""
        held = {device: job for job, claim in self._living() for device in claim.devices}
        return next(((device, held[device]) for device in devices if device in held), None)

    def check(self, devices: tuple[int, ...], need: Need, count: int) -> None:
        """Raise `SpotrunError` if the node, which has `count` devices, lacks one of these, or lacks memory."""
        if len(set(devices)) < len(devices):
            raise SpotrunError(f"the order names a device twice: {', '.join(map(str, devices))}")
        if unknown := [str(each) for each in devices if not 0 <= each < count]:
            raise SpotrunError(f"the order names device {', '.join(unknown)}, and the node has {count}")
        if lack := self.lack(need):
            raise SpotrunError(
                f"{lack / 1e6:.0f} MB of memory are missing in {self._tmpfs}, which must hold two snapshots of "
                "each job. Use machines with more memory, or more devices of each machine for this job"
            )

    def lack(self, need: Need) -> int:
        """Bytes of memory that are missing for two snapshots of this job and of each job whose workers live."""
        own = need.missing
        if not own:
            return 0
        others = [claim.need for _, claim in self._living() if claim.need.folder != need.folder]
        return max(0, own + sum(each.missing for each in others) - free(self._tmpfs))

    def _living(self) -> list[tuple[str, _Claim]]:
        return [(job, claim) for job, claim in self._claims.items() if claim.living()]
