"""AWS's pools stack: machines, their groups, and Elastic Fabric Adapters, in what Terraform would read."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from moto.utilities.utils import load_resource

from infra.aws.pools import Interface, Kind, with_efas
from spotrun.spec.machine_types import AWS, EFAS, GPUS, aws_architecture, aws_can_be_placed
from tests.infra.synthesized import Cluster, described, of

pytestmark = pytest.mark.clouds

TEMPLATE, GROUP = "aws_launch_template", "aws_autoscaling_group"
BUCKET = "s3://spotrun-demo-${data.aws_caller_identity.account.account_id}-us-east-1"
LONG = "a" * 18 + "-b"  # the longest that the cluster file takes
HEADER = "name: demo\ncloud: aws\nregion: us-east-1\n"
POOLS = """pools:
  - {name: spot, zone: us-east-1a, machine: g5.2xlarge, max: 4, disk: 250}
  - {name: steady, zone: us-east-1b, machine: g5.2xlarge, market: on-demand}
  - {name: arm, zone: us-east-1a, machine: g5g.xlarge}
  - {name: small, zone: us-east-1b, machine: t3.large}
"""
NAMES = ("spot", "steady", "arm", "small")
# What EC2's DescribeInstanceTypes says, as recorded by moto's makers, of types that some region has.
TYPES: dict[str, dict[str, Any]] = load_resource("ec2/resources/instance_types.json")


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Cluster:
    """One with a pool of each kind."""
    return of(described(f"{HEADER}labels: {{team: vision}}\n{POOLS}", tmp_path_factory.mktemp("cluster")))


@pytest.fixture(scope="session")
def fabric(tmp_path_factory: pytest.TempPathFactory) -> Cluster:
    """One with a pool of each machine type that has EFA."""
    pools = "".join(
        f"  - {{name: {machine.replace('.', '-')}, zone: us-east-1{zone}, machine: {machine}}}\n"
        for machine in EFAS
        for zone in ("b" if machine.startswith("p4d") else "a")
    )
    text = f"{HEADER}image: mine\nnetwork: {{efa: true}}\npools:\n{pools}"
    return of(described(text, tmp_path_factory.mktemp("fabric")))


def template(cluster: Cluster, pool: str) -> Any:
    return cluster.pools.all(TEMPLATE)[f"{pool}-template"]


def group(cluster: Cluster, pool: str) -> Any:
    return cluster.pools.all(GROUP)[f"{pool}-group"]


# Machines.


@pytest.mark.parametrize("pool", ["head", *NAMES])
def test_every_machine_is_private_encrypted_and_known(cluster: Cluster, pool: str) -> None:
    has = {} if pool in ("head", "small") else {"spotrun-gpus": "1"}
    made = template(cluster, pool)
    role = "head" if pool == "head" else "node"
    tags = {
        "Name": f"demo--{pool}",
        "team": "vision",
        "spotrun-cluster": "demo",
        "spotrun-bucket": BUCKET,
        "spotrun-pool": pool,
        "spotrun-role": role,
        **has,
    }
    assert {each["resource_type"]: each["tags"] for each in made["tag_specifications"]} == {
        "instance": tags,
        "volume": tags,
        "network-interface": tags,
    }
    launched = {each["key"]: (each["value"], each["propagate_at_launch"]) for each in group(cluster, pool)["tag"]}
    assert launched == {key: (value, True) for key, value in tags.items()}
    # Tags in metadata may hold nothing else: https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/work-with-tags-in-IMDS.html
    assert all(re.fullmatch(r"[\w+=.,@:-]+", key) for key in tags)
    assert made["metadata_options"] == {
        "http_endpoint": "enabled",
        "http_tokens": "required",
        "http_put_response_hop_limit": 1,
        "instance_metadata_tags": "enabled",
    }
    assert made["iam_instance_profile"] == {"name": f"demo--{role}"}
    assert cluster.base.all("aws_iam_instance_profile")[f"{role}-profile"]["name"] == f"demo--{role}"
    alone = len(made["network_interfaces"]) == 1
    assert all(
        each.get("associate_public_ip_address") == ("false" if alone else None) for each in made["network_interfaces"]
    )
    assert all(each["delete_on_termination"] == "true" for each in made["network_interfaces"])
    (disk,) = made["block_device_mappings"]
    assert (disk["ebs"]["volume_type"], disk["ebs"]["encrypted"]) == ("gp3", "true")
    assert disk["ebs"]["delete_on_termination"] == "true"
    assert disk["ebs"].get("volume_size") == {"head": None, "spot": 250}.get(pool, 100)  # None: the image's own size


@pytest.mark.parametrize(
    ("image", "found"),
    [
        ("", {"name": "spotrun-*", "owners": ["self"]}),
        ("image: mine-1\n", {"name": "mine-1", "owners": ["self"]}),
        ("image: ami-0123456789abcdef0\n", {"image-id": "ami-0123456789abcdef0"}),
    ],
    ids=["newest", "by name", "by id"],
)
def test_the_image_is_for_the_machines_processor(tmp_path: Path, image: str, found: dict[str, Any]) -> None:
    made = of(described(f"{HEADER}{image}{POOLS}", tmp_path))
    for architecture in ("x86_64", "arm64"):
        wanted = made.pools.document["data"]["aws_ami"][f"image-{architecture}"]
        filters = {each["name"]: each["values"][0] for each in wanted["filter"]}
        owners = {"owners": wanted["owners"]} if "owners" in wanted else {}
        assert filters | owners == {**found, "architecture": architecture}
        assert wanted["most_recent"] is True
    for pool, architecture in (("head", "x86_64"), ("spot", "x86_64"), ("arm", "arm64"), ("small", "x86_64")):
        assert template(made, pool)["image_id"] == f"${{data.aws_ami.image-{architecture}.id}}"
        (disk,) = template(made, pool)["block_device_mappings"]
        assert disk["device_name"] == f"${{data.aws_ami.image-{architecture}.root_device_name}}"


def test_processors_are_those_that_aws_says() -> None:
    known = {
        name: each["ProcessorInfo"]["SupportedArchitectures"]
        for name, each in TYPES.items()
        if not name.startswith("mac")  # no Linux on those
    }
    assert [name for name, found in known.items() if aws_architecture(name) not in found] == []


# Groups.


@pytest.mark.parametrize("pool", NAMES)
def test_pools_start_at_none_and_their_size_is_the_heads_to_set(cluster: Cluster, pool: str) -> None:
    made, spec = group(cluster, pool), cluster.spec.pool(pool)
    assert spec is not None
    assert made["name"] == template(cluster, pool)["name"] == f"demo--{pool}"
    assert (made["min_size"], made["desired_capacity"], made["max_size"]) == (0, 0, spec.max)
    assert made["lifecycle"] == {"ignore_changes": ["desired_capacity"]}
    assert made["wait_for_capacity_timeout"] == "0"
    assert made["capacity_rebalance"] is False
    assert made["suspended_processes"] == ["AZRebalance"]
    assert made["mixed_instances_policy"] == {
        "launch_template": {
            "launch_template_specification": {
                "launch_template_id": f"${{{TEMPLATE}.{pool}-template.id}}",
                "version": f"${{{TEMPLATE}.{pool}-template.latest_version}}",
            },
            "override": [{"instance_type": spec.machine}],
        },
        "instances_distribution": {
            "on_demand_base_capacity": 0,
            "on_demand_percentage_above_base_capacity": 100 if pool == "steady" else 0,
            "spot_allocation_strategy": "capacity-optimized",
        },
    }
    assert len(made["vpc_zone_identifier"]) == 1
    assert "force_delete" not in made  # a placement group can only go after its machines
    assert not {"launch_template", "max_instance_lifetime", "instance_refresh", "availability_zones"} & set(made)
    # A market in the template would contradict the group's policy.
    assert "instance_market_options" not in template(cluster, pool)
    assert template(cluster, pool)["instance_type"] == spec.machine


def test_there_is_one_head_and_it_is_replaced_by_a_new_one(cluster: Cluster) -> None:
    made = group(cluster, "head")
    assert (made["min_size"], made["desired_capacity"], made["max_size"]) == (1, 1, 1)
    assert "lifecycle" not in made
    assert made["launch_template"]["id"] == f"${{{TEMPLATE}.head-template.id}}"
    assert "mixed_instances_policy" not in made  # on-demand
    assert made["instance_refresh"]["preferences"] == {"min_healthy_percentage": 0, "max_healthy_percentage": 100}
    # Auto Scaling takes no template that fixes an address.
    (interface,) = template(cluster, "head")["network_interfaces"]
    assert not {"private_ip_address", "ipv4_addresses", "network_interface_id", "subnet_id"} & set(interface)


def test_a_pools_machines_are_close_where_they_can_be(cluster: Cluster, tmp_path: Path) -> None:
    placements = {name: each["strategy"] for name, each in cluster.pools.all("aws_placement_group").items()}
    assert placements == {f"{pool}-placement": "cluster" for pool in ("spot", "steady", "arm")}
    assert group(cluster, "spot")["placement_group"] == "${aws_placement_group.spot-placement.name}"
    assert "placement_group" not in group(cluster, "small")
    apart = of(described(f"{HEADER}network: {{placement: false}}\n{POOLS}", tmp_path))
    assert not any("placement_group" in group(apart, pool) for pool in NAMES)
    # Terraform deletes first what is not wanted any more, and AWS refuses that while a machine is in the group.
    # https://docs.aws.amazon.com/AWSEC2/latest/APIReference/API_DeletePlacementGroup.html
    assert apart.pools.all("aws_placement_group") == cluster.pools.all("aws_placement_group")
    assert group(apart, "spot")["depends_on"] == ["aws_placement_group.spot-placement"]


def test_who_can_be_close_is_what_aws_says() -> None:
    wrong = {
        name
        for name, each in TYPES.items()
        if aws_can_be_placed(name) != ("cluster" in each.get("PlacementGroupInfo", {})["SupportedStrategies"])
    }
    assert wrong == set()


def test_the_longest_names_are_taken_by_aws(tmp_path: Path) -> None:
    region = "ap-southeast-1"
    text = (
        f"name: {LONG}\ncloud: aws\nregion: {region}\nlabels: {{{'k' * 40}: {'v' * 40}}}\nnetwork: {{nat: false}}\n"
        f"pools: [{{name: {LONG}, zone: {region}a, machine: g5.2xlarge}}]\n"
    )
    longest = of(described(text, tmp_path))
    limits = {
        # https://docs.aws.amazon.com/IAM/latest/UserGuide/reference_iam-quotas.html#reference_iam-quotas-entity-length
        "aws_iam_role": (r"[\w+=,.@-]+", 64),
        "aws_iam_role_policy": (r"[\w+=,.@-]+", 128),
        "aws_iam_instance_profile": (r"[\w+=,.@-]+", 128),
        "aws_security_group": (r"(?!sg-)[\w .:/()#,@\[\]+=&;{}!$*-]+", 255),
        "aws_launch_template": (r"[a-zA-Z0-9().\-/_]{3,}", 128),
        "aws_autoscaling_group": (r"[ -9;-~]+", 255),  # no colon
        "aws_placement_group": (r"[ -~]+", 255),
    }
    for kind, (form, most) in limits.items():
        made = longest.base.all(kind) | longest.pools.all(kind)
        assert made
        for each in made.values():
            assert re.fullmatch(form, each["name"]), each["name"]
            assert len(each["name"]) <= most
    bucket = longest.base.one("aws_s3_bucket")["bucket"]
    bucket = bucket.replace("${data.aws_caller_identity.account.account_id}", "123456789012")
    assert re.fullmatch(r"[a-z0-9][a-z0-9-]{1,61}[a-z0-9]", bucket), bucket
    for each in longest.pools.all(GROUP).values():
        assert all(len(tag["key"]) <= 128 and len(tag["value"]) <= 256 for tag in each["tag"])


def test_as_many_labels_as_there_may_be_are_taken_by_aws(tmp_path: Path) -> None:
    labels = ", ".join(f"label-{number}: x" for number in range(43))
    text = f"{HEADER}labels: {{{labels}}}\nnetwork: {{efa: true}}\n"
    most = of(described(f"{text}pools: [{{name: big, zone: us-east-1a, machine: p5.48xlarge}}]\n", tmp_path))
    # https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/Using_Tags.html#tag-restrictions
    assert len(group(most, "big")["tag"]) == 50
    assert [len(each["tags"]) for each in template(most, "big")["tag_specifications"]] == [50, 50, 50]


# Elastic Fabric Adapters.


@pytest.mark.parametrize("machine", EFAS)
def test_a_machine_is_started_with_all_its_adapters(fabric: Cluster, machine: str) -> None:
    made = template(fabric, machine.replace(".", "-"))["network_interfaces"]
    found = [Interface(each["network_card_index"], each["device_index"], each["interface_type"]) for each in made]
    first, *rest = found
    assert (first.card, first.device) == (0, 0)
    assert first.kind != "efa-only"  # the primary interface is the one with the address
    assert {each.kind for each in rest} <= {"efa-only"}
    assert len({(each.card, each.device) for each in found}) == len(found)
    # As many as EC2 says there may be, at most one a card, on cards that there are.
    info = TYPES[machine]["NetworkInfo"]
    adapters = [each for each in found if each.kind != "interface"]
    assert len(adapters) == info["EfaInfo"]["MaximumEfaInterfaces"] == EFAS[machine]
    assert len({each.card for each in adapters}) == len(adapters)
    assert AWS[machine].cards == info["MaximumNetworkCards"]
    (tags,) = {json.dumps(each["tags"]) for each in template(fabric, machine.replace(".", "-"))["tag_specifications"]}
    assert json.loads(tags)["spotrun-efas"] == str(len(adapters))
    assert json.loads(tags)["spotrun-gpus"] == str(GPUS[machine])
    slots = {card["NetworkCardIndex"]: card["MaximumNetworkInterfaces"] for card in info["NetworkCards"]}
    for card in {each.card for each in found}:
        assert sum(each.card == card for each in found) <= slots[card]


@pytest.mark.parametrize(
    ("machine", "expected"),
    [
        ("g5.8xlarge", [(0, 0, "efa")]),
        ("p3dn.24xlarge", [(0, 0, "efa")]),
        ("p5.4xlarge", [(0, 0, "efa")]),
        ("g6e.24xlarge", [(0, 0, "interface"), (0, 1, "efa-only"), (1, 0, "efa-only")]),
        ("p4d.24xlarge", [(0, 0, "interface"), (0, 1, "efa-only"), *((card, 0, "efa-only") for card in (1, 2, 3))]),
        ("p5.48xlarge", [(0, 0, "interface"), (0, 1, "efa-only"), *((card, 0, "efa-only") for card in range(1, 32))]),
        ("p5en.48xlarge", [(0, 0, "interface"), (0, 1, "efa-only"), *((card, 0, "efa-only") for card in range(1, 16))]),
        ("p6-b300.48xlarge", [(0, 0, "interface"), *((card, 0, "efa-only") for card in range(1, 17))]),
    ],
)
def test_adapters_are_where_awss_guide_has_them(machine: str, expected: list[tuple[int, int, Kind]]) -> None:
    assert with_efas(machine) == tuple(Interface(*each) for each in expected)


def test_the_table_has_every_machine_of_its_families_with_efa() -> None:
    families = {machine.partition(".")[0] for machine in EFAS}
    with_efa = {
        name
        for name, each in TYPES.items()
        if name.partition(".")[0] in families and each["NetworkInfo"].get("EfaSupported")
    }
    assert with_efa == set(EFAS)


def test_machines_have_one_plain_interface_otherwise(cluster: Cluster, tmp_path: Path) -> None:
    text = f"{HEADER}pools: [{{name: big, zone: us-east-1a, machine: p5.48xlarge}}]\n"
    for made in (template(cluster, "spot"), template(of(described(text, tmp_path)), "big")):
        (interface,) = made["network_interfaces"]
        assert (interface["device_index"], interface["network_card_index"]) == (0, 0)
        assert interface["interface_type"] == "interface"
        assert all("spotrun-efas" not in each["tags"] for each in made["tag_specifications"])  # though it could have 32
