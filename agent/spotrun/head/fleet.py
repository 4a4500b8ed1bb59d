"""The machines: what the cloud says there is, and how many there should be."""

from __future__ import annotations

import logging
from collections.abc import Iterable

from spotrun.cloud.base import Cloud, Instance, Problem
from spotrun.errors import SpotrunError
from spotrun.head import capacity
from spotrun.head.repair import ALL_WELL, Outlook
from spotrun.spec import ClusterSpec

log = logging.getLogger(__name__)


class Fleet:
    """The pools of one cluster. instances is None while the cloud cannot be asked."""

    def __init__(self, cluster: ClusterSpec, cloud: Cloud) -> None:
        self.cluster = cluster
        self.instances: list[Instance] | None = None
        self.sizes: dict[str, int] = {}
        self.problems: list[Problem] = []
        self.prices: dict[str, float] = {}
        self._cloud = cloud
        self._priced = False  # whether `prices` is the cloud's word
        self._refused: set[str] = set()  # pools that did not take their last size

    async def look(self) -> list[Problem]:
        """Ask the cloud; problems that are new. Raises `CloudError` if machines are not known then.

        Of problems and prices, what was known before stands when the cloud does not tell them.
        """
        try:
            self.sizes, found = await self._cloud.sizes(), await self._cloud.nodes()
        except SpotrunError:
            self.instances = None
            raise
        self.instances = [instance for instance in found if self.cluster.pool(instance.pool)]
        before = {(problem.pool, problem.message) for problem in self.problems}
        try:
            self.problems = await self._cloud.problems()
            self.prices, self._priced = await self._cloud.prices(), True
        except SpotrunError as error:
            log.warning("%s", error)
        return [problem for problem in self.problems if (problem.pool, problem.message) not in before]

    async def scale(
        self, needed: int, keep: Iterable[str], outlook: Outlook = ALL_WELL, leaving: Iterable[str] = ()
    ) -> None:
        """Bring the pools to `needed` machines, never taking one of `keep` that is of use.

        For each of `leaving`, which are under notice, one more is asked of its pool.

        Raises the last pool's refusal, once all have been asked: the others stand in for a pool that refused.
        """
        seen = self._observe(needed, frozenset(keep) - outlook.useless, outlook, frozenset(leaving))
        decision = capacity.decide(seen)
        refusal: SpotrunError | None = None
        for pool, size in decision.sizes.items():
            try:
                await self._cloud.resize(pool, size)
                self.sizes[pool] = size
                self._refused.discard(pool)
            except SpotrunError as error:
                refusal = error
                self._refused.add(pool)
        if decision.remove:
            await self._cloud.remove(list(decision.remove))
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

    def unpriced(self) -> list[str]:
        """Pools whose machines cost nobody knows how much; none while the cloud has not told any prices."""
        return [pool.name for pool in self.cluster.pools if self._priced and pool.name not in self.prices]

    def state_of(self, node: str, heard: float) -> str | None:
        """The state of the machine that ran the agent last heard at `heard`; None if the cloud cannot be asked."""
        if self.instances is None:
            return None
        instance = next((each for each in self.instances if each.name == node), None)
        # A machine made after this agent was last heard is its successor.
        return "gone" if instance is None or instance.created > heard else instance.state

    def _observe(
        self, needed: int, keep: frozenset[str], outlook: Outlook, leaving: frozenset[str]
    ) -> capacity.Observation:
        short = {problem.pool for problem in self.problems} | self._refused
        names = {pool.name: frozenset(self.names(pool.name)) for pool in self.cluster.pools}
        pools = tuple(
            capacity.Pool(
                name=pool.name,
                max=pool.max,
                size=self.sizes.get(pool.name, 0),
                running=tuple(sorted(names[pool.name])),
                short=pool.name in short,
                useless=outlook.useless & names[pool.name],
                closed=pool.name in outlook.closed,
                leaving=len(leaving & names[pool.name]),
                coming=outlook.coming & names[pool.name],
                unproven=(outlook.unproven & names[pool.name]) - keep,
            )
            for pool in self.cluster.pools
        )
        return capacity.Observation(pools, needed, keep)
