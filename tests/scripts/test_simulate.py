"""`make simulate`: an operator's own job on an operator's own traces."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts import simulate
from spotrun.errors import SpecError

CLUSTER = """
name: mine
cloud: local
pools:
  - {name: spot, zone: local-a}
  - {name: sure, zone: local-a, market: on-demand}
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
