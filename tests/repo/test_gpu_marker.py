"""The marker `gpu`: skipped without CUDA, except where the tests for CUDA were asked for."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import missing

ROOT = Path(__file__).parents[2]
TESTS = """
import pytest

@pytest.mark.gpu
def test_one(): pass

@pytest.mark.gpu(devices=2)
def test_two(): pass

def test_none(): pass
"""


def run(folder: Path, devices: int, *words: str) -> subprocess.CompletedProcess[str]:
    """pytest on a machine whose torch finds that many devices."""
    (folder / "conftest.py").write_text((ROOT / "tests/conftest.py").read_text())
    (folder / "test_it.py").write_text(TESTS)
    (folder / "torch.py").write_text(f"class cuda:\n    device_count = lambda: {devices}\n")
    command = [sys.executable, "-m", "pytest", "-q", "-c", str(ROOT / "pyproject.toml"), "-p", "no:cacheprovider"]
    return subprocess.run([*command, str(folder), *words], cwd=folder, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    ("needs", "devices", "reason"),
    [
        (1, 0, "needs a CUDA device: `make test-gpu` runs it"),
        (2, 1, "needs 2 CUDA devices; this machine has 1"),
        (2, 2, ""),
    ],
    ids=["one of none", "two of one", "two of two"],
)
def test_why_a_test_is_skipped(needs: int, devices: int, reason: str) -> None:
    assert missing(needs, devices) == reason


def test_only_tests_for_cuda_run_where_they_were_asked_for(tmp_path: Path) -> None:
    done = run(tmp_path, 1, "--gpu")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 passed, 1 skipped, 1 deselected" in done.stdout


def test_no_device_is_a_failure_where_cuda_was_asked_for(tmp_path: Path) -> None:
    done = run(tmp_path, 0, "--gpu")
    assert done.returncode != 0
    assert "no CUDA device" in done.stdout + done.stderr
