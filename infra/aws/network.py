"""The cluster's network: a private subnet for each zone in use, a way out, and who may talk to whom.

Only the operator comes in, and only through Systems Manager, whose agent on the head calls out: there is no rule that
lets anything in from outside, and no machine has a public address. There are no flow logs: each line of them costs, and
nothing here would read them.
"""

from __future__ import annotations

import ipaddress
from typing import Any

from infra import cdk
from infra.aws.stack import AwsStack
from spotrun.errors import SpecError

HEAD_PORT = 8470  # spotrun.head.server.PORT
_PARTS = 3  # bits: the range is cut in 8, seven of them for zones a to g, the last for the NAT gateway
# What machines call besides S3, without a NAT gateway. https://docs.aws.amazon.com/vpc/latest/privatelink/aws-services-privatelink-support.html
# Not ec2messages: agents since 3.3.40 do with ssmmessages (https://docs.aws.amazon.com/systems-manager/latest/userguide/setup-create-vpc.html).
ENDPOINTS = ("autoscaling", "ec2", "fis", "logs", "monitoring", "servicequotas", "ssm", "ssmmessages")


NODES, HEAD = "nodes", "head"  # security groups


def label(cluster: str, what: str) -> str:
    """The name of a security group, and the tag Name of a zone's subnet: by these, stack `pools` finds them."""
    return f"{cluster}-{what}"


class Network:
    """Of the stack that it is made in."""

    def __init__(self, stack: AwsStack) -> None:
        self._stack, self._cluster = stack, stack.cluster
        name, spec = self._cluster.name, self._cluster.network
        self._vpc = cdk.aws("vpc")(
            stack,
            "vpc",
            cidr_block=spec.cidr,
            enable_dns_support=True,
            enable_dns_hostnames=True,  # endpoints answer to their services' own names
            **stack.named(name),
        )
        # Every network has one, and machines that name none would get it.
        cdk.aws("default_security_group")(
            stack, "default-group", vpc_id=self._vpc.id, **stack.named(label(name, "unused"))
        )
        zones = sorted({self._cluster.head.zone, *(pool.zone for pool in self._cluster.pools)})
        self._subnets = {zone: self._subnet(zone, zone, part(zone)) for zone in zones}
        self._routes = self._route_table("private", self._subnets)
        self._storage = self._endpoint("s3", "Gateway", route_table_ids=[self._routes.id])
        self._nodes, self._head = self._group(NODES), self._group(HEAD)
        self._inside()
        if spec.nat:
            self._nat()
        else:
            self._endpoints()

    def _subnet(self, what: str, zone: str, index: int) -> Any:
        ranges = list(ipaddress.IPv4Network(self._cluster.network.cidr).subnets(_PARTS))
        return cdk.aws("subnet")(
            self._stack,
            f"subnet-{what}",
            vpc_id=self._vpc.id,
            availability_zone=zone,
            cidr_block=str(ranges[index]),
            map_public_ip_on_launch=False,
            **self._stack.named(label(self._cluster.name, what)),
        )

    def _route_table(self, what: str, subnets: dict[str, Any]) -> Any:
        name = label(self._cluster.name, what)
        table = cdk.aws("route_table")(self._stack, f"{what}-routes", vpc_id=self._vpc.id, **self._stack.named(name))
        for key, subnet in subnets.items():
            cdk.aws("route_table_association")(
                self._stack, f"{what}-routes-{key}", route_table_id=table.id, subnet_id=subnet.id
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

    def _inside(self) -> None:
        """Between the cluster's machines. DNS, time and metadata need no rule, AWS lets them pass."""
        nodes, head = self._nodes.id, self._head.id
        # All, in both directions, between members of the group itself: EFA wants it in these very words.
        # https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/efa-start-nccl.html#nccl-start-base-setup
        self._in("nodes-from-nodes", nodes, None, referenced_security_group_id=nodes)
        self._out("nodes-to-nodes", nodes, None, referenced_security_group_id=nodes)
        self._in("nodes-from-head", nodes, 22, referenced_security_group_id=head)
        self._out("head-to-nodes", head, 22, referenced_security_group_id=nodes)
        self._in("head-from-nodes", head, HEAD_PORT, referenced_security_group_id=nodes)
        self._out("nodes-to-head", nodes, HEAD_PORT, referenced_security_group_id=head)

    def _nat(self) -> None:
        """A way out to the internet, by HTTPS. One gateway, in the head's zone: it costs more than the head."""
        stack, name = self._stack, self._cluster.name
        public = self._subnet("public", self._cluster.head.zone, (1 << _PARTS) - 1)
        gateway = cdk.aws("internet_gateway")(stack, "internet", vpc_id=self._vpc.id, **stack.named(name))
        self._default_route("public", self._route_table("public", {"public": public}), gateway_id=gateway.id)
        address = cdk.aws("eip")(
            stack, "nat-address", domain="vpc", depends_on=[gateway], **stack.named(label(name, "nat"))
        )
        nat = cdk.aws("nat_gateway")(
            stack,
            "nat",
            allocation_id=address.allocation_id,
            subnet_id=public.id,
            depends_on=[gateway],
            **stack.named(name),
        )
        self._default_route("private", self._routes, nat_gateway_id=nat.id)
        for what, group in ((NODES, self._nodes), (HEAD, self._head)):
            self._out(f"{what}-to-internet", group.id, 443, cidr_ipv4="0.0.0.0/0")

    def _endpoints(self) -> None:
        """AWS's own services alone. In one zone, as each costs by the hour in each; the others reach them there."""
        group = self._group("endpoints")
        for what, members in ((NODES, self._nodes), (HEAD, self._head)):
            self._in(f"endpoints-from-{what}", group.id, 443, referenced_security_group_id=members.id)
            self._out(f"{what}-to-endpoints", members.id, 443, referenced_security_group_id=group.id)
            self._out(f"{what}-to-s3", members.id, 443, prefix_list_id=self._storage.prefix_list_id)
        for service in ENDPOINTS:
            self._endpoint(
                service,
                "Interface",
                subnet_ids=[self._subnets[self._cluster.head.zone].id],
                security_group_ids=[group.id],
                private_dns_enabled=True,
            )

    def _endpoint(self, service: str, kind: str, **options: Any) -> Any:
        return cdk.aws("vpc_endpoint")(
            self._stack,
            f"endpoint-{service}",
            vpc_id=self._vpc.id,
            service_name=f"com.amazonaws.{self._cluster.region}.{service}",
            vpc_endpoint_type=kind,
            **options,
            **self._stack.named(label(self._cluster.name, service)),
        )

    def _default_route(self, what: str, table: Any, **target: str) -> None:
        cdk.aws("route")(
            self._stack, f"{what}-default", route_table_id=table.id, destination_cidr_block="0.0.0.0/0", **target
        )

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
    """Which part of the network's range a zone has; it stays the same when others come and go. Raises `SpecError`."""
    index = ord(zone[-1]) - ord("a")
    if index >= (1 << _PARTS) - 1:
        raise SpecError(f"zone {zone}: AWS has no zone of that letter; zones are a to f, and in no region all of them")
    return index
