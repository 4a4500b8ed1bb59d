"""What Google says about the market, over real HTTP, and what happens when it says nothing."""

from __future__ import annotations

import logging
import time

import pytest

from spotrun.cloud.base import Advice, Said
from spotrun.cloud.gcp import GcpCloud
from spotrun.cloud.gcp.advice import CAPACITY, HISTORY, Adviser, seconds
from spotrun.spec import PoolSpec
from tests.fakes.gce import FakeGce
from tests.fakes.on_gcp import CLUSTER, A

pytestmark = pytest.mark.clouds

DAY = 86400.0
MIDNIGHT = 1_795_000_000.0


@pytest.fixture
def adviser(cloud: GcpCloud) -> Adviser:
    """One that asks each time."""
    return Adviser(CLUSTER, cloud.api, keep=0.0)


def set_market(gce: FakeGce, obtainability: float = 0.8) -> None:
    rates = {MIDNIGHT - 9 * DAY: 1.0} | {MIDNIGHT - day * DAY: day / 10 for day in range(7)}
    gce.set_market(A, obtainability, "600s", rates, {MIDNIGHT - 30 * DAY: 0.25, MIDNIGHT - DAY: 1.375})


async def test_what_google_says_of_each_spot_pool(adviser: Adviser, gce: FakeGce) -> None:
    set_market(gce)
    before = time.time()
    found = await adviser.advice()
    assert found.keys() == {"spot-a", "spot-b"}
    zone = found["spot-a"]
    assert (zone.obtainability, zone.uptime, zone.preemptions) == tuple(
        Said(pytest.approx(value), pytest.approx(before, abs=60), source)
        for value, source in ((0.8, CAPACITY), (600, CAPACITY), (0.3, HISTORY))
    )
    prices = (Said(0.25, MIDNIGHT - 30 * DAY, HISTORY), Said(1.375, MIDNIGHT - DAY, HISTORY))
    assert zone.prices == prices
    assert found["spot-b"] == Advice(prices=prices), "prices are of the region"


@pytest.mark.parametrize(
    ("only", "status", "reason", "left"),
    [
        ("advice.capacity", 403, "forbidden", {"preemptions", "prices"}),
        ("advice.capacity_history", 404, "notFound", {"obtainability", "uptime"}),
    ],
)
async def test_a_refusal_is_said_once_and_the_rest_is_known(
    adviser: Adviser,
    gce: FakeGce,
    caplog: pytest.LogCaptureFixture,
    only: str,
    status: int,
    reason: str,
    left: set[str],
) -> None:
    set_market(gce)
    caplog.set_level(logging.WARNING)
    for _ in range(2):
        gce.fail(*[status] * 2, reason=reason, message="Required 'compute.advice' permission", only=only)
        found = (await adviser.advice())["spot-a"]
        assert {key for key in ("obtainability", "uptime", "preemptions", "prices") if getattr(found, key)} == left
    [line] = [each.message for each in caplog.records if "Google gives no advice about the market" in each.message]
    assert "pool spot-a" in line


async def test_an_answer_that_fails_leaves_the_last_one(adviser: Adviser, gce: FakeGce) -> None:
    set_market(gce)
    before = await adviser.advice()
    set_market(gce, 0.1)
    gce.fail(403, only="advice.capacity")
    assert (await adviser.advice())["spot-a"].obtainability == before["spot-a"].obtainability
    after = (await adviser.advice())["spot-a"].obtainability
    assert after is not None
    assert after.value == pytest.approx(0.1)


async def test_the_head_may_ask_often_but_google_is_not_asked_again(cloud: GcpCloud, gce: FakeGce) -> None:
    set_market(gce)
    first = await cloud.advice()
    calls = list(gce.calls)
    assert await cloud.advice() == first
    assert gce.calls == calls


async def test_what_has_no_history_is_asked_for_its_capacity_only(cloud: GcpCloud, gce: FakeGce) -> None:
    """N1 machines with GPUs; on-demand machines are not asked about at all."""
    set_market(gce)
    attached = {"machine": "n1-standard-8", "accelerator": {"type": "nvidia-tesla-t4", "count": 2}}
    pools = (PoolSpec.model_validate({"name": "t4", "zone": A, **attached}), CLUSTER.pools[2])
    found = await Adviser(CLUSTER.model_copy(update={"pools": pools}), cloud.api).advice()
    assert found.keys() == {"t4"}
    assert (found["t4"].preemptions, found["t4"].prices) == (None, ())
    assert gce.calls == ["advice.capacity"]


@pytest.mark.parametrize(
    ("text", "value"), [("600s", 600.0), ("3.5s", 3.5), ("", None), ("soon", None), ("60", None), ("-1s", None)]
)
def test_durations(text: str, value: float | None) -> None:
    assert seconds(text) == value
