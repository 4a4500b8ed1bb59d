"""The operator's commands as a person runs them: `fab …` in a shell, on a cluster of their own."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.helpers import wait_for

ROOT = Path(__file__).parents[2]
Fab = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def fab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fab]:
    """Run a Fabric task; the cluster is down afterwards, and nothing of it is left."""
    home = tmp_path_factory.mktemp("home")

    def run(*words: str, timeout: float = 300) -> subprocess.CompletedProcess[str]:
        program = Path(sys.executable).with_name("fab")
        environment = {**os.environ, "SPOTRUN_HOME": str(home)}
        return subprocess.run(
            [str(program), *words], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=timeout
        )

    up = run("up")
    assert up.returncode == 0, up.stderr
    yield run
    down = run("down", "--force")
    assert down.returncode == 0, down.stderr
    left = subprocess.run(["pgrep", "-f", str(home)], capture_output=True, text=True).stdout
    assert left == ""


def test_the_main_job(fab: Fab, tmp_path: Path) -> None:
    """Three nodes; one taken with notice, one without; over 97 %; the report has each interruption."""
    folder = shutil.copytree(ROOT / "examples/digits", tmp_path / "digits")
    job = (folder / "job.yaml").read_text()
    assert "--epochs=45" in job
    (folder / "job.yaml").write_text(job.replace("--epochs=45", "--epochs=25"))
    done = fab("train", "--job", str(folder / "job.yaml"), "--faults", "preempt@10%,kill@50%")
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    accuracy = next(line for line in reversed(lines) if line.startswith("test accuracy"))
    assert float(accuracy.split()[2]) > 97
    report = [line.split() for line in lines[lines.index(accuracy) :]]
    rows = {kind: words for words in report if words for kind in words[0].split("+")}  # a kill may come during a growth
    preempt, kill = rows["preempt"], rows["kill"]
    assert preempt[-1] == "0", "no step is lost with notice"
    assert 0 <= float(preempt[-2]) < 60, "seconds of the pause, which may round to 0"
    assert int(kill[-1]) >= 0
    assert any(words[:1] == ["goodput"] for words in report)
    logs = fab("logs")
    assert logs.returncode == 0, logs.stderr
    assert "test accuracy" in logs.stdout


def test_a_job_that_fails(fab: Fab, tmp_path: Path) -> None:
    """Exit status 1, and the traceback of the user's own code; `--json` is one document a line."""
    (tmp_path / "train.py").write_text("import spotrun\nspotrun.init()\nraise RuntimeError('not today')\n")
    (tmp_path / "job.yaml").write_text("script: train.py\nmax_restarts: 1\n")
    done = fab("train", "--job", str(tmp_path / "job.yaml"), "--json")
    assert done.returncode == 1, done.stdout + done.stderr
    last = json.loads(done.stdout.splitlines()[-1])
    assert last["job"]["phase"] == "failed"
    assert "RuntimeError: not today" in last["job"]["failure"]["traceback"]


def test_the_node_of_a_job_that_fails_is_kept(fab: Fab, tmp_path: Path) -> None:
    """The script's end is known at once. A person runs it again there, as the worker did, and lets the node go."""
    (tmp_path / "helper.py").write_text("def why():\n    import os\n    return os.environ['TONE']\n")
    (tmp_path / "train.py").write_text(
        "import sys, spotrun, helper\nrun = spotrun.init()\nraise RuntimeError(f'{helper.why()} {sys.argv[1:]}')\n"
    )
    (tmp_path / "job.yaml").write_text(
        "script: train.py\nname: kept\nargs: [--lr, '1 2']\nenv: {TONE: \"it's $HOME\"}\nnodes: 2\nmax_restarts: 1\n"
        "keep_on_failure: 30m\n"
    )
    error = "RuntimeError: it's $HOME ['--lr', '1 2']"
    done = fab("train", "--job", str(tmp_path / "job.yaml"))
    assert done.returncode == 1, done.stdout + done.stderr
    told = [line.strip() for line in done.stdout.splitlines()]
    assert error in told
    job = next(line.split()[1] for line in told if line.startswith("job kept-") and "submitted" in line)
    found = json.loads(fab("status", "--id", job, "--json").stdout)["job"]["kept"]
    node = found["node"]
    assert any(line.startswith(f"node {node} is kept until ") and " UTC" in line for line in told)
    for wanted in (f"make ssh NODE={node}", found["run"], found["logs"], f"make stop ID={job}"):
        assert any(line.endswith(wanted) for line in told), (wanted, told)
    assert f"keeps {node} until" in " ".join(fab("jobs").stdout.split())

    again = fab("run", "--node", node, "--cmd", found["run"])
    assert again.returncode == 1, again.stdout + again.stderr
    assert error in again.stdout
    looked = fab("run", "--node", node, "--cmd", f"cat {found['logs']}/*.log; stat -c %a {found['env']}")
    assert error in looked.stdout
    assert looked.stdout.splitlines()[-1] == f"{node}: 600"

    down = fab("down")
    assert down.returncode == 2
    assert f"{job} has failed and keeps node {node} for SSH; `make stop ID={job}` lets it go" in down.stderr
    stopped = fab("stop", "--id", job)
    assert stopped.returncode == 0, stopped.stderr
    assert f"job {job} lets node {node} go" in stopped.stdout

    def empty() -> bool:
        status = json.loads(fab("status", "--json").stdout)
        return not status["nodes"] and all(pool["target"] == 0 for pool in status["pools"])

    wait_for(empty, what="all machines to go", timeout=240)


def test_mistakes_are_one_line(fab: Fab, tmp_path: Path) -> None:
    """Exit status 2; where, what, what is allowed."""
    (tmp_path / "job.yaml").write_text("scirpt: train.py\n")
    for words, said in (
        (("train", "--job", str(tmp_path / "job.yaml")), "scirpt"),
        (("train", "--job", "nowhere.yaml"), "nowhere.yaml"),
        (("status", "--cluster", "nowhere.yaml"), "nowhere.yaml"),
        (("kill", "--node", "nobody"), "nobody"),
        (("relaunch", "--id", "no-such-job"), "no-such-job"),
    ):
        done = fab(*words)
        assert done.returncode == 2, (words, done.stdout, done.stderr)
        assert said in done.stderr
        assert "Traceback" not in done.stderr + done.stdout


def test_a_command_on_the_head(fab: Fab) -> None:
    done = fab("run", "--cmd", "echo $((6*7)); spotrun ctl jobs", "--node", "head")
    assert done.returncode == 0, done.stderr
    assert "42" in done.stdout
    failing = fab("run", "--cmd", "exit 3", "--node", "head")
    assert failing.returncode == 1
    killed = fab("run", "--cmd", "kill -9 $$", "--node", "head")  # OpenSSH has no exit status for a signal
    assert killed.returncode == 1
    assert "137" in killed.stdout + killed.stderr
