"""What machines cost on AWS now: spot prices from EC2, on-demand prices from the shipped table."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from spotrun.cloud import prices as table
from spotrun.cloud.aws.api import Clients, call
from spotrun.errors import CloudError
from spotrun.spec import ClusterSpec, PoolSpec

if TYPE_CHECKING:
    from mypy_boto3_ec2.type_defs import SpotPriceTypeDef

_KEEP = 300.0  # seconds to keep spot prices; AWS changes them a few times a day
_LATER = 60.0  # seconds until EC2 is asked again after a refusal
log = logging.getLogger(__name__)


class Prices:
    """Asks EC2 for the spot prices of a cluster's pools, and keeps them. One thread at a time.

    page: the most price changes in one answer.
    """

    def __init__(self, cluster: ClusterSpec, clients: Clients, page: int) -> None:
        self._pools = cluster.pools
        self._clients, self._page = clients, page
        self._spot: dict[tuple[str, str], float] = {}  # (machine type, zone): dollars an hour
        self._next = 0.0  # when EC2 is asked again
        self._unpriced: set[str] = set()  # pools whose missing price the log has reported

    def by_pool(self) -> dict[str, float]:
        """As `Cloud.prices`. Blocking.

        If EC2 gives no price for a spot pool, the table's price is used. If the table has none either, the pool is left
        out. The log says so once. A price that is missing is no error.
        """
        try:
            call(self._ask_spot)
        except CloudError as error:
            log.warning("spot prices: %s", error)
            self._next = time.monotonic() + _LATER
        found = {pool.name: self._price(pool) for pool in self._pools}
        return {pool: price for pool, price in found.items() if price is not None}

    def _ask_spot(self) -> None:
        spot = [pool for pool in self._pools if pool.market == "spot"]
        if not spot or time.monotonic() < self._next:
            return
        pages = self._clients.ec2.get_paginator("describe_spot_price_history").paginate(
            InstanceTypes=sorted({pool.machine for pool in spot}),  # type: ignore[misc]
            ProductDescriptions=["Linux/UNIX"],
            Filters=[{"Name": "availability-zone", "Values": sorted({pool.zone for pool in spot})}],
            StartTime=datetime.now(UTC),  # the price that is valid now: the last one set before
            PaginationConfig={"PageSize": self._page},
        )
        self._spot = newest_prices(each for page in pages for each in page["SpotPriceHistory"])
        self._next = time.monotonic() + _KEEP

    def _price(self, pool: PoolSpec) -> float | None:
        if pool.market == "on-demand":
            price, current = table.on_demand("aws", pool.zone, pool.machine), True
        else:
            found = self._spot.get((pool.machine, pool.zone))
            price, current = found or table.spot("aws", pool.zone, pool.machine), found is not None
        if (not current or price is None) and pool.name not in self._unpriced:
            self._unpriced.add(pool.name)
            later = "its cost is counted once the price is known"
            instead = later if price is None else f"the shipped table's ${price:g} an hour is used"
            log.warning("pool %s: the price of %s %s is unknown; %s", pool.name, pool.market, pool.machine, instead)
        return price


def newest_prices(said: Iterable[SpotPriceTypeDef]) -> dict[tuple[str, str], float]:
    """Dollars an hour by machine type and zone, from price changes in any order."""
    newest: dict[tuple[str, str], SpotPriceTypeDef] = {}
    for change in said:
        key = (change["InstanceType"], change["AvailabilityZone"])
        if key not in newest or change["Timestamp"] > newest[key]["Timestamp"]:
            newest[key] = change
    return {key: float(change["SpotPrice"]) for key, change in newest.items()}
