"""The common base of both stacks of a cluster in Google Cloud."""

from __future__ import annotations

from infra import cdk
from spotrun.spec import ClusterSpec
from spotrun.spec.names import CLUSTER


class GcpStack(cdk.TerraformStack):
    """A stack in the cluster's project and region."""

    def __init__(self, app: cdk.App, id: str, cluster: ClusterSpec) -> None:
        super().__init__(app, id)
        assert cluster.project is not None  # the cluster file's checks
        self.cluster, self.project = cluster, cluster.project
        self.labels = {**cluster.labels, CLUSTER: cluster.name}
        cdk.google("provider")(
            self, "google", project=cluster.project, region=cluster.region, default_labels=self.labels
        )
