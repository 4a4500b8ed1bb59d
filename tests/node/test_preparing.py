"""Preparations that hang or fail: what ends, what is reported, and what is only tried again."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from spotrun.errors import CorruptError, HungError, InstallError, RequirementsError, SetupError, StoreError
from spotrun.node import preparing
from spotrun.node.packages import install
from tests.fakes.launchers import alive
from tests.fakes.node import Machine, order_of, wheel, world
from tests.helpers import await_for

A = "node-a"

BACKEND = """
import os, subprocess, time
child = subprocess.Popen(["sleep", "600"], start_new_session=True)
with open({pids!r}, "w") as file:
    print(os.getpid(), child.pid, file=file)
def build_wheel(*_, **__): ...
def get_requires_for_build_wheel(*_): return []
time.sleep(600)
"""

HANGING = """
import subprocess, time
def wait_for_a_server():
    child = subprocess.Popen(["sleep", "600"], start_new_session=True)
    with open({pids!r}, "w") as file:
        print(child.pid, file=file)
    time.sleep(600)
wait_for_a_server()
"""


async def test_a_pip_that_hangs_ends_with_all_that_it_has_started(tmp_path: Path) -> None:
    package, pids = tmp_path / "slow", tmp_path / "pids"
    package.mkdir()
    (package / "backend.py").write_text(BACKEND.format(pids=str(pids)))
    (package / "pyproject.toml").write_text(
        '[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n'
    )
    installing = asyncio.create_task(
        install((f"slow @ file://{package}",), tmp_path / "packages", dict(os.environ), limit=8.0)
    )
    started = await await_for(lambda: pids.read_text().split() if pids.exists() else None, 40, "a build")
    with pytest.raises(HungError, match="pip has not ended after 8 s: killed"):
        await installing
    await await_for(lambda: not any(alive(int(pid)) for pid in started), what="the end of the build")


@pytest.mark.parametrize(
    ("requirement", "more", "error"),
    [
        pytest.param("spotrun-no-such-package", {"PIP_NO_INDEX": "1"}, SetupError, id="no version at all"),
        pytest.param("tiny-package==7", {"PIP_NO_INDEX": "1"}, RequirementsError, id="no such version"),
        pytest.param("spotrun-no-such-package", {"PIP_RETRIES": "1"}, SetupError, id="the index does not answer"),
        pytest.param("tiny-package @ file:///nowhere/tiny_package-1-py3-none-any.whl", {}, InstallError, id="no file"),
    ],
)
async def test_only_wrong_requirements_count_as_wrong(
    requirement: str, more: dict[str, str], error: type[SetupError], tmp_path: Path
) -> None:
    own = {name: value for name, value in os.environ.items() if not name.startswith("PIP_")}
    wheel(tmp_path)
    more = {**more, "PIP_FIND_LINKS": str(tmp_path)}
    env = {**own, "PIP_CONFIG_FILE": os.devnull, "PIP_INDEX_URL": "http://127.0.0.1:9/simple", **more}
    with pytest.raises(SetupError, match="pip failed") as found:
        await install((requirement,), tmp_path / "packages", env, limit=60.0)
    assert found.type is error


@pytest.mark.parametrize(
    ("error", "passes", "repeats"),
    [
        (InstallError("a build failed"), True, False),
        (StoreError("x"), True, False),
        (OSError(28, "No space left on device"), True, False),
        (SetupError("pip failed: connection reset"), True, False),
        (RequirementsError("no such package"), False, True),
        (CorruptError("damaged"), False, True),
        (HungError("pip has not ended"), False, False),
        (KeyError("x"), False, False),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else "",
)
def test_which_errors_may_pass_and_which_repeat(error: Exception, passes: bool, repeats: bool) -> None:
    assert (preparing.may_pass(error, took=1.0), preparing.repeats(error)) == (passes, repeats)
    build = isinstance(error, InstallError)
    assert preparing.may_pass(error, took=1200.0) == (passes and not build), "a long build is not tried three times"


async def test_an_import_that_hangs_is_ended_and_named(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    files = {"train.py": "import hanging\n"}
    (tmp_path / "modules").mkdir()
    (tmp_path / "modules" / "hanging.py").write_text(HANGING.format(pids=str(pids)))
    environment = {"PYTHONPATH": f"{tmp_path / 'modules'}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    async with world(tmp_path) as w:
        machine = Machine(A, "127.0.9.2", tmp_path, w.url, environment)
        machine.before = "from spotrun.node import preparing; preparing.IMPORT_LIMIT = 0.0"
        w.machines.append(machine)
        await machine.start()
        await w.ready(w.bundle(), [A])  # torch is imported
        bundle = w.bundle(files=files, start_timeout=3)
        await w.head.order(A, order_of(bundle))
        report = await w.head.wait(A, lambda r: r.job == bundle.id and r.failure, "a failure")
        assert report.failure is not None
        assert (report.phase, report.failure.kind, report.failure.repeats) == ("failed", "setup", False)
        message = report.failure.message
        assert message.startswith("importing the script's modules has not ended after 3 s: killed; it was in ")
        hanging = tmp_path / "modules" / "hanging.py"
        assert f"{hanging}:7 (wait_for_a_server), called from {hanging}:8 (<module>)" in message
        await await_for(lambda: not alive(int(pids.read_text())), what="the end of what the import had started")
        # Nothing is wrong with the node.
        await w.ready(w.bundle(), [A])


async def test_an_error_that_passes_is_not_reported(tmp_path: Path) -> None:
    async with world(tmp_path, A) as w:
        machine = w.machines[0]
        folder = tmp_path / "index"
        bundle = w.bundle(requirements=[f"tiny-package @ file://{folder}/tiny_package-1-py3-none-any.whl"])
        await w.head.order(A, order_of(bundle))
        await await_for(lambda: "is not ready, trying again: requirements" in machine.log, 60, "a try that failed")
        folder.mkdir()
        wheel(folder)
        ready = await w.head.wait(A, lambda r: r.store or r.failure, "ready")
        assert ready.failure is None


async def test_a_wrong_requirement_is_reported_at_once_and_as_one_that_repeats(tmp_path: Path) -> None:
    wheel(tmp_path)
    environment = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(tmp_path)}
    async with world(tmp_path, A, environment=environment) as w:
        bundle = w.bundle(requirements=["tiny-package==7"])
        await w.head.order(A, order_of(bundle))
        report = await w.head.wait(A, lambda r: r.failure, "a failure")
        assert report.failure is not None
        assert report.failure.repeats
        assert "No matching distribution found for tiny-package==7" in report.failure.message
        assert "trying again" not in w.machines[0].log
