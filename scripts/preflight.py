"""What must be there before Terraform is asked for anything: tools, quotas, offers, images. A line for each lack."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from scripts import console, stacks
from scripts.make_command import make_command
from scripts.transports import require
from spotrun import cloud
from spotrun.cloud import Shortfall
from spotrun.errors import CloudError, QuotaError, SpotrunError
from spotrun.spec import ClusterSpec
from spotrun.spec.names import HEAD

_QUOTAS = {"gcp": "console.cloud.google.com/iam-admin/quotas", "aws": "console.aws.amazon.com/servicequotas"}


def check_tools(cluster: ClusterSpec) -> None:
    """Raise `SpotrunError` unless this machine has the programs that the cluster's cloud needs."""
    stacks.check_tools()
    for tool in ("gcloud",) if cluster.cloud == "gcp" else ("aws", "session-manager-plugin"):
        require(tool)


def check_quotas(cluster: ClusterSpec, ask: cloud.Ask, needs_all: bool = False) -> None:
    """Raise `QuotaError` if a pool could not have a single machine; say on stderr if it could not have all.

    needs_all: a pool that could not have all its machines is an error, too.
    """
    none: list[str] = []
    for shortfall in ask(lambda each: each.shortfalls()):
        pool = cluster.pool(shortfall.pool)
        least = shortfall.needs / (pool.max if pool and not needs_all else 1)
        line = _line(cluster, shortfall)
        if shortfall.certain and shortfall.has - shortfall.used < least:
            none.append(line)
        else:
            console.warn(f"spotrun: {line}")
    if none:
        raise QuotaError("\n".join(none))


def check_offers(cluster: ClusterSpec, file: str) -> None:
    """Raise `SpotrunError` if a zone does not offer what the cluster file asks of it: no machine would ever come."""
    if cluster.cloud == "gcp":
        from spotrun.cloud.gcp.offers import missing
    else:
        from spotrun.cloud.aws.offers import missing
    if lacks := missing(cluster):
        raise SpotrunError("\n".join(f"{file}: {lack.text()}" for lack in lacks))


def check_disk_key(cluster: ClusterSpec) -> None:
    """Say on stderr if AWS may be unable to encrypt the machines' disks. Without an answer of AWS: say nothing.

    https://docs.aws.amazon.com/autoscaling/ec2/userguide/key-policy-requirements-EBS-encryption.html
    """
    if cluster.cloud != "aws":
        return
    from spotrun.cloud.aws.disk_key import AWS_OWN, default

    try:
        key = default(cluster.region)
    except CloudError:
        return  # the right to ask may be missing, and `make up` does without
    if not key.endswith(AWS_OWN):
        console.warn(
            f"spotrun: the account's default key for disks in {cluster.region} is {key}, not {AWS_OWN}. If the policy"
            " of this key does not allow role AWSServiceRoleForAutoScaling to use it, each machine ends seconds after"
            " its start (Client.InvalidKMSKey.InvalidState). Allow this role kms:CreateGrant, kms:Decrypt,"
            " kms:DescribeKey, kms:Encrypt, kms:GenerateDataKey* and kms:ReEncrypt* there"
        )


def check_images(cluster: ClusterSpec, pools: dict[str, Any], file: str) -> None:
    """Raise `SpotrunError` unless the images that stack pools takes are there. pools: what Terraform reads of it."""
    for name, arm in _google(cluster, pools) if cluster.cloud == "gcp" else _amazon(cluster, pools):
        image = make_command(file, "image")
        if arm:
            what = f"`{image}` bakes none for ARM processors; take other machines, or make one as docs/aws.md says"
        elif cluster.image:
            what = f"fix key image, or leave it out and `{image}` bakes one"
        else:
            what = f"`{image}` bakes one"
        raise SpotrunError(f"{file}: there is no image {name}: {what}")


def check_endpoints(cluster: ClusterSpec, pools: dict[str, Any], file: str) -> None:
    """Raise `SpotrunError` if the head's zone lacks an endpoint of stack pools. pools: what Terraform reads of it."""
    wanted = {each["service_name"] for each in pools.get("resource", {}).get("aws_vpc_endpoint", {}).values()}
    if not wanted:
        return
    from spotrun.cloud.aws.offers import endpoint_zones

    if problem := missing_endpoints(cluster.head.zone, sorted(wanted), endpoint_zones(cluster.region)):
        raise SpotrunError(f"{file}: {problem}")


def missing_endpoints(zone: str, services: list[str], known: Mapping[str, frozenset[str]]) -> str:
    """What to do if this zone lacks an endpoint of these services; empty if it has all. known: their zones. Pure."""
    found = {service: known.get(service, frozenset[str]()) for service in services}
    lacking = ", ".join(service for service, zones in found.items() if zone not in zones)
    if not lacking:
        return ""
    whole = ", ".join(sorted(frozenset.intersection(*found.values())))
    what = f"zone {zone} has no endpoint of {lacking}, and network.nat is false"
    if not whole:
        return f"{what}: no zone of the region has all endpoints, so set network.nat to true"
    return f"{what}: set head.zone to a zone with all endpoints ({whole}), or network.nat to true"


def _google(cluster: ClusterSpec, pools: dict[str, Any]) -> Iterator[tuple[str, bool]]:
    """Images that are not there; whether they are for ARM."""
    from spotrun.cloud.gcp import images

    for asked in pools["data"]["google_compute_image"].values():
        name = f"family/{asked['family']}" if "family" in asked else asked["name"]
        path = f"projects/{asked['project']}/global/images/{name}"
        if not images.exists(cluster.project or "", path):
            yield path, False


def _amazon(cluster: ClusterSpec, pools: dict[str, Any]) -> Iterator[tuple[str, bool]]:
    from spotrun.cloud.aws import images

    for asked in pools["data"]["aws_ami"].values():
        filters = {each["name"]: each["values"] for each in asked["filter"]}
        if not images.exist(cluster.region, asked.get("owners", []), filters):
            (name,), (processor,) = filters.get("image-id") or filters["name"], filters["architecture"]
            whose = " of this account" if "owners" in asked else ""
            yield f"{name} for {processor} in {cluster.region}{whose}", processor == "arm64"


def _line(cluster: ClusterSpec, found: Shortfall) -> str:
    used = f", {found.used:g} of them in use" if found.used else ""
    is_head = found.pool == HEAD
    who, what = ("head", "its machine") if is_head else (f"pool {found.pool}", "the pool's max")
    return (
        f"{who}: quota {found.quota} in {cluster.region} is {found.has:g}{used}; {what} takes {found.needs:g}: ask for"
        f" more at {_QUOTAS[cluster.cloud]}{'' if is_head else ', or lower max'}"
    )
