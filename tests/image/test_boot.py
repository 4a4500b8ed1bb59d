"""A whole cluster of machines that were started from an image, under its own systemd: up, train, a preemption, down.

The head and the nodes run in the sandboxes of their units; operators come in as Google's OS Login lets them (its own
modules, in the image); a notice presses the power button, as Google's does. See `containers`.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from spotrun.machine.processes import OOM_SCORE
from tests.e2e import sites
from tests.e2e.sites import Operator, Site
from tests.helpers import wait_for
from tests.image import containers
from tests.image.conftest import Image
from tests.infra import terraform

EXAMPLE = Path(__file__).parents[2] / "examples" / "digits"
NOTICE = 30.0  # seconds, as Google's
ROLES = {"head": "spotrun-head.service", "node": "spotrun-agent.service"}


@pytest.fixture
def site(image: Image, tmp_path: Path) -> Iterator[Site]:
    lacking = containers.missing()
    if lacking:
        pytest.skip(f"an image cannot be booted here without: {', '.join(lacking)}")
    program = ("tests.image.containers", str(image.root.folder))
    if image.cloud == "gcp":
        with sites.gcp(tmp_path, NOTICE, program) as google:
            yield google
        return
    with sites.aws(tmp_path, terraform.require(), NOTICE, program) as amazon:
        yield amazon


def test_machines_boot_and_train(site: Site, image: Image, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    operator = Operator(site)
    up = operator.fab("up")
    assert up.returncode == 0, up.stdout + up.stderr
    training = operator.started("train", "--job", str(job(tmp_path)), "--faults", "none")
    try:
        wait_for(lambda: operator.phase() == "running", 240, "the job's first steps")
        status = json.loads(operator.fab("status", "--json").stdout)
        node = status["job"]["members"][0]
        head = next(name for name in consoles(tmp_path) if name not in status["job"]["members"])
        # At once: on a busy machine, training may be over before the operator has looked around.
        assert as_worker(node) == {"NoNewPrivs": "1", "Seccomp": "2", "CapEff": "0" * 16, "CapBnd": "0" * 16}
        check(operator, "node", node)
        took = {"node": seconds_to_serve(operator, "node", node)}
        taken = operator.fab("preempt", "--node", node)  # not before: the operator has looked at this node
        assert taken.returncode == 0, taken.stdout + taken.stderr
        check(operator, "head", head)
        took["head"] = seconds_to_serve(operator, "head", head)
        with capsys.disabled():
            for role, seconds in took.items():
                print(f"\n{image.cloud}: {role}: ready after {seconds:.1f} s")
        said, _ = training.communicate(timeout=900)
    finally:
        training.kill()
        training.wait()
    assert training.returncode == 0, said
    preempt = next((line.split() for line in said.splitlines() if line.split()[:1] == ["preempt"]), None)
    assert preempt is not None, f"the notice was seen, and the power button did not end the agent\n{said}"
    assert preempt[-1] == "0", f"no step is lost with notice\n{said}"
    gone = consoles(tmp_path)[preempt[1]]
    assert ("the agent has 19 s to drain" in gone) == (image.cloud == "gcp"), gone[-3000:]

    # A head that hangs is started again: it gives systemd no sign of life.
    (pid,) = processes(head, ROLES["head"])
    os.kill(pid, signal.SIGSTOP)
    wait_for(lambda: processes(head, ROLES["head"]) not in ([pid], []), 90, "another head")
    wait_for(lambda: operator.fab("status").returncode == 0, 60, "its answer")

    down = operator.fab("down")
    assert down.returncode == 0, down.stdout + down.stderr


def job(folder: Path) -> Path:
    """The example, made short, but not so short that it ends while the operator looks around.

    Its packages are in the image, and no registry can be reached from these machines.
    """
    shutil.copytree(EXAMPLE, folder / "digits")
    file = folder / "digits" / "job.yaml"
    text = file.read_text()
    assert "--epochs=45" in text
    assert "requirements: [scikit-learn" in text
    file.write_text(text.replace("--epochs=45", "--epochs=30"))
    return file


def check(operator: Operator, role: str, machine: str) -> None:
    """What an operator sees who logs in: all units that were to start have started, and those of the other role not."""
    other = ROLES["node" if role == "head" else "head"]
    where = ("--node", "head" if role == "head" else machine)
    ask = f"systemctl --failed --plain --no-legend; systemctl is-active {ROLES[role]} {other}; id -nG; hostname;"
    ask += f"journalctl --quiet --unit {ROLES[role]} --grep 'listens on|connected to the head'"
    done = operator.fab("run", "--cmd", ask, *where)
    words = done.stdout.split()
    assert "failed" not in words, done.stdout
    assert "active" in words, done.stdout + done.stderr
    assert "inactive" in words, done.stdout
    assert machine in done.stdout
    assert "spotrun-operators" in words
    assert "listens on" in done.stdout or "connected to the head" in done.stdout, (
        f"the journal can be read\n{done.stdout}"
    )
    refused = operator.fab("run", "--cmd", "sudo -n true", *where)
    assert re.search("a password is required|not allowed", refused.stdout + refused.stderr)


def seconds_to_serve(operator: Operator, role: str, machine: str) -> float:
    """From the start of a machine's systemd until its service has said that it is ready."""
    ask = "systemctl show --value --property=UserspaceTimestampMonotonic;"
    ask += f"systemctl show --value --property=ActiveEnterTimestampMonotonic {ROLES[role]}"
    done = operator.fab("run", "--cmd", ask, "--node", "head" if role == "head" else machine)
    began, ready = (int(found) for found in re.findall(r": (\d+)$", done.stdout, re.MULTILINE))
    return (ready - began) / 1e6


def as_worker(machine: str) -> dict[str, str]:
    """What the kernel lets a job's processes do. They alone are offered to it when memory runs out."""

    def offered() -> list[int]:
        found = []
        for pid in processes(machine, ROLES["node"]):
            with contextlib.suppress(OSError):  # the process has ended
                if Path(f"/proc/{pid}/oom_score_adj").read_text().strip() == OOM_SCORE:
                    found.append(pid)
        return found

    worker = max(wait_for(offered, what=f"a worker on {machine}"))
    status = Path(f"/proc/{worker}/status").read_text()
    fields = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
    return {name: fields[name] for name in ("NoNewPrivs", "Seccomp", "CapEff", "CapBnd")}


def processes(machine: str, unit: str) -> list[int]:
    """Those of a unit of a machine, as this computer knows them."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cgroup"):
        try:
            text = path.read_text()
        except OSError:
            continue
        if re.search(rf"-{machine}/payload/system\.slice/{re.escape(unit)}$", text, re.MULTILINE):
            found.append(int(path.parent.name))
    return sorted(found)


def consoles(folder: Path) -> dict[str, str]:
    """What each machine has printed on its console, by its name."""
    logs = (folder / "mirror").rglob("console.log")
    return {path.parent.name: path.read_text(errors="replace") for path in logs}
