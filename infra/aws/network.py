"""The cluster's network: a subnet for each zone in use, and the rules between machines. Egress is in `egress`.

No rule lets anything in from outside, and no machine has a public address: operators come in through Systems Manager,
whose agent on the head opens the connection. There are no flow logs: each line costs, and nothing reads them.
"""

from __future__ import annotations

import ipaddress
from typing import Any

from infra import cdk
from infra.aws.stack import AwsStack
from spotrun.errors import SpecError
from spotrun.spec.names import HEAD_PORT

NODES, HEAD, ENDPOINTS = "nodes", "head", "endpoints"  # security groups
PRIVATE, PUBLIC = "private", "public"
_PARTS = 3  # bits: the range has 8 parts, seven for zones a to g, the last for the public subnets


def label(cluster: str, *what: str) -> str:
    """The name of a security group, or the tag Name of another thing, by which stack `pools` finds it."""
    return "-".join([cluster, *what])


class Network:
    """The network, as a part of stack `base`."""

    def __init__(self, stack: AwsStack) -> None:
        self._stack, self._cluster = stack, stack.cluster
        name, spec = self._cluster.name, self._cluster.network
        self._vpc = cdk.aws("vpc")(
            stack,
            "vpc",
            cidr_block=spec.cidr,
            enable_dns_support=True,
            enable_dns_hostnames=True,  # endpoints have the names of their services
            **stack.named(name),
        )
        # Every network has this group, and machines without a group would get it.
        cdk.aws("default_security_group")(
            stack, "default-group", vpc_id=self._vpc.id, **stack.named(label(name, "unused"))
        )
        zones = sorted({self._cluster.head.zone, *(pool.zone for pool in self._cluster.pools)})
        private = {zone: self._subnet(PRIVATE, zone, self._cut(part(zone))) for zone in zones}
        routes = self._route_table(PRIVATE, private)
        self._nodes, self._head = self._group(NODES), self._group(HEAD)
        self._connect_machines()
        storage = cdk.aws("vpc_endpoint")(
            stack,
            "endpoint-s3",
            vpc_id=self._vpc.id,
            service_name=f"com.amazonaws.{self._cluster.region}.s3",
            vpc_endpoint_type="Gateway",
            route_table_ids=[routes.id],
            **stack.named(label(name, "s3")),
        )
        if spec.nat:
            self._allow_internet(zones)
        else:
            self._allow_endpoints(storage)

    def _cut(self, index: int) -> ipaddress.IPv4Network:
        return list(ipaddress.IPv4Network(self._cluster.network.cidr).subnets(_PARTS))[index]

    def _subnet(self, what: str, zone: str, addresses: ipaddress.IPv4Network) -> Any:
        return cdk.aws("subnet")(
            self._stack,
            f"{what}-{zone}",
            vpc_id=self._vpc.id,
            availability_zone=zone,
            cidr_block=str(addresses),
            map_public_ip_on_launch=False,
            **self._stack.named(label(self._cluster.name, what, zone)),
        )

    def _route_table(self, what: str, subnets: dict[str, Any]) -> Any:
        name = label(self._cluster.name, what)
        table = cdk.aws("route_table")(self._stack, f"{what}-routes", vpc_id=self._vpc.id, **self._stack.named(name))
        for zone, subnet in subnets.items():
            cdk.aws("route_table_association")(
                self._stack, f"{what}-routes-{zone}", route_table_id=table.id, subnet_id=subnet.id
            )
        return table

    def _group(self, what: str) -> Any:
        name = label(self._cluster.name, what)
        return cdk.aws("security_group")(
            self._stack,
            what,
            name=name,
            description=f"spotrun cluster {self._cluster.name}: {what}",
            vpc_id=self._vpc.id,
            **self._stack.named(name),
        )

    def _connect_machines(self) -> None:
        """Rules between the cluster's machines. DNS, time and metadata need no rule."""
        nodes, head = self._nodes.id, self._head.id
        # EFA requires exactly this: everything, in both directions, between members of the group.
        # https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/efa-start-nccl.html#nccl-start-base-setup
        self._in("nodes-from-nodes", nodes, None, referenced_security_group_id=nodes)
        self._out("nodes-to-nodes", nodes, None, referenced_security_group_id=nodes)
        self._in("nodes-from-head", nodes, 22, referenced_security_group_id=head)
        self._out("head-to-nodes", head, 22, referenced_security_group_id=nodes)
        self._in("head-from-nodes", head, HEAD_PORT, referenced_security_group_id=nodes)
        self._out("nodes-to-head", nodes, HEAD_PORT, referenced_security_group_id=head)

    def _allow_internet(self, zones: list[str]) -> None:
        """Let machines reach the internet by HTTPS, through the NAT gateway that `egress` puts into a public subnet."""
        gateway = cdk.aws("internet_gateway")(
            self._stack, "internet", vpc_id=self._vpc.id, **self._stack.named(self._cluster.name)
        )
        ranges = list(self._cut(-1).subnets(_PARTS))
        routes = self._route_table(PUBLIC, {zone: self._subnet(PUBLIC, zone, ranges[part(zone)]) for zone in zones})
        cdk.aws("route")(
            self._stack,
            "public-default",
            route_table_id=routes.id,
            destination_cidr_block="0.0.0.0/0",
            gateway_id=gateway.id,
        )
        for what, group in ((NODES, self._nodes), (HEAD, self._head)):
            self._out(f"{what}-to-internet", group.id, 443, cidr_ipv4="0.0.0.0/0")

    def _allow_endpoints(self, storage: Any) -> None:
        """Let machines reach only the bucket and the endpoints of AWS's own services, not the internet."""
        group = self._group(ENDPOINTS)
        for what, members in ((NODES, self._nodes), (HEAD, self._head)):
            self._in(f"endpoints-from-{what}", group.id, 443, referenced_security_group_id=members.id)
            self._out(f"{what}-to-endpoints", members.id, 443, referenced_security_group_id=group.id)
            self._out(f"{what}-to-s3", members.id, 443, prefix_list_id=storage.prefix_list_id)

    def _in(self, what: str, group: str, port: int | None, **source: str) -> None:
        self._rule("ingress", what, group, port, source)

    def _out(self, what: str, group: str, port: int | None, **target: str) -> None:
        self._rule("egress", what, group, port, target)

    def _rule(self, direction: str, what: str, group: str, port: int | None, other: dict[str, str]) -> None:
        """port: of TCP; None: everything."""
        ports = {"ip_protocol": "-1"} if port is None else {"ip_protocol": "tcp", "from_port": port, "to_port": port}
        cdk.aws(f"vpc_security_group_{direction}_rule")(
            self._stack, what, security_group_id=group, description=what.replace("-", " "), **ports, **other
        )


def part(zone: str) -> int:
    """The zone's part of the network's range. It does not depend on the other zones. Raises `SpecError`."""
    index = ord(zone[-1]) - ord("a")
    if index >= (1 << _PARTS) - 1:
        raise SpecError(f"zone {zone}: AWS has no zone with this letter; take one from a to f that the region has")
    return index
