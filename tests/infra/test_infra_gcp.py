"""Google Cloud's stacks: each rule, right and setting that the design asks for, in what Terraform would read."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from spotrun.spec.names import HEAD_PORT
from spotrun.store import cluster_key
from tests.infra.synthesized import ROOT, Cluster, described, of, synthesized

pytestmark = pytest.mark.clouds

TEMPLATE, GROUP = "google_compute_region_instance_template", "google_compute_instance_group_manager"
HEAD, NODE = "${google_service_account.head.email}", "${google_service_account.node.email}"
OPERATORS = {"images.py", "offers.py", "audit.py"}  # modules that only operators call
LONG = "a" * 18 + "-b"  # the longest that the cluster file takes
POOLS = """
  - {name: spot, zone: us-central1-a, machine: g2-standard-8, max: 4, disk: 250}
  - {name: early, zone: us-central1-a, machine: g2-standard-8, notice: 120s}
  - {name: steady, zone: us-central1-b, machine: g2-standard-8, market: on-demand}
  - {name: cpu, zone: us-central1-a, machine: n2-standard-8, market: on-demand, max_run_duration: 2h}
  - {name: t4, zone: us-central1-a, machine: n1-standard-8, accelerator: {type: nvidia-tesla-t4, count: 2}}
  - {name: flex, zone: us-central1-b, machine: g2-standard-8, market: flex, max_run_duration: 3d}
  - {name: h200, zone: us-central1-a, machine: a3-ultragpu-8g}
"""
HEADER = "name: demo\ncloud: gcp\nregion: us-central1\nproject: my-project\n"


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Cluster:
    """One with a pool of each kind."""
    text = f"{HEADER}labels: {{team: vision}}\npools:{POOLS}"
    return of(described(text, tmp_path_factory.mktemp("cluster")))


@pytest.fixture(scope="session")
def near(tmp_path_factory: pytest.TempPathFactory) -> Cluster:
    """One whose machines are close to each other, that has no NAT, a bucket and an image of its own."""
    pools = "\n".join(line for line in POOLS.splitlines() if "n1-" not in line)
    text = (
        f"{HEADER}bucket: gs://my-bucket\nimage: projects/images/global/images/family/mine\n"
        f"network: {{placement: true, nat: false, cidr: 10.1.0.0/18}}\npools:{pools}\n"
    )
    return of(described(text, tmp_path_factory.mktemp("near")))


@pytest.fixture(scope="session")
def longest(tmp_path_factory: pytest.TempPathFactory) -> Cluster:
    """All names as long as they may be."""
    region = "northamerica-northeast1"
    text = (
        f"name: {LONG}\ncloud: gcp\nregion: {region}\nproject: {'p' * 30}\nnetwork: {{placement: true}}\n"
        f"labels: {{{'k' * 40}: {'v' * 40}}}\n"
        f"pools: [{{name: {LONG}, zone: {region}-a, machine: g2-standard-8}}]\n"
    )
    return of(described(text, tmp_path_factory.mktemp("longest")))


def template(cluster: Cluster, pool: str) -> Any:
    return cluster.pools.all(TEMPLATE)[f"{pool}-template"]


def group(cluster: Cluster, pool: str) -> Any:
    return cluster.pools.all(GROUP)[f"{pool}-group"]


# The network.


def test_the_firewall_lets_in_these_and_nothing_else(cluster: Cluster) -> None:
    rules = {
        rule["name"]: (
            rule.get("source_ranges", rule.get("source_service_accounts")),
            rule["target_service_accounts"],
            rule["allow"],
        )
        for rule in cluster.base.all("google_compute_firewall").values()
    }
    ssh = [{"protocol": "tcp", "ports": ["22"]}]
    assert rules == {
        "demo-iap-to-head": (["35.235.240.0/20"], [HEAD], ssh),
        "demo-head-to-nodes": ([HEAD], [NODE], ssh),
        "demo-nodes-to-head": ([NODE], [HEAD], [{"protocol": "tcp", "ports": [str(HEAD_PORT)]}]),
        "demo-node-to-node": ([NODE], [NODE], [{"protocol": "all"}]),
    }
    for rule in cluster.base.all("google_compute_firewall").values():
        assert rule["direction"] == "INGRESS"
        assert set(rule) <= {
            *("name", "network", "direction", "allow", "target_service_accounts"),
            *("source_ranges", "source_service_accounts"),
        }


def test_the_network_has_one_subnet_that_reaches_googles_apis(cluster: Cluster, near: Cluster) -> None:
    network = cluster.base.one("google_compute_network")
    assert (network["auto_create_subnetworks"], network["mtu"]) == (False, 8896)
    subnet = cluster.base.one("google_compute_subnetwork")
    assert (subnet["ip_cidr_range"], subnet["private_ip_google_access"]) == ("10.77.0.0/16", True)
    assert near.base.one("google_compute_subnetwork")["ip_cidr_range"] == "10.1.0.0/18"


def test_nat_is_for_the_subnet_and_can_be_left_out(cluster: Cluster, near: Cluster) -> None:
    nat = cluster.base.one("google_compute_router_nat")
    assert nat["source_subnetwork_ip_ranges_to_nat"] == "LIST_OF_SUBNETWORKS"
    assert nat["subnetwork"] == [
        {"name": "${google_compute_subnetwork.subnet.id}", "source_ip_ranges_to_nat": ["ALL_IP_RANGES"]}
    ]
    assert nat["nat_ip_allocate_option"] == "AUTO_ONLY"
    ports = ("enable_dynamic_port_allocation", "enable_endpoint_independent_mapping", "min_ports_per_vm")
    assert [nat[key] for key in ports] == [True, False, 64]  # a machine gets more ports when it needs them
    assert near.base.all("google_compute_router_nat") == near.base.all("google_compute_router") == {}


# Who may do what.


def test_rights_are_exactly_these(cluster: Cluster) -> None:
    granted = {
        (right["member"].split(".")[1], right["role"])
        for kind in ("google_project_iam_member", "google_storage_bucket_iam_member")
        for right in cluster.base.all(kind).values()
    }
    custom = "${google_project_iam_custom_role.head-%s-role.name}"
    roles = ("roles/storage.objectUser", "roles/compute.viewer", custom % "groups", custom % "machines")
    stored = {f"roles/storage.{role}" for role in ("legacyBucketReader", "objectViewer", "objectCreator", "objectUser")}
    assert granted == {
        *(("node", role) for role in stored),
        *(("head", role) for role in roles),
    }
    kinds = {kind for stack in (cluster.base, cluster.pools) for kind in stack.document["resource"] if "iam" in kind}
    assert kinds == {
        *("google_project_iam_custom_role", "google_project_iam_member"),
        "google_storage_bucket_iam_member",
    }


def test_the_bucket_is_granted_on_the_bucket(cluster: Cluster) -> None:
    """What the conditions let through, tests/infra/test_rights.py tells."""
    granted = cluster.base.all("google_storage_bucket_iam_member")
    for right in granted.values():
        assert right["bucket"] == "${google_storage_bucket.bucket.name}"
    assert {name: (right["role"], "condition" in right) for name, right in granted.items()} == {
        "head-bucket": ("roles/storage.objectUser", False),
        "node-list": ("roles/storage.legacyBucketReader", False),
        "node-read": ("roles/storage.objectViewer", True),
        "node-checkpoints": ("roles/storage.objectCreator", True),
        "node-kept": ("roles/storage.objectCreator", True),
        "node-records": ("roles/storage.objectUser", True),
    }
    for right in granted.values():
        if only := right.get("condition"):
            assert len(only["title"]) <= 100
            assert len(only["description"]) <= 256
            assert len(re.findall(r"&&|\|\||!(?!=)", only["expression"])) <= 12  # more is refused


def test_the_head_may_do_what_its_cloud_module_asks_and_no_more(cluster: Cluster) -> None:
    """Every call of a client in spotrun.cloud.gcp needs one permission, and every permission is for some call.

    Only the calls about the market, which are previews, need roles/compute.viewer. Only operators ask about quotas.
    """
    needs = {
        "instances.list": "compute.instances.list",
        "instances.delete_unary": "compute.instances.delete",
        "instances.simulate_maintenance_event_unary": "compute.instances.simulateMaintenanceEvent",
        "groups.get": "compute.instanceGroupManagers.get",
        "groups.list_managed_instances": "compute.instanceGroupManagers.get",
        "groups.list_errors": "compute.instanceGroupManagers.get",
        "groups.resize_unary": "compute.instanceGroupManagers.update",
        "groups.delete_instances_unary": "compute.instanceGroupManagers.update",
        "groups.recreate_instances_unary": "compute.instanceGroupManagers.update",
        "resizes.list": "compute.instanceGroupManagers.list",
        "resizes.insert_unary": "compute.instanceGroupManagers.update",
        "resizes.cancel_unary": "compute.instanceGroupManagers.update",
        "operations.wait": "compute.zoneOperations.get",
        "regions.get": "",
        "projects.get": "",
    }
    clients = "instances|groups|operations|regions|projects|images|resizes"
    modules = (ROOT / "agent/spotrun/cloud/gcp").glob("*.py")
    sources = [path.read_text() for path in modules if path.name not in OPERATORS]
    calls = {".".join(call) for source in sources for call in re.findall(rf"\b\w+\.({clients})\.(\w+)[()]", source)}
    roles = cluster.base.all("google_project_iam_custom_role")
    granted = [permission for role in roles.values() for permission in role["permissions"]]
    assert sorted(granted) == sorted({needs[call] for call in calls} - {""})


def test_the_head_ends_only_its_own_clusters_machines(cluster: Cluster) -> None:
    rights = cluster.base.all("google_project_iam_member")
    assert "condition" not in rights["head-groups"]  # IAM knows no condition that holds for a group
    assert rights["head-machines"]["condition"]["expression"] == (
        'resource.type == "compute.googleapis.com/Instance" && '
        'resource.name.extract("/instances/{name}").startsWith("demo--")'
    )
    role = cluster.base.all("google_project_iam_custom_role")["head-machines-role"]
    assert role["permissions"] == ["compute.instances.delete", "compute.instances.simulateMaintenanceEvent"]


@pytest.mark.parametrize(
    ("project", "address"),
    [
        ("my-project", "demo-node@my-project.iam.gserviceaccount.com"),
        ("example.com:my-project", "demo-node@my-project.example.com.iam.gserviceaccount.com"),
    ],
)
def test_machines_are_who_the_base_stack_made(tmp_path: Path, project: str, address: str) -> None:
    pools = "pools: [{name: spot, zone: us-central1-a, machine: g2-standard-8}]\n"
    found = of(described(HEADER.replace("my-project", project) + pools, tmp_path))
    assert found.base.all("google_service_account")["node"]["account_id"] == "demo-node"
    assert found.base.all("google_service_account")["head"]["account_id"] == "demo-head"
    assert template(found, "spot")["service_account"] == {"email": address, "scopes": ["cloud-platform"]}
    assert template(found, "head")["service_account"]["email"] == address.replace("node", "head")


# The bucket.


def test_the_bucket_is_private_regional_and_keeps_what_is_in_it(cluster: Cluster) -> None:
    bucket = cluster.base.one("google_storage_bucket")
    assert bucket["name"] == "spotrun-demo-my-project"
    assert bucket["location"] == "us-central1"
    assert bucket["uniform_bucket_level_access"] is True
    assert bucket["public_access_prevention"] == "enforced"
    assert bucket["force_destroy"] is False
    assert bucket["versioning"] == {"enabled": False}
    assert bucket["soft_delete_policy"] == {"retention_duration_seconds": 0}
    assert bucket["labels"] == {"team": "vision", "spotrun-cluster": "demo"}


def test_only_old_logs_leave_the_bucket_by_themselves(cluster: Cluster) -> None:
    logs, uploads = cluster.base.one("google_storage_bucket")["lifecycle_rule"]
    assert logs == {
        "action": {"type": "Delete"},
        "condition": {"age": 90, "matches_prefix": ["jobs/"], "matches_suffix": [".log"]},
    }
    assert uploads["action"] == {"type": "AbortIncompleteMultipartUpload"}


def test_a_bucket_of_another_name_is_used_throughout(near: Cluster) -> None:
    assert near.base.one("google_storage_bucket")["name"] == "my-bucket"
    assert near.pools.one("google_storage_bucket_object")["bucket"] == "my-bucket"
    assert template(near, "spot")["metadata"]["spotrun-bucket"] == "gs://my-bucket"


def test_the_clusters_description_is_where_the_head_looks(cluster: Cluster) -> None:
    assert cluster.pools.one("google_storage_bucket_object")["name"] == cluster_key("demo")


# Machines.


@pytest.mark.parametrize(
    ("pool", "has"),
    [
        ("head", {}),
        ("spot", {"spotrun-gpus": "1"}),
        ("steady", {"spotrun-gpus": "1", "spotrun-maintenance-notice": "3600"}),
        ("cpu", {}),
        ("t4", {"spotrun-gpus": "2"}),  # attached ones: the machine type has none
        ("h200", {"spotrun-gpus": "8"}),
    ],
)
def test_every_machine_is_shielded_private_and_known(cluster: Cluster, pool: str, has: dict[str, str]) -> None:
    made = template(cluster, pool)
    role = "head" if pool == "head" else "node"
    about = {"spotrun-cluster": "demo", "spotrun-pool": pool, "spotrun-role": role}
    assert made["metadata"] == {
        **about,
        **has,
        "spotrun-bucket": "gs://spotrun-demo-my-project",
        "enable-oslogin": "TRUE",
        "block-project-ssh-keys": "TRUE",
    }
    assert made["labels"] == made["disk"][0]["labels"] == {**about, "team": "vision"}
    assert made["network_interface"] == [
        {"subnetwork": "projects/my-project/regions/us-central1/subnetworks/demo-subnet", "nic_type": "GVNIC"}
    ]
    assert made["can_ip_forward"] is False
    assert made["shielded_instance_config"] == {
        "enable_vtpm": True,
        "enable_integrity_monitoring": True,
        "enable_secure_boot": pool in ("head", "cpu"),  # NVIDIA's driver is not signed
    }
    assert made["disk"][0]["source_image"] == "${data.google_compute_image.image.self_link}"
    assert (made["disk"][0]["boot"], made["disk"][0]["auto_delete"]) == (True, True)


@pytest.mark.parametrize(
    ("pool", "expected"),
    [
        (
            "spot",
            {
                "provisioning_model": "SPOT",
                "preemptible": True,
                "instance_termination_action": "DELETE",
                "automatic_restart": False,
                "on_host_maintenance": "TERMINATE",
            },
        ),
        (
            "steady",
            {"provisioning_model": "STANDARD", "automatic_restart": True, "on_host_maintenance": "TERMINATE"},
        ),
        (
            "cpu",
            {
                "provisioning_model": "STANDARD",
                "automatic_restart": True,
                "on_host_maintenance": "MIGRATE",
                "instance_termination_action": "DELETE",
                "max_run_duration": {"seconds": 7200},
            },
        ),
        (
            "flex",
            {
                "provisioning_model": "FLEX_START",
                "automatic_restart": False,
                "on_host_maintenance": "TERMINATE",
                "instance_termination_action": "DELETE",
                "max_run_duration": {"seconds": 259200},
            },
        ),
        ("head", {"provisioning_model": "STANDARD", "automatic_restart": True, "on_host_maintenance": "MIGRATE"}),
    ],
)
def test_scheduling(cluster: Cluster, pool: str, expected: dict[str, Any]) -> None:
    assert template(cluster, pool)["scheduling"] == expected


def test_the_notice_of_two_minutes_takes_the_provider_that_knows_it(cluster: Cluster) -> None:
    """CDKTF's classes do not know it, nor does Google's provider but for its beta."""
    early = template(cluster, "early")
    assert early["scheduling"]["preemption_notice_duration"] == {"seconds": 120}
    assert early["provider"] == "google-beta"
    assert cluster.pools.document["terraform"]["required_providers"]["google-beta"]["version"] == "7.36.0"
    (usual,), (beta,) = (cluster.pools.document["provider"][name] for name in ("google", "google-beta"))
    assert beta == usual
    for pool in ("spot", "head"):
        assert "provider" not in template(cluster, pool)
        assert "preemption_notice_duration" not in template(cluster, pool)["scheduling"]


def test_without_that_notice_there_is_one_provider(longest: Cluster) -> None:
    assert set(longest.pools.document["terraform"]["required_providers"]) == {"google"}
    assert set(longest.pools.document["provider"]) == {"google"}


def test_machines_are_told_of_the_notice_they_get(cluster: Cluster) -> None:
    told = {
        pool: {key: value for key, value in template(cluster, pool)["metadata"].items() if key.endswith("-notice")}
        for pool in ("spot", "early", "steady", "cpu", "head")
    }
    assert told == {
        "spot": {},
        "early": {"spotrun-preempt-notice": "120"},
        "steady": {"spotrun-maintenance-notice": "3600"},  # with GPUs, on-demand: an hour before maintenance
        "cpu": {},
        "head": {},
    }


def test_machines_disks_and_gpus_are_the_pools(cluster: Cluster) -> None:
    found = {
        pool: (made["machine_type"], made["disk"][0]["disk_type"], made["disk"][0].get("disk_size_gb"))
        for pool in ("head", "spot", "t4", "h200")
        for made in [template(cluster, pool)]
    }
    assert found == {
        "head": ("e2-small", "pd-balanced", None),  # the image's own size
        "spot": ("g2-standard-8", "pd-balanced", 250),
        "t4": ("n1-standard-8", "pd-balanced", 100),
        "h200": ("a3-ultragpu-8g", "hyperdisk-balanced", 100),
    }
    assert template(cluster, "t4")["guest_accelerator"] == [{"type": "nvidia-tesla-t4", "count": 2}]
    assert "guest_accelerator" not in template(cluster, "spot")


def test_the_image_is_looked_up_once_and_used_throughout(cluster: Cluster, near: Cluster) -> None:
    """Google itself would take the family's newest image at each machine's start."""
    for made, expected in (
        (cluster, {"project": "my-project", "family": "spotrun"}),
        (near, {"project": "images", "family": "mine"}),
    ):
        assert made.pools.document["data"] == {"google_compute_image": {"image": expected}}
        images = {each["disk"][0]["source_image"] for each in made.pools.all(TEMPLATE).values()}
        assert images == {"${data.google_compute_image.image.self_link}"}


# Groups.


@pytest.mark.parametrize("pool", ["spot", "steady", "cpu", "t4", "h200"])
def test_pools_start_at_none_and_their_size_is_the_heads_to_set(cluster: Cluster, pool: str) -> None:
    made = group(cluster, pool)
    spec = cluster.spec.pool(pool)
    assert spec is not None
    assert made["name"] == made["base_instance_name"] == f"demo--{pool}"
    assert made["zone"] == spec.zone
    assert made["target_size"] == 0
    assert made["lifecycle"] == {"ignore_changes": ["target_size"]}
    assert made["wait_for_instances"] is False
    assert made["update_policy"] == {
        "type": "OPPORTUNISTIC",
        "minimal_action": "REPLACE",
        "replacement_method": "RECREATE",
        "max_surge_fixed": 0,
        "max_unavailable_fixed": 1,
    }
    # What comes back after a preemption is of the template as it is now.
    assert made["instance_lifecycle_policy"] == {"default_action_on_failure": "REPAIR", "force_update_on_repair": "YES"}
    assert made["version"] == [{"instance_template": f"${{{TEMPLATE}.{pool}-template.self_link}}"}]


def test_a_flex_pool_uses_no_reservation_and_its_group_repairs_nothing(cluster: Cluster) -> None:
    """Google demands both of groups that get their machines by resize requests."""
    assert template(cluster, "flex")["reservation_affinity"] == {"type": "NO_RESERVATION"}
    assert "reservation_affinity" not in template(cluster, "spot")
    assert group(cluster, "flex")["instance_lifecycle_policy"] == {"default_action_on_failure": "DO_NOTHING"}
    assert group(cluster, "flex")["target_size"] == 0


def test_there_is_one_head_that_keeps_its_address(cluster: Cluster) -> None:
    head = group(cluster, "head")
    assert (head["target_size"], head["zone"]) == (1, "us-central1-a")
    assert "lifecycle" not in head  # a size other than 1 is put right
    assert head["stateful_internal_ip"] == [{"interface_name": "nic0", "delete_rule": "ON_PERMANENT_INSTANCE_DELETION"}]
    policy = head["update_policy"]
    assert (policy["type"], policy["replacement_method"], policy["max_surge_fixed"]) == ("PROACTIVE", "RECREATE", 0)


def test_templates_are_replaced_before_they_go(cluster: Cluster) -> None:
    for made in cluster.pools.all(TEMPLATE).values():
        assert made["lifecycle"] == {"create_before_destroy": True}
        assert "name" not in made


def test_placement_is_on_machines_or_on_large_ones_group(cluster: Cluster, near: Cluster) -> None:
    assert cluster.pools.all("google_compute_resource_policy") == {}
    policies = near.pools.all("google_compute_resource_policy")
    policy = "${google_compute_resource_policy.%s-placement.id}"
    assert policies["spot-placement"] == {
        "name": "demo--spot",
        "group_placement_policy": {"collocation": "COLLOCATED"},
    }
    assert template(near, "spot")["resource_policies"] == [policy % "spot"]
    assert "resource_policies" not in group(near, "spot")
    assert policies["h200-placement"] == {"name": "demo--h200", "workload_policy": {"type": "HIGH_THROUGHPUT"}}
    assert group(near, "h200")["resource_policies"] == {"workload_policy": policy % "h200"}
    assert "resource_policies" not in template(near, "h200")
    assert template(near, "cpu")["resource_policies"] == [policy % "cpu"]
    assert template(near, "cpu")["scheduling"]["on_host_maintenance"] == "TERMINATE"  # placed ones cannot be moved
    assert "flex-placement" not in policies  # Google does not combine such a policy with resize requests
    assert "resource_policies" not in template(near, "flex")
    assert "resource_policies" not in group(near, "flex")


def test_pools_can_be_planned_before_base_exists(cluster: Cluster) -> None:
    """Nothing in stack `pools` reads the other's state, or asks Google for what is there but the image."""
    assert set(cluster.pools.document) == {"data", "provider", "resource", "terraform"}
    assert set(cluster.pools.document["data"]) == {"google_compute_image"}
    assert set(cluster.pools.document["resource"]) == {TEMPLATE, GROUP, "google_storage_bucket_object"}


# Names, as long as they can be. https://cloud.google.com/compute/docs/naming-resources and its like.

GCE = r"[a-z]([-a-z0-9]{0,61}[a-z0-9])?"
NAMES = {
    "google_compute_firewall": {"name": GCE},
    "google_compute_network": {"name": GCE},
    "google_compute_resource_policy": {"name": GCE},
    "google_compute_router": {"name": GCE},
    "google_compute_router_nat": {"name": GCE},
    "google_compute_subnetwork": {"name": GCE},
    GROUP: {"name": GCE, "base_instance_name": r"[a-z]([-a-z0-9]{0,56}[a-z0-9])?"},
    TEMPLATE: {"name_prefix": r"[a-z][-a-z0-9]{0,36}"},  # the provider adds 26 characters
    "google_project_iam_custom_role": {"role_id": r"[a-zA-Z0-9_.]{3,64}", "title": r".{1,100}"},
    "google_service_account": {"account_id": r"[a-z][-a-z0-9]{4,28}[a-z0-9]", "display_name": r".{1,100}"},
    "google_storage_bucket": {"name": r"[a-z0-9][a-z0-9._-]{1,61}[a-z0-9]"},
}


def test_the_longest_names_are_valid(longest: Cluster) -> None:
    assert len(longest.spec.name) == len(longest.spec.pools[0].name) == 20
    seen = set()
    for stack in (longest.base, longest.pools):
        for kind, made in stack.document["resource"].items():
            for key, form in NAMES.get(kind, {}).items():
                seen.add(kind)
                for resource in made.values():
                    assert re.fullmatch(form, resource[key]), f"{kind}.{key}: {resource[key]}"
            for resource in made.values():
                assert all(len(key) <= 63 and len(value) <= 63 for key, value in resource.get("labels", {}).items())
    assert seen == set(NAMES)
    unnamed = {"google_project_iam_member", "google_storage_bucket_iam_member", "google_storage_bucket_object"}
    kinds = {kind for stack in (longest.base, longest.pools) for kind in stack.document["resource"]}
    assert kinds - set(NAMES) == unnamed


def test_no_two_clusters_share_a_custom_role() -> None:
    """Roles' ids know no hyphens, cluster names no underscores."""
    made = synthesized(ROOT / "clusters/gcp-l4.yaml").base.all("google_project_iam_custom_role")
    assert {role["role_id"] for role in made.values()} == {"spotrun.l4.head.groups", "spotrun.l4.head.machines"}
