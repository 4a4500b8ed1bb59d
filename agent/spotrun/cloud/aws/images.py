"""Whether there are machine images; asked by the operator before `make up` makes anything, never by a head."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from spotrun.cloud.aws.sdk import Clients, call

if TYPE_CHECKING:
    from mypy_boto3_ec2.type_defs import FilterTypeDef


def exist(region: str, owners: Sequence[str], filters: Mapping[str, Sequence[str]]) -> bool:
    """Whether Terraform's `aws_ami` would find any. owners: none: anyone's. Blocking. Raises `CloudError`."""
    clients = Clients(region)
    asked: list[FilterTypeDef] = [{"Name": name, "Values": values} for name, values in filters.items()]
    try:
        return bool(call(lambda: clients.ec2.describe_images(Owners=owners, Filters=asked))["Images"])
    finally:
        clients.close()


def has_default_network(region: str) -> bool:
    """Whether the account has a default VPC with a subnet in it. Blocking. Raises `CloudError`."""
    clients = Clients(region)
    asked: list[FilterTypeDef] = [{"Name": "default-for-az", "Values": ["true"]}]
    try:
        return bool(call(lambda: clients.ec2.describe_subnets(Filters=asked))["Subnets"])
    finally:
        clients.close()
