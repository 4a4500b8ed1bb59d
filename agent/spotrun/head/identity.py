"""Which cluster this machine is the head of. The machine's own metadata say it; the bucket must agree. Pure.

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
    """What the metadata of the head's machine say.

    cluster: the cluster's name. bucket: the bucket's URL. provider: the cloud whose metadata server answered, gcp or
    aws; the local cloud imitates one of these. account: the Google Cloud project's id or the AWS account's.
    region: the region of the machine's zone.
    """

    cluster: str
    bucket: str
    provider: str
    account: str
    region: str

    @property
    def cloud(self) -> str:
        """The cloud's name. Only in the local cloud is the bucket a folder."""
        scheme, separator, _ = self.bucket.partition("://")
        return self.provider if separator and scheme in _CLOUDS else "local"


def check(cluster: ClusterSpec, own: ClusterIdentity) -> ClusterSpec:
    """Return the description if it is of the machine's own cluster. Otherwise raise `SpotrunError`, in one line."""
    differ = [
        f"{what} is {told} there, and {mine} in the machine's metadata" for what, told, mine in _told(cluster, own)
    ]
    if not differ:
        return cluster
    raise SpotrunError(
        f"{own.bucket}: {cluster_key(own.cluster)} is not of this head's cluster: {'; '.join(differ)};"
        f" `make up` with the cluster file of {own.cluster} writes it again"
    )


def _told(cluster: ClusterSpec, own: ClusterIdentity) -> Iterator[tuple[str, str, str]]:
    """What differs, each as (key, value in the description, value in the metadata)."""
    pairs = [("name", cluster.name, own.cluster), ("cloud", cluster.cloud, own.cloud)]
    pairs.append(("region", cluster.region, own.region))
    if own.cloud == "gcp":
        pairs.append(("project", cluster.project or "", own.account))
    if cluster.cloud == own.cloud != "local":
        pairs.append(("bucket", names.bucket_url(cluster, own.account), own.bucket))
    elif cluster.bucket:  # without the key it is in the operator's home, which the machine does not know
        pairs.append(("bucket", cluster.bucket, own.bucket))
    return ((what, told or "missing", mine) for what, told, mine in pairs if told != mine)
