"""One seed of the soak, as `make soak` runs it. The others take too long for each change."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
SEED = 5  # two nodes with a GradScaler; one is preempted


def test_a_seed_holds(tmp_path: Path) -> None:
    words = [
        "--runs",
        "1",
        "--seed",
        str(SEED),
        "--keep",
        str(tmp_path / "keep"),
        "--out",
        str(tmp_path / "RESULTS.md"),
    ]
    done = subprocess.run(
        [sys.executable, "-m", "bench.soak", *words], cwd=ROOT, capture_output=True, text=True, timeout=800
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"seed {SEED}: scaler, 2 nodes: preempt rank 1 5 s at 75%" in done.stdout
    assert "1 runs, seeds 5 to 5: 1 held, 0 failed." in (tmp_path / "RESULTS.md").read_text()
    assert [path.name for path in (tmp_path / "keep").iterdir()] == ["outcomes.jsonl"]
    again = subprocess.run(
        [sys.executable, "-m", "bench.soak", *words, "--resume"], cwd=ROOT, capture_output=True, text=True, timeout=800
    )
    assert again.returncode == 0, again.stdout + again.stderr
    assert f"seed {SEED}: scaler" not in again.stdout
    assert "1 runs, seeds 5 to 5: 1 held, 0 failed." in again.stdout
