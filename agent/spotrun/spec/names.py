"""Names, tags and ports in a cloud. The stacks make things by these names; the head and the tasks find them by these.

Cluster and pool names contain no double hyphen (see `fields.label`), so `--` separates them without doubt.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from spotrun.spec.cluster import ClusterSpec

HEAD_PORT = 8470  # where the head listens for agents
# What machines are: the values of ROLE. HEAD is also the pool of the head's machine.
HEAD, NODE = "head", "node"
FIS = "fis"  # on AWS, the role of the service that interrupts spot machines in tests
# Keys of labels (Google Cloud), tags (AWS), and of a machine's metadata.
CLUSTER, POOL, ROLE, BUCKET = "spotrun-cluster", "spotrun-pool", "spotrun-role", "spotrun-bucket"
# In a pool's metadata (tags on AWS): how many GPUs and EFAs each machine has, whole numbers. Without them, the numbers
# of the machine type count.
GPUS, EFAS = "spotrun-gpus", "spotrun-efas"
# In a pool's metadata on Google Cloud: seconds between the notice of a preemption, or of maintenance, and the end.
# Without them: 30 and 60.
PREEMPT_NOTICE, MAINTENANCE_NOTICE = "spotrun-preempt-notice", "spotrun-maintenance-notice"
# Names that a cloud gives to no bucket.
# https://docs.aws.amazon.com/AmazonS3/latest/userguide/bucketnamingrules.html
# https://cloud.google.com/storage/docs/buckets#naming
_REFUSED = {
    "gs": r"goog.*|.*google.*|.*\.\..*|[\d.]+",
    "s3": r".*_.*|.*\.\..*|[\d.]+|(xn--|sthree-|amzn-s3-demo-).*|.*(-s3alias|--ol-s3|--x-s3|\.mrap)",
}


def group(cluster: str, pool: str) -> str:
    """A pool's instance group or scaling group, template and placement. At most 42 characters; GCE allows 63."""
    return f"{cluster}--{pool}"


def bucket(cluster: ClusterSpec, account: str) -> str:
    """The bucket's name, without its scheme. account: the id of the AWS account or of the Google Cloud project.

    All customers of a cloud share the names of buckets, so the name contains the account. At most 63 characters.
    """
    if cluster.bucket and "://" in cluster.bucket:
        return cluster.bucket.partition("://")[2]
    words = ["spotrun", cluster.name, account.replace(":", "-").replace(".", "-")]
    return "-".join(words if cluster.cloud == "gcp" else [*words, cluster.region])


def bucket_url(cluster: ClusterSpec, account: str) -> str:
    return f"{'gs' if cluster.cloud == 'gcp' else 's3'}://{bucket(cluster, account)}"


def is_refused(url: str) -> bool:
    """Whether the cloud would refuse to make a bucket of this name, though its characters are right."""
    scheme, _, name = url.partition("://")
    return scheme in _REFUSED and re.fullmatch(_REFUSED[scheme], name) is not None
