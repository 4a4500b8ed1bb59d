"""The common base of both stacks of a cluster on AWS."""

from __future__ import annotations

from typing import Any

from infra import cdk
from spotrun.spec import ClusterSpec
from spotrun.spec.names import CLUSTER, bucket


class AwsStack(cdk.TerraformStack):
    """A stack in the cluster's region, in the account of the credentials.

    tags: on everything in the stack. account: the account's id, which Terraform knows only when it runs.
    """

    def __init__(self, app: cdk.App, id: str, cluster: ClusterSpec) -> None:
        super().__init__(app, id)
        self.cluster = cluster
        self.tags = {**cluster.labels, CLUSTER: cluster.name}
        cdk.aws("provider")(self, "aws", region=cluster.region, default_tags=[{"tags": self.tags}])
        self.account: str = cdk.aws("data_aws_caller_identity")(self, "account").account_id
        # `bucket` replaces characters of the id. It must not replace them in the placeholder that stands for the id.
        self.bucket = bucket(cluster, "ACCOUNT").replace("ACCOUNT", self.account)

    def arn(self, service: str, resource: str) -> str:
        """The ARN of a resource of this account in this region. https://docs.aws.amazon.com/IAM/latest/UserGuide/reference-arns.html"""
        region = "" if service == "iam" else self.cluster.region
        return f"arn:{self.partition}:{service}:{region}:{self.account}:{resource}"

    @property
    def partition(self) -> str:
        return "aws-us-gov" if self.cluster.region.startswith("us-gov-") else "aws"

    def named(self, name: str) -> dict[str, Any]:
        """The tag that AWS's console shows as the name. The provider adds the other tags."""
        return {"tags": {"Name": name}}

    def find(self, kind: str, id: str, name: str) -> Any:
        """The resource of that name in the cluster's other stack."""
        return cdk.aws(f"data_aws_{kind}")(self, id, tags={"Name": name, CLUSTER: self.cluster.name})
