"""Which zones offer a cluster's machine types and endpoints. Operators ask before `make up`; a head never does.

The letters of zones differ between accounts, so a shipped list cannot tell.
https://docs.aws.amazon.com/AWSEC2/latest/APIReference/API_DescribeInstanceTypeOfferings.html
https://docs.aws.amazon.com/vpc/latest/privatelink/interface-endpoints.html#aws-services-azs
"""

from __future__ import annotations

from contextlib import closing

from spotrun.cloud import offers
from spotrun.cloud.aws.api import Clients, call
from spotrun.cloud.offers import Kind, Lack
from spotrun.spec import ClusterSpec


def missing(cluster: ClusterSpec) -> list[Lack]:
    """What the cluster's zones do not offer. Blocking. Raises `CloudError`."""
    asked = offers.needs(cluster)
    types = sorted({need.type for need in asked})

    def look(clients: Clients) -> dict[tuple[Kind, str], set[str]]:
        pages = clients.ec2.get_paginator("describe_instance_type_offerings").paginate(
            LocationType="availability-zone", Filters=[{"Name": "instance-type", "Values": types}]
        )
        found: dict[tuple[Kind, str], set[str]] = {}
        for page in pages:
            for each in page["InstanceTypeOfferings"]:
                found.setdefault(("machine", each["InstanceType"]), set()).add(each["Location"])
        return found

    with closing(Clients(cluster.region)) as clients:
        return offers.lacks(asked, call(look, clients))


def endpoint_zones(region: str) -> dict[str, frozenset[str]]:
    """By the full name of a service: the zones in which it can have an endpoint. Blocking. Raises `CloudError`."""

    def look(clients: Clients) -> dict[str, frozenset[str]]:
        pages = clients.ec2.get_paginator("describe_vpc_endpoint_services").paginate()
        return {
            each["ServiceName"]: frozenset(each["AvailabilityZones"])
            for page in pages
            for each in page["ServiceDetails"]
            if any(kind["ServiceType"] == "Interface" for kind in each["ServiceType"])
        }

    with closing(Clients(region)) as clients:
        return call(look, clients)
