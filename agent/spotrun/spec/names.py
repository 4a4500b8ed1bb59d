"""What things are called in a cloud: the stacks make them by these names, the head and the tasks find them by these.

Cluster and pool names hold no double hyphen (see `fields.label`), so `--` keeps `a-b` + `c` apart from `a` + `b-c`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from spotrun.spec.cluster import ClusterSpec

HEAD_PORT = 8470  # where the head listens for agents
# What machines are: the values of ROLE. HEAD is also the pool of the head's machine.
HEAD, NODE = "head", "node"
FIS = "fis"  # on AWS, the role of the service that interrupts spot machines in tests
# Keys of labels (GCP), tags (AWS), and of what a machine reads in its metadata.
CLUSTER, POOL, ROLE, BUCKET = "spotrun-cluster", "spotrun-pool", "spotrun-role", "spotrun-bucket"
# In a pool's metadata (tags on AWS): how many GPUs and EFAs each machine has, whole numbers. Without them the machine
# goes by what its type has.
GPUS, EFAS = "spotrun-gpus", "spotrun-efas"
# In a pool's metadata on Google Cloud: seconds between the word that a machine is preempted, or stops for maintenance,
# and that end. Without them 30 and 60.
PREEMPT_NOTICE, MAINTENANCE_NOTICE = "spotrun-preempt-notice", "spotrun-maintenance-notice"


def group(cluster: str, pool: str) -> str:
    """A pool's instance group or scaling group, template and placement. At most 42 characters; GCE allows 63."""
    return f"{cluster}--{pool}"


def bucket(cluster: ClusterSpec, account: str) -> str:
    """The bucket's name, without its scheme. account: the AWS account's id, or the Google Cloud project's.

    Bucket names are one space for all customers of a cloud, hence the account in it; at most 63 characters.
    """
    if cluster.bucket and "://" in cluster.bucket:
        return cluster.bucket.partition("://")[2]
    words = ["spotrun", cluster.name, account.replace(":", "-").replace(".", "-")]
    return "-".join(words if cluster.cloud == "gcp" else [*words, cluster.region])


def bucket_url(cluster: ClusterSpec, account: str) -> str:
    return f"{'gs' if cluster.cloud == 'gcp' else 's3'}://{bucket(cluster, account)}"
