"""Machine images: which exist, which were baked, what uses them. Only operators call this, never a head."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from datetime import datetime
from functools import partial
from typing import TYPE_CHECKING

from spotrun.cloud.aws.api import Clients, call
from spotrun.cloud.base import Image

if TYPE_CHECKING:
    from mypy_boto3_ec2.client import EC2Client
    from mypy_boto3_ec2.type_defs import FilterTypeDef, ImageTypeDef

_TAG = "spotrun-commit"  # images/spotrun.pkr.hcl puts it on each image
_ALIVE = ["pending", "running", "stopping", "stopped"]


def exist(region: str, owners: Sequence[str], filters: Mapping[str, Sequence[str]]) -> bool:
    """Whether Terraform's `aws_ami` would find an image. No owners: any owner. Blocking. Raises `CloudError`."""
    asked: list[FilterTypeDef] = [{"Name": name, "Values": values} for name, values in filters.items()]
    with closing(Clients(region)) as clients:
        return bool(call(lambda: clients.ec2.describe_images(Owners=owners, Filters=asked))["Images"])


def has_default_network(region: str) -> bool:
    """Whether the account has a default VPC with a subnet in it. Blocking. Raises `CloudError`."""
    asked: list[FilterTypeDef] = [{"Name": "default-for-az", "Values": ["true"]}]
    with closing(Clients(region)) as clients:
        return bool(call(lambda: clients.ec2.describe_subnets(Filters=asked))["Subnets"])


def baked(region: str) -> list[Image]:
    """The account's images that `make image` made, newest first. Blocking. Raises `CloudError`."""
    with closing(Clients(region)) as clients:
        return call(lambda: _baked(clients.ec2))


def remove(region: str, image: Image) -> None:
    """Deregister an image and delete its snapshots. Blocking. Raises `CloudError`."""
    with closing(Clients(region)) as clients:
        call(lambda: clients.ec2.deregister_image(ImageId=image.id))
        for snapshot in image.snapshots:
            call(partial(clients.ec2.delete_snapshot, SnapshotId=snapshot))


def _baked(ec2: EC2Client) -> list[Image]:
    asked: list[FilterTypeDef] = [{"Name": "tag-key", "Values": [_TAG]}]
    pages = ec2.get_paginator("describe_images").paginate(Owners=["self"], Filters=asked)
    listed = [each for page in pages for each in page["Images"]]
    sizes, users = _sizes(ec2, {snapshot for each in listed for snapshot in _snapshots(each)}), _users(ec2)
    found = [
        Image(
            name=each["Name"],
            id=each["ImageId"],
            made=datetime.fromisoformat(each["CreationDate"]).timestamp(),
            gigabytes=sum(sizes.get(snapshot, 0.0) for snapshot in _snapshots(each)),
            snapshots=_snapshots(each),
            users=tuple(sorted(users[each["ImageId"]])),
        )
        for each in listed
    ]
    return sorted(found, key=lambda image: image.made, reverse=True)


def _snapshots(image: ImageTypeDef) -> tuple[str, ...]:
    disks = [each["Ebs"] for each in image.get("BlockDeviceMappings", []) if "Ebs" in each]
    return tuple(disk["SnapshotId"] for disk in disks if "SnapshotId" in disk)


def _sizes(ec2: EC2Client, snapshots: Iterable[str]) -> dict[str, float]:
    """GB by snapshot. Deleted snapshots are absent."""
    asked: list[FilterTypeDef] = [{"Name": "snapshot-id", "Values": sorted(snapshots)}]
    if not asked[0]["Values"]:
        return {}
    pages = ec2.get_paginator("describe_snapshots").paginate(OwnerIds=["self"], Filters=asked)
    return {
        each["SnapshotId"]: each.get("FullSnapshotSizeInBytes", 0) / 2**30 or float(each["VolumeSize"])
        for page in pages
        for each in page["Snapshots"]
    }


def _users(ec2: EC2Client) -> defaultdict[str, set[str]]:
    """By image: the region's launch templates and machines that start from it."""
    found: defaultdict[str, set[str]] = defaultdict(set)
    templates = ec2.get_paginator("describe_launch_template_versions").paginate(Versions=["$Latest", "$Default"])
    for version in (each for page in templates for each in page["LaunchTemplateVersions"]):
        found[version["LaunchTemplateData"].get("ImageId", "")].add(version["LaunchTemplateName"])
    asked: list[FilterTypeDef] = [{"Name": "instance-state-name", "Values": _ALIVE}]
    for page in ec2.get_paginator("describe_instances").paginate(Filters=asked):
        for machine in (each for reservation in page["Reservations"] for each in reservation["Instances"]):
            found[machine["ImageId"]].add(machine["InstanceId"])
    return found
