"""`make cost`: what the accounts in the bucket add up to, and what is missing in them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from scripts import cost
from spotrun.errors import SpotrunError
from spotrun.head.costs.bill import Line
from spotrun.head.costs.job_totals import Idle
from spotrun.head.job_state import JobState, Progress
from spotrun.head.status import job_status
from spotrun.store import idle_key, job_key
from tests.scripts.accounts import job, store

SPOT = Line(month="2026-11", pool="a", market="spot", seconds=7200, cost=2.0, on_demand=6.0)
LATER = Line(month="2026-12", pool="a", market="spot", seconds=3600, cost=1.5, on_demand=3.0)
STEADY = Line(month="2026-12", pool="b", market="on-demand", seconds=3600, cost=4.0, on_demand=4.0)


def document(folder: Path, *jobs: JobState, idle: Idle | None = None, **asked: Any) -> dict[str, Any]:
    return cost.document(cost.read(store(folder, *jobs, idle=idle), "c", asked.get("job")), "c", **asked)


KEPT = {"member": {"node": "a-0", "boot": "b", "address": "127.0.0.1"}, "until": 9e9}
IDLE = Idle(node_seconds=1800, cost=0.5, account=(SPOT.replace(seconds=1800, cost=0.5, on_demand=1.5),))


def test_all_jobs_and_idle_devices_add_up(tmp_path: Path) -> None:
    found = document(tmp_path, job(1, SPOT, LATER), job(2, STEADY), idle=IDLE)
    assert [row["cost"] for row in found["jobs"]] == [3.5, 4.0]
    pools = [(row["pool"], row["market"], row["cost"], row["on_demand"], row["saved"]) for row in found["pools"]]
    assert pools == [("a", "spot", 4.0, 10.5, 6.5), ("b", "on-demand", 4.0, 4.0, 0.0)]
    assert {key: found["total"][key] for key in ("seconds", "cost", "on_demand", "saved")} == {
        "seconds": 7200 + 3600 + 3600 + 1800,
        "cost": 8.0,
        "on_demand": 14.5,
        "saved": 6.5,
    }


def test_months_add_up_to_the_whole(tmp_path: Path) -> None:
    jobs = (job(1, SPOT, LATER), job(2, STEADY))
    whole = document(tmp_path, *jobs, idle=IDLE)
    months = [document(tmp_path, *jobs, idle=IDLE, month=month) for month in ("2026-11", "2026-12")]
    assert [found["total"]["cost"] for found in months] == [2.5, 5.5]
    assert [[row["job"][-1] for row in found["jobs"]] for found in months] == [["1"], ["1", "2"]]
    assert sum(found["total"]["cost"] for found in months) == whole["total"]["cost"]
    assert "nothing has been paid in 2026-10" in cost.text(document(tmp_path, *jobs, idle=IDLE, month="2026-10"))


@pytest.mark.parametrize(
    ("state", "hourly"),
    [({"phase": "running"}, 3.0), ({}, 0.0), ({"phase": "failed", "kept_node": KEPT}, 3.0)],
    ids=["it runs", "it has ended", "it has failed and keeps a node"],
)
def test_what_a_job_costs_now(tmp_path: Path, state: dict[str, Any], hourly: float) -> None:
    """`make cost` and `make status` say the same."""
    found = job(1, SPOT, hourly=3.0, **state)
    assert document(tmp_path, found)["jobs"][0]["hourly"] == job_status(found)["hourly"] == hourly


def test_one_job_or_one_group_has_no_idle_devices(tmp_path: Path) -> None:
    jobs = (job(1, SPOT, group="search"), job(2, STEADY))
    assert document(tmp_path, *jobs, idle=IDLE, job=jobs[1].id)["total"]["cost"] == 4.0
    assert document(tmp_path, *jobs, idle=IDLE, group="search")["total"]["cost"] == 2.0


def test_jobs_with_the_same_label_are_added_up(tmp_path: Path) -> None:
    team = {"labels": {"team": "vision"}}
    found = document(tmp_path, job(1, SPOT, **team), job(2, STEADY, **team), job(3, LATER, labels={"team": "text"}))
    assert {value: sums["cost"] for value, sums in found["labels"]["team"].items()} == {"vision": 6.0, "text": 1.5}
    assert "label team" in cost.text(found)


def test_a_job_that_runs_has_a_cost_to_the_end(tmp_path: Path) -> None:
    progress = Progress(base=0, step=50, stepped_at=1000.0, pace=36.0, total_steps=150)  # an hour is left
    running = job(1, SPOT, phase="running", progress=progress, hourly=3.0, counted_at=1000.0, budget=8.0)
    found = document(tmp_path, running)
    assert found["jobs"][0]["to_end"] == pytest.approx(5.0)
    shown = cost.text(found)
    assert "about $5.00" in shown
    assert "$8.00 (25% used)" in shown


def test_what_is_not_known_is_said(tmp_path: Path) -> None:
    unpriced = Line(month="2026-11", pool="x", market="spot", seconds=60, unpriced=60, unlisted=60)
    old = job(2, cost=5.0, node_seconds=100.0)
    found = document(tmp_path, job(1, unpriced), old)
    shown = cost.text(found)
    assert "pool x: the price of 1 min 0 s is not known; the cost lacks that time" in shown
    assert "pool x: what 1 min 0 s would have cost on-demand is not known" in shown
    assert "An older version of the head counted $5.00 without pools and months: it is in the cost" in shown
    assert found["total"]["cost"] == 5.0


def test_a_job_that_has_used_no_machine_has_cost_nothing(tmp_path: Path) -> None:
    shown = cost.text(document(tmp_path, job(1), job(2, SPOT)))
    (line,) = [line for line in shown.splitlines() if job(1).id in line]
    assert "$0.00" in line
    assert "not known" not in line


@pytest.mark.parametrize("jobs", [0, 1])
def test_an_account_of_a_later_version_hides_no_job(tmp_path: Path, jobs: int) -> None:
    bucket = store(tmp_path, *[job(1, SPOT)][:jobs])
    bucket.put(idle_key("c"), b'{"format": 2, "cost": 7.0}')
    found = cost.document(cost.read(bucket, "c"), "c")
    assert found["total"]["cost"] == 2.0 * jobs
    assert "idle.json: format: has format 2; this version of spotrun reads format 1: update it" in cost.text(found)


def test_a_state_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    broken = "train-20261122-000009"
    bucket = store(tmp_path, job(1, SPOT))
    bucket.put(job_key(broken, "state.json"), b"{")
    found = cost.document(cost.read(bucket, "c"), "c")
    assert (found["unreadable"], found["total"]["cost"]) == ([broken], 2.0)
    assert f"cannot be read, so they are missing: {broken}" in cost.text(found)


def test_old_prices_are_told(tmp_path: Path) -> None:
    found = cost.document(cost.read(store(tmp_path, job(1, SPOT)), "c"), "c", warning="The shipped prices are old.")
    assert cost.text(found).endswith("are not counted.\nThe shipped prices are old.")


MISTAKES: dict[str, tuple[dict[str, str], str]] = {
    "a job that is not there": ({"job": "train-20261122-000007"}, "ID: 'train-20261122-000007': there is no such job"),
    "a job of no such name": ({"job": "train"}, "ID: 'train': there is no such job"),
    "a group without jobs": ({"group": "none"}, "GROUP: 'none': no job of cluster c is in this group"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_explained(tmp_path: Path, name: str) -> None:
    asked, words = MISTAKES[name]
    with pytest.raises(SpotrunError, match=words):
        document(tmp_path, job(1, SPOT), **asked)


def test_the_closing_report_has_the_pools() -> None:
    lines = cost.by_pool([line.model_dump() for line in (SPOT, LATER, STEADY)], budget=10.0)
    assert [" ".join(line.split()) for line in lines] == [
        "pool machine time cost on-demand saved",
        "a (spot) 3 h 0 min $3.50 $9.00 $5.50 (61%)",
        "b (on-demand) 1 h 0 min $4.00 $4.00 $0.00 (0%)",
        "total 4 h 0 min $7.50 $13.00 $5.50 (42%)",
        "budget $10.00: 75% used",
    ]
