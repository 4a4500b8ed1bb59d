"""What both stacks share: the provider, labels, and the names by which one finds what the other made."""

from __future__ import annotations

from infra import cdk
from spotrun.spec import ClusterSpec
from spotrun.spec.names import CLUSTER


class GcpStack(cdk.TerraformStack):
    """A stack in the cluster's project and region."""

    def __init__(self, app: cdk.App, id: str, cluster: ClusterSpec) -> None:
        super().__init__(app, id)
        self.cluster = cluster
        self.labels = {**cluster.labels, CLUSTER: cluster.name}
        cdk.google("provider")(
            self, "google", project=cluster.project, region=cluster.region, default_labels=self.labels
        )
