"""The two files a user writes: the cluster file and the job file.

`load_cluster` and `load_job` read one and raise `SpecError` with a line for each problem: file, line, key, value,
what is allowed, and the nearest known key. The description of every field is that "what is allowed", so it is part
of the messages (see `spec.file`). Durations are stored in seconds.
"""

from spotrun.spec.cluster import (
    ClusterSpec,
    HeadSpec,
    LocalSpec,
    NetworkSpec,
    PoolSpec,
    described,
    digest,
    load_cluster,
)
from spotrun.spec.fields import parse_duration
from spotrun.spec.job import JobSpec, NodesSpec, check_fit, load_job

__all__ = [
    "ClusterSpec",
    "HeadSpec",
    "JobSpec",
    "LocalSpec",
    "NetworkSpec",
    "NodesSpec",
    "PoolSpec",
    "check_fit",
    "described",
    "digest",
    "load_cluster",
    "load_job",
    "parse_duration",
]
