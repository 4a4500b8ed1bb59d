"""Which cluster this machine is the head of. The machine's own metadata name it; the bucket must agree. Pure.

Without this check, anybody who can write `cluster.json` could make this head act on another cluster with its rights.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from spotrun.errors import SpotrunError
from spotrun.spec import ClusterSpec, names
from spotrun.store import cluster_key

_CLOUDS = {"gs": "gcp", "s3": "aws"}


@dataclass(frozen=True)
class ClusterIdentity:
    """The cluster that the metadata of the head's machine name."""

    cluster: str  # the cluster's name
    bucket: str  # the bucket's URL
    provider: str  # gcp or aws: whose metadata server answered; the local cloud imitates one of them
    account: str  # id of the Google Cloud project or the AWS account
    region: str  # of the machine's zone

    @property
    def cloud(self) -> str:
        """The cloud's name. Only in the local cloud is the bucket a folder."""
        scheme, separator, _ = self.bucket.partition("://")
        return self.provider if separator and scheme in _CLOUDS else "local"


def check(cluster: ClusterSpec, own: ClusterIdentity) -> ClusterSpec:
    """Return the description if it is of the machine's own cluster. Otherwise raise `SpotrunError`, in one line."""
    where = "in the machine's metadata"
    found = [f"{key} is {value} there, and {mine} {where}" for key, value, mine in _differ(cluster, own)]
    if not found:
        return cluster
    raise SpotrunError(
        f"{own.bucket}: {cluster_key(own.cluster)} describes another cluster than this head's: {'; '.join(found)};"
        f" `make up` with the cluster file of {own.cluster} writes it again"
    )


def _differ(cluster: ClusterSpec, own: ClusterIdentity) -> Iterator[tuple[str, str, str]]:
    """The differences: key, value in the description, value in the metadata."""
    pairs = [("name", cluster.name, own.cluster), ("cloud", cluster.cloud, own.cloud)]
    pairs.append(("region", cluster.region, own.region))
    if own.cloud == "gcp":
        pairs.append(("project", cluster.project or "", own.account))
    if cluster.cloud == own.cloud != "local":
        pairs.append(("bucket", names.bucket_url(cluster, own.account), own.bucket))
    elif cluster.bucket:  # without the key, it is a folder of the operator, which the machine does not know
        pairs.append(("bucket", cluster.bucket, own.bucket))
    return ((key, value or "missing", mine) for key, value, mine in pairs if value != mine)
