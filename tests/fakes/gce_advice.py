"""Compute Engine's advice about spot machines, for `tests.fakes.gce_api`: what it may be asked, and what it answers.

https://cloud.google.com/compute/docs/reference/rest/v1/advice/capacity and …/capacityHistory
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from google.cloud import compute_v1

from tests.fakes.mig import stamp

_DAY = 86400.0


class Refused(Exception):
    """An HTTP error. strange: the request itself is not of the API, which must fail a test."""

    def __init__(self, status: int, reason: str, message: str, strange: bool = False) -> None:
        self.status, self.reason, self.message, self.strange = status, reason, message, strange


@dataclass(frozen=True)
class Zone:
    """What Google says of a zone. rates, prices: since when, epoch seconds, and how much."""

    obtainability: float
    uptime: str
    rates: dict[float, float]
    prices: dict[float, float]


def capacity(zones: Mapping[str, Zone], request: Any) -> compute_v1.CapacityAdviceResponse:
    """A score for all machines in one zone; nothing for a zone of which Google says nothing."""
    asked = request.capacity_advice_request_resource
    if asked.instance_properties.scheduling.provisioning_model != "SPOT":
        raise Refused(400, "invalid", "provisioningModel must be SPOT", strange=True)
    selections = list(asked.instance_flexibility_policy.instance_selections.values())
    if len(selections) != 1 or not selections[0].machine_types or asked.size < 1:
        raise Refused(400, "invalid", "exactly one instance selection and a size are needed", strange=True)
    [place] = asked.distribution_policy.zones
    zone = _zone(place.zone, request.region)
    if zone not in zones:
        return compute_v1.CapacityAdviceResponse()
    found = zones[zone]
    shard = {"machine_type": selections[0].machine_types[0], "instance_count": asked.size, "zone": zone}
    scores = {"obtainability": found.obtainability, "estimated_uptime": found.uptime}
    return compute_v1.CapacityAdviceResponse(recommendations=[{"scores": scores, "shards": [shard]}])


def history(zones: Mapping[str, Zone], request: Any) -> compute_v1.CapacityHistoryResponse:
    """Rates of a zone, newest first; prices of a region, without a zone."""
    asked = request.capacity_history_request_resource
    wanted, place = asked.instance_properties, asked.location_policy.location
    if wanted.scheduling.provisioning_model != "SPOT" or wanted.machine_type.startswith("n1-custom"):
        raise Refused(400, "invalid", "only spot machines of predefined types have a history", strange=True)
    if "PRICE" in asked.types and place:
        raise Refused(400, "invalid", "prices are of a region", strange=True)
    answer = compute_v1.CapacityHistoryResponse(machine_type=wanted.machine_type, location=place)
    if "PREEMPTION" in asked.types and (found := zones.get(_zone(place, request.region))):
        answer.preemption_history = [
            compute_v1.CapacityHistoryResponsePreemptionRecord(interval=_interval(at, at + _DAY), preemption_rate=rate)
            for at, rate in reversed(found.rates.items())
        ]
    if "PRICE" in asked.types and zones:
        answer.price_history = [
            compute_v1.CapacityHistoryResponsePriceRecord(interval=_interval(at, at + _DAY), list_price=_money(price))
            for at, price in next(iter(zones.values())).prices.items()
        ]
    return answer


def _zone(path: str, region: str) -> str:
    zone = path.removeprefix("zones/")
    if zone == path or not zone.startswith(f"{region}-"):
        raise Refused(400, "invalid", f"'{path}' is not zones/<zone> of {region}", strange=True)
    return zone


def _interval(start: float, end: float) -> dict[str, str]:
    return {"start_time": stamp(start), "end_time": stamp(end)}


def _money(dollars: float) -> dict[str, Any]:
    whole = int(dollars)
    return {"currency_code": "USD", "units": whole, "nanos": round((dollars - whole) * 1e9)}
