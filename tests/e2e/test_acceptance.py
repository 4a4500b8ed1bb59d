"""`make acceptance` on the local cloud, for real: all that needs no GPU and no account."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.acceptance.steps import STEPS

pytestmark = pytest.mark.clouds  # this has the shorter lane of CI
ROOT = Path(__file__).parents[2]


def test_the_first_day_on_the_local_cloud(tmp_path: Path) -> None:
    """Whatever can be tried passes; the rest is not run, with a reason; nothing is left; the bucket has the report."""
    file = tmp_path / "cluster.yaml"
    file.write_text("name: first-day\ncloud: local\npools: [{name: spot, zone: local-a, max: 4}]\n")
    home = tmp_path / "home"
    command = [str(Path(sys.executable).with_name("fab")), "acceptance", "--cluster", str(file)]
    environment = {**os.environ, "SPOTRUN_HOME": str(home)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=1500)
    assert done.returncode == 0, done.stdout + done.stderr
    folder = home / "local/first-day/bucket/clusters/first-day/acceptance"
    found = {step["step"]: step for step in json.loads((folder / "report.json").read_text())["steps"]}
    for step in STEPS:
        state, reason = found[step.name]["state"], found[step.name]["reason"]
        assert state == ("passed" if step.needs == "local" else "not run"), f"{step.name}: {reason}\n{done.stdout}"
        assert bool(reason) == (state == "not run")
    assert found["preempt"]["facts"]["steps lost"] == 0
    assert found["equality"]["facts"]["disturbed"] == found["reference"]["facts"]["digest"]
    assert {"joined after s", "first step after s"} <= found["join"]["facts"].keys()
    assert {"restored s", "first step s"} <= found["kill"]["facts"].keys()
    assert "| matrix product | gpu | not run: it needs machines with GPUs" in (folder / "report.md").read_text()
    left = subprocess.run(["pgrep", "-f", str(home)], capture_output=True, text=True).stdout
    assert left == ""
