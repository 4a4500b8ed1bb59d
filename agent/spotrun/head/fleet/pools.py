"""The pools: the machines that the cloud lists, and how many each pool should have."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Literal, TypeVar

from spotrun.cloud.base import Advice, Cloud, Ended, Instance, Problem
from spotrun.cloud.prices import on_demand
from spotrun.errors import PartialError, QuotaError, SpotrunError, StockoutError
from spotrun.head.capacity.sizes import Pool
from spotrun.head.costs.bill import Rates
from spotrun.head.fleet.surplus import Surplus
from spotrun.spec import ClusterSpec, devices_of

log = logging.getLogger(__name__)

T = TypeVar("T")


class Fleet:
    """The pools of one cluster, as in the cloud's last answer."""

    def __init__(self, cluster: ClusterSpec, cloud: Cloud, clock: Callable[[], float] = time.time) -> None:
        self.cluster = cluster
        self.listed_at = 0.0  # when the cloud was asked for `instances`
        self.instances: list[Instance] | None = None  # None while the cloud does not answer
        self.ended: tuple[Ended, ...] = ()  # machines of which the cloud says when they ended
        self.sizes: dict[str, int] = {}
        # Pools whose zone does not answer, and since when. Their instances and sizes are the last known ones.
        self.away: dict[str, Problem] = {}
        self.prices: dict[str, float] = {}
        self.advice: Mapping[str, Advice] = {}  # what the cloud says about the pools' markets, by pool
        self.rates = rates(cluster, {})  # `prices`, and what machines would cost on-demand
        self.last_list: list[Instance] | None = None  # the last answer, if any, even while there is none now
        self.surplus = Surplus()
        self.looked = asyncio.Condition()  # notified each time the cloud was asked, with or without an answer
        self._indexed: tuple[list[Instance] | None, Mapping[str, Instance]] = (None, {})  # see `_by_name`
        self._cloud, self._clock = cloud, clock
        self._problems: list[Problem] = []  # as in the cloud's last answer
        self._unpriced = "the cloud has not been asked yet"  # why `prices` are not known; "" if they are
        # By pool: the size that it did not take when it was last asked, and why.
        self._refused: dict[str, tuple[int, Problem]] = {}
        self.unremoved = ""  # why the cloud did not delete machines when it was last asked; "" if it did

    async def look(self) -> list[Problem]:
        """Ask the cloud. Returns new problems, and pools that have too many machines since this look.

        Raises `CloudError` if the cloud does not list its machines.

        Problems, prices and pools about which the cloud does not answer stay as they were.
        """
        before = {(problem.pool, problem.message) for problem in self.problems}
        try:
            await self._list()
        finally:
            async with self.looked:
                self.looked.notify_all()
        # One by one: a budget needs the prices even when the problems are not known.
        try:
            self.prices, self._unpriced = await self._cloud.prices(), ""
            self.rates = rates(self.cluster, self.prices)
        except SpotrunError as error:
            self._unpriced = self._unpriced and str(error)
            log.warning("prices: %s", error)
        try:
            self._problems = await self._cloud.problems()
        except SpotrunError as error:
            log.warning("problems: %s", error)
        sizes = {pool: size for pool, size in self.sizes.items() if pool not in self.away}
        many = self.surplus.look(self.instances or (), sizes, self.listed_at)
        found = [problem for problem in self.problems if (problem.pool, problem.message) not in before]
        return found + [Problem(pool, "other", self.surplus.messages[pool], self.listed_at) for pool in many]

    async def follow_market(self) -> None:
        """After each look, ask what the cloud says about the market. Never returns.

        A task of its own does this, because the answers may take long and nothing waits for them.
        """
        said = ""
        while True:
            async with self.looked:
                await self.looked.wait()
            try:
                self.advice, said = await self._cloud.advice(), ""
            except SpotrunError as error:
                if str(error) != said:
                    said = str(error)
                    log.warning("advice: %s", said)

    @property
    def problems(self) -> list[Problem]:
        """Why pools do not have their sizes, as far as is known."""
        known = [each for each in (*self.refusals, *self._problems) if each.pool not in self.away]
        return known + list(self.away.values())

    @property
    def refusals(self) -> list[Problem]:
        """Why pools did not take the sizes that they were asked for last."""
        # A cloud may do what it is asked, although its answer is lost.
        return [problem for pool, (size, problem) in self._refused.items() if self.sizes.get(pool, 0) != size]

    def pools(self) -> tuple[Pool, ...]:
        """Each pool as in the cloud's last answer, for `decide`."""
        short = {problem.pool for problem in self.problems}
        return tuple(
            Pool(
                pool.name,
                pool.max,
                self.sizes.get(pool.name, 0),
                dict.fromkeys(sorted(self.names(pool.name)), "ready"),
                "away" if pool.name in self.away else "short" if pool.name in short else "open",
            )
            for pool in self.cluster.pools
        )

    async def scale(self, sizes: Mapping[str, int], remove: Sequence[str] = ()) -> None:
        """Give the pools these sizes, and delete machines. Refusals of pools that keep their sizes are forgotten.

        Raises the last pool's refusal, once all have been asked: the others stand in for a pool that refused.
        """
        refusal: SpotrunError | None = None
        self._refused = {pool: refused for pool, refused in self._refused.items() if pool in sizes}
        for pool, size in sizes.items():
            try:
                await self._cloud.resize(pool, size)
                self.sizes[pool] = size
                self._refused.pop(pool, None)
            except SpotrunError as error:
                refusal = error
                self._refused[pool] = size, self._refusal(pool, error)
        try:
            if remove:
                await self._cloud.remove(list(remove))
            self.unremoved = ""
        except SpotrunError as error:
            self.unremoved = str(error)
            raise
        if refusal:
            raise refusal

    async def recreate(self, node: str) -> None:
        """Ask for another machine in a node's place. Raises `SpotrunError` if the cloud refuses."""
        await self._cloud.recreate([node])

    async def preempt(self, node: str, notice: float | None) -> None:
        """Have the cloud take a node, as a test. notice: seconds; 0: none. Raises `SpotrunError` if unknown."""
        if node not in self.names():
            raise SpotrunError(f"there is no node {node!r}; nodes: {', '.join(sorted(self.names())) or 'none'}")
        await self._cloud.preempt(node, notice)

    def names(self, pool: str | None = None) -> set[str]:
        """The machines that the cloud lists; those of one pool."""
        return {each.name for each in self.instances or () if pool in (None, each.pool)}

    def listed(self) -> set[str] | None:
        """The machines that the cloud lists; None while it does not answer."""
        return self.names() if self.instances is not None else None

    def seen(self) -> dict[str, tuple[Instance, bool]]:
        """By name: each machine as in the cloud's last answer, and whether its zone does not answer now."""
        return {name: (each, each.pool in self.away) for name, each in self._by_name().items()}

    def made(self, node: str) -> float:
        """When the machine of this name was made; 0 if that is not known."""
        instance = self._by_name().get(node)
        return instance.created if instance else 0.0

    def unpriced(self) -> str:
        """Why the price of machines is not known, so that no budget can be kept; "" if it is known."""
        missing = ", ".join(pool.name for pool in self.cluster.pools if pool.name not in self.prices)
        if self._unpriced:
            return f"what machines cost is not known yet: {self._unpriced}; try again, or leave budget out"
        if missing:
            return f"what machines of pool {missing} cost is not known; leave budget out, or the pool"
        return ""

    def state_of(self, node: str, reported_at: float, pool: str | None = None) -> str | None:
        """The state of the machine whose agent reported last at `reported_at`; None if the cloud does not answer.

        pool: as the agent reported; None: not known, so it may be any pool whose zone does not answer.
        """
        if self.instances is None:
            return None
        instance = self._by_name().get(node)
        pool = instance.pool if instance else pool
        if pool in self.away or (pool is None and self.away):
            return None
        # A machine made after this agent's last report is a successor.
        return "gone" if instance is None or instance.created > reported_at else instance.state

    def _by_name(self) -> Mapping[str, Instance]:
        """The instances by their names: indexed once for each answer of the cloud."""
        if self._indexed[0] is not self.instances:
            self._indexed = (self.instances, {each.name: each for each in reversed(self.instances or ())})
        return self._indexed[1]

    def _refusal(self, pool: str, error: SpotrunError) -> Problem:
        """The pool's problem. It keeps its time while the pool refuses."""
        at = self._refused[pool][1].at if pool in self._refused else time.time()
        kind: Literal["stockout", "quota", "other"] = "other"
        if isinstance(error, StockoutError | QuotaError):
            kind = "stockout" if isinstance(error, StockoutError) else "quota"
        return Problem(pool, kind, str(error).removeprefix(f"pool {pool}: "), at)

    async def _list(self) -> None:
        asked_at = self._clock()
        try:
            # At the same time: while a zone does not answer, each of these calls takes long.
            (sizes, unsized), (found, unlisted) = await asyncio.gather(
                _known(self._cloud.sizes), _known(self._cloud.nodes)
            )
        except SpotrunError:
            self.instances = None
            raise
        try:
            # After the list: what is not in the list any more has ended by now.
            self.ended = tuple(each for each in await self._cloud.ended() if self.cluster.pool(each.pool))
        except SpotrunError as error:
            log.warning("machines that have ended: %s", error)
        self._note_away(unsized | unlisted)
        self.sizes = {pool: size for pool, size in self.sizes.items() if pool in unsized} | sizes
        last = [instance for instance in self.last_list or () if instance.pool in unlisted]
        self.instances = self.last_list = [each for each in (*last, *found) if self.cluster.pool(each.pool)]
        self.listed_at = asked_at

    def _note_away(self, missing: dict[str, str]) -> None:
        now, before = time.time(), self.away  # the first message stays: a changed one would be another event
        self.away = {
            pool.name: before.get(pool.name)
            or Problem(pool.name, "other", f"zone {pool.zone} does not answer: {missing[pool.name]}", now)
            for pool in self.cluster.pools
            if pool.name in missing
        }


def rates(cluster: ClusterSpec, prices: Mapping[str, float]) -> Rates:
    """What machines cost, and what they would cost on-demand: at the price of such a pool, else at the list price."""
    listed: dict[str, float] = {}
    for pool in cluster.pools:
        twins = [
            p
            for p in cluster.pools
            if (p.market, p.machine, p.accelerator) == ("on-demand", pool.machine, pool.accelerator)
        ]
        known = [prices[twin.name] for twin in twins if twin.name in prices]
        attached = (pool.accelerator.type, pool.accelerator.count) if pool.accelerator else ()
        price = max(known, default=None) or on_demand(cluster.cloud, pool.zone, pool.machine, *attached)
        if price is not None:
            listed[pool.name] = price
    devices = {pool.name: devices_of(pool, cluster) or 1 for pool in cluster.pools}
    return Rates(prices, listed, {pool.name: pool.market for pool in cluster.pools}, devices)


async def _known(question: Callable[[], Awaitable[T]]) -> tuple[T, dict[str, str]]:
    """What the cloud knows; also each pool that it could not be asked about, and why."""
    try:
        return await question(), {}
    except PartialError as error:
        return error.known, error.missing
