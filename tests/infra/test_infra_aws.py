"""AWS's stacks: each rule, right and setting that the design asks for, in what Terraform would read."""

from __future__ import annotations

import ipaddress
import json
import re
from pathlib import Path
from typing import Any

import pytest

from infra.aws import identity
from spotrun.cloud.aws import fault_injection
from spotrun.errors import SpecError
from spotrun.spec.names import HEAD_PORT
from spotrun.store import LOG_TAG, cluster_key
from tests.infra.synthesized import ROOT, Cluster, described, of

pytestmark = pytest.mark.clouds

TEMPLATE, GROUP = "aws_launch_template", "aws_autoscaling_group"
ACCOUNT = "${data.aws_caller_identity.account.account_id}"
NODES, HEAD = "${aws_security_group.nodes.id}", "${aws_security_group.head.id}"
ENDPOINTS = "${aws_security_group.endpoints.id}"
OPERATORS = {"images.py", "offers.py", "audit.py", "disk_key.py", "quotas.py"}  # modules that only operators call
LONG = "a" * 18 + "-b"  # the longest that the cluster file takes
HEADER = "name: demo\ncloud: aws\nregion: us-east-1\n"
POOLS = """
  - {name: spot, zone: us-east-1a, machine: g5.2xlarge, max: 4, disk: 250}
  - {name: steady, zone: us-east-1b, machine: g5.2xlarge, market: on-demand}
  - {name: arm, zone: us-east-1a, machine: g5g.xlarge}
  - {name: small, zone: us-east-1b, machine: t3.large}
"""
NAMES = ("spot", "steady", "arm", "small")


def made(text: str, folder: Path) -> Cluster:
    return of(described(HEADER + text, folder))


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Cluster:
    """One with a pool of each kind."""
    return made(f"labels: {{team: vision}}\npools:{POOLS}", tmp_path_factory.mktemp("cluster"))


@pytest.fixture(scope="session")
def closed(tmp_path_factory: pytest.TempPathFactory) -> Cluster:
    """One with no way out, nothing close to anything, a bucket and an image of its own."""
    text = (
        "bucket: s3://my-bucket\npermissions_boundary: arn:aws:iam::123456789012:policy/spotrun-boundary\n"
        "image: ami-0123456789abcdef0\nhead: {machine: t4g.small, zone: us-east-1c}\n"
        f"network: {{placement: false, nat: false, cidr: 10.1.16.0/20}}\npools:{POOLS}"
    )
    return made(text, tmp_path_factory.mktemp("closed"))


def template(cluster: Cluster, pool: str) -> Any:
    return cluster.pools.all(TEMPLATE)[f"{pool}-template"]


def group(cluster: Cluster, pool: str) -> Any:
    return cluster.pools.all(GROUP)[f"{pool}-group"]


# Who may talk to whom.


def rules(cluster: Cluster) -> set[tuple[str, str, str, str]]:
    """(in or out, the security group, what, with whom)"""
    found = set()
    for direction in ("ingress", "egress"):
        for rule in cluster.base.all(f"aws_vpc_security_group_{direction}_rule").values():
            others = [
                rule[key] for key in ("referenced_security_group_id", "cidr_ipv4", "prefix_list_id") if key in rule
            ]
            what = rule["ip_protocol"]
            if what != "-1":
                assert rule["from_port"] == rule["to_port"]
                what += f" {rule['from_port']}"
            (other,) = others
            found.add((direction, rule["security_group_id"], what, other))
    return found


INSIDE = {
    ("ingress", NODES, "-1", NODES),
    ("egress", NODES, "-1", NODES),
    ("ingress", NODES, "tcp 22", HEAD),
    ("egress", HEAD, "tcp 22", NODES),
    ("ingress", HEAD, f"tcp {HEAD_PORT}", NODES),
    ("egress", NODES, f"tcp {HEAD_PORT}", HEAD),
}


def test_machines_may_talk_to_each_other_and_out_by_https(cluster: Cluster) -> None:
    out = {("egress", members, "tcp 443", "0.0.0.0/0") for members in (NODES, HEAD)}
    assert rules(cluster) == INSIDE | out


def test_without_nat_they_may_talk_to_awss_endpoints_alone(closed: Cluster) -> None:
    storage = "${aws_vpc_endpoint.endpoint-s3.prefix_list_id}"
    assert rules(closed) == INSIDE | {
        rule
        for members in (NODES, HEAD)
        for rule in (
            ("egress", members, "tcp 443", ENDPOINTS),
            ("ingress", ENDPOINTS, "tcp 443", members),
            ("egress", members, "tcp 443", storage),
        )
    }


def test_there_are_no_other_rules(cluster: Cluster, closed: Cluster) -> None:
    for found in (cluster, closed):
        for kind in ("aws_security_group", "aws_default_security_group"):
            for made in found.base.all(kind).values():
                assert not {"ingress", "egress"} & set(made)
        kinds = {kind for kind in found.base.document["resource"] if "security_group" in kind or "acl" in kind}
        assert kinds == {
            *("aws_security_group", "aws_default_security_group"),
            *("aws_vpc_security_group_ingress_rule", "aws_vpc_security_group_egress_rule"),
        }


def test_machines_are_in_the_groups_that_the_rules_are_for(cluster: Cluster) -> None:
    for name in ("nodes", "head"):
        made = cluster.base.all("aws_security_group")[name]
        wanted = cluster.pools.document["data"]["aws_security_group"][f"{name}-members"]
        assert wanted == {"tags": {"Name": made["tags"]["Name"], "spotrun-cluster": "demo"}}
    for pool in ("head", *NAMES):
        what = "head" if pool == "head" else "nodes"
        for interface in template(cluster, pool)["network_interfaces"]:
            assert interface["security_groups"] == [f"${{data.aws_security_group.{what}-members.id}}"]


# The network.


def test_each_zone_has_a_private_subnet_of_its_own(cluster: Cluster, closed: Cluster) -> None:
    found = {name: subnet["cidr_block"] for name, subnet in cluster.base.all("aws_subnet").items()}
    assert found == {
        "private-us-east-1a": "10.77.0.0/19",
        "private-us-east-1b": "10.77.32.0/19",
        "public-us-east-1a": "10.77.224.0/22",
        "public-us-east-1b": "10.77.228.0/22",
    }
    # The same part of the range, whichever other zones there are.
    found = {name: subnet["cidr_block"] for name, subnet in closed.base.all("aws_subnet").items()}
    assert found == {
        "private-us-east-1a": "10.1.16.0/23",
        "private-us-east-1b": "10.1.18.0/23",
        "private-us-east-1c": "10.1.20.0/23",
    }
    for each in (cluster, closed):
        ranges = [ipaddress.ip_network(subnet["cidr_block"]) for subnet in each.base.all("aws_subnet").values()]
        assert all(range.subnet_of(ipaddress.ip_network(each.spec.network.cidr)) for range in ranges)  # type: ignore[arg-type]
        assert all(subnet["map_public_ip_on_launch"] is False for subnet in each.base.all("aws_subnet").values())


def test_groups_are_in_the_subnets_of_their_zones(closed: Cluster) -> None:
    zones = {pool.name: pool.zone for pool in closed.spec.pools} | {"head": "us-east-1c"}
    for pool, zone in zones.items():
        assert group(closed, pool)["vpc_zone_identifier"] == [f"${{data.aws_subnet.subnet-{zone}.id}}"]
        tags = closed.pools.document["data"]["aws_subnet"][f"subnet-{zone}"]["tags"]
        subnet = closed.base.all("aws_subnet")[f"private-{zone}"]
        assert tags == {"Name": subnet["tags"]["Name"], "spotrun-cluster": "demo"}
        assert subnet["availability_zone"] == zone


def test_a_zone_that_no_region_has_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="zone us-east-1h: AWS has no zone with this letter"):
        made("pools: [{name: a, zone: us-east-1h, machine: g5.xlarge}]\n", tmp_path)


def test_the_way_out_is_one_nat_gateway_which_a_cluster_that_is_down_has_not(cluster: Cluster) -> None:
    for kind in ("aws_nat_gateway", "aws_eip"):
        assert cluster.base.all(kind) == {}
    assert cluster.pools.one("aws_nat_gateway")["subnet_id"] == "${data.aws_subnet.public-subnet.id}"
    public = cluster.base.all("aws_subnet")["public-us-east-1a"]  # the head's zone
    found = cluster.pools.document["data"]
    assert found["aws_subnet"]["public-subnet"]["tags"]["Name"] == public["tags"]["Name"]
    private = cluster.base.all("aws_route_table")["private-routes"]
    assert found["aws_route_table"]["private-routes"]["tags"]["Name"] == private["tags"]["Name"]
    route = cluster.pools.one("aws_route")
    assert route["nat_gateway_id"] == "${aws_nat_gateway.nat.id}"
    assert route["route_table_id"] == "${data.aws_route_table.private-routes.id}"
    assert cluster.base.one("aws_route")["gateway_id"] == "${aws_internet_gateway.internet.id}"
    tables = {
        each["subnet_id"]: each["route_table_id"] for each in cluster.base.all("aws_route_table_association").values()
    }
    assert tables == {
        f"${{aws_subnet.{what}-us-east-1{zone}.id}}": f"${{aws_route_table.{what}-routes.id}}"
        for what in ("private", "public")
        for zone in "ab"
    }
    assert group(cluster, "head")["depends_on"] == ["aws_route.private-default"]


def test_without_nat_nothing_leads_out_and_every_service_in_use_is_inside(closed: Cluster) -> None:
    for stack in (closed.base, closed.pools):
        for kind in ("aws_nat_gateway", "aws_internet_gateway", "aws_eip", "aws_route"):
            assert stack.all(kind) == {}
    made = closed.pools.all("aws_vpc_endpoint")
    services = {each["service_name"].removeprefix("com.amazonaws.us-east-1.") for each in made.values()}
    called = {action.partition(":")[0] for action in granted(closed, "head")} - {"s3", "iam"}
    assert services == called
    for each in made.values():
        assert each["vpc_endpoint_type"] == "Interface"
        assert each["private_dns_enabled"] is True
        assert each["vpc_id"] == "${data.aws_subnet.subnet-us-east-1c.vpc_id}"
        assert each["subnet_ids"] == ["${data.aws_subnet.subnet-us-east-1c.id}"]
        assert each["security_group_ids"] == ["${data.aws_security_group.endpoints-members.id}"]
    assert closed.base.one("aws_vpc")["enable_dns_hostnames"] is True
    assert group(closed, "head")["depends_on"] == [f"aws_vpc_endpoint.{name}" for name in made]


def test_the_bucket_is_reached_without_the_internet(cluster: Cluster, closed: Cluster) -> None:
    for each in (cluster, closed):
        endpoint = each.base.all("aws_vpc_endpoint")["endpoint-s3"]
        assert (endpoint["vpc_endpoint_type"], endpoint["service_name"]) == ("Gateway", "com.amazonaws.us-east-1.s3")
        assert endpoint["route_table_ids"] == ["${aws_route_table.private-routes.id}"]


def test_nothing_is_made_for_logs_and_metrics_that_nothing_writes(cluster: Cluster, closed: Cluster) -> None:
    for each in (cluster, closed):
        kinds = {kind for stack in (each.base, each.pools) for kind in stack.document["resource"]}
        assert not {kind for kind in kinds if "cloudwatch" in kind}
        for role in ("node", "head"):
            assert not {action for action in granted(each, role) if action.split(":")[0] in ("logs", "cloudwatch")}
    made = closed.pools.all("aws_vpc_endpoint").values()
    assert not {each["service_name"] for each in made if each["service_name"].endswith((".logs", ".monitoring"))}


# Who may do what.


def statements(cluster: Cluster, role: str) -> list[dict[str, Any]]:
    document = json.loads(cluster.base.all("aws_iam_role_policy")[f"{role}-policy"]["policy"])
    assert document["Version"] == "2012-10-17"
    found: list[dict[str, Any]] = document["Statement"]
    return found


def granted(cluster: Cluster, role: str) -> set[str]:
    return {action for statement in statements(cluster, role) for action in statement["Action"]}


BUCKET = "${aws_s3_bucket.bucket.arn}"
OWN = [f"{BUCKET}/clusters/demo/{kind}/i-*" for kind in ("hosts", "unfit", "alive")]
NODE_RIGHTS = [
    (["s3:ListBucket"], BUCKET, None),
    (
        ["s3:GetObject"],
        [
            *(f"{BUCKET}/{each}" for each in ("code/*", "data/*", "clusters/demo/head.json")),
            *(f"{BUCKET}/jobs/*/{each}/*" for each in ("checkpoints", "kept")),
            *OWN[1:],
        ],
        None,
    ),
    (
        ["s3:AbortMultipartUpload", "s3:PutObject"],
        [*(f"{BUCKET}/jobs/*/{each}*" for each in ("checkpoints/*/g", "kept/", "logs/", "metrics/", "system/")), *OWN],
        None,
    ),
    (["s3:PutObjectTagging"], f"{BUCKET}/jobs/*/logs/*", None),
    (["s3:DeleteObject"], OWN[1:], None),
]


def shown(statement: dict[str, Any]) -> tuple[Any, Any, Any]:
    assert statement["Effect"] == "Allow"
    assert set(statement) <= {"Sid", "Effect", "Action", "Resource", "Condition"}
    return statement["Action"], statement["Resource"], statement.get("Condition")


def test_a_node_may_use_its_part_of_the_bucket_and_write_logs_and_metrics(cluster: Cluster) -> None:
    assert [shown(each) for each in statements(cluster, "node")] == NODE_RIGHTS


def test_the_head_may_that_and_size_its_own_groups(cluster: Cluster) -> None:
    ours = f"us-east-1:{ACCOUNT}"
    request, own = ({"StringEquals": {f"aws:{what}Tag/spotrun-cluster": "demo"}} for what in ("Request", "Resource"))
    fis = {"iam:PassedToService": "fis.amazonaws.com"}, {"iam:AWSServiceName": "fis.amazonaws.com"}
    templates, experiments = f"arn:aws:fis:{ours}:experiment-template/*", f"arn:aws:fis:{ours}:experiment/*"
    assert [shown(each) for each in statements(cluster, "head")] == [
        (["s3:ListBucket"], BUCKET, None),
        (
            ["s3:AbortMultipartUpload", "s3:DeleteObject", "s3:GetObject", "s3:PutObject", "s3:PutObjectTagging"],
            f"{BUCKET}/*",
            None,
        ),
        (list(identity.SESSIONS), "*", None),
        (list(identity.LOOKS), "*", None),
        (
            list(identity.RESIZES),
            f"arn:aws:autoscaling:{ours}:autoScalingGroup:*:autoScalingGroupName/demo--*",
            None,
        ),
        (
            ["fis:CreateExperimentTemplate"],
            "arn:aws:fis:*:*:action/aws:ec2:send-spot-instance-interruptions",
            None,
        ),
        (["fis:CreateExperimentTemplate", "fis:TagResource"], [templates, experiments], request),
        (["fis:StartExperiment"], experiments, request),
        (["fis:DeleteExperimentTemplate", "fis:StartExperiment"], templates, own),
        (["fis:GetExperiment"], experiments, own),
        (["iam:PassRole"], f"arn:aws:iam::{ACCOUNT}:role/demo--fis", {"StringEquals": fis[0]}),
        (
            ["iam:CreateServiceLinkedRole"],
            f"arn:aws:iam::{ACCOUNT}:role/aws-service-role/fis.amazonaws.com/AWSServiceRoleForFIS",
            {"StringEquals": fis[1]},
        ),
    ]


def test_what_may_be_done_to_anything_only_looks_or_keeps_sessions_open(cluster: Cluster) -> None:
    for role in ("node", "head", "fis"):
        for actions, resource, condition in map(shown, statements(cluster, role)):
            if resource == "*" and condition is None:
                assert all(re.match(r"\w+:(Describe|Get)|ssm", action) for action in actions), actions
            assert not any("*" in action for action in actions)


def test_the_head_may_do_what_its_cloud_module_asks_and_no_more(cluster: Cluster) -> None:
    modules = (ROOT / "agent/spotrun/cloud/aws").glob("*.py")
    sources = [path.read_text() for path in modules if path.name not in OPERATORS]
    calls = {
        f"{service}:{(paged or called).replace('_', ' ').title().replace(' ', '')}"
        for source in sources
        for service, called, paged in re.findall(r"\b(ec2|autoscaling|fis)\.(\w+)(?:\(\"(\w+)\"\))?", source)
        if called in ("get_paginator", "set_desired_capacity", "terminate_instance_in_auto_scaling_group")
        or re.match(r"(create|delete|describe|get|list|resume|start)_\w+", called)
    }
    # Each tags what it makes, and gives it a role to act in, which the service's own comes before.
    implied = {"fis:TagResource", "iam:PassRole", "iam:CreateServiceLinkedRole"}
    besides = granted(cluster, "node") | set(identity.SESSIONS) | implied
    assert granted(cluster, "head") - besides == calls


def test_interruptions_reach_this_clusters_machines_alone(cluster: Cluster) -> None:
    interrupt, look = (shown(each) for each in statements(cluster, "fis"))
    assert look == (["ec2:DescribeInstances"], "*", None)
    assert interrupt == (
        ["ec2:SendSpotInstanceInterruptions"],
        f"arn:aws:ec2:us-east-1:{ACCOUNT}:instance/*",
        {"StringEquals": {"aws:ResourceTag/spotrun-cluster": "demo"}},
    )
    role = cluster.base.all("aws_iam_role")["fis-role"]
    (trust,) = json.loads(role["assume_role_policy"])["Statement"]
    assert trust["Principal"] == {"Service": "fis.amazonaws.com"}
    assert trust["Condition"] == {"StringEquals": {"aws:SourceAccount": ACCOUNT}}
    asked = fault_injection.template("demo", f"arn:aws:autoscaling:us-east-1:{ACCOUNT}:x", "i-1", None)
    assert asked["roleArn"].endswith(f"role/{role['name']}")


def test_there_are_no_other_rights(cluster: Cluster) -> None:
    kinds = {kind for stack in (cluster.base, cluster.pools) for kind in stack.document["resource"] if "iam" in kind}
    assert kinds == {"aws_iam_role", "aws_iam_role_policy", "aws_iam_instance_profile"}
    assert set(cluster.base.all("aws_iam_role")) == {"node-role", "head-role", "fis-role"}
    for role in cluster.base.all("aws_iam_role").values():
        assert not {"managed_policy_arns", "inline_policy"} & set(role)


def test_every_role_is_bounded_where_the_cluster_file_says_so(cluster: Cluster, closed: Cluster) -> None:
    bounds = {name: role.get("permissions_boundary") for name, role in closed.base.all("aws_iam_role").items()}
    assert bounds == dict.fromkeys(
        ("node-role", "head-role", "fis-role"), "arn:aws:iam::123456789012:policy/spotrun-boundary"
    )
    assert not any("permissions_boundary" in role for role in cluster.base.all("aws_iam_role").values())


# The bucket.


def test_the_bucket_is_private_encrypted_and_keeps_what_is_in_it(cluster: Cluster, closed: Cluster) -> None:
    bucket = cluster.base.one("aws_s3_bucket")
    assert (bucket["bucket"], bucket["force_destroy"]) == (f"spotrun-demo-{ACCOUNT}-us-east-1", False)
    assert closed.base.one("aws_s3_bucket")["bucket"] == "my-bucket"
    private = cluster.base.one("aws_s3_bucket_public_access_block")
    switches = ("block_public_acls", "block_public_policy", "ignore_public_acls", "restrict_public_buckets")
    assert all(private[switch] is True for switch in switches)
    owner = cluster.base.one("aws_s3_bucket_ownership_controls")
    assert owner["rule"] == {"object_ownership": "BucketOwnerEnforced"}
    (rule,) = cluster.base.one("aws_s3_bucket_server_side_encryption_configuration")["rule"]
    assert rule == {"apply_server_side_encryption_by_default": {"sse_algorithm": "AES256"}}
    (refusal,) = json.loads(cluster.base.one("aws_s3_bucket_policy")["policy"])["Statement"]
    assert (refusal["Effect"], refusal["Principal"], refusal["Action"]) == ("Deny", "*", "s3:*")
    assert refusal["Resource"] == [BUCKET, f"{BUCKET}/*"]
    assert refusal["Condition"] == {"Bool": {"aws:SecureTransport": "false"}}


def test_only_old_logs_leave_the_bucket_by_themselves(cluster: Cluster) -> None:
    logs, uploads = cluster.base.one("aws_s3_bucket_lifecycle_configuration")["rule"]
    ((key, value),) = LOG_TAG.items()
    assert logs["filter"] == [{"tag": [{"key": key, "value": value}]}]
    assert logs["expiration"] == [{"days": 90}]
    assert uploads["abort_incomplete_multipart_upload"] == [{"days_after_initiation": 1}]
    assert "expiration" not in uploads
    assert {logs["status"], uploads["status"]} == {"Enabled"}


def test_the_clusters_description_is_where_the_head_looks(cluster: Cluster, closed: Cluster) -> None:
    assert cluster.pools.one("aws_s3_object")["key"] == cluster_key("demo")
    assert cluster.pools.one("aws_s3_object")["bucket"] == f"spotrun-demo-{ACCOUNT}-us-east-1"
    assert closed.pools.one("aws_s3_object")["bucket"] == "my-bucket"
