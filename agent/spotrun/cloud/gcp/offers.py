"""Which zones offer a cluster's machine and accelerator types. Operators ask before `make up`; a head never does.

https://cloud.google.com/compute/docs/reference/rest/v1/machineTypes/get and …/acceleratorTypes/get
"""

from __future__ import annotations

import asyncio

from google.cloud import compute_v1

from spotrun.cloud import offers
from spotrun.cloud.gcp.api import OPTIONS, Api, Clients
from spotrun.cloud.offers import Kind, Lack, Need
from spotrun.errors import GoneError
from spotrun.spec import ClusterSpec


def missing(cluster: ClusterSpec) -> list[Lack]:
    """What the cluster's zones do not offer. Blocking. Raises `CloudError`."""
    return asyncio.run(_missing(cluster))


async def _missing(cluster: ClusterSpec) -> list[Lack]:
    api, asked = Api(cluster.project or ""), offers.needs(cluster)
    try:
        there = await asyncio.gather(*(_offered(api, need) for need in asked))
        absent = [need for need, found in zip(asked, there, strict=True) if not found]
        types = sorted({(need.kind, need.type) for need in absent})
        zones = await asyncio.gather(*(_zones(api, cluster.region, kind, name) for kind, name in types))
        return offers.lacks(absent, dict(zip(types, zones, strict=True)))
    finally:
        await api.close()


async def _offered(api: Api, need: Need) -> bool:
    """Whether the zone offers it. A zone that does not exist offers nothing."""

    def call(clients: Clients) -> object:
        if need.kind == "accelerator":
            wanted = compute_v1.GetAcceleratorTypeRequest(
                project=api.project, zone=need.zone, accelerator_type=need.type
            )
            return clients.accelerators.get(wanted, **OPTIONS)
        request = compute_v1.GetMachineTypeRequest(project=api.project, zone=need.zone, machine_type=need.type)
        return clients.machine_types.get(request, **OPTIONS)

    try:
        await api.ask(f"{need.kind} type {need.type} in {need.zone}", call)
    except GoneError:
        return False
    return True


async def _zones(api: Api, region: str, kind: Kind, name: str) -> list[str]:
    """The region's zones that offer it. Only a hint: Google omits zones that it cannot reach at the moment."""

    def call(clients: Clients) -> list[str]:
        only = f"name = {name}"
        if kind == "accelerator":
            wanted = compute_v1.AggregatedListAcceleratorTypesRequest(project=api.project, filter=only)
            offered = clients.accelerators.aggregated_list(wanted, **OPTIONS)
            return [zone for zone, found in offered if found.accelerator_types]
        request = compute_v1.AggregatedListMachineTypesRequest(project=api.project, filter=only)
        return [
            zone for zone, found in clients.machine_types.aggregated_list(request, **OPTIONS) if found.machine_types
        ]

    found = await api.ask(f"zones with {kind} type {name}", call)
    zones = (zone.removeprefix("zones/") for zone in found)
    return [zone for zone in zones if zone.rpartition("-")[0] == region]
