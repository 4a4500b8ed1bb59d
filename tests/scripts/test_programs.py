"""Terraform at a terminal: what interrupts it, and what must not kill it while it makes things that cost money."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.stacks import Stacks
from spotrun.errors import CloudError
from tests.helpers import wait_for
from tests.infra import terraform
from tests.infra.terraform import Tools

ROOT = Path(__file__).parents[2]
# The second thing takes as long as the file `going` is there. Terraform itself has this provider.
STACK = {
    "resource": {
        "terraform_data": {
            "first": {},
            "second": {
                "depends_on": ["terraform_data.first"],
                "provisioner": {
                    "local-exec": {"command": "touch started; while [ -e going ]; do echo busy; sleep 0.1; done"}
                },
            },
        }
    }
}
APPLY = (
    "import sys; from pathlib import Path; from scripts.stacks import Stacks; Stacks('c', Path(sys.argv[1])).apply()"
)
pytestmark = pytest.mark.skipif(shutil.which("terraform") is None, reason="no terraform on this machine")


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """The folder of stack base."""
    for name, stack in (("c-base", STACK), ("c-pools", {})):
        (tmp_path / "stacks" / name).mkdir(parents=True)
        (tmp_path / "stacks" / name / "cdk.tf.json").write_text(json.dumps(stack))
    (tmp_path / "stacks/c-base/going").touch()
    return tmp_path / "stacks/c-base"


def apply(base: Path, stderr: int) -> subprocess.Popen[bytes]:
    """`make up`, as far as Terraform is concerned. Returns once Terraform makes the second thing."""
    process = subprocess.Popen(
        [sys.executable, "-c", APPLY, str(base.parents[1])],
        cwd=ROOT,
        stderr=stderr,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    wait_for((base / "started").exists, what="Terraform's work")
    return process


def known(base: Path) -> list[str]:
    """What Terraform has saved."""
    state = json.loads((base / "terraform.tfstate").read_text())
    return [resource["name"] for resource in state["resources"]]


def locked(base: Path) -> bool:
    """Whether Terraform was killed, or works still."""
    return (base / ".terraform.tfstate.lock.info").exists()


def test_ctrl_c_that_also_ends_the_reader_of_the_output(base: Path) -> None:
    """`make up 2>&1 | tee log`: Ctrl-C ends tee at once, and a write into the pipe would kill Terraform."""
    reader, writer = os.pipe()
    with apply(base, writer) as process:
        os.close(writer)
        os.close(reader)
        os.killpg(process.pid, signal.SIGINT)
        (base / "going").unlink()
        assert process.wait(60) != 0
    assert not locked(base)
    assert "first" in known(base)


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGTERM], ids=["a lost terminal", "a cancelled CI job"])
def test_other_ends_let_terraform_save(number: signal.Signals, base: Path) -> None:
    with apply(base, subprocess.PIPE) as process:
        os.killpg(process.pid, number)
        os.killpg(process.pid, number)
        _, said = process.communicate(timeout=60)
    assert b"Terraform stops and saves what it knows" in said
    assert not locked(base)
    assert "first" in known(base)


def test_a_ctrl_c_after_another_signal_kills(tmp_path: Path) -> None:
    """A program that does not stop. A person need not press Ctrl-C twice, as they were told."""
    code = "import os, sys; from pathlib import Path; from scripts import programs; programs.run("
    code += """["sh", "-c", "trap '' INT; touch started; exec sleep 600"], Path(sys.argv[1]), os.environ, "stopping")"""
    with subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)],
        cwd=ROOT,
        stderr=subprocess.PIPE,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    ) as process:
        assert process.stderr is not None
        try:
            wait_for((tmp_path / "started").exists, what="the program's start")
            process.send_signal(signal.SIGTERM)
            assert process.stderr.readline() == b"stopping\n"
            process.send_signal(signal.SIGINT)
            assert process.wait(60) != 0
        finally:
            process.kill()


def test_two_people_at_once(base: Path) -> None:
    """The second one learns what to wait for, and what to do if the first one is gone for ever."""
    with apply(base, subprocess.DEVNULL) as first:
        unlock = rf"remove the lock: `terraform -chdir={base} force-unlock [0-9a-f-]{{36}}`"
        with pytest.raises(CloudError, match=rf"another Terraform works on stack c-base, .*{unlock}"):
            Stacks("c", base.parents[1]).apply()
        (base / "going").unlink()
        assert first.wait(60) == 0


def test_a_registry_that_does_not_answer_stops_nobody(
    tmp_path: Path, base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Machines cost money until they are taken down, and all that this needs is installed."""
    tools = terraform.require()
    needs = {"aws": {"source": "hashicorp/aws", "version": tools.version}}
    (base / "cdk.tf.json").write_text(json.dumps({"terraform": {"required_providers": needs}}))
    monkeypatch.setenv("TF_CLI_CONFIG_FILE", str(terraform.configure(tmp_path, tools)))
    assert not Stacks("c", tmp_path).exists("base")
    (tmp_path / "nothing").mkdir()
    gone = Tools(tools.terraform, tmp_path / "nothing", tools.version)
    monkeypatch.setenv("TF_CLI_CONFIG_FILE", str(terraform.configure(tmp_path, gone)))
    assert not Stacks("c", tmp_path).exists("base")
