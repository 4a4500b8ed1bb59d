"""What AWS says about the market of spot machines: placement scores and the history of prices.

A placement score, from 1 to 10, says how likely a zone has a number of machines of one of several types. It is low by
definition for fewer than three types, and an account may ask about only a few new combinations a day. So the head asks
about a machine type with its siblings, and always about all of the pool's machines: the same combination each time.
https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/spot-placement-score.html

AWS has no call that says how often spot machines are taken.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, TypeVar

from spotrun.cloud.aws.api import Clients, call
from spotrun.cloud.base import Advice, Said
from spotrun.errors import CloudError
from spotrun.spec import ClusterSpec, PoolSpec
from spotrun.spec.machine_types import AWS

if TYPE_CHECKING:
    from mypy_boto3_ec2.type_defs import SpotPlacementScoreTypeDef, SpotPriceTypeDef

T = TypeVar("T")

SCORES, PRICES = "GetSpotPlacementScores", "DescribeSpotPriceHistory"
_KEEP = 600.0  # seconds between two rounds of questions
_LATER = 3600.0  # seconds until a question is asked again after a refusal
_DAYS = 30  # of the history of prices; AWS has 90
_ENOUGH = 3  # types: the score of fewer types says nothing
log = logging.getLogger(__name__)


class Adviser:
    """Asks about the spot pools, and keeps the answers. One thread at a time."""

    def __init__(self, cluster: ClusterSpec, clients: Clients, keep: float = _KEEP, later: float = _LATER) -> None:
        self._pools = [pool for pool in cluster.pools if pool.market == "spot"]
        self._clients, self._keep, self._later = clients, keep, later
        self._zones: dict[str, str] = {}  # zones' ids by name. Names mean other zones in other accounts.
        self._scores: dict[str, Said] = {}  # by pool
        self._prices: dict[tuple[str, str], tuple[Said, ...]] = {}  # by machine type and zone
        self._next = {SCORES: 0.0, PRICES: 0.0}  # when each is asked again
        self._refused: set[str] = set()  # what was refused, as the log has said

    def advice(self) -> dict[str, Advice]:
        """The answers by pool: asked now, or lately. What is not answered again stays as it was, with its time."""
        if self._pools:
            self._ask(SCORES, self._ask_scores)
            self._ask(PRICES, self._ask_prices)
        found = {
            pool.name: Advice(self._scores.get(pool.name), prices=self._prices.get((pool.machine, pool.zone), ()))
            for pool in self._pools
        }
        return {name: advice for name, advice in found.items() if advice != Advice()}

    def _ask(self, what: str, question: Callable[[], None]) -> None:
        now = time.monotonic()
        if now < self._next[what]:
            return
        try:
            call(question)
            self._next[what] = now + self._keep
            self._refused.discard(what)
        except CloudError as error:
            self._next[what] = now + self._later
            if what not in self._refused:
                self._refused.add(what)
                log.warning("AWS gives no advice about the market; the head decides without it: %s", error)

    def _ask_scores(self) -> None:
        asked: dict[tuple[tuple[str, ...], int], Mapping[str, int]] = {}
        for pool in self._pools:
            types = siblings(pool.machine)
            if len(types) < _ENOUGH:
                continue
            if (types, pool.max) not in asked:
                asked[types, pool.max] = self._scores_of(types, pool.max)
            score = asked[types, pool.max].get(self._zone_id(pool))
            if score is not None:
                source = f"{SCORES} of {pool.machine} and {len(types) - 1} like it"
                self._scores[pool.name] = Said(score / 10, time.time(), source)

    def _scores_of(self, types: tuple[str, ...], machines: int) -> dict[str, int]:
        """The scores of the region's zones, by zone id."""
        pages = self._clients.ec2.get_paginator("get_spot_placement_scores").paginate(
            InstanceTypes=list(types),
            TargetCapacity=machines,
            TargetCapacityUnitType="units",
            SingleAvailabilityZone=True,
            RegionNames=[self._clients.region],
        )
        said: Iterable[SpotPlacementScoreTypeDef] = (each for page in pages for each in page["SpotPlacementScores"])
        return {each["AvailabilityZoneId"]: each["Score"] for each in said if "AvailabilityZoneId" in each}

    def _zone_id(self, pool: PoolSpec) -> str:
        if not self._zones:
            said = self._clients.ec2.describe_availability_zones()["AvailabilityZones"]
            self._zones = {each["ZoneName"]: each["ZoneId"] for each in said if "ZoneName" in each and "ZoneId" in each}
        return self._zones.get(pool.zone, "")

    def _ask_prices(self) -> None:
        pages = self._clients.ec2.get_paginator("describe_spot_price_history").paginate(
            InstanceTypes=sorted({pool.machine for pool in self._pools}),  # type: ignore[misc]
            ProductDescriptions=["Linux/UNIX"],
            Filters=[{"Name": "availability-zone", "Values": sorted({pool.zone for pool in self._pools})}],
            StartTime=datetime.now(UTC) - timedelta(days=_DAYS),
        )
        self._prices = histories(each for page in pages for each in page["SpotPriceHistory"])


def siblings(machine: str) -> tuple[str, ...]:
    """The machine type with those that have as many GPUs: of its family, then of its generation (p5, p5e, p5en).

    Only the type itself if it is not in the catalogue. In order of names, so that the same question is asked each time.
    """
    found = AWS.get(machine)
    if found is None:
        return (machine,)
    family = machine.partition(".")[0]
    alike = [name for name, each in AWS.items() if each.gpus == found.gpus]
    near = {name for name in alike if name.partition(".")[0] == family}
    if len(near) < _ENOUGH:
        near |= {name for name in alike if name.startswith(family[:2])}
    return tuple(sorted(near))


def histories(said: Iterable[SpotPriceTypeDef]) -> dict[tuple[str, str], tuple[Said, ...]]:
    """The prices by machine type and zone, oldest first, from price changes in any order."""
    found: dict[tuple[str, str], set[Said]] = {}
    for each in said:
        price = Said(float(each["SpotPrice"]), each["Timestamp"].timestamp(), PRICES)
        found.setdefault((each["InstanceType"], each["AvailabilityZone"]), set()).add(price)
    return {key: tuple(sorted(prices, key=lambda price: price.at)) for key, prices in found.items()}
