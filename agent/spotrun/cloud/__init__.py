"""The clouds. `connect` is the way in; each cloud's module is imported only when it is used."""

from __future__ import annotations

from typing import TYPE_CHECKING

from spotrun.cloud.base import Cloud, Instance, Market, Problem, State
from spotrun.errors import CloudError

if TYPE_CHECKING:
    from spotrun.spec import ClusterSpec

__all__ = ["Cloud", "Instance", "Market", "Problem", "State", "connect"]


def connect(cluster: ClusterSpec) -> Cloud:
    """The cloud of a cluster, seen from its head. Raises `CloudError` if it cannot be reached from here."""
    if cluster.cloud == "local":
        from spotrun.cloud.local.client import LocalCloud

        return LocalCloud()
    raise CloudError(f"cluster {cluster.name}: cloud {cluster.cloud} is not available yet in this version; use local")
