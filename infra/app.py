"""Which stacks a cluster has, and where Terraform keeps their state."""

from __future__ import annotations

import re
from pathlib import Path

from infra import aws, cdk, gcp
from spotrun.errors import SpotrunError
from spotrun.spec import ClusterSpec
from spotrun.spec.names import BUCKET, CLUSTER, EFAS, GPUS, POOL, ROLE

_OWN = {BUCKET, CLUSTER, EFAS, GPUS, POOL, ROLE}  # what machines read about themselves, on AWS from tags
# AWS allows 50 tags, and a machine also has the tag Name.
# https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/Using_Tags.html#tag-restrictions
_LABELS = 50 - len(_OWN) - 1


def synthesize(cluster: ClusterSpec, outdir: Path, home: Path) -> None:
    """Write both stacks of a cluster into `outdir`. home: the folder with the operator's state.

    Raises `SpotrunError`, before it writes anything, for what the cloud would refuse.
    """
    _check(cluster)
    try:
        outdir.mkdir(parents=True, exist_ok=True)  # CDKTF makes only the last folder of a path
    except OSError as error:
        raise SpotrunError(
            f"{outdir} cannot be created: {error.strerror}; set CDKTF_OUTDIR to another folder"
        ) from None
    app = cdk.new_app(str(outdir))
    base, pools = _stacks(app, cluster)
    pools.add_dependency(base)
    for stack in (base, pools):
        _keep_state(stack, cluster, home)
    app.synth()


def _check(cluster: ClusterSpec) -> None:
    if re.search(r"[$%]\{", cluster.model_dump_json()):
        raise SpotrunError("a value contains ${ or %{, which Terraform would run as code")
    if taken := sorted(_OWN & set(cluster.labels)):
        raise SpotrunError(f"labels: {', '.join(taken)}: spotrun sets these itself; choose other names")
    if cluster.cloud == "aws" and len(cluster.labels) > _LABELS:
        raise SpotrunError(f"labels: {len(cluster.labels)} of them; AWS leaves room for {_LABELS}")
    if cluster.cloud == "gcp":
        gcp.check(cluster)


def _stacks(app: cdk.App, cluster: ClusterSpec) -> tuple[cdk.TerraformStack, cdk.TerraformStack]:
    base, pools = f"{cluster.name}-base", f"{cluster.name}-pools"
    if cluster.cloud == "gcp":
        google = gcp.Base(app, base, cluster)
        return google, gcp.Pools(app, pools, cluster, google)
    return aws.Base(app, base, cluster), aws.Pools(app, pools, cluster)


def _keep_state(stack: cdk.TerraformStack, cluster: ClusterSpec, home: Path) -> None:
    """In the cluster file's `state`, else in the operator's checkout."""
    name = stack.node.id
    if cluster.state is None:
        cdk.LocalBackend(stack, path=str(home / "terraform" / f"{name}.tfstate"))
        return
    scheme, _, rest = cluster.state.partition("://")
    bucket, _, folder = rest.partition("/")
    if scheme == "gs":
        cdk.GcsBackend(stack, bucket=bucket, prefix=f"{folder}/{name}")
        return
    region = cluster.region if cluster.cloud == "aws" else None  # otherwise AWS_REGION, as for any S3 backend
    cdk.S3Backend(stack, bucket=bucket, key=f"{folder}/{name}.tfstate", region=region, encrypt=True)
    stack.add_override("terraform.backend.s3.use_lockfile", True)  # CDKTF does not know this argument
