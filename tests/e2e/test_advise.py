"""`make advise MEASURE=`: the example runs on each pool of a cluster. Its speed for a dollar ranks the pools."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from tests.e2e.harness import Harness, running
from tests.helpers import wait_for

ROOT = Path(__file__).parents[2]
VIT = ROOT / "examples/vit/job.yaml"
# Two devices are two workers. One of the pools has dear machines, so it is worse whatever its speed.
SPEC: dict[str, Any] = {
    "name": "advise",
    "cloud": "local",
    "pools": [
        {"name": "single", "zone": "local-a", "max": 1},
        {"name": "double", "zone": "local-b", "max": 1, "devices": 2, "market": "on-demand"},
    ],
    "local": {
        "boot_delay": 0.1,
        "recreate_delay": 0.5,
        "market": [{"where": "single", "price": 0.1}, {"where": "double", "price": 100.0}],
    },
}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Harness]:
    with running(tmp_path_factory.mktemp("advise"), SPEC) as harness:
        (harness.folder / "cluster.yaml").write_text(json.dumps(SPEC))  # YAML, too
        yield harness


def command(cluster: Harness, *words: str, job: Path = VIT) -> list[str]:
    program = Path(sys.executable).with_name("fab")
    file = cluster.folder / "cluster.yaml"
    return [str(program), "advise", "--cluster", str(file), "--job", str(job), *words]


def measuring(cluster: Harness) -> list[str]:
    """The jobs that have not ended."""
    return [job["id"] for job in cluster.status()["jobs"]]


def test_each_pool_is_measured(cluster: Harness, tmp_path: Path) -> None:
    done = subprocess.run(
        command(cluster, "--measure", "3s", "--out", str(tmp_path), "--json"),
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=1200,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    options = json.loads(done.stdout)["options"]
    assert [each["pool"] for each in options if each["source"] == "measured" and each["nodes"] == 1] == [
        "single",
        "double",
    ]
    rates = {each["pool"]: each["per_dollar"] for each in options if each["nodes"] == 1}
    assert rates["single"] > rates["double"]
    table = (tmp_path / "machines.md").read_text()
    rows = [line.split(" | ") for line in table.splitlines() if "measured" in line]
    assert [row[3] for row in rows] == ["single", "double"]
    assert "samples for a dollar" in "".join(ElementTree.parse(tmp_path / "machines.svg").getroot().itertext())
    assert measuring(cluster) == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["Ctrl-C", "a cancelled CI job"])
def test_a_measurement_that_is_interrupted_leaves_no_job(
    number: signal.Signals, cluster: Harness, tmp_path: Path
) -> None:
    """Otherwise it would go on and cost money."""
    # On a busy machine, the example can end before this test has seen it.
    long = Path(shutil.copytree(VIT.parent, tmp_path / "vit")) / VIT.name
    text = long.read_text()
    assert "--steps=300" in text
    long.write_text(text.replace("--steps=300", "--steps=300000"))
    process = subprocess.Popen(
        command(cluster, "--measure", "10m", job=long),
        cwd=ROOT,
        env=dict(os.environ),
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    try:
        # If the head has the job, and the command does not know of it yet, the command only says so.
        assert any("measuring on pool" in line for line in process.stdout), "it has ended"
        process.send_signal(number)
        process.communicate(timeout=240)
        assert process.returncode != 0
        wait_for(lambda: measuring(cluster) == [], 60, "its end")
    finally:
        process.kill()
        process.communicate()


def test_a_measurement_that_fails_keeps_no_node(cluster: Harness, tmp_path: Path) -> None:
    """Nobody looks at that node, and it would cost money for as long as the job file says."""
    (tmp_path / "train.py").write_text("raise SystemExit(3)\n")
    file = tmp_path / "job.yaml"
    values = {"name": "fails", "script": "train.py", "max_restarts": 0, "keep_on_failure": "30m", "group": "sweep"}
    file.write_text(json.dumps(values))
    done = subprocess.run(
        command(cluster, "--measure", "3s", job=file), cwd=ROOT, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("no speed: the script exited with code 3") == 2
    found = [job for job in cluster.ctl("jobs") if job["job"].startswith("fails")]
    assert [(job["phase"], job["kept"], job["group"]) for job in found] == [("failed", None, None)] * 2
    assert all(job["job"].startswith("fails-measure-") for job in found)  # `after: [fails]` means no measurement
