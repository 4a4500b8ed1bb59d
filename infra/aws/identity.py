"""The rights of the nodes, of the head, and of the service that interrupts spot machines in tests."""

from __future__ import annotations

import json
from typing import Any

from infra import cdk, objects
from infra.aws.stack import AwsStack
from spotrun.spec.names import CLUSTER, FIS, HEAD, NODE, group
from spotrun.store import keys

MACHINE = "i-"  # the ids of EC2's machines begin with this; nodes are named by these ids
Statement = dict[str, Any]

# What Systems Manager's agent needs for sessions. AmazonSSMManagedInstanceCore would also let it read every parameter
# of the account.
# https://docs.aws.amazon.com/systems-manager/latest/userguide/getting-started-create-iam-instance-profile.html
SESSIONS = (
    "ssm:UpdateInstanceInformation",
    "ssmmessages:CreateControlChannel",
    "ssmmessages:CreateDataChannel",
    "ssmmessages:OpenControlChannel",
    "ssmmessages:OpenDataChannel",
)
# What the head calls in `spotrun.cloud.aws`. These calls only read, and IAM cannot narrow them to a cluster. Quotas are
# absent: only operators ask about them.
LOOKS = (
    "autoscaling:DescribeAutoScalingGroups",
    "autoscaling:DescribeScalingActivities",
    "ec2:DescribeAvailabilityZones",
    "ec2:DescribeCapacityReservations",
    "ec2:DescribeInstances",
    "ec2:DescribeSpotPriceHistory",
    "ec2:GetSpotPlacementScores",
)
RESIZES = (
    "autoscaling:ResumeProcesses",
    "autoscaling:SetDesiredCapacity",
    "autoscaling:TerminateInstanceInAutoScalingGroup",
)


def make(stack: AwsStack, bucket_arn: str) -> None:
    """The three roles, and instance profiles of the same names. IAM's names are shared by all regions."""
    name = stack.cluster.name
    node = _files(bucket_arn, objects.Cluster(name, MACHINE))
    head = [*_storage(bucket_arn), *_head(stack)]
    for role, statements in ((NODE, node), (HEAD, head)):
        made = _role(stack, role, "ec2.amazonaws.com", statements)
        cdk.aws("iam_instance_profile")(stack, f"{role}-profile", name=group(name, role), role=made.name)
    # The head asks the service, and the service interrupts machines. It may do so only to this cluster's machines.
    own = {"StringEquals": {f"aws:ResourceTag/{CLUSTER}": name}}
    interrupts = [
        _allow("Interrupt", ["ec2:SendSpotInstanceInterruptions"], stack.arn("ec2", "instance/*"), own),
        _allow("Look", ["ec2:DescribeInstances"], "*"),
    ]
    _role(stack, FIS, "fis.amazonaws.com", interrupts, {"StringEquals": {"aws:SourceAccount": stack.account}})


def _role(
    stack: AwsStack, role: str, service: str, statements: list[Statement], only: dict[str, Any] | None = None
) -> Any:
    trust = {"Effect": "Allow", "Action": "sts:AssumeRole", "Principal": {"Service": service}}
    name = group(stack.cluster.name, role)
    made = cdk.aws("iam_role")(
        stack,
        f"{role}-role",
        name=name,
        description=f"spotrun cluster {stack.cluster.name}: {role}",
        permissions_boundary=stack.cluster.permissions_boundary,
        assume_role_policy=document([trust | ({"Condition": only} if only else {})]),
    )
    cdk.aws("iam_role_policy")(stack, f"{role}-policy", name=name, role=made.name, policy=document(statements))
    return made


def _files(bucket: str, cluster: objects.Cluster) -> list[Statement]:
    """What a node may do with the bucket. It may list the bucket: without that right, S3 hides that an object is
    missing.

    The checkpoint files that nodes write have names that begin with g, for generation. Only the head writes the
    manifest. IAM has no variable for the machine's id that fits into a key, so nodes can write each other's records.
    """
    job, own = f"{bucket}/{keys.JOBS}*", {kind: f"{bucket}/{cluster.records(kind)}*" for kind in objects.RECORDS}
    growing = {kind: f"{job}/{kind}/*" for kind in objects.GROWING}
    forgotten = [own[kind] for kind in objects.FORGOTTEN]
    checkpoints, kept = (f"{job}/{kind}/*" for kind in (keys.CHECKPOINTS, keys.KEPT))
    read = [f"{bucket}/{each}" for each in (f"{keys.CODE}*", f"{keys.DATA}*", cluster.head)]
    return [
        _allow("List", ["s3:ListBucket"], bucket),
        _allow("Read", ["s3:GetObject"], [*read, checkpoints, kept, *forgotten]),
        _allow(
            "Write",
            ["s3:AbortMultipartUpload", "s3:PutObject"],
            [f"{checkpoints}/g*", kept, *growing.values(), *own.values()],
        ),
        _allow("Tag", ["s3:PutObjectTagging"], growing[keys.LOGS]),
        _allow("Forget", ["s3:DeleteObject"], forgotten),
    ]


def _storage(bucket: str) -> list[Statement]:
    every = ["s3:AbortMultipartUpload", "s3:DeleteObject", "s3:GetObject", "s3:PutObject", "s3:PutObjectTagging"]
    return [_allow("List", ["s3:ListBucket"], bucket), _allow("Objects", every, f"{bucket}/*")]


def _head(stack: AwsStack) -> list[Statement]:
    name = stack.cluster.name
    groups = stack.arn("autoscaling", f"autoScalingGroup:*:autoScalingGroupName/{group(name, '*')}")
    return [
        _allow("Sessions", SESSIONS, "*"),
        _allow("Look", LOOKS, "*"),
        _allow("Resize", RESIZES, groups),
        *_experiments(stack, name),
    ]


def _experiments(stack: AwsStack, name: str) -> list[Statement]:
    """Interruptions on demand: an experiment's template, the experiment, and the role of the service.

    https://docs.aws.amazon.com/service-authorization/latest/reference/list_awsfaultinjectionservice.html
    """
    templates, experiments = stack.arn("fis", "experiment-template/*"), stack.arn("fis", "experiment/*")
    action = f"arn:{stack.partition}:fis:*:*:action/aws:ec2:send-spot-instance-interruptions"
    new, own = ({"StringEquals": {f"aws:{what}Tag/{CLUSTER}": name}} for what in ("Request", "Resource"))
    service_role = "role/aws-service-role/fis.amazonaws.com/AWSServiceRoleForFIS"
    return [
        _allow("Action", ["fis:CreateExperimentTemplate"], action),
        _allow("Create", ["fis:CreateExperimentTemplate", "fis:TagResource"], [templates, experiments], new),
        _allow("Start", ["fis:StartExperiment"], experiments, new),
        _allow("Template", ["fis:DeleteExperimentTemplate", "fis:StartExperiment"], templates, own),
        _allow("Watch", ["fis:GetExperiment"], experiments, own),
        _allow(
            "Pass",
            ["iam:PassRole"],
            stack.arn("iam", f"role/{group(name, FIS)}"),
            {"StringEquals": {"iam:PassedToService": "fis.amazonaws.com"}},
        ),
        # The first experiment of an account makes the service's own role, which needs this right.
        _allow(
            "Service",
            ["iam:CreateServiceLinkedRole"],
            stack.arn("iam", service_role),
            {"StringEquals": {"iam:AWSServiceName": "fis.amazonaws.com"}},
        ),
    ]


def _allow(
    what: str, actions: list[str] | tuple[str, ...], resource: str | list[str], only: dict[str, Any] | None = None
) -> Statement:
    statement = {"Sid": what, "Effect": "Allow", "Action": list(actions), "Resource": resource}
    return statement | ({"Condition": only} if only else {})


def document(statements: list[Statement]) -> str:
    """A policy's JSON."""
    return json.dumps({"Version": "2012-10-17", "Statement": statements})
