"""The machines: what the cloud says there is, and how many there should be."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TypeVar

from spotrun.cloud.base import Cloud, Instance, Problem
from spotrun.errors import PartialError, SpotrunError
from spotrun.head import capacity
from spotrun.spec import ClusterSpec

log = logging.getLogger(__name__)

T = TypeVar("T")


class Fleet:
    """The pools of one cluster. instances: None while the cloud does not answer. last_list: its last answer, even then.

    away: pools that it cannot be asked about, as their zone is out, and since when. Of those, `instances` and `sizes`
    are the last known ones, nothing is asked for, and others stand in for what is not heard there.
    """

    def __init__(self, cluster: ClusterSpec, cloud: Cloud) -> None:
        self.cluster = cluster
        self.instances: list[Instance] | None = None
        self.sizes: dict[str, int] = {}
        self.away: dict[str, Problem] = {}
        self.prices: dict[str, float] = {}
        self.last_list: list[Instance] | None = None  # None: the cloud has never answered
        self.looked = asyncio.Condition()  # notified each time the cloud was asked, with or without an answer
        self._cloud = cloud
        self._problems: list[Problem] = []  # as the cloud told them last
        self._unpriced = "the cloud has not been asked yet"  # why `prices` is not its word; "" if it is
        self._refused: set[str] = set()  # pools that did not take their last size

    async def look(self) -> list[Problem]:
        """Ask the cloud; problems that are new. Raises `CloudError` if machines are not known then.

        Of problems and prices, and of pools whose zone is out, what was known before stands.
        """
        before = {(problem.pool, problem.message) for problem in self.problems}
        try:
            await self._list()
        finally:
            async with self.looked:
                self.looked.notify_all()
        # Each for itself: problems that cannot be told must not keep a budget from being held.
        try:
            self.prices, self._unpriced = await self._cloud.prices(), ""
        except SpotrunError as error:
            self._unpriced = self._unpriced and str(error)
            log.warning("prices: %s", error)
        try:
            self._problems = await self._cloud.problems()
        except SpotrunError as error:
            log.warning("problems: %s", error)
        return [problem for problem in self.problems if (problem.pool, problem.message) not in before]

    @property
    def problems(self) -> list[Problem]:
        """What keeps pools from their sizes, as far as is known."""
        return [each for each in self._problems if each.pool not in self.away] + list(self.away.values())

    def pools(self) -> tuple[capacity.Pool, ...]:
        """Each pool as the cloud told it last, for `decide`."""
        short = {problem.pool for problem in self.problems} | self._refused
        return tuple(
            capacity.Pool(
                pool.name,
                pool.max,
                self.sizes.get(pool.name, 0),
                dict.fromkeys(sorted(self.names(pool.name)), "ready"),
                "away" if pool.name in self.away else "short" if pool.name in short else "open",
            )
            for pool in self.cluster.pools
        )

    async def scale(self, sizes: Mapping[str, int], remove: Sequence[str] = ()) -> None:
        """Give the pools these sizes, and delete machines.

        Raises the last pool's refusal, once all have been asked: the others stand in for a pool that refused.
        """
        refusal: SpotrunError | None = None
        for pool, size in sizes.items():
            try:
                await self._cloud.resize(pool, size)
                self.sizes[pool] = size
                self._refused.discard(pool)
            except SpotrunError as error:
                refusal = error
                self._refused.add(pool)
        if remove:
            await self._cloud.remove(list(remove))
        if refusal:
            raise refusal

    async def recreate(self, node: str) -> None:
        """Ask for another machine in a node's place. Raises `SpotrunError` if the cloud refuses."""
        await self._cloud.recreate([node])

    async def preempt(self, node: str, notice: float | None) -> None:
        """Have the cloud take a node, as a test; `notice` 0 without a word. Raises `SpotrunError` if unknown."""
        if node not in self.names():
            raise SpotrunError(f"there is no node {node!r}; nodes: {', '.join(sorted(self.names())) or 'none'}")
        await self._cloud.preempt(node, notice)

    def names(self, pool: str | None = None) -> set[str]:
        """The machines that the cloud lists; those of one pool."""
        return {each.name for each in self.instances or () if pool in (None, each.pool)}

    def listed(self) -> set[str] | None:
        """The machines that the cloud lists; None while it does not answer."""
        return self.names() if self.instances is not None else None

    def made(self, node: str) -> float:
        """When the machine of this name was made; 0 if that is not known."""
        return next((each.created for each in self.instances or () if each.name == node), 0.0)

    def unpriced(self) -> str:
        """Why a budget could not be held: what machines cost nobody knows, or not yet; "" if it can be."""
        missing = ", ".join(pool.name for pool in self.cluster.pools if pool.name not in self.prices)
        if self._unpriced:
            return f"what machines cost is not known yet: {self._unpriced}; try again, or leave budget out"
        if missing:
            return f"what machines of pool {missing} cost is not known; leave budget out, or the pool"
        return ""

    def state_of(self, node: str, reported_at: float, pool: str | None = None) -> str | None:
        """The state of the machine that ran the agent last heard at `heard`; None if the cloud cannot be asked.

        pool: as that agent said; None: not known, so that any which is away may have it.
        """
        if self.instances is None:
            return None
        instance = next((each for each in self.instances if each.name == node), None)
        pool = instance.pool if instance else pool
        if pool in self.away or (pool is None and self.away):
            return None
        # A machine made after this agent was last heard is its successor.
        return "gone" if instance is None or instance.created > reported_at else instance.state

    async def _list(self) -> None:
        try:
            # At the same time: with a zone that is out, each of these calls takes long.
            (sizes, unsized), (found, unlisted) = await asyncio.gather(
                _known(self._cloud.sizes), _known(self._cloud.nodes)
            )
        except SpotrunError:
            self.instances = None
            raise
        self._note_away(unsized | unlisted)
        self.sizes = {pool: size for pool, size in self.sizes.items() if pool in unsized} | sizes
        last = [instance for instance in self.last_list or () if instance.pool in unlisted]
        self.instances = self.last_list = [each for each in (*last, *found) if self.cluster.pool(each.pool)]

    def _note_away(self, missing: dict[str, str]) -> None:
        now, before = time.time(), self.away  # the first words stay: the next ones are news of nothing
        self.away = {
            pool.name: before.get(pool.name)
            or Problem(pool.name, "other", f"zone {pool.zone} does not answer: {missing[pool.name]}", now)
            for pool in self.cluster.pools
            if pool.name in missing
        }


async def _known(question: Callable[[], Awaitable[T]]) -> tuple[T, dict[str, str]]:
    """What the cloud knows, and the pools that it could not be asked about: why."""
    try:
        return await question(), {}
    except PartialError as error:
        return error.known, error.missing
