"""The AWS module against a real server of AWS's API: groups, machines, interruptions, shortages, prices, refusals."""

from __future__ import annotations

import asyncio
import logging
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from scripts.cloud_site import CloudSite
from spotrun import cloud
from spotrun.cloud import Instance, Shortfall, prices
from spotrun.cloud.aws import AwsCloud
from spotrun.errors import CloudError, CredentialsError, SpotrunError
from spotrun.head.fleet.pools import Fleet
from spotrun.spec import ClusterSpec, names
from tests.fakes import moto_server
from tests.fakes.aws_proxy import Proxy, groups, refuse
from tests.fakes.moto_server import Moto
from tests.helpers import await_for

pytestmark = pytest.mark.clouds

SPOT = {"name": "spot", "zone": "us-east-1a", "machine": "g5.xlarge", "max": 9}
STEADY = {"name": "steady", "zone": "us-east-1b", "machine": "g5.2xlarge", "max": 2, "market": "on-demand"}


def spec(name: str, *pools: dict[str, Any]) -> ClusterSpec:
    return ClusterSpec.model_validate(
        {"name": name, "cloud": "aws", "region": "us-east-1", "pools": list(pools) or [SPOT, STEADY]}
    )


TAKEN = (
    "<TerminateInstanceInAutoScalingGroupResponse><TerminateInstanceInAutoScalingGroupResult/>"
    "</TerminateInstanceInAutoScalingGroupResponse>"
)


@pytest.fixture(scope="module")
def aws() -> Iterator[Moto]:
    with moto_server.running() as moto:
        yield moto


def stand(aws: Moto, cluster: ClusterSpec) -> None:
    """What the stacks make of a cluster, as far as this module sees it."""
    ec2, autoscaling = aws.client("ec2"), aws.client("autoscaling")
    network = ec2.create_vpc(CidrBlock="10.77.0.0/16")["Vpc"]["VpcId"]
    zones = sorted({cluster.head.zone, *(pool.zone for pool in cluster.pools)})
    subnets = {
        zone: ec2.create_subnet(VpcId=network, CidrBlock=f"10.77.{index}.0/24", AvailabilityZone=zone)["Subnet"][
            "SubnetId"
        ]
        for index, zone in enumerate(zones)
    }
    groups = [(pool.name, pool.machine, pool.zone, pool.market, pool.max) for pool in cluster.pools]
    for pool, machine, zone, market, most in [
        (names.HEAD, cluster.head.machine, cluster.head.zone, "on-demand", 1),
        *groups,
    ]:
        name, tags = names.group(cluster.name, pool), {names.CLUSTER: cluster.name, names.POOL: pool}
        ec2.create_launch_template(
            LaunchTemplateName=name,
            LaunchTemplateData={
                "ImageId": "ami-12345678",
                "InstanceType": machine,
                "TagSpecifications": [
                    {"ResourceType": "instance", "Tags": [{"Key": key, "Value": value} for key, value in tags.items()]}
                ],
            },
        )
        autoscaling.create_auto_scaling_group(
            AutoScalingGroupName=name,
            MixedInstancesPolicy={
                "LaunchTemplate": {
                    "LaunchTemplateSpecification": {"LaunchTemplateName": name, "Version": "$Latest"},
                    "Overrides": [{"InstanceType": machine}],
                },
                "InstancesDistribution": {
                    "OnDemandPercentageAboveBaseCapacity": 0 if market == "spot" else 100,
                    "SpotAllocationStrategy": "capacity-optimized",
                },
            },
            MinSize=0,
            MaxSize=most,
            DesiredCapacity=1 if pool == names.HEAD else 0,
            VPCZoneIdentifier=subnets[zone],
        )


@pytest.fixture
async def proxy(aws: Moto, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Proxy]:
    found = Proxy(aws.endpoint)
    for key, value in (aws.environment | {"AWS_ENDPOINT_URL": await found.start()}).items():
        monkeypatch.setenv(key, value)
    yield found
    await found.stop()


async def named(aws: AwsCloud) -> dict[str, list[Instance]]:
    """Machines by pool."""
    found: dict[str, list[Instance]] = {}
    for machine in await aws.nodes():
        found.setdefault(machine.pool, []).append(machine)
    return found


async def test_pools_grow_shrink_and_are_listed(aws: Moto, proxy: Proxy) -> None:
    cluster = spec("grow")
    stand(aws, cluster)
    stand(aws, spec("grow-not"))
    other = AwsCloud(spec("grow-not"))
    await other.resize("spot", 2)
    mine = cloud.connect(cluster)
    assert isinstance(mine, AwsCloud)
    assert await mine.sizes() == {"spot": 0, "steady": 0}
    assert list(await named(mine)) == ["head"]

    await mine.resize("spot", 3)
    await mine.resize("steady", 1)
    assert await mine.sizes() == {"spot": 3, "steady": 1}
    found = await named(mine)
    assert {pool: len(machines) for pool, machines in found.items()} == {"head": 1, "spot": 3, "steady": 1}
    for machine in await mine.nodes():
        assert machine.name == machine.id
        assert machine.name.startswith("i-")
        assert machine.address.startswith("10.77.")
        assert machine.state == "running"
        assert machine.market == ("spot" if machine.pool == "spot" else "on-demand")
        assert machine.zone == ("us-east-1b" if machine.pool == "steady" else "us-east-1a")
        assert machine.created > 1.7e9

    first, second, third = found["spot"]
    await mine.remove([second.name, second.name])
    assert (await named(mine))["spot"] == [first, third]
    assert await mine.sizes() == {"spot": 2, "steady": 1}
    await mine.remove([second.name])  # it is gone already: no other one may go for it
    assert await mine.sizes() == {"spot": 2, "steady": 1}

    await mine.recreate([first.name, second.name])
    again = (await named(mine))["spot"]
    assert len(again) == 2
    assert third in again
    assert first not in again
    await mine.resize("spot", 0)
    assert [machine.pool for machine in await mine.nodes()] == ["head", "steady"]
    assert await other.sizes() == {"spot": 2, "steady": 0}
    await mine.close()
    await other.close()


async def test_what_is_refused_changes_nothing(aws: Moto, proxy: Proxy) -> None:
    cluster = spec("refuse")
    stand(aws, cluster)
    mine = AwsCloud(cluster)
    await mine.resize("spot", 1)
    machines = {machine.pool: machine.name for machine in await mine.nodes()}
    for attempt, words in (
        (mine.resize("spots", 1), "there is no pool 'spots' to resize; pools: spot, steady"),
        (mine.resize("spot", 10), "pool spot: size 10 is not allowed; its cluster file says 0 to 9"),
        (mine.resize("spot", -1), "size -1 is not allowed"),
        (mine.resize("head", 1), "there is no pool 'head' to resize"),
        (mine.remove([machines["spot"], machines["head"]]), "the head cannot be removed"),
        (mine.recreate(["i-none"]), f"'i-none'; machines: {', '.join(sorted(machines.values()))}"),
        (mine.preempt("i-none"), "there is no machine 'i-none'"),
        (mine.preempt(machines["head"]), "is on-demand, and the cloud preempts only spot machines; kill it instead"),
    ):
        with pytest.raises(CloudError, match=words.replace("(", r"\(")):
            await attempt
    assert {machine.pool: machine.name for machine in await mine.nodes()} == machines
    assert await mine.sizes() == {"spot": 1, "steady": 0}
    assert not proxy.of("TerminateInstanceInAutoScalingGroup")


async def test_an_unknown_name_does_not_keep_the_others(aws: Moto, proxy: Proxy) -> None:
    """A machine that the head has seen may be gone when the head asks for its removal."""
    cluster = spec("unknown")
    stand(aws, cluster)
    mine = AwsCloud(cluster)
    await mine.resize("spot", 3)
    first, second, third = [machine.name for machine in (await named(mine))["spot"]]
    with pytest.raises(CloudError, match="there is no machine 'i-none'; machines: i-"):
        await mine.remove([first, "i-none", second])
    assert [machine.name for machine in (await named(mine))["spot"]] == [third]
    assert await mine.sizes() == {"spot": 1, "steady": 0}


async def test_a_refusal_names_the_pool_or_the_machine(aws: Moto, proxy: Proxy) -> None:
    """AWS's own words may name neither."""
    cluster = spec("named")
    stand(aws, cluster)
    mine = AwsCloud(cluster)
    await mine.resize("spot", 1)
    [machine] = (await named(mine))["spot"]
    changes = ("SetDesiredCapacity", "TerminateInstanceInAutoScalingGroup")
    denied = "User: x is not authorized to perform: autoscaling:"
    proxy.hook = lambda proxy, fields: (
        refuse("AccessDenied", denied + fields["Action"], 403) if fields["Action"] in changes else None
    )
    with pytest.raises(CredentialsError, match=r"^pool spot: resize to 3: AWS: x may not do autoscaling:SetDesired"):
        await mine.resize("spot", 3)
    for change in (mine.remove, mine.recreate):
        with pytest.raises(CredentialsError, match=f"^machine {machine.name}: AWS: x may not do autoscaling:Terminate"):
            await change([machine.name])


async def test_a_machine_taken_meanwhile_neither_counts_twice_nor_holds_up_the_others(aws: Moto, proxy: Proxy) -> None:
    cluster = spec("race")
    stand(aws, cluster)
    mine = AwsCloud(cluster)
    await mine.resize("spot", 3)
    first, second, third = [machine.name for machine in (await named(mine))["spot"]]

    def taken(proxy: Proxy, fields: dict[str, str]) -> web.Response | None:
        """EC2 ends the machine while the request is on its way; this is what Auto Scaling says then."""
        if fields.get("Action") != "TerminateInstanceInAutoScalingGroup" or fields["InstanceId"] != first:
            return None
        aws.client("ec2").terminate_instances(InstanceIds=[first])
        return refuse("ValidationError", f"Instance Id not found - No managed instance found for instance ID: {first}")

    proxy.hook = taken
    await mine.remove([first, second])
    left = [machine.name for machine in (await named(mine))["spot"]]
    assert len(left) == 2  # one in the place of the first, which its group has made already, and the third
    assert third in left
    assert await mine.sizes() == {"spot": 2, "steady": 0}

    def busy(proxy: Proxy, fields: dict[str, str]) -> web.Response | None:
        if fields.get("Action") != "TerminateInstanceInAutoScalingGroup" or fields["InstanceId"] != third:
            return None
        return refuse("ScalingActivityInProgress", "You cannot terminate it while activities are in progress.")

    proxy.hook = busy
    with pytest.raises(CloudError, match="ScalingActivityInProgress"):
        await mine.remove([third, *left])
    assert [machine.name for machine in (await named(mine))["spot"]] == [third]  # the other one went all the same
    proxy.hook = None
    await mine.remove([third])
    assert await mine.sizes() == {"spot": 0, "steady": 0}


async def test_a_group_that_shows_a_removed_machine_still_is_not_asked_twice(aws: Moto, proxy: Proxy) -> None:
    cluster = spec("late")
    stand(aws, cluster)
    mine = AwsCloud(cluster)
    await mine.resize("spot", 2)
    first, second = [machine.name for machine in (await named(mine))["spot"]]
    await mine.remove([first])
    said = {"late--spot": (2, [first, second])}
    proxy.hook = lambda proxy, fields: groups(said) if fields["Action"] == "DescribeAutoScalingGroups" else None
    await mine.remove([first])
    await mine.recreate([first])
    assert len(proxy.of("TerminateInstanceInAutoScalingGroup")) == 1


async def test_a_machine_that_does_not_end_is_asked_to_go_again(
    aws: Moto, proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = spec("stays")
    stand(aws, cluster)
    mine = AwsCloud(cluster)
    await mine.resize("spot", 2)
    first, _ = [machine.name for machine in (await named(mine))["spot"]]

    def accept(proxy: Proxy, fields: dict[str, str]) -> web.Response | None:
        """AWS accepts the request, and the machine goes on running."""
        terminates = fields["Action"] == "TerminateInstanceInAutoScalingGroup"
        return web.Response(text=TAKEN, content_type="text/xml") if terminates else None

    proxy.hook = accept
    await mine.remove([first])
    await mine.remove([first])
    assert len(proxy.of("TerminateInstanceInAutoScalingGroup")) == 1
    monkeypatch.setattr("spotrun.cloud.aws.cloud._LATE", 0.0)  # it has counted the machine for long now
    await mine.remove([first])
    assert len(proxy.of("TerminateInstanceInAutoScalingGroup")) == 2
    proxy.hook = None
    await mine.remove([first])
    assert await mine.sizes() == {"spot": 1, "steady": 0}


async def test_lowering_a_group_that_counts_a_dead_machine_ends_that_one(aws: Moto, proxy: Proxy) -> None:
    cluster = spec("dead")
    stand(aws, cluster)
    mine = AwsCloud(cluster)
    await mine.resize("spot", 3)
    before = [machine.name for machine in (await named(mine))["spot"]]
    dead, living = before[1], [before[0], before[2]]

    # EC2 ended it; its group, which has not seen that, counts it still.
    aws.client("autoscaling").detach_instances(
        AutoScalingGroupName="dead--spot", InstanceIds=[dead], ShouldDecrementDesiredCapacity=True
    )
    aws.client("ec2").terminate_instances(InstanceIds=[dead])

    def late(proxy: Proxy, fields: dict[str, str]) -> web.Response | None:
        if fields.get("Action") == "TerminateInstanceInAutoScalingGroup":
            assert fields["InstanceId"] == dead
            assert fields["ShouldDecrementDesiredCapacity"] == "true"
            return web.Response(text=TAKEN, content_type="text/xml")
        return groups({"dead--spot": (3, before)}) if fields.get("Action") == "DescribeAutoScalingGroups" else None

    proxy.hook = late
    assert [machine.name for machine in (await named(mine))["spot"]] == living
    proxy.asked.clear()
    for _ in range(2):  # the second time, the group shows it still
        await mine.resize("spot", 2)
        assert len(proxy.of("TerminateInstanceInAutoScalingGroup")) == 1
        assert not proxy.of("SetDesiredCapacity")

    proxy.hook = None  # two of two live: the group is not to choose between them
    await mine.resize("spot", 1)
    assert not proxy.of("SetDesiredCapacity")
    assert [machine.name for machine in (await named(mine))["spot"]] == living
    await mine.resize("spot", 0)
    assert "spot" not in await named(mine)


async def test_pages(aws: Moto, proxy: Proxy) -> None:
    pools = [SPOT | {"name": f"p{index}"} for index in range(5)]
    cluster = spec("pages", *pools)
    stand(aws, cluster)
    mine = AwsCloud(cluster, page=2)
    for size in range(1, 8):  # each is a reservation of its own, and those are what is paged
        await mine.resize("p0", size)
    await mine.resize("p4", 1)
    proxy.asked.clear()
    assert {pool: len(machines) for pool, machines in (await named(mine)).items()} == {"head": 1, "p0": 7, "p4": 1}
    assert len(proxy.of("DescribeInstances")) == 5
    assert len(proxy.of("DescribeAutoScalingGroups")) == 3
    assert await mine.sizes() == {"p0": 7, "p1": 0, "p2": 0, "p3": 0, "p4": 1}

    many = AwsCloud(spec("pages", *[SPOT | {"name": f"p{index}"} for index in range(60)]))
    proxy.asked.clear()
    assert await many.sizes() == {"p0": 7, "p1": 0, "p2": 0, "p3": 0, "p4": 1}
    asked = [sum(key.startswith("AutoScalingGroupNames") for key in each) for each in proxy.asked]
    assert asked == [50, 11]  # AWS takes no more than 50 names at once


async def test_throttling_is_waited_out_up_to_a_point(aws: Moto, proxy: Proxy) -> None:
    cluster = spec("throttle")
    stand(aws, cluster)
    mine = AwsCloud(cluster)

    def twice(proxy: Proxy, fields: dict[str, str]) -> web.Response | None:
        code = {"SetDesiredCapacity": "Throttling", "DescribeInstances": "RequestLimitExceeded"}.get(fields["Action"])
        again = len(proxy.of(fields["Action"])) > 2
        return None if code is None or again else refuse(code, "Rate exceeded", 503 if "Limit" in code else 400)

    proxy.hook = twice
    await mine.resize("spot", 2)
    assert len((await named(mine))["spot"]) == 2
    proxy.hook = lambda proxy, fields: refuse("Throttling", "x") if fields["Action"] == "SetDesiredCapacity" else None
    proxy.asked.clear()
    with pytest.raises(CloudError, match="too many requests, SetDesiredCapacity was delayed each time"):
        await mine.resize("spot", 3)
    assert len(proxy.of("SetDesiredCapacity")) == 4


async def test_a_cloud_that_cannot_be_reached(proxy: Proxy, monkeypatch: pytest.MonkeyPatch) -> None:
    endpoint = await proxy.start()
    await proxy.stop()  # nobody is at this address now
    monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
    with pytest.raises(CloudError, match="AWS does not answer"):
        await AwsCloud(spec("away")).nodes()


@pytest.mark.parametrize(
    "answer",
    ["<html><body>Sign in</html>", "", "<DescribeAutoScalingGroupsResponse><Descr", "<a/>"],
    ids=["a proxy's page", "nothing", "half an answer", "another answer"],
)
async def test_an_answer_that_is_none_of_aws(proxy: Proxy, answer: str) -> None:
    """The head must know that the cloud does not answer, and not go on with its last list."""
    fleet = Fleet(spec("junk"), AwsCloud(spec("junk")))
    fleet.instances = []
    proxy.hook = lambda proxy, fields: web.Response(text=answer, content_type="text/xml")
    with pytest.raises(CloudError, match=r"^AWS: (ResponseParserError|KeyError): \S[^\n]+$"):
        await fleet.look()
    assert fleet.instances is None


async def test_calls_that_hang_leave_the_event_loops_threads_to_the_bucket(
    proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A small head has six of them, and has eight calls under way if AWS hangs while machines are lost."""
    asked: asyncio.Queue[asyncio.StreamWriter] = asyncio.Queue()

    async def hang(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await asked.put(writer)
        await reader.read()

    server = await asyncio.start_server(hang, "127.0.0.1", 0)
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(6))
    mine = AwsCloud(spec("hang"))
    calls = [asyncio.ensure_future(mine.sizes()) for _ in range(8)]
    connections = [await asyncio.wait_for(asked.get(), 60) for _ in range(6)]
    try:
        assert await asyncio.wait_for(asyncio.to_thread(lambda: "from the bucket"), 5) == "from the bucket"
    finally:
        server.close()
        for connection in connections + [asked.get_nowait() for _ in range(asked.qsize())]:
            connection.close()
        await asyncio.gather(*calls, return_exceptions=True)


async def test_credentials(aws: Moto, proxy: Proxy, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert await asyncio.to_thread(cloud.account, spec("who")) == moto_server.ACCOUNT
    user = "arn:aws:sts::123456789012:assumed-role/x--head/i-1"
    proxy.hook = lambda proxy, fields: refuse(
        "UnauthorizedOperation",
        f"You are not authorized to perform this operation. User: {user} is not authorized to perform: "
        "autoscaling:DescribeAutoScalingGroups because no identity-based policy allows it. "
        "Encoded authorization failure message: 4hgYp",
        403,
    )
    denied = f"AWS: {user} may not do autoscaling:DescribeAutoScalingGroups .UnauthorizedOperation.: grant it"
    with pytest.raises(CredentialsError, match=denied):
        await AwsCloud(spec("who")).sizes()
    proxy.hook = lambda proxy, fields: refuse("ExpiredToken", "The security token is expired", 403)
    with pytest.raises(CredentialsError, match=r"expired .*aws sso login"):
        await AwsCloud(spec("who")).sizes()

    for key in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(key)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    with pytest.raises(CredentialsError, match=r"no credentials here .*: sign in"):
        await AwsCloud(spec("who")).sizes()
    monkeypatch.setenv("AWS_PROFILE", "absent")
    with pytest.raises(CredentialsError, match=r"no credentials here .*absent"):
        await asyncio.to_thread(cloud.account, spec("who"))


async def test_an_interruption_by_ec2_itself(aws: Moto, proxy: Proxy) -> None:
    cluster = spec("notice")
    stand(aws, cluster)
    mine = AwsCloud(cluster)
    await mine.resize("spot", 2)
    first, second = (await named(mine))["spot"]
    await mine.preempt(first.name)
    assert [notice["instance"] for notice in aws.notices()][-1:] == [first.name]

    async def replaced() -> bool:
        found = [machine.name for machine in (await named(mine))["spot"]]
        return len(found) == 2 and first.name not in found and second.name in found

    await await_for(replaced, what="another machine in the interrupted one's place")
    [created] = [each for each in proxy.asked if each["path"] == "POST /experimentTemplates"]
    assert '"durationBeforeInterruption": "PT2M"' in created["body"]
    assert f"arn:aws:ec2:us-east-1:{moto_server.ACCOUNT}:instance/{first.name}" in created["body"]
    assert f"arn:aws:iam::{moto_server.ACCOUNT}:role/notice--fis" in created["body"]
    assert aws.client("fis").list_experiment_templates()["experimentTemplates"] == []

    def taken(proxy: Proxy, fields: dict[str, str]) -> None:
        if fields["path"] == "POST /experiments":  # the machine ends before the experiment begins
            aws.client("ec2").terminate_instances(InstanceIds=[second.name])

    proxy.hook = taken
    with pytest.raises(CloudError, match=f"AWS did not interrupt {second.name}: experiment .* failed"):
        await mine.preempt(second.name, 300)
    assert '"durationBeforeInterruption": "PT5M"' in "".join(each["body"] for each in proxy.asked)
    assert aws.client("fis").list_experiment_templates()["experimentTemplates"] == []


async def test_a_kill_without_notice(aws: Moto, proxy: Proxy) -> None:
    cluster = spec("kill")
    stand(aws, cluster)
    mine = AwsCloud(cluster)
    await mine.resize("steady", 1)
    before = {machine.pool: machine.name for machine in await mine.nodes()}
    notices = aws.notices()
    for name in before.values():  # on-demand ones, and the head
        await mine.preempt(name, 0)
    after = {machine.pool: machine.name for machine in await mine.nodes()}
    assert after.keys() == before.keys()
    assert set(after.values()).isdisjoint(before.values())
    assert await mine.sizes() == {"spot": 0, "steady": 1}
    assert aws.notices() == notices


async def test_why_a_pool_is_short(aws: Moto, proxy: Proxy) -> None:
    cluster = spec("short", SPOT | {"zone": "us-east-1c"}, STEADY | {"zone": "us-east-1d"})
    stand(aws, cluster)
    mine = AwsCloud(cluster, page=1)
    assert await mine.problems() == []
    aws.ration("us-east-1c", 2)  # the head and one more
    await mine.resize("spot", 3)
    [problem] = await mine.problems()
    assert (problem.pool, problem.kind) == ("spot", "stockout")
    assert problem.message == (
        "zone us-east-1c has no more spot g5.xlarge at present: 2 missing (Could not launch Spot Instances. "
        "InsufficientInstanceCapacity - There is no Spot capacity available that matches your request.)"
    )
    assert len((await named(mine))["spot"]) == 1
    assert await mine.sizes() == {"spot": 3, "steady": 0}
    aws.ration("us-east-1c", 3)  # one more comes, another try fails
    [later] = await mine.problems()
    assert "1 missing" in later.message
    assert later.at == problem.at
    aws.ration("us-east-1c", 3, moto_server.NO_SPOT_QUOTA)
    [other] = await mine.problems()
    assert (other.kind, "ask for more in Service Quotas" in other.message) == ("quota", True)
    assert other.at > problem.at
    aws.ration("us-east-1c", None)
    assert await mine.problems() == []
    assert len((await named(mine))["spot"]) == 3

    aws.client("autoscaling").delete_auto_scaling_group(AutoScalingGroupName="short--steady", ForceDelete=True)
    assert await mine.sizes() == {"spot": 3}
    [gone] = await mine.problems()
    assert gone.message == "there is no Auto Scaling group short--steady; `make up` makes it"


@pytest.mark.usefixtures("proxy")
async def test_up_refuses_to_end_machines_that_train(aws: Moto) -> None:
    """AWS ends at once what is more than a group's new size. It sends no notice then, and the head drains nothing."""
    cluster, smaller = spec("smaller"), spec("smaller", SPOT | {"max": 2}, STEADY)
    stand(aws, cluster)
    mine, site = AwsCloud(cluster), CloudSite(smaller, "c.yaml")
    await mine.resize("spot", 2)
    await asyncio.to_thread(site._refuse_ends, cluster)
    await mine.resize("spot", 3)
    said = r"^c\.yaml: pool spot has 3 machines and could keep 2: the cloud would end the others.*`make stop .*ID=…"
    with pytest.raises(SpotrunError, match=said):
        await asyncio.to_thread(site._refuse_ends, cluster)
    assert len((await named(mine))["spot"]) == 3
    aws.client("autoscaling").update_auto_scaling_group(AutoScalingGroupName="smaller--spot", MaxSize=2)
    assert len((await named(mine))["spot"]) == 2  # so does Terraform


@pytest.mark.parametrize(
    ("reason", "resumed"),
    [
        ("Administrative suspension because of failures for more than 24 hours", 1),
        ("User suspended at 2026-11-27T08:00:00Z", 0),
    ],
    ids=["AWS has stopped its launches", "a person has stopped its launches"],
)
async def test_a_group_that_launches_nothing(aws: Moto, proxy: Proxy, reason: str, resumed: int) -> None:
    """A zone without machines for a day must not need a person to be asked again."""
    cluster = spec("halted", SPOT)
    if resumed:
        stand(aws, cluster)
    mine = AwsCloud(cluster)
    said: dict[str, tuple[int, list[str]]] = {"halted--spot": (2, [])}
    describes = "DescribeAutoScalingGroups"
    proxy.hook = lambda proxy, fields: groups(said, reason) if fields["Action"] == describes else None
    found = await mine.problems()
    assert len(proxy.of("ResumeProcesses")) == resumed
    assert all(each["ScalingProcesses.member.1"] == "Launch" for each in proxy.of("ResumeProcesses"))
    assert [reason in problem.message for problem in found] == [True] * (1 - resumed)

    def refused(proxy: Proxy, fields: dict[str, str]) -> web.Response | None:
        if fields["Action"] == "ResumeProcesses":
            return refuse("AccessDenied", "not authorized to perform: autoscaling:ResumeProcesses")
        return groups(said, reason) if fields["Action"] == describes else None

    proxy.hook = refused
    [problem] = await mine.problems()
    assert f"halted--spot launches nothing ({reason}): 2 missing; `aws autoscaling resume-processes" in problem.message


async def test_a_failure_from_before_a_pool_had_its_size_explains_nothing(aws: Moto, proxy: Proxy) -> None:
    cluster = spec("past", SPOT | {"zone": "us-east-1e"})
    stand(aws, cluster)
    mine = AwsCloud(cluster)
    aws.ration("us-east-1e", 1)  # the head alone
    await mine.resize("spot", 2)
    assert [problem.kind for problem in await mine.problems()] == ["stockout"]
    await mine.resize("spot", 0)
    assert await mine.problems() == []
    said: dict[str, tuple[int, list[str]]] = {"past--spot": (2, [])}  # grown, not tried yet
    proxy.hook = lambda proxy, fields: groups(said) if fields["Action"] == "DescribeAutoScalingGroups" else None
    assert await mine.problems() == []
    # A new head does not know since when the pool lacks machines.
    assert [problem.kind for problem in await AwsCloud(cluster).problems()] == ["stockout"]


async def test_prices(aws: Moto, proxy: Proxy, caplog: pytest.LogCaptureFixture) -> None:
    unknown = SPOT | {"name": "unknown", "machine": "g5.999xlarge"}
    mine = AwsCloud(spec("price", SPOT, STEADY, unknown, STEADY | {"name": "old", "machine": "p2.xlarge"}))
    with caplog.at_level(logging.WARNING):
        assert await mine.prices() == {"spot": 0.00001, "steady": prices.on_demand("aws", "us-east-1", "g5.2xlarge")}
        assert await mine.prices() == {"spot": 0.00001, "steady": 1.212}
    assert len(proxy.of("DescribeSpotPriceHistory")) == 1
    assert [record.getMessage() for record in caplog.records] == [
        "pool unknown: the price of spot g5.999xlarge is unknown; its cost is counted once the price is known",
        "pool old: the price of on-demand p2.xlarge is unknown; its cost is counted once the price is known",
    ]
    proxy.hook = lambda proxy, fields: refuse("AccessDenied", "not authorized to perform: ec2:DescribeSpotPriceHistory")
    blind = AwsCloud(spec("price"))
    assert await blind.prices() == {"spot": 0.436, "steady": 1.212}  # no reason to see no machines either


@pytest.mark.usefixtures("proxy")
async def test_quotas(aws: Moto) -> None:
    mine = AwsCloud(spec("quota", SPOT | {"max": 20}, STEADY))
    quota = "All G and VT Spot Instance Requests (L-3819A6DF, in vCPUs)"
    assert await mine.shortfalls() == [Shortfall("spot", quota, 64.0, 80.0)]
    aws.quota("L-3819A6DF", 80)
    aws.quota("L-1216C47A", 1)
    standard = "Running On-Demand Standard (A, C, D, H, I, M, R, T, Z) instances (L-1216C47A, in vCPUs)"
    assert await mine.shortfalls() == [Shortfall("head", standard, 1.0, 2.0)]
    wrong = AwsCloud(spec("quota", SPOT | {"machine": "g99.xlarge"}))
    with pytest.raises(CloudError, match=r"g99\.xlarge"):
        await wrong.shortfalls()


def test_an_agent_loads_no_sdk() -> None:
    code = "import sys, spotrun.node.boot, spotrun.cli, spotrun.cloud; sys.exit('boto3' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
