"""The example with the Trainer of Hugging Face, on a cluster that takes its machines away."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from bench.processes import STANDALONE
from spotrun.spec import load_job
from tests.e2e.harness import PATIENCE, SILENCE, Harness

EXAMPLE = Path(__file__).parents[2] / "examples" / "trainer"
ARGS = ("--epochs=2", "--samples=2000")  # 64 steps with two workers


def test_a_trainer_goes_on_where_it_was(cluster: Harness, tmp_path: Path) -> None:
    """A node goes without notice. The other one keeps its process, and the model ends the same, bit for bit."""
    code, begun = tmp_path / "code", tmp_path / "begun"
    shutil.copytree(EXAMPLE, code, ignore=shutil.ignore_patterns("checkpoints", "model"))
    note = f"import os\nwith open({str(begun)!r}, 'a') as begun:\n    print(os.getpid(), file=begun)\n"
    (code / "train.py").write_text(note + (EXAMPLE / "train.py").read_text())
    job = load_job(code / "job.yaml")
    job = job.model_copy(update={"args": ARGS, "snapshot_interval": 2, "heartbeat_timeout": SILENCE})
    name = cluster.start(job, code)
    cluster.until_step(4)
    cluster.fault("kill", cluster.members()[0])
    final = cluster.until_ended()
    assert len(begun.read_text().split()) == 3, "two workers, and the one that took the place of the lost one"
    assert (final["phase"], final["restarts"], final["step"]) == ("succeeded", 0, 64)
    (interruption,) = final["interruptions"]
    assert interruption["kind"] == "kill"
    assert interruption["steps_lost"] <= 4  # as many as are between two snapshots, and those under way
    (kept,) = (key for key in cluster.access.store.list(f"jobs/{name}/kept/") if "model.safetensors" in key)
    undisturbed = tmp_path / "model"
    command = [sys.executable, *STANDALONE, "--nproc-per-node=2", "train.py", *ARGS, f"--out={undisturbed}"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run(command, check=True, cwd=EXAMPLE, env=environment, timeout=PATIENCE, stdout=subprocess.DEVNULL)
    assert cluster.access.store.get(kept) == (undisturbed / "model.safetensors").read_bytes()
