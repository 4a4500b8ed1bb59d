"""The stack of a cluster that is up."""

from __future__ import annotations

from infra import cdk
from infra.gcp.base import Base
from infra.gcp.stack import GcpStack
from spotrun.spec import ClusterSpec


class Pools(GcpStack):
    """Head and pools."""

    def __init__(self, app: cdk.App, id: str, cluster: ClusterSpec, base: Base) -> None:
        super().__init__(app, id, cluster)
