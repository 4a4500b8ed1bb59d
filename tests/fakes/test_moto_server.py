"""AWS on this machine: what is added to moto answers as AWS does, and the server goes when nobody needs it."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
from collections.abc import Iterator

import pytest
from botocore.exceptions import ClientError

from tests.fakes import moto_server
from tests.fakes.moto_server import NO_SPOT, Moto
from tests.helpers import wait_for
from tests.infra.synthesized import ROOT

pytestmark = pytest.mark.clouds


@pytest.fixture(scope="module")
def aws() -> Iterator[Moto]:
    with moto_server.running() as moto:
        yield moto


def group(aws: Moto, name: str, zone: str, size: int, on_demand: int = 0) -> None:
    ec2, image = aws.client("ec2"), aws.image()
    ec2.create_placement_group(GroupName=name, Strategy="cluster")
    ec2.create_launch_template(
        LaunchTemplateName=name, LaunchTemplateData={"ImageId": image, "InstanceType": "g5.xlarge"}
    )
    policy = {
        "LaunchTemplate": {"LaunchTemplateSpecification": {"LaunchTemplateName": name, "Version": "$Latest"}},
        "InstancesDistribution": {"OnDemandPercentageAboveBaseCapacity": on_demand},
    }
    options = {"MinSize": 0, "MaxSize": 9, "DesiredCapacity": size, "AvailabilityZones": [zone]}
    aws.client("autoscaling").create_auto_scaling_group(
        AutoScalingGroupName=name, PlacementGroup=name, MixedInstancesPolicy=policy, **options
    )


def instances(aws: Moto, name: str) -> list[str]:
    found = aws.client("autoscaling").describe_auto_scaling_groups(AutoScalingGroupNames=[name])
    return [each["InstanceId"] for each in found["AutoScalingGroups"][0]["Instances"]]


def test_placement_groups(aws: Moto) -> None:
    ec2 = aws.client("ec2")
    tags = [{"Key": "team", "Value": "vision"}]
    specification = [{"ResourceType": "placement-group", "Tags": tags}]
    made = ec2.create_placement_group(GroupName="near", Strategy="cluster", TagSpecifications=specification)
    made = made["PlacementGroup"]
    assert (made["GroupName"], made["State"], made["Strategy"], made["Tags"]) == ("near", "available", "cluster", tags)
    for question in ({"GroupNames": ["near"]}, {"Filters": [{"Name": "tag:team", "Values": ["vision"]}]}):
        assert ec2.describe_placement_groups(**question)["PlacementGroups"] == [made]
    with pytest.raises(ClientError, match=r"\(InvalidPlacementGroup\.Duplicate\)"):
        ec2.create_placement_group(GroupName="near", Strategy="cluster")
    ec2.delete_placement_group(GroupName="near")
    with pytest.raises(ClientError, match=r"\(InvalidPlacementGroup\.Unknown\)"):
        ec2.describe_placement_groups(GroupNames=["near"])
    group(aws, "used", "us-east-1b", 1)
    with pytest.raises(ClientError, match=r"\(InvalidPlacementGroup\.InUse\)"):
        ec2.delete_placement_group(GroupName="used")


def test_an_update_changes_what_it_names_alone_and_an_empty_name_ends_placement(aws: Moto) -> None:
    """https://docs.aws.amazon.com/autoscaling/ec2/APIReference/API_UpdateAutoScalingGroup.html"""
    autoscaling = aws.client("autoscaling")
    group(aws, "moved", "us-east-1b", 0)
    found = autoscaling.describe_auto_scaling_groups(AutoScalingGroupNames=["moved"])["AutoScalingGroups"]
    policy = found[0]["MixedInstancesPolicy"]
    for change, placement in (({"PlacementGroup": "a"}, "a"), ({"MaxSize": 8}, "a"), ({"PlacementGroup": ""}, None)):
        autoscaling.update_auto_scaling_group(AutoScalingGroupName="moved", **change)
        (shown,) = autoscaling.describe_auto_scaling_groups(AutoScalingGroupNames=["moved"])["AutoScalingGroups"]
        assert (shown.get("PlacementGroup"), shown["MixedInstancesPolicy"]) == (placement, policy)


def test_a_group_gets_what_the_zone_has_and_says_what_it_lacks(aws: Moto) -> None:
    aws.ration("us-east-1c", 2)
    group(aws, "short", "us-east-1c", 3)
    assert len(instances(aws, "short")) == 2
    said = aws.client("autoscaling").describe_scaling_activities(AutoScalingGroupName="short")["Activities"]
    assert [each["StatusCode"] for each in said] == ["Failed", "Successful", "Successful"]
    assert said[0]["StatusMessage"] == NO_SPOT
    aws.ration("us-east-1c", None)
    assert len(instances(aws, "short")) == 3


@pytest.mark.parametrize(("name", "on_demand", "status"), [("taken", 0, "pending"), ("kept", 100, "failed")])
def test_only_spot_machines_are_interrupted(aws: Moto, name: str, on_demand: int, status: str) -> None:
    group(aws, name, "us-east-1a", 1, on_demand)
    (instance,) = instances(aws, name)
    fis = aws.client("fis")
    arn = f"arn:aws:ec2:us-east-1:{moto_server.ACCOUNT}:instance/{instance}"
    target = {"resourceType": "aws:ec2:spot-instance", "resourceArns": [arn], "selectionMode": "ALL"}
    action = {
        "actionId": "aws:ec2:send-spot-instance-interruptions",
        "parameters": {"durationBeforeInterruption": "PT2M"},
        "targets": {"SpotInstances": "it"},
    }
    made = fis.create_experiment_template(
        clientToken=name,
        description=name,
        stopConditions=[{"source": "none"}],
        roleArn=f"arn:aws:iam::{moto_server.ACCOUNT}:role/fis",
        targets={"it": target},
        actions={"go": action},
    )
    started = fis.start_experiment(clientToken=name, experimentTemplateId=made["experimentTemplate"]["id"])
    assert started["experiment"]["state"]["status"] == status
    gone = status != "failed"
    assert (instance in [each["instance"] for each in aws.notices()]) == gone
    if gone:
        assert wait_for(lambda: len(new := instances(aws, name)) == 1 and new != [instance])
        reservations = aws.client("ec2").describe_instances(InstanceIds=[instance])["Reservations"]
        assert reservations[0]["Instances"][0]["StateReason"]["Code"] == "Server.SpotInstanceTermination"
    else:
        assert instances(aws, name) == [instance]


def test_the_server_ends_with_whoever_started_it() -> None:
    code = (
        "import signal; from tests.fakes import moto_server\n"
        "with moto_server.running() as aws: print(aws.endpoint, flush=True); signal.pause()"
    )
    with subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        port = int(process.stdout.readline().rpartition(":")[2])
        socket.create_connection(("127.0.0.1", port)).close()
        process.send_signal(signal.SIGKILL)

    def is_gone() -> bool:
        try:
            socket.create_connection(("127.0.0.1", port)).close()
        except ConnectionRefusedError:
            return True
        return False

    assert wait_for(is_gone)
