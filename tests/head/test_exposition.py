"""What Prometheus gets: valid text, names by its conventions, and numbers that are the head's own."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families

from spotrun.cloud.base import Ended
from spotrun.head import exposition, overview
from spotrun.readings import OF_GPU, Readings
from spotrun.wire import Worker
from tests.head.world import World, asked

ROOT = Path(__file__).parents[2]
GPU = dict(zip(OF_GPU, (97.0, 60 << 30, 80 << 30, 61.0, 651.0, 1755.0, 2619.0, 0.0, 4.0), strict=True))


@pytest.fixture
async def world(tmp_path: Path) -> World:
    """A job on two nodes with a GPU each; the second one needs three times as long alone."""
    world = World(tmp_path)
    world.cloud.size["p"] = 2
    job = await world.started()
    await world.look()
    for rank, name in enumerate(("p-0", "p-1")):
        slow = 0.1 if rank == 0 else 0.3
        worker = Worker(rank=rank, pid=1, step=20, base=10, stepped_at=1.0, stepping=5.0, alone=10 * slow)
        world.receive(
            name,
            readings=Readings(machine=(50.0, 4.0, 8.0, 1.0, 2.0, math.nan, 7.0), gpus=(tuple(GPU.values()),)),
            job=job.id,
            phase="running",
            generation=1,
            workers=(worker,),
        )
    await world.turn()
    return world


def found(world: World) -> dict[str, Metric]:
    return {family.name: family for family in text_string_to_metric_families(exposition.text(world.head))}


def values(family: Metric, *labels: str) -> dict[Any, float]:
    return {tuple(sample.labels[label] for label in labels): sample.value for sample in family.samples}


async def test_names_follow_the_conventions(world: World) -> None:
    text = exposition.text(world.head)
    names = re.findall(r"^# TYPE (\S+) (\S+)$", text, re.MULTILINE)
    assert len({name for name, _ in names}) == len(names) > 30
    for name, kind in names:
        assert re.fullmatch(r"spotrun_[a-z0-9_]+|DCGM_FI_DEV_[A-Z_]+", name)
        if not name.startswith("DCGM"):
            assert (kind == "counter") == name.endswith("_total"), name
            assert not re.search(r"_(ms|mb|percent|usd)(_|$)", name), f"{name}: base units"
        assert re.search(rf"^# HELP {name} \S", text, re.MULTILINE)


async def test_gpus_have_the_names_and_units_of_dcgm(world: World) -> None:
    families = found(world)
    wanted = {
        "GPU_UTIL": 97, "FB_USED": 60 << 10, "FB_FREE": 20 << 10, "GPU_TEMP": 61, "POWER_USAGE": 651, "SM_CLOCK": 1755,
        "MEM_CLOCK": 2619, "ECC_DBE_VOL_TOTAL": 0, "CLOCK_THROTTLE_REASONS": 4,
    }  # fmt: skip
    for name, value in wanted.items():
        assert values(families[f"DCGM_FI_DEV_{name}"], "gpu", "device", "Hostname") == {
            ("0", "nvidia0", node): value for node in ("p-0", "p-1")
        }


async def test_a_value_that_is_not_known_is_left_out(world: World) -> None:
    families = found(world)
    assert "spotrun_node_network_receive_bytes_per_second" not in families
    assert values(families["spotrun_node_cpu_ratio"], "node") == {("p-0",): 0.5, ("p-1",): 0.5}
    assert "spotrun_job_deadline_timestamp_seconds" not in families


async def test_a_rank_that_needs_longer_alone_shows(world: World) -> None:
    ratio = values(found(world)["spotrun_rank_straggler_ratio"], "node", "rank")
    assert ratio == {("p-0", "0"): pytest.approx(0.5), ("p-1", "1"): pytest.approx(1.5)}


async def test_the_numbers_are_those_of_the_overview(world: World) -> None:
    families, seen = found(world), overview.of(world.head)
    (job,) = seen["jobs"]
    assert values(families["spotrun_pool_price_dollars_per_hour"], "pool") == {("p",): 1.0, ("q",): 2.0}
    assert values(families["spotrun_dollars_per_hour"])[()] == seen["hourly"] == 2.0
    assert values(families["spotrun_job_step"], "job") == {(job["id"],): job["step"]}
    assert values(families["spotrun_job_info"], "phase") == {(job["phase"],): 1}


async def test_the_control_socket_has_them(world: World) -> None:
    answer = await asked(world, world.head, "metrics")
    assert "spotrun_head" in answer["text"]


async def test_a_counter_never_falls(tmp_path: Path) -> None:
    """The cloud says late that a machine had ended. To Prometheus, a counter that falls has begun again at zero."""
    world, now = World(tmp_path), 1000.0
    world.clock = lambda: now
    world.new_head()
    world.cloud.size["p"] = 1
    await world.look()
    await world.turn()
    now += 600.0
    await world.look()
    await world.turn()
    before = found(world)
    assert world.head.ledger.idle.cost > 0
    world.cloud.size["p"] = 0
    world.cloud.over = [Ended("p-0", "p", 1.0, 1000.0, 1300.0)]
    await world.look()
    await world.turn()
    after = found(world)
    cost = [values(families["spotrun_idle_cost_dollars"])[()] for families in (before, after)]
    assert cost[1] < cost[0]
    for name, family in after.items():
        if family.type == "counter":
            assert [each.value for each in family.samples] >= [each.value for each in before[name].samples], name


async def test_an_older_agent_sends_no_readings(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.receive("a")
    await world.turn()
    assert "spotrun_node_cpu_ratio" not in found(world)


async def test_prometheus_keeps_the_label_job(world: World) -> None:
    """By default, Prometheus renames a label `job` or `instance`, because each scrape has these labels itself."""
    (scrape,) = yaml.safe_load((ROOT / "docs/prometheus.yaml").read_text())["scrape_configs"]
    used = {label for family in found(world).values() for sample in family.samples for label in sample.labels}
    assert "job" in used
    assert scrape["honor_labels"] is True


async def test_the_dashboard_for_grafana_names_metrics_that_there_are(world: World) -> None:
    text = (ROOT / "docs/grafana.json").read_text()
    names = set(re.findall(r"\b(?:spotrun_[a-z0-9_]+|DCGM_FI_DEV_[A-Z_]+)\b", text))
    known = {sample.name for family in found(world).values() for sample in family.samples}
    later = {"spotrun_job_budget_dollars", "spotrun_job_end_timestamp_seconds", "spotrun_job_steps"}
    assert len(names) > 10
    assert names - later <= known
    assert {panel["type"] for panel in json.loads(text)["panels"]} <= {"stat", "timeseries", "table", "row"}
