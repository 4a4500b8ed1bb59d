"""Which tests run, and how many at a time.

Tests marked `gpu` run only under `--gpu`: other runs hide the GPUs. Under `--gpu`, a machine without one is an error.
"""

from __future__ import annotations

import gc
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from multiprocessing import util
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings

if TYPE_CHECKING:
    from playwright.sync_api import Browser

SHARED = "TESTS_SHARED"  # the variable: a folder for all workers of this run
# What `make test-fast` leaves out: whole clusters, torch, machines, and many or large programs.
SLOW = (
    "bench/test_dashboard.py",
    "bench/test_snapshots.py",
    "bench/test_startup.py",
    "bench/test_synth.py",
    "cloud/test_local_cloud.py",
    "cloud/test_local_ends.py",
    "cloud/test_local_faults.py",
    "cloud/test_local_market.py",
    "dashboard/test_machines.py",
    "dashboard/test_pages.py",
    "dashboard/test_states.py",
    "e2e",
    "fakes",
    "head/test_allocate_rules.py",
    "head/test_bounds.py",
    "head/test_dying_head.py",
    "head/test_interleavings.py",
    "head/test_lease.py",
    "head/test_outbox.py",
    "head/test_sharing.py",
    "image",
    "images/test_build.py",
    "images/test_programs.py",
    "infra",
    "machine/test_private_paths.py",
    "machine/test_systemd.py",
    "node/test_agent.py",
    "node/test_by_hand.py",
    "node/test_gate.py",
    "node/test_jobs.py",
    "node/test_launch.py",
    "node/test_life_signs.py",
    "node/test_network.py",
    "node/test_packages.py",
    "node/test_probe.py",
    "node/test_profiles.py",
    "node/test_regroup.py",
    "node/test_templates.py",
    "node/test_workers.py",
    "node/test_zygote.py",
    "repo/test_fuzz.py",
    "repo/test_gpu_marker.py",
    "scripts/test_cloud_site.py",
    "scripts/test_makefile.py",
    "scripts/test_mlflow.py",
    "scripts/test_operator.py",
    "scripts/test_tensorboard.py",
    "simulate/test_promises.py",
    "train",
)

CLOUDS = "\npytestmark = pytest.mark.clouds"  # of a module: none of its tests runs but with `-m clouds`


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    from tests.e2e.browser import browser  # not at the top: few tests need it

    with browser() as found:
        yield found


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--gpu", action="store_true", help="run the tests marked gpu alone; fail without a CUDA device")
    parser.addoption("--fast", action="store_true", help="leave out the folders and files in SLOW of tests/conftest.py")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--gpu"):
        config.option.markexpr = "gpu"
    else:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # tests share this computer's GPUs only if they are made for that
    gc.disable()  # until all modules are imported: they stay, so to search them for garbage takes time for nothing
    # How long an example takes depends on what else runs. Otherwise as hypothesis has it, with its own profile in CI.
    settings.register_profile("tests", settings(), deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("tests")
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # several tests at a time share the cores
    if not hasattr(config, "workerinput"):  # workers inherit the environment
        os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", tempfile.gettempdir())  # `tmp_path` stays, to look at failures
        folder = tempfile.mkdtemp(prefix="spotrun-tests-")
        os.environ[SHARED] = folder
        # After multiprocessing has removed a folder of its own in it, which has the priority -100.
        util.Finalize(None, shutil.rmtree, args=(folder,), kwargs={"ignore_errors": True}, exitpriority=-200)
    # Tests kill processes, which leave their temporary files. The path is short: some of these files are sockets.
    temporary = Path(os.environ[SHARED]) / getattr(config, "workerinput", {}).get("workerid", "main")
    temporary.mkdir(exist_ok=True)
    os.environ["TMPDIR"] = tempfile.tempdir = str(temporary)


@pytest.hookimpl(optionalhook=True)  # of pytest-xdist: how many workers `-n auto` starts
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """Twice the cores: tests that start processes wait for most of their time. The fast ones do not."""
    cores = len(os.sched_getaffinity(0))
    return cores if config.getoption("--fast") else 2 * cores


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out what is slow, and modules of which no test would run: each worker imports all that are collected."""
    if config.getoption("--fast") and str(collection_path.relative_to(Path(__file__).parent)) in SLOW:
        return True
    if config.option.markexpr == "not clouds" and collection_path.suffix == ".py":
        return CLOUDS in collection_path.read_text() or None
    return None


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()
    # A test module that imports the tasks has made Ctrl-C end this process at once.
    if module := sys.modules.get("scripts.ctrl_c"):
        module.raise_again()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    items[:] = spread(items, getattr(config, "workerinput", {}).get("workercount", 1))
    wanted = [(item, mark) for item in items if (mark := item.get_closest_marker("gpu"))]
    if not wanted:
        return
    import torch  # not at the top: most tests do without, and this takes seconds

    devices = torch.cuda.device_count()  # asks NVML: forks can use CUDA after that
    if not devices and config.getoption("--gpu"):
        raise pytest.UsageError("--gpu: torch finds no CUDA device on this machine: `nvidia-smi` says why")
    for item, mark in wanted:
        if reason := missing(int(mark.kwargs.get("devices", 1)), devices):
            item.add_marker(pytest.mark.skip(reason=reason))


def spread(items: list[pytest.Item], workers: int) -> list[pytest.Item]:
    """The end-to-end tests, which take longest, come first in the shares of half of the workers.

    `--dist worksteal` gives each worker an equal share of the list, in order.
    """
    long = [item for item in items if "e2e" in item.path.parts]
    found = [item for item in items if "e2e" not in item.path.parts]
    lanes = max(1, workers // 2)
    for lane in range(lanes):
        share = long[len(long) * lane // lanes : len(long) * (lane + 1) // lanes]
        start = len(items) * 2 * lane // workers
        found[start:start] = share
    return found


def missing(needs: int, devices: int) -> str:
    """Why a test that needs so many devices cannot run; empty if it can. devices: 0 also means that they are hidden."""
    if needs <= devices:
        return ""
    if not devices:
        return f"needs {'a CUDA device' if needs == 1 else f'{needs} CUDA devices'}: `make test-gpu` runs it"
    return f"needs {needs} CUDA devices; this machine has {devices}"
