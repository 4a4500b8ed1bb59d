"""What an operator may do in an account, found by trying, and what exists of a cluster. For `make acceptance` only."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import boto3
from botocore.exceptions import BotoCoreError, ClientError

from spotrun.cloud import prices
from spotrun.cloud.aws.api import Clients, call
from spotrun.cloud.aws.errors import refusal
from spotrun.cloud.base import Left
from spotrun.errors import CredentialsError
from spotrun.spec import ClusterSpec, names

# EC2's answer to a dry run of a call that would have been allowed:
# https://docs.aws.amazon.com/AWSEC2/latest/APIReference/CommonParameters.html
_ALLOWED = "DryRunOperation"
_GONE = {"terminated", "shutting-down", "deleted", "deleting", "failed"}
_MONTH = 730  # hours
_GATEWAY, _ADDRESS, _ENDPOINT, _GB = 0.045, 0.005, 0.01, 0.08 / _MONTH  # as docs/aws.md has them

Attempt = tuple[str, Callable[[], Any]]


def permissions(cluster: ClusterSpec) -> tuple[list[str], list[str]]:
    """Calls that stacks and tasks make: (the allowed ones, the refused ones). Creates nothing. Raises `CloudError`."""
    allowed: list[str] = []
    refused: list[str] = []
    with closing(Clients(cluster.region)) as clients:
        for name, attempt in _attempts(clients, cluster):
            (allowed if _may(attempt) else refused).append(name)
    return allowed, refused


def left(cluster: ClusterSpec) -> list[Left]:
    """Everything with the cluster's tag that still exists. Blocking. Raises `CloudError`."""
    with closing(Clients(cluster.region)) as clients:
        return call(lambda: list(_left(clients, cluster)))


def disk_keys(cluster: ClusterSpec) -> list[str]:
    """The ARNs of the KMS keys of the cluster's encrypted disks. Raises `CloudError`."""
    ours: Any = [{"Name": f"tag:{names.CLUSTER}", "Values": [cluster.name]}]
    with closing(Clients(cluster.region)) as clients:
        found = call(lambda: clients.ec2.describe_volumes(Filters=ours))["Volumes"]
    return sorted({each["KmsKeyId"] for each in found if each.get("Encrypted") and each.get("KmsKeyId")})


def _may(attempt: Callable[[], Any]) -> bool:
    """Whether the account may do it. AWS checks rights first, so a complaint about the request means: allowed."""
    try:
        attempt()
    except ClientError as error:
        code = error.response.get("Error", {}).get("Code", "")
        found = refusal(error)
        if code == _ALLOWED or not isinstance(found, CredentialsError):
            return True
        if "may not do" in str(found):
            return False
        raise found from error
    except BotoCoreError as error:
        raise refusal(error) from error
    return True


def _attempts(clients: Clients, cluster: ClusterSpec) -> Iterator[Attempt]:
    """Dry runs where EC2 has them, with Terraform's tags; otherwise calls that only read."""
    ec2, name = clients.ec2, names.group(cluster.name, names.HEAD)

    def tagged(kind: str) -> Any:
        return [{"ResourceType": kind, "Tags": [{"Key": names.CLUSTER, "Value": cluster.name}]}]

    def gateway() -> Any:
        return ec2.create_internet_gateway(DryRun=True, TagSpecifications=tagged("internet-gateway"))

    def address() -> Any:
        return ec2.allocate_address(Domain="vpc", DryRun=True, TagSpecifications=tagged("elastic-ip"))

    def template() -> Any:
        data: Any = {"InstanceType": cluster.head.machine}
        return ec2.create_launch_template(LaunchTemplateName=name, LaunchTemplateData=data, DryRun=True)

    network = cluster.network.cidr
    yield "ec2:CreateVpc", lambda: ec2.create_vpc(CidrBlock=network, DryRun=True, TagSpecifications=tagged("vpc"))
    yield "ec2:CreateInternetGateway", gateway
    yield "ec2:AllocateAddress", address
    yield "ec2:CreateLaunchTemplate", template
    yield (
        "ec2:CreatePlacementGroup",
        lambda: ec2.create_placement_group(GroupName=name, Strategy="cluster", DryRun=True),
    )
    yield (
        "autoscaling:DescribeAutoScalingGroups",
        lambda: clients.autoscaling.describe_auto_scaling_groups(MaxRecords=1),
    )
    yield "iam:GetRole", lambda: boto3.client("iam", region_name=cluster.region).get_role(RoleName=name)


def _left(clients: Clients, cluster: ClusterSpec) -> Iterator[Left]:
    ec2 = clients.ec2
    ours: Any = [{"Name": f"tag:{names.CLUSTER}", "Values": [cluster.name]}]

    def pages(what: str, key: str) -> Iterator[Any]:
        for page in ec2.get_paginator(what).paginate(Filters=ours):  # type: ignore[call-overload]
            yield from page[key]

    for machine in (each for found in pages("describe_instances", "Reservations") for each in found["Instances"]):
        if machine["State"]["Name"] not in _GONE:
            kind = machine["InstanceType"]
            yield Left("machine", machine["InstanceId"], prices.on_demand("aws", cluster.region, kind))
    for volume in pages("describe_volumes", "Volumes"):
        if volume["State"] not in _GONE:
            yield Left("disk", volume["VolumeId"], volume["Size"] * _GB)
    for gateway in pages("describe_nat_gateways", "NatGateways"):
        if gateway["State"] not in _GONE:
            yield Left("NAT gateway", gateway["NatGatewayId"], _GATEWAY)
    for address in ec2.describe_addresses(Filters=ours)["Addresses"]:
        yield Left("address", address["AllocationId"], _ADDRESS)
    for endpoint in pages("describe_vpc_endpoints", "VpcEndpoints"):
        if endpoint["State"].lower() not in _GONE:
            billed = endpoint["VpcEndpointType"] == "Interface"
            zones = len(endpoint.get("SubnetIds", []))
            yield Left("endpoint", endpoint["VpcEndpointId"], zones * _ENDPOINT if billed else 0.0, stays=not billed)
    for network in pages("describe_vpcs", "Vpcs"):
        yield Left("network", network["VpcId"], stays=True)
    for group in clients.autoscaling.describe_auto_scaling_groups(Filters=ours)["AutoScalingGroups"]:
        yield Left("scaling group", group["AutoScalingGroupName"])
