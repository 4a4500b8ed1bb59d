"""The way out of a cluster that is up: to the internet, or to AWS's own services alone.

Either costs by the hour, so it is in stack `pools`, and a cluster that is down pays for neither. It is in the head's
zone, where the others reach it, as each zone would cost again.
"""

from __future__ import annotations

from typing import Any

from infra import cdk
from infra.aws.network import ENDPOINTS, PRIVATE, PUBLIC, label
from infra.aws.stack import AwsStack

# What machines call besides S3.
# https://docs.aws.amazon.com/vpc/latest/privatelink/aws-services-privatelink-support.html
# Not ec2messages: agents of Systems Manager since 3.3.40 do without.
# https://docs.aws.amazon.com/systems-manager/latest/userguide/setup-create-vpc.html
SERVICES = ("autoscaling", "ec2", "fis", "servicequotas", "ssm", "ssmmessages")


def make(stack: AwsStack, subnet: Any) -> list[Any]:
    """What must be there before the head is, whose agent gives up on Systems Manager for long when it is not in reach.

    subnet: the private one of the head's zone.
    """
    return [_nat(stack)] if stack.cluster.network.nat else _endpoints(stack, subnet)


def _nat(stack: AwsStack) -> Any:
    name = stack.cluster.name
    public = stack.find("subnet", "public-subnet", label(name, PUBLIC, stack.cluster.head.zone))
    routes = stack.find("route_table", "private-routes", label(name, PRIVATE))
    address = cdk.aws("eip")(stack, "nat-address", domain="vpc", **stack.named(label(name, "nat")))
    nat = cdk.aws("nat_gateway")(
        stack, "nat", allocation_id=address.allocation_id, subnet_id=public.id, **stack.named(label(name, "nat"))
    )
    return cdk.aws("route")(
        stack,
        "private-default",
        route_table_id=routes.id,
        destination_cidr_block="0.0.0.0/0",
        nat_gateway_id=nat.id,
    )


def _endpoints(stack: AwsStack, subnet: Any) -> list[Any]:
    name = stack.cluster.name
    group = stack.find("security_group", "endpoints-members", label(name, ENDPOINTS))
    return [
        cdk.aws("vpc_endpoint")(
            stack,
            f"endpoint-{service}",
            vpc_id=subnet.vpc_id,
            service_name=f"com.amazonaws.{stack.cluster.region}.{service}",
            vpc_endpoint_type="Interface",
            subnet_ids=[subnet.id],
            security_group_ids=[group.id],
            private_dns_enabled=True,
            **stack.named(label(name, service)),
        )
        for service in SERVICES
    ]
