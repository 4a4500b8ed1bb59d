"""The market of the local cloud: three markets, prices and zones that change, and the record of what was billed."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from spotrun.cloud.base import Advice, Ended, Instance, Said
from spotrun.cloud.local import market
from spotrun.cloud.local.cloud import LocalCloud, down, up
from spotrun.cloud.local.layout import Change, Config, Layout, Pool
from spotrun.cloud.local.reconcile import Member, View, plan
from spotrun.errors import CloudError
from tests.cloud.local_spec import IDLE, spec
from tests.helpers import await_for

NOW = 1000.0
SPOT, FLEX = Pool("s", "z", "m", "spot", 9), Pool("f", "z", "m", "flex", 9)
STEADY = Pool("d", "z", "m", "on-demand", 9)
POOLS = (SPOT, FLEX, STEADY)


def view(wanted: dict[str, int], there: dict[str, Member] | None = None, **values: Any) -> View:
    pools = {pool.name: pool for pool in POOLS}
    numbers = {name: frozenset(range(wanted.get(name, 0))) for name in pools}
    return View(NOW, pools, numbers, there or {}, **values)


def running(pool: str, *numbers: int, **values: Any) -> dict[str, Member]:
    return {f"{pool}-{n}": Member(pool, n, "running", **values) for n in numbers}


FLEX_REQUESTS = {
    "a new request waits for its turn": (view({"f": 2}, queue_delay=5.0), (), {"f": NOW + 5}, {"f": 2}, NOW + 5),
    "a request still waits": (view({"f": 2}, queued={"f": NOW + 3}), (), {"f": NOW + 3}, {"f": 2}, NOW + 3),
    "when its turn comes it gets all": (
        view({"f": 2}, queued={"f": NOW}),
        (("f", 0), ("f", 1)),
        {},
        {},
        float("inf"),
    ),
    "if the zone has not all of them it gets none and waits on": (
        view({"f": 3}, queued={"f": NOW - 7}, capacity={"z": 2}),
        (),
        {"f": NOW - 7},
        {"f": 3},
        float("inf"),
    ),
    "machines of another pool take the room that it needs": (
        view({"s": 1, "f": 2}, queued={"f": NOW}, capacity={"z": 2}),
        (("s", 0),),
        {"f": NOW},
        {"f": 2},
        float("inf"),
    ),
}


@pytest.mark.parametrize("case", FLEX_REQUESTS)
def test_a_flex_request_gets_all_machines_or_none(case: str) -> None:
    seen, create, queued, short, wake = FLEX_REQUESTS[case]
    found = plan(seen)
    assert (found.create, found.queued, found.short, found.wake) == (create, queued, short, wake)


ALL = running("s", 0, 1, 2) | running("f", 0) | running("d", 0)
TAKEN = {
    "nothing while there is room": (view({"s": 3, "f": 1, "d": 1}, ALL, capacity={"z": 5}), ()),
    "the newest spot machines of a zone that shrinks": (
        view({"s": 3, "f": 1, "d": 1}, ALL, capacity={"z": 3}),
        ("s-2", "s-1"),
    ),
    "spot machines only, however small the zone is": (
        view({"s": 3, "f": 1, "d": 1}, ALL, capacity={"z": 0}),
        ("s-2", "s-1", "s-0"),
    ),
    "those of a pool that shrinks": (view({"s": 3, "f": 1, "d": 1}, ALL, capacity={"s": 2, "z": 9}), ("s-2",)),
    "no second one for a machine under notice": (
        view({"s": 2}, running("s", 0) | {"s-1": Member("s", 1, "stopping", due=NOW + 9)}, capacity={"z": 1}),
        (),
    ),
    "no second one for a machine that is removed": (view({"s": 1}, running("s", 0, 1), capacity={"z": 1}), ()),
    "nothing in a zone that is dry: what is there stays": (view({"s": 3}, ALL, dry=frozenset({"z"})), ()),
}


@pytest.mark.parametrize("case", TAKEN)
def test_the_cloud_takes(case: str) -> None:
    seen, taken = TAKEN[case]
    assert plan(seen).take == taken


CHANGES = (
    Change("z", after=60, capacity=1, notice=5, obtainability=0.1),
    Change("s", price=0.2, uptime=3600),
    Change("s", after=60, price=0.9, preemptions=0.4),
    Change("z", after=60, dry=True),
    Change("z", after=90, dry=False),
)


def said(value: float, after: float) -> Said:
    return Said(value, NOW + after, "local.market")


MOMENTS = {
    "at the start": (0, {"s": 0.2, "f": 0.5, "d": 1.0}, {"z": 4}, frozenset(), 60),
    "after the first changes": (60, {"s": 0.9, "f": 0.5, "d": 1.0}, {"z": 1}, frozenset({"z"}), 90),
    "after the last change": (100, {"s": 0.9, "f": 0.5, "d": 1.0}, {"z": 1}, frozenset(), float("inf")),
}


@pytest.mark.parametrize("case", MOMENTS)
def test_the_market_changes_as_the_file_says(case: str) -> None:
    elapsed, prices, capacity, dry, following = MOMENTS[case]
    config = Config("c", "r", "b", Pool("head", "z", "m", "on-demand", 1), POOLS, capacity={"z": 4}, market=CHANGES)
    found = market.at(elapsed, config, (), NOW)
    assert (found.prices, found.capacity, found.dry, found.next) == (prices, capacity, dry, following)


def test_advice_is_what_the_file_says_so_far() -> None:
    config = Config("c", "r", "b", Pool("head", "z", "m", "on-demand", 1), POOLS, market=CHANGES)
    found = market.at(60, config, (Change("s", after=50, price=0.5), Change("s", after=99, price=7)), NOW).advice
    prices = (said(0.2, 0), said(0.5, 50), said(0.9, 60))
    assert found["s"] == Advice(said(0.1, 60), said(3600, 0), said(0.4, 60), prices)
    assert found["d"] == Advice(said(0.1, 60), prices=(said(1.0, 0),))


def test_a_daemon_of_an_older_version_reads_a_configuration_without_changes() -> None:
    config = Config("c", "r", "b", STEADY, (SPOT,), capacity={"z": 1})
    assert not {"market", "queue_delay"} & config.to_json().keys()
    full = Config("c", "r", "b", STEADY, (SPOT,), queue_delay=2, market=CHANGES)
    assert Config.from_json(json.loads(json.dumps(full.to_json()))) == full


class Cluster:
    """A local cluster with a pool of each market."""

    def __init__(self, home: Path, cloud: LocalCloud) -> None:
        self.cloud, self.layout = cloud, Layout.of(home, "tiny")

    async def running(self, *names: str) -> dict[str, Instance]:
        """The machines, once exactly these run beside the head."""

        async def look() -> dict[str, Instance]:
            nodes = {node.name: node for node in await self.cloud.nodes() if node.state == "running"}
            return nodes if nodes.keys() == {*names, "head-0"} else {}

        return await await_for(look, what=f"machines {names}")

    def ledger(self, *keys: str) -> list[tuple[Any, ...]]:
        lines = [json.loads(line) for line in self.layout.ledger.read_text().splitlines()]
        return [tuple(line.get(key) for key in keys) for line in lines]


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[Cluster]:
    pools = [
        {"name": "spot", "zone": "local-a", "max": 4},
        {"name": "flex", "zone": "local-b", "max": 4, "market": "flex", "max_run_duration": "1h"},
        {"name": "steady", "zone": "local-b", "max": 4, "market": "on-demand"},
    ]
    changes = [{"where": "spot", "price": 0.25}, {"where": "local-b", "obtainability": 0.5}]
    local = {"queue_delay": 0.2, "market": changes}
    cloud = await asyncio.to_thread(up, spec(pools=pools, local=local), tmp_path, IDLE)
    yield Cluster(tmp_path, cloud)
    await cloud.close()
    await asyncio.to_thread(down, "tiny", tmp_path)


async def test_three_markets(cluster: Cluster) -> None:
    cloud = cluster.cloud
    await cloud.market("flex", capacity=1)
    await cloud.resize("flex", 2)
    await cloud.resize("steady", 1)
    nodes = await cluster.running("steady-0")
    [problem] = await cloud.problems()
    assert (problem.pool, problem.kind) == ("flex", "queue")
    assert "2 flex local waits for its turn in zone local-b" in problem.message
    await cloud.market("flex", capacity=2)
    nodes = await cluster.running("steady-0", "flex-0", "flex-1")
    assert {nodes[name].market for name in ("flex-0", "flex-1")} == {"flex"}
    assert nodes["flex-0"].ends == pytest.approx(nodes["flex-0"].created + 3600)
    assert nodes["steady-0"].ends == 0.0
    for name, kind in {"flex-0": "flex", "steady-0": "on-demand"}.items():
        with pytest.raises(CloudError, match=f"{name} is {kind}, and the cloud preempts only spot machines"):
            await cloud.preempt(name)
    await cloud.market("local-b", capacity=0)
    await cloud.resize("spot", 1)
    assert (await cluster.running("steady-0", "flex-0", "flex-1", "spot-0"))["flex-1"] == nodes["flex-1"]


async def test_a_zone_that_shrinks_takes_machines_and_gives_them_again(cluster: Cluster) -> None:
    cloud = cluster.cloud
    await cloud.resize("spot", 2)
    before = await cluster.running("spot-0", "spot-1")
    await cloud.market("local-a", capacity=1, notice=0.1)
    await cluster.running("spot-0")

    async def short() -> bool:
        return [(problem.pool, problem.kind) for problem in await cloud.problems()] == [("spot", "stockout")]

    await await_for(short, what="the pool's problem")
    await cloud.market("local-a", capacity=0, notice=0)
    await cluster.running()
    await cloud.market("local-a", capacity=9)
    after = await cluster.running("spot-0", "spot-1")
    assert not {node.id for node in after.values() if node.pool == "spot"} & {node.id for node in before.values()}


async def test_the_ledger_has_what_each_machine_cost(cluster: Cluster) -> None:
    """The sum of the machines' times at the prices of those times is what an owner would be billed."""
    cloud = cluster.cloud
    assert await cloud.prices() == {"spot": 0.25, "flex": 0.5, "steady": 1.0}
    await cloud.resize("spot", 1)
    node = (await cluster.running("spot-0"))["spot-0"]
    await cloud.market("spot", price=0.75)
    assert (await cloud.prices())["spot"] == 0.75
    await cloud.preempt("spot-0", 0.1)
    await cloud.resize("spot", 0)
    await cluster.running()

    async def ended() -> bool:
        return ("ended", "spot-0", node.id) in cluster.ledger("what", "machine", "id")

    await await_for(ended, what="the machine's end in the ledger")
    spot = [line for line in cluster.ledger("pool", "what", "price") if line[0] == "spot"]
    assert [line[1:] for line in spot] == [
        ("price", 0.25),
        ("created", None),
        ("running", None),
        ("price", 0.75),
        ("notice", None),
        ("taken", None),
        ("ended", None),
    ]
    assert cluster.ledger("what")[0] == ("up",)
    assert not any(pool == "head" for (pool,) in cluster.ledger("pool"))
    [(since,)] = [line[1:] for line in cluster.ledger("what", "at") if line[0] == "running"]
    [(until,)] = [line[1:] for line in cluster.ledger("what", "at") if line[0] == "taken"]
    assert await cloud.ended() == [Ended("spot-0", "spot", node.created, since, until)], "the head counts the same"
    times = [at for (at,) in cluster.ledger("at")]
    assert times == sorted(times)


async def test_the_cloud_says_what_its_file_says(cluster: Cluster) -> None:
    before = await cluster.cloud.advice()
    assert [price.value for price in before["spot"].prices] == [0.25]
    steady = before["steady"]
    assert before["spot"].obtainability is None
    assert steady.obtainability == Said(0.5, steady.prices[0].at, market.SOURCE)
    await cluster.cloud.market("spot", price=0.3, preemptions=0.2, obtainability=0.9, uptime=600)
    found = (await cluster.cloud.advice())["spot"]
    assert [price.value for price in found.prices] == [0.25, 0.3]
    at = found.prices[-1].at
    assert at > found.prices[0].at
    told = (found.obtainability, found.uptime, found.preemptions)
    assert told == tuple(Said(value, at, market.SOURCE) for value in (0.9, 600, 0.2))
