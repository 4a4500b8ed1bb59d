"""`make simulate`: an operator's own job on an operator's own traces."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest

from scripts import simulate
from spotrun.errors import SpecError
from spotrun.simulate.traces import load
from spotrun.spec import ClusterSpec

CLUSTER = """
name: mine
cloud: local
pools:
  - {name: spot, zone: local-a}
  - {name: sure, zone: local-a, market: on-demand, max: 2}
"""


def files(folder: Path, job: str) -> tuple[str, str, str]:
    """A cluster file, a job file, and a folder with a trace: twelve hours, without a machine in the first two."""
    (folder / "cluster.yaml").write_text(CLUSTER)
    (folder / "train.py").touch()
    (folder / "job.yaml").write_text(f"script: train.py\n{job}")
    (folder / "traces").mkdir()
    (folder / "traces/local-a.csv").write_text("seconds,machines\n0,0\n7200,1\n36000,1\n43200,1\n")
    return str(folder / "cluster.yaml"), str(folder / "job.yaml"), str(folder / "traces")


def test_each_policy_has_its_cost_and_its_end(tmp_path: Path) -> None:
    found = simulate.simulate(*files(tmp_path, "work: 3h\ndeadline: 12h\n"), "available", runs=2)
    rows = {row["policy"]: row for row in found["policies"]}
    assert list(rows) == ["spotrun", "failover", "uniform_progress", "greedy", "static"]
    assert all(row["met"] == 1 for row in rows.values())
    assert rows["static"]["cost"][1] == pytest.approx(3 + 300 / 3600, abs=0.01)  # at one dollar an hour
    assert rows["spotrun"]["cost"][1] <= rows["static"]["cost"][1]
    assert "uniform_progress" in simulate.text(found)


def test_spares_cost_money_and_folders_are_kept(tmp_path: Path) -> None:
    """The spare machine stands by and is paid, too. In simulated time, uploads take no time."""
    for name in ("plain", "spare"):
        (tmp_path / name).mkdir()
    plain = simulate.simulate(*files(tmp_path / "plain", "work: 3h\npools: [sure]\n"), "available", runs=1)
    keys = "work: 3h\npools: [sure]\nnodes: {min: 1, spares: 1}\nkeep: [out]\n"
    spare = simulate.simulate(*files(tmp_path / "spare", keys), "available", runs=1)
    one, two = plain["policies"][0], spare["policies"][0]
    assert (one["ended"], two["ended"]) == (1, 1)
    assert two["end"] == one["end"]
    assert two["cost"][1] == pytest.approx(2 * one["cost"][1], rel=0.01)


@pytest.mark.parametrize(
    ("job", "polarity", "message"),
    [
        ("deadline: 12h\n", "available", "work is missing: how long the whole job takes on one machine"),
        ("work: 3h\n", "", "polarity is missing"),
        ("work: 3h\npools: [spit]\n", "available", "pools: .*spit"),
        ("work: 3h\nnodes: 100\n", "available", "job.yaml: .*nodes"),
        ("work: 40h\n", "available", "14 h long, and this job needs 160 h; name a longer"),
    ],
    ids=[
        "a job without its work",
        "traces without a polarity",
        "a pool that the cluster does not have",
        "more nodes than the pools may have",
        "a trace that is too short",
    ],
)
def test_what_is_missing_is_named(tmp_path: Path, job: str, polarity: str, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        simulate.simulate(*files(tmp_path, job), polarity, runs=1)


def test_pools_of_one_zone_have_the_same_market_and_other_zones_have_others(tmp_path: Path) -> None:
    for name, count in (("local-north", 1), ("south", 2), ("west", 3)):
        (tmp_path / f"{name}.csv").write_text(f"seconds,machines\n0,{count}\n43200,{count}\n")
    trace = load(tmp_path, "available")
    pools = [{"name": f"p{i}", "zone": zone} for i, zone in enumerate(("local-a", "local-a", "local-b", "local-north"))]
    cluster = ClusterSpec.model_validate({"name": "mine", "cloud": "local", "pools": pools})
    drawn = set()
    for seed in range(20):
        zones = simulate._zones(cluster, trace, Random(seed))
        assert zones["local-north"].name == "local-north"
        assert {zones["local-a"].name, zones["local-b"].name} == {"south", "west"}
        drawn.add(zones["local-a"].name)
        one, other, *_ = (simulate._supply(cluster, pool, zones) for pool in cluster.pools)
        assert one == other
    assert drawn == {"south", "west"}


def test_zones_share_a_market_if_the_trace_has_too_few(tmp_path: Path) -> None:
    (tmp_path / "north.csv").write_text("seconds,machines\n0,1\n43200,1\n")
    pools = [{"name": f"p{i}", "zone": f"local-{i}"} for i in range(3)]
    cluster = ClusterSpec.model_validate({"name": "mine", "cloud": "local", "pools": pools})
    zones = simulate._zones(cluster, load(tmp_path, "available"), Random(1))
    assert {zone.name for zone in zones.values()} == {"north"}


def test_a_job_that_shares_machines_starts(tmp_path: Path) -> None:
    cluster, job, traces = files(tmp_path, "work: 3h\ndevices: 2\n")
    Path(cluster).write_text(CLUSTER.replace("local-a}", "local-a, devices: 4}"))
    found = simulate.simulate(cluster, job, traces, "available", runs=1)
    assert {row["policy"]: row["ended"] for row in found["policies"]} == {"spotrun": 1, "failover": 1, "static": 0}
