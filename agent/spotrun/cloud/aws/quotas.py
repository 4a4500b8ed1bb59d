"""The account's quotas, compared with what the pools need. EC2 counts the vCPUs of a family's running machines.

Quotas and their codes: https://docs.aws.amazon.com/ec2/latest/instancetypes/ec2-instance-quotas.html
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from spotrun.cloud.aws.api import Clients
from spotrun.cloud.base import Market, Shortfall
from spotrun.spec import ClusterSpec, names


@dataclass(frozen=True)
class Quota:
    """A quota of Service Quotas. Its value is a number of vCPUs."""

    code: str  # such as L-3819A6DF
    name: str  # what AWS calls it


_STANDARD = "Standard (A, C, D, H, I, M, R, T, Z)"
# The letters at the start of a machine type, and its quotas. P has a second quota for spot.
_FAMILIES: dict[str, dict[Market, Quota]] = {
    family: {"on-demand": Quota(running, f"Running On-Demand {name} instances"), "spot": Quota(spot, spots)}
    for family, name, running, spot, spots in (
        ("standard", _STANDARD, "L-1216C47A", "L-34B43A08", f"All {_STANDARD} Spot Instance Requests"),
        ("g", "G and VT", "L-DB2E81BA", "L-3819A6DF", "All G and VT Spot Instance Requests"),
        ("p", "P", "L-417A185B", "L-7212CCBC", "All P4, P3 and P2 Spot Instance Requests"),
        ("f", "F", "L-74FC7D96", "L-88CF9481", "All F Spot Instance Requests"),
        ("x", "X", "L-7295265B", "L-E3A00192", "All X Spot Instance Requests"),
        ("inf", "Inf", "L-1945791B", "L-B5D1601B", "All Inf Spot Instance Requests"),
        ("trn", "Trn", "L-2C3B7624", "L-6B0D517C", "All Trn Spot Instance Requests"),
        ("dl", "DL", "L-6E869C2A", "L-85EED4F7", "All DL Spot Instance Requests"),
    )
}
_P5_SPOT = Quota("L-C4BD4855", "All P5 Spot Instance Requests")
_ALIASES = {"vt": "g", "gr": "g"} | dict.fromkeys(["a", "c", "d", "h", "i", "im", "is", "m", "r", "t", "z"], "standard")


def quota_of(machine: str, market: Market) -> Quota | None:
    """The quota that counts a machine type; None if it is not known here (P6 on spot, hpc, mac, u)."""
    match = re.match(r"([a-z]+)(\d+)", machine)
    if match is None:
        return None
    letters, generation = match[1], int(match[2])
    if letters == "p" and market == "spot" and generation > 4:
        return _P5_SPOT if generation == 5 else None
    return _FAMILIES.get(_ALIASES.get(letters, letters), {}).get(market)


def shortfalls(cluster: ClusterSpec, vcpus: Mapping[str, int], allowed: Mapping[str, float]) -> list[Shortfall]:
    """The pools, and the head, for whose machines the account's quotas are too small. Pure.

    vcpus: by machine type. allowed: the quotas' values by code; nothing is said about absent quotas. The needs of pools
    with the same quota are not added up, because pools stand in for each other.
    """
    found = []
    for pool, machine, market, count in _wanted(cluster):
        quota, needs = quota_of(machine, market), count * vcpus.get(machine, 0)
        if quota and quota.code in allowed and allowed[quota.code] < needs:
            said = f"{quota.name} ({quota.code}, in vCPUs)"
            found.append(Shortfall(pool, said, float(allowed[quota.code]), float(needs)))
    return found


def look(clients: Clients, cluster: ClusterSpec) -> list[Shortfall]:
    """`shortfalls` with the account's present quotas. Blocking."""
    wanted = list(_wanted(cluster))
    pages = clients.ec2.get_paginator("describe_instance_types").paginate(
        InstanceTypes=sorted({machine for _, machine, _, _ in wanted})  # type: ignore[misc]
    )
    vcpus = {
        str(each["InstanceType"]): each["VCpuInfo"]["DefaultVCpus"] for page in pages for each in page["InstanceTypes"]
    }
    codes = {quota.code for _, machine, market, _ in wanted if (quota := quota_of(machine, market))}
    values = {code: _value(clients, code) for code in sorted(codes)}
    return shortfalls(cluster, vcpus, {code: value for code, value in values.items() if value is not None})


def _wanted(cluster: ClusterSpec) -> Iterable[tuple[str, str, Market, int]]:
    """(pool, machine type, market, most machines)"""
    yield names.HEAD, cluster.head.machine, "on-demand", 1
    for pool in cluster.pools:
        yield pool.name, pool.machine, pool.market, pool.max


def _value(clients: Clients, code: str) -> float | None:
    """The account's value, or the default of new accounts; None if the region does not have the quota."""
    quotas = clients.quotas
    for read in (quotas.get_service_quota, quotas.get_aws_default_service_quota):
        try:
            return read(ServiceCode="ec2", QuotaCode=code)["Quota"]["Value"]
        except quotas.exceptions.NoSuchResourceException:
            continue
    return None
