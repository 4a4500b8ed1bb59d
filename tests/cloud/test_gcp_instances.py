"""What Google says, in our words, and what its quotas are worth: pure functions, and data."""

from __future__ import annotations

from typing import Any

import pytest
from google.cloud import compute_v1

from spotrun.cloud.base import Instance, Problem, Shortfall
from spotrun.cloud.gcp import errors, instances
from spotrun.cloud.gcp import quotas as quota
from spotrun.cloud.gcp.instances import Failure, Member
from spotrun.cloud.gcp.quotas import MachineUse, Quota
from spotrun.spec import ClusterSpec, PoolSpec
from tests.fakes.on_gcp import CLUSTER

pytestmark = pytest.mark.clouds

SPOT = CLUSTER.pools[0]
DRY = "ZONE_RESOURCE_POOL_EXHAUSTED"
DRY_TEXT = "zone us-central1-a has no more spot g2-standard-8 at present: {} missing (" + DRY + ")"


def test_every_status_has_a_state() -> None:
    assert set(instances.STATES) == set(compute_v1.Instance.Status.__members__) - {"UNDEFINED_STATUS"}


def test_a_machine_as_google_writes_it() -> None:
    found = compute_v1.Instance.from_json(
        """{"kind": "compute#instance", "id": "4567890123456789012", "name": "demo--spot-a-x7f2", "status": "STAGING",
            "creationTimestamp": "2026-11-21T00:00:01.500-08:00", "labels": {"spotrun-pool": "spot-a"},
            "zone": "https://www.googleapis.com/compute/v1/projects/p/zones/us-central1-a",
            "networkInterfaces": [{"networkIP": "10.77.0.4", "name": "nic0"}],
            "scheduling": {"provisioningModel": "SPOT", "preemptible": true, "instanceTerminationAction": "DELETE"}}"""
    )
    assert instances.instance(found) == Instance(
        name="demo--spot-a-x7f2",
        pool="spot-a",
        zone="us-central1-a",
        address="10.77.0.4",
        state="provisioning",
        market="spot",
        created=1795248001.5,
        id="4567890123456789012",
    )


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({}, 0.0),
        ({"scheduling": {"max_run_duration": {"seconds": 86400}}}, 1795248001.5 + 86400),
        (
            {
                "scheduling": {"max_run_duration": {"seconds": 86400}},
                "resource_status": {"scheduling": {"termination_timestamp": "2026-11-22T00:01:01.500-08:00"}},
            },
            1795248001.5 + 86460,
        ),
        ({"scheduling": {"preemptible": True}}, 1795248001.5 + 86400),
        ({"scheduling": {"preemptible": True, "provisioning_model": "SPOT"}}, 0.0),
    ],
    ids=["never", "before it runs", "as Google says once it runs", "preemptible, before there was spot", "spot"],
)
def test_when_google_ends_a_machine(values: dict[str, Any], expected: float) -> None:
    found = compute_v1.Instance(creation_timestamp="2026-11-21T00:00:01.500-08:00", **values)
    assert instances.instance(found).ends == expected


@pytest.mark.parametrize(
    ("found", "there", "pending", "replaceable"),
    [
        ({"instance_status": "RUNNING", "current_action": "NONE"}, True, False, True),
        ({"instance_status": "RUNNING", "current_action": "VERIFYING"}, True, False, True),
        ({"instance_status": "STAGING", "current_action": "CREATING"}, True, False, False),
        ({"instance_status": "TERMINATED", "current_action": "NONE"}, True, False, True),
        ({"instance_status": "STOPPING", "current_action": "RECREATING"}, True, False, False),
        ({"instance_status": "STOPPING", "current_action": "DELETING"}, True, False, False),
        ({"current_action": "CREATING"}, False, True, False),
        ({"current_action": "RECREATING"}, False, True, False),
        ({"current_action": "DELETING"}, False, False, False),
    ],
)
def test_members(found: dict[str, str], there: bool, pending: bool, replaceable: bool) -> None:
    member = instances.member(compute_v1.ManagedInstance(found, instance="https://x/zones/z/instances/g-abcd"))
    assert (member.name, member.id) == ("g-abcd", "")
    assert (member.there, member.pending, member.replaceable) == (there, pending, replaceable)


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (DRY, "stockout"),
        ("ZONE_RESOURCE_POOL_EXHAUSTED_WITH_DETAILS", "stockout"),
        ("REGION_RESOURCE_POOL_EXHAUSTED", "stockout"),
        ("RESOURCE_POOL_EXHAUSTED", "stockout"),
        ("insufficientCapacity", "stockout"),
        ("QUOTA_EXCEEDED", "quota"),
        ("quotaExceeded", "quota"),
        ("IP_SPACE_EXHAUSTED", "other"),
        ("RESOURCE_NOT_READY", "other"),
        ("PERMISSIONS_ERROR", "other"),
        ("rateLimitExceeded", "other"),
        ("", "other"),
    ],
)
def test_codes(code: str, kind: str) -> None:
    assert errors.kind_of(code) == kind


HERE = Member("a", "1", True, "NONE")
GONE = Member("b", "", False, "CREATING")
FAILED = Member("f", "", False, "RECREATING", ((DRY, "no more"),))
TWICE = Member("t", "", False, "CREATING", ((DRY, ""), ("QUOTA_EXCEEDED", "Instance 't' creation failed: Quota 'X'.")))
OLD = Problem("spot-a", "stockout", "old words", 500.0)


@pytest.mark.parametrize(
    ("members", "failures", "before", "expected"),
    [
        pytest.param([], [], [], [], id="an empty pool"),
        pytest.param([HERE, GONE], [], [], [], id="one that is being made"),
        pytest.param([HERE, FAILED], [], [], [Problem("spot-a", "stockout", DRY_TEXT.format(1), 1000.0)], id="new"),
        pytest.param(
            [FAILED, GONE], [], [OLD], [Problem("spot-a", "stockout", DRY_TEXT.format(2), 500.0)], id="seen before"
        ),
        pytest.param([HERE, GONE], [], [OLD], [OLD], id="between two attempts"),
        pytest.param([HERE], [], [OLD], [], id="it has its size again"),
        pytest.param(
            [GONE],
            [Failure("b", DRY, "no", 900.0), Failure("b", DRY, "no", 700.0)],
            [],
            [Problem("spot-a", "stockout", DRY_TEXT.format(1), 700.0)],
            id="from the group's record",
        ),
        pytest.param([GONE], [Failure("b", DRY, "no", 399.0)], [], [], id="from the record, but long ago"),
        pytest.param([GONE], [Failure("c", DRY, "no", 900.0)], [], [], id="of a machine that is none of the missing"),
        pytest.param(
            [TWICE],
            [],
            [],
            [
                Problem("spot-a", "stockout", DRY_TEXT.format(1), 1000.0),
                Problem("spot-a", "quota", "1 missing: QUOTA_EXCEEDED: Quota 'X'", 1000.0),
            ],
            id="two at a time",
        ),
    ],
)
def test_problems(
    members: list[Member], failures: list[Failure], before: list[Problem], expected: list[Problem]
) -> None:
    assert instances.diagnose(SPOT, members, failures, before, now=1000.0) == expected


def test_a_placed_pool_that_stays_empty_names_placement_and_the_key_that_turns_it_off() -> None:
    dry, quota = instances.diagnose(SPOT, [TWICE], [], [], now=1000.0, placed=True)
    assert dry.message.startswith(DRY_TEXT.format(1))
    assert "`placement: false`" in dry.message
    assert "placement" not in quota.message


@pytest.mark.parametrize(
    ("machine", "accelerator", "expected"),
    [
        ("e2-small", None, MachineUse("e2", 2, ssd=100)),
        ("n1-standard-8", None, MachineUse("n1", 8, ssd=100)),
        ("n1-standard-8", {"type": "nvidia-tesla-t4", "count": 2}, MachineUse("n1", 8, "NVIDIA_T4_GPUS", 2, 100)),
        ("n1-highmem-16", {"type": "nvidia-tesla-v100", "count": 1}, MachineUse("n1", 16, "NVIDIA_V100_GPUS", 1, 100)),
        ("n2-custom-6-3072", None, MachineUse("n2", 6, ssd=100)),
        ("c3-standard-22-lssd", None, MachineUse("c3", 22, ssd=100)),
        ("g2-standard-4", None, MachineUse("g2", 4, "NVIDIA_L4_GPUS", 1, 100)),
        ("g2-standard-32", None, MachineUse("g2", 32, "NVIDIA_L4_GPUS", 1, 100)),
        ("g2-standard-24", None, MachineUse("g2", 24, "NVIDIA_L4_GPUS", 2, 100)),
        ("g2-standard-96", None, MachineUse("g2", 96, "NVIDIA_L4_GPUS", 8, 100)),
        ("a2-highgpu-2g", None, MachineUse("a2", 24, "NVIDIA_A100_GPUS", 2, 100)),
        ("a2-megagpu-16g", None, MachineUse("a2", 96, "NVIDIA_A100_GPUS", 16, 100)),
        ("a2-ultragpu-8g", None, MachineUse("a2", 96, "NVIDIA_A100_80GB_GPUS", 8, 100, 3000)),
        ("a3-highgpu-8g", None, MachineUse("a3", 208, "NVIDIA_H100_GPUS", 8, 100, 6000)),
        ("a3-megagpu-8g", None, MachineUse("a3", 208, "NVIDIA_H100_MEGA_GPUS", 8, 100, 6000)),
        # It takes no Persistent Disk.
        ("a3-ultragpu-8g", None, MachineUse("a3", 224, "NVIDIA_H200_GPUS", 8, 0, 12000)),
        ("a3-highgpu-1g", None, MachineUse("a3", 26, "NVIDIA_H100_GPUS", 1, 100, 750)),
        ("zz-odd", None, MachineUse("zz", 0, ssd=100)),
    ],
)
def test_what_a_machine_takes(machine: str, accelerator: dict[str, Any] | None, expected: MachineUse) -> None:
    pool = PoolSpec.model_validate({"name": "x", "zone": "z", "machine": machine, "accelerator": accelerator})
    assert quota.machine_use(pool) == expected


def cluster(*pools: dict[str, Any]) -> ClusterSpec:
    found = [{"name": f"p{n}", "zone": "us-central1-a", "max": 4, **pool} for n, pool in enumerate(pools)]
    return ClusterSpec.model_validate({**CLUSTER.model_dump(), "pools": found})


G2 = {"machine": "g2-standard-8"}
WEEK = {"market": "on-demand", "max_run_duration": "7d"}
A3 = {"machine": "a3-highgpu-8g"}  # with 6000 GB of Local SSD
L4, PL4 = "NVIDIA_L4_GPUS", "PREEMPTIBLE_NVIDIA_L4_GPUS"
SSD, PSSD = "LOCAL_SSD_TOTAL_GB", "PREEMPTIBLE_LOCAL_SSD_GB"


@pytest.mark.parametrize(
    ("pools", "quotas", "running", "expected"),
    [
        pytest.param([G2], {}, {}, [], id="quotas that are not shown are not guessed"),
        pytest.param([G2], {PL4: (4, 0)}, {}, [], id="just enough"),
        pytest.param([G2], {PL4: (3, 0)}, {}, [Shortfall("p0", PL4, 3, 4)], id="too few"),
        pytest.param([G2], {PL4: (5, 2)}, {}, [Shortfall("p0", PL4, 5, 4, 2)], id="others have taken some"),
        pytest.param([G2], {PL4: (4, 3)}, {"p0": 3}, [], id="those are the pool's own"),
        pytest.param([G2, G2], {PL4: (4, 3)}, {"p1": 3}, [], id="those are another pool's, which may go"),
        pytest.param([G2], {PL4: (0, 0), L4: (4, 0)}, {}, [], id="no preemptible quota granted: the standard one"),
        pytest.param([G2], {PL4: (0, 0), L4: (1, 0)}, {}, [Shortfall("p0", L4, 1, 4)], id="which is too small"),
        pytest.param([G2], {PL4: (2, 0), L4: (9, 0)}, {}, [Shortfall("p0", PL4, 2, 4)], id="granted: it alone"),
        pytest.param([G2], {PL4: (0, 0), L4: (0, 0)}, {}, [Shortfall("p0", PL4, 0, 4)], id="neither"),
        pytest.param(
            [{**G2, "market": "on-demand"}], {PL4: (9, 0), L4: (1, 0)}, {}, [Shortfall("p0", L4, 1, 4)], id="on-demand"
        ),
        pytest.param(
            [{**G2, **WEEK}], {PL4: (4, 0), L4: (1, 0)}, {}, [], id="on-demand for a week: preemptible is larger"
        ),
        pytest.param(
            [{**G2, **WEEK}], {PL4: (1, 0), L4: (4, 0)}, {}, [], id="on-demand for a week: standard is larger"
        ),
        pytest.param(
            [{**G2, **WEEK, "max_run_duration": "8d"}],
            {PL4: (4, 0), L4: (1, 0)},
            {},
            [Shortfall("p0", L4, 1, 4)],
            id="on-demand for longer",
        ),
        pytest.param(
            [G2], {"GPUS_ALL_REGIONS": (1, 0)}, {}, [Shortfall("p0", "GPUS_ALL_REGIONS", 1, 4)], id="the project's"
        ),
        pytest.param([G2], {"PREEMPTIBLE_CPUS": (0, 0), "CPUS": (8, 0)}, {}, [], id="vCPUs of a family not shown"),
        pytest.param(
            [G2], {"PREEMPTIBLE_CPUS": (16, 0)}, {}, [Shortfall("p0", "PREEMPTIBLE_CPUS", 16, 32)], id="spot vCPUs"
        ),
        pytest.param(
            [{"machine": "n2-standard-16"}],
            {"CPUS": (999, 0), "N2_CPUS": (32, 8), "PREEMPTIBLE_CPUS": (0, 0)},
            {},
            [Shortfall("p0", "N2_CPUS", 32, 64, 8)],
            id="a family of its own",
        ),
        pytest.param(
            [{"machine": "n1-standard-8", "accelerator": {"type": "nvidia-tesla-t4", "count": 4}}],
            {"CPUS": (24, 0), "NVIDIA_T4_GPUS": (16, 0)},
            {},
            [Shortfall("p0", "CPUS", 24, 32)],
            id="N1 with GPUs",
        ),
        pytest.param(
            [{**G2, "max": 1}],
            {"CPUS": (1, 0), "INSTANCES": (24, 0)},
            {},
            [Shortfall("head", "CPUS", 1, 2)],
            id="not even the head",
        ),
        pytest.param(
            [{**G2, "disk": 200}],
            {"SSD_TOTAL_GB": (500, 0)},
            {},
            [Shortfall("p0", "SSD_TOTAL_GB", 500, 800)],
            id="disks",
        ),
        pytest.param(
            [A3],
            {SSD: (99000, 0), PSSD: (9000, 0)},
            {},
            [Shortfall("p0", PSSD, 9000, 24000, certain=False)],
            id="Local SSD of spot machines, as a warning",
        ),
        pytest.param(
            [{**A3, "market": "on-demand"}],
            {SSD: (500, 0), PSSD: (99000, 0)},
            {},
            [Shortfall("p0", SSD, 500, 24000, certain=False)],
            id="Local SSD of on-demand machines, as a warning",
        ),
        pytest.param(
            [A3],
            {SSD: (9000, 0), PSSD: (0, 0)},
            {},
            [Shortfall("p0", SSD, 9000, 24000, certain=False)],
            id="no preemptible quota of Local SSD: the standard one",
        ),
        pytest.param([A3], {SSD: (0, 0), PSSD: (0, 0)}, {}, [], id="a quota of Local SSD that shows 0 says nothing"),
    ],
)
def test_quotas(
    pools: list[dict[str, Any]],
    quotas: dict[str, tuple[float, float]],
    running: dict[str, int],
    expected: list[Shortfall],
) -> None:
    known = {metric: Quota(*values) for metric, values in quotas.items()}
    assert quota.compare(cluster(*pools), known, running) == expected
