"""The sample policies for operators on AWS: what they let through, and that machines get by within the boundary."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from spotrun.spec import load_cluster
from tests.infra import synthesized
from tests.infra.policies import like, several

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "docs/aws-policies"
ACCOUNT, REGION = "123456789012", "us-east-1"
BOUNDARY = f"arn:aws:iam::{ACCOUNT}:policy/spotrun-boundary"
ROLE = f"arn:aws:iam::{ACCOUNT}:role/g5--head"
HEAD = {"ssm:resourceTag/spotrun-cluster": "g5", "ssm:resourceTag/spotrun-role": "head"}
INSTANCE = f"arn:aws:ec2:{REGION}:{ACCOUNT}:instance/i-0123456789abcdef0"


def statements(policy: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((FOLDER / f"{policy}.json").read_text())["Statement"]
    return found


def allows(policy: str, action: str, resource: str, **context: str) -> bool:
    """IAM's decision. context: condition keys and their values."""
    return any(
        any(like(pattern, action) for pattern in several(each["Action"]))
        and any(like(pattern, resource) for pattern in several(each["Resource"]))
        and _met(each.get("Condition", {}), context)
        for each in statements(policy)
    )


def _met(condition: dict[str, dict[str, Any]], context: dict[str, str]) -> bool:
    for operator, wanted in condition.items():
        assert operator in ("StringEquals", "BoolIfExists"), operator
        for key, values in wanted.items():
            if key not in context and operator.endswith("IfExists"):
                continue
            if context.get(key) not in several(values):
                return False
    return True


def test_a_session_without_a_document_is_refused() -> None:
    """Without one, Systems Manager gives a shell as ssm-user, who may become root, and tells IAM whether it looked.

    https://docs.aws.amazon.com/systems-manager/latest/userguide/getting-started-sessiondocumentaccesscheck.html
    """
    start = "ssm:StartSession"
    assert allows("train", start, INSTANCE, **HEAD, **{"ssm:SessionDocumentAccessCheck": "true"})
    assert not allows("train", start, INSTANCE, **HEAD, **{"ssm:SessionDocumentAccessCheck": "false"})
    documents = f"arn:aws:ssm:{REGION}:{{}}:document/{{}}"
    assert allows("train", start, documents.format("", "AWS-StartSSHSession"))
    assert not allows("train", start, documents.format(ACCOUNT, "SSM-SessionManagerRunShell"))
    assert not allows("train", start, INSTANCE, **HEAD | {"ssm:resourceTag/spotrun-role": "node"})


def test_a_person_opens_the_channel_of_their_own_sessions_alone() -> None:
    """The session's program on the operator's computer opens it, and Systems Manager asks IAM whether it may.

    https://docs.aws.amazon.com/systems-manager/latest/userguide/getting-started-restrict-access-quickstart.html
    """
    session = f"arn:aws:ssm:{REGION}:{ACCOUNT}:session/{{}}-0a1b2c3d"
    for action in ("ssmmessages:OpenDataChannel", "ssm:ResumeSession", "ssm:TerminateSession"):
        assert allows("train", action, session.format("${aws:userid}"))
        assert not allows("train", action, session.format("AIDAOTHER"))


def test_roles_are_made_within_the_boundary_alone() -> None:
    bounded, other = {"iam:PermissionsBoundary": BOUNDARY}, {"iam:PermissionsBoundary": BOUNDARY + "-not"}
    for action in ("CreateRole", "PutRolePolicy", "PutRolePermissionsBoundary"):
        assert allows("up", f"iam:{action}", ROLE, **bounded)
        assert not allows("up", f"iam:{action}", ROLE, **other)
        assert not allows("up", f"iam:{action}", ROLE)
        assert not allows("up", f"iam:{action}", f"arn:aws:iam::{ACCOUNT}:role/admin", **bounded)
    for action in ("AttachRolePolicy", "DeleteRolePermissionsBoundary", "CreateUser", "CreateAccessKey"):
        assert not allows("up", f"iam:{action}", ROLE, **bounded)
    for action in ("CreatePolicyVersion", "DeletePolicy", "SetDefaultPolicyVersion"):
        assert not allows("up", f"iam:{action}", BOUNDARY)


def test_roles_are_passed_to_machines_alone() -> None:
    assert allows("up", "iam:PassRole", ROLE, **{"iam:PassedToService": "ec2.amazonaws.com"})
    assert not allows("up", "iam:PassRole", ROLE, **{"iam:PassedToService": "lambda.amazonaws.com"})
    assert not allows("up", "iam:PassRole", ROLE)


@pytest.mark.parametrize("policy", ["up", "train", "boundary"])
def test_a_cluster_whose_name_goes_on_is_another(policy: str) -> None:
    """What is named after cluster g5 does not match what is named after g50."""
    for statement in statements(policy):
        for pattern in several(statement["Resource"]):
            if "g5" in pattern:
                assert not like(pattern, re.sub(r"\*|\?", "x", pattern.replace("g5", "g50"))), pattern


def test_endpoints_with_private_names_can_be_made() -> None:
    """EC2 also checks the right to use AWS's hosted zone. Route 53 is global, so the request's region may differ.

    https://docs.aws.amazon.com/service-authorization/latest/reference/list_amazonec2.html (CreateVpcEndpoint)
    """
    endpoint = f"arn:aws:ec2:{REGION}:{ACCOUNT}:vpc-endpoint/vpce-0123456789abcdef0"
    assert allows("up", "ec2:CreateVpcEndpoint", endpoint, **{"aws:RequestedRegion": REGION})
    zone = "arn:aws:route53:::hostedzone/Z0123456789ABC"
    assert allows("up", "route53:AssociateVPCWithHostedZone", zone)
    assert not allows("up", "route53:ChangeResourceRecordSets", zone)


def test_what_the_guide_advises_in_trouble_is_allowed() -> None:
    trouble = (ROOT / "docs/aws.md").read_text().partition("## 11. Trouble")[2]
    found = re.findall(r"`aws (ec2|autoscaling) ([a-z-]+) ", trouble)
    assert ("ec2", "get-console-output") in found
    group = f"arn:aws:autoscaling:{REGION}:{ACCOUNT}:autoScalingGroup:x:autoScalingGroupName/g5--head"
    for service, command in found:
        action = f"{service}:{command.title().replace('-', '')}"
        assert allows("up", action, INSTANCE if service == "ec2" else group), action


def test_the_plans_role_may_read_what_terraform_refreshes() -> None:
    """What the AWS provider asks about resources aws_s3_bucket, aws_s3_bucket_* and aws_s3_object.

    https://docs.aws.amazon.com/service-authorization/latest/reference/list_amazons3.html
    """
    text = (ROOT / "docs/aws.md").read_text()
    rights = text.partition("`spotrun-plan` needs:")[2].partition("Give `spotrun-plan` no more rights")[0]
    granted = re.findall(r"`(s3:[A-Za-z*]+)`", rights)
    kinds = ("Acl", "CORS", "Location", "Logging", "ObjectLockConfiguration", "OwnershipControls", "Policy")
    more = ("PublicAccessBlock", "RequestPayment", "Tagging", "Versioning", "Website")
    others = ("Accelerate", "Encryption", "Lifecycle", "Replication")
    wanted = [f"s3:GetBucket{kind}" for kind in (*kinds, *more)] + [f"s3:Get{kind}Configuration" for kind in others]
    for action in (*wanted, "s3:GetObject", "s3:GetObjectTagging", "s3:ListBucket"):
        assert any(like(pattern, action) for pattern in granted), action


def rights() -> Iterator[tuple[str, str, dict[str, str]]]:
    """Each action that a role of cluster g5 may do, on what, in which context."""
    cluster = synthesized.of(load_cluster(ROOT / "clusters/aws-g5.yaml").model_copy(update={"name": "g5"}))
    known = {
        "${aws_s3_bucket.bucket.arn}": f"arn:aws:s3:::spotrun-g5-{ACCOUNT}-{REGION}",
        "${data.aws_caller_identity.account.account_id}": ACCOUNT,
    }
    for role in cluster.base.all("aws_iam_role_policy").values():
        for statement in json.loads(role["policy"])["Statement"]:
            context = dict(statement.get("Condition", {}).get("StringEquals", {}))
            context.setdefault("aws:RequestedRegion", REGION)
            for resource in several(statement["Resource"]):
                for token, value in known.items():
                    resource = resource.replace(token, value)
                assert "${" not in resource, resource
                yield from ((action, resource, context) for action in several(statement["Action"]))


@pytest.mark.clouds
def test_machines_get_by_within_the_boundary() -> None:
    found = list(rights())
    assert len(found) > 40
    for action, resource, context in found:
        assert allows("boundary", action, resource, **context), (action, resource)
