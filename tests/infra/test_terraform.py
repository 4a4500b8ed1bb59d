"""Real Terraform takes AWS's stacks and makes them on a moto server; spotrun's AWS module then drives what it made.

The installed provider is of another version than the stacks' pin, see `tests.infra.terraform`.
"""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from infra.app import synthesize
from spotrun.cloud.aws import AwsCloud
from spotrun.spec import ClusterSpec, load_cluster
from spotrun.spec import described as read_description
from tests.fakes import moto_server
from tests.fakes.moto_server import ACCOUNT, Moto
from tests.infra import terraform
from tests.infra.synthesized import CLOUD_FILES, described
from tests.infra.terraform import Stack, Tools

pytestmark = pytest.mark.clouds
AWS_FILES = [path for path in CLOUD_FILES if path.name.startswith("aws-")]
CLOSED = """
name: closed
cloud: aws
region: us-east-1
head: {machine: t4g.small, zone: us-east-1c}
image: spotrun-*
pools: [{name: spot, zone: us-east-1a, machine: p6-b300.48xlarge}, {name: cpu, zone: us-east-1b, machine: g4dn.metal}]
network: {nat: false, efa: true, cidr: 10.1.16.0/20}
labels: {team: vision}
"""


@pytest.fixture(scope="module")
def tools() -> Tools:
    return terraform.require()


@pytest.fixture
def aws(monkeypatch: pytest.MonkeyPatch) -> Iterator[Moto]:
    with moto_server.running() as moto:
        for name, value in moto.environment.items():
            monkeypatch.setenv(name, value)
        moto.image("spotrun-x86")
        moto.image("spotrun-arm", "arm64")
        yield moto


def stacks(cluster: ClusterSpec, tmp_path: Path, tools: Tools, aws: Moto | None = None) -> list[Stack]:
    """Base and pools, where Terraform can run on them."""
    synthesize(cluster, tmp_path / "out", tmp_path / "home")
    return [
        terraform.copy(
            tmp_path / f"out/stacks/{cluster.name}-{stack}", tmp_path / "run", tools, aws.environment if aws else None
        )
        for stack in ("base", "pools")
    ]


@pytest.mark.timeout(900)
@pytest.mark.parametrize("file", AWS_FILES, ids=[path.stem for path in AWS_FILES])
def test_terraform_takes_every_cluster_file(file: Path, tmp_path: Path, tools: Tools) -> None:
    for stack in stacks(load_cluster(file), tmp_path, tools):
        verdict = json.loads(stack.run("validate", "-json").stdout)
        assert (verdict["valid"], verdict["diagnostics"]) == (True, [])


@pytest.mark.timeout(900)
async def test_a_cluster_is_made_driven_and_taken_down(tmp_path: Path, tools: Tools, aws: Moto) -> None:
    cluster = load_cluster(next(path for path in AWS_FILES if path.stem == "aws-g5"))
    base, pools = made = stacks(cluster, tmp_path, tools, aws)
    for stack in made:
        await run(stack, "apply", "-input=false", "-auto-approve")
    check_what_stands(aws, cluster)
    for stack in made:
        assert await unchanged(stack)
    await drive(aws, cluster)
    assert await unchanged(pools)  # sizes are the head's to set
    await turn_placement_off(aws, cluster, pools, tmp_path)

    await run(pools, "destroy", "-auto-approve")
    assert machines(aws) == []  # though one ran
    assert "values" not in pools.show()
    bucket = f"spotrun-g5-{ACCOUNT}-us-east-1"
    aws.client("s3").put_object(Bucket=bucket, Key="jobs/1/checkpoints/8/manifest.json", Body=b"{}")
    refused = await run(base, "destroy", "-auto-approve", good=(1,))
    assert "BucketNotEmpty" in refused
    assert aws.client("s3").list_objects_v2(Bucket=bucket)["KeyCount"] == 1
    aws.client("s3").delete_object(Bucket=bucket, Key="jobs/1/checkpoints/8/manifest.json")
    await run(base, "destroy", "-auto-approve")
    assert left(aws) == []


@pytest.mark.timeout(600)
async def test_a_cluster_without_a_way_out_is_made_and_taken_down(tmp_path: Path, tools: Tools, aws: Moto) -> None:
    """With endpoints instead of NAT, an ARM head, and every adapter of machines that have 17 network cards."""
    base, pools = made = stacks(described(CLOSED, tmp_path), tmp_path, tools, aws)
    for stack in made:
        await run(stack, "apply", "-input=false", "-auto-approve")
        assert await unchanged(stack)
    for stack in (pools, base):
        await run(stack, "destroy", "-auto-approve")
    assert left(aws) == []


async def run(stack: Stack, *words: str, good: tuple[int, ...] = (0,)) -> str:
    """What Terraform said."""
    return (await asyncio.to_thread(stack.run, *words, good=good)).stdout


async def unchanged(stack: Stack) -> bool:
    """Whether a second look finds all as it should be; what it would change goes to the test's output."""
    done = await asyncio.to_thread(stack.run, "plan", "-input=false", "-detailed-exitcode", good=(0, 2))
    if done.returncode:
        print(done.stdout)
    return done.returncode == 0


def check_what_stands(aws: Moto, cluster: ClusterSpec) -> None:
    """As the cloud tells it, not Terraform."""
    (head,) = machines(aws)
    tags = {tag["Key"]: tag["Value"] for tag in head["Tags"]}
    bucket = f"spotrun-g5-{ACCOUNT}-us-east-1"
    expected = {
        "Name": "g5--head",
        "spotrun-cluster": "g5",
        "spotrun-pool": "head",
        "spotrun-role": "head",
        "spotrun-bucket": f"s3://{bucket}",
    }
    assert {key: value for key, value in tags.items() if not key.startswith("aws:")} == expected
    assert tags["aws:autoscaling:groupName"] == "g5--head"
    assert "PublicIpAddress" not in head
    assert head["Placement"]["AvailabilityZone"] == "us-east-1a"
    written = aws.client("s3").get_object(Bucket=bucket, Key="clusters/g5/cluster.json")["Body"].read()
    assert read_description(written) == cluster
    groups = aws.client("autoscaling").describe_auto_scaling_groups()["AutoScalingGroups"]
    assert {each["AutoScalingGroupName"]: each["DesiredCapacity"] for each in groups} == {
        "g5--head": 1,
        "g5--spot-a": 0,
        "g5--spot-b": 0,
        "g5--steady": 0,
    }
    assert {each["AutoScalingGroupName"]: each.get("PlacementGroup") for each in groups} == {
        "g5--head": None,
        **{name: name for name in ("g5--spot-a", "g5--spot-b", "g5--steady")},
    }
    unused = aws.client("ec2").describe_security_groups(Filters=[{"Name": "tag:Name", "Values": ["g5-unused"]}])
    (group,) = unused["SecurityGroups"]
    assert (group["GroupName"], group["IpPermissions"], group["IpPermissionsEgress"]) == ("default", [], [])


async def drive(aws: Moto, cluster: ClusterSpec) -> None:
    """List, grow, shrink and preempt pools with what the head has for it; one machine is left."""
    cloud = AwsCloud(cluster)
    try:
        assert [(each.pool, each.market) for each in await cloud.nodes()] == [("head", "on-demand")]
        await cloud.resize("spot-a", 3)
        await cloud.resize("steady", 1)
        nodes = [each for each in await cloud.nodes() if each.pool != "head"]
        assert sorted((each.pool, each.zone, each.market) for each in nodes) == [
            *[("spot-a", "us-east-1a", "spot")] * 3,
            ("steady", "us-east-1a", "on-demand"),
        ]
        assert {each["Placement"]["GroupName"] for each in machines(aws)} == {"", "g5--spot-a", "g5--steady"}
        first, second, _ = sorted(each.name for each in nodes if each.pool == "spot-a")
        await cloud.remove([first])
        assert (await cloud.sizes())["spot-a"] == 2
        await cloud.preempt(second)
        assert [notice["instance"] for notice in aws.notices()] == [second]
        assert await cloud.sizes() == {"spot-a": 2, "spot-b": 0, "steady": 1}
        names = {each.name for each in await cloud.nodes() if each.pool == "spot-a"}
        assert len(names) == 2
        assert not {first, second} & names  # the group made another
        await cloud.resize("steady", 0)
        await cloud.resize("spot-a", 1)
        assert await cloud.problems() == []
    finally:
        await cloud.close()


async def turn_placement_off(aws: Moto, cluster: ClusterSpec, pools: Stack, tmp_path: Path) -> None:
    """As the head's message about an empty zone advises. Machines are in a placement group, and stay there."""
    network = cluster.network.model_copy(update={"placement": False})
    synthesize(cluster.model_copy(update={"network": network}), tmp_path / "apart", tmp_path / "home")
    shutil.copy(tmp_path / f"apart/stacks/{cluster.name}-pools/cdk.tf.json", pools.folder)
    terraform.adapt(pools.folder, pools.tools.version, emulated=True)
    placed = [each["InstanceId"] for each in machines(aws) if each["Placement"]["GroupName"]]
    assert placed
    await run(pools, "apply", "-input=false", "-auto-approve")
    assert await unchanged(pools)
    groups = aws.client("autoscaling").describe_auto_scaling_groups()["AutoScalingGroups"]
    assert not [each["AutoScalingGroupName"] for each in groups if each.get("PlacementGroup")]
    assert placed == [each["InstanceId"] for each in machines(aws) if each["Placement"]["GroupName"]]


def machines(aws: Moto) -> list[dict[str, Any]]:
    """Those that run."""
    running = [{"Name": "instance-state-name", "Values": ["pending", "running"]}]
    pages = aws.client("ec2").get_paginator("describe_instances").paginate(Filters=running)
    return [each for page in pages for reservation in page["Reservations"] for each in reservation["Instances"]]


def left(aws: Moto) -> list[str]:
    """What of a cluster is still there; default networks, which every account has, are not."""
    ec2 = aws.client("ec2")
    found = [each["VpcId"] for each in ec2.describe_vpcs()["Vpcs"] if not each["IsDefault"]]
    found += [each["NatGatewayId"] for each in ec2.describe_nat_gateways()["NatGateways"] if each["State"] != "deleted"]
    found += [each["PublicIp"] for each in ec2.describe_addresses()["Addresses"]]
    found += [each["LaunchTemplateName"] for each in ec2.describe_launch_templates()["LaunchTemplates"]]
    found += [each["GroupName"] for each in ec2.describe_placement_groups()["PlacementGroups"]]
    groups = aws.client("autoscaling").describe_auto_scaling_groups()["AutoScalingGroups"]
    found += [each["AutoScalingGroupName"] for each in groups]
    found += [each["Name"] for each in aws.client("s3").list_buckets()["Buckets"]]
    found += [each["RoleName"] for each in aws.client("iam").list_roles()["Roles"]]
    found += [each["logGroupName"] for each in aws.client("logs").describe_log_groups()["logGroups"]]
    return found + [each["InstanceId"] for each in machines(aws)]
