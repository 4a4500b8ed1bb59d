"""How a cluster's machines reach the internet (a NAT gateway), or only AWS's own services (endpoints).

Both cost by the hour, so they belong to stack `pools`: a cluster that is down does not pay for them. They are only in
the head's zone, because each further zone would cost the same again. The other zones reach them there.
"""

from __future__ import annotations

from typing import Any

from infra import cdk
from infra.aws.network import ENDPOINTS, PRIVATE, PUBLIC, label
from infra.aws.stack import AwsStack

# What machines call in addition to S3.
# https://docs.aws.amazon.com/vpc/latest/privatelink/aws-services-privatelink-support.html
# ec2messages is absent: Systems Manager's agents do not need it since 3.3.40.
# https://docs.aws.amazon.com/systems-manager/latest/userguide/setup-create-vpc.html
SERVICES = ("autoscaling", "ec2", "fis", "ssm", "ssmmessages")


def make(stack: AwsStack, subnet: Any) -> list[Any]:
    """Make the NAT gateway or the endpoints. Returns what must exist before the head.

    If Systems Manager's agent on the head cannot connect at first, it pauses for long before it retries. subnet: the
    private subnet of the head's zone.
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
