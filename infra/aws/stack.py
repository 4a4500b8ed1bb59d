"""What both stacks of a cluster on AWS share."""

from __future__ import annotations

from typing import Any

from infra import cdk
from spotrun.spec import ClusterSpec
from spotrun.spec.names import CLUSTER, bucket


class AwsStack(cdk.TerraformStack):
    """A stack in the cluster's region, of whatever account the credentials are for.

    tags: on all that is made. account: its id, which Terraform knows when it runs.
    """

    def __init__(self, app: cdk.App, id: str, cluster: ClusterSpec) -> None:
        super().__init__(app, id)
        self.cluster = cluster
        self.tags = {**cluster.labels, CLUSTER: cluster.name}
        cdk.aws("provider")(self, "aws", region=cluster.region, default_tags=[{"tags": self.tags}])
        self.account: str = cdk.aws("data_aws_caller_identity")(self, "account").account_id
        # The name is made of the id with characters replaced, which must not befall what stands for the id until then.
        self.bucket = bucket(cluster, "ACCOUNT").replace("ACCOUNT", self.account)

    def arn(self, service: str, resource: str) -> str:
        """Of something of this account in this region. https://docs.aws.amazon.com/IAM/latest/UserGuide/reference-arns.html"""
        region = "" if service == "iam" else self.cluster.region
        return f"arn:{self.partition}:{service}:{region}:{self.account}:{resource}"

    @property
    def partition(self) -> str:
        return "aws-us-gov" if self.cluster.region.startswith("us-gov-") else "aws"

    def named(self, name: str) -> dict[str, Any]:
        """The tag that AWS's console shows as a thing's name; the others come from the provider."""
        return {"tags": {"Name": name}}

    def find(self, kind: str, id: str, name: str) -> Any:
        """What the cluster's other stack made by that name."""
        return cdk.aws(f"data_aws_{kind}")(self, id, tags={"Name": name, CLUSTER: self.cluster.name})
