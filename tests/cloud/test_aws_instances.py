"""What AWS says, as data: errors, scaling activities, groups and instances, quotas. And what is made of it."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest
from botocore import exceptions as sdk
from botocore.exceptions import ClientError

from spotrun.cloud import Instance, Problem, Shortfall
from spotrun.cloud.aws import activities, fault_injection, instances, quotas
from spotrun.cloud.aws.errors import cause, refusal
from spotrun.cloud.aws.instances import Departures, Lowering, ScalingGroup, group_of
from spotrun.cloud.aws.prices import newest_prices
from spotrun.cloud.base import Ended
from spotrun.errors import CloudError, CredentialsError, QuotaError, StockoutError
from spotrun.spec import ClusterSpec, PoolSpec

POOL = PoolSpec(name="spot", zone="us-east-1a", machine="g5.2xlarge", max=4)
USER = "arn:aws:sts::123456789012:assumed-role/x--head/i-0"


def answer(code: str, message: str = "as it is") -> ClientError:
    return ClientError({"Error": {"Code": code, "Message": message}}, "RunInstances")


REFUSALS: dict[str, tuple[Any, type[CloudError], str]] = {
    "no machines": (
        answer("InsufficientInstanceCapacity", "We currently do not\nhave  enough"),
        StockoutError,
        "AWS: RunInstances: InsufficientInstanceCapacity: We currently do not have enough",
    ),
    "no machines for a fleet": (answer("UnfulfillableCapacity"), StockoutError, "UnfulfillableCapacity"),
    "too many on spot": (
        answer("MaxSpotInstanceCountExceeded", "Max spot instance count exceeded"),
        QuotaError,
        "MaxSpotInstanceCountExceeded: Max spot instance count exceeded; ask for more in Service Quotas",
    ),
    "too many vCPUs": (answer("VcpuLimitExceeded"), QuotaError, "VcpuLimitExceeded"),
    "too many": (answer("InstanceLimitExceeded"), QuotaError, "InstanceLimitExceeded"),
    "too many experiments": (answer("ServiceQuotaExceededException"), QuotaError, "ServiceQuotaExceeded"),
    "not allowed, with the action": (
        answer(
            "AccessDenied", f"User: {USER} is not authorized to perform: autoscaling:SetDesiredCapacity on resource"
        ),
        CredentialsError,
        f"AWS: {USER} may not do autoscaling:SetDesiredCapacity (AccessDenied): grant it in IAM",
    ),
    "not allowed, without it": (
        answer("UnauthorizedOperation", "You are not authorized. Encoded authorization failure message: Zm9v"),
        CredentialsError,
        "AWS: your account may not do RunInstances (UnauthorizedOperation): grant it in IAM",
    ),
    "expired": (answer("ExpiredToken"), CredentialsError, "have expired (ExpiredToken): sign in again"),
    "request expired": (
        answer("RequestExpired", "Request has expired."),
        CredentialsError,
        "AWS: the credentials have expired, or the clock of this machine is wrong (RequestExpired): sign in again",
    ),
    "a clock that is behind": (
        answer(
            "SignatureDoesNotMatch",
            "Signature expired: 20261130T120000Z is now earlier than 20261130T133000Z (20261130T134500Z - 15 min.)",
        ),
        CredentialsError,
        "AWS: the clock of this machine is wrong (Signature expired: 20261130T120000Z is now earlier than",
    ),
    "a clock that is ahead": (
        answer("SignatureDoesNotMatch", "Signature not yet current: 20261130T150000Z is still later than …"),
        CredentialsError,
        "the clock of this machine is wrong (Signature not yet current",
    ),
    "unknown key": (answer("InvalidClientTokenId"), CredentialsError, "does not know these credentials"),
    "unknown key to EC2": (answer("AuthFailure"), CredentialsError, "does not know these credentials"),
    "throttled": (answer("RequestLimitExceeded"), CloudError, "too many requests, RunInstances was delayed each time"),
    "anything else": (answer("ValidationError", "x" * 400), CloudError, "RunInstances: ValidationError: xxx"),
    "no credentials": (
        sdk.NoCredentialsError(),
        CredentialsError,
        "no credentials here (Unable to locate credentials)",
    ),
    "half of them": (
        sdk.PartialCredentialsError(provider="env", cred_var="AWS_SECRET_ACCESS_KEY"),
        CredentialsError,
        "no credentials here",
    ),
    "no such profile": (sdk.ProfileNotFound(profile="absent"), CredentialsError, "absent"),
    "SSO expired": (sdk.UnauthorizedSSOTokenError(), CredentialsError, "aws sso login"),
    "SSO not begun": (sdk.SSOTokenLoadError(error_msg="no token"), CredentialsError, "aws sso login"),
    "SSO token of a session": (
        sdk.TokenRetrievalError(provider="sso", error_msg="Token has expired"),
        CredentialsError,
        "no longer work",
    ),
    "no answer": (
        sdk.ReadTimeoutError(endpoint_url="https://ec2"),
        CloudError,
        "AWS does not answer (ReadTimeoutError)",
    ),
    "no way": (sdk.EndpointConnectionError(endpoint_url="https://ec2"), CloudError, "AWS does not answer"),
    "what the SDK refuses itself": (sdk.ParamValidationError(report="bad"), CloudError, "AWS: Parameter validation"),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_a_refusal_in_one_line(name: str) -> None:
    error, kind, words = REFUSALS[name]
    found = refusal(error)
    assert type(found) is kind
    assert words in str(found)
    assert "\n" not in str(found)
    assert len(str(found)) < 450
    assert "Zm9v" not in str(found)


CAUSES = {
    "Could not launch Spot Instances. InsufficientInstanceCapacity - There is no Spot capacity available that matches "
    "your request. Launching EC2 instance failed.": "stockout",
    "Could not launch Spot Instances. UnfulfillableCapacity - Unable to fulfill capacity due to your request "
    "configuration. Please adjust your request and try again. Launching EC2 instance failed.": "stockout",
    "There is no Spot capacity available that matches your request. Launching EC2 instance failed.": "stockout",
    "We currently do not have sufficient p4d.24xlarge capacity in the Availability Zone you requested (us-east-1a). "
    "Our system will be working on provisioning additional capacity. You can currently get p4d.24xlarge capacity by "
    "not specifying an Availability Zone in your request. Launching EC2 instance failed.": "stockout",
    # https://github.com/aws/aws-parallelcluster/issues/618
    "Insufficient capacity. Launching EC2 instance failed.": "stockout",
    "Could not launch Spot Instances. MaxSpotInstanceCountExceeded - Max spot instance count exceeded. Launching EC2 "
    "instance failed.": "quota",
    "Could not launch On-Demand Instances. VcpuLimitExceeded - You have requested more vCPU capacity than your current "
    "vCPU limit of 8 allows for the instance bucket that the specified instance type belongs to.": "quota",
    "You have requested more vCPU capacity than your current vCPU limit of 0 allows for the instance bucket that the "
    "specified instance type belongs to. Launching EC2 instance failed.": "quota",
    "20 instance(s) are already running. Launching EC2 instance failed.": "quota",
    "Your quota allows for 0 more running instance(s). You requested at least 1. Launching EC2 instance "
    "failed.": "quota",
    "Your requested instance type (p5.48xlarge) is not supported in your requested Availability Zone (us-east-1a). "
    "Launching EC2 instance failed.": "other",
    "The AMI ID 'ami-0' does not exist. Launching EC2 instance failed.": "other",
    "": "other",
}


@pytest.mark.parametrize("message", CAUSES, ids=lambda message: message[:40])
def test_why_a_launch_failed(message: str) -> None:
    assert cause(message) == CAUSES[message]


def at(seconds: float) -> datetime:
    return datetime.fromtimestamp(1_700_000_000 + seconds, UTC)


def launch(began: float, status: str, message: str = "", took: float = 2.0) -> Any:
    return {
        "ActivityId": f"{began}",
        "AutoScalingGroupName": "x--spot",
        "Cause": "",
        "Description": "Launching a new EC2 instance: i-1",
        "StartTime": at(began),
        "StatusCode": status,
        "StatusMessage": message,
    } | ({"EndTime": at(began + took)} if status in ("Failed", "Successful", "Cancelled") else {})


def end(began: float) -> Any:
    return launch(began, "Successful") | {"Description": "Terminating EC2 instance: i-1"}


DRY, FULL = "There is no Spot capacity available.", "Max spot instance count exceeded."
# newest first; since when the pool has lacked machines; when the launch that explains it began
FAILURES: dict[str, tuple[list[Any], float, float | None]] = {
    "nothing was tried": ([], 0, None),
    "one failed": ([launch(10, "Failed", DRY)], 0, 10),
    "the newest counts": ([launch(70, "Failed", FULL), launch(10, "Failed", DRY)], 0, 70),
    "it was cancelled": ([launch(10, "Cancelled", DRY)], 0, 10),
    "another is on its way": ([launch(70, "WaitingForSpotInstanceId"), launch(10, "Failed", DRY)], 0, 10),
    "another has come since": ([launch(70, "Successful"), launch(10, "Failed", DRY)], 0, None),
    "another came of the same try, at the same time": (
        [launch(10.5, "Successful"), launch(10, "Failed", DRY)],
        0,
        10,
    ),
    "another came before": ([launch(70, "Failed", DRY), launch(10, "Successful")], 0, 70),
    "machines that end are no launches": ([end(70), launch(10, "Failed", DRY)], 0, 10),
    "before the pool lacked any": ([launch(10, "Failed", DRY)], 60, None),
}


@pytest.mark.parametrize("name", FAILURES)
def test_which_failed_launch_explains_a_shortage(name: str) -> None:
    said, since, expected = FAILURES[name]
    found = activities.last_failure(said, at(since).timestamp())
    assert (found and found["StartTime"]) == (None if expected is None else at(expected))


def group(size: int, members: dict[str, str] | None = None, **values: Any) -> ScalingGroup:
    arn = "arn:aws-us-gov:autoscaling:us-gov-west-1:123456789012:autoScalingGroup:uuid:autoScalingGroupName/x--spot"
    return ScalingGroup("spot", "x--spot", arn, "us-east-1a", size, 0, members or {}, **values)


def test_a_problem_keeps_its_time_while_its_kind_is_the_same() -> None:
    now = at(100).timestamp()
    first = activities.problem(POOL, group(3), [launch(10, "Failed", DRY)], 0.0, now)
    text = f"zone us-east-1a has no more spot g5.2xlarge at present: 3 missing ({DRY})"
    assert first == Problem("spot", "stockout", text, at(10).timestamp())
    one = group(3, {"i-1": "InService", "i-2": "Terminating:Wait"})
    later = activities.problem(POOL, one, [launch(70, "Failed", DRY)], 0.0, now, first)
    assert later == Problem("spot", "stockout", text.replace("3 missing", "2 missing"), at(10).timestamp())
    other = activities.problem(POOL, one, [launch(90, "Failed", FULL)], 0.0, now, later)
    assert other is not None
    assert (other.kind, other.at) == ("quota", at(90).timestamp())
    broken = activities.problem(
        POOL, one, [launch(95, "Failed", "The AMI ID\n'ami-0' does not exist.")], 0.0, now, other
    )
    assert broken is not None
    assert broken.message == "no spot g5.2xlarge could be launched: 2 missing (The AMI ID 'ami-0' does not exist.)"
    assert activities.problem(POOL, group(1, {"i-1": "Pending"}), [launch(95, "Failed", DRY)], 0.0, now, broken) is None


def test_a_placed_pool_that_stays_empty_names_placement_and_the_key_that_turns_it_off() -> None:
    said = {"AutoScalingGroupName": "x--spot", "AvailabilityZones": ["us-east-1a"], "DesiredCapacity": 3, "MinSize": 0}
    near: Any = {**said, "SuspendedProcesses": [], "PlacementGroup": "x--spot"}
    found = activities.problem(POOL, group_of("spot", near), [launch(10, "Failed", DRY)], 0.0, at(100).timestamp())
    assert found is not None
    assert "network.placement may be the reason" in found.message
    assert "`placement: false`" in found.message
    quota = activities.problem(POOL, group_of("spot", near), [launch(10, "Failed", FULL)], 0.0, at(100).timestamp())
    assert quota is not None
    assert "placement" not in quota.message


def test_a_group_whose_launches_are_suspended_says_so() -> None:
    stopped = group(2, suspended="Administrative suspension because of failures for more than 24 hours")
    found = activities.problem(POOL, stopped, iter(()), 0.0, 100.0)
    assert found is not None
    assert found.kind == "other"
    assert "x--spot launches nothing (Administrative suspension because" in found.message
    assert "aws autoscaling resume-processes --auto-scaling-group-name x--spot" in found.message


CLUSTER = ClusterSpec.model_validate(
    {
        "name": "x",
        "cloud": "aws",
        "region": "us-east-1",
        "pools": [
            {"name": "spot", "zone": "us-east-1a", "machine": "g5.2xlarge", "max": 4},
            {"name": "big", "zone": "us-east-1b", "machine": "p5.48xlarge", "max": 2},
        ],
    }
)


def machine(name: str, state: str, pool: str = "spot", cluster: str = "x", **values: Any) -> Any:
    return {
        "InstanceId": name,
        "State": {"Name": state, "Code": 0},
        "Placement": {"AvailabilityZone": "us-east-1a"},
        "LaunchTime": at(5),
        "InstanceLifecycle": "spot",
        "Tags": [{"Key": "spotrun-cluster", "Value": cluster}, {"Key": "spotrun-pool", "Value": pool}],
    } | values


def listed(name: str, state: Any, address: str = "", created: float = at(5).timestamp()) -> Instance:
    return Instance(name, "spot", "us-east-1a", address, state, "spot", created, name)


def test_when_a_terminated_machine_ended() -> None:
    said = {
        "i-1": "User initiated (2026-11-22 10:15:00 GMT)",
        "i-2": "Server.SpotInstanceTermination: Instance was terminated by EC2",
        "i-3": "User initiated (2020-01-01 00:00:00 UTC)",
    }
    machines = [machine(name, "terminated", StateTransitionReason=reason) for name, reason in said.items()]
    machines += [
        machine("i-4", "running", StateTransitionReason=""),
        machine("i-5", "shutting-down", StateTransitionReason=said["i-1"]),
        machine("i-6", "terminated", cluster="another", StateTransitionReason=said["i-1"]),
    ]
    made, until = at(5).timestamp(), datetime(2026, 11, 22, 10, 15, tzinfo=UTC).timestamp()
    assert instances.ended(CLUSTER, machines) == [
        Ended("i-1", "spot", made, made, max(made, until)),
        Ended("i-3", "spot", made, made, made),
    ]


# members of the group with their lifecycle states, what EC2 says, what is listed
LISTS: dict[str, tuple[dict[str, str], list[Any], list[Instance]]] = {
    "each state": (
        {"i-1": "Pending", "i-2": "InService", "i-3": "InService"},
        [
            machine("i-1", "pending"),
            machine("i-2", "running", PrivateIpAddress="10.77.0.4"),
            machine("i-3", "shutting-down"),
            machine("i-4", "terminated"),
            machine("i-5", "stopped"),
        ],
        [
            listed("i-1", "provisioning"),
            listed("i-2", "running", "10.77.0.4"),
            listed("i-3", "stopping"),
            listed("i-4", "terminated"),
            listed("i-5", "stopping"),
        ],
    ),
    "its group has given it up": ({"i-1": "Terminating"}, [machine("i-1", "running")], [listed("i-1", "stopping")]),
    "EC2 does not show it yet": ({"i-1": "Pending"}, [], [listed("i-1", "provisioning", created=0.0)]),
    "EC2 shows it no more": ({"i-1": "Terminating"}, [], []),
    "its group does not count it yet": ({}, [machine("i-1", "pending")], [listed("i-1", "provisioning")]),
    "another cluster's, or no pool's": (
        {},
        [machine("i-1", "running", cluster="x-y"), machine("i-2", "running", Tags=[])],
        [],
    ),
}


@pytest.mark.parametrize("name", LISTS)
def test_machines_of_two_minds(name: str) -> None:
    members, said, expected = LISTS[name]
    assert instances.instances(CLUSTER, [group(3, members)], said) == expected


KNOWN = [
    listed("i-1", "running"),
    listed("i-2", "running"),
    listed("i-3", "stopping"),
    listed("i-4", "terminated"),
    listed("i-5", "running"),
]
MEMBERS = {"i-1": "InService", "i-2": "InService", "i-3": "Terminating", "i-4": "InService"}
# asked for, the group's size, taken before; removed; replaced
LEAVING: dict[str, tuple[list[str], int, set[str], Departures, Departures]] = {
    "one": (["i-1"], 3, set(), Departures((("i-1", True),)), Departures((("i-1", False),))),
    "twice the same": (["i-1", "i-1"], 3, set(), Departures((("i-1", True),)), Departures((("i-1", False),))),
    "on its way out already": (["i-3"], 3, set(), Departures(()), Departures(())),
    "taken, which its group does not show yet": (["i-1"], 3, {"i-1"}, Departures(()), Departures(())),
    "ended, which its group has not seen yet": (
        ["i-4"],
        3,
        set(),
        Departures((("i-4", True),)),
        Departures((("i-4", False),)),
    ),
    "more than the size is": (
        ["i-1", "i-2"],
        1,
        set(),
        Departures((("i-1", True), ("i-2", False))),
        Departures((("i-1", False), ("i-2", False))),
    ),
    "in no group": (["i-5"], 3, set(), Departures((), ("i-5",)), Departures((), ("i-5",))),
}


@pytest.mark.parametrize("name", LEAVING)
def test_who_is_taken_and_whether_it_counts(name: str) -> None:
    asked, size, taken, removed, replaced = LEAVING[name]
    groups = [group(size, MEMBERS)]
    assert instances.removal(asked, groups, KNOWN, taken) == removed
    assert instances.replacement(asked, groups, KNOWN, taken) == replaced


# the size wanted, the group's, its members, taken before; what is done
LOWER: dict[str, tuple[int, int, dict[str, str], set[str], Lowering]] = {
    "what was never born is taken back": (1, 3, {"i-1": "InService"}, set(), Lowering((), 1)),
    "a dead one that still counts goes by name": (2, 3, MEMBERS | {"i-3": "InService"}, set(), Lowering(("i-3",))),
    "as many of the dead as are too much": (3, 4, MEMBERS | {"i-3": "InService"}, set(), Lowering(("i-3",))),
    "a dead one and one that was never born": (
        2,
        4,
        {"i-1": "InService", "i-4": "InService"},
        set(),
        Lowering(("i-4",), 2),
    ),
    "two dead ones": (
        1,
        3,
        {"i-1": "InService", "i-3": "InService", "i-4": "InService"},
        set(),
        Lowering(("i-3", "i-4")),
    ),
    "the living stay, whatever the size": (1, 3, {"i-1": "InService", "i-2": "InService"}, set(), Lowering((), 2)),
    "one that starts is a member too": (1, 2, {"i-1": "InService", "i-9": "Pending"}, set(), Lowering()),
    "one that leaves may count still": (1, 2, {"i-1": "InService", "i-3": "Terminating"}, set(), Lowering()),
    "an unhealthy one that runs may count still": (1, 2, {"i-1": "InService", "i-2": "InService"}, set(), Lowering()),
    "one that was taken already is not taken twice": (
        1,
        2,
        {"i-1": "InService", "i-4": "InService"},
        {"i-4"},
        Lowering(),
    ),
    "all of them": (0, 2, {"i-1": "InService", "i-2": "InService"}, set(), Lowering((), 0)),
    "more": (4, 2, {"i-1": "InService", "i-2": "InService"}, set(), Lowering((), 4)),
}


@pytest.mark.parametrize("name", LOWER)
def test_a_lower_size_ends_no_live_machine(name: str) -> None:
    wanted, size, members, taken, expected = LOWER[name]
    assert instances.lowering(wanted, group(size, members), KNOWN, taken) == expected


@pytest.mark.parametrize(
    ("notice", "duration"), [(None, "PT2M"), (1.0, "PT2M"), (149.0, "PT2M"), (300.0, "PT5M"), (86400.0, "PT15M")]
)
def test_an_interruption_that_the_service_accepts(notice: float | None, duration: str) -> None:
    found = fault_injection.template("x", group(1).arn, "i-1", notice)
    assert found["actions"]["interrupt"]["parameters"] == {"durationBeforeInterruption": duration}
    assert found["targets"]["machine"]["resourceArns"] == ["arn:aws-us-gov:ec2:us-gov-west-1:123456789012:instance/i-1"]
    assert found["roleArn"] == "arn:aws-us-gov:iam::123456789012:role/x--fis"


QUOTAS = {
    ("g5.2xlarge", "spot"): "L-3819A6DF",
    ("g5.2xlarge", "on-demand"): "L-DB2E81BA",
    ("gr6.4xlarge", "spot"): "L-3819A6DF",
    ("vt1.3xlarge", "on-demand"): "L-DB2E81BA",
    ("p3dn.24xlarge", "spot"): "L-7212CCBC",
    ("p4de.24xlarge", "spot"): "L-7212CCBC",
    ("p5en.48xlarge", "spot"): "L-C4BD4855",
    ("p5.48xlarge", "on-demand"): "L-417A185B",
    ("p6-b200.48xlarge", "spot"): None,
    ("p6-b200.48xlarge", "on-demand"): "L-417A185B",
    ("t3.small", "on-demand"): "L-1216C47A",
    ("c7i.4xlarge", "spot"): "L-34B43A08",
    ("im4gn.large", "spot"): "L-34B43A08",
    ("inf2.xlarge", "spot"): "L-B5D1601B",
    ("trn1.2xlarge", "on-demand"): "L-2C3B7624",
    ("dl1.24xlarge", "spot"): "L-85EED4F7",
    ("u-6tb1.metal", "on-demand"): None,
    ("hpc7a.96xlarge", "on-demand"): None,
}


@pytest.mark.parametrize(("machine", "market"), QUOTAS)
def test_which_quota_counts(machine: str, market: Any) -> None:
    found = quotas.quota_of(machine, market)
    assert (found and found.code) == QUOTAS[machine, market]


ENOUGH = {"L-1216C47A": 5.0, "L-3819A6DF": 32.0, "L-C4BD4855": 384.0}
G, P5 = (
    "All G and VT Spot Instance Requests (L-3819A6DF, in vCPUs)",
    "All P5 Spot Instance Requests (L-C4BD4855, in vCPUs)",
)
SHORTFALLS: dict[str, tuple[dict[str, float], list[Shortfall]]] = {
    "just enough": (ENOUGH, []),
    "one too few": (ENOUGH | {"L-3819A6DF": 31.0}, [Shortfall("spot", G, 31.0, 32.0)]),
    "a new account": (
        {"L-1216C47A": 5.0, "L-3819A6DF": 0.0, "L-C4BD4855": 0.0},
        [Shortfall("spot", G, 0.0, 32.0), Shortfall("big", P5, 0.0, 384.0)],
    ),
    "not even the head": (
        ENOUGH | {"L-1216C47A": 1.0},
        [
            Shortfall(
                "head", "Running On-Demand Standard (A, C, D, H, I, M, R, T, Z) instances (L-1216C47A, in vCPUs)", 1, 2
            )
        ],
    ),
    "a quota that is not known": ({}, []),
}


@pytest.mark.parametrize("name", SHORTFALLS)
def test_what_an_account_may_have(name: str) -> None:
    allowed, expected = SHORTFALLS[name]
    vcpus = {"t3.small": 2, "g5.2xlarge": 8, "p5.48xlarge": 192}
    assert quotas.shortfalls(CLUSTER, vcpus, allowed) == expected


def test_the_newest_price_of_each_machine_and_zone() -> None:
    changes: list[Any] = [
        {"InstanceType": machine, "AvailabilityZone": zone, "SpotPrice": price, "Timestamp": at(when)}
        for machine, zone, price, when in (
            ("g5.xlarge", "us-east-1a", "0.41", 10),
            ("g5.xlarge", "us-east-1a", "0.43", 30),
            ("g5.xlarge", "us-east-1a", "0.42", 20),
            ("g5.xlarge", "us-east-1b", "0.50", 5),
            ("p5.48xlarge", "us-east-1a", "18.9", 1),
        )
    ]
    assert newest_prices(changes) == {
        ("g5.xlarge", "us-east-1a"): 0.43,
        ("g5.xlarge", "us-east-1b"): 0.5,
        ("p5.48xlarge", "us-east-1a"): 18.9,
    }
