"""The examples with the Trainers of Hugging Face and of Lightning, on a cluster that takes its machines away."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from bench.processes import STANDALONE
from spotrun.spec import load_job
from tests.e2e.harness import PATIENCE, SILENCE, Harness

EXAMPLES = Path(__file__).parents[2] / "examples"
# Goes before a script. Notes each process, and has it wait after eight steps until the file `go` is there: a fast
# machine is through all steps before a test has seen one of them.
BEFORE = """
import os, time
from torch.optim.optimizer import register_optimizer_step_post_hook
with open({begun!r}, "a") as begun:
    print(os.getpid(), file=begun)
taken = []
def wait_after_eight(optimizer, args, kwargs):
    taken.append(1)
    while len(taken) == 8 and not os.path.exists({go!r}):
        time.sleep(0.01)
register_optimizer_step_post_hook(wait_after_eight)
"""


@pytest.mark.parametrize(
    ("example", "args", "steps", "model"),
    [
        ("trainer", ("--epochs=2", "--samples=2000"), 64, "model.safetensors"),
        ("lightning", ("--epochs=3", "--samples=2048"), 96, "model.pt"),
    ],
)
def test_a_trainer_goes_on_where_it_was(
    cluster: Harness, tmp_path: Path, example: str, args: tuple[str, ...], steps: int, model: str
) -> None:
    """A node goes without notice. The other one keeps its process, and the model ends the same, bit for bit."""
    code, begun, go = tmp_path / "code", tmp_path / "begun", tmp_path / "go"
    shutil.copytree(EXAMPLES / example, code, ignore=shutil.ignore_patterns("checkpoints", "model"))
    before = BEFORE.format(begun=str(begun), go=str(go))
    (code / "train.py").write_text(before + (EXAMPLES / example / "train.py").read_text())
    job = load_job(code / "job.yaml")
    job = job.model_copy(update={"args": args, "snapshot_interval": 2, "heartbeat_timeout": SILENCE})
    name = cluster.start(job, code)
    cluster.until_step(4)
    cluster.fault("kill", cluster.members()[0])
    go.touch()
    final = cluster.until_ended()
    assert len(begun.read_text().split()) == 3, "two workers, and the one that took the place of the lost one"
    assert (final["phase"], final["restarts"], final["step"]) == ("succeeded", 0, steps)
    (interruption,) = final["interruptions"]
    assert interruption["kind"] == "kill"
    assert interruption["steps_lost"] <= 4  # as many as are between two snapshots, and those under way
    (kept,) = (key for key in cluster.access.store.list(f"jobs/{name}/kept/") if model in key)
    undisturbed = tmp_path / "model"
    command = [sys.executable, *STANDALONE, "--nproc-per-node=2", "train.py", *args, f"--out={undisturbed}"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run(
        command, check=True, cwd=EXAMPLES / example, env=environment, timeout=PATIENCE, stdout=subprocess.DEVNULL
    )
    assert cluster.access.store.get(kept) == (undisturbed / model).read_bytes()
