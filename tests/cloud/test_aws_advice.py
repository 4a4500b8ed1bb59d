"""What AWS says about the market, from a real server of its API, and what happens when it says nothing."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from spotrun.cloud.aws import AwsCloud
from spotrun.cloud.aws.advice import Adviser, histories, siblings
from spotrun.cloud.aws.api import Clients
from spotrun.cloud.base import Said
from spotrun.spec import ClusterSpec
from tests.fakes import moto_server
from tests.fakes.moto_server import Moto

pytestmark = pytest.mark.clouds

SPOT = {"name": "spot", "zone": "us-east-1a", "machine": "g5.2xlarge", "max": 9}
STEADY = {"name": "steady", "zone": "us-east-1b", "machine": "g5.2xlarge", "max": 2, "market": "on-demand"}
SCORED = "GetSpotPlacementScores of g5.2xlarge and 4 like it"


@pytest.fixture(scope="module")
def aws() -> Iterator[Moto]:
    with moto_server.running() as moto:
        yield moto


@pytest.fixture(autouse=True)
def _account(aws: Moto, monkeypatch: pytest.MonkeyPatch) -> None:
    for key, value in aws.environment.items():
        monkeypatch.setenv(key, value)
    aws.allow_configurations(10)


def spec(*pools: dict[str, Any]) -> ClusterSpec:
    return ClusterSpec.model_validate({"name": "c", "cloud": "aws", "region": "us-east-1", "pools": list(pools)})


def adviser(*pools: dict[str, Any]) -> Adviser:
    """One that asks each time."""
    return Adviser(spec(*pools), Clients("us-east-1"), keep=0.0, later=0.0)


def test_what_aws_says_of_each_spot_pool(aws: Moto) -> None:
    aws.score("us-east-1a", 9)
    aws.score("us-east-1b", 2)
    found = adviser(SPOT, SPOT | {"name": "other", "zone": "us-east-1b"}, STEADY).advice()
    assert found.keys() == {"spot", "other"}
    told = {
        name: each.obtainability and (each.obtainability.value, each.obtainability.source)
        for name, each in found.items()
    }
    assert told == {"spot": (0.9, SCORED), "other": (0.2, SCORED)}
    assert [price.value for price in found["spot"].prices] == [0.00001]
    assert (found["spot"].uptime, found["spot"].preemptions) == (None, None)


def test_a_type_without_siblings_has_no_score() -> None:
    """AWS would say that there are few such machines, whatever is the case."""
    found = adviser(SPOT | {"machine": "c7i.large"}).advice()
    assert found.get("spot") is None or found["spot"].obtainability is None


def test_a_refusal_is_said_once_and_the_rest_is_known(aws: Moto, caplog: pytest.LogCaptureFixture) -> None:
    """Only new questions are refused, so the scores of other pools are known on."""
    known, new = adviser(SPOT), adviser(SPOT | {"max": 8})
    assert known.advice()["spot"].obtainability is not None
    aws.allow_configurations(0)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            found = new.advice()["spot"]
            assert found.obtainability is None
            assert found.prices
    [line] = [record.getMessage() for record in caplog.records]
    assert line.startswith(
        "AWS gives no advice about the market; the head decides without it: AWS: GetSpotPlacementScores:"
    )
    assert "MaxConfigLimitExceeded" in line
    assert known.advice()["spot"].obtainability is not None


async def test_the_head_may_ask_often_but_aws_is_not_asked_again(aws: Moto) -> None:
    aws.score("us-east-1a", 4)
    cloud = AwsCloud(spec(SPOT))
    first = await cloud.advice()
    aws.score("us-east-1a", 8)
    assert await cloud.advice() == first
    await cloud.close()


SIBLINGS = {
    "sizes of a family with as many GPUs": (
        "g5.2xlarge",
        ("g5.16xlarge", "g5.2xlarge", "g5.4xlarge", "g5.8xlarge", "g5.xlarge"),
    ),
    "families of a generation, if the family has too few": (
        "p5.48xlarge",
        ("p5.48xlarge", "p5e.48xlarge", "p5en.48xlarge"),
    ),
    "none of a type that is not in the catalogue": ("c7i.large", ("c7i.large",)),
}


@pytest.mark.parametrize("case", SIBLINGS)
def test_siblings(case: str) -> None:
    machine, found = SIBLINGS[case]
    assert siblings(machine) == found


def test_prices_are_in_order_for_each_type_and_zone() -> None:
    noon = datetime(2026, 11, 22, 12, tzinfo=UTC)

    def change(zone: str, hours: float, price: str) -> Any:
        at = noon + timedelta(hours=hours)
        return {"InstanceType": "g5.xlarge", "AvailabilityZone": zone, "Timestamp": at, "SpotPrice": price}

    said = [change("a", 0, "0.5"), change("b", 1, "0.7"), change("a", -2, "0.4"), change("a", 0, "0.5")]
    at = noon.timestamp()
    source = "DescribeSpotPriceHistory"
    assert histories(said) == {
        ("g5.xlarge", "a"): (Said(0.4, at - 7200, source), Said(0.5, at, source)),
        ("g5.xlarge", "b"): (Said(0.7, at + 3600, source),),
    }
