"""The whole way on AWS's and Google's own APIs: up, train, a preemption, the ways in, down. See `sites`."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e import sites
from tests.e2e.sites import Operator, Site
from tests.helpers import wait_for
from tests.infra import terraform

pytestmark = pytest.mark.clouds


@pytest.fixture(params=["aws", "gcp"])
def site(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Site]:
    if request.param == "gcp":
        with sites.gcp(tmp_path) as found:
            yield found
        return
    with sites.aws(tmp_path, terraform.require()) as amazon:
        yield amazon


def slower(folder: Path, go: Path) -> Path:
    """The sample job with fewer steps of 0.1 s. From the middle on, each takes 1 s until the file `go` is there.

    So the job does not end before an operator has looked at it.
    """
    shutil.copytree(sites.ROOT / "examples/digits", folder)
    file, script = folder / "job.yaml", folder / "train.py"
    file.write_text(replaced(file.read_text(), "--epochs=45", "--epochs=20"))
    text = replaced(script.read_text(), "import argparse\n", "import argparse\nimport os\nimport time\n")
    step = "        optimizer.zero_grad()\n"
    pause = f"        time.sleep(0.1 if run.step < 300 or os.path.exists({str(go)!r}) else 1.0)\n"
    script.write_text(replaced(text, step, step + pause))
    return file


def replaced(text: str, old: str, new: str) -> str:
    assert text.count(old) == 1
    return text.replace(old, new)


def test_the_whole_way(site: Site, tmp_path: Path) -> None:
    """Three spot machines train; one is preempted by the cloud's own means; nothing is lost; nothing is left."""
    operator = Operator(site)
    up = operator.fab("up")
    assert up.returncode == 0, up.stdout + up.stderr
    assert site.size("spot") == 0, "machines come with a job"

    go = tmp_path / "go"
    job = slower(tmp_path / "digits", go)
    training = operator.started("train", "--job", str(job), "--faults", "preempt@25%")
    try:
        wait_for(lambda: site.size("spot") >= 3, 180, "the pool's new size")
        wait_for(lambda: operator.phase() == "running", 300, "the job's first steps")
        first = json.loads(operator.fab("status", "--json").stdout)["job"]["members"][0]  # the last one is preempted
        hello = operator.fab("run", "--cmd", "echo I am $((40 + 2))", "--node", first)
        assert "I am 42" in hello.stdout, hello.stdout + hello.stderr
        refused = operator.fab("down")
        assert refused.returncode == 2, refused.stdout
        assert re.search(r"not ended yet: digits-[0-9-]+; `make stop CLUSTER=", refused.stderr)
        go.touch()
        said, _ = training.communicate(timeout=1200)
    finally:
        training.kill()
        training.wait()
    assert training.returncode == 0, said
    preempt = next((line.split() for line in said.splitlines() if line.split()[:1] == ["preempt"]), None)
    assert preempt is not None, said
    assert preempt[-1] == "0", f"no step is lost with notice\n{said}"
    accuracy = next(line for line in said.splitlines() if line.startswith("test accuracy"))
    assert float(accuracy.split()[2]) > 97

    logs = operator.fab("logs")
    assert "test accuracy" in logs.stdout, logs.stderr

    kept = [key for key in site.store().list("jobs") if key.endswith("manifest.json")]
    assert kept, "checkpoints are in the bucket"
    wait_for(lambda: site.size("spot") == 0, 180, "the pools' scaling down")

    down = operator.fab("down")
    assert down.returncode == 0, down.stdout + down.stderr
    assert site.left() == []
    everything = operator.fab("down", "--all")
    assert everything.returncode == 2, everything.stdout
    assert "holds checkpoints of digits-" in everything.stderr
    assert site.store().exists(kept[0])
    assert operator.fab("status").returncode == 3, "it is not up"
