"""A run from its submission to its removal, with the operator's commands as processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from spotrun.store import provenance_key
from tests.e2e.conftest import SPEC
from tests.e2e.harness import PATIENCE, Harness
from tests.helpers import wait_for

ROOT = Path(__file__).parents[2]
SCRIPT = """
import time, sys, os
from pathlib import Path
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
import spotrun

run = spotrun.init(seed=1)
model = run.ddp(nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=float(sys.argv[1]))
data = TensorDataset(torch.ones(64, 4))
sampler = spotrun.ElasticSampler(data, seed=3)
run.track(model=model, optimizer=optimizer, sampler=sampler)
for epoch in run.epochs(2):
    for (x,) in run.steps(DataLoader(data, batch_size=4, sampler=sampler)):
        loss = model(x).square().mean()
        run.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        run.log(loss=loss)
        print(f"rank {run.rank} of {os.environ.get('WANDB_RUN_ID')} step {run.step}", flush=True)
        while run.step == 5 and not Path(sys.argv[2]).exists():
            time.sleep(0.02)
"""


class Commands:
    """The operator's commands, for the cluster of the tests."""

    def __init__(self, folder: Path) -> None:
        self.file = folder / "cluster.yaml"
        self.file.write_text(yaml.safe_dump(SPEC))

    @contextmanager
    def start(self, *words: str) -> Iterator[subprocess.Popen[str]]:
        """A command that runs. At the end, it is killed if it has not ended."""
        command = [sys.executable, "-m", "fabric", words[0], "--cluster", str(self.file), *words[1:]]
        pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        environment = {**os.environ, "COLUMNS": "120"}
        with subprocess.Popen(command, cwd=ROOT, env=environment, text=True, **pipes) as process:
            try:
                yield process
            finally:
                process.kill()

    def ask(self, *words: str) -> Any:
        """The JSON that a command prints."""
        with self.start(*words, "--json") as process:
            out, error = process.communicate(timeout=PATIENCE)
        assert process.returncode == 0, error
        return json.loads(out)


@pytest.fixture
def job_file(tmp_path: Path) -> Path:
    """A job in a repository, changed since its commit."""
    folder = tmp_path / "job"
    folder.mkdir()
    (folder / "train.py").write_text(SCRIPT)
    job = {"name": "small", "script": "train.py", "args": ["0.1", str(tmp_path / "go")], "nodes": 2}
    (folder / "job.yaml").write_text(yaml.safe_dump({**job, "env": {"WANDB_MODE": "offline"}}))
    who = ("-c", "user.name=Ann", "-c", "user.email=ann@example.com")
    for words in (("init", "-q"), ("add", "-A"), (*who, "commit", "-qm", "First")):
        subprocess.run(["git", "-C", str(folder), *words], check=True)
    (folder / "train.py").write_text(SCRIPT + "# changed\n")
    return folder / "job.yaml"


def test_a_run_from_its_submission_to_its_removal(cluster: Harness, tmp_path: Path, job_file: Path) -> None:
    commands = Commands(tmp_path)
    with commands.start("train", "--job", str(job_file), "--faults", "none", "--json") as train:
        wait_for(lambda: (job := cluster.status()["job"]) and job["name"] == "small" and job["step"] >= 5, 60)
        (row,) = [each for each in commands.ask("runs") if each["phase"] == "running"]
        follow = ("--rank", "all", "--follow", "--grep", "step [0-9]*5$")
        with commands.start("logs", "--id", row["id"], *follow) as live:
            lines = _lines(live)
            (tmp_path / "go").touch()
            final = _final(train)
            assert live.wait(PATIENCE) == 0
            seen = lines()
    assert (final["id"], final["phase"]) == (row["id"], "succeeded")
    assert {(line.split(" | ")[0].split()[-1], line.split()[-1]) for line in seen} == {
        (rank, step) for rank in "01" for step in ("5", "15")
    }
    assert all(f"of {row['id']} step" in line for line in seen), "one run in other programs, too"
    _check_show(commands, row["id"])
    again = commands.ask("rerun", "--id", row["id"])
    assert again["differs"] == []
    cluster.watch(again["job"])
    assert cluster.until_ended()["phase"] == "succeeded"
    found = commands.ask("diff", "--first", row["id"], "--second", again["job"])
    assert (found["code"], found["job"], found["packages"]) == ([], {}, {})
    assert "metric loss" not in found["results"], "the same code and seeds give the same"
    commands.ask("tag", "--id", row["id"], "--tag", "first")
    assert [each["id"] for each in commands.ask("runs", "--where", "tag=first")] == [row["id"]]
    exported = commands.ask("export", "--id", row["id"], "--to", "csv", "--out", str(tmp_path / "csv"))
    assert exported["points"] == 16
    commands.ask("rm", "--id", row["id"], "--force")
    assert cluster.access.store.list(f"jobs/{row['id']}") == []
    assert [each["id"] for each in commands.ask("runs", "--where", "name=small")] == [again["job"]]


def test_each_generation_keeps_its_logs_and_the_id_for_trackers(
    cluster: Harness, tmp_path: Path, job_file: Path
) -> None:
    """A node is killed: its log stays, and the workers of the next generation have the same WANDB_RUN_ID."""
    commands = Commands(tmp_path)
    with commands.start("train", "--job", str(job_file), "--faults", "none", "--json") as train:
        # Not the job of an earlier test, which has ended.
        wait_for(lambda: (job := cluster.status()["job"]) and job["phase"] == "running" and job["step"] >= 5, 60)
        id, (_, victim) = (job := cluster.status()["job"])["id"], job["members"]
        wait_for(lambda: "step 5\n" in _logged(commands, id, "1", "1"), 60, "the log of rank 1 in the bucket")
        cluster.fault("kill", victim)
        (tmp_path / "go").touch()
        final = _final(train)
    assert len(final["interruptions"]) == 1
    assert "step 5\n" in _logged(commands, id, "1", "1"), "the log of a node that is gone"
    last = _logged(commands, id, str(final["generation"]), "all")
    ends = [line for line in last.splitlines() if line.endswith("step 15")]
    assert {line.partition(" of ")[0].split("rank ")[-1] for line in ends} == {"0", "1"}
    assert all(f"of {id} step" in line for line in last.splitlines() if "step " in line)


def _final(train: subprocess.Popen[str]) -> dict[str, Any]:
    """The job's part of the last document that `make train` prints."""
    out, error = train.communicate(timeout=PATIENCE)
    assert train.returncode == 0, error
    found: dict[str, Any] = json.loads(out.splitlines()[-1])["job"]
    return found


def _logged(commands: Commands, job: str, generation: str, rank: str) -> str:
    """What `make logs` prints of a generation."""
    with commands.start("logs", "--id", job, "--gen", generation, "--rank", rank) as process:
        return process.communicate(timeout=PATIENCE)[0]


def _check_show(commands: Commands, job: str) -> None:
    found = commands.ask("show", "--id", job)
    origin = found["provenance"]
    assert origin["git"]["diff"].endswith("+# changed\n")
    assert origin["email"] in ("", "ann@example.com") or "@" in origin["email"]
    assert origin["cluster_file"] == commands.file.read_text()
    (generation,) = found["generation_members"]
    assert (generation["base"], len(generation["members"])) == (0, 2)
    assert {each["node"] for each in found["nodes"]} == set(generation["members"])
    assert all(each["packages"]["torch"] for each in found["nodes"])
    assert found["metrics"]["loss"] is not None
    assert found["id"] == job
    assert provenance_key(job).rpartition("/")[2] in found["objects"]


def _lines(process: subprocess.Popen[str]) -> Any:
    """Reads a process's output in a thread; a function that returns the lines."""
    found: list[str] = []
    assert process.stdout is not None
    out = process.stdout
    reader = threading.Thread(target=lambda: found.extend(out), daemon=True)
    reader.start()

    def lines() -> list[str]:
        reader.join(PATIENCE)
        return [line.strip() for line in found]

    return lines
