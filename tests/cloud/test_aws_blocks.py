"""Machines of Capacity Blocks: AWS ends them half an hour before their block, and the head knows when."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from datetime import UTC, datetime

import pytest
from aiohttp import web
from botocore.exceptions import ReadTimeoutError

from spotrun.cloud.aws import AwsCloud
from spotrun.spec import ClusterSpec
from tests.fakes.aws_proxy import Proxy, groups, refuse

pytestmark = pytest.mark.clouds

CLUSTER = ClusterSpec.model_validate(
    {
        "name": "c",
        "cloud": "aws",
        "region": "us-east-1",
        "pools": [{"name": "block", "zone": "us-east-1a", "machine": "p5.48xlarge", "max": 2, "market": "on-demand"}],
    }
)
END = datetime(2026, 11, 23, 11, 30, tzinfo=UTC)
KEYS = {"AWS_ACCESS_KEY_ID": "testing", "AWS_SECRET_ACCESS_KEY": "testing", "AWS_EC2_METADATA_DISABLED": "true"}
BLOCK = "<instanceLifecycle>capacity-block</instanceLifecycle>"
EC2 = "http://ec2.amazonaws.com/doc/2016-11-15/"
MACHINES = "".join(
    f"<item><instanceId>{name}</instanceId><instanceState><code>16</code><name>running</name></instanceState>"
    f"<launchTime>2026-11-22T11:30:00.000Z</launchTime><placement><availabilityZone>us-east-1a</availabilityZone>"
    f"</placement>{more}<tagSet><item><key>spotrun-cluster</key><value>c</value></item>"
    "<item><key>spotrun-pool</key><value>block</value></item></tagSet></item>"
    for name, more in (
        ("i-1", BLOCK + "<capacityReservationId>cr-1</capacityReservationId>"),
        ("i-2", "<capacityReservationId>cr-2</capacityReservationId>"),
    )
)
ANSWERS = {
    "DescribeInstances": f"<reservationSet><item><instancesSet>{MACHINES}</instancesSet></item></reservationSet>",
    "DescribeCapacityReservations": "<capacityReservationSet><item><capacityReservationId>cr-1</capacityReservationId>"
    f"<endDate>{END:%Y-%m-%dT%H:%M:%S}.000Z</endDate></item></capacityReservationSet>",
}


def answer(proxy: Proxy, fields: dict[str, str]) -> web.Response:
    action = fields["Action"]
    if action == "DescribeAutoScalingGroups":
        return groups({"c--block": (2, ["i-1", "i-2"])})
    text = f'<{action}Response xmlns="{EC2}">{ANSWERS[action]}</{action}Response>'
    return web.Response(text=text, content_type="text/xml")


@pytest.fixture
async def aws(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Proxy]:
    """One that answers everything itself."""
    found = Proxy("http://127.0.0.1:9")
    found.hook = answer
    for key, value in {**KEYS, "AWS_ENDPOINT_URL": await found.start()}.items():
        monkeypatch.setenv(key, value)
    yield found
    await found.stop()


async def test_the_end_is_known_half_an_hour_before_the_block_ends(aws: Proxy) -> None:
    cloud = AwsCloud(CLUSTER)
    for _ in range(2):
        ends = {node.name: node.ends for node in await cloud.nodes()}
        assert ends == {"i-1": END.timestamp() - 1800, "i-2": 0.0}, "i-2 is of a reservation without an end"
    assert [each["CapacityReservationId.1"] for each in aws.of("DescribeCapacityReservations")] == ["cr-1"]
    await cloud.close()


async def test_without_an_answer_the_machines_are_known(
    aws: Proxy, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def silent(**request: object) -> None:
        raise ReadTimeoutError(endpoint_url="https://ec2")

    cloud = AwsCloud(CLUSTER)
    monkeypatch.setattr(cloud._clients.ec2, "describe_capacity_reservations", silent)
    with caplog.at_level(logging.WARNING):
        assert {node.name: node.ends for node in await cloud.nodes()} == {"i-1": 0.0, "i-2": 0.0}
    assert "AWS does not say when the Capacity Blocks end: AWS does not answer" in caplog.text
    await cloud.close()


async def test_without_the_right_to_ask_the_machines_are_known(aws: Proxy, caplog: pytest.LogCaptureFixture) -> None:
    def refused(proxy: Proxy, fields: dict[str, str]) -> web.Response:
        if fields["Action"] == "DescribeCapacityReservations":
            return refuse("UnauthorizedOperation", "You are not authorized to perform this operation.", 403)
        return answer(proxy, fields)

    aws.hook = refused
    cloud = AwsCloud(CLUSTER)
    with caplog.at_level(logging.WARNING):
        assert {node.name: node.ends for node in await cloud.nodes()} == {"i-1": 0.0, "i-2": 0.0}
        await cloud.nodes()
    [line] = [record.getMessage() for record in caplog.records]
    assert line.startswith(
        "AWS does not say when the Capacity Blocks end: AWS: your account may not do DescribeCapacity"
    )
    await cloud.close()
