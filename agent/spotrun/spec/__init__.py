"""The two files a user writes: the cluster file and the job file.

`load_cluster` and `load_job` read one and raise `SpecError` with a line for each problem: file, line, key, value,
what is allowed, and the nearest known key. "What is allowed" is the description of the field, so each description is
part of the messages (see `spec.file`). Durations are stored in seconds.
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from spotrun.spec.cluster import ClusterSpec, PoolSpec, described, devices_of, digest, load_cluster
    from spotrun.spec.job import JobSpec, check_fit, largest_zone, load_job, may_cross_zones
else:

    def __getattr__(name: str) -> object:
        """Import only what is used: `names` and `notices` are also for processes that do without pydantic."""
        for module in ("cluster", "job") if name in __all__ else ():
            found = getattr(importlib.import_module(f"spotrun.spec.{module}"), name, None)
            if found is not None:
                return found
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = [
    "ClusterSpec",
    "JobSpec",
    "PoolSpec",
    "check_fit",
    "described",
    "devices_of",
    "digest",
    "largest_zone",
    "load_cluster",
    "load_job",
    "may_cross_zones",
]
